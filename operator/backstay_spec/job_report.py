"""Defines the report about a job by one row for each fact that shard 0's server measures, from the server to the
reader.

A row declares the fact's name, type, unit and text. Shard 0's server makes a `JobReport` and sends it as one field of
its answer to the operator (O8) and on its page `/status`. The operator stores the rows of `ReportedStatus` in the job's
status, and exports those with a metric. The commands read the same rows, and show those with words in all formats. So
a new fact has two places: where it is measured, and its row here (docs/decisions/0047).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic.alias_generators import to_camel

from backstay_spec.status_model import StatusModel, Time

__all__ = [
    "INTERRUPTED",
    "LEAST_NEEDED",
    "MOST",
    "MOST_BYTES",
    "NO_RATES",
    "STATUS_ROWS",
    "CheckpointStatus",
    "JobReport",
    "ReportRow",
    "ReportedStatus",
    "TermStart",
    "UpdateWait",
    "WaitedForStatus",
    "exported_rows",
    "readable",
    "shown_rows",
]

MOST_BYTES: Final = 512 << 10
"""The longest encoded report that is read. One with 1,000 metrics has 0.1 MB, and 1,000 long names of leaves too."""

MOST: Final = (1 << 63) - 1
"""The largest number that the API server stores."""


@dataclass(frozen=True, slots=True)
class ReportRow:
    """The declaration of a fact, beside its name, type and text.

    Attributes:
        unit: the unit of the value; empty: it has none.
        digits: significant digits in the status; None: all.
        is_rate: whether the value is a rate, which counts only while updates are applied.
        interrupted: the value in the status while a job that should train applies no updates; of rates only.
        with_event: whether the planner stores the value, together with an event that it sends once.
        metric: the text of the operator's metric `backstay_job_<name>`; empty: there is none.
        counts: whether that metric is a counter.
        dropped: the place in the order in which a termination message that is too long leaves rows out; 0: it has to
            have the row. Rows of one place belong together.
        shown: the words beside the value where people see the job: the unit of a number, or the name of numbers by
            name; empty: `backstay_client.view.facts` has other words for it, or none.
    """

    unit: str = ""
    digits: int | None = None
    is_rate: bool = False
    interrupted: float | None = None
    with_event: bool = False
    metric: str = ""
    counts: bool = False
    dropped: int = 0
    shown: str = ""


def _counted(value: int) -> int:
    if not 0 <= value <= MOST:
        raise ValueError(f"{value} is not in 0 .. 2^63-1")
    return value


Count: TypeAlias = Annotated[int, AfterValidator(_counted)]
"""A number of things that the API server can store as int64."""


def _numbers(value: Any) -> Any:
    """JSON has no NaN, so pages and termination messages have null for it."""
    if not isinstance(value, Mapping):
        return value
    return {name: math.nan if number is None else number for name, number in value.items()}


Numbers: TypeAlias = Annotated[dict[str, float], BeforeValidator(_numbers)]
"""Numbers by name."""


class CheckpointStatus(StatusModel):
    """The newest complete checkpoint."""

    step: Count
    """The version that it holds."""

    uri: str = ""
    """The URI of its manifest, which `backstay.load` reads."""

    time: Time | None = None
    """When it was stored."""

    def dated(self, known: CheckpointStatus | None) -> CheckpointStatus:
        """Returns `known` if that is the same checkpoint with a time, which is public already."""
        if known is None or known.time is None or (known.step, known.uri) != (self.step, self.uri):
            return self
        return known


class UpdateWait(StatusModel):
    """The wait for the next update at this moment. It changes all the time, so only the page `/status` has it."""

    seconds: float = 0.0
    """Seconds since the last update, or since the pods began."""

    text: str = ""
    """The ranks or servers that the update waits for, and their activity; after the last update, the end of the job."""

    over: bool = False
    """Whether the last update was made."""


class WaitedForStatus(StatusModel):
    """A rank that updates waited for after all others that they needed."""

    rank: Count
    """The rank."""

    shard: Count | None = None
    """The server that received its contributions much later than the others."""

    part: str
    """The slow part of the rank's step, which is `data` (waiting for a batch), `compute`, `send` or `receive`."""

    seconds: Annotated[float, ReportRow(unit="s", digits=3)]
    """The sum over the updates of the last 5 minutes."""

    updates: Count
    """How many updates waited."""


@dataclass(frozen=True, slots=True)
class TermStart:
    """Where the coordinator's term began.

    Attributes:
        term: the term.
        step: its first version.
        checkpoint: the URI of that version's checkpoint; empty: the initial parameters.
        redone: updates of the previous term after `step`, as far as this coordinator applied them itself.
        changes: settings that differ from those of the run that stored the checkpoint, as text.
        taken_over: leases of the checkpoint folder that were not renewed, so that this run took the folder over.
    """

    term: Count
    step: Count
    checkpoint: str = ""
    redone: Count = 0
    changes: tuple[str, ...] = ()
    taken_over: tuple[str, ...] = ()


class ReportedStatus(StatusModel):
    """The rows of the report that the job's status has, too. An absent value is not known, or there is none."""

    step: Annotated[Count | None, ReportRow(unit="updates", metric="Updates applied.")] = None
    """Updates applied."""

    goal_steps: Annotated[Count | None, ReportRow(unit="updates", metric="Updates that training ends with.")] = None
    """The number of updates at which training ends: `steps` of `backstay.train`."""

    trained_parameters: Annotated[
        Count | None, ReportRow(unit="values", metric="Values of the parameters that train.")
    ] = None
    """The number of values of the parameters that train."""

    frozen_parameters: Annotated[
        Count | None, ReportRow(unit="values", metric="Values of the frozen parameters, which do not travel.")
    ] = None
    """The number of values of the frozen parameters, which do not travel; absent: there are none."""

    local_steps: Annotated[Count | None, ReportRow(unit="steps")] = None
    """Optimizer steps that each worker makes between two updates (`backstay.LocalSteps`); absent: none."""

    examples_per_second: Annotated[
        float | None,
        ReportRow(
            unit="1/s",
            digits=4,
            is_rate=True,
            interrupted=0.0,
            metric="Examples in applied contributions a second; 0 while the job does not train.",
            shown="examples/s",
        ),
    ] = None
    """Examples trained on per second, over all workers, recently."""

    updates_per_second: Annotated[
        float | None,
        ReportRow(
            unit="1/s",
            digits=4,
            is_rate=True,
            metric="Updates applied a second, the mean of the last 30 seconds; 0 while the job does not train.",
            shown="updates/s",
        ),
    ] = None
    """Updates applied per second, recently."""

    loss: Annotated[float | None, ReportRow(digits=6, metric="The newest loss.")] = None
    """Loss of the newest update; absent when it is not finite."""

    metrics: Annotated[Numbers, ReportRow(dropped=7)] = Field(default_factory=dict)
    """The newest result of `evaluate`; finite values only."""

    evaluated_step: Annotated[Count | None, ReportRow(unit="updates", with_event=True, dropped=7)] = None
    """The step of `metrics`."""

    failed_evaluation: Annotated[Count | None, ReportRow(unit="updates", with_event=True)] = None
    """The newest step whose evaluation failed; absent: none did. It has no `metrics`."""

    untrained_leaves: Annotated[list[str], FailFast(), ReportRow(with_event=True, dropped=5)] = Field(
        default_factory=list
    )
    """Parameters whose gradient was zero in the first updates of every worker; at most 20."""

    unchanged_leaves: Annotated[list[str], FailFast(), ReportRow(with_event=True, dropped=6)] = Field(
        default_factory=list
    )
    """Parameters and model state that did not change in the first updates and are most of what travels; at most 20."""

    mistakes_of_batches: Annotated[list[str], FailFast(), ReportRow(with_event=True)] = Field(default_factory=list)
    """Mistakes of `batches` that were found: `SameBatches`, `ImpureBatches`. Their events describe them."""

    non_finite_loss: Annotated[Count | None, ReportRow(unit="updates", with_event=True)] = None
    """The first step whose loss was NaN or infinite although its gradients were finite; absent: there was none."""

    non_finite_metrics: Annotated[list[str], FailFast(), ReportRow(with_event=True)] = Field(default_factory=list)
    """Metrics of `evaluate` and `loss` that were NaN or infinite at some step; at most 20."""

    train_metrics: Annotated[Numbers, ReportRow(digits=6, shown="metrics of loss", dropped=2)] = Field(
        default_factory=dict
    )
    """The metrics that `loss` returned, mean of the newest update; finite values only."""

    traffic: Annotated[Numbers, ReportRow(unit="bytes", digits=3, dropped=4)] = Field(default_factory=dict)
    """The bytes of tensors that a worker sends and receives for an update, all pods of its rank together, mean over
    workers and updates. `carried` are those of the job, and `exact` those without codecs."""

    term: Count | None = None
    """The current term, which grows with each rollback and each start from a checkpoint."""

    world: Annotated[Count | None, ReportRow(unit="ranks")] = None
    """The number of ranks that the coordinator uses now."""

    checkpoint: CheckpointStatus | None = None
    """The newest complete checkpoint."""

    waited_for: Annotated[list[WaitedForStatus], FailFast(), ReportRow(dropped=1)] = Field(default_factory=list)
    """The ranks that the updates of the last minutes waited for, the longest first; at most three. Async: the ranks
    that took longer than the median of all ranks for their contributions."""

    @property
    def newest_loss(self) -> float | None:
        """The loss of the newest update, which is NaN if it was not finite, and None if it is not known."""
        if self.loss is not None and (self.non_finite_loss is None or self.non_finite_loss != self.step):
            return self.loss
        return None if self.non_finite_loss is None else math.nan


class JobReport(ReportedStatus):
    """The state of training, as shard 0's server measured it."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # a diverged loss is news

    checkpoint_error: str = ""
    """The reason why the newest attempt at a checkpoint failed; empty when it did not."""

    evaluation_error: str = ""
    """The reason why the newest evaluation returned no metrics; empty when it did."""

    waits_for: str = ""
    """The ranks or the server that the next update waits for, after a long wait; empty before that."""

    ending: str = ""
    """The event that the end of the job waits for after the last update; empty if there will be updates."""

    term_start: Annotated[TermStart | None, ReportRow(dropped=3)] = None
    """Where the current term began."""

    steps_redone: Annotated[
        Count | None,
        ReportRow(
            unit="updates",
            metric="Updates that were lost with a server and applied again, in the job's whole history.",
            counts=True,
        ),
    ] = None
    """Updates that rollbacks have discarded so far."""

    @property
    def evaluation_failed(self) -> str:
        """The error of the newest evaluation, with its step, or an empty text if it did not fail."""
        at = "" if self.failed_evaluation is None else f"at step {self.failed_evaluation}: "
        return at + self.evaluation_error if self.evaluation_error else ""

    @classmethod
    def sum(cls, parts: Iterable[Self]) -> Self:
        """Returns the report with the rows that each part has set; a later part replaces an earlier one."""
        return cls().model_copy(
            update={name: getattr(part, name) for part in parts for name in sorted(part.model_fields_set)}
        )

    def encoded(self) -> bytes:
        """Returns the report as JSON, for `decoded`."""
        return self.model_dump_json(exclude_defaults=True).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        """Returns the report of a server. Rows of a newer version are ignored.

        Raises:
            ValueError: the bytes are not a report, or more than `MOST_BYTES`. The text is short: to format each of
                100,000 wrong values would hold up the operator for seconds.
        """
        if len(data) > MOST_BYTES:
            raise ValueError(f"a report has {len(data)} bytes, and at most {MOST_BYTES} are read")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise ValueError(f"{error.error_count()} values are invalid, or the bytes are not JSON") from None

    def last(self) -> dict[str, Any]:
        """Returns the rows that a server's termination message has, by their names in JSON. They are known and finite,
        and not about updates that will follow. A loss that is not finite is None."""
        rows = self.over(JobReport()).model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=_NOT_LAST)
        finite = ((name, _shown(value, ReportRow())) for name, value in rows.items())
        found = {name: value for name, value in finite if value not in (None, [], {})}
        # JSON has no NaN. Without the row, the loss of an earlier report would be that of the last update.
        return found if self.loss is None or math.isfinite(self.loss) else {**found, "loss": None}

    @classmethod
    def in_message(cls, message: Mapping[str, Any]) -> Self:
        """Returns the rows in a termination message. Values of another type are ignored, because a script may have
        written it.

        The message of a worker, or of an older server, has metrics without their step, which is the last one. In the
        message of the end, the checkpoint is the URI of that of the last step; in that of a server that stops, a row.
        """
        found = cls.valid(message)
        update: dict[str, Any] = {}
        if isinstance(uri := message.get("checkpoint"), str) and uri and found.step is not None:
            update["checkpoint"] = CheckpointStatus(step=found.step, uri=uri)
        if found.metrics and found.evaluated_step is None:
            update["evaluated_step"] = found.step
        if "loss" in message and found.loss is None:
            update["loss"] = math.nan  # see `last`
        if found.evaluated_step is not None or "evaluated_step" in update:
            update["evaluation_error"] = found.evaluation_error  # an empty one is known, too
        return found.model_copy(update=update)

    @classmethod
    def valid(cls, rows: Mapping[str, Any]) -> Self:
        """Returns the rows, by their names in JSON, without those of another type, and without such numbers by name."""
        kept = {name: value for name, value in rows.items() if name in _NAMES}
        while True:
            try:
                return cls.model_validate_json(json.dumps(kept), strict=True)
            except ValidationError as error:
                wrong = {tuple(map(str, one["loc"][:2])) for one in error.errors()}
            # Without a place, the JSON itself is refused: a text that is not Unicode, or lists too deep in lists.
            if () in wrong or not any(name in kept for name, *_ in wrong):
                return cls()
            for name, *inner in wrong:
                value = kept.pop(name, None)
                if name in _OF_NUMBERS and inner and isinstance(value, dict):
                    kept[name] = {key: one for key, one in value.items() if (name, key) not in wrong}

    @property
    def reached(self) -> tuple[int, int]:
        """The term and the step, which order the reports about a job."""
        return self.term or 0, self.step or 0

    def over(self, older: JobReport) -> JobReport:
        """Returns the report with the rows that are known here, and with those of `older` for the others.

        The metrics of an evaluation are those of its step, even if it has none. A rate of 0 is not known. An empty text
        is known if it was set: an error that is over has an empty text. The message of an older server has no row
        for a loss that is not finite. So a report without one does not take that of an older step.
        """
        known = {
            name: value
            for name, value in self
            if value not in (None, [], {})
            and (value != "" or name in self.model_fields_set)
            and not (value == 0 and name in NO_RATES)
        }
        if self.evaluated_step is not None:
            known["metrics"] = self.metrics
        if self.checkpoint is not None:
            known["checkpoint"] = self.checkpoint.dated(older.checkpoint)
        diverges = self.non_finite_loss is not None or older.non_finite_loss is not None
        if diverges and self.loss is None and self.step is not None and self.step > (older.step or 0):
            known["loss"] = None
        return older.model_copy(update=known)

    def stored(self) -> dict[str, Any]:
        """Returns the values to store in the status by name, as far as they are known and need no event; a list is
        always known."""
        found = {}
        for name, row in STATUS_ROWS.items():
            value = getattr(self, name)
            if not row.with_event and value is not None and value != {}:
                found[name] = _shown(value, row)
        return found


@cache
def _rows(model: type[StatusModel]) -> Mapping[str, ReportRow]:
    return {
        name: next((mark for mark in field.metadata if isinstance(mark, ReportRow)), ReportRow())
        for name, field in model.model_fields.items()
    }


STATUS_ROWS: Final[Mapping[str, ReportRow]] = _rows(ReportedStatus)
"""The rows of the status by name."""

NO_RATES: Final[Mapping[str, None]] = {name: None for name, row in STATUS_ROWS.items() if row.is_rate}
"""The rates in the status of a job that does not train and should not."""

INTERRUPTED: Final[Mapping[str, float | None]] = {
    name: row.interrupted for name, row in STATUS_ROWS.items() if row.is_rate
}
"""The rates in the status of a job that applies no updates, but should."""


def exported_rows() -> Mapping[str, ReportRow]:
    """Returns the rows that the operator exports as a metric, by name."""
    return {name: row for name, row in _rows(JobReport).items() if row.metric}


def shown_rows() -> Mapping[str, ReportRow]:
    """Returns the rows that are shown in one form, beside their words, by name."""
    return {name: row for name, row in _rows(JobReport).items() if row.shown}


def readable(value: float, digits: int | None) -> float | None:
    """Returns the value with that many significant digits, for `kubectl get`; None for NaN and the infinities, which
    JSON does not have."""
    if not math.isfinite(value):
        return None
    return value if digits is None else float(f"{value:.{digits}g}")


_NOT_LAST: Final = {"checkpoint", "waits_for", "ending"}
"""Rows that a termination message lacks. It has the URI of the checkpoint, and nothing follows."""


_DROPPED: Final = [(row.dropped, to_camel(name)) for name, row in _rows(JobReport).items() if row.dropped]

LEAST_NEEDED: Final = tuple(
    tuple(name for place, name in _DROPPED if place == at) for at in sorted({at for at, _ in _DROPPED})
)
"""Rows that a termination message that is too long leaves out, in this order, by their names in JSON."""


_NAMES: Final = frozenset(str(field.alias) for field in JobReport.model_fields.values())
"""The rows by their names in JSON."""


_OF_NUMBERS: Final = frozenset(
    field.alias for field in JobReport.model_fields.values() if field.annotation == dict[str, float]
)
"""The rows of numbers by name, by their names in JSON."""


def _shown(value: Any, row: ReportRow) -> Any:
    """Returns the value as the status has it: finite, with the digits of its row."""
    match value:
        case float():
            return readable(value, row.digits)
        case dict():
            shown = {key: _shown(inner, row) for key, inner in value.items()}
            return {key: inner for key, inner in shown.items() if inner is not None}
        case list():
            return [shown for shown in (_shown(inner, row) for inner in value) if shown is not None]
        case StatusModel():
            fields = {name: _shown(getattr(value, name), inner) for name, inner in _rows(type(value)).items()}
            lost = any(shown is None and getattr(value, name) is not None for name, shown in fields.items())
            return None if lost else value.model_copy(update=fields)
        case _:
            return value
