"""The values that training begins with: what `init` returns, or the arrays of `start_from`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError

if TYPE_CHECKING:
    from .._checkpoint import FrozenRecord, MadeByInit, Origin, StartFrom
    from .._compute import Placement
    from .._transport import Agreement
    from .._update import LeafSpec, TreeSpec

__all__ = ["Beginning", "FrozenPart", "on_processor"]

_LOG = logging.getLogger(__name__)


class Beginning:
    """The initial values of a script's model.

    A process computes or reads only the part that it needs: servers hold what trains, workers hold what is frozen.
    """

    def __init__(
        self,
        init: Callable[[Any], Any],
        seed: int,
        start_from: StartFrom | None,
        describe: Callable[..., TreeSpec],
        unchanged: Callable[[], Sequence[bool]] | None,
    ) -> None:
        """
        Args:
            init, seed, start_from: see `train`.
            describe: describes a result of `init`, with the frozen leaves of the script, or with other frozen
                parameters, which are its second argument.
            unchanged: returns which parameters of `described` training does not change. They are frozen too.
        """
        self._init, self._seed, self._start_from = init, seed, start_from
        self._describe, self._unchanged = describe, unchanged

    @cached_property
    def described(self) -> TreeSpec:
        """The model's tree, without what `unchanged` finds. Only shapes are computed.

        Raises:
            TreeError: `init` returns something that cannot be trained, or `frozen` or `frozen_state` is invalid.
        """
        return self._describe(self._shapes)

    @cached_property
    def tree(self) -> TreeSpec:
        """The model's tree. Raises as `described`."""
        tree = self.described
        if self._unchanged is None or not any(places := self._unchanged()):
            return tree
        from .._update import some_of

        tree = self._describe(self._shapes, tree.parameters.treedef.unflatten(places))
        assert tree.frozen is not None
        names = [leaf.path for leaf in tree.frozen.leaves]
        _LOG.info(
            "the optimizer never changes %d of %d parameters, %d of %d bytes. So they are frozen and do not travel "
            "(docs: Fine-tune a model): %s",
            len(names),
            len(places),
            tree.frozen.nbytes,
            self.described.parameters.nbytes,
            some_of(names),
        )
        return tree

    @cached_property
    def _shapes(self) -> Any:
        """The shapes and dtypes of the result of `init`."""
        import jax

        from .._update import refuse_objects

        def init() -> Any:
            found = self._init(jax.random.key(self._seed))  # outside it would be compiled, in every pod
            refuse_objects(found)
            return found

        return jax.eval_shape(init)

    def trained(self, start_from: str = "", needed: Collection[int] | None = None) -> Any:
        """Returns the model of version 0 without its frozen leaves: parameters, or ``(params, state)``.

        Args:
            start_from: the result of `fixed_start` in the process that decided how the job begins.
            needed: the leaves that are needed, by index; None: all. The others may be `jax.ShapeDtypeStruct`.

        Raises:
            CheckpointError: `start_from` cannot be read, or does not fit what `init` returns.
            TreeError: `init` returns an array twice.
        """
        tree = self.tree
        others = None if tree.frozen_leaves else ()
        return tree.unflatten(self._values(tree.leaves, self._leaves_that_travel, others, start_from, needed))

    def place_frozen(self, place: Callable[[int, Any], Any], start_from: str = "") -> None:
        """Compute or read the values of the frozen leaves. Raises as `trained` does.

        Args:
            place: gets the index and the value of each leaf, as soon as it is read.

        `init` runs on a processor and operation by operation. So workers with different accelerators have the same
        bits, and ``init(key)`` has them too, which a user gives to `load` as `base`.
        """
        tree = self.tree
        if tree.frozen_leaves:
            self._values(tree.frozen_leaves, tree.frozen_values, tree.leaves, start_from, place=place)

    def record(self, digests: Sequence[str], reference: str) -> FrozenRecord:
        """Returns the description of the frozen leaves for checkpoints and other pods.

        Args:
            digests: the digests of their values, in their order.
            reference: the source of the values, as `reference` returned it.
        """
        from .._checkpoint import FrozenLeaf, FrozenRecord, describe_structure

        tree, start = self.tree, self._start_from
        leaves = tuple(
            FrozenLeaf(path=leaf.name, shape=leaf.shape, dtype=leaf.dtype.name, digest=digest)
            for leaf, digest in zip(tree.frozen_leaves, digests, strict=True)
        )

        params, state, of_state = tree.frozen, tree.frozen_state, tree.everything.state
        return FrozenRecord(
            start_from="" if start is None else start.uri,
            uri=reference,
            leaves=leaves,
            structure=describe_structure(tree.everything.parameters.shapes()),
            places=params.places if params else (False,) * len(tree.parameters.leaves),
            state_structure=describe_structure(of_state.shapes()) if state and of_state else None,
            state_places=state.places if state else (),
        )

    def reference(self, start_from: str, record: FrozenRecord | None) -> str:
        """Returns the place where the frozen leaves are read, or an empty text if `init` returns them.

        Args:
            start_from: as in `trained`, of a history that begins; empty for one that is continued.
            record: what the history says about its frozen leaves, if it is known.

        Raises:
            CheckpointError: `start_from` of the script cannot be read.
        """
        from .._checkpoint import MANIFEST_SUFFIX

        start = self._start_from
        if start is None or not self.tree.frozen_leaves:
            return ""
        if record is None and start_from:
            return start_from
        if record is not None and record.start_from == start.uri and record.uri.endswith(MANIFEST_SUFFIX):
            return record.uri  # the folder may have a newer checkpoint
        return self.fixed_start()  # of files that have changed, the digests then name the arrays

    def fixed_start(self, skip: Callable[[Origin], bool] | None = None) -> str:
        """Returns the present content of `start_from`, so that all servers read the same; empty without `start_from`.

        Args:
            skip: see `_checkpoint.fix`.

        Raises:
            CheckpointError: the place that it names cannot be read.
        """
        start = self._start_from
        if start is None:
            return ""
        from .._checkpoint import fix, patiently

        return patiently(lambda: fix(start.uri, skip))

    def _values(
        self,
        leaves: tuple[LeafSpec, ...],
        keep: Callable[[Any], list[Any]],
        others: tuple[LeafSpec, ...] | None,
        start_from: str,
        needed: Collection[int] | None = None,
        place: Callable[[int, Any], Any] = lambda number, value: value,
    ) -> list[Any]:
        """Returns the values of `leaves`, which `keep` takes out of what `init` returns.

        Args:
            others, needed, place: as in `read_start`.
        """
        from .._compute import initial
        from .._update import as_leaf, refuse_shared

        trains = leaves is self.tree.leaves

        def own() -> list[Any]:
            made: list[Any]
            if not self.tree.frozen_leaves:
                made = keep(initial(self._init, self._seed, needed=needed))
            else:
                with nullcontext() if trains else on_processor():
                    made = initial(self._init, self._seed, keep, compiled=trains)
            params = sum(leaf.trained for leaf in leaves)  # they come first
            refuse_shared([leaf.path for leaf in leaves[:params]], made[:params], [not trains] * params)
            return made if trains else list(map(as_leaf, made, leaves))

        start = self._start_from
        if start is None:
            return [place(number, value) for number, value in enumerate(own())]
        from .._checkpoint import patiently, read_start

        fixed = start_from or self.fixed_start()
        started = patiently(lambda: read_start(start, fixed, leaves, others, needed, place))
        values: list[Any] = list(started.values)
        for number, value in self._made_again(leaves, keep, started.of_init).items():
            values[number] = place(number, value)
        if any(value is None for value in values):
            for number, one in enumerate(own()):
                values[number] = place(number, one) if values[number] is None else values[number]
        return values

    def _made_again(
        self, leaves: tuple[LeafSpec, ...], keep: Callable[[Any], list[Any]], of_init: Mapping[int, MadeByInit]
    ) -> dict[int, Any]:
        """Returns the values of leaves that `init` made for the job of a checkpoint, in which they were frozen.

        Args:
            of_init: these leaves, by number.

        Raises:
            CheckpointError: `init` makes other values now.
        """
        import numpy as np

        from .._compute import initial
        from .._update import as_leaf, digest_of, some_of

        if not of_init:
            return {}
        with on_processor():
            made: list[Any] = initial(
                self._init, self._seed, lambda model: [keep(model)[number] for number in of_init], compiled=False
            )
        found = {number: as_leaf(value, leaves[number]) for number, value in zip(of_init, made, strict=True)}
        if other := [
            number for number, value in found.items() if digest_of(np.asarray(value)) != of_init[number].digest
        ]:
            assert self._start_from is not None
            names, why = some_of([leaves[number].name for number in other]), of_init[other[0]].why
            raise CheckpointError(
                f"start_from: {why or f'{self._start_from.uri} was trained beside frozen arrays that init made'}, "
                f"and init now makes others: {names} ({len(other)} in all). Use the same init and seed. If these "
                "arrays are those of a file, and the job had a mapping that changes them, give it: "
                "StartFrom(uri, base=StartFrom(..., mapping=...))"
            )
        return found

    def _leaves_that_travel(self, model: Any) -> list[Any]:
        import jax

        return jax.tree.leaves(self.tree.rest(model))


def on_processor() -> Any:
    """Returns a context in which arrays are computed on a processor, if JAX may use it beside an accelerator."""
    import jax

    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return nullcontext()


class FrozenPart:
    """The frozen leaves of a model in a worker or an evaluator.

    Attributes:
        known: whether they are read, or there are none.
        arrays: the values, on the devices.
        agreement: what the pod sends when it joins. It has their digests once they are read.
    """

    def __init__(
        self, beginning: Beginning, agreement: Agreement, placement: Callable[[], Placement] | None = None
    ) -> None:
        """
        Args:
            placement: returns where they lie; None: each device has all.
        """
        self._beginning, self._placement = beginning, placement
        self.agreement = agreement
        self.arrays: Sequence[Any] = ()
        self.known = not beginning.tree.frozen_leaves

    def read(self, reference: str) -> None:
        """Read them, or let `init` make them. Raises as `Beginning.place_frozen`.

        Args:
            reference: the source, as shard 0 answered.
        """
        from .._compute import Base, Placement

        placement = Placement() if self._placement is None else self._placement()
        with Base(placement, digests=True) as base:
            self._beginning.place_frozen(base.place, reference)
        self.arrays, self.known = base.arrays, True
        self.agreement = replace(self.agreement, frozen=base.digests, frozen_from=reference)

    def whole(self, params: Any) -> Any:
        """Returns all parameters, out of those that train."""
        return self._beginning.tree.whole(params, self.arrays)

    def whole_model(self, params: Any, state: Any) -> tuple[Any, Any]:
        """See `TreeSpec.whole_model`."""
        return self._beginning.tree.whole_model(params, state, self.arrays)
