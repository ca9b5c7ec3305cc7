"""Selects the frozen leaves of a model, which do not travel, and computes digests of them.

Frozen leaves are leaves of the result of `init`, and of the argument of `loss`. The leaves of a `TreeSpec` are only
those that train, so the optimizer, the shards, the wire and the checkpoints do not know the others. docs/decisions/0098
has the reasons.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final, Literal, TypeAlias, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from ..errors import TreeError

__all__ = ["Selecting", "digest_of", "merged", "selected", "some_of"]

_SHOWN: Final = 8
_T = TypeVar("_T")
_WORDS: Final = 8192
"""A chunk of so many 64-bit words stays in the cache of a processor."""


Selecting: TypeAlias = Literal["frozen", "frozen_state"]
"""The argument of `train` that selects leaves: of the parameters, or of the model state."""

_PARTS: Final[dict[Selecting, tuple[str, str, str]]] = {
    "frozen": ("parameters", "a frozen parameter", "a function of a parameter's name"),
    "frozen_state": ("arrays of the model state", "a frozen array", "a function of an array's name"),
}


def selected(frozen: Any, tree: Any, names: Sequence[str], argument: Selecting = "frozen") -> tuple[bool, ...]:
    """Returns whether each leaf of `tree` is frozen.

    Args:
        frozen: a function of a leaf's name; or a pytree of booleans, with the structure of `tree` or of its upper part.
        tree: the parameters, or the model state, any pytree.
        names: the name of each leaf.
        argument: the name of the argument of `train` that has the value `frozen`.

    Raises:
        TreeError: `frozen` is neither, or selects no leaf, or all parameters.
    """
    part = _PARTS[argument][0]
    if not names:
        raise TreeError(f"{argument} is given, and init returns no {part}: leave {argument} out")
    if callable(frozen) and jax.tree_util.all_leaves([frozen]):
        places = tuple(_answers(frozen, names, argument))
    else:
        places = tuple(_broadcast(frozen, tree, argument))
    if not any(places):
        raise TreeError(f"{argument} selects none of the {len(names)} {part}, which are {some_of(names)}")
    if all(places) and argument == "frozen":
        raise TreeError(f"frozen selects all {len(names)} parameters, so nothing would train: {some_of(names)}")
    return places


def _answers(frozen: Callable[[str], Any], names: Sequence[str], argument: Selecting) -> Iterator[bool]:
    for name in names:
        answer = frozen(name)
        if not isinstance(answer, bool | np.bool_):
            raise TreeError(
                f"{argument}({name!r}) returned {type(answer).__name__}: must return True for {_PARTS[argument][1]}, "
                "or False"
            )
        yield bool(answer)


def _broadcast(frozen: Any, tree: Any, argument: Selecting) -> list[bool]:
    part, _, function = _PARTS[argument]
    flags = jax.tree_util.tree_leaves(frozen)
    other = next((flag for flag in flags if not isinstance(flag, bool | np.bool_)), None)
    if other is not None or not flags:
        found = "nothing" if other is None else type(other).__name__
        raise TreeError(
            f"{argument} has {found} where a boolean must be: must be {function}, or a pytree of booleans like the "
            f"{part}"
        )

    def spread(flag: Any, part: Any) -> Any:
        return [bool(flag)] * len(jax.tree_util.tree_leaves(part))

    try:
        places: list[bool] = jax.tree_util.tree_leaves(jax.tree_util.tree_map(spread, frozen, tree))
    except ValueError:
        raise TreeError(
            f"{argument} has another structure than the {part} that init returns. It has {_names(frozen)}; the "
            f"{part} are {_names(tree)}. Each part of the tree needs a boolean, which counts for all below it"
        ) from None
    return places


def _names(tree: Any) -> str:
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tree))
    return some_of([jax.tree_util.keystr(path, simple=True, separator=".") or "one value" for path in paths])


def some_of(names: Sequence[str], most: int = _SHOWN) -> str:
    """Returns the first names in words, and how many follow."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def merged(places: Iterable[bool], rest: Iterable[_T], frozen: Iterable[_T]) -> list[_T]:
    """Returns one list, in the order of the whole tree, out of two.

    Args:
        places: whether each leaf is frozen.
        rest, frozen: a value for each leaf that is not frozen, and for each of the others.
    """
    mine, others = iter(rest), iter(frozen)
    return [next(others) if place else next(mine) for place in places]


def digest_of(array: NDArray[np.generic]) -> str:
    """64 bits, in hex, that differ for arrays with other bits. Not for protection against a forger.

    It is twice as fast as SHA-256, because a worker waits for it. Each chunk of the array becomes two sums with odd
    random weights modulo 2**64, of its words and of their upper halves. SHA-256 reads these sums only. Another value of
    one word always changes a sum. Sums of words alone lose upper bits: two signs of float64 would cancel. With both,
    any other values change a sum, except for one in 2**32 choices of the weights.
    """
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    weights, weights_of_halves = _weights()
    whole = flat.size // 8 * 8
    words = flat[:whole].view(np.uint64)  # works at any address
    rest = np.zeros(8, np.uint8)
    rest[: flat.size - whole] = flat[whole:]
    sums = np.empty(2 * -(-words.size // _WORDS) + 1, np.uint64)
    halves = np.empty(_WORDS, np.uint64)
    for number, start in enumerate(range(0, words.size, _WORDS)):
        chunk = words[start : start + _WORDS]
        upper = np.right_shift(chunk, np.uint64(32), out=halves[: chunk.size])
        sums[2 * number] = np.dot(chunk, weights[: chunk.size])
        sums[2 * number + 1] = np.dot(upper, weights_of_halves[: chunk.size])
    sums[-1] = rest.view(np.uint64)[0]
    described = f"{array.dtype.name}{list(array.shape)}".encode()
    return hashlib.sha256(described + sums.astype("<u8").tobytes()).hexdigest()[:16]


@cache
def _weights() -> NDArray[np.uint64]:
    """Odd random numbers, which SplitMix64 makes from the seed 0. They stay the same in every version."""
    state = np.arange(1, 2 * _WORDS + 1, dtype=np.uint64).reshape(2, _WORDS) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)
