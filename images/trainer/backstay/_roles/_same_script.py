"""Compares the scripts of the pods of a rank before they compute together.

Servers compare only the first pod of a rank with themselves. Pods that compute different programs would wait for each
other in a collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from backstay_rpc.control_pb2 import JoinRequest, Peer

from .._script import Script, ScriptPlan
from .._transport import FLAG, OF_RANK, Agreement, Members, messages
from ..errors import ConfigurationError

__all__ = ["check_same_script"]

_SHOWN: Final = 200

_REQUESTS: Final = messages(JoinRequest)


def check_same_script(members: Members, script: Script, plan: ScriptPlan, peer: Peer) -> None:
    """All members of a rank call this together.

    Args:
        peer: this pod.

    Raises:
        ConfigurationError: a member has another script.
    """
    if members.count == 1:
        return
    own = plan.agreement
    request = JoinRequest(peer=peer, leaves=own.leaves, settings={**own.settings, **_of_rank(script, plan)})

    def different(every: Sequence[Sequence[JoinRequest]]) -> Sequence[JoinRequest]:
        """Returns the first member whose script is not the leader's, and the leader, or no members if all have one
        script."""
        (first,), *others = every
        return next(([other, first] for (other,) in others if _difference(other, first)), [])

    found = members.agree("script", _REQUESTS, lambda: [request], different)

    def check() -> bool:
        if found:
            raise ConfigurationError(_difference(*found))
        return True

    members.agree("same script", FLAG, check, all)  # so that all members have the error, and end together


def _difference(other: JoinRequest, first: JoinRequest) -> str:
    """Returns the reason why a member cannot compute together with the first one, or an empty text if both have one
    script."""
    here, there = (f"pod {one.peer.member} of {one.peer.role} {one.peer.index}" for one in (first, other))
    own = Agreement(tuple(first.leaves), first.settings)
    return own.difference(other.leaves, other.settings, there, here, (here, f"in {here}", there))


def _of_rank(script: Script, plan: ScriptPlan) -> dict[str, str]:
    """Returns the arguments that only the members of a rank must have in common."""
    tree = plan.partition.tree
    shardings = script.placement.model(tree)
    divided = [
        f"{leaf.name} {sharding.spec}"
        for leaf, sharding in zip(tree.leaves, shardings, strict=True)
        if not sharding.is_fully_replicated
    ]
    settings = {
        "mesh": str(dict(shardings[0].mesh.shape)),
        "sharding": "; ".join(divided),
        "average": str(script.average),
        "evaluate": "a function" if script.evaluate is not None else "None",
    }
    return dict(zip(OF_RANK, map(_short, (settings[name] for name in OF_RANK)), strict=True))


def _short(text: str) -> str:
    """Returns a text of some words; of a long one the beginning, and a digest of all of it."""
    if len(text) <= _SHOWN:
        return text or "nothing"
    return f"{text[:_SHOWN]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
