"""Carries out a plan, with the status first and then the actions, in the order that `backstay_spec.actions` defines.

Events are sent at the same time: each is a separate request, and a replacement must not wait for them.

Neighbouring actions of one kind are independent of each other and are sent at the same time. The planner gets the
refusals of the API server. A request without an answer is tried again, and each action has its own back-off. So one pod
that exceeds its quota never delays the replacement of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from backstay_operator import errors
from backstay_operator.backoff import Backoffs
from backstay_operator.clocks import Clocks
from backstay_operator.cluster import ClusterOverlay
from backstay_operator.events import EventSender
from backstay_operator.kube import Kube
from backstay_operator.memory import OperatorMemory
from backstay_operator.merge import merge_patch
from backstay_operator.metrics import OperatorMetrics
from backstay_operator.rights import JOBS, NETWORK_POLICIES, PODS, SECRETS, SERVICES, ResourceKind
from backstay_operator.slim import Json
from backstay_operator.watching import JobKey
from backstay_spec import actions as act
from backstay_spec import contract
from backstay_spec.events import Event
from backstay_spec.names import ROLE_OF_LABEL
from backstay_spec.observed import IN_QUEUE
from backstay_spec.supervision import Done, in_order, name_of
from backstay_spec.token import token_for

log = logging.getLogger(__name__)

# The requests of one plan that are in progress at the same time.
_PARALLEL: Final = 8


class Executor:
    """Carries out plans by API calls.

    Args:
        kube: the API server.
        cluster: records what was written.
        key: the operator's key, for the jobs' tokens.
        metrics: counts pods, deaths and errors.
        events: sends the events of the plans.
        clocks: the operator's clocks.
        backoffs: the back-offs of the actions, by (job, action).
    """

    def __init__(
        self,
        kube: Kube,
        cluster: ClusterOverlay,
        key: bytes,
        metrics: OperatorMetrics,
        events: EventSender,
        *,
        clocks: Clocks,
        backoffs: Backoffs[tuple[JobKey, str]],
    ) -> None:
        self._kube = kube
        self._cluster = cluster
        self._key = key
        self._metrics = metrics
        self._events = events
        self._clock, self._now = clocks.seconds, clocks.now
        self._backoffs = backoffs

    async def write_status(self, key: JobKey, job: Json, plan: act.Plan, memory: OperatorMemory) -> bool:
        """Write the status of a plan, and count its deaths. Returns False if the job has changed, or was deleted.

        Args:
            key: namespace and name of the job.
            job: the job from which the plan was made.
            plan: has a status.
            memory: the records of this job.

        Raises:
            errors.KubeError: the status could not be written.
        """
        if plan.status is None or not await self._patch_status(key, job, plan.status, memory):
            return False
        for death in plan.deaths:
            memory.died[death.role, death.index] = str(death.cause)
            self._metrics.pod_deaths.labels(ROLE_OF_LABEL[death.role], str(death.cause)).inc()
            self._metrics.job.died(key, death)
            uncharged = "" if death.charged else " (uncharged)"
            log.info("job %s/%s: pod %s is dead: %s%s", *key, death.pod, death.cause, uncharged)
        return True

    async def carry_out(self, key: JobKey, job: Json, plan: act.Plan, memory: OperatorMemory) -> Done:
        """Carry out all actions of a plan that are allowed now, and send its events.

        Args:
            key: namespace and name of the job.
            job: the job from which the plan was made.
            plan: its status is written.
            memory: the records of this job, to which refused and missing objects are added.
        """
        done, _ = await asyncio.gather(self._act(key, plan, memory), self._send_events(key, job, plan.events, memory))
        return done

    async def _send_events(self, key: JobKey, job: Json, events: Sequence[Event], memory: OperatorMemory) -> None:
        for event in events:
            await self._events.send(key, job, event, memory)

    async def _act(self, key: JobKey, plan: act.Plan, memory: OperatorMemory) -> Done:
        waits: list[float] = []
        acted = False
        slots = asyncio.Semaphore(_PARALLEL)

        async def one(action: act.Action) -> None:
            nonlocal acted
            what = (key, _identity(action))
            wait = self._backoffs.remaining(what, self._clock())
            if wait > 0:
                waits.append(wait)
                if isinstance(action, act.CreatePod):
                    memory.hold(name_of(action), "waits after a create that failed", self._now())
                return
            async with slots:
                try:
                    await self._do(key, action, memory)
                except errors.KubeError as error:
                    requested = error.retry_after if isinstance(error, errors.Answered) else 0.0
                    waits.append(self._backoffs.failed(what, self._clock(), requested))
                    self._metrics.errors.labels(error.kind).inc()
                    log.warning("job %s/%s: %s", *key, error)
                else:
                    self._backoffs.succeeded(what)
                    acted = True

        async def together(actions: Sequence[act.Action]) -> None:
            await asyncio.gather(*(one(action) for action in actions))

        await in_order(plan.actions, memory, self._now, together)
        return Done(again=acted, wait=min(waits, default=None))

    def forget(self, key: JobKey) -> None:
        """Drop the back-offs of a deleted job."""
        self._backoffs.forget_where(lambda what: what[0] == key)

    async def _patch_status(self, key: JobKey, job: Json, status: Json, memory: OperatorMemory) -> bool:
        patch = merge_patch({"status": job.get("status") or {}}, {"status": status})
        if patch:
            patch["metadata"] = {"resourceVersion": job["metadata"]["resourceVersion"]}
            try:
                answer = await self._kube.merge_patch(JOBS, *key, patch, subresource="status")
            except errors.NotFound:
                self._cluster.removed(JOBS, key, job["metadata"]["uid"])
                return False
            except errors.Conflict:
                # Another client changed the job (the user, `kubectl scale`, another operator): plan from that.
                await self._look_again(key, job)
                return False
            self._cluster.wrote(JOBS, answer)
        memory.status_written = self._now()
        return True

    async def _look_again(self, key: JobKey, job: Json) -> None:
        try:
            fresh = await self._kube.get(JOBS, *key)
        except errors.NotFound:
            self._cluster.removed(JOBS, key, job["metadata"]["uid"])
            return
        if fresh["metadata"]["uid"] != job["metadata"]["uid"]:
            self._cluster.removed(JOBS, key, job["metadata"]["uid"])
        self._cluster.wrote(JOBS, fresh)

    async def _do(self, key: JobKey, action: act.Action, memory: OperatorMemory) -> None:
        match action:
            case act.CreatePod():
                if await self._create(key, PODS, action.manifest, memory):
                    self._count_pod(action, memory)
            case act.HoldPod():
                memory.refuse(action.name, IN_QUEUE, action.why, self._now())
            case act.DeletePod():
                await self._delete_pod(key, action)
            case act.LookUpPod():
                await self._look_up(key, action.name, memory)
            case act.CreateService():
                await self._create(key, SERVICES, action.manifest, memory)
            case act.PatchService():
                await self._patch_service(key, action)
            case act.CreateNetworkPolicy():
                await self._create(key, NETWORK_POLICIES, action.manifest, memory)
            case act.CreateSecret():
                await self._create_secret(key, action, memory)
            case act.DeleteSecret():
                with contextlib.suppress(errors.NotFound):
                    await self._kube.delete(SECRETS, key[0], action.name)
                memory.secret_at, memory.secret_deleted = None, True
            case act.DeleteService():
                await self._delete(key, SERVICES, action.name, action.uid)
            case act.DeleteNetworkPolicy():
                await self._delete(key, NETWORK_POLICIES, action.name, action.uid)
            case act.DeleteJob():
                with contextlib.suppress(errors.NotFound, errors.Conflict):
                    await self._kube.delete(JOBS, *key, uid=action.uid)
                self._cluster.removed(JOBS, key, action.uid)

    def _count_pod(self, action: act.CreatePod, memory: OperatorMemory) -> None:
        role = ROLE_OF_LABEL[action.role]
        self._metrics.pods_created.labels(role).inc()
        ended = memory.ended.pop((action.role, action.index), None)
        # A slot that backs off is filled by a later plan, which no longer has the cause.
        died = memory.died.pop((action.role, action.index), None)
        cause = died if action.cause is None else str(action.cause)
        if cause is not None:
            self._metrics.pods_replaced.labels(role, cause).inc()
            if ended is not None and action.cause is not None:
                self._metrics.replacement_seconds.observe(self._clock() - ended)

    async def _create(
        self, key: JobKey, resource: ResourceKind, manifest: Mapping[str, Any], memory: OperatorMemory
    ) -> bool:
        """Create an object. Returns True if the object exists now, belongs to the job, and did not exist before."""
        name = manifest["metadata"]["name"]
        created = True
        try:
            answer = await self._kube.create(resource, key[0], manifest)
        except errors.AlreadyExists as error:
            # The answer to an earlier create was late, or another client created the object.
            try:
                answer = await self._kube.get(resource, key[0], name)
            except errors.NotFound:  # it has ended since
                memory.refused.pop(name, None)
                memory.witnessed.add(name)
                return False
            if not _owned_by(answer, memory.uid):
                memory.refuse(name, error.reason, f"{error.message}, and it does not belong to this job", self._now())
                return False
            created = False
        except (errors.Invalid, errors.Forbidden, errors.NotFound, errors.Conflict) as error:
            # The planner decides which refusals are final, and when to try the others again.
            if name not in memory.refused:
                log.warning("job %s/%s: the API server refuses %s: %s", *key, name, error)
            memory.refuse(name, *error.reason_and_message, self._now())
            self._metrics.errors.labels(error.kind).inc()
            return False
        except errors.Answered as error:
            # After any other error, it may have been created.
            if resource == PODS and error.is_certain:
                memory.refuse(name, *error.reason_and_message, self._now())
            raise
        memory.refused.pop(name, None)
        memory.missing.discard(name)
        self._cluster.wrote(resource, answer)
        return created

    async def _create_secret(self, key: JobKey, action: act.CreateSecret, memory: OperatorMemory) -> None:
        manifest = action.with_token(token_for(self._key, memory.uid))
        name = manifest["metadata"]["name"]
        try:
            await self._kube.create(SECRETS, key[0], manifest)
        except errors.AlreadyExists:
            pass  # the name contains the job's uid, and the content is derived: it is the same
        except (errors.Invalid, errors.Forbidden, errors.NotFound) as error:
            memory.refuse(name, *error.reason_and_message, self._now())
            self._metrics.errors.labels(error.kind).inc()
            return
        memory.refused.pop(name, None)
        memory.secret_at = self._now()

    async def _delete_pod(self, key: JobKey, action: act.DeletePod) -> None:
        try:
            answer = await self._kube.delete(PODS, key[0], action.name, uid=action.uid, grace=action.grace_seconds)
        except (errors.NotFound, errors.Conflict):
            self._cluster.removed(PODS, key, action.uid)
            return
        if answer.get("kind") == "Pod" and answer["metadata"].get("deletionTimestamp"):
            self._cluster.wrote(PODS, answer)  # it terminates gracefully
        else:
            self._cluster.removed(PODS, key, action.uid)

    async def _delete(self, key: JobKey, resource: ResourceKind, name: str, uid: str) -> None:
        """Delete an object that ends immediately. A missing object, or another one with its name, is not an error."""
        with contextlib.suppress(errors.NotFound, errors.Conflict):
            await self._kube.delete(resource, key[0], name, uid=uid)
        self._cluster.removed(resource, key, uid)

    async def _look_up(self, key: JobKey, name: str, memory: OperatorMemory) -> None:
        try:
            answer = await self._kube.get(PODS, key[0], name)
        except errors.NotFound:
            memory.missing.add(name)
            return
        memory.missing.discard(name)
        self._cluster.wrote(PODS, answer)

    async def _patch_service(self, key: JobKey, action: act.PatchService) -> None:
        try:
            answer = await self._kube.json_patch(SERVICES, key[0], action.name, list(action.patch))
        except (errors.Invalid, errors.Conflict):
            # The patch's test failed: the Service differs from the one in the plan. Read it, and plan again.
            answer = await self._kube.get(SERVICES, key[0], action.name)
        except errors.NotFound:
            for seen in self._cluster.objects(SERVICES, key):
                if seen["metadata"]["name"] == action.name:
                    self._cluster.removed(SERVICES, key, seen["metadata"]["uid"])
            return
        self._cluster.wrote(SERVICES, answer)


def _owned_by(obj: Mapping[str, Any], uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in obj["metadata"].get("ownerReferences") or [])


def _identity(action: act.Action) -> str:
    """Returns the key of a back-off. A pod that may have been created is tried again under another name. Of a shard,
    the active server and the standby have different stages."""
    if isinstance(action, act.CreatePod):
        member = action.manifest["metadata"]["labels"].get(contract.LABEL_MEMBER, "")
        return f"CreatePod {action.role} {action.index} {member} {action.stage}"
    return f"{type(action).__name__} {name_of(action)}"
