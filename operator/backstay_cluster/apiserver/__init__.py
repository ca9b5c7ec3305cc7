"""The Kubernetes API in one asyncio process, in memory: the part that Kopf, our clients, kubectl and the tests use.

`tests/apiserver` replays the answers of a real kube-apiserver against it. The file
`docs/decisions/0004-embedded-api-server.md` lists the deliberate differences.
"""

from backstay_cluster.apiserver.server import ApiServer

__all__ = ["ApiServer"]
