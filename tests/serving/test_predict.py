"""`serve` checks `example`, `batch` and `predict`, and padding changes no answer."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backstay
from backstay._serving._program import ServedVersion, ServingProgram, padded_sizes
from backstay._serving._settings import ServingPorts, ServingSettings
from backstay._serving._signature import Signature
from backstay.errors import ConfigurationError

PARAMS = {"w": np.arange(6, dtype=np.float32).reshape(3, 2)}


def program_of(predict: Any, example: Any = None, sizes: tuple[int, ...] = (1, 4)) -> ServingProgram:
    return ServingProgram(
        predict, Signature.of(np.zeros(3, np.float32) if example is None else example), sizes, (PARAMS, None)
    )


def test_names_and_shapes_of_tensors_come_from_the_example() -> None:
    signature = Signature.of(
        {"image": np.zeros((8, 8), np.uint8), "more": [1.5, jax.ShapeDtypeStruct((2,), jnp.bfloat16)]}
    )
    assert [str(tensor) for tensor in signature.tensors] == [
        "image (UINT8, shape [-1, 8, 8])",
        "more.0 (FP32, shape [-1])",
        "more.1 (FP32, shape [-1, 2])",
    ]
    assert signature.shapes(4)["more"][1].dtype == jnp.bfloat16
    assert Signature.of(np.zeros(3)).tensors[0].datatype == "FP32", "as jit computes it"


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({}, "`example` has no arrays"),
        ({"a": np.zeros(2, np.complex64)}, "`example` has the dtype complex64 at a"),
        ({"a": "text"}, "at a: must be bool, an integer or a float"),
        ({"a": {"b": 1.0}, "a.b": 2.0}, "two leaves with the name a.b"),
    ],
)
def test_an_invalid_example_is_refused_by_name(example: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Signature.of(example)


def test_batch_is_a_number_or_a_list_of_sizes() -> None:
    assert padded_sizes(1) == (1,)
    assert padded_sizes(24) == (1, 2, 4, 8, 16, 24)
    assert padded_sizes([32, 8, 8]) == (8, 32)
    for invalid in (0, -1, True, 1.5, [], [0], "8", [True], None):
        with pytest.raises(ConfigurationError, match="must be a positive integer, or a list of them"):
            padded_sizes(invalid)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("predict", "message"),
    [
        (lambda params, state, x: x.sum(), r"returns the shape \(\) at output for 4 examples"),
        (lambda params, state, x: {"a": x[:1]}, r"returns the shape \(1, 3\) at a for 4 examples"),
        (lambda params, state, x: None, "the result of `predict` has no arrays"),
        (lambda params, state, x: x.astype(jnp.complex64), "the result of `predict` has the dtype complex64"),
        (lambda params, state, x: x @ params["v"], "`predict` raised KeyError when it was traced"),
        (lambda params: params, "`predict` raised TypeError when it was traced"),
        (lambda params, state, x: "text", "`predict` raised TypeError when it was traced"),
        (lambda params, state, x: jnp.zeros((len(x), len(x))), "only the first dimension may differ"),
    ],
)
def test_an_invalid_predict_is_refused_before_it_takes_traffic(predict: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        program_of(predict)


def test_t1_a_predict_that_mixes_the_examples_of_a_batch_is_refused() -> None:
    """A batch normalization with the statistics of the batch is an example."""
    program = program_of(lambda params, state, x: x - x.mean(0))
    version = ServedVersion(1, "m", PARAMS, None)
    with pytest.raises(ConfigurationError, match="returns another output for an example when the other examples"):
        program.check_rows(version)
    program_of(lambda params, state, x: x - x.mean(0), sizes=(1,)).check_rows(version)
    program_of(lambda params, state, x: x @ params["w"]).check_rows(version)


def quantized(x: Any) -> Any:
    scale = jnp.abs(x).max() / 127 + 1e-9
    return jnp.round(x / scale) * scale


@pytest.mark.parametrize(
    "mixes",
    [
        quantized,
        lambda x: x / (jnp.linalg.norm(x) + 1e-6),
        lambda x: x * 0 + x.min(),
        lambda x: x.cumsum(0),
        lambda x: x[::-1].cumsum(0)[::-1],
        lambda x: jax.nn.softmax(x, axis=0),
        lambda x: (100 * quantized(x).sum(-1)).astype(jnp.int32),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.uint8, np.int8])
@pytest.mark.parametrize("size", [2, 4])
def test_t1_a_predict_that_scales_an_example_by_others_is_refused(mixes: Any, dtype: Any, size: int) -> None:
    """Zeros have the same answer with each scale."""
    program = program_of(lambda params, state, x: mixes(x.astype(jnp.float32)), np.zeros(3, dtype), sizes=(1, size))
    with pytest.raises(ConfigurationError, match="returns another output for an example"):
        program.check_rows(ServedVersion(1, "m", PARAMS, None))


def normalized(x: Any) -> Any:
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


@pytest.mark.parametrize(
    "mixes",
    [
        lambda x: jnp.where(np.arange(3) < 2, normalized(x) + x, -1e9),
        lambda x: jnp.concatenate([1e4 * x.sum(-1, keepdims=True), jax.nn.sigmoid(normalized(x))], -1),
        lambda x: jax.nn.softmax(x + 0.02 * jnp.tanh(x.mean()) * np.arange(3)),
    ],
)
def test_t1_a_large_number_hides_no_other_that_mixes(mixes: Any) -> None:
    program = program_of(lambda params, state, x: mixes(x))
    with pytest.raises(ConfigurationError, match="returns another output for an example"):
        program.check_rows(ServedVersion(1, "m", PARAMS, None))


def test_t1_indices_of_a_table_of_two_rows_are_valid(caplog: pytest.LogCaptureFixture) -> None:
    version = ServedVersion(1, "m", PARAMS, None)
    with pytest.raises(ConfigurationError, match="returns another output for an example"):
        program_of(
            lambda params, state, x: normalized(jnp.take(TABLE[:2], x, axis=0).mean(1)), np.zeros(6, np.int32)
        ).check_rows(version)
    program_of(lambda params, state, x: jnp.take(TABLE[:2], x, axis=0).sum(1), np.zeros(6, np.int32)).check_rows(
        version
    )
    assert caplog.text == "", "no NaN in place of a row"
    program_of(lambda params, state, x: x * jnp.nan).check_rows(version)
    assert caplog.text.count("it is unknown whether predict mixes examples: output has no finite number") == 1


def test_lengths_that_are_too_large_do_not_refuse_a_predict(caplog: pytest.LogCaptureFixture) -> None:
    def packed(params: Any, state: Any, batch: Any) -> Any:
        x, lengths = batch["x"], batch["lengths"]
        of = jnp.repeat(jnp.arange(len(x)), lengths, total_repeat_length=x.size)
        place = jnp.arange(x.size) - (jnp.cumsum(lengths) - lengths)[of]
        own = jnp.where(jnp.arange(x.size) < lengths.sum(), x[of, place % x.shape[1]], 0)
        return jax.ops.segment_sum(own, of, len(x))

    example = {"x": np.zeros(5, np.float32), "lengths": np.zeros((), np.int32)}
    program_of(packed, example).check_rows(ServedVersion(1, "m", PARAMS, None))
    assert "output differs only beside integers of 100" in caplog.text


def test_only_the_compared_rows_are_kept() -> None:
    program = program_of(lambda params, state, x: x)
    rows, _ = program._answer(ServedVersion(1, "m", PARAMS, None), "zero", 3)
    assert [(row.base, row.shape) for row in rows] == [(None, (3,))]


TABLE = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)


@pytest.mark.parametrize(
    ("predict", "example"),
    [
        (lambda x: jnp.take(TABLE, x, axis=0), np.zeros(3, np.int32)),
        (lambda x: jax.nn.one_hot(x, 2) @ TABLE[:2], np.zeros((), np.uint8)),
        (jax.nn.softmax, np.zeros(3, np.float32)),
        (lambda x: jax.nn.softmax(x).argmax(-1), np.zeros((2, 3), np.float32)),
        (lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6), np.zeros(8, np.float32)),
        (lambda x: (x / jnp.abs(x).max(-1, keepdims=True)).astype(jnp.float16), np.zeros(3, np.float32)),
        (lambda x: jnp.log(-x), np.zeros(3, np.float32)),
        (lambda x: jnp.exp(x * 100), np.zeros(3, np.float16)),
        (lambda x: jnp.tanh(x @ jnp.ones((64, 64), jnp.bfloat16)), np.zeros(64, jnp.bfloat16)),
        (lambda x: ~x, np.zeros(3, np.bool_)),
        (lambda x: x, np.zeros((0,), np.float32)),
    ],
)
def test_a_predict_that_computes_each_example_on_its_own_is_accepted(predict: Any, example: Any) -> None:
    for size in (2, 4, 9):
        program_of(lambda params, state, x: predict(x), example, sizes=(size,)).check_rows(
            ServedVersion(1, "m", PARAMS, None)
        )


def test_noise_of_an_order_of_sums_and_refused_values_are_accepted() -> None:
    def noisy(x: Any) -> Any:
        random = np.random.default_rng()
        return x * (1 + 1e-3 * random.random(x.shape)).astype(np.float32)

    def strict(x: Any) -> Any:
        assert x.max() < 2, "there are two words"
        return x

    def calls(act: Any, dtype: Any) -> ServingProgram:
        return program_of(
            lambda params, state, x: jax.pure_callback(act, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
            np.zeros(3, dtype),
        )

    version = ServedVersion(1, "m", PARAMS, None)
    calls(lambda x: noisy(np.asarray(x)), np.float32).check_rows(version)
    calls(lambda x: strict(np.asarray(x)), np.int32).check_rows(version)


@given(rows=st.lists(st.integers(1, 3), min_size=1, max_size=3), seed=st.integers(0, 2**31))
def test_padding_and_neighbours_change_no_answer(rows: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = [[random.normal(size=(count, 3)).astype(np.float32)] for count in rows]
    total = sum(rows)
    size = wide().size_for(total)
    version = ServedVersion(1, "m", PARAMS, None)
    [found] = wide().run(version, wide().signature.batch(parts, size), total)
    whole = np.concatenate([part[0] for part in parts])
    np.testing.assert_allclose(found, np.tanh(whole @ PARAMS["w"]), rtol=1e-5, atol=1e-6)


@cache
def wide() -> ServingProgram:
    return program_of(lambda params, state, x: jnp.tanh(x @ params["w"]), sizes=(1, 2, 4, 9))


def test_a_result_of_bfloat16_is_answered_as_float32() -> None:
    program = program_of(lambda params, state, x: x.astype(jnp.bfloat16))
    assert program.outputs[0].datatype == "FP32"
    [found] = program.run(ServedVersion(1, "m", PARAMS, None), np.ones((4, 3), np.float32), 2)
    assert found.dtype == np.float32


def test_predict_is_traced_once_for_each_size_and_may_be_an_object_without_a_hash() -> None:
    class Model:
        traced = 0
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return self is other

        def __call__(self, params: Any, state: Any, x: Any) -> Any:
            self.traced += 1
            return x

    model = Model()
    program = program_of(model, np.zeros(2, np.float32), sizes=(1, 4))
    assert (model.traced, list(map(str, program.outputs))) == (2, ["output (FP32, shape [-1, 2])"])


def test_variables_of_a_service_with_this_name_are_not_settings() -> None:
    """Kubernetes sets them in each new pod, if the pod does not exclude them."""
    of_service = {
        "BACKSTAY_SERVE_SERVICE_HOST": "10.0.0.1",
        "BACKSTAY_SERVE_SERVICE_PORT": "80",
        "BACKSTAY_SERVE_SERVICE_PORT_HTTP": "80",
        "BACKSTAY_SERVE_PORT": "tcp://10.0.0.1:80",
        "BACKSTAY_SERVE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "BACKSTAY_SERVE_PORT_80_TCP_PROTO": "tcp",
        "BACKSTAY_SERVE_HTTP_PORT": "tcp://10.0.0.2:80",
    }
    assert ServingSettings().with_environment(of_service) == ServingSettings()


def test_variables_replace_settings_and_invalid_ones_are_named() -> None:
    settings = ServingSettings(step=3, ports=ServingPorts(http=1)).with_environment(
        {"BACKSTAY_SERVE_STEP": "400", "BACKSTAY_SERVE_FOLLOW": "false", "BACKSTAY_SERVE_GRPC_PORT": "0", "PATH": "x"}
    )
    assert (settings.step, settings.follow, settings.ports) == (400, False, ServingPorts(http=1, grpc=0))
    for key, value, message in (
        ("BACKSTAY_SERVE_STEP", "-1", "BACKSTAY_SERVE_STEP is '-1': must be a whole number from 0"),
        ("BACKSTAY_SERVE_STEP", "400.7", "BACKSTAY_SERVE_STEP is '400.7': must be a whole number from 0"),
        ("BACKSTAY_SERVE_HTTP_PORT", "99999", "must be a whole number from 0 to 65535"),
        ("BACKSTAY_SERVE_GRPC_PORT", "1e3", "must be a whole number from 0 to 65535"),
        ("BACKSTAY_SERVE_DRAIN_SECONDS", "nan", "must be a number from 0 to 3600"),
        ("BACKSTAY_SERVE_NAME", "", "name is '': must be a text that is not empty"),
        ("BACKSTAY_SERVE_FOLLOW", "yes", "BACKSTAY_SERVE_FOLLOW is 'yes': must be true or false"),
        ("BACKSTAY_SERVE_TOKEN_FILE", "/no/such", "/no/such cannot be read"),
        ("BACKSTAY_SERVE_PORT", "1", "BACKSTAY_SERVE_PORT is not a variable of a serving process"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ServingSettings().with_environment({key: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": "400"}, "step is '400': must be a whole number from 0"),
        ({"step": 400.7}, "step is 400.7: must be a whole number from 0"),
        ({"step": True}, "step is True"),
        ({"step": -1}, "step is -1"),
        ({"ports": 8080}, r"ports is 8080: must be backstay.ServingPorts\(http"),
        ({"ports": 0}, "ports is 0"),
        ({"name": 5}, "name is 5: must be a text"),
        ({"name": ""}, "name is '': must be a text that is not empty"),
        ({"checkpoint": 5}, "checkpoint is 5: must be a path or a URI"),
        ({"average": "no"}, "average is 'no': must be True or False"),
    ],
)
def test_an_invalid_argument_of_serve_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"example": np.zeros(3), "checkpoint": "memory://none", **arguments}
    with pytest.raises(ConfigurationError, match=message):
        backstay.serve(None, **given)  # type: ignore[arg-type]  # which is refused after all others


@pytest.mark.parametrize("port", [70_000, -1, "8080", 80.5, True, None])
def test_an_invalid_port_is_refused_by_name(port: Any) -> None:
    for name in ("http", "grpc"):
        with pytest.raises(
            ConfigurationError, match=rf"ServingPorts.{name} is .*: must be a whole number from 0 to 65535"
        ):
            ServingPorts(**{name: port})
    with pytest.raises(ConfigurationError, match=r"ServingPorts\.bind is 5: must be an address"):
        ServingPorts(bind=5)  # type: ignore[arg-type]


def test_whole_numbers_of_other_types_are_settings() -> None:
    settings = ServingSettings(step=np.int64(4), ports=ServingPorts(http=np.int64(1)))  # type: ignore[arg-type]
    assert (type(settings.step), type(settings.ports.http)) == (int, int)
