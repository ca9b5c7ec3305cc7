"""States in one line why a job waits, mostly in its start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from backstay_client.view.follow import LONG_WAIT, JobView, unix_time
from backstay_client.view.pods import NAMES, slot_of
from backstay_client.view.pods import obstacle as obstacle_of
from backstay_client.view.starting import is_ready
from backstay_client.words import count, duration, on_one_line
from backstay_spec import contract
from backstay_spec.status import TRAINED

# Seconds after the last update after which the end of the job is described.
_ENDING = 3.0
WROTE = " wrote: "
"""The words between the stage of a long start and the newest line in the log of a pod."""


def waiting_for(view: JobView) -> str:
    """Returns the condition for the next update; empty while updates are applied."""
    if view.stage:
        return view.stage
    if view.ended or view.phase == "Suspended":
        return ""
    pods = [pod for pod in view.pods if pod.get("status", {}).get("phase") in {None, "Pending", "Running"}]
    # One pod that cannot start explains the wait better than the numbers of all pods.
    for pod in pods:
        if obstacle := obstacle_of(pod):
            return f"waiting: {_name(pod)}: {obstacle}"
    if view.trouble:
        return on_one_line(view.trouble)
    if view.report.step:
        return _script(view, pods)
    desired = sum(role.desired for role in view.roles.values())
    if not pods:
        return "creating pods" if not view.restarts else "waiting: pods that died early are replaced"
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    if view.restarts and len(running) < desired:
        return f"{len(running)} of {count(desired, 'pod')} run, the others start again"
    if len(running) < len(pods) or len(pods) < desired:
        return f"starting pods: {len(running)} of {max(desired, len(pods))} run"
    ready = [pod for pod in running if is_ready(pod)]
    servers = [pod for pod in running if slot_of(pod)[0] == contract.ROLE_SERVER]
    ready_servers = [pod for pod in ready if slot_of(pod)[0] == contract.ROLE_SERVER]
    if not ready:
        stage = f"starting Python and JAX in {count(len(running), 'pod')}"
    elif len(ready_servers) < len(servers):
        stage = f"preparing the parameters: {len(ready_servers)} of {count(len(servers), 'server')} ready"
    else:
        stage = f"compiling the first step: {len(ready)} of {count(len(running), 'pod')} ready"
    writer, line = view.newest_line
    names = [_name(pod) for pod in running if pod["metadata"]["name"] == writer]
    return f"{stage}. {names[0]}{WROTE}{line}" if names and line else stage


def no_update(view: JobView) -> str:
    """Returns the rank or server that the next update waits for, after a long wait; after the last one, the end of the
    job."""
    waits = view.waits
    if waits.over:
        return waits.text if waits.seconds >= _ENDING and not view.ended else ""
    return f"no update for {duration(waits.seconds)}: {waits.text}" if waits.seconds >= LONG_WAIT else ""


def _script(view: JobView, pods: Sequence[dict[str, Any]]) -> str:
    """Returns the wait after training for the code after `train`, or for a thread that never ends."""
    conditions = (view.job.get("status") or {}).get("conditions") or []
    trained = [condition for condition in conditions if condition["type"] == TRAINED and condition["status"] == "True"]
    since = unix_time(trained[0].get("lastTransitionTime")) if trained else None
    if since is None or time.time() - since < _ENDING or view.waits.over:
        return ""
    if not any(slot_of(pod)[:2] == (contract.ROLE_WORKER, 0) for pod in pods):
        return ""
    return "training is complete: the script of worker 0 still runs (at most afterTrainingSeconds)"


def _name(pod: dict[str, Any]) -> str:
    role, index, _ = slot_of(pod)
    return f"{NAMES.get(role, 'pod')} {index}"
