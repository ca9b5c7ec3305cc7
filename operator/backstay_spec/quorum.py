"""How many gradients make one synchronous update; used by the operator's status and by the coordinator."""

from __future__ import annotations

import re


def backups_of(backups: int | str, replicas: int) -> int:
    """Returns the number of backup workers among `replicas` pods.

    Args:
        backups: a number of pods, or whole percents such as ``"5%"``: N + N*5% pods make a quorum of N.
        replicas: all worker pods, at least 1.

    Returns:
        How many of `replicas` an update does not wait for; an update still needs at least one gradient.

    Raises:
        ValueError: `backups` is negative or not a number or whole percents.
    """
    if isinstance(backups, str):
        match = re.fullmatch(r"(0|[1-9][0-9]?)%", backups)
        if match is None:
            raise ValueError(f"backups is {backups!r}: must be a whole number, or whole percents from '0%' to '99%'")
        percent = int(match.group(1))
        return -(-replicas * percent // (100 + percent))
    if backups < 0:
        raise ValueError(f"backups is {backups}: must be 0 or more")
    return backups


def quorum_of(backups: int | str, world: int) -> int:
    """Returns how many gradients one synchronous update averages, ``max(1, world - backups)``."""
    return max(1, world - backups_of(backups, world))
