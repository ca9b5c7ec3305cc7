"""The calls to the pods of a tested job: progress of the servers, readiness, and health of silent workers."""

from __future__ import annotations

import contextlib
import http.client
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import grpc

from backstay_cluster.load import slack
from backstay_rpc import bearer
from backstay_rpc.answers import combine
from backstay_rpc.control_pb2 import ProgressReply, ProgressRequest
from backstay_rpc.control_pb2_grpc import ControlStub
from backstay_spec import contract
from backstay_spec.observed import Contact, Progress, Silence

from ._pods import Pod

__all__ = ["Answers", "Callee", "PodCaller"]

_INTERVAL: Final = 0.3
"""Seconds between two rounds of calls; the operator's interval is 2 s."""
_DEADLINE, _HEALTH = 2.0, 1.0
"""Seconds of a call to a server, and of a request for readiness or health. A busy machine has more."""


@dataclass(frozen=True)
class Callee:
    """A pod that runs.

    Attributes:
        uid: the uid of the pod's object.
        pod: its process.
        serves: whether it is the active server of its shard.
        ready: whether it has been ready.
    """

    uid: str
    pod: Pod
    serves: bool
    ready: bool


@dataclass(frozen=True)
class Answers:
    """The result of one round of calls.

    Attributes:
        progress: the answers of the active servers; None: none answered.
        contact: which servers answered, and which workers hang.
        ready: the uids of pods that are ready.
    """

    progress: Progress | None
    contact: Contact
    ready: frozenset[str]


class PodCaller:
    """A thread that calls the pods of one job, again and again, so that no call delays the supervisor.

    Args:
        token: the job's token.
        world: the number of workers.
    """

    def __init__(self, token: str, world: int) -> None:
        self._token, self._world = token, world
        self._lock = threading.Lock()
        self._callees: tuple[Callee, ...] = ()
        self._incarnations: Mapping[str, int] = {}
        self._newest: Answers | None = None
        self._silent: dict[str, Silence] = {}
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="backstay-testing-calls", daemon=True)
        self._thread.start()

    def call(self, callees: Sequence[Callee], incarnations: Mapping[str, int], *, now: bool) -> None:
        """Call these pods from the next round on.

        Args:
            callees: the pods that run.
            incarnations: the serving incarnation of each slot, which the servers receive.
            now: begin the next round immediately.
        """
        with self._lock:
            self._callees, self._incarnations = tuple(callees), dict(incarnations)
        if now:
            self._wake.set()

    def answers(self) -> Answers | None:
        """Returns the result of a round that was not returned before."""
        with self._lock:
            newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join(2 * _DEADLINE * slack())

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(_INTERVAL)
            self._wake.clear()
            with self._lock:
                callees, incarnations = self._callees, self._incarnations
            answers = self._round(callees, incarnations)
            with self._lock:
                self._newest = answers

    def _round(self, callees: Sequence[Callee], incarnations: Mapping[str, int]) -> Answers:
        servers = [one for one in callees if one.pod.role == contract.ROLE_SERVER]
        replies = {one: reply for one in servers if (reply := self._progress(one, incarnations)) is not None}
        now = datetime.now(UTC)
        for one in servers:
            before = self._silent.get(one.uid, Silence(now))
            self._silent[one.uid] = Silence(now) if one in replies else Silence(before.since, before.calls + 1)
        combined = combine({one.pod.index: reply for one, reply in replies.items() if one.serves}, now)
        contact = Contact(
            now,
            answered_at={one.uid: self._silent[one.uid].since for one in servers if one in replies},
            silent={one.uid: self._silent[one.uid] for one in servers if one not in replies},
            hung_workers=frozenset() if combined is None else self._hung(callees, combined),
        )
        ready = frozenset(one.uid for one in callees if one.ready or _answers(one.pod, "readyz"))
        return Answers(combined, contact, ready)

    def _progress(self, server: Callee, incarnations: Mapping[str, int]) -> ProgressReply | None:
        pod = server.pod
        if pod.process.poll() is not None:
            return None
        with grpc.insecure_channel(pod.control) as channel, contextlib.suppress(grpc.RpcError):
            reply: ProgressReply = ControlStub(channel).Progress(  # type: ignore[no-untyped-call]
                ProgressRequest(shard=pod.index, world=self._world, incarnations=incarnations),
                metadata=bearer(self._token),
                timeout=_DEADLINE * slack(),
            )
            return reply
        return None

    @staticmethod
    def _hung(callees: Sequence[Callee], progress: Progress) -> frozenset[str]:
        """Returns the workers without heartbeats that also leave a health request unanswered."""
        silent = {(s.rank, s.incarnation) for s in progress.stalled if s.reason.startswith(contract.NO_HEARTBEAT)}
        return frozenset(
            one.uid
            for one in callees
            if one.pod.role == contract.ROLE_WORKER
            and (one.pod.index, one.pod.incarnation) in silent
            and not _answers(one.pod, "healthz")
        )


def _answers(pod: Pod, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{pod.metrics}/{path}", timeout=_HEALTH * slack()) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):  # a pod may die while it answers
        return False
