"""A parameter server's pod, from its start or promotion until the job has ended.

- `_context`: the context of all parts; `_server`: connects the parts and runs them.
- `_served_shard`: the shard; `_loading`: the state at which a term begins.
- `_coordinators`: the way to the coordinator. `LinkedShard` has a link to it, and `Shard0` (`_shard0`) has it in this
  process; `_history`: how shard 0 begins a history.
- `_server_host`: answers calls; `_arbiter`: whether another incarnation serves the shard.
"""

from __future__ import annotations

from ._context import ServerContext
from ._server import Server

__all__ = ["Server", "ServerContext"]
