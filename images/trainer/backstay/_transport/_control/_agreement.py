"""Settings that all pods of a run must have in common, compared on joining: parameters, optimizer, arguments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from backstay_rpc.control_pb2 import Leaf

__all__ = [
    "CONSTANTS",
    "LAYOUT",
    "OF_RANK",
    "PROGRAM",
    "SOFTWARE",
    "STRUCTURE",
    "VERSION",
    "Agreement",
    "first_difference",
]

STRUCTURE: Final = "optimizer_state"
PROGRAM: Final = "optimizer"
CONSTANTS: Final = "optimizer_constants"
LAYOUT: Final = "layout"
SOFTWARE: Final = "software"
VERSION: Final = "version"
OF_RANK: Final = ("mesh", "sharding", "average", "evaluate")
"""Further arguments that must be the same in the pods of one rank, which compute together."""

_SHOWN: Final = 6


@dataclass(frozen=True)
class Agreement:
    """The settings that must be the same in every pod.

    Attributes:
        leaves: the leaves of the model.
        settings: name -> value, both text. These are the arguments of `train` under their own names, and digests in hex
            under `STRUCTURE`, `PROGRAM` and `LAYOUT`. `CONSTANTS` are those of the program, separated by blanks.
            `SOFTWARE` names the version of JAX and its width of floats. It explains another difference, and does not
            count as a difference. `VERSION` is the version of Backstay.
        frozen: the digests of the frozen leaves, in their order; empty: there are none, or they are not read yet. Only
            shard 0 compares them.
        frozen_from: where they were read.
    """

    leaves: tuple[Leaf, ...]
    settings: Mapping[str, str]
    frozen: tuple[str, ...] = ()
    frozen_from: str = ""

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the settings but `SOFTWARE`, for the data streams. `LAYOUT` covers the leaves."""
        compared = {name: text for name, text in self.settings.items() if name != SOFTWARE}
        text = json.dumps(compared, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()

    def difference(
        self,
        leaves: Sequence[Leaf],
        settings: Mapping[str, str],
        peer: str,
        here: str,
        names: tuple[str, str, str] = ("the server", "on the server", "the caller"),
    ) -> str:
        """Returns why a peer cannot train with this pod; empty if both agree.

        Args:
            leaves, settings: the peer's leaves and settings.
            peer, here: how the message names the peer and this pod.
            names: how it names them beside a leaf; see `first_difference`.
        """
        if self.settings.get(VERSION) != settings.get(VERSION):  # it may be the reason of every other difference
            mine, theirs = self.settings.get(VERSION, "an older one"), settings.get(VERSION, "an older one")
            return (
                f"the version of Backstay is {theirs} in {peer} and {mine} in {here}: all pods of a job must have the "
                "same version. Suspend the job, set spec.image, and resume the job."
            )
        leaf = first_difference(self.leaves, leaves, *names)
        if leaf:
            return (
                f"the parameters of {peer} are not those of {here}: {leaf}; init must return the same tree in every pod"
                f"{self._software(settings, peer, here)}"
            )
        every = sorted((self.settings.keys() | settings.keys()) - {CONSTANTS, SOFTWARE})
        other = [name for name in every if self.settings.get(name) != settings.get(name)]
        found = [self._words(name, settings.get(name), peer, here) for name in other if name in _ARGUMENTS]
        if (PROGRAM in other or STRUCTURE in other) and not {"frozen", "frozen_state"} & set(other):
            found.append(self._optimizer(STRUCTURE in other, settings.get(CONSTANTS, ""), peer, here))
        if other and not found:
            found = [f"the number of shards, or a setting, is not the same ({', '.join(other)})"]
        if not found:
            return ""
        text = f"{peer} differs from {here}: {'; '.join(found)}."
        of_wire = {name for name in other if name.startswith("wire.")}
        if of_wire:
            text += f" {_WIRE}"
            if not set(other) - of_wire - {LAYOUT}:  # codecs change the layout too
                return text
        return f"{text} The script must be the same in every pod{self._software(settings, peer, here) or '.'}"

    def _software(self, settings: Mapping[str, str], peer: str, here: str) -> str:
        """Returns an error for another version of JAX, or another width of floats, as both change the program."""
        mine, theirs = self.settings.get(SOFTWARE), settings.get(SOFTWARE)
        if not mine or not theirs or mine == theirs:
            return ""
        return f", and so must JAX: {peer} has {theirs}, {here} has {mine}."

    def _words(self, name: str, theirs: str | None, peer: str, here: str) -> str:
        mine = self.settings.get(name)
        return f"{name} is {theirs or 'unknown'} in {peer} and {mine or 'unknown'} in {here}"

    def _optimizer(self, structure: bool, constants: str, peer: str, here: str) -> str:
        mine, theirs = self.settings.get(CONSTANTS, "").split(), constants.split()
        only_mine = [text for text in mine if text not in theirs]
        only_theirs = [text for text in theirs if text not in mine]
        what = "the optimizer's state has other arrays" if structure else "the optimizer computes another update"
        if not only_mine and not only_theirs:
            return f"{what} in {peer} than in {here}, with the same constants"
        return f"{what} in {peer}: its constants have {_some(only_theirs)} where {here} has {_some(only_mine)}"


_WIRE: Final = (
    "spec.wire of the TrainingJob (of `backstay run`: --gradients and --parameters) must be the same in every pod."
)

_ARGUMENTS: Final = frozenset(
    {
        "steps",
        "seed",
        "clip_norm",
        "has_state",
        "has_rng",
        "frozen",
        "frozen_state",
        "wire.gradients",
        "wire.parameters",
        "wire.errorFeedback",
        "local.count",
        "local.inner_state",
        "local.fragments",
        "local.overlap",
        "local.mixing",
        "local.optimizer",
        *OF_RANK,
    }
)


def _some(texts: Sequence[str]) -> str:
    from ..._update import some_of

    return some_of(texts, _SHOWN) or "none"


def first_difference(
    mine: Sequence[Leaf],
    theirs: Sequence[Leaf],
    here: str = "the server",
    within: str = "on the server",
    there: str = "the caller",
) -> str:
    """Returns a description of the first leaf in which two trees differ; empty when they are equal.

    Args:
        here, within: how it names the process of `mine`, alone and after a leaf.
        there: how it names the process of `theirs`.
    """
    for own, other in zip(mine, theirs, strict=False):
        if own.path != other.path:
            return f"{here} has the leaf {own.path} where {there} has {other.path}"
        if tuple(own.shape) != tuple(other.shape) or own.dtype != other.dtype:
            return f"{own.path} is {_kind(own)} {within} and {_kind(other)} in {there}"
    if len(mine) != len(theirs):
        longer, where = (mine, within) if len(mine) > len(theirs) else (theirs, f"in {there}")
        return f"{longer[min(len(mine), len(theirs))].path} exists only {where}"
    return ""


def _kind(leaf: Leaf) -> str:
    return f"{leaf.dtype}[{','.join(str(size) for size in leaf.shape)}]"
