"""Reads requests of the Open Inference Protocol v2 as arrays, and writes answers as JSON, bytes or protobuf.

KServe's package has the messages of gRPC, and reads typed contents. This module checks names, data types and shapes
before it makes an array. It reads tensors of HTTP itself (docs/decisions/0091).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from ._batcher import BatchAnswer, RequestRefused
from ._program import ServingProgram
from ._signature import TensorSpec

__all__ = [
    "InferenceCall",
    "answer_grpc",
    "answer_rest",
    "kserve_messages",
    "read_grpc",
    "read_rest",
    "refuse_other_values",
]

JSON_LENGTH: Final = "inference-header-content-length"
"""The header with the size of the JSON before binary tensors, in lower case."""

_DEEPEST: Final = 32  # NumPy arrays have at most 64 axes
_KINDS: Final = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
_LONGEST_ID: Final = 1000


@contextmanager
def _no_arguments() -> Iterator[None]:
    # KServe's package parses the arguments of the process when it is imported, and would exit for `--help`.
    held, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = held


@cache
def kserve_messages() -> tuple[Any, Any]:
    """KServe's modules with the protocol's messages, and with its service."""
    with _no_arguments():
        from kserve.protocol.grpc import grpc_predict_v2_pb2, grpc_predict_v2_pb2_grpc
    return grpc_predict_v2_pb2, grpc_predict_v2_pb2_grpc


@cache
def _kserve_content() -> Any:
    """KServe's function that reads the values of a tensor from a message."""
    with _no_arguments():
        from kserve.protocol.infer_type import get_content
    return get_content


@dataclass(frozen=True)
class InferenceCall:
    """One request for inference.

    Attributes:
        arrays: the inputs, in the order of the signature.
        rows: the number of examples.
        wanted: the names of the outputs to answer with, and whether each is wanted as bytes; empty: all outputs.
        binary: whether outputs are wanted as bytes where `wanted` does not decide.
        id: the client's name of the request.
    """

    arrays: Sequence[NDArray[Any]]
    rows: int
    wanted: Mapping[str, bool | None]
    binary: bool
    id: str


def read_rest(body: bytes, json_length: str | None, program: ServingProgram) -> InferenceCall:
    """Read a request of HTTP.

    Args:
        json_length: the value of the header `JSON_LENGTH`; None: there is none.

    Raises:
        RequestRefused: with 400; the text names the mistake.
    """
    try:
        length = len(body) if json_length is None else int(json_length)
    except ValueError:
        length = -1
    if not 0 < length <= len(body):
        raise RequestRefused(400, f"Inference-Header-Content-Length must be from 1 to {len(body)}, the body's size")
    try:
        request = orjson.loads(memoryview(body)[:length])
    except orjson.JSONDecodeError as error:
        raise RequestRefused(400, f"the body is not JSON: {error}") from None
    inputs = request.get("inputs") if isinstance(request, dict) else None
    if not isinstance(inputs, list) or not all(isinstance(item, dict) for item in inputs):
        raise RequestRefused(400, 'the body must be a JSON object with a list "inputs" of objects')
    # The tensors follow the JSON in its order, and are never copied.
    left = memoryview(body)[length:]
    found: dict[str, tuple[TensorSpec, tuple[int, ...], Any]] = {}
    for item in inputs:
        tensor, shape = _declared(item.get("name"), item.get("datatype"), item.get("shape"), program, found)
        size = _parameters(item).get("binary_data_size")
        data: Any
        if size is None:
            data = item.get("data")
            if not isinstance(data, list):
                raise RequestRefused(400, f'{tensor.name} must have a list "data", or a "binary_data_size"')
        else:
            if type(size) is not int or not 0 <= size <= len(left):
                raise RequestRefused(400, f"{tensor.name} has the binary_data_size {size!r:.50}: {len(left)} are left")
            data, left = left[:size], left[size:]
        found[tensor.name] = tensor, shape, data
    if len(left):
        raise RequestRefused(400, f"the body has {len(left)} bytes that belong to no input")
    arrays, rows = _arrays(found, program)
    wanted: dict[str, bool | None] = {}
    outputs = request.get("outputs") or []
    if not isinstance(outputs, list) or not all(isinstance(item, dict) for item in outputs):
        raise RequestRefused(400, '"outputs" must be a list of objects')
    for item in outputs:
        wanted[_output(item.get("name"), program)] = _parameters(item).get("binary_data")
    return InferenceCall(
        arrays, rows, wanted, _parameters(request).get("binary_data_output") is True, _id(request.get("id", ""))
    )


def read_grpc(request: Any, program: ServingProgram) -> InferenceCall:
    """Read a ``ModelInferRequest`` of gRPC. Raises `RequestRefused` with 400."""
    get_content = _kserve_content()
    raw = request.raw_input_contents
    if len(raw) not in (0, len(request.inputs)):
        raise RequestRefused(400, f"there are {len(request.inputs)} inputs, and {len(raw)} raw_input_contents")
    found: dict[str, tuple[TensorSpec, tuple[int, ...], Any]] = {}
    for number, item in enumerate(request.inputs):
        tensor, shape = _declared(item.name, item.datatype, list(item.shape), program, found)
        data = memoryview(raw[number]) if raw else get_content(tensor.datatype, item.contents)
        found[tensor.name] = tensor, shape, data
    arrays, rows = _arrays(found, program)
    wanted: dict[str, bool | None] = {_output(item.name, program): None for item in request.outputs}
    return InferenceCall(arrays, rows, wanted, True, _id(request.id))


def _id(given: Any) -> str:
    if not isinstance(given, str) or len(given) > _LONGEST_ID:
        raise RequestRefused(400, f'"id" must be a text of at most {_LONGEST_ID} characters')
    return given


def _parameters(item: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = item.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise RequestRefused(400, '"parameters" must be an object')
    return parameters


def _output(name: Any, program: ServingProgram) -> str:
    names = [tensor.name for tensor in program.outputs]
    if name not in names:
        raise RequestRefused(400, f"there is no output {name!r:.100}: the model has {', '.join(names)}")
    return str(name)


def _declared(
    name: Any, datatype: Any, shape: Any, program: ServingProgram, found: Mapping[str, Any]
) -> tuple[TensorSpec, tuple[int, ...]]:
    """Returns the tensor of an input, and its shape with the dimension of the batch, checked without its data."""
    tensors = program.signature.tensors
    tensor = next((tensor for tensor in tensors if tensor.name == name), None)
    if tensor is None:
        raise RequestRefused(400, f"there is no input {name!r:.100}: the model has {', '.join(map(str, tensors))}")
    if tensor.name in found:
        raise RequestRefused(400, f"the input {tensor.name} is given twice")
    if datatype != tensor.datatype:
        raise RequestRefused(400, f"{tensor.name} has the datatype {datatype!r:.50}: must be {tensor.datatype}")
    whole = isinstance(shape, list) and all(type(length) is int for length in shape)
    if not whole or len(shape) != len(tensor.shape) + 1 or tuple(shape[1:]) != tensor.shape:
        raise RequestRefused(400, f"{tensor.name} has the shape {shape!r:.100}: must be {[-1, *tensor.shape]}")
    if not 1 <= shape[0] <= program.largest:
        raise RequestRefused(
            400, f"{tensor.name} has {shape[0]} examples: a request must have from 1 to {program.largest}"
        )
    return tensor, tuple(shape)


def _arrays(
    found: Mapping[str, tuple[TensorSpec, tuple[int, ...], Any]], program: ServingProgram
) -> tuple[list[NDArray[Any]], int]:
    missing = [str(tensor) for tensor in program.signature.tensors if tensor.name not in found]
    if missing:
        raise RequestRefused(400, f"the request has no input {', '.join(missing)}")
    rows = {shape[0] for _, shape, _ in found.values()}
    if len(rows) != 1:
        raise RequestRefused(400, f"the inputs have different numbers of examples: {sorted(rows)}")
    return [_array(*found[tensor.name]) for tensor in program.signature.tensors], rows.pop()


def _array(tensor: TensorSpec, shape: tuple[int, ...], data: Any) -> NDArray[Any]:
    elements = shape[0] * (tensor.row_bytes // tensor.dtype.itemsize)
    if isinstance(data, memoryview):
        if len(data) != elements * tensor.dtype.itemsize:
            raise RequestRefused(
                400, f"{tensor.name} has {len(data)} bytes: its shape needs {elements * tensor.dtype.itemsize}"
            )
        if tensor.dtype.kind == "b" and data and max(data) > 1:
            raise RequestRefused(400, f"{tensor.name} has bytes above 1: a BOOL is 0 or 1")
        # A copy: a view would keep the whole body in memory while the request waits.
        return np.frombuffer(data, tensor.dtype.newbyteorder("<")).astype(tensor.dtype).reshape(shape)
    refuse_other_values(tensor, data)
    try:
        given = np.array(data) if data else np.empty(0, tensor.dtype)
    except (ValueError, OverflowError):
        raise RequestRefused(400, f"the data of {tensor.name} has rows of different lengths") from None
    if given.size != elements:
        raise RequestRefused(400, f"{tensor.name} has {given.size} elements: its shape needs {elements}")
    if given.ndim > 1 and given.shape != shape:
        raise RequestRefused(400, f"the data of {tensor.name} has the shape {list(given.shape)}: must be {list(shape)}")
    if given.dtype.kind not in _KINDS[tensor.dtype.kind]:
        raise RequestRefused(400, f"the data of {tensor.name} has values that are not {tensor.datatype}")
    with np.errstate(over="ignore"):
        array = given.astype(tensor.dtype)
    inside = np.isfinite(array) if array.dtype.kind == "f" else array == given
    if not inside.all() and (array.dtype.kind != "f" or np.isfinite(given).all()):
        raise RequestRefused(400, f"the data of {tensor.name} has values outside of {tensor.datatype}")
    return array.reshape(shape)


def refuse_other_values(tensor: TensorSpec, data: list[Any], depth: int = 0) -> None:
    """Refuse a value of another kind before an array is made: NumPy makes each text as wide as the longest (O7)."""
    kinds = set(map(type, data))
    if kinds <= {int, float, bool}:
        return
    if kinds != {list} or depth == _DEEPEST:
        raise RequestRefused(
            400, f"the data of {tensor.name} has values that are not {tensor.datatype}, or rows of different lengths"
        )
    for row in data:
        refuse_other_values(tensor, row, depth + 1)


def _chosen(
    call: InferenceCall, answer: BatchAnswer, program: ServingProgram
) -> Iterator[tuple[TensorSpec, NDArray[Any]]]:
    for tensor, array in zip(program.outputs, answer.outputs, strict=True):
        if not call.wanted or tensor.name in call.wanted:
            yield tensor, array


def answer_rest(
    call: InferenceCall, answer: BatchAnswer, program: ServingProgram, name: str
) -> tuple[bytes, int | None]:
    """Returns the body of the answer, and the size of its JSON if bytes of tensors follow."""
    outputs = []
    raw = []
    for tensor, array in _chosen(call, answer, program):
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(array.shape)}
        binary = call.wanted.get(tensor.name)
        if call.binary if binary is None else binary:
            raw.append(array.tobytes())
            output["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            flat = np.ascontiguousarray(array).reshape(-1)
            output["data"] = flat.astype(np.float32) if flat.dtype == np.float16 else flat
        outputs.append(output)
    document = {
        "model_name": name,
        "model_version": answer.version.version,
        "id": call.id,
        "parameters": {"checkpoint": answer.version.checkpoint},
        "outputs": outputs,
    }
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([head, *raw]), len(head)) if raw else (head, None)


def answer_grpc(call: InferenceCall, answer: BatchAnswer, program: ServingProgram, name: str) -> Any:
    """Returns the ``ModelInferResponse``, with its tensors as bytes."""
    messages, _ = kserve_messages()
    chosen = list(_chosen(call, answer, program))
    return messages.ModelInferResponse(
        model_name=name,
        model_version=answer.version.version,
        id=call.id,
        parameters={"checkpoint": messages.InferParameter(string_param=answer.version.checkpoint)},
        outputs=[
            messages.ModelInferResponse.InferOutputTensor(
                name=tensor.name, datatype=tensor.datatype, shape=list(array.shape)
            )
            for tensor, array in chosen
        ],
        raw_output_contents=[array.tobytes() for _, array in chosen],
    )
