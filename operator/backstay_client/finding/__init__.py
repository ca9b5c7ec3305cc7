"""Selects a cluster, or a run on this machine, which may have ended."""
