"""Text to token ids and back, exactly as the model's own tokenizer does it, without torch or transformers.

Two rules make it safe to serve with:

- Text that came from a user never yields a special token: ``<|im_end|>`` in a message is encoded as the ten ordinary
  characters it is. Only the text of the chat template itself may hold special tokens.
- Incremental decoding shows only what later tokens cannot change, so a character whose bytes are split over several
  tokens appears whole, and the pieces joined are the text decoded at once.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import ConfigError, InvalidRequestError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_PRIVATE_USE = range(0x10FFFD, 0x100000, -1)


class DecodeStream(Protocol):
    """Decodes one sequence token by token."""

    def push(self, token_id: int) -> str:
        """The text that became certain with ``token_id``; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What was held back; incomplete bytes become U+FFFD, as in decoding at once. Call at the end."""
        ...


class Tokenizer:
    """The tokenizer of one model directory. Immutable after loading; may be used from several threads."""

    def __init__(self, directory: Path) -> None:
        """Read tokenizer.json, tokenizer_config.json, the chat template and the end tokens of ``directory``.

        Raises ConfigError when one of them is missing or broken.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{directory}: no tokenizer.json; Paceline needs the model's fast tokenizer there"
            )
        text = path.read_text(encoding="utf-8")
        try:
            spec = json.loads(text)
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path}: not a tokenizer of the tokenizers library: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # special tokens in text are ordinary text
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._special_of_text = {added[i].content: i for i in sorted(self.special_ids, reverse=True)}
        self._special_pattern = _pattern_of([added[i] for i in self.special_ids])
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = 1 + max(vocabulary.values())
        """One more than the largest token id; a model's own vocabulary may be padded beyond it."""
        self._byte_level = _is_byte_level(spec)
        self._token_bytes = _token_bytes(vocabulary, self.vocab_size, byte_level=self._byte_level)
        self._byte_ids = frozenset(i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
        self.longest_token_bytes: int = max(map(len, self._token_bytes))
        self.fingerprint: str = _fingerprint(spec)
        settings = _read_json(directory / "tokenizer_config.json")
        self._template_tokens = {
            key: _token_text(value) for key, value in settings.items() if key.endswith("_token") and value
        }
        self.eos_token_ids: tuple[int, ...] = self._read_eos_token_ids(directory)
        self._template = _compile_template(directory, settings)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """The tokenizer of a model directory in the transformers layout."""
        return cls(directory)

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` can be used."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, nothing added; special tokens in it are ordinary text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of a conversation of (role, content), in the model's chat template, up to the answer.

        Raises InvalidRequestError when the model has no template or its template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError.single(
                "messages", "this model has no chat template; send text or token ids instead"
            )
        # Special tokens in what the user wrote are hidden from the split below behind characters that nobody used.
        mark = _unused_character(text for message in messages for text in message)
        hide = re.compile("|".join(map(re.escape, self._special_by_length())) or r"(?!)")
        texts = list(self._special_of_text)
        hidden = {text: f"{mark}{index}{mark}" for index, text in enumerate(texts)}
        guarded = [
            {
                "role": hide.sub(lambda found: hidden[found.group()], role),
                "content": hide.sub(lambda found: hidden[found.group()], content),
            }
            for role, content in messages
        ]
        try:
            rendered = self._template.render(
                messages=guarded,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._template_tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequestError.single(
                "messages", f"the chat template refuses them: {error}"
            ) from error
        show = re.compile(f"{mark}(\\d+){mark}")
        ids: list[int] = []
        end = 0
        for special in self._special_pattern.finditer(rendered):
            ids += self.encode(
                show.sub(lambda found: texts[int(found.group(1))], rendered[end : special.start()])
            )
            ids.append(self._special_of_text[special[special.lastindex or 0]])
            end = special.end()
        return ids + self.encode(show.sub(lambda found: texts[int(found.group(1))], rendered[end:]))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ``ids``. Ids outside the vocabulary (padding of a model) have no text."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def decode_stream(self) -> DecodeStream:
        """A fresh incremental decoder; special tokens have no text in it."""
        if self._byte_level:
            return _ByteStream(self._token_bytes, self.special_ids)
        return _WindowStream(self, self._byte_ids)

    def id_to_text(self, token_id: int) -> str:
        """One token for people to read, special tokens included; bytes that are no text appear as U+FFFD."""
        if token_id in self.special_ids:
            return self._tokenizer.id_to_token(token_id) or ""
        return self.decode([token_id]) if 0 <= token_id < self.vocab_size else ""

    def token_id(self, token: str) -> int | None:
        """The id of one vocabulary entry, such as ``<|im_end|>``."""
        return self._tokenizer.token_to_id(token)

    def _special_by_length(self) -> list[str]:
        return sorted(self._special_of_text, key=len, reverse=True)

    def _read_eos_token_ids(self, directory: Path) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            found = _read_json(directory / name).get("eos_token_id")
            if found is not None:
                return tuple(int(i) for i in (found if isinstance(found, list) else [found]))
        token = self._template_tokens.get("eos_token")
        found = self.token_id(token) if token else None
        return () if found is None else (found,)


class _ByteStream:
    """Byte-level vocabularies: every token is a run of bytes, so an incremental UTF-8 decoder says what is certain."""

    __slots__ = ("_decoder", "_special_ids", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes], special_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids or not 0 <= token_id < len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Any other decoder: decode a short window with and without the new token; what was added is the new text.

    The window starts one shown piece back, because these decoders treat the first token of a text differently
    (a leading space is dropped). A text that ends in U+FFFD may still become a character, so it waits. So does a run
    of byte tokens: byte fallback judges the run as a whole, so one bad byte at its end spoils the characters before.
    """

    __slots__ = ("_shown", "_tokenizer", "_waits", "_window")

    def __init__(self, tokenizer: "Tokenizer", waits: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._waits = waits
        self._window: list[int] = []
        self._shown = 0  # tokens of the window whose text was given out

    def push(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids or not 0 <= token_id < self._tokenizer.vocab_size:
            return ""
        self._window.append(token_id)
        return "" if token_id in self._waits else self._take(final=False)

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._shown])
        text = self._tokenizer.decode(self._window)
        if len(text) <= len(before) or (text.endswith(_REPLACEMENT) and not final):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text[len(before) :]


def _is_byte_level(spec: dict[str, Any]) -> bool:
    decoder = spec.get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type") for part in parts] == ["ByteLevel"]


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _token_bytes(vocabulary: dict[str, int], size: int, *, byte_level: bool) -> list[bytes]:
    """Bytes of every token id; empty where the vocabulary has a hole."""
    byte_of = _byte_of_character()
    table = [b""] * size
    for token, token_id in vocabulary.items():
        if byte_level and all(character in byte_of for character in token):
            table[token_id] = bytes(byte_of[character] for character in token)
        else:
            table[token_id] = token.encode()
    return table


def _pattern_of(tokens: Sequence[tokenizers.AddedToken]) -> re.Pattern[str]:
    """Finds special tokens in a template's text; some of them swallow the white space beside them."""
    # From the beginning of white space only: tried from each of its characters, a long run would take minutes.
    before = r"(?:(?<!\s)\s+)?"
    parts = [
        (before if token.lstrip else "") + f"({re.escape(token.content)})" + (r"\s*" if token.rstrip else "")
        for token in sorted(tokens, key=lambda token: len(token.content), reverse=True)
    ]
    return re.compile("|".join(parts) or r"(?!)")


def _unused_character(texts: Iterable[str]) -> str:
    used = set().union(*map(set, texts))
    found = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
    if found is None:
        raise InvalidRequestError.single("messages", "use every private character of Unicode; leave one out")
    return found


def _token_text(value: object) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _fingerprint(spec: dict[str, Any]) -> str:
    """Identity of what a token id means: vocabulary, merges, normaliser and added tokens, in one fixed spelling."""
    model = spec.get("model") or {}
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, dict):
        vocabulary = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []]
    added = [
        [token["id"], token["content"], bool(token.get("special"))]
        for token in spec.get("added_tokens") or []
    ]
    identity = [model.get("type"), vocabulary, merges, spec.get("normalizer"), sorted(added)]
    text = json.dumps(identity, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _compile_template(directory: Path, settings: dict[str, Any]) -> Any | None:
    file = directory / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not source:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda layout: datetime.now().astimezone().strftime(layout)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"{directory}: the chat template is broken: {error}") from error


def _tojson(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which a model should not see.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value
