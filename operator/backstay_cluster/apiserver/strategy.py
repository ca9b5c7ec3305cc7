"""What a kind adds to the generic storage operations: defaults, admission, validation, and how it is deleted.

The generic part is in `rest`; a kind without rules of its own uses `Strategy` as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backstay_cluster.apiserver import metadata
from backstay_cluster.apiserver.errors import Cause
from backstay_cluster.apiserver.objects import Obj

if TYPE_CHECKING:
    from backstay_cluster.apiserver.resources import Resource
    from backstay_cluster.apiserver.rest import Api


class Strategy:
    """The rules of one kind. Methods change the object they are given, which is not stored yet."""

    name_rule: metadata.NameRule = staticmethod(metadata.subdomain)
    returns_deleted = False  # whether a delete answers with the object instead of a Status
    unconditional_update = True  # whether a replace may leave resourceVersion out
    create_on_update = False  # whether a replace of what is not there creates it
    plain_mark = False  # whether the mark of deletion is only the deletionTimestamp
    status_keeps_metadata = False  # whether a write to /status leaves labels and annotations as they are

    def __init__(self, api: Api, resource: Resource) -> None:
        self.api = api
        self.resource = resource

    def default(self, obj: Obj) -> None:
        """Fill in defaults; runs at every write."""

    def before_create(self, obj: Obj, *, dry_run: bool) -> None:
        """Admission and allocation; runs once validation of metadata is not yet done."""

    def before_update(self, obj: Obj, old: Obj) -> None:
        """Carry over what a writer may leave out."""

    def validate(self, obj: Obj, old: Obj | None) -> list[Cause]:
        """What is wrong with the object itself (metadata is checked for all kinds alike)."""
        return []

    def validate_status(self, obj: Obj, old: Obj) -> list[Cause]:
        """What is wrong with an object after a write to its status."""
        return []

    def created(self, obj: Obj) -> None:
        """The object is stored."""

    def deleted(self, obj: Obj) -> None:
        """The object is gone."""

    def before_delete(self, obj: Obj) -> Obj:
        """What the object becomes when its deletion starts: the same, or with a finalizer of its own."""
        return obj

    def grace_period(self, obj: Obj, asked: int | None) -> int | None:
        """Seconds between the mark and the removal; None for a kind that is removed at once."""
        return None
