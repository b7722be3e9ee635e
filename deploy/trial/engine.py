"""A container engine for the trial: the one that runs, or one that is brought up here and taken down again.

Where no registry can be reached, images are made of what the distribution's own packages give: a base of ``debootstrap`` under the
name that the Dockerfile asks for, and stand-ins for Jaeger and Grafana. Prometheus is the real one, as Debian packs it.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("PACELINE_TRIAL", tempfile.gettempdir() + "/paceline-trial"))
"""Where an engine that is brought up here keeps its images between trials."""
BASE = "python:3.11-slim-bookworm"
IMAGE = "paceline:local"
THIRD = {
    "jaeger": "jaegertracing/jaeger:2.14.1",
    "grafana": "grafana/grafana:12.3.1",
    "prometheus": "prom/prometheus:v3.5.0",
}
PULL_S = 20
START_S = 30


class NoEngineError(Exception):
    """There is no container engine here and none can be had; the text says what is missing."""


class Docker:
    """The docker command line against one engine."""

    def __init__(self, host: str = "") -> None:
        self.environment = os.environ | ({"DOCKER_HOST": host} if host else {})
        self._compose: list[str] | None = None
        self.environment["DOCKER_BUILDKIT"] = "0"  # what every engine has

    def run(self, *arguments: str, timeout: float = 900, check: bool = True, program: str = "docker") -> str:
        """Standard output of ``docker ARGUMENTS``. Raises RuntimeError with its last words where it failed."""
        done = subprocess.run(
            [program, *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            words = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-15:])
            raise RuntimeError(f"{program} {' '.join(arguments[:4])}: {words}")
        return done.stdout.strip()

    def compose(self, *arguments: str, timeout: float = 60) -> str:
        """``docker compose``: the plugin where docker has it, else the same program by itself."""
        if self._compose is None:
            self._compose = ["compose"] if self.run("compose", "version", check=False) else []
        if self._compose:
            return self.run("compose", *arguments, timeout=timeout)
        return self.run(*arguments, timeout=timeout, program="docker-compose")

    def works(self) -> bool:
        """Whether an engine answers."""
        try:
            self.run("version", "--format", "{{.Server.Version}}", timeout=20)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            return False
        return True

    def has(self, image: str) -> bool:
        """Whether the engine has an image."""
        return bool(self.run("images", "-q", image))

    def pull(self, image: str) -> bool:
        """Fetch an image, if a registry can be reached."""
        try:
            self.run("pull", "-q", image, timeout=PULL_S)
        except (RuntimeError, subprocess.TimeoutExpired):
            return False
        return True


@contextlib.contextmanager
def engine(say: "Say") -> Iterator[Docker]:
    """An engine for the length of the block. Raises NoEngineError."""
    if shutil.which("docker") and (running := Docker()).works():
        say("a container engine runs here")
        yield running
        return
    _install()
    HOME.mkdir(parents=True, exist_ok=True)
    socket = HOME / "docker.sock"
    docker = Docker(f"unix://{socket}")
    with (HOME / "dockerd.log").open("w") as log:
        daemon = subprocess.Popen(
            ["dockerd", "--data-root", str(HOME / "data"), "--exec-root", str(HOME / "exec"),
             "--pidfile", str(HOME / "dockerd.pid"), "--host", f"unix://{socket}"],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + START_S
            while not docker.works():
                if daemon.poll() is not None or time.monotonic() > deadline:
                    tail = (HOME / "dockerd.log").read_text().splitlines()[-3:]
                    raise NoEngineError("dockerd does not start: " + " | ".join(tail))
                time.sleep(0.3)
            say(f"brought up dockerd, pid {daemon.pid}, images in {HOME}")
            yield docker
            docker.run("image", "prune", "-f", check=False)  # of earlier builds: two gigabytes each
        finally:
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _install() -> None:
    """dockerd, from the distribution."""
    if not shutil.which("dockerd"):
        _apt("no container engine runs", "docker.io", "iptables")


def _apt(why: str, *packages: str) -> None:
    if os.geteuid() != 0:
        raise NoEngineError(f"{why}, and only root can install {', '.join(packages)}")
    if not shutil.which("apt-get"):
        raise NoEngineError(f"{why}, and there is no apt-get to install {', '.join(packages)} with")
    install = ["apt-get", "install", "-yq", "--no-install-recommends", *packages]
    for command in (["apt-get", "update", "-q"], install):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False,
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip() or "failed").splitlines()[-1]
            raise NoEngineError(f"{why}; {' '.join(command[:2])}: {last}")


def prepare_images(docker: Docker, say: "Say") -> list[str]:
    """Everything that the stack needs; gives the names of those that stand in for what could not be fetched."""
    stand_ins = []
    arguments = []
    if not docker.has(BASE) and not docker.pull(BASE):
        _base(docker, say)
    if _is_stand_in(docker, BASE):
        stand_ins.append(BASE)
        arguments = ["--build-arg", "TORCH_BACKEND="]  # the wheel lies in the base
    say(f"building {IMAGE}")
    docker.run("build", "-q", *arguments, "-t", IMAGE, ".", timeout=1500)
    for target, image in THIRD.items():
        if docker.has(image) and not _is_stand_in(docker, image):
            continue
        if not stand_ins and docker.pull(image):
            continue
        stand_ins.append(image)
        docker.run(
            "build", "-q", "--label", "paceline.stand-in=yes", "--target", target, "-t", image,
            "-f", "deploy/trial/Dockerfile", "deploy/trial",
        )  # fmt: skip
    return stand_ins


def _is_stand_in(docker: Docker, image: str) -> bool:
    label = '{{index .Config.Labels "paceline.stand-in"}}'
    return docker.run("inspect", "--format", label, image) == "yes"


def _base(docker: Docker, say: "Say") -> None:
    """A minimal Debian with Python under the base image's name, with the CPU build of torch at hand."""
    if os.geteuid() != 0:
        raise NoEngineError(f"no registry for {BASE} can be reached, and debootstrap needs root")
    if not shutil.which("debootstrap"):
        _apt(f"no registry for {BASE} can be reached", "debootstrap")
    say(f"no registry can be reached: making {BASE} with debootstrap")
    with tempfile.TemporaryDirectory(dir=HOME if HOME.exists() else None) as work:
        root = Path(work) / "root"
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root)],
            capture_output=True, text=True, timeout=600, check=True,
        )  # fmt: skip
        (root / "usr/bin/python").symlink_to("python3")
        for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
        wheels = root / "wheels"
        wheels.mkdir(parents=True)
        torch = next(
            line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
        )
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), torch],
            timeout=600, check=True,
        )  # fmt: skip
        # Whom the host trusts and where its pip looks, the containers do too.
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs/ca-certificates.crt")
        if Path("/etc/pip.conf").exists():
            shutil.copy("/etc/pip.conf", root / "etc/pip.conf")
        certificates = "/etc/ssl/certs/ca-certificates.crt"
        changes = [
            f"ENV PIP_FIND_LINKS=/wheels UV_FIND_LINKS=/wheels PIP_CERT={certificates} SSL_CERT_FILE={certificates}",
            "LABEL paceline.stand-in=yes",
            'CMD ["python3"]',
        ]
        packed = Path(work) / "root.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(packed), "."], timeout=300, check=True)
        docker.run(
            "import", *[part for change in changes for part in ("--change", change)], str(packed), BASE
        )


class Say:
    """Prints what is done, with the time since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)
