"""What is wrong with a request: every wrong field at once, with its path, its value and what would be right.

Choices a serving engineer would look for here:
- ``max_tokens`` beyond what the context leaves is refused, as vLLM refuses it: cutting it would end the output early
  without a word. Only an absent one is cut to what is left.
- A field or enum value that this version does not know is refused: ignoring it would answer another question than asked.
- ``drafter``, ``k`` and ``law`` need ``mode`` speculative: under automatic they would be a wish that may be overruled silently.
- A prompt that cannot fit whatever its tokens are is refused by its size, before it is tokenised.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from paceline.errors import FieldViolation
from paceline.ranges import MAX_K, Violations, sampling_violations, some
from paceline.v1 import common_pb2, router_pb2

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_NAME_CHARACTERS = 128
MAX_METADATA = 32
ROLES = ("system", "user", "assistant")

_SHOWN_CHARACTERS = 40
_WALKED = 4096  # elements of a list that are looked at one by one, even where fewer are allowed


def field_violations(
    request: router_pb2.GenerateRequest,
    *,
    vocab_size: int,
    max_context: int,
    longest_token_bytes: int,
    drafters: Mapping[str, Any],
    task_types: Sequence[str],
) -> list[FieldViolation]:
    """Everything that can be said without tokenising; ``drafters`` are the known names, ``task_types`` too.

    What is too long is refused by its length alone: walking millions of elements would hold up every other request.
    """
    too_long = list(_too_long(request, max_context))
    if too_long:
        return too_long
    return [
        *unknown_field_violations(request),
        *_input(request, vocab_size, max_context, longest_token_bytes),
        *sampling_violations(request.sampling, vocab_size),
        *_limits(request, vocab_size),
        *_decoding(request.decoding, drafters),
        *_names(request, task_types),
    ]


def budget(
    request: router_pb2.GenerateRequest, prompt_tokens: int, *, max_context: int, default_max_tokens: int
) -> tuple[int, list[FieldViolation]]:
    """max_tokens in force, and what is wrong with the prompt's length or the number asked for."""
    left = max_context - prompt_tokens
    if left < 1:
        return 0, [
            FieldViolation(
                _input_path(request),
                f"{prompt_tokens} tokens; the context holds {max_context}, one of them for output: at most {max_context - 1}",
            )
        ]
    if not request.HasField("max_tokens"):
        return min(default_max_tokens, left), []
    if request.max_tokens > left:
        return 0, [
            FieldViolation(
                "max_tokens",
                f"{request.max_tokens}; {prompt_tokens} prompt tokens leave {left} of a context of {max_context}",
            )
        ]
    return request.max_tokens, []


def concerns_input(violation: FieldViolation) -> bool:
    """Whether it speaks of the prompt, which then cannot be tokenised."""
    return violation.field.split(".")[0] in {"input", "text", "chat", "tokens"}


def unknown_field_violations(message: Message, path: str = "") -> Violations:
    """Fields that a newer client may have meant something by, here and in the messages below."""
    unknown = UnknownFieldSet(message)
    numbers = sorted({unknown[i].field_number for i in range(len(unknown))})
    if numbers:
        shown = ", ".join(map(str, numbers[:8]))
        yield FieldViolation(
            path or "request",
            f"field number {shown}: not known to this version; leave it out or ask a newer server",
        )
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE or (
            field.message_type is not None and field.message_type.GetOptions().map_entry
        ):
            continue
        name = f"{path}.{field.name}" if path else field.name
        if field.is_repeated:
            for index, element in enumerate(value):
                yield from unknown_field_violations(element, f"{name}[{index}]")
        else:
            yield from unknown_field_violations(value, name)


def _too_long(request: router_pb2.GenerateRequest, max_context: int) -> Violations:
    for path, elements, most in (
        ("chat.messages", request.chat.messages, max_context),
        ("tokens.ids", request.tokens.ids, max_context - 1),
        ("stop", request.stop, MAX_STOPS),
        ("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKEN_IDS),
    ):
        if len(elements) > max(most, _WALKED):
            yield FieldViolation(path, f"{len(elements)} elements; expected at most {most}")


def _input_path(request: router_pb2.GenerateRequest) -> str:
    return {"text": "text", "chat": "chat.messages", "tokens": "tokens.ids"}.get(
        request.WhichOneof("input") or "", "input"
    )


def _input(
    request: router_pb2.GenerateRequest, vocab_size: int, max_context: int, longest_token_bytes: int
) -> Violations:
    form = request.WhichOneof("input")
    path = _input_path(request)
    size = 0
    if form is None:
        yield FieldViolation("input", "missing; give one of text, chat, tokens")
    elif form == "text":
        if not request.text:
            yield FieldViolation(path, "empty; give at least one character")
        size = len(request.text.encode())
    elif form == "chat":
        if not request.chat.messages:
            yield FieldViolation(path, "empty; give at least one message")
        yield from some(_messages(request.chat), path)
        size = sum(len(message.content.encode()) for message in request.chat.messages)
    else:
        ids = request.tokens.ids
        if not ids:
            yield FieldViolation(path, "empty; give at least one token id")
        elif len(ids) >= max_context:
            yield FieldViolation(
                path, f"{len(ids)} ids; the context holds {max_context}: at most {max_context - 1}"
            )
        yield from some(_token_ids(path, ids, vocab_size), path)
    # No token stands for more bytes than the longest one: so many tokens are certain.
    if size > longest_token_bytes * (max_context - 1):
        yield FieldViolation(
            path,
            f"{size} bytes, which is over {size // longest_token_bytes} tokens; the context holds {max_context}: "
            f"at most {max_context - 1}",
        )


def _messages(chat: router_pb2.ChatInput) -> Violations:
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            yield FieldViolation(
                f"chat.messages[{index}].role",
                f"{_shown(message.role)}; expected {', '.join(ROLES[:-1])} or {ROLES[-1]}",
            )
        if not message.content:
            yield FieldViolation(
                f"chat.messages[{index}].content", "empty; give the text of the turn or leave it out"
            )


def _token_ids(path: str, ids: Any, vocab_size: int) -> Violations:
    for index, token_id in enumerate(ids):
        if token_id >= vocab_size:
            yield FieldViolation(f"{path}[{index}]", f"{token_id}; the vocabulary ends at {vocab_size - 1}")


def _limits(request: router_pb2.GenerateRequest, vocab_size: int) -> Violations:
    if request.HasField("max_tokens") and request.max_tokens < 1:
        yield FieldViolation("max_tokens", f"{request.max_tokens}; expected at least 1")
    if len(request.stop) > MAX_STOPS:
        yield FieldViolation("stop", f"{len(request.stop)} strings; expected at most {MAX_STOPS}")
    yield from some(_stops(request.stop), "stop")
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation(
            "stop_token_ids", f"{len(request.stop_token_ids)} ids; expected at most {MAX_STOP_TOKEN_IDS}"
        )
    yield from some(_token_ids("stop_token_ids", request.stop_token_ids, vocab_size), "stop_token_ids")


def _stops(stops: Any) -> Violations:
    for index, stop in enumerate(stops):
        if not stop:
            yield FieldViolation(f"stop[{index}]", "empty; expected at least one character")
        elif len(stop) > MAX_STOP_CHARACTERS:
            yield FieldViolation(
                f"stop[{index}]", f"{len(stop)} characters; expected at most {MAX_STOP_CHARACTERS}"
            )


def _decoding(wish: router_pb2.DecodingOverride, drafters: Mapping[str, Any]) -> Violations:
    if wish.mode not in common_pb2.DecodingMode.values():
        yield FieldViolation(
            "decoding.mode", f"{wish.mode}; expected one of {_enum_words(common_pb2.DecodingMode)}"
        )
    speculative = wish.mode == common_pb2.DECODING_MODE_SPECULATIVE
    for name in ("drafter", "k"):
        if wish.HasField(name) and not speculative:
            yield FieldViolation(
                f"decoding.{name}",
                f"{_shown(getattr(wish, name))}; only with mode {common_pb2.DecodingMode.Name(common_pb2.DECODING_MODE_SPECULATIVE)}",
            )
    if wish.law not in common_pb2.AcceptanceLaw.values():
        yield FieldViolation(
            "decoding.law", f"{wish.law}; expected one of {_enum_words(common_pb2.AcceptanceLaw)}"
        )
    elif wish.law and not speculative:
        yield FieldViolation(
            "decoding.law",
            f"{common_pb2.AcceptanceLaw.Name(wish.law)}; only with mode "
            f"{common_pb2.DecodingMode.Name(common_pb2.DECODING_MODE_SPECULATIVE)}",
        )
    if wish.HasField("drafter") and wish.drafter not in drafters:
        known = ", ".join(sorted(drafters)) or "none now"
        yield FieldViolation("decoding.drafter", f"{_shown(wish.drafter)} is no drafter here; known: {known}")
    if wish.HasField("k") and not 1 <= wish.k <= MAX_K:
        yield FieldViolation("decoding.k", f"{wish.k}; expected 1 to {MAX_K}")


def _names(request: router_pb2.GenerateRequest, task_types: Sequence[str]) -> Violations:
    if request.task_type and request.task_type not in task_types:
        yield FieldViolation(
            "task_type",
            f"{_shown(request.task_type)}; expected one of {', '.join(task_types)}",
        )
    for field, name in (("request_id", request.request_id), ("tenant", request.tenant)):
        if len(name) > MAX_NAME_CHARACTERS:
            yield FieldViolation(field, f"{len(name)} characters; expected at most {MAX_NAME_CHARACTERS}")
        elif not name.isprintable():  # it stands in logs and traces
            yield FieldViolation(field, f"{_shown(name)}; expected printable characters")
    if len(request.metadata) > MAX_METADATA:
        yield FieldViolation("metadata", f"{len(request.metadata)} entries; expected at most {MAX_METADATA}")
    elif any(len(text) > MAX_NAME_CHARACTERS for entry in request.metadata.items() for text in entry):
        yield FieldViolation(
            "metadata", f"expected at most {MAX_NAME_CHARACTERS} characters in a name or value"
        )


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _enum_words(enum: Any) -> str:
    return ", ".join(enum.keys())
