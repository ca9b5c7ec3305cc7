"""Checks the arguments that a script passes to `train`, and makes the plan that every pod of a job computes from them.

`Script` holds the arguments, `Beginning` the initial values of the model, and `ScriptPlan` its layout, its update rule
and what pods compare when they join. The lifecycles in `_roles`, and training in one process beside them, carry it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._lazy import lazily

if TYPE_CHECKING:
    from ._beginning import FrozenPart, on_processor
    from ._functions import OnUpdate, StopWhen, evaluation_of
    from ._plan import ScriptPlan, warn_of_plan
    from ._script import Script, check_alone, epochs_of, evaluated

__all__ = [
    "FrozenPart",
    "OnUpdate",
    "Script",
    "ScriptPlan",
    "StopWhen",
    "check_alone",
    "epochs_of",
    "evaluated",
    "evaluation_of",
    "on_processor",
    "warn_of_plan",
]

_HOMES: Final = {
    "FrozenPart": "._beginning",
    "OnUpdate": "._functions",
    "Script": "._script",
    "ScriptPlan": "._plan",
    "StopWhen": "._functions",
    "check_alone": "._script",
    "epochs_of": "._script",
    "evaluated": "._script",
    "evaluation_of": "._functions",
    "on_processor": "._beginning",
    "warn_of_plan": "._plan",
}

__getattr__ = lazily(__name__, _HOMES)
