"""The trials of a sweep in a file, which one process at a time changes."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from backstay_client.errors import BadInput, SweepInUse
from backstay_client.sweeps.space import as_text, number_of_choices, optuna

__all__ = ["SweepPlan", "SweepStore", "TrialResult", "not_evaluated"]

_ID, _PLAN, _STEP, _WHY = "backstay:id", "backstay:plan", "backstay:step", "backstay:why"
_GRID, _EVALUATED, _OF_LOSS = "backstay:grid", "backstay:evaluated", "backstay:of-loss"


@dataclass(frozen=True)
class SweepPlan:
    """The search of a sweep. A file has one plan for each name.

    Attributes:
        name: the sweep's name, with which the names of its jobs begin.
        distributions: Optuna's distribution of each argument.
        objective: ``loss``, a metric that `loss` returns, or one that `evaluate` returns.
        direction: ``minimize`` or ``maximize``.
    """

    name: str
    distributions: Mapping[str, Any]
    objective: str
    direction: str

    def as_attributes(self) -> dict[str, str]:
        """Returns the plan as texts."""
        return {"objective": self.objective, "direction": self.direction, "space": as_text(self.distributions)}


@dataclass(frozen=True)
class TrialResult:
    """One trial.

    Attributes:
        number: its number, from 0.
        state: ``RUNNING``, ``COMPLETE``, ``PRUNED`` or ``FAIL``.
        params: the arguments that were chosen.
        value: the newest value of the objective; None: there is none.
        job: the name of its TrainingJob.
        step: the step of `value`.
        why: why it failed; empty: it did not.
    """

    number: int
    state: str
    params: Mapping[str, Any]
    value: float | None
    job: str
    step: int | None = None
    why: str = ""


class SweepStore:
    """An Optuna study in a SQLite file, locked for this process. A context manager.

    Attributes:
        plan: the plan.
        id: the id of the sweep, which its jobs have as a label.
        study: the Optuna study.
        exhausted: whether the sampler has no more choices.
        evaluated: whether `evaluate` returned the objective in a trial; None: it has not returned anything yet.
        most: the number of all choices where each of them is tried once; None: the sampler decides.
    """

    def __init__(
        self, plan: SweepPlan, path: Path, *, sampler: Any = None, pruner: Any = None, trials: int = 0
    ) -> None:
        """
        Args:
            path: the file, which is made if it does not exist.
            sampler: Optuna's sampler; None: a new sweep of lists tries each choice once if there are at most `trials`
                of them, and other sweeps have Optuna's default.
            pruner: Optuna's pruner; None: its default, the median rule.
            trials: the number of trials that are wanted.

        Raises:
            SweepInUse: another process runs the sweep.
            BadInput: the file has a sweep of this name with another plan, or cannot be used.
        """
        self.plan, self.exhausted, self.most = plan, False, number_of_choices(plan.distributions)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path.with_name(f"{path.name}.{plan.name}.lock"), plan.name)
        except OSError as error:
            raise BadInput(f"storage: {path} cannot be written: {error.strerror or error}") from None
        try:
            self._open(path, sampler, pruner)
            self._try_each(trials, sampler)
        except BaseException:
            self._lock.close()
            raise

    def _open(self, path: Path, sampler: Any, pruner: Any) -> None:
        library = optuna()
        try:
            self._storage = library.storages.RDBStorage(f"sqlite:///{path.resolve()}")
            self.study = library.create_study(
                storage=self._storage,
                study_name=self.plan.name,
                direction=self.plan.direction,
                sampler=sampler,
                pruner=pruner,
                load_if_exists=True,
            )
        except ValueError as error:
            raise BadInput(f"direction: {error}") from None
        except Exception as error:
            if type(error).__module__.startswith(("sqlalchemy", "sqlite3", "optuna", "alembic")):
                raise BadInput(f"storage: {path} is not a file of Optuna in SQLite: {error}") from None
            raise
        wanted, found = self.plan.as_attributes(), self.study.user_attrs.get(_PLAN)
        if found is None:
            self.study.set_user_attr(_ID, secrets.token_hex(4))
            self.study.set_user_attr(_PLAN, wanted)
        elif found != wanted:
            changed = next(key for key in wanted if found.get(key) != wanted[key])
            raise BadInput(
                f"{changed}: the sweep {self.plan.name} in {path} has {found.get(changed)}, and not {wanted[changed]}: "
                "give this one another name, or the same values to continue it"
            )
        self.id: str = self.study.user_attrs[_ID]
        self.evaluated: bool | None = self.study.user_attrs.get(_EVALUATED)

    def _try_each(self, trials: int, sampler: Any) -> None:
        """Decide whether the sweep tries each of its choices once, and set the sampler for that."""
        known = self.study.user_attrs.get(_GRID)  # a sweep that continues with more trials remains what it is
        is_grid = sampler is None and self.most is not None and (self.most <= trials if known is None else known)
        if is_grid != known:  # another sampler may repeat choices, so a sweep that it has continued is no longer a grid
            self.study.set_user_attr(_GRID, is_grid)
        if not is_grid:
            self.most = None
            return
        choices = {name: list(one.choices) for name, one in self.plan.distributions.items()}
        self.study.sampler = optuna().samplers.GridSampler(choices, seed=0)  # the same order in each process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the file free for other processes. The study can still be read."""
        self._lock.close()

    def job_of(self, number: int) -> str:
        """Returns the name of the job of a trial."""
        return f"{self.plan.name}-{number}"

    def running(self) -> list[Any]:
        """Returns the trials without an end, of this process or of one that died, as Optuna's live trials."""
        library = optuna()
        states = (library.trial.TrialState.RUNNING,)
        found = self.study.get_trials(deepcopy=False, states=states)
        return [library.trial.Trial(self.study, trial._trial_id) for trial in found]

    def count(self) -> int:
        """Returns the number of trials that have begun. Optuna also has those that a user put into its queue."""
        return len(self.results())

    def ask(self) -> Any:
        """Returns a new trial, whose arguments are chosen by the results so far."""
        return self.study.ask(dict(self.plan.distributions))

    def reported(self, trial: Any) -> int:
        """Returns the last step for which the trial has a value, or 0 if it has none."""
        known = self.study._storage.get_trial(trial._trial_id).intermediate_values
        return max(known, default=0)

    def complete(self, trial: Any, value: float, step: int | None, *, of_loss: bool = False) -> None:
        """The trial has ended with this value, which `evaluate` has returned, or `loss` if `of_loss`.

        Optuna does not change a trial that has ended. So while it is unknown whether `evaluate` returns the objective,
        a value `of_loss` is not one of Optuna's, and its sampler and pruner do not compare it.
        """
        if step is not None:
            trial.set_user_attr(_STEP, step)
        if of_loss and self.evaluated is None:
            self._store(trial, None, optuna().trial.TrialState.FAIL, of_loss=value)
        else:
            self._store(trial, value, of_loss=value if of_loss else None)

    def set_evaluated(self, evaluated: bool) -> None:
        """Record whether `evaluate` returned the objective in a trial."""
        if self.evaluated is None or (evaluated and not self.evaluated):
            self.study.set_user_attr(_EVALUATED, evaluated)
            self.evaluated = evaluated

    def prune(self, trial: Any) -> None:
        """The trial was stopped, because others were better."""
        self._store(trial, None, optuna().trial.TrialState.PRUNED)

    def fail(self, trial: Any, why: str) -> None:
        """The trial has failed."""
        self._store(trial, None, optuna().trial.TrialState.FAIL, why=why)

    def _store(
        self, trial: Any, value: float | None, state: Any = None, *, why: str = "", of_loss: float | None = None
    ) -> None:
        trial.set_user_attr(_WHY, why)  # both each time: a process may have died between these calls
        trial.set_user_attr(_OF_LOSS, of_loss)
        try:
            self.study.tell(trial.number, value, state)
        except RuntimeError as error:
            # A sampler whose choices are used up stops the loop of Optuna, which is not the loop here. The trial is
            # stored then.
            if "Study.stop" not in str(error):
                raise
            self.exhausted = True

    def results(self) -> list[TrialResult]:
        """Returns all trials that have begun, in order of their numbers."""
        found = self.study.get_trials(deepcopy=False)
        return [self._result(trial) for trial in found if trial.state.name != "WAITING"]

    def _result(self, trial: Any) -> TrialResult:
        step, value = trial.user_attrs.get(_STEP), trial.value
        if trial.state.name != "COMPLETE" and trial.intermediate_values:
            step = max(trial.intermediate_values)
            value = trial.intermediate_values[step]
        job, why, state = self.job_of(trial.number), trial.user_attrs.get(_WHY, ""), trial.state.name
        of_loss = trial.user_attrs.get(_OF_LOSS)
        if of_loss is not None and state in ("COMPLETE", "FAIL") and not why:
            state, value = "COMPLETE", of_loss if trial.value is None else trial.value
            if self.evaluated:
                state, value, why = "FAIL", None, not_evaluated(self.plan.objective)
        return TrialResult(trial.number, state, dict(trial.params), value, job, step, why)


def not_evaluated(objective: str) -> str:
    """Returns why a trial has no value to compare, though `loss` returned a number of this name."""
    return f"evaluate did not return {objective!r}, as in other trials"


def _locked(path: Path, name: str) -> IO[str]:
    """Returns a file that is locked while it is open, and so until the process ends, even by SIGKILL.

    Raises:
        SweepInUse: another process, or this one, has locked it.
    """
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(100).strip() or "another process"
        file.close()
        raise SweepInUse(
            f"the sweep {name} is run by {owner}, with the lock {path}: stop that one, or give this one another name"
        ) from None
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} of {os.uname().nodename}")
    file.flush()
    return file
