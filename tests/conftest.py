"""Shared by all tests: a test that needs an installed program has the mark ``@pytest.mark.tool("helm")``.

Without the program, such a test is skipped with a message. With ``BACKSTAY_REQUIRE_TOOLS=1``, as in CI, it fails:
otherwise CI would never run that check.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent
CHART_NAMESPACE = "backstay-system"
TOOLS = ROOT / ".tools" / "bin"  # where tests/tools.sh installs

# No test asserts a time. A busy machine must not fail a test, neither in an example nor in generating examples.
settings.register_profile("search", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
# The same examples in each run: a new one must not fail the tests of another change. `search` looks for new ones.
settings.register_profile("backstay", settings.get_profile("search"), derandomize=True, database=None)
settings.load_profile("backstay")


def find_tool(name: str) -> str | None:
    """The path of an installed program, or None: .tools/bin first, then PATH."""
    return shutil.which(name, path=os.pathsep.join([str(TOOLS), os.environ.get("PATH", os.defpath)]))


def pytest_configure(config: pytest.Config) -> None:
    # The runs that tests start are not the user's. The processes of one session share the folder.
    if "BACKSTAY_STATE" not in os.environ:
        folder = tempfile.mkdtemp(prefix="backstay-tests-")
        os.environ["BACKSTAY_STATE"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-snapshots", action="store_true", help="write what is rendered now over the snapshots")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    wanted = [name for mark in item.iter_markers("tool") for name in mark.args]
    missing = sorted({name for name in wanted if find_tool(name) is None})
    if not missing:
        return
    what = f"not installed: {', '.join(missing)} (`make tools` installs what it can)"
    if os.environ.get("BACKSTAY_REQUIRE_TOOLS") == "1":
        pytest.fail(f"{what}; BACKSTAY_REQUIRE_TOOLS=1 forbids to skip", pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session", autouse=True)
def _no_default_loop() -> None:
    """looptime's plug-in gets the default event loop before each test, and would make one that is never closed."""
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where training processes keep what JAX compiled, so that not each compiles the same model again."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "compiled"
    folder.mkdir(exist_ok=True)
    return folder


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, as tests with processes wait most of the time; not many, as those take memory."""
    return min(4, len(os.sched_getaffinity(0)) + 1)


# The longest tests begin first, so that at the end no process runs alone.
FIRST = ("tests/e2e/", "tests/trainer_math/test_engine.py", "tests/runtime/", "tests/operator/", "tests/trainer_math/")


class Groups(LoadScopeScheduling):
    """Tests of one group follow each other in one process.

    The end-to-end tests are one: they share a cluster, and two of their jobs at the same time are many processes. The
    tests of the command start their own clusters, and those of paused processes mostly wait: each of both is a group.
    The training jobs of tests/runtime are each alone. All others keep with those of their file, with which they share
    fixtures and what JAX compiled.
    """

    _ALONE = ("tests/e2e/test_command.py", "tests/e2e/test_paused.py")

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/e2e/") and not nodeid.startswith(self._ALONE):
            return "tests/e2e/"
        return nodeid if nodeid.startswith("tests/runtime/") else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    config.option.loadscopereorder = False
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return next((number for number, where in enumerate(FIRST) if item.nodeid.startswith(where)), len(FIRST))

    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=rank)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def tool() -> ToolPath:
    """The path of an installed program; its test is marked with ``tool``."""
    return ToolPath()


class ToolPath:
    """Finds programs; a test that requests a missing one lacks its mark."""

    def __call__(self, name: str) -> str:
        path = find_tool(name)
        assert path is not None, f"{name} is not installed: mark the test with tool({name!r})"
        return path


class Helm:
    """The installed helm, on our chart."""

    def __init__(self, program: str, chart: Path, home: Path) -> None:
        self.program = program
        self.chart = chart
        folders = ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")
        self._env = {"PATH": os.environ["PATH"], "HOME": str(home), **{name: str(home / name) for name in folders}}

    def run(self, *arguments: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = self._env if kubeconfig is None else {**self._env, "KUBECONFIG": str(kubeconfig)}
        return subprocess.run([self.program, *arguments], capture_output=True, text=True, env=env, timeout=120)

    def template(self, *arguments: str, namespace: str = CHART_NAMESPACE) -> str:
        """The rendered manifests; fails with helm's message."""
        done = self.run(
            "template",
            "backstay",
            str(self.chart),
            f"--namespace={namespace}",
            *arguments,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def objects(self, *arguments: str, namespace: str = CHART_NAMESPACE) -> list[dict[str, Any]]:
        """The rendered manifests, read."""
        return [o for o in yaml.safe_load_all(self.template(*arguments, namespace=namespace)) if o]


@pytest.fixture(scope="session")
def chart(root: Path) -> Path:
    return root / "helm" / "backstay"


@pytest.fixture(scope="session")
def helm(tool: Callable[[str], str], chart: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(tool("helm"), chart, tmp_path_factory.mktemp("helm"))
