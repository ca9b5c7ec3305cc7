"""Runs the work of `backstay export` as ``python -m backstay._checkpoint CHECKPOINT OUT FORMAT``."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import BackstayError, ConfigurationError
from ._formats import export


def main(checkpoint: str, out: str, form: Any) -> int:
    """Returns the exit status."""
    try:
        done = export(checkpoint, out, form)
    except BackstayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    arrays = "array" if done.arrays == 1 else "arrays"
    print(f"exported step {done.step}: {done.arrays} {arrays}, {done.nbytes} bytes, to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
