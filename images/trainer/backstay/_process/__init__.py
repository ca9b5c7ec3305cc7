"""Provides a pod's environment, log lines and exit, and its sockets at the level of the operating system.

- `Environment` is what the operator gives a pod; `show_role` shows it in the list of processes.
- `Stop` receives SIGTERM; `write_termination`, `end_after_script` and `hand_over` end a pod, and `describe` and
  `printed` report its exception. `Interrupts` keeps Ctrl-C until one process has stored a checkpoint.
- `configure`, `Reporter` and `Bar` write log lines and progress; `keep_output` keeps the end of them for a report.
- `Callers` receives the first bytes of connections to a port, within `Bounds`, or refuses the `Caller` as
  `Unwelcome`.
- `listening_socket`, `ConnectionGuard` and `reset_peers` work on sockets of any library.
"""

from __future__ import annotations

from ._after import hand_over
from ._bar import Bar, on_terminal
from ._callers import Bounds, Caller, Callers, Unwelcome
from ._compiling import one_compiles
from ._environment import Environment
from ._exit import SIGTERM_EXIT, Stop, end_after_script, end_now, end_process, exit_status, write_termination
from ._failure import describe, printed
from ._guard import ConnectionGuard, Warnings
from ._hang import HANGS, hang_report, keep_output, output_end, script_stacks, stacks
from ._interrupts import Interrupts
from ._logs import Reporter, configure
from ._sockets import NO_LINGER, Address, listening_socket, peer_address, reset_peers, socket_address
from ._title import show_role

__all__ = [
    "HANGS",
    "NO_LINGER",
    "SIGTERM_EXIT",
    "Address",
    "Bar",
    "Bounds",
    "Caller",
    "Callers",
    "ConnectionGuard",
    "Environment",
    "Interrupts",
    "Reporter",
    "Stop",
    "Unwelcome",
    "Warnings",
    "configure",
    "describe",
    "end_after_script",
    "end_now",
    "end_process",
    "exit_status",
    "hand_over",
    "hang_report",
    "keep_output",
    "listening_socket",
    "on_terminal",
    "one_compiles",
    "output_end",
    "peer_address",
    "printed",
    "reset_peers",
    "script_stacks",
    "show_role",
    "socket_address",
    "stacks",
    "write_termination",
]
