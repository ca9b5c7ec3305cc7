"""docs/promises.md names tests that exist, and at least one for each promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "promises.md").read_text(), flags=re.MULTILINE)[1:]
PROMISES = [*(f"T{number}" for number in range(1, 11)), *(f"O{number}" for number in range(1, 12))]


@pytest.mark.parametrize("promise", PROMISES)
def test_every_promise_is_held_by_tests_that_exist(promise: str) -> None:
    [section] = [text for text in SECTIONS if text.startswith(f"{promise}: ")]
    named = re.findall(r"`((?:operator/backstay_cluster/)?tests/[\w/]+\.py)::(test_\w+)`", section)
    assert named
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
