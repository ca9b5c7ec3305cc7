"""T7: constants that an optimizer keeps in its state are the script's, and not those of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import backstay
from backstay._update._array_specs import array_specs
from backstay._update._engine import ShardEngine
from backstay._update._rules import analyse
from backstay._update._tree import describe

from .test_engine import apply, collect, gradients_of, make, pool, small

OPTIMIZERS = {
    "injected": lambda value: optax.inject_hyperparams(optax.sgd)(learning_rate=value),
    "decay": lambda value: optax.inject_hyperparams(optax.adamw)(1e-2, weight_decay=value),
    "nested": lambda value: optax.chain(
        optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=value, momentum=0.9)
    ),
    "in a condition": lambda value: optax.apply_if_finite(
        optax.inject_hyperparams(optax.sgd)(learning_rate=value), max_consecutive_errors=3
    ),
    "accumulated": lambda value: optax.MultiSteps(
        optax.inject_hyperparams(optax.sgd)(learning_rate=value), every_k_schedule=2
    ).gradient_transformation(),
    "masked": lambda value: optax.masked(
        optax.inject_hyperparams(optax.sgd)(learning_rate=value), {"a": True, "b": False, "c": True, "d": True}
    ),
    "schedule free": lambda value: optax.contrib.schedule_free(optax.sgd(0.1), 0.1, b1=value),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_t7_a_changed_constant_in_the_state_is_used(name: str) -> None:
    """An engine that continues with another constant makes the update of an optimizer that closes over it."""
    params, before, after = small(), OPTIMIZERS[name](0.5), OPTIMIZERS[name](0.25)
    tree, rule, parts, engines = make(before, params)
    for seed in (2, 3):
        apply(engines, [gradients_of(tree, seed)])
    snapshot = pool(array_specs(rule), engines)

    def read(key: str, start: int, stop: int) -> np.ndarray:
        return snapshot[key][start:stop]

    changed = analyse(after, tree)
    assert changed.constants
    continued = ShardEngine.restore(parts, 0, changed, read, 2)
    same = ShardEngine.restore(parts, 0, rule, read, 2)
    for engine in (engines[0], continued, same):
        for seed in (4, 5):
            apply([engine], [gradients_of(tree, seed)])
    for one, other in zip(collect(tree, engines), collect(tree, [same]), strict=True):
        np.testing.assert_array_equal(one, other)
    moved = [
        bool(np.any(one != other))
        for one, other in zip(collect(tree, engines), collect(tree, [continued]), strict=True)
        if one.size
    ]
    assert any(moved)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(1e-2),
        optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.5, 0.0, 5)),
        optax.contrib.prodigy(),
        optax.chain(optax.add_noise(0.1, 0.55, 3), optax.sgd(1e-2, momentum=0.9)),
    ],
    ids=["adam", "schedule", "prodigy", "noise"],
)
def test_a_state_that_updates_change_or_that_has_parameters_is_not_constant(optimizer) -> None:
    params = small()
    rule = analyse(optimizer, describe(params))
    names = [rule.states[index].path for index in rule.constants]
    assert not [name for name in names if "params0" in name or "mu" in name or "count" in name or "learning" in name]


def trained(optimizer: optax.GradientTransformation, steps: int, folder: Path) -> float:
    """Returns the parameter after that many steps with the gradient 1. A second call continues the first one."""
    result = backstay.train(
        init=lambda key: {"w": jnp.zeros(())},
        loss=lambda params, batch: params["w"],
        batches=lambda key: np.zeros(1),
        optimizer=optimizer,
        steps=steps,
        checkpoint=str(folder),
    )
    return float(result.params["w"])


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: optax.chain(optax.clip(9.0), one)])
def test_t7_a_script_with_another_learning_rate_continues_with_it(
    wrap, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(rate: float, steps: int) -> float:
        return trained(wrap(optax.inject_hyperparams(optax.sgd)(learning_rate=rate)), steps, tmp_path)

    assert run(0.1, 10) == pytest.approx(-1.0)
    assert run(0.001, 20) == pytest.approx(-1.01)
    assert "0.1 was replaced by 0.001" in capfd.readouterr().err


def test_t7_a_schedule_that_replaces_another_is_used(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The state has the present value of the schedule, which each update computes again and never reads."""

    def run(rate: float, steps: int) -> float:
        return trained(
            optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(rate)), steps, tmp_path
        )

    assert run(0.1, 10) == pytest.approx(-1.0)
    assert run(0.001, 20) == pytest.approx(-1.01)
    said = capfd.readouterr().err
    assert "the optimizer computes another update: 0.1 was replaced by 0.001" in said
    assert "are not used" not in said


def test_t7_a_constant_that_updates_change_stays_with_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def decaying(rate: float) -> optax.GradientTransformation:
        def update(gradients: Any, state: Any, params: Any = None) -> Any:
            return jax.tree.map(lambda leaf: -state["rate"] * leaf, gradients), {"rate": state["rate"] * 0.5}

        return optax.GradientTransformation(lambda params: {"rate": jnp.asarray(rate)}, update)

    def run(rate: float, steps: int) -> float:
        return trained(decaying(rate), steps, tmp_path)

    assert run(1.0, 1) == pytest.approx(-1.0)
    assert run(0.25, 2) == pytest.approx(-1.5)
    said = capfd.readouterr().err
    assert "the optimizer begins with other values: 1.0 was replaced by 0.25. They are not used" in said
    assert "computes another update" not in said
