"""Two pods have the same digest exactly when they compute the same update: it holds T4 and T6 when an image changes."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from backstay._update._partition import partition
from backstay._update._rules import analyse
from backstay._update._rules._advice import factories
from backstay._update._tree import describe

TABLE = Path(__file__).with_name("optimizer_digests.py")


@pytest.fixture(scope="module")
def two_processes():
    """The table's digests from two fresh processes that differ in what must not matter."""

    def start(seed, order):
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": "", "PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "error", str(TABLE), order]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    found = []
    for process in [start("1", "forwards"), start("2", "backwards")]:
        output, error = process.communicate()
        assert process.returncode == 0, error
        found.append(json.loads(output))
    return found


def test_t4_every_process_computes_the_same_digests(two_processes):
    one, other = two_processes
    assert one == other
    assert len(one) >= 40


def test_t4_different_optimizers_have_different_digests(two_processes):
    for part in (1, 2):  # of the program; of all
        for (one, mine), (other, theirs) in itertools.combinations(two_processes[0].items(), 2):
            assert mine[part] != theirs[part], (one, other)


SAME_STATE = [
    ("sgd .1", "sgd .01"),
    ("sgd .1", "closed over an array"),
    ("momentum", "nesterov"),
    ("adam 1e-3", "adam b2"),
    ("adamw", "adamw, masked"),
    ("adagrad", "adagrad, another start"),
    ("cosine 100", "own schedule"),
    ("injected 1e-3", "injected 1e-4"),
    ("every 3", "every 4"),
    ("lamb", "lamb 1e-4"),
]
OTHER_STATE = [
    ("sgd .1", "momentum"),
    ("adam 1e-3", "adam, bfloat16 state"),
    ("adam 1e-3", "lion"),
    ("sgd .1", "cosine 100"),
    ("multi", "multi, exchanged"),
    ("noisy, key 3", "sgd .1"),
]


def test_t7_the_structure_is_of_the_names_shapes_and_dtypes_alone(two_processes):
    structure = {name: digests[0] for name, digests in two_processes[0].items()}
    assert [structure[one] == structure[other] for one, other in SAME_STATE] == [True] * len(SAME_STATE)
    assert [structure[one] == structure[other] for one, other in OTHER_STATE] == [False] * len(OTHER_STATE)


def model(**renamed):
    tree = {"a": np.zeros((30, 7), np.float32), "b": np.zeros(70, np.float32)}
    return describe({renamed.get(name, name): leaf for name, leaf in tree.items()})


def test_t7_the_structure_does_not_depend_on_the_number_of_shards():
    tree = model()
    rule = analyse(optax.adam(1e-3), tree)
    parts = [partition(tree, rule, shards) for shards in (1, 2, 3)]
    assert len({each.structure_digest for each in parts}) == 1
    assert len({each.program_digest for each in parts}) == 1
    assert len({each.digest for each in parts}) == 3


def test_t7_another_name_shape_or_dtype_is_another_structure():
    others = [
        model(),
        model(a="c"),
        describe({"a": np.zeros((7, 30), np.float32), "b": np.zeros(70, np.float32)}),
        describe({"a": np.zeros((30, 7), np.float16), "b": np.zeros(70, np.float32)}),
    ]
    assert len({analyse(optax.adam(1e-3), tree).structure_digest for tree in others}) == 4


def test_the_names_of_functions_do_not_matter():
    def first(step):
        return 0.1 * step

    @jax.jit
    def second(number):
        return 0.1 * number

    tree = model()
    digests = {analyse(optax.sgd(schedule), tree).program_digest for schedule in (first, second)}
    assert len(digests) == 1


class Update:
    """An update function that is an object."""

    def __call__(self, updates, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g, updates), state


class WithoutModule(Update):
    """The class has no module, as a class of `exec`."""

    __module__ = None


class WithoutAttributes(Update):
    """The object has neither a module nor a name."""

    def __getattribute__(self, name):
        if name in ("__module__", "__qualname__", "__name__", "__dict__"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)


def scales(factor, updates, state, params=None):
    return jax.tree.map(lambda g: -factor * g, updates), state


def of_exec():
    found = types.FunctionType(Update.__call__.__code__, {"jax": jax})  # without a module
    return functools.partial(found, None)


def on_host(function):
    def update(updates, state, params=None):
        return jax.tree.map(
            lambda g: jax.pure_callback(function, jax.ShapeDtypeStruct(g.shape, g.dtype), g), updates
        ), state

    return update


UPDATES = {
    "object": Update,
    "object without a module": WithoutModule,
    "object without attributes": WithoutAttributes,
    "partial": lambda: functools.partial(scales, 0.1),
    "jit of a partial": lambda: jax.jit(functools.partial(scales, 0.1)),
    "function without a module": of_exec,
}
CALLED_ON_HOST = {
    "method of a number": lambda: (0.1).__mul__,
    "partial": lambda: functools.partial(np.multiply, 0.1),
    "another partial": lambda: functools.partial(np.multiply, 0.2),
    "object without a module": WithoutModule,
    "object without attributes": WithoutAttributes,
    "ufunc": lambda: np.negative,
}


def digest_of(update):
    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    factories(optimizer)
    return analyse(optimizer, model()).program_digest


@pytest.mark.parametrize("kind", UPDATES)
def test_t4_callables_of_any_kind_have_the_digest_of_their_computation(kind):
    assert digest_of(UPDATES[kind]()) == digest_of(Update())


def test_t4_callables_of_any_kind_can_be_called_on_the_host():
    digests = {kind: digest_of(on_host(make())) for kind, make in CALLED_ON_HOST.items()}
    assert len(set(digests.values())) == len(CALLED_ON_HOST)
    assert digests == {kind: digest_of(on_host(make())) for kind, make in CALLED_ON_HOST.items()}


@pytest.mark.parametrize("labels", [type("Labels", (), {"__module__": None, "__call__": lambda self, tree: "a"})()])
def test_labels_may_be_an_object_without_a_module(labels):
    optimizer = optax.multi_transform({"a": optax.sgd(0.1)}, labels)
    assert analyse(optimizer, model()).program_digest


def test_the_constants_can_be_shown():
    constants = analyse(optax.sgd(0.1), model()).program.constants
    assert "-0.1" in constants
    assert len(analyse(optax.adam(1e-3), model()).program.constants) < 20
