"""The state of a job, put together from the API and from the metrics of shard 0's server.

Progress alone changes the job's status at most every 10 s (O8); the metrics are as new as the last update.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from backstay_cli.kube import Api
from backstay_spec import contract

TERMINAL = {"Succeeded", "Failed"}
ROLES = {
    "ParameterServer": contract.ROLE_SERVER,
    "Worker": contract.ROLE_WORKER,
    "Evaluator": contract.ROLE_EVALUATOR,
}


@dataclass(frozen=True)
class RoleView:
    """The pods of one role."""

    desired: int = 0
    ready: int = 0
    restarts: int = 0
    disruptions: int = 0


@dataclass(frozen=True)
class JobView:
    """A job at one moment."""

    name: str
    namespace: str
    phase: str = "Pending"
    message: str = ""
    step: int | None = None
    examples_per_second: float | None = None
    loss: float | None = None
    train_metrics: dict[str, float] = field(default_factory=dict)  # what `loss` returns beside the loss
    metrics: dict[str, float] = field(default_factory=dict)  # what `evaluate` returned for `evaluated_step`
    evaluated_step: int | None = None
    checkpoint: str | None = None
    roles: dict[str, RoleView] = field(default_factory=dict)
    standbys: int = 0  # of all shards; `roles` counts them as parameter servers
    events: tuple[tuple[str, str, str], ...] = ()  # (type, reason, message), oldest first
    pods: tuple[dict[str, Any], ...] = ()
    stage: str = ""  # what is being started before there is a job to look at
    seen: bool = False  # the operator has written a status
    concluded: bool = False  # it has the termination message of shard 0's server
    trouble: str = ""  # a problem that does not stop training
    evaluation_error: str = ""

    @property
    def ended(self) -> bool:
        """Whether the job's phase is final."""
        return self.phase in TERMINAL

    @property
    def restarts(self) -> int:
        """Pods replaced after crashes, all roles."""
        return sum(role.restarts for role in self.roles.values())

    @property
    def disruptions(self) -> int:
        """Pods replaced after disruptions, all roles."""
        return sum(role.disruptions for role in self.roles.values())


async def look(api: Api, namespace: str, name: str, before: JobView | None = None) -> JobView:
    """The job as it is now; what can no longer be read is taken from `before`."""
    job = await api.get_job(namespace, name)
    pods = await api.pods_of(namespace, name)
    events = await api.events_of(namespace, job["metadata"]["uid"])
    view = view_of(job, pods, events, before)
    if view.ended:
        return view
    return await _with_live_numbers(api, view)


def view_of(
    job: dict[str, Any], pods: list[dict[str, Any]], events: list[dict[str, Any]], before: JobView | None = None
) -> JobView:
    """The same, from the objects alone."""
    status = job.get("status") or {}
    roles = {
        role: RoleView(*(int(values.get(key, 0)) for key in ("desired", "ready", "restarts", "disruptions")))
        for role, values in (status.get("roles") or {}).items()
    }
    ending = _termination_of_shard_0(pods)
    servers = (job.get("spec") or {}).get("parameterServers") or {}
    view = JobView(
        name=job["metadata"]["name"],
        namespace=job["metadata"]["namespace"],
        phase=status.get("phase") or "Pending",
        message=_message_of(status),
        step=ending.get("step", status.get("step")),
        examples_per_second=ending.get("examplesPerSecond", status.get("examplesPerSecond")),
        loss=ending.get("loss", status.get("loss")),
        train_metrics=status.get("trainMetrics") or {},
        metrics=ending.get("metrics") or status.get("metrics") or {},
        evaluated_step=ending.get("step") if ending.get("metrics") else status.get("evaluatedStep"),
        checkpoint=ending.get("checkpoint") or (status.get("checkpoint") or {}).get("uri"),
        roles=roles,
        standbys=int(servers.get("replicas", 1)) * int(servers.get("standbys", 0)),
        seen=bool(status),
        concluded="loss" in ending,
        trouble=_trouble_of(status),
        evaluation_error=str(ending.get("evaluationError") or ""),
        events=tuple((event.get("type", ""), event.get("reason", ""), event.get("message", "")) for event in events),
        pods=tuple(pods),
    )
    if before is None:
        return view
    step = max((value for value in (view.step, before.step) if value is not None), default=None)
    if (view.evaluated_step or -1) < (before.evaluated_step or -1):
        view = replace(view, metrics=before.metrics, evaluated_step=before.evaluated_step)
    return replace(
        view,
        train_metrics=before.train_metrics or view.train_metrics,
        step=view.step if view.ended and view.step is not None else step,
        examples_per_second=view.examples_per_second or before.examples_per_second,
        # The termination message is the newest source, then the metrics that were seen last, then the status.
        loss=view.loss if view.loss is not None and (not view.ended or view.concluded) else before.loss,
        # Pods of a job that ended may be gone; their logs still have to be named.
        pods=view.pods or before.pods,
    )


def _message_of(status: dict[str, Any]) -> str:
    """The reason and message of the condition behind the phase."""
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    condition = conditions.get(status.get("phase", ""))
    if condition is None or condition["status"] != "True":
        return ""
    return f"{condition['reason']}: {condition.get('message', '')}".rstrip(": ")


def _trouble_of(status: dict[str, Any]) -> str:
    """Why checkpoints cannot be stored, when they cannot: a job may wait for its last one for ten minutes."""
    for condition in status.get("conditions") or []:
        if (condition["type"], condition.get("reason")) == ("Checkpointing", "WriteFailed"):
            return f"checkpoints cannot be stored: {condition.get('message', '')}"
    return ""


def _termination_of_shard_0(pods: list[dict[str, Any]]) -> dict[str, Any]:
    for pod in pods:
        labels = pod["metadata"].get("labels", {})
        if (labels.get(contract.LABEL_ROLE), labels.get(contract.LABEL_INDEX)) != (contract.ROLE_SERVER, "0"):
            continue
        for container in pod.get("status", {}).get("containerStatuses", []):
            message = container.get("state", {}).get("terminated", {}).get("message", "")
            with contextlib.suppress(ValueError):
                found = json.loads(message)
                if isinstance(found, dict) and "result" in found:
                    return found
    return {}


async def _with_live_numbers(api: Api, view: JobView) -> JobView:
    """`view` with step, loss and rate as shard 0's server has them this moment, when it can be asked."""
    for pod in view.pods:
        labels = pod["metadata"].get("labels", {})
        address = pod.get("status", {}).get("podIP")
        if (
            (labels.get(contract.LABEL_ROLE), labels.get(contract.LABEL_INDEX)) != (contract.ROLE_SERVER, "0")
            or pod.get("status", {}).get("phase") != "Running"
            or not address
        ):
            continue
        host = f"[{address}]" if ":" in address else address
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, OSError):
            page = await api.text(f"http://{host}:{contract.PORT_METRICS}/metrics", timeout=0.5)
            return _with_metrics(view, page)
    return view


def _with_metrics(view: JobView, page: str) -> JobView:
    """`view` with the numbers of the metrics page of shard 0's server."""
    values: dict[str, float] = {}
    named: dict[str, dict[str, float]] = {"backstay_train_metric": {}, "backstay_evaluation": {}}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in named:
                named[sample.name][sample.labels["name"]] = sample.value
            else:
                values[sample.name] = sample.value
    if not values.get("backstay_version", 0):
        return view
    evaluated = int(values.get("backstay_evaluation_step", 0))
    if evaluated and named["backstay_evaluation"]:
        view = replace(view, metrics=named["backstay_evaluation"], evaluated_step=evaluated)
    return replace(
        view,
        step=int(values["backstay_version"]),
        loss=values.get("backstay_loss", view.loss),
        examples_per_second=values.get("backstay_examples_per_second") or view.examples_per_second,
        train_metrics=named["backstay_train_metric"] or view.train_metrics,
    )
