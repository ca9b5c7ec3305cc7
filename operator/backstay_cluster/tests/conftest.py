"""Marks and fixtures of installed programs that all tests of this distribution share."""

from __future__ import annotations

import asyncio

import pytest

from backstay_cluster.tests.shared_settings import ToolPath, require_tools


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    require_tools(item)


@pytest.fixture(scope="session", autouse=True)
def _no_default_loop() -> None:
    """Plug-ins get the default event loop before each test, and would make one that is never closed."""
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def tool() -> ToolPath:
    """The path of an installed program; its test is marked with ``tool``."""
    return ToolPath()
