"""The work of `backstay export`: ``python -m backstay._checkpoint CHECKPOINT OUT FORMAT``."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import BackstayError
from ._export import export


def main(checkpoint: str, out: str, form: Any) -> int:
    """Returns the exit status."""
    try:
        done = export(checkpoint, out, form)
    except BackstayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"exported step {done.step}: {done.arrays} arrays, {done.nbytes} bytes, to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
