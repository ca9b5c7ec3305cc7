"""What the planner asks of the cluster, as data; the operator carries it out, tests look at it.

How to carry out a `Plan`, in this order:

1. Write `status` if it is not None, all of it, with the resourceVersion that was planned from. If that fails, do
   nothing else and plan again: incarnations and counters must be on record before what they number exists (O2).
2. Count `deaths`.
3. Do `actions` in order. One that fails does not stop the others, with one exception: when a `CreatePod` is refused, no
   pod of a later `stage` is created; record a refusal with the reason `HELD` under its name. Meanwhile, send `events`:
   no action waits for them.
4. If there were any, plan again with what the API server answered laid over the index.
5. Plan again `requeue_after` from now, if given, also when nothing happens.

A create that is answered 409 for an object of this job's uid has succeeded; for another's, and for every other refusal
(4xx), record an `observed.Refusal` under the object's name. A delete that is answered 404 or 409 (another uid) has
succeeded. A patch whose test fails is planned anew.
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
    """Create the job's Secret; the token is put in by the operator, so that no plan ever holds one."""

    manifest: dict[str, Any]

    def with_token(self, token: str) -> dict[str, Any]:
        """The manifest to send, with `token` (of `token.token_for`) in it."""
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
    """Delete the job's Secret. Its name holds the job's uid, so it cannot be another's; Secrets are never read (O7)."""

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
    """Point a shard's Service at another incarnation: an RFC 6902 patch, test before replace (O3)."""

    name: str
    patch: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create one pod.

    Attributes:
        manifest: the pod.
        role: value of its role label; `index` and `incarnation` likewise.
        cause: why its predecessor died; None when it has none that died.
        stage: pods of one stage are created before those of the next: 0 the servers, 1 the quorum, 2 the rest.
    """

    manifest: dict[str, Any]
    role: str
    index: int
    incarnation: int
    cause: Cause | None = None
    stage: int = 0


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete one pod, with its uid as a precondition.

    Attributes:
        name, uid: the pod.
        grace_seconds: overrides the pod's own grace period; None: as the pod says.
        reason: one CamelCase word, for logs.
    """

    name: str
    uid: str
    grace_seconds: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LookUpPod:
    """GET a recorded pod that the index does not hold: lay it over the index if it is there, else add it to
    `observed.missing`; then plan again."""

    name: str


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the TrainingJob itself, in the background, with its uid as a precondition: its time is over."""

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
    | DeletePod
    | LookUpPod
    | DeleteJob
)


@dataclass(frozen=True, slots=True)
class Death:
    """A pod that the plan found dead, reported once: the status that records it goes with it.

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
    """What to do now; see the module's docstring for how.

    Attributes:
        status: the whole new status as JSON, or None when it is as it should be.
        actions: what to do to the cluster, in order.
        events: what to tell people; only ever with a status.
        deaths: what to count; only ever with a status.
        requeue_after: when to plan again at the latest though nothing happens; None: no need.
    """

    status: dict[str, Any] | None = None
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    deaths: tuple[Death, ...] = ()
    requeue_after: timedelta | None = None
