"""The time between the death of a standby and the next standby in sync, with and without preloaded pods.

Until then, a second death in the same shard costs a rollback. Both ways of starting pods are measured in turns.

    python bench/refill.py [--kills 6]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from _command import CommandRun, backstay_run

from backstay_spec import contract

SCRIPT = """
import time

import jax.numpy as jnp
import optax

import backstay


def batches(key):
    time.sleep(0.05)
    return float(key.step % 7)


backstay.train(
    init=lambda key: {"w": jnp.zeros((2000, 1000))},
    loss=lambda params, batch: ((params["w"] - batch) ** 2).mean(),
    batches=batches,
    optimizer=optax.adam(1e-3),
    steps=1_000_000,
)
"""
HOLDS = re.compile(r": the standby \(incarnation \d+\) holds the same state")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    args = parser.parse_args()
    print(f"standby killed -> the next one holds the state ({args.kills} kills, 8 MB and Adam, {os.cpu_count()} cores)")
    for option in ("--preload", "--no-preload"):
        found = sorted(refills(option, args.kills))
        print(f"{option:<14} median {statistics.median(found):5.2f} s   slowest {found[-1]:5.2f} s", flush=True)


def refills(option: str, kills: int) -> Iterator[float]:
    """Yields the seconds of each replacement of shard 0's standby.

    Raises:
        SystemExit: a standby was not filled within five minutes, or the command ended.
    """
    with tempfile.TemporaryDirectory(prefix="backstay-refill-") as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        roles = ("--servers", "2", "--standbys", "1", "--workers", "2")
        with backstay_run(folder, option, *roles, str(script)) as run:
            wait(run, 2)  # of two shards
            for number in range(kills):
                time.sleep(2.0)
                began = time.monotonic()
                standby(run.process.pid).kill()
                wait(run, number + 3)
                yield time.monotonic() - began


def wait(run: CommandRun, filled: int) -> None:
    """Wait until the servers have reported this number of standbys in sync."""
    run.wait(lambda logs: len(HOLDS.findall(logs)) >= filled)


def standby(command: int) -> psutil.Process:
    """Returns the process of shard 0's standby."""
    for child in psutil.Process(command).children(recursive=True):
        environ = child.environ()
        if (environ.get(contract.ENV_ROLE), environ.get(contract.ENV_INDEX)) != (contract.ROLE_SERVER, "0"):
            continue
        if 0 < int(environ.get(contract.ENV_ACTIVE, "0")) < int(environ[contract.ENV_INCARNATION]):
            return child
    raise SystemExit("shard 0 has no standby")


if __name__ == "__main__":
    main()
