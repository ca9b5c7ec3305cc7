"""Hung pods are replaced with a charge, deleted pods are replaced without charge (T2, T7, T8, O4): in one job."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from between import put

import backstay

pytestmark = pytest.mark.e2e

Submit = Callable[..., str]


def test_stopped_pods_are_stalled_and_a_deleted_worker_is_a_disruption(
    cluster: Any, submit: Submit, tmp_path: Path
) -> None:
    """Storage that fails for a while, SIGSTOP of a worker, `kubectl delete` of a worker, SIGSTOP of a server."""
    gate, folder = tmp_path / "gate", tmp_path / "ckpt"
    put(tmp_path / "broken", "no folder")
    (tmp_path / "real").mkdir()
    folder.symlink_to(tmp_path / "real")
    spec = {
        "parameterServers": {"replicas": 2},
        "workers": {"replicas": 3},
        "update": {"mode": "Sync", "backups": 1},
        "checkpoint": {"uri": str(folder), "everySeconds": 2},
    }
    # Slow until the last change has been seen: the job cannot end before, also on a slow machine.
    name = submit(spec, env={"PAUSE": "1", "STEPS": "300", "GATE": str(gate)})

    def pods_at(place: str) -> list[Any]:
        """Returns the pod of the newest incarnation; none while the incarnation is on record and its pod is not created
        yet."""
        number = cluster.job(name)["status"]["incarnations"][place.replace("ps-", "parameter-server-")]
        return [
            pod
            for pod in cluster.pods(name)
            if f"-{place}-" in pod["metadata"]["name"]
            and pod["metadata"]["labels"]["backstay.dev/incarnation"] == str(number)
        ]

    def pod_of(place: str) -> str:
        found: str = cluster.wait(f"{place} has its pod", lambda: pods_at(place))[0]["metadata"]["name"]
        return found

    def status() -> dict[str, Any]:
        found: dict[str, Any] = cluster.job(name).get("status", {})
        return found

    def worked(place: str) -> bool:
        return any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for pod in pods_at(place)
            for condition in pod["status"].get("conditions", [])
        )

    def stop(pod: str) -> None:
        for pid in cluster.processes(pod):
            os.kill(pid, signal.SIGSTOP)

    cluster.wait(f"{name} trains", lambda: status().get("step", 0) > 5 and worked("worker-2"))
    for target, value, reason in (("broken", "False", "WriteFailed"), ("real", "True", "")):
        (tmp_path / "link").symlink_to(tmp_path / target)
        (tmp_path / "link").replace(folder)

        def reported(value: str = value, reason: str = reason) -> bool:
            condition = cluster.condition(name, "Checkpointing")
            return condition.get("status") == value and reason in condition["reason"]

        cluster.wait(f"checkpoints with a {target} folder are reported", reported)
    before = status()["step"]
    stop(pod_of("worker-2"))
    cluster.wait("the stopped worker is replaced", lambda: status()["incarnations"]["worker-2"] == 2)
    assert status()["roles"]["Worker"]["restarts"] == 1, cluster.describe(name)

    def reported() -> list[str]:
        entries = status().get("history", [])
        return [entry["report"] for entry in entries if entry.get("slot") == "worker-2" and "report" in entry]

    (place,) = cluster.wait("a report about it is stored", reported)
    report = json.loads(Path(place).read_text())
    assert (report["slot"], report["incarnation"], report["reason"]) == ("worker-2", 1, "Stalled")
    assert {span["point"] for span in report["spans"]} >= {"compute", "push"}
    assert report["stacks"] is None, "a stopped process cannot send any"
    cluster.wait("updates were made meanwhile", lambda: status()["step"] > before)

    cluster.wait("the new one works", lambda: worked("worker-2"))
    deleted = pod_of("worker-1")
    cluster.run(cluster.api.request("DELETE", f"/api/v1/namespaces/{cluster.namespace}/pods/{deleted}"))
    cluster.wait("the deleted worker is replaced", lambda: status()["incarnations"]["worker-1"] == 2)
    roles = status()["roles"]
    assert (roles["Worker"]["restarts"], roles["Worker"]["disruptions"]) == (1, 1), cluster.describe(name)

    before, term = status()["incarnations"]["parameter-server-1"], status()["term"]
    stop(pod_of("ps-1"))
    cluster.wait("the stopped server is replaced", lambda: status()["incarnations"]["parameter-server-1"] > before)
    cluster.wait("training goes on in a new term", lambda: status().get("term", 0) > term)
    put(gate, "")
    ended = cluster.wait_for_end(name)
    roles = ended["roles"]
    assert (roles["Worker"]["restarts"], roles["Worker"]["disruptions"]) == (1, 1), cluster.describe(name)
    deaths = cluster.deaths(name)
    assert ("parameter-server-1", before, "Stalled") in deaths
    assert roles["ParameterServer"]["restarts"] == sum(slot.startswith("parameter-server") for slot, _, _ in deaths)
    event_texts = json.dumps([[event["reason"], event["message"]] for event in cluster.events(name)])
    assert "no heartbeat for" in event_texts
    assert "its server has not answered for" in event_texts
    assert "CheckpointFailed" in event_texts
    assert backstay.load(str(folder)).step == 300
