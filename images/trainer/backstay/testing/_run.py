"""`run`: a whole job of a training script, with faults, as one call."""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import math
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from backstay_cli.preload import imports_of
from backstay_spec import contract
from backstay_spec.runtime import RuntimeConfig, Trained

from .._faults import ENV_FAULTS, parse
from ..errors import ConfigurationError, JobFailed
from ._pods import SECONDS, Job, Pod
from ._processes import Forker
from ._recording import ENV_RECORD, ENV_SILENT, EVENTS, RESULT, Death, JobResult, account, read_events
from ._results import read_result
from ._supervisor import Supervisor

__all__ = ["forker_for", "run"]

_PROGRAM: Final = Path(__file__).with_name("_pod.py")
_POLL: Final = 0.01
_LEFT: Final = 15.0
"""Seconds that pods have to end after the worker of rank 0 has; others hang, and are killed."""
_SHORT: Final = {
    contract.ROLE_SERVER: "server",
    contract.ROLE_WORKER: "worker",
    contract.ROLE_EVALUATOR: "evaluator",
}
_DISTINCT: Final = {"shards", "workers", "standbys", "evaluator", "mode", "backups", "grace_seconds", "checkpoint"}


class _Recorded(Job):
    """A job whose pods record what `JobResult` has."""

    def variables(self, name: str) -> dict[str, str]:
        return {ENV_RECORD: str(self.folder / name), contract.ENV_JOB_UID: self._uid}

    @functools.cached_property
    def _uid(self) -> str:
        """Another one in each job, as in a cluster: a job in the same folder is a new run."""
        return uuid.uuid4().hex


class _Ending(Exception):  # noqa: N818
    """The job has failed."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason, self.message = reason, message


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

    Each pod is a process, as in a cluster; there is no Kubernetes. Pods that die are replaced immediately, and standbys
    are promoted. The processes are forked from one that has imported JAX, so a small job takes a few seconds. They
    train on the CPU, unless `JAX_PLATFORMS` names another device.

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
        max_restarts: how often the pod of one slot is replaced before the job fails.
        silent: seconds without a heartbeat after which a pod counts as lost. Shorter than in a cluster, a pod that is
            only slow may count as lost.
        env: more variables of each pod.
        folder: an existing folder for logs and checkpoints. None: a folder that is deleted at the end. A job in the
            folder of a previous one continues from the newest checkpoint.
        seconds: the limit for the whole job.
        check: raise an error if the job fails.
        settings: more fields of the pods' configuration, such as ``max_staleness=4`` or ``wire={"gradients": "Int8"}``.

    Returns:
        The results of `train`, the history of updates and contributions, and the deaths of pods.

    Raises:
        ConfigurationError: an argument is invalid.
        JobFailed: the job failed, and `check` is true.
        TimeoutError: the job did not end within `seconds`; the message has the end of each log.
    """
    target = _target(script)
    try:
        text = faults if isinstance(faults, str) else ";".join(faults)
        parse(text)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    fields = sorted(set(RuntimeConfig.model_fields) - _DISTINCT)
    if unknown := sorted(set(settings) - set(fields)):
        raise ConfigurationError(f"{unknown[0]} is not a setting of a job: must be one of {', '.join(fields)}")
    if evaluator and checkpoint_every is None:
        raise ConfigurationError("evaluator needs checkpoint_every: it evaluates checkpoints")
    with tempfile.TemporaryDirectory(prefix="backstay-testing-") as made:
        here = Path(made if folder is None else folder).resolve()
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
        _check({**config, "workers": workers, "shards": servers})
        file = Path(target.partition("::")[0])
        forker = forker_for(file)
        argv = [*forker.command(_PROGRAM, file), target, *arguments]
        pods = Path(tempfile.mkdtemp(prefix="pods-", dir=here))
        with _Recorded(argv, pods, forker, shards=servers, workers=workers, **config) as job:
            job.environment |= {**(env or {}), ENV_SILENT: str(silent)}
            job.environment |= {ENV_FAULTS: text} if text else {}
            found = _Course(job, max_restarts, seconds).run()
    if check and not found.succeeded:
        raise JobFailed(found.reason, found.message)
    return found


class _Course:
    """One job from its first pod to its end."""

    def __init__(self, job: Job, max_restarts: int, seconds: float) -> None:
        self._job, self._max_restarts, self._seconds = job, max_restarts, seconds
        self._supervisor = Supervisor(job)
        self._running: dict[tuple[str, int, int], Pod] = {}  # by role, index and incarnation
        self._newest: dict[tuple[str, int], int] = {}
        self._deaths: list[Death] = []
        self._deadline = time.monotonic() + seconds
        self._trained = ""  # how training ended, for workers that start afterwards
        self._trained_at = 0.0  # when workers that have not returned by then start again

    def run(self) -> JobResult:
        """Start the pods, replace those that die, and return when the job has ended."""
        reason = message = ""
        try:
            self._train()
        except _Ending as ending:
            reason, message = ending.reason, ending.message
        finally:
            self._supervisor.close()
        return self._result(reason, message)

    def _train(self) -> None:
        job = self._job
        for shard in range(job.shards):
            self._start(contract.ROLE_SERVER, shard)
        if job.config["standbys"]:
            for shard in range(job.shards):
                self._start(contract.ROLE_SERVER, shard)
            self._until(lambda: all(self._in_sync(shard) for shard in range(job.shards)))
        for rank in range(job.workers):
            self._start(contract.ROLE_WORKER, rank)
        if job.config["evaluator"]:
            self._start(contract.ROLE_EVALUATOR, 0)
        self._until(lambda: (contract.ROLE_WORKER, 0) not in {(role, index) for role, index, _ in self._running})
        limit = min(self._deadline, time.monotonic() + _LEFT)
        while self._running and time.monotonic() < limit:
            self._reap(replacing=False)
            time.sleep(_POLL)

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if time.monotonic() > self._deadline:
                ends = "\n".join(f"==== {pod.name}\n{pod.output()[-2000:]}" for pod in self._job.pods)
                raise TimeoutError(f"the job did not end within {self._seconds:.0f} s:\n{ends}")
            self._reap(replacing=True)
            self._end_stalled()
            self._return_from_checkpoint()
            time.sleep(_POLL)

    def _start(self, role: str, index: int) -> None:
        incarnation = self._newest[role, index] = self._newest.get((role, index), 0) + 1
        if role == contract.ROLE_SERVER:
            pod = self._supervisor.server(index, incarnation)
        else:
            trained = {contract.ENV_TRAINED: self._trained} if self._trained else {}
            pod = self._job.start(role, index, incarnation, environment=trained)
        self._running[role, index, incarnation] = pod

    def _in_sync(self, shard: int) -> int:
        """The incarnation of the running standby that holds what its server does; 0: there is none."""
        reply = self._supervisor.replies.get((shard, self._supervisor.active[shard]))
        standby = 0 if reply is None else reply.standby
        return standby if (contract.ROLE_SERVER, shard, standby) in self._running else 0

    def _end_stalled(self) -> None:
        """Kill the workers that shard 0 reports as stalled, as the operator does."""
        reply = self._supervisor.replies.get((0, self._supervisor.active[0]))
        for stalled in () if reply is None else reply.stalled:
            pod = self._running.get((contract.ROLE_WORKER, stalled.rank, stalled.incarnation))
            if pod is not None:
                pod.process.send_signal(signal.SIGKILL)

    def _return_from_checkpoint(self) -> None:
        """Replace the worker of rank 0 if it started after the servers had ended: it returns from the checkpoint."""
        if not self._trained or time.monotonic() < self._trained_at:
            return
        self._trained_at = math.inf  # once
        key = contract.ROLE_WORKER, 0, self._newest[contract.ROLE_WORKER, 0]
        if (pod := self._running.pop(key, None)) is not None:
            pod.process.kill()
            self._start(contract.ROLE_WORKER, 0)

    def _reap(self, *, replacing: bool) -> None:
        for (role, index, incarnation), pod in list(self._running.items()):
            code = pod.process.poll()
            if code is None:
                continue
            del self._running[role, index, incarnation]
            if code == 0:
                if role == contract.ROLE_WORKER and not (self._job.folder / f"{pod.name}.{RESULT}").exists():
                    why = f"{_SHORT[role]}/{index}: the script ended before train returned\n{pod.output()[-2000:]}"
                    raise _Ending("ExitedEarly", why)
                ended = pod.final_message()
                if role == contract.ROLE_SERVER and index == 0 and ended.get("checkpoint"):
                    fields = {name: ended[name] for name in Trained.model_fields if name in ended}
                    waits = 0.0 if ended.get("result") == "AlreadyComplete" else _LEFT
                    self._trained, self._trained_at = json.dumps(fields), time.monotonic() + waits
                continue
            words = pod.final_message()
            message = str(words.get("message", ""))
            self._deaths.append(Death(f"{_SHORT[role]}/{index}", incarnation, code, message))
            if not replacing:
                continue
            where = f"{_SHORT[role]}/{index}: {message}"
            if words.get("result") in {"Failed", "Refused", "AfterTrainingFailed"}:
                raise _Ending(str(words.get("reason") or words["result"]), where)
            if "traceback" in words:
                raise _Ending(str(words.get("reason", "ScriptFailed")), f"{where}\n{words['traceback']}")
            deaths = sum(death.slot == f"{_SHORT[role]}/{index}" for death in self._deaths)
            if deaths > self._max_restarts:
                why = f"{where}: died {deaths} times, the last time with exit code {code}\n{pod.output()[-2000:]}"
                raise _Ending("RestartsExhausted", why)
            self._replace(role, index, incarnation)

    def _replace(self, role: str, index: int, incarnation: int) -> None:
        if role == contract.ROLE_SERVER and incarnation == self._supervisor.active[index]:
            if standby := self._in_sync(index):
                self._supervisor.promote(index, standby)
            else:
                # A standby that does not hold the state is of no use to the server that restores a checkpoint.
                for (other, shard, number), pod in list(self._running.items()):
                    if (other, shard) == (role, index):
                        del self._running[other, shard, number]
                        pod.process.send_signal(signal.SIGKILL)
                self._supervisor.active[index] = self._newest[role, index] + 1
                self._start(role, index)
                if not self._job.config["standbys"]:
                    return
        self._start(role, index)

    def _result(self, reason: str, message: str) -> JobResult:
        job = self._job
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
            deaths=tuple(self._deaths),
            logs={pod.name: pod.output() for pod in job.pods},
            reason=reason,
            message=message,
        )


def _check(config: Mapping[str, Any]) -> None:
    try:
        RuntimeConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigurationError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None


def _target(script: str | os.PathLike[str] | Callable[[], object]) -> str:
    if not callable(script):
        if not Path(script).is_file():
            raise ConfigurationError(f"script is {os.fspath(script)!r}: must be a file with a training script")
        return str(Path(script).resolve())
    name, file = getattr(script, "__qualname__", ""), inspect.getsourcefile(inspect.unwrap(script))
    if not name.isidentifier() or file is None:
        raise ConfigurationError(
            f"script is {script!r}: must be a path, or a function at the top level of a file, which the pods import"
        )
    return f"{Path(file).resolve()}::{name}"


_forkers: list[Forker] = []
"""The newest one, for the next jobs. It is not closed at the end: its processes end with this one."""


def forker_for(script: Path) -> Forker:
    """The process that forks the pods of a script; they get the environment that this process has now."""
    if _forkers and not _forkers[0].imports >= set(imports_of(script)):
        _forkers.pop().close()
    environ = {"JAX_PLATFORMS": "cpu", **os.environ, "JAX_COMPILATION_CACHE_DIR": _compilations()}
    if not _forkers:
        # fsspec reads the names of all variables: a process in which one of these differs is not forked. pytest changes
        # this one in each test.
        steady = {name: value for name, value in environ.items() if name != "PYTEST_CURRENT_TEST"}
        _forkers.append(Forker(steady, script))
    _forkers[0].use(environ)
    return _forkers[0]


@functools.cache
def _compilations() -> str:
    """A folder for what JAX compiles, so that the pods of the same script compile it once."""
    if found := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return found
    folder = tempfile.TemporaryDirectory(prefix="backstay-testing-compiled-")
    atexit.register(folder.cleanup)
    return folder.name
