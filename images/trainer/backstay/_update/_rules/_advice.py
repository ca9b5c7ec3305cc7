"""Why an optimizer cannot be used, and what to use instead: by the optax functions that made it."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, TypeVar

from ...errors import OptimizerError

_T = TypeVar("_T")
_MOST_OBJECTS: Final = 100_000
_MISSING: Final = re.compile(r"(?:(\w+)\.<locals>\.)?\w+\(\) missing \d+ required [\w-]+ arguments?: (.+)$")

_ONE_SERVER: Final = "set parameterServers.replicas to 1"
_SCHEDULE: Final = "Use a schedule of the step instead, such as optax.cosine_decay_schedule."
_STEP_SIZE: Final = (
    "{name} computes one step size from all leaves: use a fixed learning rate or a schedule instead, such as "
    f"optax.adamw(optax.cosine_decay_schedule(...)), or {_ONE_SERVER}"
)
_NORM: Final = (
    "{name} divides all leaves by one norm, and `clip_norm=` does not replace that: remove {name}, or " + _ONE_SERVER
)
_FINITE: Final = (
    "{name} inspects all leaves: remove it. Backstay skips every update that has a gradient which is not "
    "finite, and fails the job after spec.update.maxNonFinite of them in a row"
)
_EXAMPLES: Final = (
    "{name} needs a gradient of each example. A worker computes the mean gradient of its batch. No setting of Backstay "
    "replaces it."
)

# Functions that mix all leaves, each with advice.
_TOGETHER: Final[dict[str, str]] = {
    "clip_by_global_norm": (
        "{name} computes one norm of all leaves. Where it is the first transformation, remove it and pass `clip_norm=` "
        f"to train, which clips the mean gradient exactly over shards; elsewhere {_ONE_SERVER}"
    ),
    "apply_if_finite": _FINITE,
    "skip_not_finite": _FINITE,
    "MultiSteps": (
        "{name} with a should_skip_update_fn that reads all leaves decides about them together: remove that function, "
        f"or {_ONE_SERVER}"
    ),
    "flatten": (
        "{name} joins all leaves in one array: remove it, because an optimizer of single elements computes the same "
        f"without it; or {_ONE_SERVER}"
    ),
    "scale_by_lbfgs": f"{{name}} computes inner products of all leaves: {_ONE_SERVER}",
    "normalize": _NORM,
    "normalize_by_update_norm": _NORM,
    "prodigy": _STEP_SIZE,
    "dadapt_adamw": _STEP_SIZE,
    "mechanize": _STEP_SIZE,
    "scale_by_dog": _STEP_SIZE,
    "scale_by_dowg": _STEP_SIZE,
    "snapshot": f"{{name}} keeps a measurement of all leaves: remove it, or {_ONE_SERVER}",
}

# Functions that need more than gradients, state and parameters, each with advice.
_NEVER: Final[dict[str, str]] = {
    "reduce_on_plateau": f"{{name}} needs the loss at each update. {_SCHEDULE}",
    "scale_by_polyak": f"{{name}} needs the loss at each update. {_SCHEDULE}",
    "momo": f"{{name}} needs the loss at each update. {_SCHEDULE}",
    "momo_adam": f"{{name}} needs the loss at each update. {_SCHEDULE}",
    "scale_by_zoom_linesearch": (
        "{name} evaluates the loss several times in each update. Use a fixed learning rate instead: "
        "optax.lbfgs(learning_rate, linesearch=None) with one parameter server, or optax.adam."
    ),
    "scale_by_backtracking_linesearch": (
        "{name} evaluates the loss several times in each update. Use a fixed learning rate or a schedule instead."
    ),
    "hutchinson_estimator_diag_hessian": (
        "{name}, even as a part of optax.contrib.sophia, evaluates the loss inside an update for a second derivative. "
        "Use optax.adamw or optax.lion instead."
    ),
    "sam": "{name} with opaque_mode=True computes gradients inside an update. Use opaque_mode=False.",
    "lookahead": (
        "{name} needs optax.LookaheadParams, and not the parameters that `init` returns. Use the fast optimizer alone."
    ),
    "differentially_private_aggregate": _EXAMPLES,
    "monitor": "{name} changes the structure of its state in the first update. Remove it.",
    "measure_with_ema": "{name} returns a measurement instead of updates. Remove it.",
}


def _full(name: str) -> str:
    import optax.contrib

    if hasattr(optax, name):
        return f"optax.{name}"
    return f"optax.contrib.{name if hasattr(optax.contrib, name) else name.removeprefix('scale_by_')}"


def together(names: Collection[str]) -> str:
    """Advice for an optimizer that updates all leaves together and is made by these functions of optax."""
    # MultiSteps alone mixes nothing: it is named where no other function explains the leaves' dependence.
    found = [name for name in _TOGETHER if name in names]
    found = [_TOGETHER[name].format(name=_full(name)) for name in found if name != "MultiSteps" or len(found) == 1]
    if not found:
        found = [f"to clip by the global norm, pass `clip_norm=` to train; for anything else {_ONE_SERVER}"]
    return f"Advice: {'; '.join(found)}."


def never(names: Collection[str]) -> str:
    """Returns why Backstay cannot compute the optimizer, and a replacement; empty for unknown functions."""
    return " ".join(text.format(name=_full(name)) for name, text in _NEVER.items() if name in names)


def called(what: str, optimizer: Any, call: Callable[[], _T]) -> _T:
    """Returns the result of `call`, which calls ``optimizer.init`` or ``optimizer.update``.

    Args:
        what: ``init`` or ``update``.

    Raises:
        OptimizerError: the optimizer's own code raised an error; the message has the reason and advice.
    """
    try:
        return call()
    except OptimizerError:
        raise
    except Exception as error:
        first = "".join(str(error).strip().splitlines()[:1])
        raise OptimizerError(
            f"optimizer.{what} fails on the shapes of these parameters: {type(error).__name__}: {first.rstrip('.')}. "
            f"{_advice(optimizer, first)}"
        ) from error


def _advice(optimizer: Any, text: str) -> str:
    missing = _MISSING.search(text)
    names = {missing[1]} if missing is not None and missing[1] in _NEVER else factories(optimizer)
    how = "Backstay calls it inside jax.jit as `update(gradients, state, params)`, and passes nothing else"
    if found := never(names):
        return f"{how}: {found}"
    if missing is not None:
        return f"{how}: an optimizer that needs {missing[2]} cannot be used."
    return f"{how}: an optimizer that needs the loss, or decides in Python on the values of arrays, cannot be used."


def factories(optimizer: Any) -> frozenset[str]:
    """Returns the names of the functions of optax that made an optimizer, by what its functions close over."""
    names: set[str] = set()
    seen: set[int] = set()
    stack = [optimizer]
    while stack and len(seen) < _MOST_OBJECTS:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType) and _is_of_optax(value):
            names.add(value.__qualname__.partition(".")[0])
        stack.extend(_inside(value))
    return frozenset(names)


def _is_of_optax(value: types.FunctionType | type) -> bool:
    module = getattr(value, "__module__", None)  # None for a function of `exec`
    return isinstance(module, str) and module.startswith("optax.")


def _inside(value: Any) -> Iterable[Any]:
    match value:
        case types.FunctionType():
            wrapped = getattr(value, "__wrapped__", None)
            return [*map(_content, value.__closure__ or ()), *([] if wrapped is None else [wrapped])]
        case types.MethodType():
            return [value.__func__, *vars(value.__self__).values()] if hasattr(value.__self__, "__dict__") else []
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case tuple() | list():
            return value
        case dict():
            return value.values()
        case _ if _is_of_optax(type(value)):
            return vars(value).values() if hasattr(value, "__dict__") else []
    return []


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
