"""A kubelet that runs every container as a process of this Python environment, and the other parts of a node."""
