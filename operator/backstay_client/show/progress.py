"""Shows the progress of a wait: a bar on a terminal, a card in a notebook, else a line for each event."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from backstay_client.show.curve import Losses, bar
from backstay_client.show.html import job_card
from backstay_client.show.lines import LineDisplay
from backstay_client.view.explain import progress_of
from backstay_client.view.facts import facts
from backstay_client.view.follow import JobView
from backstay_client.view.status import status_of
from backstay_client.view.waiting import waiting_for
from backstay_client.words import on_one_line, printable

__all__ = ["ProgressDisplay", "TextDisplay", "display_for", "notebook_display", "text_display_for"]

_MOST_LOSSES = 1000


class ProgressDisplay(Protocol):
    """Shows a job while its state changes."""

    def show(self, view: JobView, trouble: str = "") -> None:
        """Show a state.

        Args:
            view: the newest state that is known.
            trouble: why a newer one is not known; empty: it is the newest.
        """

    def close(self) -> None:
        """Show nothing more."""


class _Silent:
    def show(self, view: JobView, trouble: str = "") -> None:
        del view, trouble

    def close(self) -> None:
        return


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._display = LineDisplay(lambda line: print(line, file=stream, flush=True))
        self._stream, self._trouble = stream, ""

    def show(self, view: JobView, trouble: str = "") -> None:
        self._display.show(view)
        if trouble and trouble != self._trouble:
            print(trouble, file=self._stream, flush=True)
        self._trouble = trouble

    def close(self) -> None:
        return


class _JobBar:
    """A job as one text that changes, or as its card in a notebook."""

    def __init__(self, text: TextDisplay) -> None:
        self._text, self._losses = text, Losses(_MOST_LOSSES)

    def show(self, view: JobView, trouble: str = "") -> None:
        self._losses.add(view)
        self._text.show(bar_line(view, trouble), lambda: job_card(status_of(view), self._losses.points))

    def close(self) -> None:
        self._text.close()


def bar_line(view: JobView, trouble: str = "") -> str:
    """Returns a job on one line, with its progress and its newest numbers."""
    parts = [printable(view.name)]
    fraction = progress_of(view)
    if fraction is None or (view.ended and view.phase != "Succeeded"):
        parts.append(view.phase)
    else:
        parts.append(f"{bar(fraction, 20)} {100 * fraction:3.0f} %")
    parts += [fact.words for fact in facts(view, "progress")]
    if problem := trouble or waiting_for(view):
        parts.append(on_one_line(problem))
    parts += [fact.words for fact in facts(view, "numbers")]
    return "  ".join(parts)


def notebook_display() -> Callable[..., Any] | None:
    """Returns the function `display` of IPython in a notebook's kernel, or None if this process is not one."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    if running is None or not hasattr(running, "kernel"):
        return None
    from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

    found: Callable[..., Any] = display
    return found


def display_for(*, progress: bool, stream: TextIO | None = None) -> ProgressDisplay:
    """Returns the display that suits this process.

    Args:
        progress: whether to show anything.
        stream: where a bar or lines are written; None: stderr.
    """
    if not progress:
        return _Silent()
    display, stream = notebook_display(), sys.stderr if stream is None else stream
    return _JobBar(TextDisplay(stream, display)) if display is not None or stream.isatty() else _Lines(stream)


class TextDisplay:
    """Shows one text that changes: replaced in place in a notebook and on a terminal, else a line for each change."""

    def __init__(self, stream: TextIO, display: Callable[..., Any] | None) -> None:
        self._stream, self._display, self._is_terminal = stream, display, stream.isatty()
        self._handle: Any = None
        self._shown: dict[str, str] = {}

    def show(self, text: str, html: Callable[[], str]) -> None:
        """Show a text.

        Args:
            html: makes the same for a notebook.
        """
        shown = {"text/plain": text} | ({} if self._display is None else {"text/html": html()})
        # A line of a terminal may have been overwritten by what the script prints.
        if shown == self._shown and (self._display is not None or not self._is_terminal):
            return
        self._shown = shown
        if self._handle is not None:
            self._handle.update(shown, raw=True)
        elif self._display is not None:
            self._handle = self._display(shown, raw=True, display_id=True)
        elif self._is_terminal:
            width = max(40, shutil.get_terminal_size().columns) - 1
            self._stream.write(f"\r{text[:width]:<{width}}")
            self._stream.flush()
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Show nothing more."""
        if self._shown and self._is_terminal and self._display is None:
            self._stream.write("\n")
            self._stream.flush()


def text_display_for(*, progress: bool, stream: TextIO | None = None) -> TextDisplay | None:
    """Returns the display of a text that suits this process, or None if nothing is shown."""
    return TextDisplay(sys.stderr if stream is None else stream, notebook_display()) if progress else None
