"""The rules that a kind adds to the generic storage operations: defaults, admission, validation, and deletion.

The generic part is in `rest`; a kind without its own rules uses `Strategy` directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backstay_cluster.apiserver import metadata
from backstay_cluster.apiserver.errors import StatusCause
from backstay_cluster.apiserver.objects import Obj

if TYPE_CHECKING:
    from backstay_cluster.apiserver.resources import Resource


class Strategy:
    """The rules of one kind. Methods change the given object, which is not stored yet."""

    name_rule: metadata.NameRule = staticmethod(metadata.subdomain)
    returns_deleted = False  # whether a delete returns the object instead of a Status
    unconditional_update = True  # whether a replace may omit resourceVersion
    create_on_update = False  # whether a replace of a missing object creates it
    plain_mark = False  # whether an object that is being deleted has only the deletionTimestamp as its mark
    status_keeps_metadata = False  # whether a write to /status leaves labels and annotations unchanged

    def __init__(self, resource: Resource) -> None:
        self.resource = resource

    def default(self, obj: Obj) -> None:
        """Fill in defaults; runs at every write."""

    def before_create(self, obj: Obj, *, dry_run: bool) -> None:
        """Admission and allocation; runs before the validation of metadata."""

    def before_update(self, obj: Obj, old: Obj) -> None:
        """Copy fields from the old object that a writer may omit."""

    def validate(self, obj: Obj, old: Obj | None) -> list[StatusCause]:
        """Returns the errors of the object itself (metadata has the same rules for all kinds)."""
        return []

    def validate_status(self, obj: Obj, old: Obj) -> list[StatusCause]:
        """Returns the errors of an object after a write to its status."""
        return []

    def created(self, obj: Obj) -> None:
        """The object was stored."""

    def deleted(self, obj: Obj) -> None:
        """The object was removed."""

    def before_delete(self, obj: Obj) -> Obj:
        """Returns the object at the start of its deletion, unchanged or with the kind's own finalizer."""
        return obj

    def grace_period(self, obj: Obj, requested: int | None) -> int | None:
        """Returns the seconds between the mark and the removal, or None if the kind is removed immediately."""
        return None
