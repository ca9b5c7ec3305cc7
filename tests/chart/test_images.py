"""The promises of the Dockerfiles, as far as a test can check them without building the images.

Their sources exist and reach the builder. Stages and base images are named before they are used. The last user is
numeric and not root. All packages are pinned by hash, at the versions that the tests run with.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DOCKERFILES = {
    "Dockerfile": {"": "operator"},
    "images/trainer/Dockerfile": {"cpu": "trainer-cpu", "cuda": "trainer-cuda", "serving": "trainer-serving"},
}
KNOWN = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "LABEL", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}


@dataclass
class Stage:
    """One FROM and what follows it."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def of(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]


@dataclass
class Dockerfile:
    """https://docs.docker.com/reference/dockerfile/, as much of it as ours use."""

    arguments: dict[str, str]
    stages: list[Stage]

    @classmethod
    def read(cls, path: Path) -> Dockerfile:
        text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
        made = cls({}, [])
        for line in re.sub(r"\\\n", " ", text).splitlines():
            if not line.strip():
                continue
            instruction, _, rest = line.strip().partition(" ")
            assert instruction in KNOWN, f"{path}: {line}"
            rest = rest.strip()
            if instruction == "FROM":
                found = re.fullmatch(r"(\S+)(?:\s+AS\s+(\S+))?", rest)
                assert found, f"{path}: {line}"
                made.stages.append(Stage(found[2] or "", found[1]))
            elif made.stages:
                made.stages[-1].steps.append((instruction, rest))
            else:
                assert instruction == "ARG", f"{path}: {line}"
                name, _, default = rest.partition("=")
                made.arguments[name] = default
        return made

    def lineage(self, name: str) -> list[Stage]:
        """Returns a stage and those that it is built from."""
        found = [next(s for s in self.stages if s.name == name)]
        while (base := next((s for s in self.stages if s.name and s.name == found[-1].base), None)) is not None:
            found.append(base)
        return found


def ignored(path: str, patterns: list[str]) -> bool:
    """Returns whether .dockerignore keeps a file away: the last pattern that matches it, or a folder of it, wins."""
    parts = path.split("/")
    above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    result = False
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        names = [one.rsplit("/", 1)[-1] for one in above] if wanted.startswith("**/") else above
        if any(fnmatch.fnmatchcase(name, wanted.removeprefix("**/")) for name in names):
            result = not pattern.startswith("!")
    return result


@pytest.fixture(scope="module")
def context(root: Path) -> list[str]:
    """The files that reach the builder."""
    patterns = [line.strip() for line in (root / ".dockerignore").read_text().splitlines()]
    patterns = [line for line in patterns if line and not line.startswith("#")]
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return [path for path in listed if path and not ignored(path, patterns)]


def test_only_what_is_built_reaches_the_builder(context: list[str]) -> None:
    assert "operator/backstay_operator/__main__.py" in context
    assert "images/trainer/backstay/__init__.py" in context
    assert {path.split("/")[0] for path in context} == {"LICENSE", "README.md", "images", "operator", "pyproject.toml"}
    assert not [path for path in context if path.startswith(("images/trainer/Dockerfile", "operator/backstay_cluster"))]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_stages_and_sources_exist(root: Path, context: list[str], name: str) -> None:
    file = Dockerfile.read(root / name)
    assert file.arguments["BASE_IMAGE"].startswith("python:3.")
    known: set[str] = set()
    for stage in file.stages:
        assert stage.base == "${BASE_IMAGE}" or stage.base in known, stage
        for copy in stage.of("COPY"):
            *sources, target = shlex.split(copy)
            assert target
            if sources[0].startswith("--from="):
                assert sources.pop(0).removeprefix("--from=") in {s.name for s in file.stages}
                continue
            for source in sources:
                assert any(path == source or path.startswith(f"{source}/") for path in context), source
        known.add(stage.name)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_end_as_a_numeric_user_that_is_not_root(root: Path, name: str) -> None:
    """Kubernetes can check runAsNonRoot only for a numeric user."""
    file = Dockerfile.read(root / name)
    for target in DOCKERFILES[name]:
        stages = file.lineage(target)
        users = [user for stage in reversed(stages) for user in stage.of("USER")]
        assert re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", users[-1])
        commands = [c for stage in stages for i in ("ENTRYPOINT", "CMD") for c in stage.of(i)]
        assert commands
        assert all(isinstance(json.loads(command), list) for command in commands), "exec form: signals must arrive"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_everything_is_installed_by_hash(root: Path, name: str) -> None:
    file = Dockerfile.read(root / name)
    locks = set()
    for run in (run for stage in file.stages for run in stage.of("RUN")):
        assert not re.search(r"\b(curl|wget|apt-get)\b", run)
        for command in re.split(r"&&", run):
            if " install " in command:
                assert "--require-hashes" in command or "--no-index" in command, command
            locks |= {Path(lock).stem for lock in re.findall(r"-r (\S+\.lock)", command)}
    assert locks == {"build", *DOCKERFILES[name].values()}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_they_build_on_a_base_with_python3_alone_and_from_a_private_index(root: Path, name: str) -> None:
    """Debian has no `python`. A password or a certificate comes as a secret, so that no layer keeps it."""
    file = Dockerfile.read(root / name)
    fetching = 0
    for stage in file.stages:
        for run in stage.of("RUN"):
            mounts = re.findall(r"--mount=type=secret,id=([\w.]+),target=(\S+)", run)
            commands = [shlex.split(part) for part in re.sub(r"--mount=\S+", "", run).split("&&")]
            assert not [words for words in commands if words[0] in ("python", "pip")]
            if "--require-hashes" in run:
                fetching += 1
                assert mounts == [("pip.conf", "/etc/pip.conf"), ("ca.crt", "/run/secrets/ca.crt")], run
                assert "PIP_INDEX_URL" in stage.of("ARG")
    assert fetching >= 2
    assert "cert = /run/secrets/ca.crt" in (root / "docs/cluster.md").read_text()


def pins(path: Path) -> dict[tuple[str, str], frozenset[str]]:
    """(name, version) -> hashes of a lock file."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for entry in re.split(r"\n(?=[a-z])", path.read_text()):
        head = re.match(r"([a-z0-9][a-z0-9._-]*)(?:\[[a-z0-9,]+\])?==([^\s;\\]+)", entry)
        if head:
            found[head[1], head[2]] = frozenset(re.findall(r"--hash=(sha256:[0-9a-f]{64})", entry))
    return found


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("operator", ["operator"]),
        ("trainer-cpu", ["trainer", "examples"]),
        ("trainer-cuda", ["trainer", "examples"]),
        ("trainer-serving", ["trainer", "serving", "examples"]),
        ("build", None),
    ],
)
def test_the_image_s_locks_are_parts_of_the_one_lock(root: Path, lock: str, extras: list[str] | None) -> None:
    """Run `make lock`, and then sh images/locks/update.sh."""
    whole = pins(root / "requirements.lock")
    part = pins(root / "images" / "locks" / f"{lock}.lock")
    assert part
    assert all(part.values())
    for pin, hashes in part.items():
        if re.match(r"nvidia-|jax-cuda", pin[0]) and lock == "trainer-cuda":
            continue  # in no other environment
        assert whole.get(pin) == hashes, f"{pin[0]}=={pin[1]} is not what requirements.lock holds"
    project = tomllib.loads((root / "pyproject.toml").read_text())
    if extras is None:
        wanted = project["build-system"]["requires"]
    else:
        optional = project["project"]["optional-dependencies"]
        wanted = project["project"]["dependencies"] + [line for extra in extras for line in optional[extra]]
    names = {re.match(r"[A-Za-z0-9._-]+", line)[0].lower() for line in wanted}
    assert names - {"backstay"} <= {name for name, _ in part}, "an extra may name others of this distribution"
    assert not {"kopf", "kubernetes"} & {name for name, _ in part} or lock in ("operator", "trainer-serving")
    assert "jax" not in {name for name, _ in part} or lock.startswith("trainer")
