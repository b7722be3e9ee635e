"""Writes a drafter's card from what was measured: ``python -m training.card DIR --acceptance FILE ...``.

``DIR`` is what ``training.export`` wrote, the files are from ``training.evaluate --to``. A text of one's own goes into
``about.md`` in ``DIR`` and opens the card.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.evaluate import acceptance_table


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="training.card", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--acceptance", type=Path, nargs="+", required=True)
    options = parser.parse_args(argv)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in options.acceptance]
    (options.directory / "README.md").write_text(card(options.directory, results), encoding="utf-8")


def card(directory: Path, results: Sequence[dict[str, Any]]) -> str:
    """The card's text."""
    about = json.loads((directory / "drafter.json").read_text(encoding="utf-8"))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    held_out = about["held_out"]
    size = (directory / "model.safetensors").stat().st_size
    opening = directory / "about.md"
    lines = [
        f"# {directory.name}",
        "",
        *(opening.read_text(encoding="utf-8").splitlines() if opening.is_file() else []),
        "",
        f"- target: `{about['target']}`, whose embedding it borrows",
        (
            f"- {config['num_hidden_layers']} layers of width {config['hidden_size']}, a head over {about['head']} of "
            f"{config['vocab_size']} tokens; {size / 1e6:.1f} MB, {about['bits']}"
        ),
        (
            f"- trained {held_out['step']} steps ({held_out['minutes']:.0f} minutes) on {held_out['answers']} texts with "
            f"{held_out.get('answer_tokens', 'an unrecorded number of')} tokens the target spoke or read"
        ),
        f"- loss {held_out['loss']} on held-out prompts, agreement {held_out['agreement']} at temperature 0",
        "",
    ]
    for result in results:
        lines += [
            f"## {result['prompts']} prompts, temperature {result['temperature']}, k = {result['k']}",
            (
                f"{result['answers']} answers, none trained on; version {result['version']}, dtype {result['dtype']}. Accepted "
                "length counts the target's own token; a position's share is of the rounds that reached it."
            ),
            "",
            *acceptance_table(result),
            "",
        ]
        if "guess_ms" in result:
            lines += [
                (
                    f"One guess {result['guess_ms']} ms, one step of the target with one row {result['target_step_ms']} ms, both with "
                    f"{result['threads']} thread(s), context 256: {result['guess_share']} of it."
                ),
                "",
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
