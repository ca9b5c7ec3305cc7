"""The embedded cluster and the operator as child processes, and what they keep for the next run."""
