"""Serves the part of the Kubernetes API that Kopf, our clients, kubectl and the tests use, from memory in one process.

The tests replay the answers of a real kube-apiserver against it. The file
`docs/decisions/0070-the-embedded-cluster.md` lists the deliberate differences.
"""

from backstay_cluster.apiserver.server import ApiServer

__all__ = ["ApiServer"]
