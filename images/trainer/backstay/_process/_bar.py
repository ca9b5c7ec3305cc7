"""A progress bar in the last line of a terminal, below the log lines."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, TextIO

__all__ = ["Bar", "line", "on_terminal"]

_WIDTH: Final = 20
_ERASE: Final = "\r\x1b[2K"
_COLUMNS: Final = 80


def on_terminal(stream: TextIO | None) -> bool:
    """Returns whether `stream` is a terminal that can erase a line. It is None if the process began without it
    (``2>&-``)."""
    return stream is not None and not stream.closed and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def line(text: str, step: int, steps: int, seconds: float | None, *, columns: int, ascii_only: bool = False) -> str:
    """Returns a bar, the share of updates, the time that is left, and `text`.

    Args:
        seconds: seconds until the last update; None: not known yet.
        columns: the width of the terminal. The line is shorter, so that the terminal does not break it.
        ascii_only: draw with characters that every terminal has.
    """
    share = step / steps if steps else 1.0
    full, empty = "#-" if ascii_only else "█░"
    filled = int(share * _WIDTH)
    left = "" if seconds is None else f"  {_clock(seconds)} left"
    return f"{full * filled}{empty * (_WIDTH - filled)} {int(100 * share):3}%{left}  {text}"[: max(0, columns - 1)]


class Bar(logging.StreamHandler[TextIO]):
    """Writes log lines, and a bar below the newest one.

    Training continues when the terminal disappears: what cannot be drawn is left out.
    """

    def __init__(self, stream: TextIO, steps: int) -> None:
        """
        Args:
            stream: the stream of a terminal.
            steps: how many updates training makes.
        """
        super().__init__(stream)
        self._steps = steps
        self._first: tuple[float, int] | None = None
        self._newest = ""
        self._visible = False
        self._drawing = threading.RLock()
        try:
            "█░".encode(stream.encoding)
            self._ascii_only = False
        except UnicodeEncodeError:
            self._ascii_only = True

    def emit(self, record: logging.LogRecord) -> None:
        with self._drawing:
            visible = self._visible
            self._erase()
            super().emit(record)
            if visible:
                self._draw()

    def update(self, now: float, step: int, text: str) -> None:
        """Draw the bar.

        Args:
            now: any monotonic time in seconds.
            step: the number of updates.
            text: behind the bar.
        """
        if self._first is None:
            self._first = now, step
        began, first = self._first
        seconds = (now - began) / (step - first) * (self._steps - step) if step > first else None
        with self._drawing:
            self._newest = line(
                text, step, self._steps, seconds, columns=_columns(self.stream), ascii_only=self._ascii_only
            )
            self._draw()

    @contextmanager
    def without_bar(self) -> Iterator[None]:
        """Hide the bar while other code may print."""
        with self._drawing:
            visible = self._visible
            self._erase()
        yield
        if visible:
            with self._drawing:
                self._draw()

    def erase(self) -> None:
        """Remove the bar."""
        with self._drawing:
            self._erase()

    def leave(self) -> None:
        """Keep the bar in its line, and begin the next line."""
        with self._drawing:
            if self._visible:
                self._write("\n")
            self._visible = False

    def _draw(self) -> None:
        self._write(_ERASE + self._newest)
        self._visible = True

    def _erase(self) -> None:
        if self._visible:
            self._write(_ERASE)
        self._visible = False

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal was closed, or the script has closed the stream
            self.stream.write(text)
            self.stream.flush()


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS


def _clock(seconds: float) -> str:
    """Returns a duration as a clock shows it: ``0:07``, ``12:30``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
