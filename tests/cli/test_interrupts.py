"""Ctrl-C while a command is still importing ends it without a traceback; it does not affect other programs."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
        [sys.executable, "-c", REPORT, program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == said
