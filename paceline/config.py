"""Settings: one typed, frozen tree. Unknown keys are errors, ``auto`` is resolved before freezing.

A topology file (TOML) holds one section per tier; every process gets its own section and the shared ones. Overrides
have the form ``section.key=value`` with the value in TOML notation (a bare word is taken as a string).
"""

import difflib
import itertools
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from paceline.address import LAST_PORT, address_problem
from paceline.errors import ConfigError


class Section(BaseModel):
    """Base of every section: frozen, closed, strict about types."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: Any, field: ValidationInfo) -> Any:
        kind = cls.model_fields[field.field_name or ""].annotation
        if kind in (int, float) and isinstance(value, bool | str):
            raise ValueError("expected a number")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("holds a NUL character")
        return value


class ModelConfig(Section):
    """Which model, in which precision."""

    name: str = "smollm2"
    """A registry name, a local directory in the transformers layout, or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "w4a8"] = "auto"
    """``w4a8``: weights in the 4-bit or 8-bit blocks of their file, inputs of linear layers rounded to 8 or 16.

    ``auto``: w4a8 on a CPU with AVX2 for models whose outputs have been measured in it (smollm2); else bfloat16 where the device
    computes it in hardware, else float32.
    """
    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda:N``."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """CPU threads of the engine; 0: all cores, shared out by the launcher."""
    runner: Literal["auto", "lean", "reference"] = "auto"
    """``lean``: own forward, Llama-shaped models only. ``reference``: through transformers. ``auto``: lean if possible."""


DEFAULT_TOP_M = 128
DISTILLED_TARGET = "smollm2"
"""The target for which a distilled drafter comes with the project."""
LOOKUP_KINDS = ("ngram", "suffix", "backoff")
DRAFTER_KINDS = ("ngram", "suffix", "backoff", "model", "distilled", "cascade", "random", "simulated")


def _absolute(path: str) -> str:
    """Where the settings were read, not where Ray starts a tier."""
    return str(Path(path).expanduser().absolute()) if path else ""


def _drafter_kind(kind: str) -> str:
    if kind in DRAFTER_KINDS or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", kind):
        return kind
    raise ValueError(f"expected one of {', '.join(DRAFTER_KINDS)}, or package.module:constructor")


class DrafterConfig(Section):
    """One drafter of a draft replica."""

    kind: Annotated[str, AfterValidator(_drafter_kind)]
    """``ngram``: prompt lookup. ``suffix``: look-up in the request and in earlier outputs. ``backoff``: what the target usually
    says after the last three tokens, from a table that ``training`` made. ``model``: a causal model with
    the same tokenizer. ``distilled``: a directory that ``training`` made for the target. ``cascade``: each round the most
    promising one of several drafters. ``random``: for tests. ``simulated``: see ``simulation``. ``package.module:constructor``: your own, see docs/drafters.md."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """For your own: whatever its constructor reads."""
    min_match: Annotated[int, Field(ge=1)] = 2
    """ngram: shortest suffix that counts as a match, in tokens."""
    max_match: Annotated[int, Field(ge=1)] = 8
    """ngram: longest suffix that is looked up, in tokens."""
    pool_mb: Annotated[int, Field(ge=0, le=16_384)] = 256
    """suffix: memory for earlier outputs, in MiB: about 40,000 tokens each; 0: only the request itself is looked up."""
    share: Literal["tenant", "all"] = "tenant"
    """suffix: whose outputs serve whom. ``all``: one tenant's text may be guessed in another's request (never be in its
    output, but timing could tell)."""
    min_probability: Annotated[float, Field(ge=0, le=1)] = 0.05
    """suffix, backoff: a guess ends where the probability of all of it falls below this."""
    members: tuple[str, ...] = ()
    """cascade: names of other entries of ``draft.drafters``."""
    model: ModelConfig | None = None
    """model, distilled: what to load."""
    table: Annotated[str, AfterValidator(_absolute)] = ""
    """backoff: directory of its table; empty: the one that comes with the project, for smollm2."""
    layers: Annotated[int, Field(ge=0)] = 0
    """model: keep only the first so many layers; 0: all."""
    prompt_tokens: Annotated[int, Field(ge=0)] | None = None
    """model, distilled: of a prompt only the last so many tokens are read; 0: all. Unset: what comes with a distilled one (128 for
    smollm2), else all."""
    seed: int = 0
    """random: key of its guesses."""
    place: Literal["auto", "verify", "draft"] = "auto"
    """ngram, suffix, backoff: where they look. ``verify``: beside the target, where a question takes microseconds and no message.
    ``draft``: in the draft tier, like everything else. ``auto``: ``verify``. cascade: ``draft`` puts all its members there."""

    @model_validator(mode="after")
    def _only_lookups_move(self) -> "DrafterConfig":
        if self.place == "verify" and self.kind not in LOOKUP_KINDS:
            raise ValueError(
                f'place "verify" is for kinds {", ".join(LOOKUP_KINDS)}; {self.kind} drafts in the draft tier'
            )
        return self


METRICS_OFFSET = 2000


def _metrics_port(given: object) -> object:
    """Looked at as a whole: of two kinds of value, the error would name each kind beside the setting."""
    port = int(given) if isinstance(given, str) and given.isascii() and given.isdigit() else given
    if port in ("auto", "off") or (type(port) is int and 0 <= port <= LAST_PORT):
        return port
    raise ValueError(f'expected a port from 0 to {LAST_PORT}, "auto" or "off"')


class ServerConfig(Section):
    """Where a tier listens."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: any free port."""
    drain_s: Annotated[float, Field(ge=0)] = 10.0
    """On SIGTERM: time for requests in flight before they are cut."""
    metrics_port: Annotated[int | Literal["auto", "off"], BeforeValidator(_metrics_port)] = "auto"
    """Where ``/metrics`` is, on ``host`` too. ``auto``: ``port`` + 2000, any free port where ``port`` is 0. 0: any free port.
    ``off``: nothing is counted. Replica i of a tier takes this + i."""

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"

    @property
    def metrics_on(self) -> int | None:
        """The port of ``/metrics``, 0 for any free one; None: off."""
        if self.metrics_port == "off":
            return None
        if self.metrics_port != "auto":
            return self.metrics_port
        port = self.port + METRICS_OFFSET if self.port else 0
        return port if port <= LAST_PORT else 0


def _address(address: str) -> str:
    if problem := address_problem(address):
        raise ValueError(problem)
    return address


Address = Annotated[str, AfterValidator(_address)]
"""host:port of another process."""


def _port_unless_said(port: int) -> BeforeValidator:
    """A tier keeps its own default port when only other settings of its ``server`` are given."""
    return BeforeValidator(lambda value: {"port": port} | value if isinstance(value, dict) else value)


class RecordsConfig(Section):
    """Files about what was served (``paceline.records``), one JSON object a line."""

    dir: Annotated[str, AfterValidator(_absolute)] = ""
    """Directory of the files. Empty: nothing is recorded."""
    token_ids: bool = False
    """Prompts and outputs as token ids, too: what a replay needs. Without it nothing of a text is in the files."""
    parquet: bool = False
    """Each finished file as Parquet, too (the extra ``parquet``)."""
    file_mb: Annotated[float, Field(gt=0)] = 64.0
    """A new file is begun at so many megabytes."""
    files: Annotated[int, Field(ge=1)] = 16
    """So many of the newest files of each process stay, those of processes that have ended among them."""
    queue: Annotated[int, Field(ge=1)] = 1024
    """Records that may wait to be written; more are dropped, and counted."""


class ScoresConfig(RecordsConfig):
    """Drafters held against committed texts in idle time (``draft_service.self_scoring``); off without ``dir``."""

    drafters: tuple[str, ...] = ()
    """Those that are scored; empty: all but cascades, which decide by time."""
    k: Annotated[int, Field(ge=1, le=64)] = 8
    """Guesses in a block."""
    backlog: Annotated[int, Field(ge=1)] = 200_000
    """Tokens of texts that may wait for each thread; texts beyond are dropped, and counted."""
    while_serving: bool = False
    """Also between the questions of open sequences, where drafters have a device of their own; else only while none is open."""


class VerifyConfig(Section):
    """The verify tier."""

    server: Annotated[ServerConfig, _port_unless_said(7441)] = ServerConfig(port=7441)
    kv_slots: Annotated[int, Field(ge=1)] = 32
    """Sequences decoded at the same time; each holds one KV slot."""
    max_context: Annotated[int, Field(ge=2)] = 2048
    """Most tokens of prompt and output together; cut to the model's own limit."""
    prefill_chunk: Annotated[int, Field(ge=1)] = 256
    """Most prompt tokens in one forward, over all sequences."""
    max_queue: Annotated[int, Field(ge=0)] = 256
    """Sequences that may wait for a slot; one more is refused."""
    draft_endpoints: tuple[Address, ...] = ()
    """host:port of the draft replicas to link to; none: plain decoding only."""
    draft_wait_s: Annotated[float, Field(ge=0)] = 0.5
    """Longest time a step waits for a proposal."""
    draft_wait_least_s: Annotated[float, Field(ge=0)] = 0.03
    """A row waits for its own proposal at least so long, however quick the drafter usually is: a process that lost its core
    for a time slice is late, not gone. More than ``draft_wait_s`` is as much as that; for checks in which no round may go
    on without its proposal."""
    depth: Literal["adaptive", "fixed"] = "adaptive"
    """``adaptive``: as many draft tokens, up to the plan's k, as give most tokens a second. ``fixed``: always the plan's k."""
    depth_log: Annotated[str, AfterValidator(_absolute)] = ""
    """Directory for a log of what the depths were decided from, a few hundred bytes a round; it replays. Empty: none."""
    cost_budget_s: Annotated[float, Field(ge=0)] = 1.5
    """Time for measuring what steps cost at the first start with a model; 0: measure nothing, learn while serving."""
    draft_level: Literal["auto", "0", "1", "2"] = "auto"
    """Drafting ahead of the verdict. 0: not at all. 1: as if everything were accepted. 2: for several outcomes. ``auto``:
    by measured cost, for each link; 0 where verify and draft share the cores."""
    draft_fan: Annotated[int, Field(ge=1, le=16)] = 3
    """Outcomes at each accepted length, where ``draft_level`` is 2."""
    draft_shares_device: Literal["auto", "yes", "no"] = "auto"
    """Whether a drafter's work slows the target's down. ``auto``: on the same machine, and both on its CPU or the same GPU."""
    stall_s: Annotated[float, Field(gt=0)] = 30.0
    """Health turns NOT_SERVING when work waits and no step has finished for so long."""
    records: RecordsConfig = RecordsConfig()
    """Every request with its rounds."""


class DraftConfig(Section):
    """The draft tier."""

    server: Annotated[ServerConfig, _port_unless_said(7442)] = ServerConfig(port=7442)
    kv_slots: Annotated[int, Field(ge=1)] = 32
    """Sequences mirrored at the same time by a drafter that has memory."""
    max_context: Annotated[int, Field(ge=2)] = 2048
    """Longest sequence that a drafter with memory mirrors."""
    stall_s: Annotated[float, Field(gt=0)] = 30.0
    """Health turns NOT_SERVING when a drafter has been at one batch for so long."""
    scores: ScoresConfig = ScoresConfig()
    """Every drafter's acceptance at every position of what was committed."""
    top_m: Annotated[int, Field(ge=1, le=1024)] = DEFAULT_TOP_M
    """Under the laws ratio and block: a drafter draws from so many of its likeliest tokens, and 8 bytes for each go over
    the link for every guess."""
    drafters: dict[str, DrafterConfig] = Field(
        default_factory=lambda: {
            "cascade": DrafterConfig(kind="cascade", members=("suffix",)),
            "suffix": DrafterConfig(kind="suffix"),
            "ngram": DrafterConfig(kind="ngram"),
        }
    )

    def check_members(self) -> None:
        """Raises ConfigError where a cascade names what is no drafter, or another cascade."""
        known = sorted(name for name, entry in self.drafters.items() if entry.kind != "cascade")
        for name, entry in self.drafters.items():
            unknown = [member for member in entry.members if member not in known]
            if entry.kind == "cascade" and unknown:
                raise ConfigError(
                    f"draft.drafters.{name}.members: {unknown} are no drafters of draft.drafters, or cascades themselves; "
                    f"there are: {known}"
                )

    def beside(self) -> dict[str, tuple[str, ...]]:
        """Drafters that are asked beside the target, at first at least, and the look-ups that this means."""
        lookups = {
            name
            for name, entry in self.drafters.items()
            if entry.kind in LOOKUP_KINDS and entry.place != "draft"
        }
        found: dict[str, tuple[str, ...]] = {name: (name,) for name in lookups}
        for name, entry in self.drafters.items():
            if entry.kind == "cascade" and entry.place != "draft":
                members = tuple(member for member in dict.fromkeys(entry.members) if member in lookups)
                if members:
                    found[name] = members
        return found


class PlanRule(Section):
    """What the policy table says for one type of task."""

    mode: Literal["plain", "speculative"]
    drafter: str = "cascade"
    """The one to prefer, see ``router.drafters``."""
    k: Annotated[int, Field(ge=1, le=64)] = 4
    max_temperature: Annotated[float, Field(ge=0)] = 1e9
    """Hotter requests are decoded plainly."""
    reason: str = ""
    """Shown to people."""


class TaskRule(Section):
    """Names the type of task of the requests it fits; all that is given must fit."""

    task: str
    """A built-in type or one of ``router.task_types``."""
    tenant: str = ""
    """Only requests of this tenant."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """Only requests with these entries in their metadata."""
    contains: tuple[str, ...] = ()
    """Only prompts that hold one of these, upper or lower case alike."""


class LedgerConfig(Section):
    """Where sums of requests are kept, and what they are kept apart by."""

    path: Annotated[str, AfterValidator(_absolute)] = ""
    """SQLite file; empty: in memory, forgotten at the end (``paceline up`` names a file)."""
    endpoint: Annotated[str, AfterValidator(lambda address: address and _address(address))] = ""
    """host:port of a ledger that several routers share; empty: this router keeps its own."""
    server: Annotated[ServerConfig, _port_unless_said(7443)] = ServerConfig(port=7443)
    """Where a shared ledger listens: ``python -m router.ledger``, or under Ray with more than one router."""
    tenant_groups: dict[str, str] = Field(default_factory=dict)
    """Tenants whose requests are counted apart, and as what; all others are counted together."""


class GuardConfig(Section):
    """When speculation is switched off for a type of task and a drafter, and on again."""

    off_acceptance: Annotated[float, Field(ge=0, le=1)] = 0.55
    """Needed acceptance as long as costs are not measured; then the measured break-even."""
    on_acceptance: Annotated[float, Field(ge=0, le=1)] = 0.60
    """Its distance to ``off_acceptance`` is the margin for switching on again."""
    off_speed: Annotated[float, Field(gt=0)] = 1.0
    """Of plain decoding's speed; below it speculation is off."""
    on_speed: Annotated[float, Field(gt=0)] = 1.02
    cool_down_requests: Annotated[int, Field(ge=0)] = 100
    cool_down_s: Annotated[float, Field(ge=0)] = 60.0
    """Whichever is over first ends the cool-down; each switch off within a day doubles both."""
    probe_share: Annotated[float, Field(ge=0, le=1)] = 0.12
    """Of eligible requests that speculate after the cool-down, to see whether it pays again."""
    first_share: Annotated[float, Field(ge=0, le=1)] = 0.03
    """The same for types of task that begin with plain decoding."""

    @model_validator(mode="after")
    def _on_is_above_off(self) -> "GuardConfig":
        for what in ("acceptance", "speed"):
            off, on = getattr(self, f"off_{what}"), getattr(self, f"on_{what}")
            if on < off:
                raise ValueError(
                    f"on_{what} {on:g} is below off_{what} {off:g}: what goes on would go off again"
                )
        return self


def _steps(steps: tuple[float, ...]) -> tuple[float, ...]:
    if not steps or any(a >= b for a, b in itertools.pairwise((0.0, *steps))) or steps[-1] > 1:
        raise ValueError("expected rising shares above 0, at most 1, for example [0.1, 0.5, 1.0]")
    return steps


class RolloutConfig(Section):
    """How speculation comes into use, by type of task (docs/gates.md)."""

    gate: Literal["off", "on"] = "off"
    """``off``: automatic mode tries what is believed to pay, and the guard corrects it. ``on``: a type of task speculates only
    after a passed ``paceline check`` or ``paceline rollout allow``, and its share of requests grows by steps."""
    steps: Annotated[tuple[float, ...], AfterValidator(_steps)] = (0.1, 0.25, 0.5, 1.0)
    """Shares of a type of task that speculate, one after the other."""
    window: Annotated[int, Field(ge=10)] = 40
    """Speculative requests after which the share moves a step."""


class RouterConfig(Section):
    """The router."""

    server: Annotated[ServerConfig, _port_unless_said(7440)] = ServerConfig(port=7440)
    verify_endpoints: tuple[Address, ...] = ("127.0.0.1:7441",)
    default_max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = 256
    law: Literal["coupled", "ratio", "block"] = "coupled"
    """How drafts are accepted where the request does not say. ``coupled``: the tokens of plain decoding, whatever the
    drafter. ``ratio``, ``block``: their distribution only; a few per cent more acceptance at high temperature (docs/laws.md)."""
    resume_s: Annotated[float, Field(ge=0)] = 30.0
    """How long a request whose verify replica is lost may look for another one."""
    plans: dict[str, PlanRule] = Field(default_factory=dict)
    """Policy by task type; overrides the built-in table, ``default`` included. Plain here means always plain."""
    drafters: tuple[str, ...] = ()
    """Drafters to choose from by measured speed, besides the plan's own; empty: only that one."""
    task_types: tuple[str, ...] = ()
    """Types of task besides the built-in ones: requests name them, or ``task_rules`` do."""
    task_rules: tuple[TaskRule, ...] = ()
    """The first that fits names the type of task of a request that does not name it itself; else it is classified."""
    task_confidence: Annotated[float, Field(ge=0, le=1)] = 0.5
    """A classified prompt below this chance of being right is "unsure"."""
    min_expected_tokens: Annotated[int, Field(ge=0)] = 20
    """Requests that will put out fewer tokens are decoded plainly."""
    holdout: Annotated[float, Field(ge=0, le=0.5)] = 0.03
    """Share of requests that are decoded plainly, by lot, to compare with those that are not."""
    holdout_key: str = ""
    """Another key draws other requests."""
    guard: GuardConfig = GuardConfig()
    rollout: RolloutConfig = RolloutConfig()
    ledger: LedgerConfig = LedgerConfig()
    keep_requests: Annotated[int, Field(ge=0, le=100_000)] = 200
    """Requests remembered for ``paceline trace`` and ``paceline explain``."""


class TelemetryConfig(Section):
    """Traces."""

    otlp_endpoint: str = ""
    """OTLP gRPC endpoint, for example http://127.0.0.1:4317; empty: the environment's
    OTEL_EXPORTER_OTLP_ENDPOINT, and without it no spans are made."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of requests traced that bring no decision of their own."""


class TierPlacement(Section):
    """How many replicas of a tier and what each takes under Ray."""

    replicas: Annotated[int, Field(ge=1)] = 1
    num_cpus: Annotated[float, Field(ge=0)] = 0.0
    """Logical CPUs that Ray reserves; 0: placed anywhere."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """Logical share of GPUs; memory is budgeted by each role itself."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources."""


class ClusterConfig(Section):
    """Placement under Ray."""

    ray_address: str = ""
    """Address of a running Ray cluster; empty: start a local one."""
    ready_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest time to wait for all tiers to be healthy."""
    router: TierPlacement = TierPlacement()
    verify: TierPlacement = TierPlacement()
    draft: TierPlacement = TierPlacement()


class SimulationConfig(Section):
    """Simulated devices, where ``model.name`` is "simulated": a forward sleeps, tokens come from a keyed source."""

    pair: str = "8b+1b"
    """Target and drafter whose costs are simulated, see ``paceline.simulation``."""
    agreement: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Chance that a guess is the target's token, given that the guesses before it were."""
    agreement_by_position: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """The same for the first, second ... guess of a block; the last value holds for all later ones."""
    agreement_by_word: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)
    """For prompts that hold this word, so that tasks differ; the first that is found."""
    drift: float = 0.0
    """Added to the agreement for every 1,000 output tokens."""
    second_guess: Annotated[float, Field(ge=0, le=1)] = 0.6
    """Where a guess is wrong: chance that the drafter's next one at that position is right, and again for the next."""
    time_scale: Annotated[float, Field(ge=0)] = 1.0
    """All device times are multiplied by it; 0: no sleep at all."""
    rtt_ms: Annotated[float, Field(ge=0)] = 0.0
    """Round trip between verify and draft that is added to the real one."""
    jitter_ms: Annotated[float, Field(ge=0)] = 0.0
    """Up to so much more for each message, evenly."""


class PacelineConfig(Section):
    """The whole tree."""

    model: ModelConfig = ModelConfig()
    verify: VerifyConfig = VerifyConfig()
    draft: DraftConfig = DraftConfig()
    router: RouterConfig = RouterConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    cluster: ClusterConfig = ClusterConfig()
    simulation: SimulationConfig = SimulationConfig()

    @model_validator(mode="before")
    @classmethod
    def _with_the_targets_own_drafter(cls, tree: Any) -> Any:
        """Unless drafters are named, the default target has the one that was distilled for it."""
        if not isinstance(tree, dict):
            return tree
        model, draft = tree.get("model", {}), tree.get("draft", {})
        if not isinstance(model, dict) or not isinstance(draft, dict):
            return tree
        if model.get("name", DISTILLED_TARGET) != DISTILLED_TARGET or "drafters" in draft:
            return tree
        drafters = {
            "cascade": DrafterConfig(kind="cascade", members=("suffix", "backoff", "distilled")),
            "suffix": DrafterConfig(kind="suffix"),
            "backoff": DrafterConfig(kind="backoff"),
            "distilled": DrafterConfig(kind="distilled"),
            "ngram": DrafterConfig(kind="ngram"),
        }
        return {**tree, "draft": {**draft, "drafters": drafters}}

    def to_toml_lines(self, sections: Collection[str] = ()) -> list[str]:
        """Every setting (of ``sections`` where given) as ``section.key = value``, sorted; together they are TOML again.

        A setting that is absent (None) has no line: TOML has no word for it.
        """
        tree = self.model_dump(include=set(sections) if sections else None, exclude_none=True)
        return sorted(f"{path} = {_toml(value)}" for path, value in _flatten(tree, ""))

    def changed_toml_lines(self, base: "PacelineConfig | None" = None) -> list[str]:
        """Those of ``to_toml_lines`` that are not so in ``base`` (None: the defaults), nor so by default in an entry of one's own."""
        base = base or PacelineConfig()
        own = [
            *_defaults(
                "draft.drafters", DrafterConfig, self.draft.drafters.keys() - base.draft.drafters.keys()
            ),
            *_defaults("router.plans", PlanRule, self.router.plans.keys() - base.router.plans.keys()),
        ]
        usual = {*base.to_toml_lines(), *own}
        return [line for line in self.to_toml_lines() if line not in usual]


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> PacelineConfig:
    """The settings of ``path`` (defaults without one), with ``overrides`` on top.

    Raises ConfigError naming every wrong key, its value and what would be right.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _apply_override(tree, override)
    try:
        return PacelineConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_in_words(one["loc"], one["input"], one["type"], one["msg"]) for one in error.errors()]
        raise ConfigError("wrong settings:\n  " + "\n  ".join(lines)) from error


def _defaults(table: str, entry: type[Section], names: Collection[str]) -> Iterator[str]:
    """What the fields of ``entry`` that need not be given are in each of ``names``, as lines of TOML."""
    optional = {name for name, field in entry.model_fields.items() if not field.is_required()}
    tree = entry.model_construct().model_dump(include=optional, exclude_none=True)
    for name in names:
        for path, value in _flatten(tree, f"{table}.{_key(name)}"):
            yield f"{path} = {_toml(value)}"


def _in_words(location: tuple[int | str, ...], value: object, kind: str, message: str) -> str:
    path = ".".join(map(str, location))
    if kind != "extra_forbidden":
        return f"{path} = {value!r}: {message.removeprefix('Value error, ')}"
    meant = _closest(path)
    return f"{path} = {value!r}: there is no such setting" + (f"; did you mean {meant}?" if meant else "")


def _closest(path: str) -> str:
    """The setting, or the section, whose name is nearest to ``path``; empty where none is near."""
    known = [*_paths(PacelineConfig, "")]
    for table, entry in (("draft.drafters.", DrafterConfig), ("router.plans.", PlanRule)):
        if path.startswith(table):
            known = [*_paths(entry, f"{table}{path.removeprefix(table).partition('.')[0]}.")]
    # A section may be misspelt too, or a setting be sought in another one: then the last part decides.
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    if not near:
        section, _, last = path.rpartition(".")
        known.sort(key=lambda one: not one.startswith(section))  # the same section first
        by_last = {one.rpartition(".")[2]: one for one in reversed(known)}
        near = [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1, cutoff=0.8)]
    return near[0] if near else ""


def _paths(section: type[BaseModel], prefix: str) -> Iterator[str]:
    """Every section and setting below ``section``, those of named tables (drafters, plans) aside."""
    for name, info in section.model_fields.items():
        yield prefix + name
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _paths(info.annotation, f"{prefix}{name}.")


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    node = tree
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {part!r} is a value, not a section")
    node[parts[-1]] = value


def _flatten(node: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        return [
            pair
            for key, child in node.items()
            for pair in _flatten(child, f"{path}.{_key(key)}" if path else _key(key))
        ]
    return [(path, node)]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """A value in TOML notation."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, str):
        # JSON's escapes are TOML's; only DEL must be escaped in TOML and is not in JSON.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)  # numbers, true and false
