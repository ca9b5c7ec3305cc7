"""Runs the training script in each pod of a tested job, and records what the job's test reads.

Its first argument, the target, is a script, or ``FILE::FUNCTION``.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import backstay

from .. import _instrument, _timeouts
from .._result import Result
from .._train import train
from ._recording import ENV_PATH, ENV_RECORD, ENV_SILENT, EVENTS, RESULT
from ._results import write_result

__all__ = ["main"]


def _record_events(file: Path) -> None:
    """Write each event immediately: SIGKILL must not lose one."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(point: str, notes: dict[str, Any]) -> None:
        os.write(descriptor, (json.dumps({"point": point, **notes}) + "\n").encode())

    _instrument.report_to(write)


def _record_result(file: Path) -> Callable[..., Result]:
    """`train`, which also writes what it returns."""

    @functools.wraps(train)
    def recorded(**arguments: Any) -> Result:
        result = train(**arguments)
        write_result(file, result)
        return result

    return recorded


def _run(target: str, arguments: list[str]) -> None:
    """Run the script or the function, as ``python TARGET`` would."""
    file, _, function = target.partition("::")
    path = Path(file).resolve()
    sys.path[0] = str(path.parent)
    sys.argv = [str(path), *arguments]
    if not function:
        runpy.run_path(str(path), run_name="__main__")
        return
    loader = SourceFileLoader(path.stem, str(path))  # given, so that the file's name need not end in `.py`
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    loader.exec_module(module)
    getattr(module, function)()


def main() -> None:
    """Become the pod that the environment describes."""
    files = Path(os.environ.pop(ENV_RECORD))
    _record_events(files.with_suffix(f".{EVENTS}"))
    silent = float(os.environ.pop(ENV_SILENT))
    _timeouts.use(replace(_timeouts.Timeouts(), silent=silent, heartbeat=silent / 5, shutdown=1.5 * silent))
    backstay.train = _record_result(files.with_suffix(f".{RESULT}"))
    sys.path += [entry for entry in json.loads(os.environ.pop(ENV_PATH, "[]")) if entry not in sys.path]
    _run(sys.argv[1], sys.argv[2:])
