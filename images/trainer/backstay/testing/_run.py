"""Runs a whole job of a training script, with faults, as one call (`run`)."""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from backstay_cluster.load import slack
from backstay_spec import contract
from backstay_spec.runtime import RuntimeConfig
from backstay_spec.whole import whole

from .._faults import ENV_FAULTS, faults_of
from ..errors import ConfigurationError, JobFailed
from ._pods import SECONDS, Job, Pod
from ._processes import Forker
from ._recording import ENV_PATH, ENV_RECORD, ENV_SILENT, EVENTS, RESULT, Death, JobResult, account, read_events
from ._results import read_result
from ._supervisor import Supervisor

__all__ = ["forker_for", "run"]

_PROGRAM: Final = Path(__file__).with_name("_pod.py")
_POLL: Final = 0.01
_LEFT: Final = 15.0
"""Seconds that pods have to end after the worker of rank 0 has, on a machine without other work. Others are killed."""
_SHORT: Final = {
    contract.ROLE_SERVER: "server",
    contract.ROLE_WORKER: "worker",
    contract.ROLE_EVALUATOR: "evaluator",
}
_NAMED: Final = {"shards", "workers", "standbys", "evaluator", "mode", "backups", "grace_seconds", "checkpoint"}
_DISTINCT: Final = _NAMED | {"pods_per_rank"}  # one pod is started for each rank


class _Recorded(Job):
    """A job whose pods record what `JobResult` has."""

    def variables(self, name: str) -> dict[str, str]:
        return {ENV_RECORD: str(self.folder / name), contract.ENV_JOB_UID: self._uid}

    @functools.cached_property
    def _uid(self) -> str:
        """Is another one in each job, because a job in the same folder is a new run, as in a cluster."""
        return uuid.uuid4().hex


def run(
    script: str | os.PathLike[str] | Callable[[], object],
    arguments: Sequence[str] = (),
    *,
    workers: int = 1,
    servers: int = 1,
    standbys: int = 0,
    evaluator: bool = False,
    mode: Literal["Sync", "Async"] = "Sync",
    backups: int = 0,
    grace: float | None = 0.0,
    checkpoint_every: int | None = None,
    faults: str | Iterable[str] = (),
    max_restarts: int = 3,
    silent: float = 10.0,
    env: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    seconds: float = SECONDS,
    check: bool = True,
    **settings: Any,
) -> JobResult:
    """Run a training script as a job on this machine, and return what happened.

    Each pod is a process, as in a cluster; there is no Kubernetes. The planner of the operator decides which pods are
    replaced and which standbys are promoted. Pods that die are replaced immediately. The processes are forked from one
    that has imported JAX, so a small job takes a few seconds. They train on the CPU, unless `JAX_PLATFORMS` names
    another device. Calls from several threads of a process run one after the other.

    Args:
        script: the training script, as a path; or a function at the top level of a file. Each pod runs it.
        arguments: the script's command line.
        workers: `spec.workers.replicas`.
        servers: `spec.parameterServers.replicas`.
        standbys: number of standbys of each server, 0 or 1. Workers start once every standby holds the state of its
            server.
        evaluator: whether the job has one; it needs `checkpoint_every`.
        mode: `spec.update.mode`.
        backups: `spec.update.backups`.
        grace: `spec.update.grace` in seconds; None: `Auto`.
        checkpoint_every: updates between two checkpoints; they are written into `folder`. None: none is written.
        faults: what fails at which step, in the language of `FAULT_INJECTION`, such as ``kill worker/1 @12``.
        max_restarts: how often the pods of each slot are replaced, on average over the slots of a role, before the job
            fails.
        silent: seconds without a heartbeat after which a pod counts as lost. Shorter than in a cluster, a pod that is
            only slow may count as lost.
        env: more variables of each pod.
        folder: a folder for logs and checkpoints, which is made if it does not exist. None: a folder that is deleted at
            the end. A job in the folder of a previous one continues from the newest checkpoint.
        seconds: the limit for the whole job on a machine without other work. A busy machine has more.
        check: raise an error if the job fails.
        settings: more fields of the pods' configuration, such as ``max_staleness=4`` or ``wire={"gradients": "Int8"}``.

    Returns:
        The results of `train`, the history of updates and contributions, and the deaths of pods.

    Raises:
        ConfigurationError: an argument is invalid.
        JobFailed: the job failed, and `check` is true.
        TimeoutError: the job did not end within this limit; the message has the end of each log.
    """
    target = _target(script)
    text = faults if isinstance(faults, str) else ";".join(faults)
    workers, servers, standbys, backups = whole(workers), whole(servers), whole(standbys), whole(backups)
    checkpoint_every, settings = whole(checkpoint_every), {name: whole(value) for name, value in settings.items()}
    fields = sorted(set(RuntimeConfig.model_fields) - _DISTINCT)
    if unknown := sorted(set(settings) - set(fields)):
        raise ConfigurationError(f"{unknown[0]} is not a setting of a job: must be one of {', '.join(fields)}")
    if evaluator and checkpoint_every is None:
        raise ConfigurationError("evaluator needs checkpoint_every: it evaluates checkpoints")
    with tempfile.TemporaryDirectory(prefix="backstay-testing-") as made:
        here = Path(made if folder is None else folder).resolve()
        here.mkdir(parents=True, exist_ok=True)
        config = {
            "standbys": standbys,
            "evaluator": evaluator,
            "mode": mode,
            "backups": backups,
            "grace_seconds": grace,
            **settings,
        }
        if checkpoint_every is not None:
            config["checkpoint"] = {"uri": str(here / "checkpoints"), "every_steps": checkpoint_every}
        _check({**config, "workers": workers, "shards": servers}, text)
        with _ONE:
            file = Path(target.partition("::")[0])
            forker = forker_for(file)
            argv = [*forker.command(_PROGRAM, file), target, *arguments]
            pods = Path(tempfile.mkdtemp(prefix="pods-", dir=here))
            with _Recorded(argv, pods, forker, shards=servers, workers=workers, **config) as job:
                job.environment |= {**(env or {}), ENV_SILENT: str(silent)}
                job.environment |= {ENV_PATH: _path()} if callable(script) else {}
                job.environment |= {ENV_FAULTS: text} if text else {}
                found = _supervise(job, max_restarts, seconds)
    if check and not found.succeeded:
        raise JobFailed(found.reason, found.message)
    return found


def _supervise(job: Job, max_restarts: int, seconds: float) -> JobResult:
    """Run a job to its end."""
    supervisor = Supervisor(job, max_restarts)
    try:
        began = time.monotonic()
        supervisor.until(lambda: supervisor.ended, seconds)
        ended = time.monotonic()
        left = min(_LEFT, seconds - (ended - began))
        while supervisor.failure is None and supervisor.processes.running and time.monotonic() < ended + left * slack():
            supervisor.step()
            time.sleep(_POLL)
    finally:
        supervisor.close()
    reason, message = supervisor.failure or ("", "")
    lost = supervisor.processes.lost
    if reason and lost and "Traceback" not in message:
        message = f"{message}\n{lost[-1][0].output()[-2000:]}"
    return _result(job, lost, reason, message)


def _result(job: Job, lost: Iterable[tuple[Pod, int]], reason: str, message: str) -> JobResult:
    leaders = [pod for pod in job.pods if (pod.role, pod.index) == (contract.ROLE_SERVER, 0)]
    leaders.sort(key=lambda pod: pod.incarnation)
    events = (event for pod in leaders for event in read_events(job.folder / f"{pod.name}.{EVENTS}"))
    updates, contributions, rollbacks = account(events)
    results = {}
    for pod in job.pods:
        found = read_result(job.folder / f"{pod.name}.{RESULT}")
        if found is not None:
            results[pod.index] = found
    return JobResult(
        results=results,
        updates=updates,
        contributions=contributions,
        rollbacks=rollbacks,
        deaths=tuple(_death(pod, code) for pod, code in lost),
        logs={pod.name: pod.output() for pod in job.pods},
        reason=reason,
        message=message,
    )


def _death(pod: Pod, code: int) -> Death:
    return Death(f"{_SHORT[pod.role]}/{pod.index}", pod.incarnation, code, str(pod.final_message().get("message", "")))


def _check(config: Mapping[str, Any], faults: str) -> None:
    try:
        faults_of(faults, RuntimeConfig.model_validate(config))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigurationError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _target(script: str | os.PathLike[str] | Callable[[], object]) -> str:
    if not callable(script):
        if not Path(script).is_file():
            raise ConfigurationError(f"script is {os.fspath(script)!r}: must be a file with a training script")
        return str(Path(script).resolve())
    name, file = getattr(script, "__qualname__", ""), inspect.getsourcefile(inspect.unwrap(script))
    # The source of a notebook's cell, of a terminal or of `python -c` has a name, and no file.
    if not name.isidentifier() or file is None or not Path(file).is_file():
        raise ConfigurationError(
            f"script is {script!r}: must be a path, or a function at the top level of a file, which the pods import; "
            "write a function of a notebook or of a terminal to a file first"
        )
    return f"{Path(file).resolve()}::{name}"


_ONE: Final = threading.Lock()
"""Held by the job that runs: another one may need another forker, and the end of a forker kills its pods."""

_forkers: list[Forker] = []
"""The newest one, for the next jobs. It is not closed at the end: its processes end with this one."""


def _path() -> str:
    """Returns the folders that this process imports from, as JSON. The file of a function may import from them, too."""
    return json.dumps([str(Path(entry).resolve()) for entry in sys.path])


def forker_for(script: Path) -> Forker:
    """Returns the process that forks the pods of a script; they get the environment that this process has now.

    A library that was imported meanwhile may have set a variable that JAX reads, as scikit-learn does. Then another
    process that has imported JAX costs less than pods that import JAX themselves.
    """
    environ = {"JAX_PLATFORMS": "cpu", **os.environ, "JAX_COMPILATION_CACHE_DIR": _compilations()}
    imported: frozenset[str] = frozenset()
    if _forkers and not (_forkers[0].has_imported(script) and _forkers[0].forks(environ)):
        imported = _forkers[0].imports
        _forkers.pop().close()
    if not _forkers:
        # fsspec reads the names of all variables: a process in which one of these differs is not forked. pytest changes
        # this one in each test.
        steady = {name: value for name, value in environ.items() if name != "PYTEST_CURRENT_TEST"}
        _forkers.append(Forker(steady, script, imported))
    _forkers[0].use(environ)
    return _forkers[0]


@functools.cache
def _compilations() -> str:
    """Returns a folder for what JAX compiles, so that the pods of the same script compile it once."""
    if found := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return found
    folder = tempfile.TemporaryDirectory(prefix="backstay-testing-compiled-")
    atexit.register(folder.cleanup)
    return folder.name
