"""Connects the members of a rank, which are pods that train as one: they take the same decisions at the same points."""

from __future__ import annotations

from ._alone import ALONE
from ._answers import pulled_together
from ._forms import FLAG, TEXT, Form, messages
from ._group import FollowingMember, LeadingMember, Members, OwnMember
from ._line import MemberLost

__all__ = [
    "ALONE",
    "FLAG",
    "TEXT",
    "FollowingMember",
    "Form",
    "LeadingMember",
    "MemberLost",
    "Members",
    "OwnMember",
    "messages",
    "pulled_together",
]
