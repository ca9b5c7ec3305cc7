"""The reference page of conditions and events has exactly the reasons that the operator writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from backstay_spec import status
from backstay_spec.causes import Blocked, Cause
from backstay_spec.reasons import CONDITIONS, EVENTS, FAILURES

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "operator" / "backstay_spec"
COORDINATION = ROOT / "images" / "trainer" / "backstay" / "_coordination"


def calls(folder: Path, *names: str) -> Iterator[ast.Call]:
    """Yields each call of a function or method with one of these names."""
    for module in sorted(folder.rglob("*.py")):
        if module.name == "reasons.py":
            continue
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in names:
                    yield node


def literals(node: ast.expr) -> set[str]:
    """Returns the strings that an expression can have, as far as they are literals of it."""
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def test_every_event_that_is_sent_is_documented_and_no_other() -> None:
    sent = {reason for call in calls(SPEC, "normal", "warning") for reason in literals(call.args[0])}
    sent |= set(Cause) | (set(Blocked) - {Blocked.HELD}) | {"Superseded"}  # the reason of a deletion is an expression
    documented = [event.reason for event in EVENTS]
    assert sorted(documented) == sorted(sent)


def test_every_reason_of_a_condition_is_documented() -> None:
    """Reasons that are expressions are those of pods that do not start, and of failures."""
    names = {name: value for name, value in vars(status).items() if isinstance(value, str) and name.isupper()}
    documented = {condition.type: set(condition.reasons) for condition in CONDITIONS}
    found: dict[str, set[str]] = {}
    for call in calls(SPEC, "Statement"):
        if len(call.args) < 3:
            continue
        kind, _, reason = call.args[:3]
        types = [names[kind.attr]] if isinstance(kind, ast.Attribute) and kind.attr in names else list(documented)
        reasons = literals(reason)
        if isinstance(reason, ast.Attribute) and reason.attr in names:
            reasons = {names[reason.attr]}
        for one in types if len(types) == 1 else []:
            found.setdefault(one, set()).update(reasons)
    assert {status.PODS_READY, status.RUNNING, status.TRAINED} <= set(documented)
    for kind, reasons in found.items():
        assert reasons <= documented[kind], kind


def test_every_failure_that_is_reported_is_documented() -> None:
    planned = {reason for call in calls(SPEC, "JobFailure") for reason in literals(call.args[0])}
    trained = {call.args[0] for call in calls(COORDINATION, "fail") if call.args}
    reported = planned | {reason for node in trained for reason in literals(node)}
    assert "MaxRestartsExceeded" in reported
    assert "NonFiniteGradients" in reported
    assert reported <= {failure.reason for failure in FAILURES}


def test_every_condition_type_is_documented() -> None:
    public = {name: value for name, value in vars(status).items() if name.isupper() and not name.startswith("_")}
    types = {value for name, value in public.items() if isinstance(value, str) and not name.startswith("REASON")}
    assert types == {condition.type for condition in CONDITIONS}
