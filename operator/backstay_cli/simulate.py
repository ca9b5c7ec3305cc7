"""Starts the simulator for `backstay simulate`, because the command itself imports no part of the trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from backstay_client.errors import BadInput
from backstay_client.jobfiles.bounded_yaml import load_all
from backstay_client.reading.records import read_file, unpacked
from backstay_client.reading.trace import write_trace
from backstay_client.words import duration, size
from backstay_spec.goodput import PARTS

__all__ = ["assumptions_of", "default_assumptions", "lines", "simulated"]

_PROGRAM: Final = "backstay._simulator"


def assumptions_of(file: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    """Returns the assumptions of a file and of `--set`, not validated.

    Args:
        file: a YAML file; None: there is none.
        settings: values such as ``step.seconds=0.5``, over those of the file.

    Raises:
        BadInput: the file cannot be read, or a setting has no name or no value.
    """
    found: dict[str, Any] = {}
    if file is not None:
        try:
            documents = load_all(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot read {file}: {error}") from None
        except yaml.YAMLError as error:
            raise BadInput(f"{file} is not YAML: {error}") from None
        if len(documents) > 1 or not isinstance(documents[0] if documents else {}, dict):
            raise BadInput(f"{file} must hold one mapping of assumptions")
        found = documents[0] if documents else {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not name or not equals:
            raise BadInput(f"--set {setting}: must be NAME=VALUE, such as step.seconds=0.5")
        *path, last = name.split(".")
        at = found
        for part in path:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise BadInput(f"--set {setting}: {part} is not a mapping")
        try:
            at[last] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise BadInput(f"--set {setting}: the value is not YAML") from None
    return found


def default_assumptions(assumed: Mapping[str, Any]) -> str:
    """Returns all assumptions as YAML, with the given ones.

    Raises:
        BadInput: an assumption is invalid.
    """
    found = _ask({"assumptions": assumed})["assumptions"]
    text: str = yaml.safe_dump(found, sort_keys=False)
    return text


def simulated(job: Mapping[str, Any], assumed: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Returns the result of simulations.

    Args:
        job: a valid TrainingJob.
        assumed: the assumptions.
        options: `seed`, `seeds`, `fit`; `trace`, where to write the trace of the first simulation.

    Raises:
        BadInput: an assumption or a trace is invalid, or a file cannot be read or written.
    """
    out: Path | None = options.pop("trace", None)
    request = {"job": dict(job), "assumptions": dict(assumed), **options}
    if out is None:
        return _ask(request)
    with tempfile.TemporaryDirectory(prefix="backstay-simulate-") as folder:
        timeline = Path(folder) / "simulated.pb.gz"
        found = _ask({**request, "timeline": str(timeline)})
        write_trace(unpacked(read_file(str(timeline))), (), out, "the simulation")
    return found


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", _PROGRAM]
    ended = subprocess.run(
        command,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    if ended.returncode == 2:
        raise BadInput(ended.stderr.strip().removeprefix("error: "))
    if ended.returncode:
        raise BadInput(f"the simulation failed with status {ended.returncode}:\n{ended.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


_ROWS: Final = (
    ("updates a second", "updatesPerSecond", "{:.4g}"),
    ("examples a second", "examplesPerSecond", "{:.4g}"),
    ("goodput", "goodput", "{:.1%}"),
    ("seconds of an update, median", "updateSecondsMedian", "{:.4g}"),
    ("seconds of an update, 95 of 100", "updateSeconds95", "{:.4g}"),
    ("longest time without an update, s", "updateSecondsMost", "{:.4g}"),
    ("wait of a worker for an update, median, s", "waitSecondsMedian", "{:.4g}"),
    ("staleness, mean", "stalenessMean", "{:.3g}"),
    ("staleness, most", "stalenessMost", "{:.0f}"),
    ("updates made again", "updatesRedone", "{:.0f}"),
    ("checkpoints", "checkpoints", "{:.0f}"),
    ("hours of workers", "workerHours", "{:.4g}"),
    ("hours of servers", "serverHours", "{:.4g}"),
    ("cost", "cost", "{:.4g}"),
)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields the result for people."""
    runs, facts = found["runs"], found["summary"]
    if (fit := found.get("fit")) is not None:
        yield from _fit_lines(fit)
    first = runs[0]
    ended = {"Succeeded": "the job succeeded", "Running": "the job still trains", "Failed": "the job failed"}
    reasons = f" ({first['reason']})" if first["reason"] else ""
    yield (
        f"simulated {duration(first['seconds'])} with seed {first['seed']}: {first['updates']:.0f} updates, "
        f"{ended[first['phase']]}{reasons}"
    )
    several = len(runs) > 1
    yield f"{'':44}{'median':>12}" + (f"{'10 of 100':>12}{'90 of 100':>12}" if several else "")
    for text, name, form in _ROWS:
        fact = facts[name]
        columns = [fact["p50"], fact["p10"], fact["p90"]] if several else [fact["p50"]]
        yield f"{text:44}" + "".join(f"{form.format(value):>12}" for value in columns)
    for text, name in (
        ("bytes to servers", "sentBytes"),
        ("bytes to workers", "receivedBytes"),
        ("bytes to standbys", "replicatedBytes"),
    ):
        yield f"{text:44}{size(facts[name]['p50']):>12}"
    yield "worker time by part:"
    for part in PARTS:
        share = facts.get(f"share/{part}")
        if share is not None and share["p50"] >= 0.0005:
            yield f"  {part:42}{share['p50']:>12.1%}"
    if failures := first["failures"]:
        yield "failures: " + ", ".join(f"{number} of {what}" for what, number in sorted(failures.items()))


def _fit_lines(fit: Mapping[str, Any]) -> Iterator[str]:
    step = fit["step"]
    yield (
        f"fitted to {fit['steps']} steps of {fit['ranks']} pods: median {step['seconds']:.4g} s, spread of steps "
        f"{step['sigma']:.3g}, of machines {step['machineSigma']:.3g}, {step['pausesPerHour']:.3g} pauses an hour"
    )
    yield f"error of the fit: mean {fit['meanError']:+.1%}, distance of the distributions {fit['distance']:.3f}"
    if fit["updatesPerSecond"]:
        yield f"the timeline has {fit['updatesPerSecond']:.4g} updates a second"
    yield "the timeline does not say:"
    for sentence in fit["unknown"]:
        yield f"  - {sentence}"
