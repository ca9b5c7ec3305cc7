"""Arguments of `train` and of its helpers in the types that scripts have."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import backstay
from backstay import LocalSteps, StoreTo
from backstay.errors import ConfigurationError
from backstay_spec.whole import whole

KINDS = [np.int64, np.int32, np.uint8, np.asarray, lambda value: jnp.asarray(value, jnp.int32)]


def arguments(**more):
    return {
        "init": lambda key: {"w": jnp.zeros(())},
        "loss": lambda params, batch: (params["w"] - 1.0) ** 2,
        "batches": backstay.from_dataset(np.zeros((8, 1)), batch_size=2),
        "optimizer": optax.sgd(0.1),
        "steps": 2,
        **more,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_of_numpy_and_jax_are_whole_numbers(kind) -> None:
    result = backstay.train(
        **arguments(
            steps=kind(2),
            seed=kind(3),
            evaluate_every=kind(1),
            evaluate=lambda params: {"w": 1.0},
            batches=backstay.from_dataset(
                np.zeros((8, 1)), batch_size=kind(2), seed=kind(1), workers=kind(1), ahead=kind(1)
            ),
            local=LocalSteps(kind(2), optax.sgd(0.1), fragments=kind(1), overlap=kind(0)),
            optimizer=None,
        )
    )
    assert result.step == 2
    kept = StoreTo("/tmp/x", every_steps=kind(3), keep=kind(2))
    assert (type(kept.every_steps), kept.every_steps, kept.keep) == (int, 3, 2)


@pytest.mark.parametrize("value", [np.True_, np.bool_(False)])
def test_booleans_of_numpy_are_booleans(value) -> None:
    def loss(params, *more):
        assert len(more) == (3 if value else 1)  # state, batch and key
        error = (params["w"] - 1.0) ** 2
        return (error, more[0]) if value else error

    def init(key):
        return ({"w": jnp.zeros(())}, {"n": jnp.zeros(())}) if value else {"w": jnp.zeros(())}

    batches = backstay.from_dataset(np.zeros((8, 1)), batch_size=2, shuffle=value)
    more = {"has_state": value, "has_rng": value, "deterministic": value, "loss": loss, "init": init}
    assert backstay.train(**arguments(batches=batches, **more)).step == 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: backstay.train(**arguments(deterministic="no")), "deterministic is 'no': must be True or False"),
        (lambda: backstay.from_dataset([1, 2], batch_size=1, shuffle="no"), "shuffle is 'no', must be True or False"),
        (lambda: backstay.from_dataset([1, 2], batch_size=1, ahead_bytes="2"), "ahead_bytes is '2', must be a number"),
        (lambda: backstay.from_dataset([1, 2], batch_size=1, ahead_bytes=-1), "ahead_bytes is -1, must be a number"),
        (lambda: backstay.Wire("Int8", error_feedback="no"), "error_feedback is 'no': must be True, False or None"),
        (lambda: backstay.train(**arguments(log_every=None)), "log_every is None: must be a number"),
        (
            lambda: backstay.train(**arguments(checkpoint=2)),
            "checkpoint is 2: must be a path, a URI or a",
        ),
        (
            lambda: backstay.train(**arguments(start_from=[1])),
            "start_from is [1]: must be a path, a URI or a",
        ),
        (lambda: backstay.outer_optimizer(fragments=2.5), "fragments is 2.5: must be a whole number, 1 or more"),
        (lambda: backstay.outer_optimizer(warmup=True), "warmup is True: must be a whole number, 0 or more"),
    ],
)
def test_what_is_not_of_the_type_is_refused(make, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        make()


def test_numbers_of_few_bits_do_not_overflow() -> None:
    """100 updates of warm-up times 2 fragments are more than an int8 has."""
    for of_kind in (np.int8(2), jnp.int8(2)):
        found, wanted = (backstay.outer_optimizer(fragments=fragments) for fragments in (of_kind, 2))
        state, of_wanted = (each.init({"w": jnp.ones(())}) for each in (found, wanted))
        for _ in range(3):
            updates, state = found.update({"w": jnp.ones(())}, state)
            of_int, of_wanted = wanted.update({"w": jnp.ones(())}, of_wanted)
        assert updates == of_int
    assert StoreTo("/tmp/x", every_seconds=np.float32(2)).every_seconds == 2


@pytest.mark.parametrize("of_kind", [float, np.float32, np.float64, np.asarray, jnp.asarray, jnp.bfloat16])
def test_numbers_of_every_type_are_taken(of_kind) -> None:
    half = of_kind(0.5)
    local = backstay.LocalSteps(2, optax.sgd(0.1), overlap=1, mixing=half)
    assert (local.mixing, type(local.mixing)) == (0.5, float)
    assert StoreTo("/tmp/x", every_seconds=half).every_seconds == 0.5
    assert backstay.from_dataset([1, 2], batch_size=1, ahead_bytes=of_kind(2.0)).ahead_bytes == 2
    assert backstay.train(**arguments(clip_norm=half, average=half, log_every=half)).step == 2


@pytest.mark.parametrize("value", ["0.5", b"1", True, np.bool_(True), np.full(2, 0.5), jnp.full(2, 0.5), 0.5j, [0.5]])
def test_what_is_not_a_number_is_refused(value) -> None:
    with pytest.raises(ConfigurationError, match=r"mixing is .*: must be a number"):
        backstay.LocalSteps(2, optax.sgd(0.1), overlap=1, mixing=value)
    with pytest.raises(ConfigurationError, match=r"every_seconds is .*: must be a number"):
        StoreTo("/tmp/x", every_seconds=value)
    for name in ("clip_norm", "average", "log_every"):
        with pytest.raises(ConfigurationError, match=f"{name} is .*: must be (a|the decay)"):
            backstay.train(**arguments(**{name: value}))


@pytest.mark.parametrize("value", [True, 1.0, np.float64(2), "3", np.bool_(True), np.zeros(2, int), None])
def test_what_is_not_a_whole_number_is_refused(value) -> None:
    assert whole(value) is value
    with pytest.raises(ConfigurationError, match="must be a whole number"):
        backstay.train(**arguments(steps=value))


def test_disabled_jit_is_refused_in_one_sentence_with_what_to_use_instead() -> None:
    with jax.disable_jit(), pytest.raises(ConfigurationError, match=r"call loss\(params, batch\) by itself"):
        backstay.train(**arguments())


@pytest.mark.parametrize("uri", ["s3:a", "https://a"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(uri: str) -> None:
    with pytest.raises(ConfigurationError, match="the checkpoint folder"):
        StoreTo(uri)
