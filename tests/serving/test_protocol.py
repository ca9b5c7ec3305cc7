"""Requests of HTTP become arrays, or are refused with 400 and the name of the mistake, for any bytes (O7)."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._serving._batcher import BatchAnswer, RequestRefused
from backstay._serving._program import ServedVersion, ServingProgram
from backstay._serving._protocol import answer_rest, read_rest, refuse_other_values
from backstay._serving._signature import Signature

EXAMPLE = {"x": np.zeros((2,), np.float32), "n": np.zeros((), np.uint8), "on": np.zeros((), np.bool_)}


@cache
def program() -> ServingProgram:
    return ServingProgram(lambda params, state, batch: dict(batch), Signature.of(EXAMPLE), (1, 4), ({}, None))


X = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2]}
N = {"name": "n", "datatype": "UINT8", "shape": [1], "data": [7]}
ON = {"name": "on", "datatype": "BOOL", "shape": [1], "data": [True]}


def read(*inputs: Any, **more: Any) -> Any:
    return read_rest(json.dumps({"inputs": list(inputs), **more}).encode(), None, program())


def with_(of: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {**of, **changed}


def test_inputs_in_any_order_become_arrays_in_the_order_of_the_signature() -> None:
    call = read(ON, X, N, id="a", outputs=[{"name": "x"}])
    assert [array.tolist() for array in call.arrays] == [[7], [True], [[1.5, -2.0]]]
    assert [array.dtype.name for array in call.arrays] == ["uint8", "bool", "float32"]
    assert (call.rows, call.id, set(call.wanted)) == (1, "a", {"x"})
    two = with_(X, shape=[2, 2], data=[[1, 2], [3, 4]])
    nested = read(two, with_(N, shape=[2], data=[1, 2]), with_(ON, shape=[2], data=[True, False]))
    assert nested.arrays[2].tolist() == [[1, 2], [3, 4]]


def test_o7_texts_are_refused_before_an_array_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy would make each text as wide as the longest one: 2 GB for a body of 0.5 MB."""
    tensor = program().signature.tensors[2]
    monkeypatch.setattr(np, "array", None)
    for data in (["x" * 500_000, *[""] * 1000], [["", "x"]], [None], [{"a": 1}]):
        with pytest.raises(RequestRefused, match="has values that are not FP32") as refused:
            refuse_other_values(tensor, data)
        assert refused.value.status == 400


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([X, N], r"the request has no input on \(BOOL, shape \[-1\]\)"),
        ([X, X, N, ON], "the input x is given twice"),
        ([with_(X, name="z"), N, ON], "there is no input 'z': the model has n"),
        ([with_(X, datatype="FP64"), N, ON], "x has the datatype 'FP64': must be FP32"),
        ([with_(X, shape=[1, 3]), N, ON], r"x has the shape \[1, 3\]: must be \[-1, 2\]"),
        ([with_(X, shape=[2]), N, ON], r"x has the shape \[2\]: must be"),
        ([with_(X, shape="2"), N, ON], "x has the shape '2'"),
        ([with_(X, shape=[1.0, 2]), N, ON], "x has the shape"),
        ([with_(X, shape=[True, 2]), N, ON], "x has the shape"),
        ([with_(X, shape=[0, 2], data=[]), N, ON], "x has 0 examples: a request must have from 1 to 4"),
        ([with_(X, shape=[5, 2], data=[0] * 10), N, ON], "x has 5 examples: a request must have from 1 to 4"),
        ([with_(X, shape=[2, 2], data=[0] * 4), N, ON], r"different numbers of examples: \[1, 2\]"),
        ([with_(X, data=[1]), N, ON], "x has 1 elements: its shape needs 2"),
        ([with_(X, data=[[1], [2]]), N, ON], r"the data of x has the shape \[2, 1\]: must be \[1, 2\]"),
        ([with_(X, data=[[1], [2, 3]]), N, ON], "rows of different lengths"),
        ([with_(X, data=["1", "2"]), N, ON], "the data of x has values that are not FP32"),
        ([with_(X, data=[None, 1]), N, ON], "the data of x has values that are not FP32"),
        ([with_(X, data=[True, True]), N, ON], "the data of x has values that are not FP32"),
        ([with_(X, data=[1e300, 1]), N, ON], "the data of x has values outside of FP32"),
        ([with_(X, data=None), N, ON], 'x must have a list "data"'),
        ([X, with_(N, data=[256]), ON], "the data of n has values outside of UINT8"),
        ([X, with_(N, data=[-1]), ON], "the data of n has values outside of UINT8"),
        ([X, with_(N, data=[1.5]), ON], "the data of n has values that are not UINT8"),
        ([X, with_(N, data=[2**70]), ON], "is not JSON|the data of n has values"),
        ([X, N, with_(ON, data=[1])], "the data of on has values that are not BOOL"),
        ([with_(X, parameters={"binary_data_size": 9}, data=None), N, ON], "x has the binary_data_size 9: 0 are left"),
        ([with_(X, parameters=[1]), N, ON], '"parameters" must be an object'),
        ([1], 'a list "inputs" of objects'),
    ],
)
def test_o7_a_wrong_input_is_refused_by_name(inputs: list[Any], message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as refused:
        read(*inputs)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"outputs": [{"name": "z"}]}, "there is no output 'z': the model has n, on, x"),
        ({"outputs": [3]}, '"outputs" must be a list of objects'),
        ({"outputs": 3}, '"outputs" must be a list of objects'),
        ({"id": 3}, '"id" must be a text'),
        ({"id": "x" * 5000}, '"id" must be a text'),
    ],
)
def test_o7_a_wrong_request_is_refused_by_name(more: Any, message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        read(X, N, ON, **more)


def binary(x: bytes, size: int | None = None) -> tuple[bytes, str]:
    parameters = {"binary_data_size": len(x) if size is None else size}
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": parameters}
    head = json.dumps({"inputs": [tensor, N, ON]}).encode()
    return head + x, str(len(head))


def test_binary_tensors_are_read_and_answered() -> None:
    body, length = binary(np.float32([3, 4]).tobytes())
    call = read_rest(body, length, program())
    assert call.arrays[2].tolist() == [[3, 4]]
    answer = BatchAnswer(ServedVersion(8, "manifest", {}, None), call.arrays)
    text, none = answer_rest(call, answer, program(), "m")
    document = json.loads(text)
    assert none is None
    assert (document["model_version"], document["parameters"]) == ("8", {"checkpoint": "manifest"})
    assert [output["data"] for output in document["outputs"]] == [[7], [True], [3, 4]]
    call = read(
        X,
        N,
        ON,
        parameters={"binary_data_output": True},
        outputs=[{"name": "n"}, {"name": "x", "parameters": {"binary_data": False}}],
    )
    content, size = answer_rest(call, BatchAnswer(answer.version, call.arrays), program(), "m")
    assert content[size:] == b"\x07"
    assert json.loads(content[:size])["outputs"][1]["data"] == [1.5, -2]


@pytest.mark.parametrize(
    ("body", "length", "message"),
    [
        (*binary(b"1234"), "x has 4 bytes: its shape needs 8"),
        (*binary(b"12345678", 4), "4 bytes that belong to no input"),
        (*binary(b"12345678", -1), "x has the binary_data_size -1"),
        (b"{}", "-1", "Inference-Header-Content-Length must be from 1 to 2"),
        (b"{}", "3", "Inference-Header-Content-Length must be from 1 to 2"),
        (b"{}", "x", "Inference-Header-Content-Length must be from 1 to 2"),
        (b"", None, "must be from 1 to 0"),
        (b"{}", None, 'a list "inputs" of objects'),
        (b"[" * 100000, None, "the body is not JSON"),
        (b"\xff", None, "the body is not JSON"),
    ],
)
def test_o7_torn_binary_requests_are_refused(body: bytes, length: str | None, message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        read_rest(body, length, program())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["name", "data", "shape"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(
    changes=st.dictionaries(st.sampled_from(["name", "datatype", "shape", "data", "parameters"]), VALUES, max_size=2),
    more=st.dictionaries(st.sampled_from(["outputs", "id", "parameters", "inputs"]), VALUES, max_size=2),
)
def test_o7_any_json_is_read_or_refused_with_400(changes: Any, more: Any) -> None:
    try:
        read_rest(json.dumps({"inputs": [with_(X, **changes), N, ON], **more}).encode(), None, program())
    except RequestRefused as refused:
        assert refused.status == 400  # noqa: PT017


@given(st.binary(max_size=200), st.integers(-5, 300))
def test_o7_any_bytes_are_refused_with_400(body: bytes, length: int) -> None:
    with pytest.raises(RequestRefused) as refused:
        read_rest(body, str(length), program())
    assert refused.value.status == 400
