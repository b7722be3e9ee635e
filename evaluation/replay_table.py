"""What replays give, side by side: rounds, tokens a round, acceptance by position, and the speed that the cost table expects."""

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from draft_service.drafters import Drafter, build_drafters
from evaluation.direct_link import VirtualClock
from evaluation.recordings import Recording, Round
from evaluation.replay import PlanOf, Replay, always
from paceline.config import PacelineConfig
from paceline.errors import ConfigError
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer
from paceline.types import Plan
from verify_service import controller
from verify_service.beside import build_beside
from verify_service.steering import Policy


@dataclass(frozen=True, slots=True)
class Figures:
    """One way to decode all requests. ``tokens`` are those of rounds: the first of each request comes with its prompt.

    ``by_position``: of the guesses at each position whose predecessors were right, the share that was right, too.
    ``speed``: over plain decoding, with the recorded costs of steps and the drafters' own time here; None: not estimated.
    """

    name: str
    requests: int
    rounds: int
    tokens: int
    drafted: int
    accepted: int
    by_position: tuple[float, ...]
    speed: float | None = None

    @property
    def tokens_per_round(self) -> float:
        """The target's own token included."""
        return self.tokens / self.rounds

    @property
    def acceptance(self) -> float | None:
        """A ratio of sums."""
        return self.accepted / self.drafted if self.drafted else None

    @classmethod
    def of(cls, name: str, requests: Sequence[Sequence[Round]], speed: float | None = None) -> Self:
        """Sums over the rounds of all requests."""
        rounds = [one for request in requests for one in request]
        most = max((one.drafted for one in rounds), default=0)
        seen = [sum(one.drafted > at and one.accepted >= at for one in rounds) for at in range(most)]
        right = [sum(one.accepted > at for one in rounds) for at in range(most)]
        return cls(
            name,
            len(requests),
            len(rounds),
            sum(one.committed for one in rounds),
            sum(one.drafted for one in rounds),
            sum(one.accepted for one in rounds),
            tuple(r / s for r, s in zip(right, seen, strict=True) if s),
            speed,
        )

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {
            "tokens_per_round": self.tokens_per_round,
            "acceptance": self.acceptance,
        }


def compare(
    recording: Recording,
    config: PacelineConfig,
    drafters: Sequence[str],
    ks: Sequence[int],
    policies: Mapping[str, Policy] | None = None,
) -> Iterator[Figures]:
    """The recorded rounds; then each drafter with each k in every round and with up to so many by each of the policies.

    ``config`` is that of the draft tier. Raises ConfigError for drafters that it has not got, or another target's.
    """
    unknown = [name for name in drafters if name not in config.draft.drafters]
    if unknown:
        raise ConfigError(f"no drafter {unknown[0]!r}; there are: {', '.join(config.draft.drafters)}")
    requests = [one for one in recording.requests if one.replayable]
    if not requests:
        raise ConfigError("nothing to replay: no request was decoded under the law coupled, or has a round")
    yield Figures.of("as recorded", [one.rounds for one in requests])
    plain_s = _decode_s(recording, config, (), lambda _: Plan.plain("replay"))[1]
    for name in drafters:
        for k in ks:
            for title, policy in (("", controller), *(policies or {}).items()):
                plan_of = always(name, k, k_fixed=not title)
                rounds, decode_s = _decode_s(recording, config, (name,), plan_of, policy)
                speed = plain_s / decode_s if decode_s else None
                yield Figures.of(f"{name} k<={k}, {title}" if title else f"{name} k={k}", rounds, speed)


def _decode_s(
    recording: Recording,
    config: PacelineConfig,
    names: Sequence[str],
    plan_of: PlanOf,
    policy: Policy = controller,
) -> tuple[list[tuple[Round, ...]], float]:
    """The rounds of one replay with drafters made afresh, and the requests' decoding times together."""
    clock = VirtualClock()
    drafters: dict[str, Drafter] = {}
    beside = None
    if names:
        tokenizer = Tokenizer.load(resolve_model_dir(config.model.name))
        if tokenizer.fingerprint != recording.tokenizer_fingerprint:
            raise ConfigError(
                f"the recording is of {recording.model!r}, whose tokenizer is not that of model.name = {config.model.name!r}"
            )
        own = only(config, names)
        drafters, beside = (
            build_drafters(own, tokenizer, clock=clock),
            build_beside(own.draft, tokenizer.fingerprint),
        )
    replayed = Replay(recording, drafters, plan_of, beside=beside, clock=clock, policy=policy).run()
    return [one.rounds for one in replayed], sum(one.timings.decode_s for one in replayed)


def policy_at(path: str) -> Policy:
    """``module:name`` as something that decides. Raises ConfigError where it is none."""
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"policy {path!r}: {error}") from error
    for method in ("decide", "trim"):
        if not callable(getattr(found, method, None)):
            raise ConfigError(f"policy {path!r} has no {method}; see verify_service.steering.Policy")
    policy: Policy = found() if isinstance(found, type) else found
    return policy


def only(config: PacelineConfig, names: Sequence[str]) -> PacelineConfig:
    """The settings with just these drafters, and the members of cascades among them."""
    entries = config.draft.drafters
    members = [member for name in names for member in entries[name].members if member in entries]
    chosen = {name: entries[name] for name in entries if name in names or name in members}
    draft = config.draft.model_copy(update={"drafters": chosen})
    return config.model_copy(update={"draft": draft})


def table(rows: Sequence[Figures]) -> list[str]:
    """The rows as lines of at most 100 characters."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'':<{width}}  requests  rounds  tokens/round  acceptance  speed  by position"]
    for row in rows:
        acceptance = "-" if row.acceptance is None else f"{row.acceptance:.3f}"
        speed = "-" if row.speed is None else f"{row.speed:.2f}x"
        positions = " ".join(f"{one:.2f}" for one in row.by_position[:8])
        lines.append(
            f"{row.name:<{width}}  {row.requests:>8}  {row.rounds:>6}  {row.tokens_per_round:>12.3f}  {acceptance:>10}  "
            f"{speed:>5}  {positions}"
        )
    return lines


def notes(recording: Recording) -> list[str]:
    """What whoever reads the table has to know."""
    left_out = sum(not one.replayable for one in recording.requests)
    found = ["speed: over plain decoding, estimated from the recorded step costs; drafting is timed here."]
    found.append("acceptance: accepted over drafted tokens; by position: of those behind right ones.")
    if left_out:
        found.append(f"{left_out} requests left out: under a sampled law, or without a round.")
    if recording.num_dropped:
        found.append(f"{recording.num_dropped} requests are missing: the recording's queue was full.")
    return found


def as_json(recording: Recording, rows: Sequence[Figures]) -> Mapping[str, Any]:
    """All of it."""
    return {
        "model": recording.model,
        "dropped": recording.num_dropped,
        "rows": [row.to_json() for row in rows],
    }
