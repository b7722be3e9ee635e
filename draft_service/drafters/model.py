"""A smaller causal model as drafter: batched over sequences, on mirrored KV, drawing with the target's own noise.

Under a sampled law it draws with noise of its own instead, from its ``top_m`` likeliest tokens, and says what from.

A sequence's KV holds what was read last: confirmed tokens and the drafter's own guesses after them. What the verifier
then commits decides how much of it stays:

    read       P P P P a b c        P prompt, a..c guesses (the last guess is never read)
    confirmed  P P P P a x          the verifier took a and put x for b
    kept       P P P P a            truncate; x is read next, and its logits give the next guess

Of a long prompt only the end is read where ``prompt_tokens`` says so: what a small model makes of more is worth less than its time.
Then the KV holds the sequence from some token on, which follows from the length of the prompt alone: opened anew later, a
sequence has the same guesses.

Drafting ahead at level 2 reads the block once more, with all its logits, for the likeliest outcomes; each outcome then
goes on in a KV slot of its own, which starts as a copy. Such slots are lent: a new sequence takes them back.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

import torch

from draft_service.drafters.base import Branch, DraftRequest, Enumeration, Outcome, Sampled, skipped
from paceline.config import DEFAULT_TOP_M, ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.engine.memory import kv_bytes_per_token, weights_bytes
from paceline.errors import CapacityError, ConfigError
from paceline.model_store import resolve_model_dir
from paceline.sampling import TokenRow, choose, likeliest, native_contenders, sample_draft
from paceline.tokenizer import Tokenizer
from paceline.types import DraftDistribution, SamplingParams

# More unread tokens than a round can bring (64 guesses and the target's own) are a prompt. It is read in chunks: large
# ones while all that are open are prompts, else small ones, so that those who draft lose little.
_LONGEST_COMMIT = 65
_CHUNK_ALONE = 256
_CHUNK_BESIDE = 64


@dataclass(slots=True)
class _Slot:
    """The KV slot of one sequence. ``read_ids`` are the tokens in it, the first ``num_confirmed`` beyond doubt.

    They are those of the sequence behind its first ``num_skipped``, which are never read.
    """

    slot: int
    num_skipped: int = 0
    read_ids: list[int] = field(default_factory=list)
    num_confirmed: int = 0
    sampling: SamplingParams | None = None

    def keep_agreed(self, token_ids: Sequence[int], num_hypothetical: int = 0) -> int:
        """Forget what was read and is not among ``token_ids``; the number of tokens that stay in the slot.

        At least one token stays unread: its logits give the first guess. What is hypothetical is not confirmed.
        """
        agreed: int = self.num_confirmed
        skip = self.num_skipped
        most = min(len(self.read_ids), len(token_ids) - skip - 1)
        while agreed < most and self.read_ids[agreed] == token_ids[skip + agreed]:
            agreed += 1
        agreed = min(agreed, most)
        del self.read_ids[agreed:]
        self.num_confirmed = min(agreed, len(token_ids) - skip - num_hypothetical)
        return agreed


@dataclass(slots=True)
class _Draft:
    """One sequence in the present batch."""

    request: DraftRequest
    slot: _Slot
    sampling: SamplingParams
    unread_ids: Sequence[int]
    guesses: list[int] = field(default_factory=list)
    distributions: list[DraftDistribution] = field(default_factory=list)
    ended: bool = False

    @property
    def is_prompt(self) -> bool:
        return len(self.unread_ids) > _LONGEST_COMMIT

    @property
    def wants_more(self) -> bool:
        return not self.ended and len(self.guesses) < self.request.k

    @property
    def samples(self) -> bool:
        return self.request.law.sampled and not self.sampling.greedy

    def answer(self, eos_ids: Set[int]) -> list[int] | Sampled:
        """The guesses, up to the first end of sequence."""
        if not self.samples:
            return self.guesses
        ends = [index + 1 for index, guess in enumerate(self.guesses) if guess in eos_ids]
        most = ends[0] if ends else len(self.guesses)
        return Sampled(self.guesses[:most], tuple(self.distributions[:most]))

    def row(self) -> TokenRow:
        """The next position; the guesses so far count as output, for penalties too."""
        request = self.request
        position = len(request.token_ids) + len(self.guesses)
        if not self.sampling.needs_history:
            return TokenRow(self.sampling, position, (), ())
        prompt, output = request.token_ids[: request.prompt_len], request.token_ids[request.prompt_len :]
        return TokenRow(self.sampling, position, prompt, [*output, *self.guesses])


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A slot lent to one outcome."""

    slot: int
    branch: Branch

    def segment(self, length: int) -> Segment:
        """The token that was assumed or guessed last."""
        last = (self.branch.guesses or self.branch.assumed)[-1]
        return Segment(self.slot, length, [last], 1)


class ModelDrafter:
    """See the module. One KV slot a sequence; all of ``runner`` belongs to the thread that calls ``propose``."""

    slow = True
    max_level = 2
    one_pass = False

    def __init__(
        self, name: str, runner: Runner, *, version: str, top_m: int = DEFAULT_TOP_M, prompt_tokens: int = 0
    ) -> None:
        native_contenders()  # compiled now, not at the first draw
        self.name = name
        self.version = version + (f"-{prompt_tokens}p" if prompt_tokens else "")  # other guesses
        self.prompt_tokens = prompt_tokens
        """Of a prompt only the last so many tokens are read; 0: all."""
        self.max_context = min(runner.info.max_context, runner.kv.capacity)
        self._runner = runner
        self._eos_ids = frozenset(runner.eos_token_ids)
        self._slots: dict[int, _Slot] = {}
        self._top_m = top_m
        self._lent: dict[int, list[_Ahead]] = {}
        self.device = runner.info.device
        self.memory = weights_bytes(runner), kv_bytes_per_token(runner)
        """Bytes of its weights, and of each token of a sequence."""

    @property
    def num_free_slots(self) -> int:
        """Sequences that still fit."""
        return self._runner.kv.num_free

    def open(self, handle: int) -> None:
        """Take a slot. Raises CapacityError when all are taken."""
        slot = self._runner.kv.acquire()
        if slot is None and self._lent:
            for other in list(self._lent):
                self.abandon(other)
            slot = self._runner.kv.acquire()
        if slot is None:
            raise CapacityError(
                f"all {self._runner.kv.num_slots} KV slots of drafter {self.name!r} are taken", 1.0
            )
        self._slots[handle] = _Slot(slot)

    def close(self, handle: int) -> None:
        """Give the slot back."""
        self.abandon(handle)
        slot = self._slots.pop(handle, None)
        if slot is not None:
            self._runner.kv.release(slot.slot)

    @torch.inference_mode()
    def propose(self, batch: Sequence[DraftRequest]) -> list[Outcome]:
        """One forward over what is unread, then one for each further guess, all sequences packed.

        None for a prompt that is not read to its end yet.
        """
        drafts = [self._reconciled(request) for request in batch]
        try:
            active = self._read([draft for draft in drafts if not draft.ended])
            through = {id(draft) for draft in drafts if draft.ended} | {id(draft) for draft in active}
            while active := [draft for draft in active if draft.wants_more]:
                self._guess(active, [draft.guesses[-1:] for draft in active])
        except BaseException:
            for draft in drafts:  # what the failed forward wrote is unknown: read these from the start
                self._runner.kv.truncate(draft.slot.slot, 0)
                draft.slot.read_ids, draft.slot.num_confirmed = [], 0
            raise
        return [draft.answer(self._eos_ids) if id(draft) in through else None for draft in drafts]

    @property
    def end_ids(self) -> frozenset[int]:
        """See ``draft_service.scoring.Foretelling``."""
        return self._eos_ids

    @torch.inference_mode()
    def foretell(self, request: DraftRequest, following: Sequence[int]) -> list[int] | None:
        """See ``draft_service.scoring.Foretelling``: one forward, of a prompt only a chunk."""
        slot, own_vocab = self._slot_of(request), self._runner.info.vocab_size
        if slot.sampling is None:
            slot.sampling = _readable(request.sampling, own_vocab)
        tokens = [*request.token_ids, *following[:-1]]
        known = len(request.token_ids) - 1
        end = next((at for at, token in enumerate(tokens) if token >= own_vocab), len(tokens))
        count = min(len(following), end - known)
        if count < 1:
            return []
        skip = slot.num_skipped
        kept = min(slot.keep_agreed(tokens), known - skip)
        self._runner.kv.truncate(slot.slot, kept)
        del slot.read_ids[kept:]
        slot.num_confirmed = min(slot.num_confirmed, kept)
        reads_prompt = known - skip - kept > _CHUNK_BESIDE
        unread = (
            tokens[skip + kept :][:_CHUNK_BESIDE] if reads_prompt else tokens[skip + kept : known + count]
        )
        try:
            logits = self._runner.forward([Segment(slot.slot, kept, unread, 0 if reads_prompt else count)])
        except BaseException:
            self._runner.kv.truncate(slot.slot, 0)
            slot.read_ids, slot.num_confirmed = [], 0
            raise
        slot.read_ids += unread
        if reads_prompt:
            return None
        logits[:, request.vocab_size :] = -torch.inf
        return choose(logits, [self._row_behind(request, following[:at]) for at in range(count)])

    @torch.inference_mode()
    def enumerate(self, batch: Sequence[Enumeration]) -> None:
        """One forward: the likeliest outcomes of those that have none yet, else a guess for each of their branches."""
        fresh = [one for one in batch if not one.branches]
        going = [
            (one, ahead)
            for one in batch
            if one.branches
            for ahead in self._lent.get(one.request.handle, ())
            if not ahead.branch.ended and len(ahead.branch.guesses) < one.request.k
        ]
        segments = [self._reread(one) for one in fresh]
        segments += [ahead.segment(self._runner.kv.length(ahead.slot)) for _, ahead in going]
        if not segments:
            return
        try:
            logits = self._runner.forward(segments)
        except BaseException:
            for one in batch:
                self.abandon(one.request.handle)
            raise
        at = 0
        for one in fresh:
            count = len(one.block) + 1
            self._branch_out(one, logits[at : at + count])
            at += count
        if going:
            for row, (one, _) in enumerate(going):
                logits[at + row, one.request.vocab_size :] = -torch.inf
            rows = [
                self._row_behind(one.request, [*ahead.branch.assumed, *ahead.branch.guesses])
                for one, ahead in going
            ]
            for guess, (_, ahead) in zip(choose(logits[at:], rows), going, strict=True):
                ahead.branch.guesses.append(guess)
                ahead.branch.ended = guess in self._eos_ids

    def abandon(self, handle: int) -> None:
        """Give the lent slots of a sequence back."""
        for ahead in self._lent.pop(handle, ()):
            ahead.branch.ended = True
            self._runner.kv.release(ahead.slot)

    def _reread(self, enumeration: Enumeration) -> Segment:
        """The last confirmed token and the block once more: their logits are those of every accepted length."""
        request, slot = enumeration.request, self._slot_of(enumeration.request)
        known = len(request.token_ids) - slot.num_skipped - 1
        tokens = [*request.token_ids, *enumeration.block]
        kept = min(slot.keep_agreed(tokens, len(enumeration.block)), known)
        del slot.read_ids[kept:]
        slot.num_confirmed = min(slot.num_confirmed, kept)
        self._runner.kv.truncate(slot.slot, kept)
        unread = tokens[slot.num_skipped + kept :]
        slot.read_ids += unread
        return Segment(slot.slot, kept, unread, len(enumeration.block) + 1)

    def _branch_out(self, enumeration: Enumeration, logits: torch.Tensor) -> None:
        """Lend a slot to each of the likeliest outcomes, as far as there are some."""
        request, block = enumeration.request, enumeration.block
        logits[:, request.vocab_size :] = -torch.inf
        rows = [self._row_behind(request, block[:accepted]) for accepted in range(len(block) + 1)]
        source = self._slots[request.handle]
        lent = self._lent.setdefault(request.handle, [])
        for accepted, candidates in enumerate(likeliest(logits, rows, enumeration.fan + 1)):
            guessed = block[accepted] if accepted < len(block) else None
            for token in [one for one in candidates if one != guessed][: enumeration.fan]:
                branch = Branch((*block[:accepted], token), ended=True)
                enumeration.branches.append(branch)
                slot = self._runner.kv.acquire() if token not in self._eos_ids else None
                if slot is not None:
                    branch.ended = False
                    read = len(request.token_ids) - source.num_skipped + accepted
                    self._runner.kv.copy_prefix(source.slot, slot, read)
                    lent.append(_Ahead(slot, branch))

    def _row_behind(self, request: DraftRequest, guesses: Sequence[int]) -> TokenRow:
        sampling = self._slots[request.handle].sampling or request.sampling
        position = len(request.token_ids) + len(guesses)
        if not sampling.needs_history:
            return TokenRow(sampling, position, (), ())
        prompt, output = request.token_ids[: request.prompt_len], request.token_ids[request.prompt_len :]
        return TokenRow(sampling, position, prompt, [*output, *guesses])

    # --- steps ------------------------------------------------------------------------------------------------

    def _slot_of(self, request: DraftRequest) -> _Slot:
        slot = self._slots[request.handle]
        slot.num_skipped = skipped(self, request.prompt_len)
        return slot

    def _reconciled(self, request: DraftRequest) -> _Draft:
        """Cut the KV to what the verifier confirmed."""
        slot = self._slot_of(request)
        kept = slot.keep_agreed(request.token_ids, request.num_hypothetical)
        self._runner.kv.truncate(slot.slot, kept)
        if slot.sampling is None:
            slot.sampling = _readable(request.sampling, self._runner.info.vocab_size)
        unread_ids = request.token_ids[slot.num_skipped + kept :]
        # A row of the target's head that this model has not got (padding): nothing sensible can follow.
        unreadable = max(unread_ids) >= self._runner.info.vocab_size
        return _Draft(request, slot, slot.sampling, unread_ids, ended=unreadable)

    def _read(self, drafts: Sequence[_Draft]) -> list[_Draft]:
        """Read what is unread, prompts only a chunk; the first guess of those that are through, which are returned."""
        ready = [draft for draft in drafts if not draft.is_prompt]
        pieces = [draft.unread_ids for draft in ready]
        num_prompts = len(drafts) - len(ready)
        budget = _CHUNK_ALONE if num_prompts == len(self._slots) else _CHUNK_BESIDE
        chunks: list[tuple[_Draft, Sequence[int]]] = []
        for draft in drafts:
            if draft.is_prompt and budget:
                piece = draft.unread_ids[:budget]
                budget -= len(piece)
                if len(piece) == len(draft.unread_ids):
                    ready.append(draft)
                    pieces.append(piece)
                else:
                    chunks.append((draft, piece))
        self._guess(ready, pieces, chunks)
        return ready

    def _guess(
        self,
        drafts: Sequence[_Draft],
        pieces: Sequence[Sequence[int]],
        chunks: Sequence[tuple[_Draft, Sequence[int]]] = (),
    ) -> None:
        """One packed forward: ``pieces`` are read and give one guess each, ``chunks`` are only read."""
        segments = [_segment(draft, piece, 1) for draft, piece in zip(drafts, pieces, strict=True)]
        segments += [_segment(draft, piece, 0) for draft, piece in chunks]
        if not segments:
            return
        logits = self._runner.forward(segments)
        for draft, piece in [*zip(drafts, pieces, strict=True), *chunks]:
            draft.slot.read_ids += piece
        if not drafts:
            return
        _exclude_padding(logits, drafts)
        if any(draft.samples for draft in drafts):
            self._draw(drafts, logits)
            return
        for draft, guess in zip(drafts, choose(logits, [draft.row() for draft in drafts]), strict=True):
            draft.guesses.append(guess)
            draft.ended = guess in self._eos_ids

    def _draw(self, drafts: Sequence[_Draft], logits: torch.Tensor) -> None:
        """One guess each, under each one's law; ``logits`` [B, V].

        A sampled block goes on behind an end of sequence and is cut afterwards: were it ready sooner for what was drawn,
        it would be in time more often, and what is verified would no longer be distributed as it says.
        """
        for index, draft in enumerate(drafts):
            part, rows = logits[index : index + 1], [draft.row()]
            if draft.samples:
                base_len = len(draft.request.token_ids)
                [(guess, distribution)] = sample_draft(part, rows, [base_len], self._top_m)
                draft.distributions.append(distribution)
            else:
                guess = choose(part, rows)[0]
                draft.ended = guess in self._eos_ids
            draft.guesses.append(guess)


def _segment(draft: _Draft, piece: Sequence[int], num_logits: int) -> Segment:
    return Segment(draft.slot.slot, len(draft.slot.read_ids), piece, num_logits)


def _exclude_padding(logits: torch.Tensor, drafts: Sequence[_Draft]) -> None:
    """Ids that the target's head has not got are never guessed. Changes ``logits`` [B, V]."""
    for row, draft in enumerate(drafts):
        if draft.request.vocab_size < logits.shape[1]:
            logits[row, draft.request.vocab_size :] = -torch.inf


def _readable(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """Without biases for ids that this model has not got."""
    if all(token < vocab_size for token in sampling.logit_bias):
        return sampling
    kept = {token: bias for token, bias in sampling.logit_bias.items() if token < vocab_size}
    return replace(sampling, logit_bias=kept)


def load_model_drafter(
    name: str,
    model: ModelConfig,
    *,
    layers: int,
    kv_slots: int,
    max_context: int,
    tokenizer: Tokenizer,
    top_m: int = DEFAULT_TOP_M,
    prompt_tokens: int = 0,
) -> ModelDrafter:
    """The drafter of one settings entry. Blocks while the model loads.

    ``tokenizer`` is the target's. Raises ConfigError where the model's own is another one: identity counts, sizes of
    vocabularies do not (heads are padded, and two tokenizers of one size are still two).
    """
    own = Tokenizer.load(resolve_model_dir(model.name))
    if own.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"draft.drafters.{name}: model {model.name!r} has tokenizer {own.fingerprint[:16]}, the target "
            f"has {tokenizer.fingerprint[:16]}; a drafter needs the target's own tokenizer"
        )
    runner = load_runner(model, kv_slots=kv_slots, max_context=max_context, layers=layers)
    version = runner.info.fingerprint[:16] + (f"-{layers}L" if layers else "")
    return ModelDrafter(name, runner, version=version, top_m=top_m, prompt_tokens=prompt_tokens)
