"""The results of a sweep, as objects, as a data frame, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from backstay_client.errors import BadInput, SweepFailed
from backstay_client.show.frames import frame
from backstay_client.show.html import line_chart, table
from backstay_client.sweeps.store import SweepPlan, TrialResult
from backstay_client.words import number

__all__ = ["SvgPicture", "SweepResult", "sweep_line"]

_WIDTH, _HEIGHT, _ROWS = 480, 240, 10


@dataclass(frozen=True)
class SvgPicture:
    """A picture, which a notebook shows.

    Attributes:
        svg: the picture as SVG.
    """

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Write the picture to a file.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.svg, encoding="utf-8")


@dataclass(frozen=True)
class SweepResult:
    """The trials of a sweep.

    Attributes:
        name: the sweep's name.
        objective: the name of the value that was searched for.
        direction: ``minimize`` or ``maximize``.
        trials: all trials, in order of their numbers.
        study: the Optuna study, for `optuna.visualization` and others.
    """

    name: str
    objective: str
    direction: str
    trials: tuple[TrialResult, ...]
    study: Any

    @classmethod
    def of(cls, plan: SweepPlan, trials: Sequence[TrialResult], study: Any) -> SweepResult:
        """Returns the result of a plan."""
        return cls(plan.name, plan.objective, plan.direction, tuple(trials), study)

    @property
    def best(self) -> TrialResult:
        """The best complete trial.

        Raises:
            SweepFailed: no trial is complete.
        """
        found = _best(self.trials, self.direction)
        if found is None:
            raise SweepFailed(f"no trial of the sweep {self.name} is complete")
        return found

    def frame(self) -> Any:
        """Returns the trials as a `pandas.DataFrame`, whose index are their numbers.

        Its columns are the arguments, and `state`, `value`, `step`, `job` and `why`.

        Raises:
            MissingPackage: pandas is not installed.
        """
        names = dict.fromkeys(name for trial in self.trials for name in trial.params)
        columns: dict[str, list[Any]] = {"trial": [trial.number for trial in self.trials]}
        columns |= {name: [trial.params.get(name) for trial in self.trials] for name in names}
        for name in ("state", "value", "step", "job", "why"):
            columns[name] = [getattr(trial, name) for trial in self.trials]
        return frame(columns, "trial")

    def plot(self, argument: str | None = None) -> SvgPicture:
        """Returns the values of the complete trials, over the trials or over one argument.

        Args:
            argument: the argument on the horizontal axis, whose values are numbers; None: the number of the trial,
                with a line for the best value so far.

        Raises:
            BadInput: there is no such argument, or its values are not numbers.
        """
        done = [trial for trial in self.trials if trial.state == "COMPLETE" and trial.value is not None]
        if argument is None:
            points = [(float(trial.number), float(trial.value or 0.0)) for trial in done]
            best, line = min if self.direction == "minimize" else max, []
            for at, _ in points:
                line.append((at, best(value for before, value in points if before <= at)))
            return SvgPicture(
                line_chart(
                    [(self.objective, points), ("best so far", line)],
                    _WIDTH,
                    _HEIGHT,
                    marks=True,
                    labels=("trial", self.objective),
                )
            )
        found = [(trial.params.get(argument), trial.value) for trial in done]
        if not all(isinstance(x, int | float) for x, _ in found):
            names = sorted({name for trial in self.trials for name in trial.params})
            raise BadInput(f"{argument!r} has no numbers to plot: must be one of {', '.join(names)} with numbers")
        points = [(float(x), float(y or 0.0)) for x, y in found if x is not None]
        return SvgPicture(
            line_chart([(self.objective, points)], _WIDTH, _HEIGHT, marks=True, labels=(argument, self.objective))
        )

    def __repr__(self) -> str:
        return f"<{sweep_line(self.name, self.objective, self.direction, self.trials)}>"

    def _repr_html_(self) -> str:
        done = [trial for trial in self.trials if trial.state == "COMPLETE"]
        done.sort(key=lambda trial: trial.value or 0.0, reverse=self.direction == "maximize")
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.params))
        rows = [
            [
                str(trial.number),
                escape(number(trial.value)),
                *(escape(_shown(trial.params.get(name))) for name in names),
                escape(trial.job),
            ]
            for trial in done[:_ROWS]
        ]
        head = escape(sweep_line(self.name, self.objective, self.direction, self.trials))
        return f"<div>{head}</div>{self.plot().svg}" + table(
            ["trial", escape(self.objective), *map(escape, names), "job"], rows
        )


def sweep_line(name: str, objective: str, direction: str, trials: Sequence[TrialResult]) -> str:
    """Returns a sweep on one line, with the number of trials in each state, and the best one."""
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.state] = counts.get(trial.state, 0) + 1
    words = {"COMPLETE": "complete", "RUNNING": "running", "PRUNED": "pruned", "FAIL": "failed"}
    parts = [f"{counts[state]} {word}" for state, word in words.items() if state in counts]
    text = f"sweep {name}: {', '.join(parts) or 'no trial yet'}"
    if (best := _best(trials, direction)) is not None:
        chosen = ", ".join(f"{key}={_shown(value)}" for key, value in best.params.items())
        text += f"; best {objective} {number(best.value)} with {chosen}"
    return text


def _best(trials: Sequence[TrialResult], direction: str) -> TrialResult | None:
    done = [trial for trial in trials if trial.state == "COMPLETE" and trial.value is not None]
    if not done:
        return None
    chosen = min if direction == "minimize" else max
    return chosen(done, key=lambda trial: trial.value if trial.value is not None else 0.0)


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
