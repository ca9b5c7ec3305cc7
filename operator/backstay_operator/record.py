"""The job's history as the operator sends it to shard 0's server, which stores it beside the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["record_id", "record_of"]

_LEFT_OUT: Final = frozenset(
    {"conditions", "incarnations", "active", "backoff", "selector", "observedGeneration", "replicas", "workers"}
)
"""Fields that grow with the number of pods, or that mean nothing without the job."""


def record_of(status: Mapping[str, Any]) -> str:
    """Returns the job's status as JSON, with its history, without what grows with the number of pods."""
    kept = {name: value for name, value in status.items() if name not in _LEFT_OUT}
    return json.dumps(kept, separators=(",", ":"), allow_nan=False)


def record_id(status: Mapping[str, Any]) -> str:
    """Returns another text whenever something happened to the job; progress alone does not change the id."""
    history = status.get("history") or ()
    newest = history[-1] if history else {}
    known = [sum(name in entry for entry in history) for name in ("recovered", "report")]
    return f"{status.get('phase', '')}.{len(history)}.{newest.get('time', '')}.{known[0]}.{known[1]}"
