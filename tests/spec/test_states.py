"""The page of states has each state that the code can set, and their retries and budgets are those of the code."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product
from typing import Any, get_args

from backstay_spec import contract, states, status
from backstay_spec.causes import Blocked, Cause, verdict_of
from backstay_spec.types_status import Condition, Phase


def test_each_state_has_a_row() -> None:
    assert set(states.JOBS) == set(get_args(Phase))
    assert set(states.DEATHS) == set(Cause)
    assert set(states.OBSTACLES) == set(Blocked)


def test_the_loss_of_a_rank_has_its_evidence_in_the_row_of_its_cause() -> None:
    lost = {"state": {"terminated": {"exitCode": contract.GROUP_LOST_EXIT}}, "name": contract.CONTAINER}
    verdict = verdict_of({"status": {"phase": "Failed", "containerStatuses": [lost]}})
    assert "the pods of its rank lost each other" in verdict.text
    assert "the pods of a rank lost each other" in states.DEATHS[verdict.cause]


def test_an_obstacle_that_ends_the_job_immediately_is_not_retried() -> None:
    for blocked, row in states.OBSTACLES.items():
        assert (row.next == "") == blocked.permanent == (states.end_of(blocked) == "immediately")


def condition(kind: str, value: Any) -> Condition:
    return status.conditioned(None, kind, value, "Reason", "", datetime.now(UTC), 1)


def test_only_the_final_phases_are_final() -> None:
    """This does not depend on the other conditions."""
    final = {phase for phase, row in states.JOBS.items() if row.next == "final"}
    assert final == {"Succeeded", "Failed"}
    for ended, running, suspended in product((status.SUCCEEDED, status.FAILED), ("True", "False"), ("True", "False")):
        conditions = {
            ended: condition(ended, "True"),
            status.RUNNING: condition(status.RUNNING, running),
            status.SUSPENDED: condition(status.SUSPENDED, suspended),
        }
        assert status.phase_of(conditions) in final


def test_the_phases_that_follow_exist() -> None:
    for row in states.JOBS.values():
        assert row.next == "final" or set(row.next.split(", ")) <= set(states.JOBS)
