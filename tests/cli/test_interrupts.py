"""Ctrl-C while a command is still importing ends it without a traceback; it does not affect other programs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from between import LONG

REPORT = """
import signal, sys
sys.argv = [sys.argv[1]]
# `nohup` and jobs of a shell script start programs that ignore the signal; the tests themselves may be such a program.
ignored = sys.argv[0] == "ignoring/backstay"
signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
import backstay_cli
from backstay_cli import interrupts
names = {signal.SIG_DFL: "ends", signal.SIG_IGN: "ignored", signal.default_int_handler: "raises"}
during = names[signal.getsignal(signal.SIGINT)]
interrupts.restore()
print(during, names[signal.getsignal(signal.SIGINT)])
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("/usr/bin/backstay", "ends raises"),
        ("kubectl-backstay", "ends raises"),
        ("/usr/bin/pytest", "raises raises"),
        ("ignoring/backstay", "ignored ignored"),
    ],
)
def test_ctrl_c_while_a_command_imports(program: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REPORT, program], capture_output=True, text=True, timeout=LONG, check=True
    )
    assert done.stdout.strip() == said


HEED = """
import asyncio, os, signal, sys
ignored = sys.argv[1] == "ignored"
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
from backstay_cli.interrupts import on_signals
async def main():
    seen = []
    on_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda: seen.append(1))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
        for _ in range(10):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
    print(len(seen))
asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "said"), [("ignored", "0"), ("heeded", "3")])
def test_a_signal_that_the_process_ignores_stays_ignored(how: str, said: str) -> None:
    """`nohup`, and a shell for jobs in the background, ignore signals for their programs."""
    done = subprocess.run([sys.executable, "-c", HEED, how], capture_output=True, text=True, timeout=LONG, check=True)
    assert done.stdout.strip() == said
