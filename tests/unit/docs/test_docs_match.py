"""README and docs name what is there: files behind links, commands with their options, modules, targets of make, settings."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import json_format
from pydantic import BaseModel
from typer.main import get_command

from cluster.cli import SAMPLE, app
from paceline.config import DrafterConfig, PacelineConfig, PlanRule
from paceline.v1 import router_pb2
from router.plan import PlanTable
from router.task_rules import TaskNamer

ROOT = Path(__file__).parents[3]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "deploy/trial/README.md", "training/README.md")
    ),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "log.md"),
]
ANY_NAME = {"draft.drafters": DrafterConfig, "router.plans": PlanRule}
"""Tables whose entries have names of their own."""
SECTIONS = tuple(PacelineConfig.model_fields)


def lines_of_commands(page: Path) -> Iterator[str]:
    """What a reader may type: lines behind a prompt, and inline code that begins with a program."""
    text = page.read_text(encoding="utf-8")
    for fence in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        joined = re.sub(r"\\\n\s*", " ", fence)
        yield from (line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ "))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))


def words_of(line: str) -> list[str]:
    """As the shell would part them, comments left out."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Files and headings within the project."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, _heading = target.partition("#")
        assert not path or (page.parent / path).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_the_options_that_are_named(page: Path) -> None:
    """Of ``paceline``, of modules that are run, and of make."""
    targets = set(
        re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    for line in lines_of_commands(page):
        words = words_of(line)
        match words:
            case ["paceline", *arguments] if arguments and arguments != ["..."]:
                fault = _wrong_for_paceline(arguments)
            case ["python", "-m", module, *arguments]:
                fault = _wrong_for_module(module, arguments)
            case ["make", target, *_]:
                fault = "" if target in targets else f"no target {target}"
            case _:
                continue
        assert not fault, f"{page.name}: {line}: {fault}"


@pytest.mark.parametrize("package", ["benchmarks", "evaluation", "training", "deploy", "gates"])
def test_modules_say_how_they_are_run(package: str) -> None:
    """The commands in a module's docstring exist, with their options."""
    for source in sorted((ROOT / package).rglob("*.py")):
        said = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        for line in re.findall(r"python -m ([a-z_.]+(?: +[-\w\[].*)?)", said):
            module, *arguments = words_of(re.sub(r"[][`]", " ", line.partition("   ")[0]))
            fault = _wrong_for_module(module, arguments)
            assert not fault, f"{source.relative_to(ROOT)}: {line}: {fault}"


def _wrong_for_paceline(arguments: list[str]) -> str:
    command = get_command(app)
    names = iter(arguments)
    for name in names:
        if name.startswith("-"):
            break
        inner = getattr(command, "commands", None)
        if inner is None:
            break
        if name not in inner:
            return f"no command {name}"
        command = inner[name]
    known = {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= {"--help", "-h"}
    named = {word.partition("=")[0] for word in arguments if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)}
    return ", ".join(sorted(named - known))


def _wrong_for_module(module: str, arguments: list[str]) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return "no such module"
    if not spec.origin.startswith(str(ROOT)):
        return ""
    origin = Path(spec.origin)
    sources = [origin.with_name("__main__.py")] if origin.name == "__init__.py" else [origin]
    if module.split(".")[0] in {"router", "verify_service", "draft_service"}:
        sources = [ROOT / "paceline" / "serving" / "main.py"]
    strings = {
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    named = {word.partition("=")[0] for word in own if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)}
    return ", ".join(sorted(named - strings))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_are_named_exist(page: Path) -> None:
    """In inline code and in what is typed; a module that is run is none."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(rf"(?<![\w./])(?<!-m )((?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+)(?![\w/])", text):
        assert _is_setting(name) or name.endswith((".py", ".proto")), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    """By their path in the project, within what all tiers share, or beside the page."""
    bases = (ROOT, page.parent, ROOT / "paceline", ROOT / "paceline" / "engine")
    for code in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
        if re.fullmatch(r"[\w-]+/[\w./-]+\.(?:py|md|toml|proto|yaml|json|cpp|h|npz)", code):
            assert any((base / code).exists() for base in bases), f"{page.name}: {code}"


def _is_setting(name: str) -> bool:
    section: type[BaseModel] = PacelineConfig
    parts = name.split(".")
    for index, part in enumerate(parts, start=1):
        field = section.model_fields.get(part)
        if field is None:
            return False
        table = ANY_NAME.get(".".join(parts[:index]))
        if table is not None:
            return len(parts) < index + 2 or parts[index + 1] in table.model_fields
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            section = field.annotation
        elif index < len(parts):
            return False
    return True


def test_the_request_for_grpcurl_is_one() -> None:
    """Its JSON is a request, and what is called is a method."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"REQUEST='(.*)'$", text, re.MULTILINE)
    assert json_format.Parse(body, router_pb2.GenerateRequest()).chat.messages[0].role == "user"
    for service, method in re.findall(r"7440[ /](paceline\.v1\.\w+)/(\w+)", text):
        assert service == router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
        assert method in router_pb2.DESCRIPTOR.services_by_name["RouterService"].methods_by_name


def test_what_a_newcomer_is_told_to_ask_speculates() -> None:
    """The sample of `paceline up` and of the pages is surely of a type that is drafted, at `generate`'s temperature of 0."""
    pages = [page for page in PAGES if any('paceline generate "' in line for line in lines_of_commands(page))]
    assert pages
    for page in pages:
        asked = [words_of(line) for line in lines_of_commands(page) if 'paceline generate "' in line]
        assert {words[words.index("generate") + 1] for words in asked} == {SAMPLE}
    settings = PacelineConfig().router
    named = TaskNamer((), (), settings.task_confidence).name("", "", {}, lambda: SAMPLE)
    assert (named.confidence or 0) > 0.9
    assert PlanTable({}).rule(named.name).mode == "speculative"
