"""The actions that the planner returns, as data. The operator carries them out, and tests compare them.

How to carry out a `Plan`, in this order:

1. Write `status` if it is not None, all of it, with the resourceVersion that was planned from. If that fails, do
   nothing else and plan again: incarnations and counters must be on record before what they number exists (O2).
2. Count `deaths`.
3. Do `actions` in order. A failed action does not stop the others, with one exception. When a `CreatePod` is refused,
   do not create pods of a later `stage`, and record a refusal with the reason `HELD` under their names. Send `events`
   at the same time: no action waits for them.
4. If there were any, plan again with the answers of the API server laid over the index.
5. Plan again `requeue_after` from now, if given, even when nothing happens.

A create that is answered 409 for an object of this job's uid has succeeded. For an object of another uid, and for every
other refusal (4xx), record an `observed.Refusal` under the object's name. A delete that is answered 404 or 409 (another
uid) has succeeded. If the test of a patch fails, plan again.
"""

from __future__ import annotations

import base64
import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from backstay_spec import contract
from backstay_spec.causes import Cause
from backstay_spec.events import Event


@dataclass(frozen=True, slots=True)
class CreateSecret:
    """Create the job's Secret; the operator adds the token, so that no plan ever contains one."""

    manifest: dict[str, Any]

    def with_token(self, token: str) -> dict[str, Any]:
        """Returns the manifest to send, with `token` (of `token.token_for`) in it."""
        manifest = copy.deepcopy(self.manifest)
        manifest["data"] = {contract.SECRET_KEY_TOKEN: base64.b64encode(token.encode()).decode()}
        return manifest


@dataclass(frozen=True, slots=True)
class CreateNetworkPolicy:
    """Create the job's NetworkPolicy (networking.k8s.io/v1)."""

    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CreateService:
    """Create a shard's Service (v1)."""

    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteSecret:
    """Delete the job's Secret. Its name contains this job's uid. Secrets are never read (O7)."""

    name: str


@dataclass(frozen=True, slots=True)
class DeleteService:
    """Delete a shard's Service, with its uid as a precondition."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class DeleteNetworkPolicy:
    """Delete the job's NetworkPolicy, with its uid as a precondition."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class PatchService:
    """Point a shard's Service at another incarnation, by an RFC 6902 patch that tests before it replaces (O3)."""

    name: str
    patch: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create one pod.

    Attributes:
        manifest: the pod's manifest.
        role: value of its role label; `index` and `incarnation` likewise.
        cause: why its predecessor died; None: it has no predecessor that died.
        stage: pods of one stage are created before those of the next: 0 the servers, 1 the quorum, 2 the rest.
    """

    manifest: dict[str, Any]
    role: str
    index: int
    incarnation: int
    cause: Cause | None = None
    stage: int = 0


@dataclass(frozen=True, slots=True)
class HoldPod:
    """Do not create a recorded pod now: record a refusal with the reason `IN_QUEUE` under its name.

    Attributes:
        name: the pod's name.
        why: a sentence for people.
    """

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete one pod, with its uid as a precondition.

    Attributes:
        name, uid: the pod's name and uid.
        grace_seconds: overrides the pod's own grace period; None: the pod's own.
        reason: one CamelCase word, for logs.
    """

    name: str
    uid: str
    grace_seconds: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LookUpPod:
    """GET a recorded pod that the index does not hold, then plan again. Lay a pod that exists over the index, and add
    the name of another one to `observed.missing`."""

    name: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the TrainingJob itself, in the background, with its uid as a precondition: its time to live has ended."""

    name: str
    uid: str


Action: TypeAlias = (
    CreateSecret
    | CreateNetworkPolicy
    | CreateService
    | DeleteSecret
    | DeleteNetworkPolicy
    | DeleteService
    | PatchService
    | CreatePod
    | HoldPod
    | DeletePod
    | LookUpPod
    | DeleteJob
)


@dataclass(frozen=True, slots=True)
class FoundDead:
    """A pod that the plan found dead, reported once, together with the status that records it.

    Attributes:
        role: value of its role label; `index` and `incarnation` likewise.
        pod: its name.
        cause: why it died.
        charged: whether it was charged to its role's `maxRestarts`.
    """

    role: str
    index: int
    incarnation: int
    pod: str
    cause: Cause
    charged: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions for now. The module's docstring describes how to carry them out.

    Attributes:
        status: the whole new status as JSON; None: it does not change.
        actions: changes of the cluster, in order.
        events: events to send; only together with a status.
        deaths: deaths to count; only together with a status.
        requeue_after: latest time of the next plan, if nothing happens before; None: none is needed.
    """

    status: dict[str, Any] | None = None
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    deaths: tuple[FoundDead, ...] = ()
    requeue_after: timedelta | None = None
