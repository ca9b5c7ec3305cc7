"""The interface of codecs, and the largest error that a codec states.

A codec works on one block. The encoded form is a fixed number of arrays, the *sections*. Their sizes depend
only on the block's size and dtype, so a receiver knows how many bytes will arrive. Encoding and decoding are traced
functions: a server decodes inside the kernel that adds contributions up, without a decoded copy of any.

Elements come in groups of `GROUP`. The last ``size % GROUP`` elements of a leaf are the *tail*, which travels as it is.
Groups are counted over the elements of each leaf, and cuts between shards fall between groups. So what a leaf is
rounded to depends neither on the number of shards nor on the blocks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["GROUP", "Bound", "Codec", "CodecName", "Encoded", "body_of", "encoded", "exact_bound"]

GROUP: Final = 128
"""Elements. The codes of a group of any codec fill whole cache lines, so the next section is aligned too."""

CodecName: TypeAlias = Literal["Exact", "BFloat16", "Int8", "Int4"]


@dataclass(frozen=True)
class Bound:
    """How far a decoded element may be from the encoded one, for all finite elements.

    ``|decoded - element| <= relative * scale + floor``, where `scale` is ``|element|`` (`of` is ``element``) or the
    largest ``|element|`` of its group (`of` is ``group``).

    Attributes:
        group: elements that share a scale; 1 where `of` is ``element``.
        floor: the error of elements so small that processors, or the codec, take them for zero.
    """

    relative: float
    of: Literal["element", "group"]
    group: int
    floor: float


def exact_bound() -> Bound:
    """Returns the bound of an exact codec, which makes no error."""
    return Bound(0.0, "element", 1, 0.0)


def body_of(size: int) -> int:
    """Returns how many of `size` elements are in whole groups; the rest is the tail."""
    return size - size % GROUP


class Codec(Hashable, Protocol):
    """One way to write blocks. Stateless."""

    @property
    def name(self) -> CodecName: ...

    def covers(self, dtype: np.dtype[Any]) -> bool:
        """Returns whether blocks of `dtype` are encoded; others travel exactly."""
        ...

    def bound(self, dtype: np.dtype[Any]) -> Bound:
        """Returns the largest error, for a dtype that is covered."""
        ...

    def sections(self, body: int, dtype: np.dtype[Any]) -> tuple[tuple[int, np.dtype[Any]], ...]:
        """Returns the number of elements and the dtype of each section, without the tail.

        Args:
            body: number of elements, a multiple of `GROUP`.
            dtype: the dtype of the block.
        """
        ...

    def encode(self, values: Any, numbers: Any, seed: Any) -> tuple[Any, ...]:
        """Returns the sections, traced.

        Args:
            values: float[body].
            numbers: uint32[body / GROUP]: the number of each group among all groups of the tree.
            seed: uint32[2], see `seed_of`.
        """
        ...

    def decode(self, sections: tuple[Any, ...], dtype: np.dtype[Any]) -> Any:
        """float[body] of `dtype`, traced."""
        ...

    def refuse(self, sections: tuple[np.ndarray, ...]) -> str | None:
        """Returns why sections that arrived cannot have been made by `encode`, or None. Sizes are correct."""
        ...


@dataclass(frozen=True)
class Encoded:
    """One block as it travels, as a pytree of `sections` and `tail`. It stands where a 1-D array of `size` elements
    could.

    Attributes:
        sections: the codec's sections, 1-D arrays.
        tail: the elements behind the last whole group.
        codec: encodes and decodes it.
    """

    sections: tuple[Any, ...]
    tail: Any
    codec: Codec
    size: int
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int]:
        """The shape of the decoded block."""
        return (self.size,)

    def decode(self) -> Any:
        """Returns the elements, 1-D of `dtype`; traced."""
        body = self.codec.decode(self.sections, self.dtype)
        return body if body_of(self.size) == self.size else jnp.concatenate([body, self.tail])


def encoded(codec: Codec, values: Any, numbers: Any, seed: Any) -> Encoded:
    """Returns a block as it travels, traced; see `Codec.encode` for `numbers` and `seed`, of which `BFloat16` uses
    neither."""
    body = body_of(values.size)
    return Encoded(codec.encode(values[:body], numbers, seed), values[body:], codec, values.size, values.dtype)


jax.tree_util.register_dataclass(Encoded, data_fields=["sections", "tail"], meta_fields=["codec", "size", "dtype"])
