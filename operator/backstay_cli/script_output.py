"""The output of worker 0's script, read from its pod's log while the job runs.

A pod's log contains standard output, standard error, and Backstay's own lines. The view shows the latter in another
form, so this module leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from backstay_client.words import printable
from backstay_spec import contract

__all__ = ["ScriptOutput"]

# Where the first values of the parameters come from. Of Backstay's own lines, only these are shown.
_START = re.compile(r"\d\d:\d\d:\d\d worker-0: (?=start_from: )")
# Lines of Backstay itself, such as ``12:34:56 worker-0: step 3``, and of gRPC and XLA, such as ``W1122 04:58:00 ...``.
_NOT_THE_SCRIPTS = re.compile(
    r"\d\d:\d\d:\d\d worker-0: |[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\] |WARNING: All log messages before absl::"
)
# The second form precedes a traceback without the frames of libraries (`backstay._process._failure`).
_TRACEBACK = ("Traceback (most recent call last):", "(the traceback is shown without the frames of Backstay and JAX: ")
_MOST_BYTES = 1 << 20  # of one reading
_MOST_LINES = 100
_LINE_LENGTH = 1000


class ScriptOutput:
    """Follows the log of worker 0, from one pod to its replacement.

    A traceback is kept until the outcome is clear: the report of a failed job shows it once.

    Args:
        logs: the folder with the logs of all pods.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._log: Path | None = None
        self._offset = 0
        self._rest = b""
        self._held: list[str] = []
        self._replaced: list[str] = []  # the traceback that ended a pod which has a replacement
        self._shown: list[str] = []

    def new_lines(self, pods: Sequence[dict[str, Any]], *, updated: bool = True) -> list[str]:
        """Returns the lines since the last call, printable.

        Args:
            pods: the job's pods.
            updated: whether the job has made an update. Before that, the exception of one pod may soon fail the job.
        """
        log = self._newest_log(pods)
        if log is not None and log != self._log:
            self._replaced, self._held = self._held or self._replaced, []
            self._log, self._offset, self._rest = log, 0, b""
        lines = self._release_replaced() if updated else []
        return lines + list(self._filtered(self._read()))

    def end(self, *, failed: bool) -> list[str]:
        """Returns the remaining lines when the job has ended; the traceback of a failed job is in the report."""
        lines = list(self._filtered(self._read()))
        if self._rest:
            lines += self._filtered([self._rest])
            self._rest = b""
        return lines if failed else [*self._release_replaced(), *lines, *self._release(again=False)]

    def _newest_log(self, pods: Sequence[dict[str, Any]]) -> Path | None:
        found: list[tuple[int, Path]] = []
        for pod in pods:
            labels = pod["metadata"].get("labels", {})
            own = (
                labels.get(contract.LABEL_ROLE),
                labels.get(contract.LABEL_INDEX),
                labels.get(contract.LABEL_MEMBER, "0"),
            )
            if own == (contract.ROLE_WORKER, "0", "0"):
                folder = self._logs / pod["metadata"]["namespace"] / pod["metadata"]["name"]
                incarnation = str(labels.get(contract.LABEL_INCARNATION, "0"))
                found.append((int(incarnation) if incarnation.isdigit() else 0, folder / f"{contract.CONTAINER}.log"))
        return max(found)[1] if found else None

    def _read(self) -> list[bytes]:
        """Returns the new lines that are complete."""
        if self._log is None:
            return []
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:  # the log reached its limit and was started again
                    self._offset, self._rest = 0, b""
                file.seek(max(self._offset, size - _MOST_BYTES))
                data = file.read()
                self._offset = file.tell()
        except OSError:
            return []
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_BYTES:
            self._rest = b""
        return whole

    def _filtered(self, lines: Sequence[bytes]) -> Iterator[str]:
        left_out = max(0, len(lines) - _MOST_LINES)
        if left_out:
            yield f"... {left_out} lines are left out here; all are in {self._log}"
        for line in lines[left_out:]:
            # A progress bar overwrites its line: show its last state.
            text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="backslashreplace")
            start = _START.match(text)
            if start or _NOT_THE_SCRIPTS.match(text):
                yield from self._release()  # the process continues: the script handled its exception
                if start is None:
                    continue
                text = text[start.end() :]
            text = printable(text[:_LINE_LENGTH])
            if self._held or text.startswith(_TRACEBACK):
                self._held.append(text)
            else:
                yield text

    def _release_replaced(self) -> list[str]:
        replaced, self._replaced = self._replaced, []
        if replaced == self._shown:
            return []
        self._shown = replaced or self._shown
        return replaced

    def _release(self, *, again: bool = True) -> list[str]:
        """Returns the traceback that was kept; `again`: even if it is the one that was shown last."""
        held, self._held = self._held, []
        if held == self._shown and not again:
            return []
        self._shown = held or self._shown
        return held
