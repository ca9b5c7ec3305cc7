"""Runs the work of `backstay simulate`: reads a request as JSON from standard input, and writes the result as JSON."""

from __future__ import annotations

import gc
import gzip
import json
import sys
import zlib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from backstay_spec.validation import parse_job

from ._assumptions import Assumptions
from ._fit import fitted


def _assumptions(raw: Any) -> Assumptions:
    try:
        return Assumptions.model_validate(raw)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, each['loc'])) or 'assumptions'}: {each['msg']}" for each in error.errors()]
        raise ValueError("the assumptions are invalid: " + "; ".join(lines)) from None


def _trace(path: Path) -> Any:
    """Returns the content of a trace. Raises `ValueError`."""
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"--from {path}: cannot be read: {why}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--from {path}: is not a trace that backstay trace wrote: {error}") from None


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of a request.

    Args:
        request: `job`, a valid TrainingJob; `assumptions`; `seed` and `seeds`, the first seed and how many; `fit`, the
            path of a trace; `timeline`, the path of a timeline to write.

    Raises:
        ValueError: the assumptions or the trace are invalid.
        OSError: a file cannot be read or written.
    """
    assumed = _assumptions(request.get("assumptions") or {})
    if request.get("job") is None:
        return {"assumptions": assumed.model_dump(by_alias=True, mode="json")}
    found: dict[str, Any] = {}
    if request.get("fit"):
        fit = fitted(_trace(Path(request["fit"])), assumed)
        assumed, found["fit"] = fit.assumed, fit.to_json()
    job = parse_job(request["job"])
    from ._run import simulate, summary  # they import JAX, which takes a second

    first, timeline = int(request.get("seed", 0)), request.get("timeline")
    runs = []
    for seed in range(first, first + int(request.get("seeds", 1))):
        run = simulate(job, assumed, seed, trace=bool(timeline) and seed == first)
        if run.timeline:
            Path(str(timeline)).write_bytes(gzip.compress(run.timeline, mtime=0))
        runs.append(run)
    return {
        **found,
        "assumptions": assumed.model_dump(by_alias=True, mode="json"),
        "summary": summary(runs),
        "runs": [run.to_json() for run in runs],
    }


def main() -> int:
    """Returns the exit status: 0, or 2 for an invalid request."""
    gc.set_threshold(200_000, 20, 20)  # a simulation makes many small objects, and few of them are cycles
    try:
        found = answer(json.load(sys.stdin))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    json.dump(found, sys.stdout, sort_keys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
