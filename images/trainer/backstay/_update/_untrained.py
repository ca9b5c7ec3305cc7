"""Finds leaves that training does not change in the first updates.

No gradient reaches them, or a worker receives them with the same bits again.

A worker finds leaves without a gradient in its own gradients, and the coordinator in those of all workers. Running
statistics that are leaves of the parameters keep their initial values, and training reports no error. Leaves of the
model state have no gradients and are not examined for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ._frozen import digest_of, some_of
from ._tree import TreeSpec

UPDATES: Final = 10
"""A warm-up from zero, a layer that starts at zero, or accumulated gradients delay a gradient by a few updates."""

Array = np.ndarray[Any, np.dtype[Any]]
_GLANCE: Final = 256
_MOST_UPDATES: Final = 1000


class ZeroLeaves:
    """One worker's leaves whose gradients have all been exactly zero so far."""

    def __init__(self, tree: TreeSpec) -> None:
        self._left = [index for index, leaf in enumerate(tree.leaves) if leaf.trained and leaf.size]

    def examine(self, step: int, parts: Callable[[list[int]], Mapping[int, Sequence[Array]]]) -> list[int] | None:
        """Returns the leaves that are left after the gradient of `step`; None after the first `UPDATES` steps.

        Args:
            step: the gradient's step, from 0.
            parts: the arrays that make the gradients of the given leaves; called while leaves are left.
        """
        if step >= UPDATES:
            return None
        if self._left:
            arrays = parts(self._left)
            self._left = [leaf for leaf in self._left if not any(_nonzero(part) for part in arrays[leaf])]
        return self._left


class SameLeaves:
    """The leaves, model state included, that a worker receives with the same bits after its first updates.

    A tenth of training counts, but at least `UPDATES` and at most 1,000 updates: some leaves begin to train later.
    """

    def __init__(self, tree: TreeSpec, steps: int) -> None:
        """
        Args:
            steps: the number of updates of the training.
        """
        sizes = {index: leaf.nbytes for index, leaf in enumerate(tree.leaves) if leaf.size}
        self._sizes = dict(sorted(sizes.items(), key=lambda item: -item[1]))
        self._updates = min(max(UPDATES, steps // 10), _MOST_UPDATES)
        self._begun: tuple[int, dict[int, str]] | None = None
        self._over = False

    def examine(self, version: int, leaves: Sequence[Any]) -> list[int] | None:
        """Compare the parameters and the model state with those of the first call.

        Args:
            version: the number of updates before these values.
            leaves: one array for each leaf of the tree.

        Returns:
            Once, after enough updates, the leaves that are the same, if they have more than half of the bytes and
            another leaf has changed; None in all other calls. If nothing has changed, the rate may still be 0.
        """
        if self._over:
            return None
        if self._begun is None:
            self._begun = version, {leaf: digest_of(np.asarray(leaves[leaf])) for leaf in self._sizes}
            return None
        first, before = self._begun
        if 0 <= version - first < self._updates:
            return None
        self._over = True
        if version < first:  # a rollback: the versions do not count updates
            return None
        same, changed, whole = [], 0, sum(self._sizes.values())
        for leaf, nbytes in self._sizes.items():  # the largest first, so that most are not read
            if digest_of(np.asarray(leaves[leaf])) == before[leaf]:
                same.append(leaf)
            elif 2 * (changed := changed + nbytes) >= whole:
                return None
        return sorted(same) if changed else None


class Untrained:
    """The leaves that are zero in all contributions of the first `UPDATES` updates."""

    def __init__(self) -> None:
        self._left: set[int] | None = None
        self._updates = 0
        self._over = False

    def update(self, contributions: Sequence[Sequence[int] | None]) -> list[int]:
        """Count an update.

        Args:
            contributions: what `ZeroLeaves.examine` returned for each contribution.

        Returns:
            After the last update that counts the leaves that are left; before and afterwards none.
        """
        if self._over:
            return []
        for zero in contributions:
            if zero is None:  # its worker is past its first steps: training was continued
                self._over = True
                return []
            self._left = set(zero) if self._left is None else self._left & set(zero)
        self._updates += 1
        self._over = self._updates >= UPDATES or not self._left
        return sorted(self._left or ()) if self._over else []


def warning(names: Sequence[str], leaves: int) -> str:
    """Returns the warning about leaves that no gradient reaches.

    Args:
        names: the names of the leaves that are left.
        leaves: the number of all parameters.
    """
    return (
        f"the gradient of {some_of(names)} ({len(names)} of {leaves} leaves) was exactly zero in the first {UPDATES} "
        "updates of every worker, so training does not change them. Running statistics, such as those of batch "
        "normalization, are not trained by gradients: make them model state (has_state=True; `init` then "
        "returns (params, state), and `loss` returns the new state). Freeze what stays constant (frozen=...), or keep "
        "it in `loss`."
    )


def unchanged_warning(names: Sequence[str], nbytes: int, whole: int) -> str:
    """Returns the warning about leaves that travel with each update and do not change.

    Args:
        names: the names of the leaves.
        nbytes: the size of all leaves that did not change.
        whole: the size of all leaves that travel.
    """
    return (
        f"{nbytes} of {whole} bytes that each update sends did not change in the first updates: "
        f"{some_of(names)}. Freeze what does not train, and it does not travel: train(frozen=...) for parameters, and "
        "train(frozen_state=...) for model state"
    )


def _nonzero(part: Array) -> bool:
    flat = part.reshape(-1)
    return bool(np.any(flat[:_GLANCE])) or bool(np.any(flat[_GLANCE:]))
