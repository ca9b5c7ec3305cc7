"""A training script and a loop in NumPy and optax that write local steps out again, from `docs/local-steps.md`.

The loop has nothing of Backstay but the fragment of each parameter, which `LocalSteps.fragment_of` defines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import backstay

Params = dict[str, Any]


def init(key: Any) -> Params:
    """Returns three layers of different sizes."""
    keys = jax.random.split(key, 3)
    return {
        "first": {"w": jax.random.normal(keys[0], (5, 7)), "b": jnp.zeros(7)},
        "second": {"w": jax.random.normal(keys[1], (7, 4)), "b": jnp.zeros(4)},
        "third": {"w": jax.random.normal(keys[2], (4, 3))},
    }


def loss(params: Params, batch: Any) -> Any:
    x, y = batch
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    hidden = jnp.tanh(hidden @ params["second"]["w"] + params["second"]["b"])
    return jnp.mean((hidden @ params["third"]["w"] - y) ** 2)


def data(step: int, rank: int, *, uneven: bool = False, bad: Sequence[tuple[int, int]] = ()) -> Any:
    """Returns the batch of a local step of a rank."""
    rng = np.random.default_rng([step, rank])
    size = 2 + (3 * rank + step) % 5 if uneven else 6
    x = rng.normal(size=(size, 5))
    y = np.sin(x[:, :3])
    return np.where((step, rank) in bad, np.nan, x), y


@dataclass(frozen=True)
class Case:
    """One job with local steps."""

    outer: Callable[[], Any]
    inner: Callable[[], Any] = lambda: optax.adamw(2e-2)
    updates: int = 6
    count: int = 4
    fragments: int = 1
    overlap: int = 0
    inner_state: str = "keep"
    uneven: bool = False
    bad: tuple[tuple[int, int], ...] = ()
    """The (local step, rank) of batches that are not finite."""

    @property
    def local(self) -> backstay.LocalSteps:
        return backstay.LocalSteps(
            self.count,
            self.inner(),
            inner_state=self.inner_state,  # type: ignore[arg-type]
            fragments=self.fragments,
            overlap=self.overlap,
        )

    def batch(self, step: int, rank: int) -> Any:
        return data(step, rank, uneven=self.uneven, bad=self.bad)


def _labels(params: Params) -> Any:
    return {name: jax.tree.map(lambda _, name=name: name, layer) for name, layer in params.items()}


def several_transforms() -> Any:
    return optax.multi_transform(
        {
            "first": optax.sgd(0.7, momentum=0.9, nesterov=True),
            "second": optax.adam(optax.linear_schedule(0.3, 0.03, 5)),
            "third": optax.sgd(optax.linear_schedule(1.0, 0.1, 5)),
        },
        _labels,
    )


def _frozen(params: Params) -> Any:
    return {name: jax.tree.map(lambda _, name=name: name == "second", layer) for name, layer in params.items()}


def frozen_mask() -> Any:
    return optax.chain(
        optax.sgd(0.7, momentum=0.9, nesterov=True),
        optax.masked(optax.set_to_zero(), _frozen),
    )


def frozen_label() -> Any:
    return optax.multi_transform(
        {"first": optax.sgd(0.7, momentum=0.9), "second": optax.set_to_zero(), "third": optax.adam(0.1)}, _labels
    )


def frozen_inner() -> Any:
    return optax.chain(optax.adamw(2e-2), optax.masked(optax.set_to_zero(), _frozen))


def nesterov() -> Any:
    return optax.sgd(0.7, momentum=0.9, nesterov=True)


JOBS = {
    "transforms": Case(several_transforms, fragments=2, overlap=1),
    "frozen": Case(frozen_mask, fragments=2),
    "not finite": Case(several_transforms, bad=((9, 1),), overlap=1),
}
"""Cases of jobs without backups."""

BACKUPS = {"backups": Case(nesterov, inner_state="reset", uneven=True, updates=8)}

ONE_PROCESS = JOBS | {
    "frozen by a label": Case(frozen_label, fragments=2, overlap=2),
    "frozen on both sides": Case(frozen_mask, frozen_inner, fragments=2, overlap=1),
    "not finite, no overlap": Case(nesterov, bad=((9, 1),)),
    "not finite in the steps ahead": Case(nesterov, bad=((9, 1),), overlap=3),
    "not finite, fragments": Case(several_transforms, bad=((5, 1),), fragments=2, overlap=1, updates=8),
    "not finite, fresh": Case(nesterov, bad=((9, 1),), inner_state="reset", overlap=2),
}


def arguments(case: Case) -> dict[str, Any]:
    """Returns the arguments of `train`."""
    return {
        "init": init,
        "loss": loss,
        "batches": lambda key: case.batch(key.step, key.rank),
        "optimizer": case.outer(),
        "local": case.local,
        "steps": case.updates,
        "seed": 1,
    }


def train() -> None:
    """The training script of a job."""
    jax.config.update("jax_enable_x64", True)
    backstay.train(**arguments((JOBS | BACKUPS)[os.environ["CASE"]]), log_every=0)


class Worker:
    """One rank, with its own parameters and those of the servers as they arrived last.

    Attributes:
        own: the parameters of the worker.
        base: for each parameter, the value of the servers that arrived last.
        inner: the state of the inner optimizer.
    """

    def __init__(self, case: Case, rank: int, fragment_of: Params) -> None:
        self.case, self.rank, self.fragment_of = case, rank, fragment_of
        self.optimizer = case.inner()
        self.gradient: Any = jax.jit(jax.grad(loss))
        self.update: Any = jax.jit(self.optimizer.update)
        self.own: Any = None
        self.base: Any = None
        self.inner: Any = None
        self.ahead = 0  # the steps of the next contribution that are made already
        self.before: Any = None  # the inner state before the contribution
        self.finite = True

    def receive(self, params: Params, fragment: int | None) -> None:
        """Returns the servers' answer, which is a fragment or everything."""
        if self.own is None or fragment is None:
            self.own = self.base = params
            self.ahead = 0
            return
        share = 0.5 if self.ahead else 0.0

        def chosen(of: int, new: Any, old: Any) -> Any:
            return new if of == fragment else old

        mixed = jax.tree.map(lambda mine, new: share * mine + (1 - share) * new, self.own, params)
        self.own = jax.tree.map(chosen, self.fragment_of, mixed, self.own)
        self.base = jax.tree.map(chosen, self.fragment_of, params, self.base)

    def steps(self, first: int, numbers: range) -> None:
        """Make steps of a contribution whose first local step is `first`."""
        if not numbers:
            return
        if numbers.start == 0:
            if self.case.inner_state == "reset" or self.inner is None:
                self.inner = self.optimizer.init(self.own)
            self.before, self.finite = self.inner, True
        for number in numbers:
            batch = self.case.batch(first + number, self.rank)
            gradient = self.gradient(self.own, batch)
            self.finite &= all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))
            updates, self.inner = self.update(gradient, self.inner, self.own)
            self.own = optax.apply_updates(self.own, updates)

    def contribute(self, version: int) -> tuple[Params, int, bool]:
        """Returns the difference, the number of examples, and whether all of it is finite."""
        case = self.case
        each = case.count // case.fragments
        first = version * each
        self.steps(first, range(self.ahead, each))
        difference = jax.tree.map(lambda old, new: old - new, self.base, self.own)
        examples = sum(len(case.batch(first + number, self.rank)[0]) for number in range(each))
        finite = self.finite
        if not finite:  # nothing remains of these steps
            self.inner = self.before
            self.own = self.base
        if version + 1 < case.updates:
            self.steps(first + each, range(case.overlap))
            self.ahead = case.overlap
        return difference, examples, finite


def expected(case: Case, world: int, sets: Sequence[Sequence[int]], *, by_examples: bool = False) -> Params:
    """Returns the last parameters of a job.

    Args:
        world: number of workers.
        sets: the ranks whose contributions made each update.
        by_examples: whether the contributions are weighted by their examples.
    """
    params: Any = jax.tree.map(np.asarray, init(jax.random.key(1)))
    fragment_of = case.local.fragment_of(params)
    outer = case.outer()
    # Compiled: optax computes schedules and bias corrections in float32, and a compiler rounds these differently.
    update: Any = jax.jit(outer.update)
    held = outer.init(params)
    workers = [Worker(case, rank, fragment_of) for rank in range(world)]
    for version, ranks in enumerate(sets):
        exchanged = (version - 1) % case.fragments if version else None
        made = []
        for worker in workers:
            worker.receive(params, exchanged)
            made.append(worker.contribute(version))
        if not all(made[rank][2] for rank in ranks):
            continue  # the servers skip the update
        fragment = version % case.fragments
        weights = [made[rank][1] if by_examples else 1 for rank in ranks]

        def mean(of: int, *differences: Any) -> Any:
            total = sum(weight * one for weight, one in zip(weights, differences, strict=True))  # noqa: B023
            return total / sum(weights) if of == fragment else 0 * total  # noqa: B023

        gradient = jax.tree.map(mean, fragment_of, *(made[rank][0] for rank in ranks))
        updates, new = update(gradient, held, params)
        after = optax.apply_updates(params, updates)
        params = jax.tree.map(lambda of, a, b: a if of == fragment else b, fragment_of, after, params)  # noqa: B023
        held = _advanced(new, held, fragment_of, fragment)
    return params


def _advanced(new: Any, old: Any, fragment_of: Params, fragment: int) -> Any:
    """Returns the outer state, whose arrays that belong to parameters change with their fragment, and counters with
    every update."""
    names = {jax.tree_util.keystr(path): of for path, of in jax.tree_util.tree_leaves_with_path(fragment_of)}

    def leaf(path: Any, a: Any, b: Any) -> Any:
        whole = jax.tree_util.keystr(path)
        own = [of for name, of in names.items() if whole.endswith(name)]
        return a if not own or own[0] == fragment else b

    return jax.tree_util.tree_map_with_path(leaf, new, old)
