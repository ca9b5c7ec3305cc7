"""O5 on a laptop holds: an operator that dies is started again, and nothing that is stopped holds up the end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from between import put, until_async

from backstay_client.embedded import session

SCRIPT = """
import os, pathlib, sys, time
with pathlib.Path("lives").open("a") as file:
    print(os.getpid(), file=file, flush=True)
time.sleep({seconds})
sys.exit("kopf ended: no such thing")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(session, "RESTART_SECONDS", 0.0)

    def write(seconds: float) -> str:
        put(tmp_path / "short_lived.py", SCRIPT.format(seconds=seconds))
        return "short_lived"

    return write


def lives(folder: Path) -> list[int]:
    """Returns the process ids that there were."""
    known = folder / "lives"
    return [int(line) for line in known.read_text().splitlines()] if known.exists() else []


def test_what_dies_again_and_again_is_given_up(module, tmp_path):
    """The caller gets the reason for the end: otherwise an operator that cannot start would look like a slow
    one."""
    keeper = session.Keeper()
    asyncio.run(session._keep(keeper, "operator", tmp_path, module(0), restarts=2))
    assert len(lives(tmp_path)) == 3
    assert keeper.last_end == "the operator ended with exit status 1: kopf ended: no such thing"


def test_how_the_operator_ended_is_shown_until_it_has_run_for_a_while(tmp_path):
    async def story() -> None:
        now = asyncio.get_running_loop().time()
        died = asyncio.get_running_loop().create_task(asyncio.sleep(0, "operator"))
        kept = session.Session(tmp_path, tmp_path, None, died, session.Keeper("it ended", now))
        assert kept.trouble == "it ended"
        kept.operator.at = now - session.SHOWN_SECONDS
        assert kept.trouble == ""
        await died
        (tmp_path / "operator.log").write_text("the reason\n")
        assert str(kept.death()) == f"the operator died, see {tmp_path}/operator.log\n  | the reason"

    asyncio.run(story())


def test_what_dies_is_started_again_and_is_stopped_at_the_end(module, tmp_path):
    async def story() -> None:
        keeping = asyncio.create_task(session._keep(session.Keeper(), "operator", tmp_path, module(60), restarts=1))
        for life in (1, 2):
            await until_async(lambda life=life: len(lives(tmp_path)) == life)
            if life == 1:
                os.kill(lives(tmp_path)[0], signal.SIGKILL)
        await session._end(keeping)
        for process in lives(tmp_path):
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)

    asyncio.run(story())


def test_a_stopped_process_receives_sigterm(module, tmp_path):
    async def story() -> int | None:
        async with session._process("cluster", tmp_path, module(60)) as process:
            await until_async(lambda: lives(tmp_path))
            process.send_signal(signal.SIGSTOP)
        return process.returncode

    assert asyncio.run(story()) == -signal.SIGTERM
