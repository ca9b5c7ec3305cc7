"""The Kubernetes API in one asyncio process, in memory: what Kopf, our own clients, kubectl and the tests use of it.

It is held honest by `tests/apiserver`, which replays what a real kube-apiserver answered; where it deliberately
deviates is listed in `docs/decisions/0004-embedded-api-server.md`.
"""

from backstay_cluster.apiserver.server import ApiServer

__all__ = ["ApiServer"]
