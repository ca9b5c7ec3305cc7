"""The words of `backstay status` for a pod are those of the page of states."""

from __future__ import annotations

from itertools import product
from typing import Any

from backstay_client.view.follow import STOPPED, JobView
from backstay_client.view.pods import rows
from backstay_spec import states


def word(phase: str | None, *, ready: bool = False, deleting: bool = False) -> str:
    conditions = [{"type": "Ready", "status": str(ready)}]
    pod: dict[str, Any] = {"metadata": {"name": "p"}, "status": {"phase": phase, "conditions": conditions}}
    if deleting:
        pod["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    (row,) = rows(JobView("digits", "lab", pods=(pod,)))
    return row.state


def test_each_word_has_a_row_and_each_row_a_word() -> None:
    phases = (None, "Pending", "Running", "Succeeded", "Failed", STOPPED)
    found = {word(phase, ready=r, deleting=d) for phase, r, d in product(phases, (False, True), (False, True))}
    assert found == set(states.PODS)


def test_the_words_are_set_by_what_their_rows_say() -> None:
    assert word(None) == word("Pending") == "Pending"
    assert (word("Running"), word("Running", ready=True)) == ("Starting", "Ready")
    for phase in ("Pending", "Running"):
        assert word(phase, ready=True, deleting=True) == "Terminating"
    for phase in ("Succeeded", "Failed", STOPPED):
        assert word(phase, deleting=True) == phase
