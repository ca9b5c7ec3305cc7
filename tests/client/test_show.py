"""A job is a card in a notebook, a bar on a terminal, lines elsewhere, and a data frame."""

from __future__ import annotations

import builtins
import io
import sys
import types
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from backstay_client import MissingPackage, TrainingCurve
from backstay_client.show.frames import curve_frame, needed
from backstay_client.show.html import job_card, job_rows, line_chart
from backstay_client.show.progress import display_for
from backstay_client.view.follow import JobView, RoleView
from backstay_client.view.status import status_of
from backstay_spec.job_report import JobReport

NASTY = "<script>alert(1)</script>"


def view(**changes: Any) -> JobView:
    report = JobReport(step=5, goal_steps=10, loss=0.5, train_metrics={NASTY: 1.0}, metrics={"accuracy": 0.75})
    return JobView("digits", "default", **{"phase": "Running", "report": report, **changes})


def test_texts_of_scripts_are_escaped_in_html() -> None:
    failed = view(phase="Failed", message=f"ScriptFailed: {NASTY}")
    for made in (
        job_card(status_of(view()), [(1, 1.0), (2, 0.5)]),
        job_card(status_of(failed)),
        job_rows([status_of(failed)]),
        line_chart([(NASTY, [(1, 1.0), (2, 2.0)])], 200, 100, labels=(NASTY, NASTY)),
    ):
        assert "<script" not in made
        ET.fromstring(made)


def test_a_card_has_progress_numbers_and_the_curve() -> None:
    card = job_card(status_of(view(roles={"Worker": RoleView(4, 3)})), [(step, 1 / step) for step in range(1, 2000)])
    for text in ("digits", "width:50.0%", "5 of 10", "accuracy 0.75", "3/4 workers", "<polyline"):
        assert text in card
    assert card.count(",") < 1000, "the curve is thinned"


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0], [float("nan")] * 2, [1e-30, 1e30], [-1.0, 0.0, 5.0]])
def test_a_chart_of_any_values_is_valid(values: list[float]) -> None:
    made = line_chart([("loss", list(enumerate(values)))], 200, 100)
    assert "nan" not in made
    if made:
        ET.fromstring(made)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_that_is_redrawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    display = display_for(progress=True, stream=stream)
    display.show(view())
    display.show(view(), "the API server does not answer")
    display.close()
    first, second = stream.getvalue().rstrip("\n").split("\r")[1:]
    assert first.startswith("digits  ██████████░░░░░░░░░░  50 %  step 5 of 10  loss 0.5")
    assert "the API server does not" in second, "a line is never longer than the terminal"
    assert len(first) == len(second) == 79


def test_other_outputs_get_lines_and_silence_is_possible() -> None:
    stream = io.StringIO()
    display = display_for(progress=True, stream=stream)
    display.show(view())
    display.show(view(), "no answer")
    display.show(view(), "no answer")
    display.close()
    assert "digits is Running" in stream.getvalue()
    assert stream.getvalue().count("no answer") == 1
    quiet = io.StringIO()
    display_for(progress=False, stream=quiet).show(view())
    assert not quiet.getvalue()


def test_a_notebook_gets_a_card_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, bundle: dict[str, str], raw: bool) -> None:
            assert raw
            shown.append(bundle)

    def show(bundle: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append(bundle)
        return Handle()

    kernel, functions = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    kernel.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    functions.display = show  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", functions)
    display = display_for(progress=True)
    display.show(view())
    display.show(view(report=JobReport(step=6, goal_steps=10, loss=0.25)))
    assert "<polyline" in shown[1]["text/html"]
    display.show(view())  # a rollback: the loss of step 6 belongs to an update that is made again
    display.close()
    assert shown[2]["text/html"].count("<polyline") == shown[0]["text/html"].count("<polyline")
    assert shown[0]["text/plain"].startswith("digits  ███")


def test_evaluations_are_rows_of_the_frame_at_their_steps() -> None:
    curve = TrainingCurve((2, 4), (1.0, 0.5), {"norm": (3.0, 4.0)}, {4: {"accuracy": 0.5}, 5: {"accuracy": 0.75}})
    frame = curve_frame(curve)
    assert list(frame.index) == [2, 4, 5]
    assert frame.index.name == "step"
    assert list(frame["evaluation/accuracy"])[1:] == [0.5, 0.75]
    assert list(curve_frame(TrainingCurve()).columns) == ["loss"]


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ModuleNotFoundError("no pandas", name="pandas")
        return found(name, *rest)

    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackage, match=r"job\.metrics\(\) needs pandas: pip install pandas"):
        needed("pandas", "job.metrics()", "pandas")
