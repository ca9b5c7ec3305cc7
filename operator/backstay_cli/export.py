"""Starts the trainer's program for `backstay export`, because the command itself imports neither JAX nor it."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["export_checkpoint"]


def export_checkpoint(checkpoint: str, out: str, form: str, base: str | None = None) -> int:
    """Write a checkpoint in another format; returns the exit status.

    Args:
        checkpoint: a manifest, or a folder or URI with checkpoints.
        out: the file, folder or URI to write.
        form: ``safetensors`` or ``orbax``.
        base: the place of the frozen arrays; empty: where the job read them; None: they are not exported.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "backstay._checkpoint",
        checkpoint,
        out,
        form,
        *([] if base is None else [base]),
    ]
    # Arrays are only copied: an accelerator that another process uses stays untouched.
    return subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False).returncode
