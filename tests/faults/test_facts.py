"""The facts that benchmarks read are reported by the trainer under these names."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import backstay

ROOT = Path(__file__).parents[2]
FACTS: set[str] = runpy.run_path(str(ROOT / "bench" / "scripts" / "_timeline.py"))["FACTS"]


def reported() -> set[str]:
    """Returns the names in the trainer's source."""
    files = Path(backstay.__file__).parent.rglob("*.py")
    return {name for file in files for name in re.findall(r'_instrument\.report\(\s*"(\w+)"', file.read_text())}


@pytest.mark.parametrize("fact", sorted(FACTS))
def test_a_fact_that_benchmarks_read_is_reported(fact: str) -> None:
    assert fact in reported()
