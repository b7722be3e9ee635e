"""Devices that nobody has here: what a forward costs on them, and the little language that their models speak.

A simulated model is no model: its forward sleeps as long as a cost table says, and its tokens come from a keyed source
(``paceline.engine.simulated``). Everything around it is the real system: tokenizer, router, scheduler, link, drafts.
Torch-free, because the router needs the tokenizer.
"""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config import SimulationConfig
from paceline.errors import ConfigError

MODEL_NAME = "simulated"
"""``model.name`` of a stack on simulated devices."""
VOCAB_SIZE = 1024
END_IDS = (2,)

_SPIN_S = 0.0003
"""A sleep of the system ends up to so much late; the last bit is waited for awake."""


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """What a forward takes. Up to ``free_rows`` rows the weights have to be read anyway; each further row adds."""

    base_s: float
    free_rows: int
    row_s: float
    context_s: float = 0.0
    """For each position of context that is attended, over all sequences."""

    def seconds(self, rows: int, context: int = 0) -> float:
        """One forward over ``rows`` rows."""
        return self.base_s + max(0, rows - self.free_rows) * self.row_s + context * self.context_s

    def scaled(self, factor: float) -> "DeviceCost":
        """The same device, ``factor`` times slower."""
        return replace(
            self,
            base_s=self.base_s * factor,
            row_s=self.row_s * factor,
            context_s=self.context_s * factor,
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Memory of the device, weights, and KV of a token, in bytes."""

    device_bytes: int
    target_bytes: int
    target_kv_bytes: int
    draft_bytes: int
    draft_kv_bytes: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a drafter. ``one_pass``: a whole block takes one forward, as block and diffusion drafters do."""

    target: str
    drafter: str
    verify: DeviceCost
    draft: DeviceCost
    sizes: Sizes
    one_pass: bool = False

    def draft_seconds(self, k: int, rows: int = 1) -> float:
        """A block of ``k`` guesses for ``rows`` sequences or branches."""
        return self.draft.seconds(rows) * (1 if self.one_pass else k)


# The first pair's times are those of DESIGN section 6. The others are made up at plausible ratios: a forward of few rows
# reads the weights, so it grows with the model; 70B is thought of as spread over several devices.
_1B = DeviceCost(0.006, 16, 0.00005, 5e-9)
_1B_BYTES = 25 * 10**8, 32_768
PAIRS: dict[str, Pair] = {
    "8b+1b": Pair(
        "8b", "1b", DeviceCost(0.028, 64, 0.0001, 2e-8), _1B,
        Sizes(24 * 10**9, 16 * 10**9, 131_072, *_1B_BYTES),
    ),
    "70b+1b": Pair(
        "70b", "1b", DeviceCost(0.065, 64, 0.0004, 5e-8), _1B,
        Sizes(188 * 10**9, 140 * 10**9, 327_680, *_1B_BYTES),
    ),
    "27b+block": Pair(
        "27b", "block", DeviceCost(0.045, 64, 0.0002, 3e-8), DeviceCost(0.008, 32, 0.0001, 5e-9),
        Sizes(80 * 10**9, 54 * 10**9, 196_608, 4 * 10**9, 16_384), one_pass=True,
    ),
}  # fmt: skip


def pair_of(config: SimulationConfig) -> Pair:
    """The pair that the settings name, at their pace. Raises ConfigError for an unknown one."""
    pair = PAIRS.get(config.pair)
    if pair is None:
        raise ConfigError(f"simulation.pair = {config.pair!r}: expected one of {', '.join(sorted(PAIRS))}")
    return replace(
        pair, verify=pair.verify.scaled(config.time_scale), draft=pair.draft.scaled(config.time_scale)
    )


def sleep_until(deadline: float) -> None:
    """Return at monotonic time ``deadline``, within microseconds where the machine has a core to spare."""
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(left - _SPIN_S if left > _SPIN_S else 0.0)


# --- the language -----------------------------------------------------------------------------------------------

TEXT = """
The riders take turns at the front of the line. The rider in front breaks the wind for all the others. When the rider
in front grows tired, she moves aside and lets the line go by. The line goes on without her until she is at its end
again. Nobody waits and nobody is lost. The pace stays the same whoever is in front. A good line is quiet and even. The
small wheel turns fast while the large wheel turns slowly. A short pull at the front is better than a long one. The wind
comes from the left today, so the line leans to the right. In the hills every rider climbs at a pace of her own. On the
way down the heavy riders are faster. The road is wet after the rain and the corners are slow. A rider who guesses the
next corner saves time, and a rider who guesses wrong loses a little. The captain looks back and counts the riders. There
are eight riders in the line this morning. They left the village before the sun was up. The coffee stop is after forty
miles, and the cake there is worth the climb. Every line needs a rule, and the rule is simple: keep the pace, keep the gap,
and tell the others what you see. If you see a hole in the road, point at it. If you hear a car, say so. When the finish
is near the line breaks and everybody rides for herself. The winner is often the one who took the shortest turns. The
others say that it was the wind. Tomorrow the line will be there again, with the same riders and another road.
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model_files(directory: Path) -> None:
    """What stands for the model on disk: a byte-level tokenizer whose words are those of TEXT, and no weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(TEXT.split())], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[1],
        "eos_token": special[2],
        "unk_token": special[0],
        "chat_template": CHAT_TEMPLATE,
    }
    files = {
        "tokenizer_config.json": settings,
        "config.json": {"model_type": "simulated"},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": list(END_IDS)},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
