"""Draws a running job on a terminal, again and again in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from backstay_cli.picture import Picture
from backstay_client.show.curve import Losses
from backstay_client.show.lines import SCRIPT
from backstay_client.view.follow import JobView


class LiveDisplay:
    """Draws the job's picture again in place, with progress, a curve of the loss, one row for each pod, and the last
    events."""

    def __init__(self, console: Console, hint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._hint = hint
        self._started = clock()
        self._console = console
        self._losses = Losses()
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, value, trace)

    def show(self, view: JobView) -> None:
        """Redraw the view."""
        self._live.update(self.render(view))

    def print(self, lines: Sequence[str]) -> None:
        """Print above the picture, where the lines stay."""
        for line in lines:
            self._console.print(Text(f"{SCRIPT} | {line}"))

    def render(self, view: JobView) -> RenderableType:
        """Returns the picture of `view`."""
        self._losses.add(view)
        return Picture(view, self._clock() - self._started, self._losses, hint=self._hint)
