"""Names the process after its role and index, for `ps`, `top` and `pgrep`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backstay_spec import contract

if TYPE_CHECKING:
    from ._environment import Environment

__all__ = ["process_name", "show_role"]

_SHORT: Final = {contract.ROLE_SERVER: "server"}
_COMM: Final = Path("/proc/self/comm")
# https://man7.org/linux/man-pages/man5/proc_pid_comm.5.html: 16 bytes with the final NUL; the kernel cuts the rest.
_LONGEST: Final = 15


def process_name(role: str, index: int, *, standby: bool = False) -> str:
    """Returns the name that the process shows, such as ``worker-3``, ``server-0``, ``standby-0`` or ``evaluator-0``.

    Args:
        role: a value of the role label.
        index: shard, rank, or 0.
        standby: whether the process is the standby of a shard.
    """
    return f"{'standby' if standby else _SHORT.get(role, role)}-{index}"[:_LONGEST]


def show_role(environment: Environment, *, standby: bool = False) -> None:
    """Give this process its name; where the system has no such file, the process keeps its own.

    The command line stays what it was, so that `pgrep -f train.py` still finds every pod of a script.

    Args:
        standby: whether the process is a standby now; one that is promoted is called again.
    """
    with contextlib.suppress(OSError):
        _COMM.write_text(process_name(environment.role, environment.index, standby=standby))
