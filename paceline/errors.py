"""One small tree of errors, split by who is to blame; the server interceptor maps it to gRPC status codes.

A message names the field, the value and what would be right.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class PacelineError(Exception):
    """Base of everything Paceline raises on purpose."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request: ``field`` is its path, ``description`` the value and what would be right."""

    field: str
    description: str


class InvalidRequestError(PacelineError):
    """The caller sent something wrong; nothing was started. Maps to INVALID_ARGUMENT with BadRequest details."""

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in self.violations))

    @classmethod
    def single(cls, field: str, description: str) -> "InvalidRequestError":
        """The error for one field."""
        return cls([FieldViolation(field, description)])


class ConfigError(PacelineError):
    """The operator's settings are wrong; the process does not start. Maps to FAILED_PRECONDITION."""


class IncompatiblePeerError(PacelineError):
    """The other tier cannot be worked with (another tokenizer). Maps to FAILED_PRECONDITION."""


class CapacityError(PacelineError):
    """No room now; trying again after ``retry_after_s`` is right. Maps to RESOURCE_EXHAUSTED with RetryInfo."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class PeerLostError(PacelineError):
    """Another tier went away or does not answer. Maps to UNAVAILABLE with RetryInfo."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineError(PacelineError):
    """The caller's deadline passed before the answer was complete. Maps to DEADLINE_EXCEEDED."""


class EngineError(PacelineError):
    """Our own fault: a step failed. Maps to INTERNAL."""
