"""O5 on a laptop: an operator that dies is started again, and nothing that is stopped holds up the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from backstay_cli import session

SCRIPT = """
import os, pathlib, time
with pathlib.Path("lives").open("a") as file:
    print(os.getpid(), file=file, flush=True)
time.sleep({seconds})
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(session, "RESTART_SECONDS", 0.0)

    def write(seconds: float) -> str:
        (tmp_path / "short_lived.py").write_text(SCRIPT.format(seconds=seconds))
        return "short_lived"

    return write


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  # another process makes it so
            await asyncio.sleep(0.01)


def lives(folder: Path) -> list[int]:
    """The process ids that there were."""
    known = folder / "lives"
    return [int(line) for line in known.read_text().splitlines()] if known.exists() else []


def test_what_dies_again_and_again_is_given_up(module, tmp_path):
    asyncio.run(session._keep("operator", tmp_path, module(0), restarts=2))
    assert len(lives(tmp_path)) == 3


def test_what_dies_is_started_again_and_is_stopped_at_the_end(module, tmp_path):
    async def story() -> None:
        keeping = asyncio.create_task(session._keep("operator", tmp_path, module(60), restarts=1))
        for life in (1, 2):
            await until(lambda life=life: len(lives(tmp_path)) == life)
            if life == 1:
                os.kill(lives(tmp_path)[0], signal.SIGKILL)
        await session._end(keeping)
        for process in lives(tmp_path):
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)

    asyncio.run(story())


def test_a_process_that_was_stopped_hears_that_it_shall_end(module, tmp_path):
    async def story() -> int | None:
        async with session._process("cluster", tmp_path, module(60)) as process:
            await until(lambda: lives(tmp_path))
            process.send_signal(signal.SIGSTOP)
        return process.returncode

    assert asyncio.run(story()) == -signal.SIGTERM
