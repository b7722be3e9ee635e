"""The committed stubs are the protocol files' own, and the protocol files keep their rules."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def buf(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """buf from this environment, on this repository."""
    return subprocess.run(
        [Path(sys.executable).parent / "buf", *arguments], cwd=ROOT, capture_output=True, check=False
    )


@pytest.fixture(scope="module")
def compiled() -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """Descriptors compiled from the protocol files, by file name."""
    result = buf("build", "--exclude-source-info", "-o", "-#format=binpb")
    assert result.returncode == 0, result.stderr.decode()
    files = descriptor_pb2.FileDescriptorSet.FromString(result.stdout).file
    for file in files:
        # buf adds an extension of its own to each file and spells out json_name; the stubs' compiler does neither.
        file.DiscardUnknownFields()
        for message in file.message_type:
            forget_json_names(message)
    return {file.name: file for file in files}


def forget_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        forget_json_names(nested)


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_stubs_are_fresh(path, compiled):
    """Each committed stub holds the descriptor of its protocol file; if not, run ``make protos``."""
    name = path.relative_to(ROOT / "protos").as_posix()
    module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    committed = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    assert committed == compiled[name]


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_service_stubs_are_fresh(path, compiled):
    """Each file with services has a gRPC stub that names every method's full path, and no other file has one."""
    name = path.relative_to(ROOT / "protos").as_posix()
    stub = ROOT / (name.removesuffix(".proto") + "_pb2_grpc.py")
    services = compiled[name].service
    assert stub.exists() == bool(services)
    paths = {f"/{compiled[name].package}.{s.name}/{method.name}" for s in services for method in s.method}
    assert paths == (set(re.findall(r"'(/[\w.]+/\w+)'", stub.read_text())) if services else set())


def test_there_are_no_stubs_without_a_protocol_file():
    """A protocol file that was removed took its stubs along."""
    expected = {path.stem for path in PROTOS}
    stubs = {
        re.sub(r"_pb2(_grpc)?$", "", path.stem) for path in (ROOT / "paceline" / "v1").glob("*_pb2*.py*")
    }
    assert stubs == expected


def test_the_protocol_files_pass_buf_lint():
    """buf's STANDARD rules hold."""
    result = buf("lint")
    assert result.returncode == 0, result.stdout.decode()


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_everything_in_the_protocol_is_commented(path):
    """Every message, field, enum, value, service and method has a comment in the line above."""
    lines = path.read_text(encoding="utf-8").splitlines()
    declaration = re.compile(r"^\s*(message|enum|service|rpc|oneof)\s|^\s*[\w.<>, ]+\s=\s\d+;")
    for number, line in enumerate(lines):
        if declaration.match(line):
            assert lines[number - 1].strip().startswith("//"), f"{path.name}:{number + 1}: {line.strip()}"
