"""`backstay run` as a user starts it, observed from outside by the logs of its pods."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SECONDS = 300.0


@dataclass(frozen=True)
class CommandRun:
    """One command, whose files are in a folder."""

    process: subprocess.Popen[bytes]
    folder: Path

    def wait(self, reached: Callable[[str], bool]) -> None:
        """Wait until the pods have written what is wanted.

        Args:
            reached: whether that is so, from the logs of all pods in one text.

        Raises:
            SystemExit: the command ended before, or it took five minutes; with the output of the command.
        """
        deadline = time.monotonic() + SECONDS
        while not reached("\n".join(log.read_text(errors="replace") for log in self.folder.glob("run/pods/*/*/*.log"))):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((self.folder / "command.log").read_text())
            time.sleep(0.02)


@contextmanager
def backstay_run(folder: Path, *arguments: str) -> Iterator[CommandRun]:
    """Run ``backstay run`` with these arguments, and interrupt it at the end.

    Args:
        folder: an empty one.
    """
    command = [sys.executable, "-m", "backstay_cli.main", "run", "--data-dir", str(folder / "run"), *arguments]
    with (folder / "command.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield CommandRun(process, folder)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
