"""Settings for generated examples and installed programs that the tests of this distribution share with all others.

A test that needs an installed program has the mark ``@pytest.mark.tool("kubectl")``. Without the program, such a test
is skipped with a message. With ``BACKSTAY_REQUIRE_TOOLS=1``, as in CI, it fails: otherwise CI would never run that
check.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TOOLS = Path(__file__).resolve().parents[3] / ".tools" / "bin"  # where tests/tools.sh installs

# No test asserts a time. A busy machine must not fail a test, neither in an example nor in generating examples.
settings.register_profile("search", deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow])
# The same examples in each run: a new one must not fail the tests of another change. `search` looks for new ones.
settings.register_profile("backstay", settings.get_profile("search"), derandomize=True, database=None)
settings.load_profile("backstay")


def find_tool(name: str) -> str | None:
    """Returns the path of an installed program in .tools/bin or PATH, or None."""
    return shutil.which(name, path=os.pathsep.join([str(TOOLS), os.environ.get("PATH", os.defpath)]))


def require_tools(item: pytest.Item) -> None:
    """Skip or fail a test whose programs are not installed."""
    wanted = [name for mark in item.iter_markers("tool") for name in mark.args]
    missing = sorted({name for name in wanted if find_tool(name) is None})
    if not missing:
        return
    what = f"not installed: {', '.join(missing)} (`make tools` installs what it can)"
    if os.environ.get("BACKSTAY_REQUIRE_TOOLS") == "1":
        pytest.fail(f"{what}; BACKSTAY_REQUIRE_TOOLS=1 forbids to skip", pytrace=False)
    pytest.skip(what)


class ToolPath:
    """Finds programs; a test that requests a missing one lacks its mark."""

    def __call__(self, name: str) -> str:
        path = find_tool(name)
        assert path is not None, f"{name} is not installed: mark the test with tool({name!r})"
        return path
