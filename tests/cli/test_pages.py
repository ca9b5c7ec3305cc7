"""The page of a job and its parts show the job at any width."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from digits import NOW, PAGE, PODS, job, pod, text_of, view
from hypothesis import given
from hypothesis import strategies as st

from backstay_cli import listing, report
from backstay_cli.picture import Picture, page
from backstay_client.show.curve import Losses, bar, curve, thin
from backstay_client.show.html import job_card, job_rows
from backstay_client.show.lines import LineDisplay
from backstay_client.view import explain
from backstay_client.view.facts import facts
from backstay_client.view.follow import JobView, PodActivity, ShownEntry, view_of, with_page
from backstay_client.view.pods import doing_words, rows
from backstay_client.view.status import status_of
from backstay_client.words import clock, duration
from backstay_spec.job_report import JobReport, shown_rows


def test_a_pod_of_a_rank_that_waits_for_another_one_says_for_which() -> None:
    assert (
        doing_words(PodActivity("batch_wait", 30, 3.0, member=1))
        == "waits for pod 1, which waits for its input batch, its step 30"
    )


@pytest.mark.parametrize("width", [80, 160])
def test_the_page_of_a_job_states_what_it_does_what_died_and_what_that_cost(width: int) -> None:
    lines = text_of(page(view(), NOW, "a cluster"), width)
    assert max(len(line) for line in lines) <= width
    said = "\n".join(lines)
    assert "step 245 of 400" in said
    assert "local step" not in said
    assert "step 245 of 400  local step 5,880" in "\n".join(text_of(page(view(localSteps=24), NOW, "a cluster"), width))
    assert "time left 0:31" in said
    assert "worker 1 died: exit code 137 (SIGKILL); trains again after 4 s" in said
    assert "server 0 died: out of memory; back to the checkpoint of step 200: 12" in said
    assert "no updates for 5 s or longer" in said
    assert "waits for its input batch, its step 245, for 25 s" in said
    assert "checkpoint of step 200, 30 s ago" in said
    assert "1:20 ago  Running: all servers and at least one worker are ready" in said
    assert said.count("server 0") == 2, "the pod that was replaced is no row"


def test_the_node_of_a_slow_worker_is_named_if_the_pods_run_on_several() -> None:
    slow = [{"rank": 1, "part": "batch_wait", "seconds": 31.0, "updates": 40}]
    shown = view(waitedFor=slow)
    assert "worker 1, " in "\n".join(text_of(page(shown, NOW, "a cluster"), 160))
    other = {**PODS[-1], "spec": {"nodeName": "node-2"}}
    shown = with_page(view_of(job(waitedFor=slow), [*PODS[:-1], other], []), PAGE)
    assert "worker 1 on node-2, " in "\n".join(text_of(page(shown, NOW, "a cluster"), 160))


def test_a_small_terminal_gets_a_picture_that_fits_and_names_the_pods_that_are_not_ready() -> None:
    many = [pod("parameter-server", 0), *(pod("worker", rank, ready=rank != 70) for rank in range(100))]
    losses = Losses()
    values = {"trainMetrics": {"a": 0.5}, "metrics": {"b": 0.5}, "traffic": {"carried": 9.0}, "nonFiniteMetrics": ["a"]}
    shown = view_of(job(**values, goodput=0.8, nonFiniteLoss=9), many, [])
    for step in range(1, 50):
        losses.add(JobView("a", "b", report=JobReport(step=step, loss=1 / step)))
    lines = text_of(Picture(shown, 90.0, losses, hint="Ctrl-C", now=lambda: NOW), 80, 24)
    assert len(lines) <= 24
    said = "\n".join(lines)
    assert "worker 70" in said
    assert "more: " in said
    assert lines[-1] == "Ctrl-C"


def test_a_terminal_of_40_columns_shows_the_names() -> None:
    lines = text_of(page(view(), NOW, "a cluster"), 40)
    assert max(len(line) for line in lines) <= 40
    for name in ("server 0", "worker 0", "worker 1"):
        assert any(line.startswith(name) for line in lines), lines
    listed = text_of(listing.table(listing.views([job("digits"), job("mnist")]), everywhere=False, now=NOW), 40)
    assert [line.split()[0] for line in listed[1:]] == ["digits", "mnist"]


@pytest.mark.parametrize("phase", ["Running", "Suspended", "Failed", "Succeeded"])
def test_rates_and_the_time_left_are_facts_of_a_job_that_runs(phase: str) -> None:
    """The end keeps the rates that were seen last, and only the report at the end shows the newest one."""
    live = view()
    assert {"examples/s", "updates/s", "time left"} <= {fact.label for fact in facts(live)}
    found = replace(live, phase=phase)
    labels = {"examples/s", "updates/s", "time left"} & {fact.label for fact in facts(found)}
    assert bool(labels) == (phase == "Running")
    assert ("updates/s" in "".join(text_of(page(found, NOW, "a cluster"), 300))) == (phase == "Running")
    said = "\n".join(report.lines(found, 1.0, Path("/logs")))
    assert ("examples/s" in said, "updates/s" in said) == (True, phase == "Running")


def test_a_fact_is_in_all_formats_that_have_its_section() -> None:
    values = {"trainMetrics": {"accuracy": 0.5}, "metrics": {"mse": 0.125}, "traffic": {"carried": 1000.0}}
    shown = view(**values, goodput=0.8, localSteps=24, nonFiniteLoss=9, nonFiniteMetrics=["accuracy"])
    assert {fact.label for fact in facts(shown)} >= {row.shown for row in shown_rows().values()}
    lines: list[str] = []
    LineDisplay(lines.append, interval=0.0).show(shown)
    formats: list[tuple[list[str], list[Any]]] = [
        (text_of(page(shown, NOW, "a cluster"), 300), []),
        (card := [job_card(status_of(shown))], []),
        ([*report.lines(shown, 1.0, Path("/logs"))], ["numbers", "metrics", "results", "costs", "deaths"]),
        (lines, ["progress", "numbers", "metrics", "deaths"]),
    ]
    for said, sections in formats:
        words = html.unescape(re.sub("<[^>]*>", " ", "\n".join(said)))
        # A card has a cell for each of both, and a line omits the names of metrics.
        named = [
            (fact.text, fact.label if said is card else "" if said is lines else fact.words)
            for fact in facts(shown, *sections)
        ]
        assert [pair for pair in named if not all(text in words for text in pair)] == []


@pytest.mark.parametrize(
    ("between", "slots", "costs"),
    [
        ("TrainingInterrupted", ["parameter-server-1", "worker-1"], ["12 updates are redone", ""]),
        ("Suspended", ["parameter-server-0", "worker-1"], ["", ""]),
        ("Running", ["worker-0", "worker-1"], ["", ""]),
        ("Running", [], []),
    ],
)
def test_updates_that_are_redone_are_the_cost_of_a_server_or_an_event_of_the_job(
    between: str, slots: list[str], costs: list[str]
) -> None:
    """A worker may die in between, or a job is resumed from an older checkpoint, without any death."""
    history = [
        ShownEntry(20.0 + at, "Warning", "Crashed", f"{slot} died: exit code 1", slot) for at, slot in enumerate(slots)
    ]
    back = ShownEntry(30.0, "Warning", "RolledBack", "12 updates are redone")
    shown = replace(view(), history=(*history, ShownEntry(25.0, "Normal", between, "between"), back))
    assert [death.redone for death in explain.deaths(shown)] == costs
    events = [event.text for event in explain.job_events(shown)]
    assert sum(back.message in text for text in events) == 1
    assert (events[-1] == back.message) == (not any(costs))


def test_the_object_for_scripts_has_finite_numbers_only() -> None:
    found = explain.as_object(view(), NOW)
    json.dumps(found, allow_nan=False)
    assert (found["progress"], found["secondsLeft"], found["live"]) == (245 / 400, 31.0, True)
    first, second = found["deaths"]
    assert (first["slot"], first["cause"], first["recoveredAfterSeconds"], first["redone"]) == (
        "worker-1",
        "Crashed",
        3.5,
        None,
    )
    assert (second["recoveredAfterSeconds"], second["redone"]) == (
        None,
        "back to the checkpoint of step 200: 12 updates are redone",
    )
    assert [one["does"] for one in found["pods"]][1:] == [
        "computes, its step 245",
        "waits for its input batch, its step 245, for 25 s",
    ]
    diverged = explain.as_object(view(loss=None), NOW)
    assert diverged["loss"] == 0.2


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({"phase": "Suspended"}, "resume it: kubectl patch tj digits --type merge"),
        ({"phase": "Succeeded"}, "backstay.load('file:///ck')"),
        (
            {
                "conditions": [{"type": "Checkpointing", "status": "False", "reason": "NotConfigured"}],
                "checkpoint": None,
            },
            "set spec.checkpoint",
        ),
        (
            {"roles": {"ParameterServer": {"desired": 1, "ready": 1, "restarts": 8, "disruptions": 0}}},
            "8 of 10 restarts of spec.parameterServers are used",
        ),
        ({"phase": "Failed"}, "backstay logs digits --role server --rank 0"),
    ],
)
def test_the_page_states_what_to_do_next(status: dict[str, Any], says: str) -> None:
    assert any(says in step for step in explain.next_steps(view(**status), NOW))


def test_a_healthy_job_needs_nothing() -> None:
    assert list(explain.next_steps(view(), NOW)) == []


def test_a_job_without_updates_shows_what_it_waits_for_and_no_rate_or_time_left() -> None:
    waits = {"seconds": 34.0, "text": "worker 1 waits for its input batch, for 34 s"}
    shown = with_page(view_of(job(), PODS, []), {**PAGE, "waits": waits})
    assert (shown.seconds_left, shown.report.updates_per_second, shown.report.examples_per_second) == (None, None, None)
    said = "\n".join(text_of(page(shown, NOW, "a cluster"), 80))
    assert "no update for 34 s: worker 1 waits for its input batch, for 34 s" in said
    assert "left" not in said


def test_a_standby_is_distinct_from_the_active_server() -> None:
    pods = [pod("parameter-server", 0, 1), pod("parameter-server", 0, 2)]
    shown = view_of(job(active={"parameter-server-0": 1}), pods, [])
    assert [(row.slot, row.does) for row in rows(shown)] == [
        ("server 0", "serves step 240"),
        ("server 0 (standby)", "has the same state as its server"),
    ]


def test_jobs_that_run_come_first_and_wide_terminals_get_more() -> None:
    found = listing.views([job("a", phase="Succeeded"), job("b"), job("c", phase="Failed")])
    assert [one.name for one in found] == ["b", "a", "c"]
    narrow = text_of(listing.top_table(found, everywhere=True, width=80, now=NOW), 80)
    wide = text_of(listing.top_table(found, everywhere=True, width=160, now=NOW), 160)
    assert max(len(line) for line in narrow) <= 80
    assert "last death" in wide[0]
    assert "server 0, OutOfMemory, 50 s ago" in wide[1]
    usual = text_of(listing.top_table(found, everywhere=False, width=120, now=NOW), 120)
    assert "Running  " in usual[1], "only the last death makes room"
    assert "server 0, O" in usual[1]
    long = listing.views([job("a-job-with-quite-a-long-name")])
    assert "Running  " in text_of(listing.top_table(long, everywhere=False, width=80, now=NOW), 80)[1]
    json.dumps(listing.as_rows(found, NOW), allow_nan=False)


def test_a_loss_that_was_not_finite_is_nan_in_tables_and_a_job_that_has_ended_has_no_rate() -> None:
    found = listing.views([job("a", loss=0.25, step=9, nonFiniteLoss=9), job("b", phase="Succeeded")])
    head, *lines = text_of(listing.top_table(found, everywhere=False, width=120, now=NOW), 120)
    rate, loss = (head.index(name) + len(name) for name in ("examples/s", "loss"))
    assert [(line[:rate].split()[-1], line[:loss].split()[-1]) for line in lines] == [("128", "NaN"), ("–", "0.25")]
    assert "<td>NaN</td>" in job_rows([status_of(view) for view in found])


# ---- Curves and durations ----


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=60), st.integers(1, 40), st.integers(1, 5))
def test_any_points_make_a_curve_of_that_size_or_none(
    points: list[tuple[float, float]], width: int, height: int
) -> None:
    ordered = sorted((point for point in points if point[0] == point[0]), key=lambda point: point[0])
    lines = curve([(x, y) for x, y in ordered if abs(x) < 1e300 and abs(y) < 1e300], width, height)
    assert [len(line) for line in lines] in ([], [width] * height)


def test_a_curve_has_no_gaps_and_falls() -> None:
    lines = curve([(0, 4.0), (10, 1.0)], 10, 2)
    assert all(lines[0][at] != "⠀" or lines[1][at] != "⠀" for at in range(10))
    assert lines[0][0] != "⠀"
    assert lines[1][-1] != "⠀"


@given(st.floats(0, 1), st.integers(1, 80))
def test_a_bar_has_its_width(fraction: float, width: int) -> None:
    assert len(bar(fraction, width)) == width


def test_a_thinned_list_keeps_the_newest() -> None:
    points = [(float(n), 0.0) for n in range(101)]
    assert thin(points, 100)[-1] == (100.0, 0.0)
    assert len(thin(points, 100)) == 51


def test_the_losses_of_steps_that_are_redone_are_replaced() -> None:
    losses = Losses()
    for step, loss in ((10, 9.0), (20, 5.0), (15, 6.0)):
        losses.add(JobView("a", "b", report=JobReport(step=step, loss=loss)))
    assert losses.ends == (9.0, 6.0)


def test_durations_for_people() -> None:
    assert [duration(s) for s in (0.04, 0.94, 1, 59.4, 59.6, 61, 3600, 3720, 90_000)] == [
        "0.0 s",
        "0.9 s",
        "1 s",
        "59 s",
        "1 min",
        "1 min 1 s",
        "1 h",
        "1 h 2 min",
        "1 d 1 h",
    ]
    assert [clock(s) for s in (0, 7.9, 750, 3723)] == ["0:00", "0:07", "12:30", "1:02:03"]
