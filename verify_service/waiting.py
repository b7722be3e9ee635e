"""The line of sequences that wait for memory: by priority, within one priority by turns among tenants.

A tenant that sends a thousand requests at once delays its own, not those of the others: each tenant has a line of its own, and
the lines take turns.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator

from verify_service.sequence import Sequence


class WaitingLine:
    """Who is next. Higher ``priority`` first; tenants in turn; first come, first served within a tenant."""

    def __init__(self) -> None:
        self._lines: dict[int, OrderedDict[str, deque[Sequence]]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for priority in sorted(self._lines, reverse=True):
            for line in self._lines[priority].values():
                yield from line

    def add(self, sequence: Sequence, *, in_front: bool = False) -> None:
        """At the end of its tenant's line, or in front of it for one that was running already."""
        tenants = self._lines.setdefault(sequence.spec.priority, OrderedDict())
        line = tenants.setdefault(sequence.spec.tenant, deque())
        if in_front:
            line.appendleft(sequence)
        else:
            line.append(sequence)
        self._length += 1

    def first(self) -> Sequence | None:
        """The next one, still in line."""
        if not self._lines:
            return None
        tenants = self._lines[max(self._lines)]
        return next(iter(tenants.values()))[0]

    def pop(self) -> Sequence:
        """Take the next one out; its tenant's turn comes again after the other tenants'."""
        sequence = self.first()
        assert sequence is not None, "somebody waits"
        tenants = self._lines[sequence.spec.priority]
        tenants.move_to_end(sequence.spec.tenant)
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take one out, wherever it stands."""
        tenants = self._lines[sequence.spec.priority]
        line = tenants[sequence.spec.tenant]
        line.remove(sequence)
        self._length -= 1
        if not line:
            del tenants[sequence.spec.tenant]
        if not tenants:
            del self._lines[sequence.spec.priority]
