"""`spec.update.grace` as text."""

from __future__ import annotations

import re

import pytest

from backstay_spec.grace import PATTERN, grace_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0.0), ("500ms", 0.5), ("2s", 2.0), ("1.5s", 1.5), ("1m30s", 90.0), ("0.25m", 15.0), ("Auto", None)],
)
def test_a_grace_in_seconds(text: str, seconds: float | None) -> None:
    assert grace_seconds(text) == seconds
    assert re.search(PATTERN, text)


@pytest.mark.parametrize("text", ["", "1", "s", "auto", "Auto ", "-1s", "1 s", "1h", "1s\n", "٣s", "1..5s", ".5s"])
def test_what_is_not_a_grace_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be Auto, or a duration such as 500ms"):
        grace_seconds(text)
