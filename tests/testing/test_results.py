"""The file with what `train` returned in a pod of a tested job."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backstay import Result
from backstay.testing._results import read_result, write_result


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    "params",
    [
        {"w": jnp.arange(6.0).reshape(2, 3).T, "b": [jnp.float32(2), (jnp.zeros(0, jnp.int8),)], "none": None},
        {"half": jnp.ones(3, jnp.bfloat16), "quarter": jnp.ones(3, jnp.float8_e4m3fn)},
        jnp.int32(4),
        {"frozen": [np.arange(3) + 1j, np.zeros((0, 2), np.complex128), jnp.arange(3, dtype=jnp.int4)]},
    ],
)
def test_a_result_is_read_as_it_was_written(tmp_path: Path, params: Any) -> None:
    result = Result(params, 7, 0.5, {"accuracy": 0.25}, "memory://x", {"error": 1.0}, 2, {"mean": jnp.ones(2)})
    write_result(tmp_path / "result", result)
    (tmp_path / "other").touch()
    assert (tmp_path / "result").stat().st_mode == (tmp_path / "other").stat().st_mode, "another user may read it"
    found = read_result(tmp_path / "result")
    assert found is not None
    assert (found.step, found.loss, found.metrics, found.checkpoint) == (7, 0.5, {"accuracy": 0.25}, "memory://x")
    assert (found.train_metrics, found.rank) == ({"error": 1.0}, 2)
    for actual, expected in ((found.params, params), (found.state, result.state)):
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(one, other)


def test_a_tree_of_the_script_becomes_arrays_by_path(tmp_path: Path) -> None:
    write_result(tmp_path / "result", Result({"layer": Pair(jnp.zeros(2), jnp.ones(3))}, 1))
    found = read_result(tmp_path / "result")
    assert found is not None
    assert {name: array.shape for name, array in found.params.items()} == {"layer.first": (2,), "layer.second": (3,)}
    assert read_result(tmp_path / "none") is None
