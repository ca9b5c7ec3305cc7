"""Tests of the node, and of the cluster as a whole."""
