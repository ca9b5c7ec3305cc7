"""Jobs of real processes on loopback addresses, started by hand as an operator would; all are gone after each test."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from between import LONG, put
from programs import SHORT_ONES_TOO

from backstay.testing import Forker, Job, Pod, PodProcess
from backstay_spec.manifests_pod import GRPC_LOG

from .groups import GroupJob, trained

SCRIPT = Path(__file__).with_name("tiny.py")
SHARDED = Path(__file__).with_name("sharded.py")
ROOT = Path(__file__).parents[2]
LIBRARY = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'images/trainer'}", **GRPC_LOG}


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    """Scripts of jobs choose 64 bits for their process; a test that calls them here must not choose for later ones."""
    yield
    if (jax := sys.modules.get("jax")) is not None:
        jax.config.update("jax_enable_x64", False)


class TinyJob(Job):
    """A job of tiny.py, whose pods write their results into `folder`."""

    def variables(self, name: str) -> dict[str, str]:
        return {"BACKSTAY_JOB": "tiny", "OUT": str(self.folder / f"{name}.npz"), "LET": str(self._let)}

    @property
    def _let(self) -> Path:
        return self.folder / "let"

    def let(self, step: int | None = None) -> None:
        """Pods that `HOLD_AT` holds continue until before this step, or to the end.

        A test can therefore always observe a state before it ends, also on a slow machine.
        """
        put(self._let, str(10**9 if step is None else step))

    def reference(self) -> dict[str, np.ndarray]:
        """Returns the parameters of the plain loop in one process (T4); computed once for each script, by one process
        of pytest for all."""
        environment = {**self.environment, "WORLD": str(self.workers)}
        environment.pop("HOLD_AT", None)
        key = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()
        found = Path(self.forker.environ["JAX_COMPILATION_CACHE_DIR"]).with_name(f"reference-{key}.npz")
        if not found.exists():
            out, log = self.folder / "reference.npz", self.folder / "reference.log"
            loop = {**self.forker.environ, **environment, "OUT": str(out)}
            done = self.forker.start([sys.executable, str(SCRIPT)], loop, log)
            assert done.wait(LONG) == 0, log.read_text(errors="replace")
            out.replace(found)  # two processes may do this, with the same parameters
        return dict(np.load(found))

    def params(self, pod: Pod) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / f"{pod.name}.npz"))


@pytest.fixture(scope="session")
def parent(compiled: Path) -> Iterator[Forker]:
    """Forks the pods of all these jobs."""
    environ = {name: value for name, value in os.environ.items() if name not in SHORT_ONES_TOO}  # a pod sets these
    made = Forker({**environ, **LIBRARY, "JAX_COMPILATION_CACHE_DIR": str(compiled)})
    yield made
    made.close()


@pytest.fixture
def forked(parent: Forker) -> Callable[[Sequence[str], Path], PodProcess]:
    """Starts a command that writes its output into a file.

    It is here because pods of a test file that has the word `environ` are not forked.
    """
    return lambda argv, output: parent.start(argv, parent.environ, output)


@pytest.fixture
def job(tmp_path: Path, parent: Forker) -> Iterator[type[TinyJob]]:
    """Makes jobs: ``job(shards, workers, **config)``."""
    made: list[TinyJob] = []

    def make(shards: int, workers: int, **config: object) -> TinyJob:
        # The logs of a second job do not mix with those of the first.
        folder = tmp_path / f"job-{len(made)}" if made else tmp_path
        folder.mkdir(exist_ok=True)
        argv = [sys.executable, str(SCRIPT)]
        made.append(TinyJob(argv, folder, parent, shards=shards, workers=workers, **config))
        return made[-1]

    yield make  # type: ignore[misc]
    for each in made:
        each.end()
        sys.stdout.write(each.logs())  # pytest shows it when the test failed


@pytest.fixture
def group(tmp_path: Path, parent: Forker) -> Iterator[Any]:
    """Makes jobs: ``group(kind, more, devices=2, command=(script, ...), shards=1, workers=1, **config)``."""
    made: list[GroupJob] = []

    def make(
        kind: str, more: str = "", *, devices: int = 2, command: Sequence[str] = (str(SHARDED),), **config: Any
    ) -> GroupJob:
        folder = tmp_path / f"job-{len(made)}"
        folder.mkdir()
        job = GroupJob([sys.executable, *command], folder, parent, **config)
        job.environment = {"KIND": kind, "MORE": more, "DEVICES": str(devices), "DEVICES_OF_PARAMETER-SERVER": "1"}
        made.append(job)
        return job

    yield make
    for each in made:
        each.end()
        sys.stdout.write(each.logs())  # pytest shows it when the test failed


@pytest.fixture
def plain(group: Any, compiled: Path, tmp_path: Path) -> Callable[..., dict[str, np.ndarray]]:
    """Returns the parameters of ranks of one pod with one device, which one process of pytest trains for all."""

    def found(workers: int = 1) -> dict[str, np.ndarray]:
        file, part = compiled.with_name(f"plain-{workers}.npz"), tmp_path / "plain.npz"
        if not file.exists():
            np.savez(part, **trained(group("", devices=1, workers=workers)))
            part.replace(file)  # two processes may do this, with the same parameters
        return dict(np.load(file))

    return found
