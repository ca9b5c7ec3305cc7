"""The progress bar of a single process on a terminal, as the screen shows it."""

from __future__ import annotations

import errno
import io
import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backstay
from backstay import _train
from backstay._process._bar import Bar, line, on_terminal
from backstay._process._logs import Reporter, configure

ERASE = "\r\x1b[2K"


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("the size is unknown")

    def screen(self) -> list[str]:
        """Returns the lines of the screen, up to the line of the cursor."""
        lines = [""]
        for part in re.findall(r"\r\x1b\[2K|\n|[^\r\n\x1b]+", self.getvalue()):
            if part == ERASE:
                lines[-1] = ""
            elif part == "\n":
                lines.append("")
            else:
                lines[-1] += part
        return lines


class Old(Terminal):
    encoding = "ascii"


@pytest.fixture(autouse=True)
def logger() -> Iterator[None]:
    logger = logging.getLogger("backstay")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_log_lines_stand_above_the_bar_and_the_last_update_takes_its_place() -> None:
    terminal = Terminal()
    bar = Bar(terminal, 100)
    configure("text", "", "", bar)
    reporter = Reporter(5.0, 100, bar=bar)
    reporter.report(0.0, 10, 0.5, None)
    assert terminal.screen() == ["██░░░░░░░░░░░░░░░░░░  10%  step 10/100  loss 0.5"]
    reporter.report(0.05, 11, 0.5, None)  # too early
    logging.getLogger("backstay.x").info("an epoch has ended")
    reporter.report(10.0, 20, 0.25, 64.0)
    above, shown = terminal.screen()
    assert above.endswith("an epoch has ended")
    assert shown == "████░░░░░░░░░░░░░░░░  20%  1:20 left  step 20/100  loss 0.25  64.0 examples/s"
    with reporter.without_bar():
        terminal.write("printed by the script\n")
    assert terminal.screen()[1:] == ["printed by the script", shown]
    reporter.report(11.0, 100, 0.125, 64.0, force=True)
    with reporter.without_bar():
        pass
    bar.leave()
    assert terminal.screen()[2].endswith("step 100/100  loss 0.125  64.0 examples/s")
    assert terminal.screen()[3:] == [""]


def test_the_bar_stays_where_an_exception_ends_training() -> None:
    terminal = Old()
    bar = Bar(terminal, 4)
    bar.update(0.0, 3, "step 3/4")
    bar.leave()
    assert terminal.screen() == ["###############-----  75%  step 3/4", ""]


@given(
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.none() | st.floats(0, 1e9),
    st.integers(0, 200),
    st.text("x", max_size=200),
)
def test_a_line_fits_into_the_terminal(step: int, more: int, seconds: float | None, columns: int, text: str) -> None:
    made = line(text, step, step + more, seconds, columns=columns)
    assert len(made) <= max(0, columns - 1)
    assert columns < 80 or "%" in made


@pytest.mark.parametrize(
    ("stream", "term", "shown"), [(Terminal, "xterm", True), (io.StringIO, "xterm", False), (Terminal, "dumb", False)]
)
def test_a_terminal_shows_a_bar_and_other_places_get_lines(
    stream: type[io.StringIO], term: str, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    err = stream()
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr(_train, "time", SimpleNamespace(monotonic=lambda: 50.0))  # all updates are made in one second
    assert on_terminal(err) == shown
    backstay.train(
        init=lambda key: np.zeros(2),
        loss=lambda params, batch: ((params - batch) ** 2).sum(),
        batches=lambda key: np.ones(2),
        optimizer=optax.sgd(0.1),
        steps=3,
        on_update=lambda step, loss, metrics: print("update", step, file=err),
    )
    text = err.getvalue()
    assert ("33%" in text) == shown
    lines = [
        re.sub(r"^[0-9:]+ ", "", each) for each in (err.screen() if isinstance(err, Terminal) else text.split("\n"))
    ]
    assert [each.split("  ")[0] for each in lines if each] == [
        *([] if shown else ["step 1/3"]),
        "update 1",
        "step 3/3",
        "update 3",
    ]


class Closed(Terminal):
    """A terminal whose window was closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def flush(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_t8_training_continues_when_the_terminal_is_closed() -> None:
    bar = Bar(Closed(), 10)
    bar.update(0.0, 1, "text")
    with bar.without_bar():
        pass
    bar.erase()
    bar.update(1.0, 2, "text")
    bar.leave()


def test_t8_a_process_without_stderr_has_no_bar() -> None:
    assert not on_terminal(None)
    closed = Terminal()
    closed.close()
    assert not on_terminal(closed)
