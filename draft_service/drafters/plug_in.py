"""A drafter from somewhere else: ``kind = "package.module:constructor"`` in the settings. See docs/drafters.md."""

import importlib
from collections.abc import Callable

from draft_service.drafters.base import Drafter
from paceline.config import DrafterConfig, PacelineConfig
from paceline.errors import ConfigError
from paceline.tokenizer import Tokenizer

Constructor = Callable[[str, DrafterConfig, PacelineConfig, Tokenizer], Drafter]
"""Makes the drafter of one settings entry: its name, the entry, all settings, the target's tokenizer. May block."""

_METHODS = ("open", "propose", "close")


def load_plug_in(name: str, entry: DrafterConfig, config: PacelineConfig, tokenizer: Tokenizer) -> Drafter:
    """The drafter that ``entry.kind`` leads to. Raises ConfigError that says at which step it went wrong."""
    where = f"draft.drafters.{name}.kind = {entry.kind!r}"
    path, _, attribute = entry.kind.partition(":")
    try:
        module = importlib.import_module(path)
    except Exception as error:  # a module's top level may raise anything
        raise ConfigError(f"{where}: cannot import {path}: {_words(error)}") from error
    constructor = getattr(module, attribute, None)
    if not callable(constructor):
        raise ConfigError(f"{where}: {path} has no function or class {attribute}")
    try:
        drafter: Drafter = constructor(name, entry, config, tokenizer)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: {attribute} failed: {_words(error)}") from error
    faults = _faults(name, drafter)
    if faults:
        raise ConfigError(f"{where}: what {attribute} gave is no drafter: {'; '.join(faults)}")
    return drafter


def _faults(name: str, drafter: Drafter) -> list[str]:
    """What it lacks of the Protocol, as far as can be told without asking it anything."""
    faults = [f"no method {method}" for method in _METHODS if not callable(getattr(drafter, method, None))]
    if getattr(drafter, "name", None) != name:
        faults.append(f"name is {getattr(drafter, 'name', None)!r}, not {name!r}")
    version = getattr(drafter, "version", None)
    if not (isinstance(version, str) and version):
        faults.append(f"version is {version!r}, not a text")
    max_context = getattr(drafter, "max_context", None)
    if isinstance(max_context, bool) or not isinstance(max_context, int) or max_context < 0:
        faults.append(f"max_context is {max_context!r}, not 0 or a number of tokens")
    if not isinstance(getattr(drafter, "slow", None), bool):
        faults.append(f"slow is {getattr(drafter, 'slow', None)!r}, not True or False")
    return faults


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
