"""A kubelet for the pods of the fake cluster, and questions about what the cluster contains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backstay_operator.rights import PODS
from backstay_spec import contract

KEY = ("team", "digits")
Json = dict[str, Any]
MakeJob = Callable[..., Json]


def names(kube: Any, resource: Any = PODS) -> list[str]:
    return [obj["metadata"]["name"] for obj in kube.all(resource)]


def of_role(kube: Any, role: str) -> list[Json]:
    return [pod for pod in kube.all(PODS) if pod["metadata"]["labels"][contract.LABEL_ROLE] == role]


def run_all(kube: Any) -> None:
    """A kubelet starts every pod."""
    for number, pod in enumerate(kube.all(PODS)):
        if pod["status"]["phase"] == "Pending" and not pod["metadata"].get("deletionTimestamp"):
            status = {
                "phase": "Running",
                "podIP": f"127.0.1.{number + 1}",
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:05Z"}],
                "containerStatuses": [
                    {"name": "trainer", "ready": True, "state": {"running": {"startedAt": "2026-01-01T00:00:01Z"}}}
                ],
            }
            kube.change(PODS, "team", pod["metadata"]["name"], {"status": status})


def crash(kube: Any, name: str, code: int = 1) -> None:
    terminated = {"exitCode": code, "startedAt": "2026-01-01T00:00:01Z", "finishedAt": "2026-01-01T00:01:00Z"}
    kube.change(
        PODS,
        "team",
        name,
        {
            "status": {
                "phase": "Failed",
                "containerStatuses": [{"name": "trainer", "ready": False, "state": {"terminated": terminated}}],
            }
        },
    )


def status(kube: Any) -> Json:
    found: Json = kube.objects["trainingjobs", *KEY].get("status") or {}
    return found
