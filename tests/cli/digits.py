"""A job as an API server has it, with its pods, and what the commands show of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from backstay_client.view.follow import JobView, view_of, with_page
from backstay_spec import contract
from backstay_spec.names import LABEL_JOB_UID

NOW = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC).timestamp()


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(NOW + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def pod(role: str, index: int, incarnation: int = 1, *, ready: bool = True, phase: str = "Running") -> dict[str, Any]:
    labels = {
        contract.LABEL_JOB: "digits",
        LABEL_JOB_UID: "u",
        contract.LABEL_ROLE: role,
        contract.LABEL_INDEX: str(index),
        contract.LABEL_INCARNATION: str(incarnation),
    }
    name = f"digits-{role}-{index}-{incarnation}"
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": labels},
        "spec": {"nodeName": "node-1"},
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def job(name: str = "digits", **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": contract.API_VERSION,
        "kind": contract.KIND,
        "metadata": {"name": name, "namespace": "default", "uid": "u", "creationTimestamp": stamp(-100)},
        "spec": {"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}},
        "status": {
            "phase": "Running",
            "startTime": stamp(-90),
            "conditions": [],
            "step": 240,
            "goalSteps": 400,
            "updatesPerSecond": 4.0,
            "examplesPerSecond": 128.0,
            "loss": 0.25,
            "roles": {
                "ParameterServer": {"desired": 1, "ready": 1, "restarts": 1, "disruptions": 0},
                "Worker": {"desired": 2, "ready": 2, "restarts": 1, "disruptions": 2},
            },
            "checkpoint": {"step": 200, "uri": "file:///ck/step-200", "time": stamp(-30)},
            "history": [
                {
                    "time": stamp(-80),
                    "type": "Normal",
                    "reason": "Running",
                    "message": "all servers and at least one worker are ready",
                },
                {
                    "time": stamp(-60),
                    "type": "Warning",
                    "reason": "Crashed",
                    "message": "worker 1 (pod digits-worker-1-1) died: exit code 137 (SIGKILL); replaced by x",
                    "slot": "worker-1",
                    "incarnation": 1,
                    "recovered": stamp(-56.5),
                },
                {
                    "time": stamp(-50),
                    "type": "Warning",
                    "reason": "OutOfMemory",
                    "message": "parameter server 0 (pod digits-ps-0-1) died: out of memory; replaced by y",
                    "slot": "parameter-server-0",
                    "incarnation": 1,
                },
                {"time": stamp(-45), "type": "Warning", "reason": "TrainingInterrupted", "message": "no update"},
                {
                    "time": stamp(-41),
                    "type": "Warning",
                    "reason": "RolledBack",
                    "message": "back to the checkpoint of step 200: 12 updates are redone",
                },
                {"time": stamp(-40), "type": "Normal", "reason": "Running", "message": "ready again"},
            ],
            **status,
        },
    }


PODS = [
    pod("parameter-server", 0, 2),
    pod("parameter-server", 0, 1, phase="Failed"),
    pod("worker", 0),
    pod("worker", 1, 2),
]
PAGE = {
    "step": 245,
    "goalSteps": 400,
    "updatesPerSecond": 5.0,
    "loss": 0.2,
    "pods": [
        {"pod": "digits-worker-0-1", "doing": "compute", "step": 245, "seconds": 0.1, "activity": "TRAINING"},
        {"pod": "digits-worker-1-2", "doing": "batch_wait", "step": 245, "seconds": 25.0, "activity": "TRAINING"},
    ],
}


def view(**status: Any) -> JobView:
    return with_page(view_of(job(**status), PODS, []), PAGE)


def text_of(renderable: Any, width: int, height: int = 200) -> list[str]:
    console = Console(width=width, height=height, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(renderable)
    console.file.close()
    return [line.rstrip() for line in console.export_text().splitlines()]
