"""One shard in its server: gradients are staged, commits applied in order, and versions sent to waiting streams."""

from ._runtime import ShardRuntime

__all__ = ["ShardRuntime"]
