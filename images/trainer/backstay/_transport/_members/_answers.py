"""Makes one answer of those that the members of a rank have received."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from backstay_rpc.control_pb2 import RejectReason

from ..._coordination import MODES, Mode
from ..._update import Selection
from ...errors import PeerLost
from .._streams import Pulled
from ._forms import Form
from ._group import Members

__all__ = ["pulled_together"]


@dataclass(frozen=True)
class _MemberAnswers:
    """The answers to some members as one.

    Attributes:
        newest: the answer with the highest version.
        lowest: the lowest version.
        terms: the lowest and the highest term.
    """

    newest: Pulled
    lowest: int
    terms: tuple[int, int]


def _encode(answers: _MemberAnswers) -> bytes:
    fields: dict[str, Any] = asdict(answers.newest)
    if (selection := answers.newest.selection) is not None:
        fragments = None if selection.fragments is None else sorted(selection.fragments)
        fields["selection"] = [fragments, selection.values]
    return json.dumps([fields, answers.lowest, answers.terms]).encode()


def _decode(data: bytes) -> _MemberAnswers:
    fields, lowest, (first, last) = json.loads(data)
    if fields["selection"] is not None:
        fragments, values = fields["selection"]
        fields["selection"] = Selection(None if fragments is None else frozenset(fragments), values)
    return _MemberAnswers(Pulled(**fields), lowest, (first, last))


def _merged(each: Sequence[_MemberAnswers]) -> _MemberAnswers:
    pulled = [answers.newest for answers in each]
    received = [one.selection for one in pulled if one.selection is not None]
    newest = replace(
        max(pulled, key=lambda one: one.version),
        outcome=next((one.outcome for one in pulled if one.outcome), RejectReason.REJECT_UNSPECIFIED),
        next_key_step=max(one.next_key_step for one in pulled),
        done=all(one.done for one in pulled),
        selection=received[0] if received else None,
        ask=any(one.ask for one in pulled),
    )
    terms = min(answers.terms[0] for answers in each), max(answers.terms[1] for answers in each)
    return _MemberAnswers(newest, min(answers.lowest for answers in each), terms)


_ANSWERS: Final[Form[_MemberAnswers]] = Form(_encode, _decode)


def pulled_together(
    members: Members,
    mode: Mode,
    first: Callable[[], Pulled],
    again: Callable[[int], Pulled],
    cancel: Callable[[], object],
    *,
    pushed: bool,
) -> Pulled:
    """Returns the answer that a rank has received, of which each member has its own blocks.

    In Sync mode, members whose answer is of an earlier version pull again, until all have the same one. In Async mode
    their versions may differ, as those of shards may.

    Args:
        first: exchanges with all shards.
        again: pulls at least this version from all shards.
        cancel: ends both from another thread.
        pushed: whether `first` pushes a contribution.

    Raises:
        Refused, PeerLost, JobFailed: what `first` or `again` raised in a member.
        PeerLost: the answers are of several terms, because a server started again.
    """
    if members.count == 1:
        return first()
    own: Pulled

    def together(receive: Callable[[], Pulled]) -> _MemberAnswers:
        def make() -> _MemberAnswers:
            nonlocal own
            own = receive()
            return _MemberAnswers(own, own.version, (own.term, own.term))

        answers = members.agree("pull", _ANSWERS, make, _merged, cancel)
        if len(terms := set(answers.terms)) > 1:
            cancel()
            raise PeerLost(f"the pods of this rank are in the terms {sorted(terms)}: a server started again")
        return answers

    agreed = together(first)
    about = agreed.newest
    while MODES[mode].behind({0: agreed.lowest, 1: agreed.newest.version}):
        version, held = agreed.newest.version, own
        agreed = together(partial(again, version) if held.version < version else lambda held=held: held)  # type: ignore[misc]
    # Without a push, older answers are about older updates. But the received selection is always that of the newest
    # one. A member that pulled again has all, and the others have the fragments of all updates until this version.
    about = about if pushed else agreed.newest
    return replace(
        agreed.newest,
        version=agreed.lowest,
        outcome=about.outcome,
        next_key_step=about.next_key_step,
        pushed_at=own.pushed_at,
        answered_at=own.answered_at,
    )
