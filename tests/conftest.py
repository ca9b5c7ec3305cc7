"""All tests share how they are spread over processes, installed programs, and the chart.

`shared_settings` is of the embedded cluster's tests, which also run without these.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from programs import FOLDER, share_programs
from schedule import Groups, order
from tiers import PURE

from backstay_cluster.tests.limits import LONG, slack
from backstay_cluster.tests.shared_settings import ToolPath, require_tools

ROOT = Path(__file__).resolve().parent.parent
CHART_NAMESPACE = "backstay-system"


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected: what that makes lives to the end
    # A shell starts a background process with SIGINT ignored, and the processes of tests would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("BACKSTAY_E2E") != "cluster":
        os.environ.pop("KUBECONFIG", None)  # it names a cluster of the person who runs the tests
    # The runs that tests start are not the user's. Each process of pytest-xdist has its own folder, so that no test
    # meets a run of a test beside it.
    if "BACKSTAY_STATE" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        folder = tempfile.mkdtemp(prefix="backstay-tests-", dir=os.environ.get("BACKSTAY_TEST_STATE"))
        os.environ["BACKSTAY_STATE"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if "PYTEST_XDIST_WORKER" not in os.environ:  # its processes inherit the folder
        config.add_cleanup(share_programs())
        # With the import of NumPy, OpenBLAS starts a thread for each core. They wait for work, and take the processor.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-snapshots", action="store_true", help="write what is rendered now over the snapshots")


IN_ONE_PROCESS = ("tests/checkpoint/", "tests/codecs/", "tests/data/", "tests/integrations/", "tests/prose/")
IN_ONE_PROCESS += ("tests/trainer_math/", "tests/wire/")


def limit_of(nodeid: str) -> float:
    """Returns the seconds that a test may take on a quiet machine. It is a limit and no expectation."""
    return (
        20.0
        if nodeid.startswith(tuple(f"{folder}/" for folder in PURE))
        else 120.0
        if nodeid.startswith(IN_ONE_PROCESS)
        else 300.0
    )


@hypothesis.settings(max_examples=1, database=None)
@hypothesis.given(hypothesis.strategies.none())
def first_example(_: None) -> None:
    """Let Hypothesis make its generator. Older versions then search for what refers to it, which cannot be frozen."""


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt what lives to the end, such as modules and collected tests, from garbage collections.

    Collections took up to a tenth of the time of a process. Those of what tests make are rarer than usual.
    """
    first_example()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Yields the limit grows with the load. A test that gets a tenth of a core may take ten times as long."""
    marked = item.get_closest_marker("timeout")
    seconds = limit_of(item.nodeid) if marked is None else float(marked.args[0])
    item.add_marker(pytest.mark.timeout(seconds * slack()), append=False)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    require_tools(item)


@pytest.fixture(scope="session", autouse=True)
def _no_default_loop() -> None:
    """looptime's plug-in gets the default event loop before each test, and would make one that is never closed."""
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def compiled() -> Path:
    """Where JAX keeps what it compiles, in all processes of the tests."""
    return Path(os.environ[FOLDER])


def pytest_xdist_auto_num_workers() -> int:
    """Returns two for each core, as tests with processes wait half of the time, and two that mostly wait.

    They are not many, as each takes up to 2 GiB.
    """
    return min(6, 2 * len(os.sched_getaffinity(0)) + 2)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    config.option.loadscopereorder = False
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = order([item.nodeid for item in items])
        items.sort(key=lambda item: places[item.nodeid])


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def tool() -> ToolPath:
    """The path of an installed program; its test is marked with ``tool``."""
    return ToolPath()


class Helm:
    """The installed helm, on our chart."""

    def __init__(self, program: str, chart: Path, home: Path) -> None:
        self.program = program
        self.chart = chart
        folders = ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")
        self._env = {"PATH": os.environ["PATH"], "HOME": str(home), **{name: str(home / name) for name in folders}}

    def run(self, *arguments: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = self._env if kubeconfig is None else {**self._env, "KUBECONFIG": str(kubeconfig)}
        return subprocess.run([self.program, *arguments], capture_output=True, text=True, env=env, timeout=LONG)

    def template(self, *arguments: str, namespace: str = CHART_NAMESPACE) -> str:
        """Returns the rendered manifests; fails with helm's message."""
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
        """Returns the rendered manifests, read."""
        return [o for o in yaml.safe_load_all(self.template(*arguments, namespace=namespace)) if o]


@pytest.fixture(scope="session")
def chart(root: Path) -> Path:
    return root / "helm" / "backstay"


@pytest.fixture(scope="session")
def helm(tool: Callable[[str], str], chart: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(tool("helm"), chart, tmp_path_factory.mktemp("helm"))
