"""The draft tier's idle time: every text that is over, scored under each of the drafters that the settings name.

    worker threads                                   whoever holds the scored drafter
    a mirror closes --- text ---> each Scorer --->   one piece at a time while nobody asks ---> records ``scores``

Off unless ``draft.scores`` says so. A text that finds the backlog full is dropped and counted. Scoring never makes a question
wait for more than one piece, and gives its memory back to a sequence that needs it.

A quick drafter is scored by a twin made from the same settings: asking changes what look-ups know, and the twin remembers
texts by itself, in the order in which they ended. A slow one is its own scorer, for which nothing is remembered.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric

from draft_service.drafters import Drafter, build_drafters
from draft_service.drafters.base import tidy
from draft_service.drafters.cascade import Cascade
from draft_service.outcomes import words
from draft_service.scoring import Score, Scoring, Text
from paceline.config import PacelineConfig, ScoresConfig
from paceline.errors import CapacityError, ConfigError
from paceline.records import RecordWriter, Schema
from paceline.telemetry.metrics import counter
from paceline.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NAME = "scores"
SCHEMA: Schema = {
    "verify_id": str, "sequence_id": int, "epoch": int, "drafter": str, "version": str, "k": int, "temperature": float,
    "prompt_tokens": int, "output_tokens": int, "matches": [int], "judged": [int], "misses": [int], "output_ids": [int],
}  # fmt: skip

Publish = Callable[[Text, str, Score], None]


@dataclass(slots=True)
class _Job:
    text: Text
    drafter: str
    scoring: Scoring


class Scorer:
    """The texts that wait for the drafters of one worker thread. ``offer`` from any thread, all else on the worker's."""

    def __init__(
        self, drafters: Mapping[str, tuple[Drafter, bool]], config: ScoresConfig, publish: Publish
    ) -> None:
        """``drafters``: each with whether it is a twin, which may remember."""
        self.dropped = 0
        """Texts that found the backlog full, or no room in the drafter."""
        self._drafters = dict(drafters)
        self._k = config.k
        self._most = config.backlog
        self._publish = publish
        self._lock = threading.Lock()
        self._texts: deque[Text] = deque()
        self._num_tokens = 0
        self._left: list[str] = []  # drafters that have yet to see the text at hand
        self._text: Text | None = None
        self._job: _Job | None = None
        self._handles = itertools.count(-1, -1)

    @property
    def has_drafters(self) -> bool:
        """Whether there is anybody to be scored here."""
        return bool(self._drafters)

    @property
    def pending(self) -> bool:
        """Whether there is something to do."""
        return self._job is not None or bool(self._left) or bool(self._texts)

    def offer(self, text: Text) -> None:
        """Score it when there is time."""
        with self._lock:
            if self._num_tokens + len(text.token_ids) > self._most:
                self.dropped += 1
                return
            self._num_tokens += len(text.token_ids)
            self._texts.append(text)

    def piece(self) -> None:
        """A little of it."""
        job = self._job or self._next()
        if job is None:
            return
        try:
            if job.scoring.piece():
                return
        except Exception as error:
            log.error("scoring by drafter %s failed: %s", job.drafter, words(error))
            self._end(job)
            self.dropped += 1
            return
        self._end(job)
        self._publish(job.text, job.drafter, job.scoring.score)

    def give_way(self) -> bool:
        """Give up the text at hand, if there is one: a sequence needs its room. Whether there was."""
        if self._job is None:
            return False
        self._end(self._job)
        self.dropped += 1
        return True

    def _next(self) -> _Job | None:
        if not self._left:
            with self._lock:
                if not self._texts:
                    return None
                self._text = self._texts.popleft()
                self._num_tokens -= len(self._text.token_ids)
            self._left = list(self._drafters)
        assert self._text is not None, "set with what is left"
        name = self._left.pop(0)
        drafter, twin = self._drafters[name]
        scope = self._text.scope if twin else ""
        try:
            scoring = Scoring(drafter, self._text, self._k, next(self._handles), scope=scope)
        except Exception as error:  # no room; or anything else, on the thread that serves everybody
            if not isinstance(error, CapacityError):
                log.error("scoring by drafter %s failed: %s", name, words(error))
            self.dropped += 1
            return None
        self._job = _Job(self._text, name, scoring)
        return self._job

    def _end(self, job: _Job) -> None:
        self._job = None
        drafter, twin = self._drafters[job.drafter]
        try:
            job.scoring.close()
            while twin and tidy(drafter):
                pass
        except Exception as error:
            log.error("drafter %s failed to close a text: %s", job.drafter, words(error))


class SelfScores:
    """What the settings ask for: who is scored where, and the records."""

    def __init__(self, config: PacelineConfig, drafters: Mapping[str, Drafter], tokenizer: Tokenizer) -> None:
        """Raises ConfigError for drafters that are not there, or decide by time."""
        settings = config.draft.scores
        names = settings.drafters or [name for name, one in drafters.items() if not isinstance(one, Cascade)]
        for name in names:
            if name not in drafters:
                raise ConfigError(
                    f"draft.scores.drafters: no drafter {name!r}; there are: {', '.join(drafters)}"
                )
            if isinstance(drafters[name], Cascade):
                raise ConfigError(
                    f"draft.scores.drafters: {name!r} is a cascade, which decides by time; name its members"
                )
        quick = {name: config.draft.drafters[name] for name in names if not drafters[name].slow}
        twins: Mapping[str, Drafter] = {}
        if quick:
            own = config.draft.model_copy(update={"drafters": quick})
            twins = build_drafters(config.model_copy(update={"draft": own}), tokenizer)
        self._settings = settings
        self._versions = {name: drafters[name].version for name in names}
        self.writer = RecordWriter(
            settings,
            NAME,
            header={"version": 1, "token_ids": settings.token_ids, "drafters": self._versions},
            schema=SCHEMA,
            section="draft.scores",
        )
        self.quick = Scorer({name: (twin, True) for name, twin in twins.items()}, settings, self._publish)
        self.slow = Scorer(
            {name: (drafters[name], False) for name in names if drafters[name].slow}, settings, self._publish
        )

    @property
    def while_serving(self) -> bool:
        """Whether texts are scored between the questions of others, too."""
        return self._settings.while_serving

    def offer(self, text: Text) -> None:
        """A text is over."""
        for scorer in (self.quick, self.slow):
            if scorer.has_drafters and text.num_output > 0:
                scorer.offer(text)

    def metrics(self) -> Iterator[Metric]:
        """What is missing in the files."""
        yield counter(
            "paceline_records_lost",
            "Records that were not written: the queue was full, or the disk said no.",
            ("records", "reason"),
            {(NAME, "queue"): self.writer.dropped, (NAME, "disk"): self.writer.lost},
        )
        yield counter(
            "paceline_draft_texts_not_scored",
            "Texts that found the backlog full, no room, or a drafter that failed.",
            (),
            {(): self.quick.dropped + self.slow.dropped},
        )

    def close(self) -> None:
        """Write what waits; texts that are not scored yet are left. Blocks."""
        dropped = self.quick.dropped + self.slow.dropped
        if dropped:
            log.warning("not all texts were scored", extra={"dropped": dropped})
        self.writer.close()

    def _publish(self, text: Text, drafter: str, score: Score) -> None:
        self.writer.put(lambda: self._record(text, drafter, score))

    def _record(self, text: Text, drafter: str, score: Score) -> dict[str, Any]:
        origin = text.origin
        record: dict[str, Any] = {
            "verify_id": origin.verify_id if origin else "",
            "sequence_id": origin.sequence_id if origin else 0,
            "epoch": origin.epoch if origin else 0,
            "drafter": drafter,
            "version": self._versions[drafter],
            "k": score.k,
            "temperature": text.sampling.temperature,
            "prompt_tokens": text.prompt_len,
            "output_tokens": text.num_output,
            "matches": score.matches,
            "judged": score.judged,
        }
        if self._settings.token_ids:
            record |= {"misses": score.misses, "output_ids": list(text.token_ids[text.prompt_len :])}
        return record
