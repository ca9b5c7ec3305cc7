"""Stores the checkpoints of one process, with the same files, owner and lease as those of a job (T6, T7).

A thread writes them beside the training. docs/decisions/0075 has the reasons.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._checkpoint import (
    CheckpointStore,
    FolderLease,
    FrozenRecord,
    Holder,
    Identity,
    ManifestStorage,
    Reader,
    StoreTo,
    file_of,
    log_continued,
    patiently,
    probe,
)
from .._coordination import MODES, CoordinatorState, Intervals, WriteManifest
from .._script import epochs_of
from .._update import Entry, entries_of, model_from, optimizer_state_from
from ..errors import BackstayError, CheckpointError

if TYPE_CHECKING:
    from .._script import Script, ScriptPlan

__all__ = ["AloneStorage"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _OneProcess:
    """The facts that manifests record of a run in one process, and the number of checkpoints to keep."""

    keep: int
    evaluation: Callable[[], tuple[int | None, dict[str, float]]]
    world: int = 1

    def examples(self) -> int | None:
        return None


class AloneStorage:
    """The checkpoints of one run in one process. As a context manager it releases the folder.

    Attributes:
        state: the history at the beginning of the run.
        continues: whether training continues from a checkpoint.
        newest: the URI of the newest checkpoint; None while there is none.
        stored: the version of the newest checkpoint; -1 while there is none.
        error: why the newest attempt to store failed; empty if it did not.
    """

    def __init__(
        self,
        script: Script,
        plan: ScriptPlan,
        to: StoreTo,
        *,
        evaluation: Callable[[], tuple[int | None, dict[str, float]]] = lambda: (None, {}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the folder, and finds the checkpoint to continue from.

        Args:
            plan: the plan of `script` for one shard.
            evaluation: see `ManifestFacts.evaluation`.

        Raises:
            CheckpointInUse: another run writes into the folder.
            CheckpointOfAnotherJob: the checkpoints in it are not this job's.
            CheckpointError: the folder cannot be written or read, or its newest checkpoint does not fit.
        """
        self._plan, self._clock = plan, clock
        self._intervals = Intervals(to.every_steps, to.every_seconds or None)
        self._store = CheckpointStore(to.uri)
        probe(self._store.folder)
        job = to.owner(secrets.token_hex(8))
        identity = Identity(
            job=job,
            incarnation=0,
            seed=script.seed,
            steps=script.steps,
            settings=script.settings(plan),
            any_history=to.continue_from == "Any",
            stops=script.stop_when is not None,
            start_from="" if script.start_from is None else script.start_from.uri,
            best=patiently(self._store.rule_of_best),  # so that it is not deleted
        )
        self._lost: BackstayError | None = None
        run = _OneProcess(to.keep, evaluation)
        self._storage = ManifestStorage(
            self._store,
            FolderLease(
                self._store,
                Holder(job, 0, f"process {os.getpid()} on {socket.gethostname()}"),
                lost=self._folder_lost,
                wait=_sleep,
            ),
            plan.partition,
            identity,
            run,
            run,
            script.beginning.fixed_start,
        )
        self._changed = threading.Condition()
        self._order: tuple[tuple[Entry, ...], CoordinatorState] | None = None  # until its manifest is stored
        self._thread: threading.Thread | None = None
        self._closed = False
        self.stored, self.error = -1, ""
        self.newest: str | None = None
        self._read: Reader | None = None
        try:
            self.state, uri = self._storage.newest(0)
        except BaseException:
            self._storage.close()
            raise
        first = epochs_of(script)
        self.state.samples = None if first is None else MODES["Sync"].account(first, self.state)
        self.continues = bool(uri)
        if uri:
            self.stored, self.newest = self.state.version, uri
            ended = self.state.version >= (self.state.last or script.steps)
            text = "training has ended already: the result is" if ended else "continuing from"
            _LOG.info("%s the checkpoint of step %d: %s", text, self.state.version, uri)
        if self._storage.continued is not None:
            log_continued(self._storage.continued)
        self._began = clock()

    def __enter__(self) -> AloneStorage:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        # A second Ctrl-C does not wait. Without the release, the next run waits until this lease is silent.
        if kind is not KeyboardInterrupt:
            self.finish()
        with self._changed:
            self._closed, stores = True, self._order is not None
            self._changed.notify_all()
        if not stores:
            self._storage.close()

    @property
    def frozen(self) -> FrozenRecord | None:
        """The frozen arrays of the checkpoint that training continues from."""
        return self._storage.frozen.record

    def agree(self, record: FrozenRecord) -> None:
        """Store this record with each checkpoint.

        Raises:
            CheckpointError: training continues, and its frozen arrays were others.
        """
        if why := self._storage.frozen.join(record, "this process"):
            raise CheckpointError(why)

    def model(self, script: Script) -> Any:
        """Returns the parameters, or ``(params, state)``, to begin with."""
        if not self.continues:
            return script.beginning.trained(self.state.start_from)
        return model_from(self._plan.rule, self._reader().read)

    def optimizer_state(self, initial: Any) -> Any:
        """Returns the state of the optimizer to begin with; `initial`: the result of ``optimizer.init``."""
        if not self.continues:
            return initial
        found = optimizer_state_from(self._plan.rule, initial, self._reader().read)
        self._read = None  # it holds whole files
        return found

    def _reader(self) -> Reader:
        """Returns one for the model and the optimizer's state, whose files it reads and compares once."""
        assert self.newest is not None
        if self._read is None:
            self._read = Reader(self._store, self._store.open(self.newest.rpartition("/")[2], verify=False))
        return self._read

    def due(self, version: int) -> bool:
        """Returns whether the update that makes `version` is to be stored. One checkpoint is written at a time.

        Raises:
            CheckpointInUse: another process has taken the folder.
        """
        if self._lost is not None:
            raise self._lost
        with self._changed:
            if self._order is not None:
                return False
        steps, seconds = self._intervals.every_steps, self._intervals.every_seconds
        if steps is not None and version % steps == 0:
            return True
        return seconds is not None and self._clock() - self._began >= seconds

    def store(self, model: list[Any], optimizer_state: Any, state: CoordinatorState) -> None:
        """Store a version in the thread; waits while the thread stores another one.

        Args:
            model, optimizer_state: see `entries_of`.
        """
        entries = entries_of(self._plan.rule, model, optimizer_state)
        with self._changed:
            self._changed.wait_for(lambda: self._order is None)
            self._order = entries, state.copy()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="backstay-checkpoint", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        self._began = self._clock()

    def finish(self) -> None:
        """Wait until the last order is stored, or cannot be."""
        with self._changed:
            self._changed.wait_for(lambda: self._order is None)

    def closing(self) -> None:
        """Announce that this process stores its last checkpoint: a run that follows waits for it."""
        self._storage.closing()

    def _folder_lost(self, error: BackstayError) -> None:
        self._lost = error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._order is not None or self._closed)
                if self._order is None:
                    return
                entries, state = self._order
            try:
                uri = self._write(entries, state)
            except Exception as error:  # noqa: BLE001  # training continues after any error, and reports it
                self.error = str(error)
                _LOG.error("the checkpoint of step %d could not be stored: %s", state.version, error)
            else:
                self.stored, self.newest, self.error = state.version, uri, ""
                _LOG.info("checkpoint of step %d: %s", state.version, uri)
            del entries
            with self._changed:
                self._order = None
                self._changed.notify_all()

    def _write(self, entries: tuple[Entry, ...], state: CoordinatorState) -> str:
        if self._lost is not None:
            raise self._lost
        info = self._store.write_shard(
            entries, history=state.history, version=state.version, term=state.term, shard=0, shards=1, incarnation=0
        )
        order = WriteManifest(state.term, state.version, state.to_json(), ((file_of(info),),))
        return self._storage.write_manifest(order)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
