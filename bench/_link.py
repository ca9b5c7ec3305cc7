"""A link of a limited rate between the servers of a job and everything else, in an own network namespace.

The pods of an embedded cluster listen on their own loopback addresses, and clients have 127.0.0.1. So packets to and
from pods are two classes of the kernel's queue (HTB, see tc-htb(8)), each with the rate of the link. With one server
they are the two directions of that server's network card. Calls between other programs of the machine are not limited.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import Final

INSIDE: Final = "BACKSTAY_BENCH_LINK"
TO_PODS, FROM_PODS, OTHER = "1:10", "1:20", "1:30"


def enter(gigabits: float) -> None:
    """Start this program again in a network namespace whose link has this rate, and return there.

    Args:
        gigabits: a second, in each direction.

    Raises:
        SystemExit: the namespace or its queue cannot be made.
    """
    if INSIDE in os.environ:
        return
    for tool, package in (("unshare", "util-linux"), ("ip", "iproute2"), ("tc", "iproute2")):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is not on the PATH: install {package}")
    if os.geteuid() != 0:
        raise SystemExit("a network namespace with a limited link needs root")
    os.environ[INSIDE] = str(gigabits)
    script = "\n".join(_commands(gigabits))
    # `exec` keeps the process id, so that signals to this program still reach it.
    os.execvp("unshare", ["unshare", "--net", "sh", "-ec", f'{script}\nexec "$@"', "sh", sys.executable, *sys.argv])


def carried() -> tuple[int, int]:
    """Returns the bytes that the link has carried: to pods, and from pods, with headers of TCP and IP."""
    shown = subprocess.check_output(["tc", "-s", "class", "show", "dev", "lo"], text=True)
    sent = dict(re.findall(r"class htb (\S+) .*?Sent (\d+) bytes", shown, re.DOTALL))
    return int(sent[TO_PODS]), int(sent[FROM_PODS])


def _commands(gigabits: float) -> list[str]:
    rate = f"{int(gigabits * 1e6)}kbit"
    limited = f"htb rate {rate} burst 256kb cburst 256kb quantum 200000"
    chosen = "tc filter add dev lo parent 1: protocol ip"
    return [
        "ip link set lo up",
        "tc qdisc add dev lo root handle 1: htb default 30 r2q 1000",
        f"tc class add dev lo parent 1: classid {TO_PODS} {limited}",
        f"tc class add dev lo parent 1: classid {FROM_PODS} {limited}",
        f"tc class add dev lo parent 1: classid {OTHER} htb rate 100gbit quantum 200000",
        f"{chosen} prio 1 u32 match ip src 127.0.0.1/32 match ip dst 127.0.0.1/32 flowid {OTHER}",
        f"{chosen} prio 2 u32 match ip dst 127.0.0.1/32 flowid {FROM_PODS}",
        f"{chosen} prio 3 u32 match ip dst 127.0.0.0/8 flowid {TO_PODS}",
    ]
