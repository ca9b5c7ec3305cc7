"""SHA-256 digests of an optimizer that are equal in every process and on every machine.

`_signature` compares programs inside one process, where two objects may be compared by identity. Here a program is
written as JSON: variables are numbered in order of use, primitives have their names, constants their bytes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._tree import TreeSpec
from ._elementwise import ExpressionNode
from ._flat import Atom, Flat, Literal, flatten
from ._trace import StateSpec

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_SHOWN_CONSTANTS: Final = 64


@dataclass(frozen=True)
class ProgramDigest:
    """The computation of an optimizer.

    Attributes:
        sha256: 32 bytes; covers the operations, their parameters, and the bytes, dtypes and shapes of all constants.
        constants: the distinct scalar floating-point constants in order of use, as text, at most 64. For messages:
            two programs that differ may have equal constants.
    """

    sha256: bytes
    constants: tuple[str, ...]


def structure_digest(tree: TreeSpec, states: Sequence[StateSpec]) -> bytes:
    """SHA-256 of the names, shapes and dtypes of the model's and the optimizer's arrays, regardless of their order."""
    document = {
        "parameters": sorted([leaf.path, list(leaf.shape), leaf.dtype.name] for leaf in tree.leaves if leaf.trained),
        "states": sorted([state.path, list(state.shape), _dtype(state.dtype)] for state in states),
    }
    if tree.has_state:
        untrained = [leaf for leaf in tree.leaves if not leaf.trained]
        document["model_state"] = sorted([leaf.path, list(leaf.shape), leaf.dtype.name] for leaf in untrained)
    return _sha256(document)


def program_digest(flats: Iterable[Flat], blocks: Iterable[Sequence[ExpressionNode]], layout: Any) -> ProgramDigest:
    """Returns the digest of programs.

    Args:
        flats: programs in their true shapes.
        blocks: elementwise programs.
        layout: JSON; what the programs are used for.
    """
    writer = _Writer()
    document = [[writer.flat(flat) for flat in flats], [writer.nodes(nodes) for nodes in blocks], layout]
    return ProgramDigest(_sha256(document), tuple(writer.constants)[:_SHOWN_CONSTANTS])


def _sha256(document: Any) -> bytes:
    return hashlib.sha256(json.dumps(document, separators=(",", ":"), sort_keys=True).encode()).digest()


class _Writer:
    """Programs as JSON; collects their constants."""

    def __init__(self) -> None:
        self.constants: dict[str, None] = {}

    def flat(self, flat: Flat) -> Any:
        numbers: dict[int, int] = {}

        def name(atom: Atom) -> Any:
            return self.literal(atom) if isinstance(atom, Literal) else numbers.setdefault(atom, len(numbers))

        def variable(var: int) -> Any:
            aval = flat.avals[var]
            return [name(var), list(aval.shape), _dtype(aval.dtype)]

        inputs = [variable(var) for var in flat.inputs]
        equations = [
            [
                equation.name,
                [self.flat(branch) for branch in equation.branches] or self.params(equation.params),
                [name(atom) for atom in equation.inputs],
                [variable(var) for var in equation.outputs],
            ]
            for equation in flat.equations
        ]
        return [inputs, equations, [name(atom) for atom in flat.outputs]]

    def nodes(self, nodes: Sequence[ExpressionNode]) -> Any:
        return [
            [
                node.op,
                node.primitive,
                self.params(node.params),
                [[number, None if shape is None else list(shape)] for number, shape in node.args],
                self.literal(Literal(node.payload)) if node.op == "literal" else self.value(node.payload),
            ]
            for node in nodes
        ]

    def params(self, params: Mapping[str, Any]) -> Any:
        """Returns the parameters without those that are None. Releases of JAX add parameters with this default."""
        return {name: self.value(value) for name, value in params.items() if value is not None}

    def literal(self, literal: Literal) -> Any:
        value = literal.value
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            bits = np.asarray(jax.random.key_data(value))
            return ["key", _dtype(value.dtype), list(bits.shape), hashlib.sha256(bits.tobytes()).hexdigest()]
        array = np.asarray(value)
        if array.shape == () and jnp.issubdtype(array.dtype, jnp.inexact):
            self.constants[str(array[()])] = None
        data = array.tobytes()
        text = data.hex() if len(data) <= 64 else hashlib.sha256(data).hexdigest()
        return ["literal", array.dtype.name, list(array.shape), text]

    def value(self, value: Any) -> Any:
        """Returns a parameter of a primitive. Functions count by their names: they occur in host callbacks only."""
        match value:
            case enum.Enum():
                return ["enum", type(value).__qualname__, value.name]
            case None | bool() | int() | str():
                return value
            case float() | complex():
                return ["number", repr(value)]
            case bytes():
                return ["bytes", value.hex()]
            case np.ndarray() | np.generic() | jax.Array():
                return self.literal(Literal(value))
            case tuple() | list():
                return ["sequence", [self.value(item) for item in value]]
            case Mapping():
                return ["mapping", sorted([str(key), self.value(item)] for key, item in value.items())]
            case set() | frozenset():
                return ["set", sorted(json.dumps(self.value(item)) for item in value)]
            case jex.ClosedJaxpr():
                return ["program", self.flat(flatten(value))]
            case jex.Jaxpr():
                return ["program", self.flat(flatten(jex.ClosedJaxpr(value, ())))]
            case np.dtype() | type():
                return ["dtype", _dtype(value)]
        # The text of such an object may have its address, which differs by pod. Equal programs must have equal
        # digests.
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return ["dataclass", type(value).__qualname__, self.params(fields)]
        if isinstance(value, functools.partial):
            return ["partial", *map(self.value, (value.func, value.args, value.keywords))]
        if callable(value):
            named = isinstance(getattr(value, "__qualname__", None), str)
            return ["function", _full_name(value if named else type(value))]
        return ["object", type(value).__qualname__, _ADDRESS.sub("", str(value))]


def _dtype(dtype: Any) -> str:
    name = getattr(dtype, "name", None)
    if isinstance(name, str):
        return name  # also of JAX's typed keys, such as key<fry>
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return _full_name(dtype)


def _full_name(value: Any) -> str:
    """Returns the module and the name of a function or a class; empty parts where it has none, as some callables."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return f"{module if isinstance(module, str) else ''}.{name if isinstance(name, str) else ''}"
