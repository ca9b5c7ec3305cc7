"""`predict`, compiled for each padded number of examples before it answers a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

import jax
import numpy as np
from numpy.typing import NDArray

from backstay_spec.whole import whole

from ..errors import ConfigurationError
from ._signature import Signature, TensorSpec, most_request_bytes, tensors_of

_LOG = logging.getLogger(__name__)
_NOISE: Final = 0.02
_Answer = tuple[list[NDArray[Any]], list[int]]  # the compared row of each output, and checksums of all rows

__all__ = ["ServedVersion", "ServingProgram", "ServingStopped", "padded_sizes"]


def padded_sizes(batch: int | Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of examples for which `predict` is compiled, ascending.

    Args:
        batch: the largest one, to which the powers of 2 below it are added; or all of them.

    Raises:
        ConfigurationError: a number is not a positive integer.
    """
    batch = whole(batch)
    if isinstance(batch, int) and not isinstance(batch, bool):
        given = [batch, *(2**power for power in range(20) if 2**power < batch)]
    else:
        given = [whole(size) for size in batch] if isinstance(batch, Sequence) else []
    valid = all(isinstance(size, int) and not isinstance(size, bool) and 0 < size <= 1 << 20 for size in given)
    if not given or not valid:
        raise ConfigurationError(f"`batch` is {batch!r:.100}: must be a positive integer, or a list of them")
    return tuple(sorted(set(given)))


class ServingStopped(BaseException):  # handlers of errors do not catch it
    """The process ends, so the remaining sizes are not compiled or computed."""


@dataclass(frozen=True)
class ServedVersion:
    """The values of one checkpoint, ready to answer requests.

    Attributes:
        step: the number of applied updates; clients receive it as the version of the model.
        checkpoint: the name of its manifest.
        params, state: what `predict` receives, on the device.
    """

    step: int
    checkpoint: str
    params: Any = field(repr=False)
    state: Any = field(repr=False)

    @property
    def version(self) -> str:
        """The version as text, as the protocol has it."""
        return str(self.step)


class ServingProgram:
    """`predict` for batches of fixed sizes. All versions of a model have equal shapes, and share what was compiled.

    Attributes:
        signature: what `predict` receives.
        sizes: the numbers of examples that it is compiled for, ascending.
        outputs: the tensors that it returns.
    """

    def __init__(
        self,
        predict: Callable[[Any, Any, Any], Any],
        signature: Signature,
        sizes: tuple[int, ...],
        first: Any,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            first: the pair ``(params, state)`` of any version.
            stopped: returns whether the process ends. It is called before each size.

        Raises:
            ServingStopped: the process ends.
            ConfigurationError: `predict` raises, or returns something else than arrays with one row for each example.
        """
        self.signature, self.sizes = signature, sizes
        self._shapes = jax.tree.map(_shape_of, first)
        self._predict, self._stopped = predict, stopped
        self._compiled: dict[int, Any] = {}
        for size in reversed(sizes):
            self._continue()
            lowered = self._lower(size)
            outputs = _outputs(lowered.out_info, size)
            if size == self.largest:
                self.outputs = outputs
            elif outputs != self.outputs:
                raise ConfigurationError(
                    f"`predict` returns {', '.join(map(str, outputs))} for {size} examples, and "
                    f"{', '.join(map(str, self.outputs))} for {self.largest}: only the first dimension may differ"
                )
            self._compiled[size] = lowered.compile()

    @property
    def largest(self) -> int:
        """The largest number of examples in one batch."""
        return self.sizes[-1]

    @property
    def most_bytes(self) -> int:
        """The size of the largest valid request, in bytes."""
        return most_request_bytes(self.signature.tensors, self.largest)

    def size_for(self, rows: int) -> int:
        """Returns the number of examples to which a batch of `rows` is padded."""
        return next(size for size in self.sizes if size >= rows)

    def run(self, version: ServedVersion, batch: Any, rows: int) -> list[NDArray[Any]]:
        """Returns the outputs for the first `rows` examples of a batch, which has one of `sizes`."""
        size = len(jax.tree.leaves(batch)[0])
        leaves = jax.tree.leaves(jax.device_get(self._compiled[size](version.params, version.state, batch)))
        return [
            np.asarray(leaf)[:rows].astype(tensor.dtype, copy=False)
            for leaf, tensor in zip(leaves, self.outputs, strict=True)
        ]

    def check(self, version: ServedVersion) -> None:
        """Compute one batch of each size with a version, before it answers requests.

        Raises:
            ServingStopped: the process ends.
            Exception: what `predict` raises.
        """
        for size in self.sizes:
            self._continue()
            self.run(version, _zeros(self.signature.shapes(size)), size)

    def check_rows(self, version: ServedVersion) -> None:
        """Compare the answers to one example beside equal, zero and large ones. In a batch, each example is on its own.

        The example is the first one of a batch, and then the last one. The position in the batch may change the bits.

        Raises:
            ServingStopped: the process ends.
            ConfigurationError: the answers differ.
        """
        if self.largest > 1:
            unknown = [reason for row in (0, self.largest - 1) for reason in self._compare(version, row)]
            for reason in dict.fromkeys(unknown):
                _LOG.warning("it is unknown whether predict mixes examples: %s", reason)

    def _compare(self, version: ServedVersion, row: int) -> Iterator[str]:
        """Yields why the comparison of a row says nothing."""
        found: list[_Answer] = []
        try:
            for beside in ("equal", "equal", "zero", "large", "indices"):
                answer = self._answer(version, beside, row)
                found.append(answer)  # those before an error are compared
        except Exception as error:  # noqa: BLE001  # `predict` may refuse values, and these are not a client's
            yield f"it raised {error} for other values"
        if len(found) < 2:
            return
        (one, bits), (again, other_bits) = found[:2]
        for index, tensor in enumerate(self.outputs):
            if one[index].size and not np.isfinite(one[index]).any():
                yield f"{tensor.name} has no finite number"
            noise = None if bits == other_bits else _noise(one[index], again[index])
            for number, (others, _) in enumerate(found[2:]):
                if _are_equal(one[index], others[index], noise):
                    continue
                if number == 2:
                    yield f"{tensor.name} differs only beside integers of 100, which may be invalid lengths or indices"
                    continue
                raise ConfigurationError(
                    f"`predict` returns another {tensor.name} for an example when the other examples of its batch "
                    "change. Requests of different clients share batches: compute each example on its own (a batch "
                    "normalization must use its stored statistics), or set batch=1"
                )

    def _answer(self, version: ServedVersion, beside: str, row: int) -> _Answer:
        self._continue()
        batch = jax.tree.map(lambda leaf: _example_beside(leaf, beside, row), self.signature.shapes(self.largest))
        outputs = self.run(version, batch, self.largest)
        return [leaf[row].copy() for leaf in outputs], [crc32(np.ascontiguousarray(leaf).data) for leaf in outputs]

    def _continue(self) -> None:
        if self._stopped():
            raise ServingStopped

    def _lower(self, size: int) -> Any:
        def predict(params: Any, state: Any, batch: Any) -> Any:  # the script's may be an object without a hash
            return self._predict(params, state, batch)

        try:
            return jax.jit(predict).lower(*self._shapes, self.signature.shapes(size))
        except Exception as error:
            raise ConfigurationError(
                f"`predict` raised {type(error).__name__} when it was traced with {size} examples: {error}"
            ) from error


def _outputs(tree: Any, size: int) -> tuple[TensorSpec, ...]:
    """Returns the tensors of a result for `size` examples, whose shapes `tree` has."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "output"
        if not leaf.shape or leaf.shape[0] != size:
            raise ConfigurationError(
                f"`predict` returns the shape {leaf.shape} at {name} for {size} examples: the first dimension must "
                f"be {size}"
            )
    rows = jax.tree.map(lambda leaf: _shape_of(leaf, 1), tree)
    return tensors_of(rows, "output", "the result of `predict`")


def _shape_of(leaf: Any, first: int = 0) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape[first:], leaf.dtype)  # type: ignore[no-untyped-call]


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def _example_beside(shape: Any, beside: str, row: int) -> NDArray[Any]:
    """Returns a batch with small numbers in one row. The other rows are `equal` to it, `zero` or `large`.

    An integer may be an index, such as of one of two words. Only beside `indices`, those of more than 8 bits are large.
    """
    is_integer = np.issubdtype(shape.dtype, np.integer)
    place = np.arange(np.prod(shape.shape[1:], dtype=np.int64)).reshape(shape.shape[1:])
    # One of the two rows has ones only: zeros beside it change a minimum.
    own = (1 - place % 2 if row == 0 else place * 0 + 1) if is_integer else 0.5 + place % 7 / 7
    if beside == "large" and is_integer and np.dtype(shape.dtype).itemsize > 1:
        beside = "equal"
    large = 100 if is_integer else 1000  # int8 holds 100
    held = np.empty(shape.shape, shape.dtype)
    held[:] = {"equal": own, "zero": 0, "large": large, "indices": large}[beside]
    held[row] = own
    return held


def _noise(one: NDArray[Any], again: NDArray[Any]) -> NDArray[Any]:
    """Returns how far each number may be off, after two runs of one batch: sums have no fixed order, as on a GPU."""
    with np.errstate(all="ignore"):
        found = np.abs(one.astype(np.float64) - again.astype(np.float64))
    found = np.where(np.isfinite(found), found, 0.0)
    # Two runs agree by chance in some numbers. The median, unlike the largest, is not that of a few large ones.
    return 8 * np.maximum(found, np.median(found) if found.size else 0.0)


def _are_equal(one: NDArray[Any], other: NDArray[Any], noise: NDArray[Any] | None) -> bool:
    """Returns whether two outputs are equal: exactly, if two runs of one batch are."""
    if noise is None:
        return np.array_equal(one, other, equal_nan=True)
    first, second = one.astype(np.float64), other.astype(np.float64)
    return bool(np.isclose(second, first, rtol=_NOISE, atol=noise, equal_nan=True).all())
