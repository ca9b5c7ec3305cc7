"""Runs the work of `backstay export` as ``python -m backstay._checkpoint CHECKPOINT OUT FORMAT [BASE]``."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import BackstayError, ConfigurationError
from ._formats import export


def main(checkpoint: str, out: str, form: Any, base: str | None = None) -> int:
    """Returns the exit status. `base` is the place of the frozen arrays; with an empty text, it is that of the job."""
    try:
        done = export(checkpoint, out, form, base=False if base is None else base or True)
    except BackstayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    arrays = "array" if done.arrays == 1 else "arrays"
    rest = f"; without {done.without} that were frozen (--whole adds them)" if done.without else ""
    print(f"exported step {done.step}: {done.arrays} {arrays}, {done.nbytes} bytes, to {out}{rest}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
