"""What is wrong with request bytes that protobuf refuses: the path of the field, found by walking the wire format.

Protobuf itself says only "bad UTF-8" or "wire format was corrupt". This runs after it has refused, never on good
requests. https://protobuf.dev/programming-guides/encoding/
"""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from paceline.errors import FieldViolation, InvalidRequestError

_VARINT, _I64, _LEN, _START_GROUP, _END_GROUP, _I32 = range(6)

_MAX_DEPTH = 100  # protobuf's own limit
_MAX_FIELDS = 100_000  # about a tenth of a second of the event loop
_MAX_VIOLATIONS = 16
_MAX_FIELD_NUMBER = 2**29 - 1


class _CorruptError(Exception):
    """The bytes are no message from here on; nothing behind this point can be read."""

    def __init__(self, path: str, description: str) -> None:
        self.violation = FieldViolation(path, description)
        super().__init__(description)


class _EnoughError(Exception):
    """Too many fields or violations to go on."""


def malformed_request(data: bytes, descriptor: Descriptor) -> InvalidRequestError:
    """The error for ``data``, which could not be parsed as ``descriptor``: every string field that is not UTF-8,
    or the place where the bytes stop being a message.
    """
    walk = _Walk(data)
    try:
        walk.message(0, len(data), descriptor, "", 0)
    except _CorruptError as corrupt:
        walk.violations.append(corrupt.violation)
    except _EnoughError:
        pass
    if not walk.violations:
        walk.violations.append(FieldViolation("request", f"not a {descriptor.full_name} message"))
    return InvalidRequestError(walk.violations)


class _Walk:
    """One pass over the bytes. Offsets are absolute, so that nothing is copied."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields_left = _MAX_FIELDS
        self.violations: list[FieldViolation] = []

    def message(self, pos: int, end: int, descriptor: Descriptor, path: str, depth: int) -> None:
        """The fields of the message in ``data[pos:end]``; ``path`` is its own, empty for the request."""
        if depth > _MAX_DEPTH:
            raise _CorruptError(path, f"nested more than {_MAX_DEPTH} messages deep")
        seen: dict[int, int] = {}
        while pos < end:
            number, wire_type, pos = self._tag(pos, end, path)
            field = descriptor.fields_by_number.get(number)
            name = self._name(path, field, seen)
            if wire_type == _LEN:
                size, pos = self._varint(pos, end, name)
                if size > end - pos:
                    raise _CorruptError(name, f"truncated: {size} bytes announced, {end - pos} left")
                if field is not None:
                    self._value(pos, pos + size, field, name, depth)
                pos += size
            else:
                pos = self._skip(pos, end, number, wire_type, name, depth)

    def _value(self, pos: int, end: int, field: FieldDescriptor, name: str, depth: int) -> None:
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                self._data[pos:end].decode()
            except UnicodeDecodeError as error:
                self._violate(
                    name, f"byte 0x{self._data[pos + error.start]:02x} at offset {error.start} is not UTF-8"
                )
        elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            self.message(pos, end, field.message_type, name, depth + 1)

    def _skip(self, pos: int, end: int, number: int, wire_type: int, name: str, depth: int) -> int:
        """The position behind a value that holds no text."""
        if wire_type == _VARINT:
            return self._varint(pos, end, name)[1]
        if wire_type in {_I64, _I32}:
            size = 8 if wire_type == _I64 else 4
            if size > end - pos:
                raise _CorruptError(name, f"truncated: {size} bytes expected, {end - pos} left")
            return pos + size
        if wire_type != _START_GROUP or depth > _MAX_DEPTH:
            raise _CorruptError(name, f"wire type {wire_type} cannot stand here")
        while True:
            inner, inner_type, pos = self._tag(pos, end, name)
            if inner_type == _END_GROUP:
                if inner != number:
                    raise _CorruptError(name, "a group ends that was not begun")
                return pos
            if inner_type == _LEN:
                size, pos = self._varint(pos, end, name)
                if size > end - pos:
                    raise _CorruptError(name, f"truncated: {size} bytes announced, {end - pos} left")
                pos += size
            else:
                pos = self._skip(pos, end, inner, inner_type, name, depth + 1)

    def _tag(self, pos: int, end: int, path: str) -> tuple[int, int, int]:
        self._fields_left -= 1
        if self._fields_left < 0:
            raise _EnoughError
        tag, pos = self._varint(pos, end, path)
        number = tag >> 3
        if not 1 <= number <= _MAX_FIELD_NUMBER:
            raise _CorruptError(path or "request", f"field number {number} does not exist")
        return number, tag & 7, pos

    def _varint(self, pos: int, end: int, path: str) -> tuple[int, int]:
        value = shift = 0
        while pos < end:
            byte = self._data[pos]
            pos += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, pos
            shift += 7
            if shift >= 70:
                raise _CorruptError(path or "request", "a number of more than 10 bytes")
        raise _CorruptError(path or "request", "truncated inside a number")

    def _name(self, path: str, field: FieldDescriptor | None, seen: dict[int, int]) -> str:
        if field is None:
            return path or "request"
        name = f"{path}.{field.name}" if path else field.name
        if not field.is_repeated:
            return name
        index = seen.get(field.number, 0)
        seen[field.number] = index + 1
        return f"{name}[{index}]"

    def _violate(self, name: str, description: str) -> None:
        self.violations.append(FieldViolation(name, description))
        if len(self.violations) >= _MAX_VIOLATIONS:
            raise _EnoughError
