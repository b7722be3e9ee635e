"""The whole recipe on a tiny target that is no Llama: answers, training, export, loading, drafting."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from draft_service.drafters import DraftRequest, build_drafters
from draft_service.drafters.base import skipped
from paceline.config import DrafterConfig, ModelConfig, PacelineConfig
from paceline.engine import Segment
from paceline.engine.distilled import load_distilled, told_prompt_tokens
from paceline.engine.weights import open_model
from paceline.errors import ConfigError
from paceline.testing.tiny_models import tiny_model_dir
from paceline.tokenizer import Tokenizer
from paceline.types import SamplingParams
from training import distill, evaluate, export, generate, read
from training.answers import is_held_out, read_shard, whole_shards
from training.distill import new_model
from training.drafter_model import Batch, Rows

TEXTS = [
    "The riders take turns",
    "A list of numbers",
    "def add(left, right)",
    "Der schnelle Läufer",
    "No wind today",
]


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def made(request, tmp_path_factory) -> tuple[Path, Path, Path]:
    """Target, run and drafter directory."""
    root = tmp_path_factory.mktemp(request.param)
    target = tiny_model_dir(root / "target", family=request.param, layers=3)
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 2), encoding="utf-8")
    common = ["--target", str(target)]
    generate.main(
        [*common, "--prompts", str(prompts), "--out", str(root / "answers"), "--tokens", "1500", "--width", "8",
         "--longest", "48", "--shard", "10"]
    )  # fmt: skip
    read.main([*common, "--prompts", str(prompts), "--out", str(root / "read"), "--held-out-every", "3"])
    train = [*common, "--answers", str(root / "answers"), str(root / "read"), "--run", str(root / "run"), "--vocab", "128",
             "--batch-tokens", "300", "--held-out-every", "3", "--eval-steps", "10"]  # fmt: skip
    distill.main([*train, "--steps", "10"])
    distill.main([*train, "--steps", "60", "--tv", "0.5"])
    export.main(["--run", str(root / "run"), "--to", str(root / "drafter"), "--head-bits", "8"])
    return target, root / "run", root / "drafter"


def test_answers_are_the_targets_own(made):
    """A stored greedy answer follows the stored likeliest tokens, and each prompt has answers at several temperatures."""
    _, run, _ = made
    answers = [a for shard in whole_shards(run.parent / "answers") for a in read_shard(shard)]
    assert sum(a.num_answer for a in answers) >= 1500
    assert {a.temperature for a in answers} == {0.0, 0.8, 1.0}
    greedy = [a for a in answers if a.temperature == 0]
    assert all((a.ids[a.prompt_len :] == a.top_ids[:, 0]).all() for a in greedy)


def test_training_resumes_and_learns(made):
    """The second call goes on from the first one's checkpoint, and the held-out loss falls."""
    lines = [json.loads(line) for line in (made[1] / "curve.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0] > 0
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_served_numbers_are_those_of_the_trainer(made, tmp_path):
    """Exported without blocks, the directory computes what the trainer computed; outside its vocabulary is -inf."""
    target, run, _ = made
    directory = tmp_path / "exact"
    export.main(["--run", str(run), "--to", str(directory), "--layer-bits", "32", "--head-bits", "32"])
    saved = torch.load(run / "best.pt", weights_only=True)
    runner = load_distilled(ModelConfig(name=str(directory), dtype="float32"), kv_slots=1, max_context=128)
    ids = list(range(5, 45))
    slot = runner.kv.acquire()
    found = runner.forward([Segment(slot, 0, ids, len(ids))])
    source = open_model(ModelConfig(name=str(target), device="cpu", dtype="float32"))
    model = new_model(source, "first-last", saved["vocab_ids"], torch.device("cpu"))
    model.load_state_dict(saved["weights"], strict=False)
    rows = Rows(torch.tensor(ids), torch.arange(len(ids)), [len(ids)])
    none = Rows(torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long), [0])
    with torch.no_grad():
        expected = model(Batch(none, rows)) @ model.head.T
    inside = found[:, saved["vocab_ids"]]
    assert found.isfinite().sum() == len(ids) * len(saved["vocab_ids"])
    torch.testing.assert_close(inside, expected, atol=1e-3, rtol=1e-3)
    assert "128 tokens" in runner.info.runner_reason


@pytest.mark.parametrize(
    ("told", "given", "read"), [(None, None, 0), (12, None, 12), (12, 0, 0), (12, 30, 30)]
)
def test_how_much_of_a_prompt_it_reads(made, tmp_path, told, given, read):
    """What its directory says, unless the settings say otherwise; all of it where nobody says anything."""
    target, directory = made[0], told_of(made[2], tmp_path, {} if told is None else {"prompt_tokens": told})
    drafter = from_settings(target, directory, prompt_tokens=given)
    assert skipped(drafter, 100) == (100 - read if read else 0)
    assert drafter.version.endswith(f"-{read}p") == bool(read)


@pytest.mark.parametrize("said", [None, 0, 24])
def test_export_writes_how_much_of_a_prompt_to_read(made, tmp_path, said):
    """Only where it was said, and as serving reads it."""
    run, directory = made[1], tmp_path / "drafter"
    argv = ["--run", str(run), "--to", str(directory)]
    export.main(argv if said is None else [*argv, "--prompt-tokens", str(said)])
    assert json.loads((directory / "drafter.json").read_text()).get("prompt_tokens") == said
    assert told_prompt_tokens(directory) == (said or 0)


@pytest.mark.parametrize(
    ("command", "needed"),
    [(export, ["--run", "r", "--to", "t"]), (evaluate, ["--drafter", "d", "--target", "t"])],
)
def test_fewer_tokens_of_a_prompt_than_none_are_refused(command, needed, capsys):
    """By the option, with the value, before anything is read."""
    with pytest.raises(SystemExit):
        command.main([*needed, "--prompt-tokens", "-1"])
    assert "--prompt-tokens is -1" in capsys.readouterr().err


@pytest.mark.parametrize("told", [-1, "128", 1.5, True, None])
def test_a_directory_that_says_nonsense_of_it_is_refused(made, tmp_path, told):
    """By the file and the name, with the value."""
    directory = told_of(made[2], tmp_path, {"prompt_tokens": told})
    with pytest.raises(ConfigError, match=rf"drafter\.json: prompt_tokens is {told!r}"):
        from_settings(made[0], directory)


def told_of(made_in, tmp_path, settings):
    """A copy of a drafter's directory whose drafter.json says this as well."""
    directory = tmp_path / "told"
    shutil.copytree(made_in, directory)
    about = json.loads((directory / "drafter.json").read_text())
    (directory / "drafter.json").write_text(json.dumps(about | settings))
    return directory


def from_settings(target, directory, **settings):
    model = ModelConfig(name=str(directory), dtype="float32")
    entry = DrafterConfig(kind="distilled", model=model, **settings)
    draft = {"drafters": {"own": entry.model_dump()}, "max_context": 256}
    config = PacelineConfig.model_validate({"model": {"name": str(target)}, "draft": draft})
    return build_drafters(config, Tokenizer.load(target))["own"]


def test_it_drafts_from_one_entry_of_the_settings(made):
    """Guesses are ids of the target within the head's vocabulary, at temperature 0 and above."""
    target, run, directory = made
    known = set(torch.load(run / "best.pt", weights_only=True)["vocab_ids"].tolist())
    entry = DrafterConfig(kind="distilled", model=ModelConfig(name=str(directory), dtype="float32"))
    config = PacelineConfig.model_validate(
        {
            "model": {"name": str(target)},
            "draft": {"drafters": {"own": entry.model_dump()}, "max_context": 256},
        }
    )
    drafter = build_drafters(config, Tokenizer.load(target))["own"]
    for temperature in (0.0, 0.8):
        drafter.open(1)
        sampling = SamplingParams(temperature=temperature, seed=3, logit_bias={300: 5.0})
        guesses = drafter.propose([DraftRequest(1, [7, 8, 9, 10], 4, sampling, 4, 512)])[0]
        drafter.close(1)
        assert guesses
        assert set(guesses) <= known


def test_played_as_served(made, capsys):
    """The last line of the evaluation names accepted length by task, for the served directory."""
    target, run, directory = made
    evaluate.main(
        ["--drafter", str(directory), "--target", str(target), "--answers", str(run.parent / "answers"),
         "--held-out-every", "3", "--no-cost"]
    )  # fmt: skip
    line = capsys.readouterr().out.splitlines()[-1]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["mean_length_over_tasks"] >= 1


def test_text_that_was_read_keeps_out_of_the_held_out_prompts(made):
    """Reading takes every prompt but the held-out ones, and says what the target expects within the text."""
    rows = [a for shard in whole_shards(made[1].parent / "read") for a in read_shard(shard)]
    assert rows
    assert not any(is_held_out(a, 3) for a in rows)
    assert all(len(a.top_ids) == a.num_answer for a in rows)


def test_another_tokenizer_is_refused(made, tmp_path):
    """A drafter names its target; one made for another tokenizer does not start."""
    other = tiny_model_dir(tmp_path / "other", tokenizer_vocab=400)
    entry = DrafterConfig(kind="distilled", model=ModelConfig(name=str(made[2]), dtype="float32"))
    config = PacelineConfig.model_validate(
        {"model": {"name": str(other)}, "draft": {"drafters": {"own": entry.model_dump()}}}
    )
    with pytest.raises(ConfigError, match="made for a target"):
        build_drafters(config, Tokenizer.load(other))
