"""What a death costs (O4): a role's budget of restarts, and the wait of a place whose pods die before they worked."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from backstay_spec import contract
from backstay_spec.types import TrainingJobSpec
from backstay_spec.types_status import Backoff

LONGEST_WAIT: Final = timedelta(seconds=60)
# Crashes in a row of one place, before the job's first update, after which its script is held to be wrong: after waits
# of 1 + 2 + 4 + 8 + 16 s. Nothing is lost by then. Once there are updates, the budgets decide.
HOPELESS: Final = 6


def max_restarts(spec: TrainingJobSpec, role: str) -> int:
    """The budget of a role (value of the role label)."""
    if role == contract.ROLE_SERVER:
        return spec.parameter_servers.max_restarts
    if role == contract.ROLE_WORKER:
        return spec.workers.max_restarts
    return spec.evaluator.max_restarts if spec.evaluator is not None else 0


def budget_field(role: str) -> str:
    """Where in a TrainingJob the budget of a role is set."""
    part = {contract.ROLE_SERVER: "parameterServers", contract.ROLE_WORKER: "workers"}.get(role, "evaluator")
    return f"spec.{part}.maxRestarts"


def wait_after(failures: int) -> timedelta:
    """How long a place waits after its `failures`-th crash in a row before its first gradient: 1, 2, 4 ... 60 s."""
    # min() before the power: a job may fail often enough to overflow a timedelta.
    return min(LONGEST_WAIT, timedelta(seconds=2 ** min(failures - 1, 6)))


def backed_off(before: Backoff | None, now: datetime) -> Backoff:
    """The record of one more such crash."""
    failures = (before.failures if before is not None else 0) + 1
    return Backoff(failures=failures, not_before=now + wait_after(failures))
