"""A kubelet that runs every container as a process of this Python environment, and what a node needs besides it."""
