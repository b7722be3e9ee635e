"""A drafter on a simulated device: it knows what the target will say, and says it as often as it is told to.

The agreement is exact in expectation: for each position and the tokens before it, a keyed hash decides whether the guess is
the target's own token (drawn with the request's noise from the source that both share) or another one. So the
acceptance of a block is that of the closed form, (1 - a^(k+1)) / (1 - a) tokens a round, at any temperature.
"""

import time
from collections.abc import Iterator, Sequence

import torch

from draft_service.drafters.base import Branch, DraftRequest, Enumeration
from paceline import simulation
from paceline.config import SimulationConfig
from paceline.engine.simulated import Source
from paceline.sampling import TokenRow, choose, native_contenders
from paceline.sampling.noise import row_key
from paceline.tokenizer import Tokenizer

# Domains of the hash, apart from those of ``paceline.sampling``.
_AGREES, _RANK, _OTHER = 1001, 1002, 1003
_UNIT = 2.0**-64


class SimulatedDrafter:
    """See the module."""

    slow = True
    max_context = 0
    max_level = 2
    device = simulation.MODEL_NAME

    def __init__(self, name: str, config: SimulationConfig, tokenizer: Tokenizer) -> None:
        native_contenders()  # compiled now, not at the first draw
        self.name = name
        self.version = f"simulated-1-{config.agreement:g}"
        self._config = config
        self._pair = simulation.pair_of(config)
        self.one_pass = self._pair.one_pass
        self.memory = self._pair.sizes.draft_bytes, self._pair.sizes.draft_kv_bytes
        self._source = Source(tokenizer)
        self._tokenizer = tokenizer
        self._num_read: dict[int, int] = {}
        self._by_task: dict[int, float | None] = {}

    def open(self, handle: int) -> None:
        """Nothing is read yet."""
        self._num_read[handle] = 0

    def propose(self, batch: Sequence[DraftRequest]) -> list[list[int] | None]:
        """``k`` guesses for each, after as much time as the device would take."""
        started = time.monotonic()
        most = max(request.k for request in batch)
        rows = context = 0
        for request in batch:
            rows += len(request.token_ids) - min(self._num_read[request.handle], len(request.token_ids) - 1)
            context += len(request.token_ids)
        cost = self._pair.draft
        passes = 0 if self._pair.one_pass else most - 1
        seconds = cost.seconds(rows, context) + passes * cost.seconds(len(batch), context)
        drafts: list[list[int] | None] = []
        for request in batch:
            guesses: list[int] = []
            for offset in range(request.k):
                guesses += self._candidates(request, guesses, request.offset + offset, 1)
            drafts.append(guesses)
            self._num_read[request.handle] = len(request.token_ids)
        simulation.sleep_until(started + seconds)
        return drafts

    def enumerate(self, batch: Sequence[Enumeration]) -> None:
        """One forward: first the outcomes, from the logits of the block and of the bonus, then a guess for each branch."""
        started = time.monotonic()
        rows = context = 0
        for enumeration in batch:
            request, block = enumeration.request, enumeration.block
            context += len(request.token_ids)
            if not enumeration.branches:
                enumeration.branches = self._outcomes(request, block, enumeration.fan)
                rows += 1
                continue
            for branch in enumeration.branches:
                rows += 1
                for _ in range(request.k if self.one_pass else 1):
                    prefix = [*branch.assumed, *branch.guesses]
                    branch.guesses += self._candidates(request, prefix, len(branch.guesses), 1)
        simulation.sleep_until(started + self._pair.draft.seconds(rows, context))

    def abandon(self, handle: int) -> None:
        """Nothing is held."""

    def _outcomes(self, request: DraftRequest, block: Sequence[int], fan: int) -> list[Branch]:
        branches = []
        for accepted in range(len(block) + 1):
            right = block[:accepted]
            likeliest = self._candidates(request, right, accepted, fan + 1)
            wrong = block[accepted] if accepted < len(block) else None
            outcomes = [token for token in likeliest if token != wrong][:fan]
            branches += [Branch((*right, token)) for token in outcomes]
        return branches

    def close(self, handle: int) -> None:
        """Forget it."""
        self._num_read.pop(handle, None)
        self._by_task.pop(handle, None)

    def _candidates(
        self, request: DraftRequest, guesses: Sequence[int], offset: int, count: int
    ) -> list[int]:
        """The drafter's ``count`` likeliest tokens after prompt, output and ``guesses``, the likeliest first.

        The target's token is the first with the chance of agreement, else the second with ``second_guess``, and so on.
        """
        position = len(request.token_ids) + len(guesses)
        last_ids = [*request.token_ids[-3:], *guesses][-3:]
        output = (
            [*request.token_ids[request.prompt_len :], *guesses] if request.sampling.needs_history else []
        )
        prompt = request.token_ids[: request.prompt_len] if output else ()
        logits = torch.from_numpy(self._source.logits(last_ids, position)).unsqueeze(0)
        target = choose(logits, [TokenRow(request.sampling, position, prompt, output)])[0]
        key = request.sampling.seed
        for token in last_ids:
            key = row_key(key, token, _AGREES)
        rank = 0
        if row_key(key, position, _AGREES) * _UNIT >= self._agreement(request, position, offset):
            rank, second = 1, self._config.second_guess
            while rank < count and row_key(key, position, _RANK + 16 * rank) * _UNIT >= second:
                rank += 1
        others = self._others(key, position, target, request.vocab_size)
        return [target if index == rank else next(others) for index in range(count)]

    def _others(self, key: int, position: int, target: int, vocab_size: int) -> Iterator[int]:
        size = min(vocab_size, self._source.vocab_size)
        seen = {target}
        index = 0
        while True:
            token = row_key(key, position, _OTHER + 16 * index) % size
            index += 1
            if token not in seen:
                seen.add(token)
                yield token

    def _agreement(self, request: DraftRequest, position: int, offset: int) -> float:
        config = self._config
        rate = self._task_rate(request)
        if rate is None:
            by_position = config.agreement_by_position
            rate = by_position[min(offset, len(by_position) - 1)] if by_position else config.agreement
        return rate + config.drift * (position - request.prompt_len) / 1000

    def _task_rate(self, request: DraftRequest) -> float | None:
        """Of the first word of ``agreement_by_word`` that the prompt holds."""
        if not self._config.agreement_by_word:
            return None
        if request.handle not in self._by_task:
            text = self._tokenizer.decode(request.token_ids[: request.prompt_len])
            found = [rate for word, rate in self._config.agreement_by_word.items() if word in text]
            self._by_task[request.handle] = found[0] if found else None
        return self._by_task[request.handle]
