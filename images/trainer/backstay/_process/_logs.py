"""Formats log lines for a person, one for each reporting interval, or the same as JSON objects."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TextIO

from ._bar import Bar

__all__ = ["Reporter", "configure"]

_ROOT = "backstay"
_BAR_SECONDS = 0.1


class _Json(logging.Formatter):
    def __init__(self, who: dict[str, Any]) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._who,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure(
    log_format: Literal["text", "json"], name: str, job: str, handler: logging.StreamHandler[TextIO] | None = None
) -> None:
    """Send this package's lines to standard error; what the script logs itself is not touched.

    Args:
        log_format: the job's log format.
        name: the pod's role and index, such as ``worker-3``; empty in a single process.
        job: the job's name; empty in a single process.
        handler: writes the lines; by default to standard error.
    """
    logger = logging.getLogger(_ROOT)
    handler = logging.StreamHandler(sys.stderr) if handler is None else handler
    if log_format == "json":
        handler.setFormatter(_Json({key: value for key, value in (("job", job), ("pod", name)) if value}))
    else:
        prefix = f"%(asctime)s {name}: " if name else "%(asctime)s "
        handler.setFormatter(logging.Formatter(prefix + "%(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class Reporter:
    """Writes a line of progress at most every `seconds`, or draws a bar instead of all lines but the last."""

    def __init__(self, seconds: float, steps: int, batches: int = 1, bar: Bar | None = None) -> None:
        """
        Args:
            seconds: the shortest time between two lines, in seconds.
            steps: how many updates training makes.
            batches: local steps of each update; 1: there are none.
            bar: the progress bar to draw; None: no bar.
        """
        self._batches = batches
        self._seconds = seconds if bar is None else _BAR_SECONDS
        self._bar = bar
        self._steps = steps
        self._log = logging.getLogger(f"{_ROOT}.progress")
        self._last: float | None = None

    def due(self, now: float) -> bool:
        """Returns whether `report` writes a line or draws the bar at `now`."""
        return self._last is None or now - self._last >= self._seconds

    def report(
        self,
        now: float,
        step: int,
        loss: float | None,
        examples_per_second: float | None,
        metrics: Mapping[str, float] | None = None,
        *,
        force: bool = False,
    ) -> None:
        """Write a line or draw the bar now or, if the last one is too recent, not at all.

        Args:
            now: any monotonic time in seconds.
            step: the number of updates.
            loss, examples_per_second: None where they are not known yet.
            metrics: what `loss` returned beside the loss.
            force: write the line in any case.
        """
        if not force and not self.due(now):
            return
        self._last = now
        shown = "" if loss is None else f"  loss {loss:.6g}"
        shown += "".join(f"  {name} {value:.6g}" for name, value in sorted((metrics or {}).items()))
        shown += "" if examples_per_second is None else f"  {examples_per_second:.1f} examples/s"
        inner = "" if self._batches == 1 else f"  local step {step * self._batches}"
        text = f"step {step}/{self._steps}{inner}{shown}"
        if self._bar is not None:
            if not force:
                self._bar.update(now, step, text)
                return
            self._bar.erase()
        self._log.info(
            "%s",
            text,
            extra={
                "fields": {
                    "step": step,
                    "steps": self._steps,
                    **({} if self._batches == 1 else {"localStep": step * self._batches}),
                    "loss": loss,
                    "metrics": dict(metrics or {}),
                    "examplesPerSecond": None if examples_per_second is None else round(examples_per_second, 3),
                }
            },
        )

    def without_bar(self) -> AbstractContextManager[None]:
        """Hide the bar while a function of the script runs, which may print."""
        return nullcontext() if self._bar is None else self._bar.without_bar()
