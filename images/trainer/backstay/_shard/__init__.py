"""One shard as its server runs it: gradients staged, commits applied in order, versions handed to waiting streams."""

from ._runtime import ShardRuntime

__all__ = ["ShardRuntime"]
