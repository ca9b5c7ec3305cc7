"""Marks with a time, one on each line, in the pod's own file of the folder that TIMELINE names.

Import this module first: the import writes the marks for the start of the process and of Python.
"""

import json
import logging
import os
import time
from pathlib import Path

FACTS = {"start", "rollback", "in_sync", "fault", "worker_seconds"}


def mark(what: str, at: float | None = None) -> None:
    """Write one line into this pod's file of the folder TIMELINE, if that variable is set."""
    if folder := os.environ.get("TIMELINE"):
        with (Path(folder) / os.environ.get("BACKSTAY_POD_NAME", "alone")).open("a") as file:
            file.write(f"{time.time() if at is None else at:.6f} {what}\n")


def _process_began() -> float:
    """Returns the time at which the kernel started this process, in the seconds of `time.time`."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


class _Steps(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        mark(f"step {record.__dict__['fields']['step']}", record.created)


def _fact(point, notes) -> None:
    if point in FACTS:
        mark(f"fact {json.dumps({'point': point, **notes})}")


def follow() -> None:
    """Mark facts about the job, and each line of progress, which is not printed. With `log_every=0` each update has a
    line."""
    from backstay import _instrument

    _instrument.report_to(_fact)
    progress = logging.getLogger("backstay.progress")
    progress.addHandler(_Steps())
    progress.propagate = False


mark("process", _process_began())
mark("python")
