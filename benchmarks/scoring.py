"""What recording costs a round, and what scoring a drafter costs a position, against asking it.

    python -m benchmarks.scoring --records DIR [--quick] [--drafters distilled suffix ngram]

``DIR`` holds recorded requests with token ids (``verify.records``; ``evaluation.replay_equals_live --keep DIR`` makes some).
Process CPU time, so that it can run beside others; each drafter scores the same texts twice, as scoring does it and by a
question at every position, and both must say the same. The last line is ``RESULT {json}``.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from draft_service.drafters import build_drafters
from draft_service.scoring import Scoring, Text
from evaluation.recordings import load_recording
from evaluation.replay_table import only
from paceline.config import RecordsConfig, load_config
from paceline.model_store import resolve_model_dir
from paceline.records import RecordWriter
from paceline.tokenizer import Tokenizer
from paceline.types import (
    FinishReason,
    Plan,
    ProposalOutcome,
    RoundRecord,
    SamplingParams,
    SpeculativeStats,
    Timings,
)
from verify_service.recording import SCHEMA, Recording
from verify_service.sequence import DecodeSpec, Finished, Run, Sequence

K = 8


class Asked(Scoring):
    """The same by questions, whatever the drafter could do."""

    def piece(self) -> bool:
        return self._ask()


def recording_us(rounds: int, requests: int) -> tuple[float, float]:
    """CPU microseconds of a round: of whoever records, and of the writer's thread."""
    record = RoundRecord(0, 9, 4, 2, 0, 3, ProposalOutcome.USED, "x", 1, 5, *[0.001234567] * 6)
    run = Run(9, (1, 2, 3), record, 1.0, 2.0, 3.0)
    spec = DecodeSpec("r", (1, 2, 3), (), SamplingParams(), 100, frozenset(), Plan.plain("x"))
    end = Finished(FinishReason.LENGTH, Timings(), SpeculativeStats())
    with tempfile.TemporaryDirectory() as directory:
        writer = RecordWriter(
            RecordsConfig(dir=directory, token_ids=True, queue=requests),
            "requests",
            header={},
            schema=SCHEMA,
            section="",
        )
        began, process = time.thread_time(), time.process_time()
        for number in range(requests):
            sequence = Sequence(number, spec, lambda event: None, arrived=0.0)
            recording = Recording(writer, "v", sequence, token_ids=True, drafter_version="1")
            for _ in range(rounds):
                recording.see(run)
            recording.see(end)
            recording.end(4.0)
        own_s = time.thread_time() - began
        writer.close()
        all_s = time.process_time() - process
        assert writer.dropped + writer.lost == 0
    return 1e6 * own_s / (rounds * requests), 1e6 * (all_s - own_s) / (rounds * requests)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="10 texts")
    parser.add_argument("--drafters", nargs="+", default=["distilled", "suffix", "ngram"])
    args = parser.parse_args()
    recording = load_recording([args.records])
    requests = [one for one in recording.requests if one.replayable][: 10 if args.quick else 100]
    texts = [
        Text([*one.prompt_ids, *one.output_ids], len(one.prompt_ids), one.sampling, recording.vocab_size)
        for one in requests
    ]
    positions = sum(text.num_output for text in texts)
    config = load_config(None, [f'model.name="{recording.model}"', "model.threads=1"])
    tokenizer = Tokenizer.load(resolve_model_dir(config.model.name))
    own_us, writer_us = recording_us(60, 200)
    print(f"recording: {own_us:.2f} us a round, {writer_us:.1f} us of the writer's thread")
    figures = {}
    for name in args.drafters:
        took = {}
        found = {}
        for kind in (Scoring, Asked):
            drafter = build_drafters(only(config, [name]), tokenizer)[name]
            began = time.process_time()
            found[kind] = [_scored(kind, drafter, text) for text in texts]
            took[kind] = 1e3 * (time.process_time() - began) / positions
        equal = found[Scoring] == found[Asked]
        print(
            f"{name}: {took[Scoring]:.3f} ms a position, asked {took[Asked]:.3f}; the same: {'yes' if equal else 'NO'}"
        )
        figures[name] = {"score_ms": round(took[Scoring], 4), "ask_ms": round(took[Asked], 4), "equal": equal}
    result = {
        "benchmark": "scoring",
        "quick": args.quick,
        "texts": len(texts),
        "positions": positions,
        "k": K,
        "recording_us_per_round": round(own_us, 2),
        "writer_us_per_round": round(writer_us, 1),
        "drafters": figures,
        "bars": {
            "scores_differ": {
                "value": sum(not one["equal"] for one in figures.values()),
                "sign": "<=",
                "bar": 0,
            }
        },
    }
    print("RESULT " + json.dumps(result))


def _scored(kind, drafter, text):
    scoring = kind(drafter, text, K, -1)
    while scoring.piece():
        pass
    scoring.close()
    return scoring.score


if __name__ == "__main__":
    main()
