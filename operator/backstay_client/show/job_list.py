"""Shows a list of jobs as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from backstay_client.show.html import job_rows
from backstay_client.view.status import JobStatus

__all__ = ["Jobs"]

_Handle = TypeVar("_Handle")


class Jobs(list[_Handle]):
    """Handles of jobs, shown as a table in a notebook.

    Attributes:
        statuses: the states of the jobs when they were listed, without the numbers of the last seconds.
    """

    def __init__(self, handles: Iterable[_Handle], statuses: Iterable[JobStatus]) -> None:
        super().__init__(handles)
        self.statuses = list(statuses)

    def _repr_html_(self) -> str:
        return job_rows(self.statuses)
