"""The options of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstay_client.asynchronous.job import PATIENCE
from backstay_client.asynchronous.options import SubmitOptions, submission_of
from backstay_client.errors import BadInput
from backstay_client.finding.clusters import FoundCluster
from backstay_client.sweeps.runner import SweepRunner, TrialJobs
from backstay_client.sweeps.space import distributions_of, example_of
from backstay_client.sweeps.store import SweepPlan, SweepStore
from backstay_spec import contract
from backstay_spec.whole import whole

__all__ = ["PreparedSweep", "SweepOptions", "prepared_sweep"]

_OWN = {"trials", "parallel", "objective", "direction", "storage", "prune", "sampler", "patience"}
_DIRECTIONS = ("minimize", "maximize")
_LONGEST_NAME = 35  # a trial's job has a number behind it, and at most 40 characters


class SweepOptions(SubmitOptions, total=False):
    """The options of `Client.sweep`, which are those of its jobs in `SubmitOptions`, and these.

    `name` is the sweep's name, with which the names of its jobs begin. `args` are arguments that all trials have.
    `checkpoint` is a folder or a URI, in which each trial has its own folder.

    - `trials`: the number of trials, those before an interruption included. Default: 20.
    - `parallel`: the most trials at the same time. Default: 4.
    - `objective`: ``loss``, a metric that `loss` returns, or one that `evaluate` returns. Default: ``loss``.
    - `direction`: ``minimize`` or ``maximize``. Default: ``minimize``.
    - `storage`: the file of the sweep. Default: ``.backstay/sweeps/NAME.db`` in the current folder.
    - `prune`: whether trials that are worse than others at the same step are stopped, or a pruner of Optuna that
      decides it. Default: True, by the median of the other trials, from the sixth trial on.
    - `sampler`: a sampler of Optuna, which chooses the arguments. Default: Optuna's. If the space has only lists, and
      at most `trials` choices in all, each choice is tried once.
    - `patience`: seconds without an answer of the API server after which the sweep ends with an error. Default: 60.
    """

    trials: int
    parallel: int
    objective: str
    direction: str
    storage: str | Path | None
    prune: Any
    sampler: Any
    patience: float


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep whose options are valid.

    Attributes:
        plan: the plan.
        path: the file.
        own: the options of the sweep itself.
        job: the options of its jobs.
    """

    plan: SweepPlan
    path: Path
    own: Mapping[str, Any]
    job: Mapping[str, Any]

    @property
    def _trials(self) -> int:
        return int(self.own.get("trials", 20))

    def store(self) -> SweepStore:
        """Open the file."""
        prune = self.own.get("prune", True)
        pruner = None if isinstance(prune, bool) else prune
        return SweepStore(self.plan, self.path, sampler=self.own.get("sampler"), pruner=pruner, trials=self._trials)

    def runner(self, store: SweepStore, jobs: TrialJobs) -> SweepRunner:
        """Returns the object that runs the trials."""
        return SweepRunner(
            store,
            jobs,
            trials=self._trials,
            parallel=self.own.get("parallel", 4),
            prunes=self.own.get("prune", True) is not False,
            patience=self.own.get("patience", PATIENCE),
        )

    def options_of(self, name: str, params: Mapping[str, Any], labels: Mapping[str, str]) -> SubmitOptions:
        """Returns the options of the job of a trial."""
        return _options_of(self.job, name, params, labels)


def prepared_sweep(
    what: Callable[..., Any] | str | Path,
    space: Mapping[str, Any],
    options: Mapping[str, Any],
    cluster: FoundCluster,
    image: str | None,
) -> PreparedSweep:
    """Check the options of a sweep, and those of its jobs with one choice of arguments.

    Raises:
        BadInput: an option is invalid.
        MissingPackage: Optuna is not installed.
    """
    own = {name: whole(value) for name, value in options.items() if name in _OWN}
    job = {name: value for name, value in options.items() if name not in _OWN}
    for name in ("trials", "parallel"):
        value = own.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"{name}={value!r}: must be a whole number from 1")
    direction = own.get("direction", "minimize")
    if direction not in _DIRECTIONS:
        raise BadInput(f"direction={direction!r}: must be {' or '.join(_DIRECTIONS)}")
    if (isinstance(what, str | Path) and Path(what).suffix != ".py") or isinstance(what, Mapping):
        raise BadInput("a sweep is of a function or a script (.py), because its trials differ in their arguments")
    args, checkpoint = job.get("args"), job.get("checkpoint")
    if args is not None and not isinstance(args, Mapping):
        raise BadInput(f"args: is {type(args).__name__}: must be a mapping, which each trial adds its arguments to")
    if isinstance(checkpoint, Mapping) and not checkpoint.get("uri"):
        raise BadInput("checkpoint: the trials need different folders: must be a folder or a URI, and not a volume")
    distributions = distributions_of(space)
    if both := sorted(one for one in args or {} if _option(one) in map(_option, distributions)):
        raise BadInput(f"args: has {', '.join(map(repr, both))}, which the space has too: must be in one of them")
    # A mistake in the options of the jobs would otherwise fail each trial, after the sweep has begun.
    example = submission_of(what, _options_of(job, job.get("name"), example_of(distributions), {}), cluster, image)
    name = str(job.get("name") or example.job["metadata"]["name"])
    if len(name) > _LONGEST_NAME:
        raise BadInput(f"name: {name!r} has {len(name)} characters: a sweep's name has at most {_LONGEST_NAME}")
    if "://" in str(own.get("storage") or ""):
        raise BadInput("storage: is a URL: must be the path of a file, such as sweep.db")
    path = Path(own.get("storage") or Path(".backstay", "sweeps", f"{name}.db"))
    return PreparedSweep(SweepPlan(name, distributions, own.get("objective", "loss"), direction), path, own, job)


def _option(name: str) -> str:
    """Returns the option of a script that an argument becomes, without the dashes before it."""
    return str(name).replace("_", "-")


def _options_of(
    job: Mapping[str, Any], name: str | None, params: Mapping[str, Any], labels: Mapping[str, str]
) -> SubmitOptions:
    found: dict[str, Any] = {**job, "name": name, "args": {**(job.get("args") or {}), **params}}
    found["labels"] = {**(job.get("labels") or {}), **labels}
    checkpoint = job.get("checkpoint")
    # Another sweep of this name has another id: its trials must not take the values of these.
    folder = "-".join(str(part) for part in (name, labels.get(contract.LABEL_SWEEP_ID)) if part)
    if isinstance(checkpoint, Mapping):
        found["checkpoint"] = {**checkpoint, "uri": f"{checkpoint['uri']}/{folder}"}
    elif checkpoint is not None:
        found["checkpoint"] = f"{checkpoint}/{folder}"
    return found  # type: ignore[return-value]
