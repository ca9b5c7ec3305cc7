"""A rank of one pod, which decides alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from ._forms import Form
from ._group import Members

__all__ = ["ALONE"]

_T = TypeVar("_T")


class _Alone(Members):
    """The only member of a rank. Its values and errors stay as they are."""

    def share(self, point: str, form: Form[_T], make: Callable[[], _T]) -> _T:
        del point, form
        return make()

    def agree(
        self,
        point: str,
        form: Form[_T],
        make: Callable[[], _T],
        merge: Callable[[Sequence[_T]], _T],
        cancel: Callable[[], object] | None = None,
    ) -> _T:
        del point, form, cancel
        return merge([make()])

    def has_raised(self, error: BaseException) -> bool:
        del error
        return True

    def settle(self, error: BaseException) -> None:
        del error

    def close(self) -> None:
        pass


ALONE: Final = _Alone(0, 1)
