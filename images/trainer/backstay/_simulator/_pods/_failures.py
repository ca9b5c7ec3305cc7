"""Failures of pods and nodes in a simulation. Pure."""

from __future__ import annotations

from typing import Final

from backstay_spec import contract

from .._assumptions import FailureAssumption
from .._clock import DrawStream
from ._cluster import SimulatedPods
from ._pod import PodOnNode
from ._world import SimulatedWorld

__all__ = ["FailureSource"]

_ROLES: Final = {
    "Worker": contract.ROLE_WORKER,
    "ParameterServer": contract.ROLE_SERVER,
    "Standby": contract.ROLE_SERVER,
    "Node": "",
}


class FailureSource:
    """One cause of failures.

    Args:
        world: the simulation.
        pods: the pods that fail.
        number: the position of the cause in the assumptions.
        assumed: the cause.
    """

    def __init__(self, world: SimulatedWorld, pods: SimulatedPods, number: int, assumed: FailureAssumption) -> None:
        self._world, self._pods, self._number, self._assumed = world, pods, number, assumed
        self._count = 0
        self._nodes: set[int] = set()
        if assumed.every_seconds is not None:
            world.heap.at(assumed.begins_seconds + assumed.every_seconds, self._again)
        for when in assumed.at_seconds:
            world.heap.at(assumed.begins_seconds + when, self._one)
        if assumed.mean_seconds is not None:
            pods.on_start.append(self._started)

    def _started(self, pod: PodOnNode) -> None:
        """A pod, or its node, draws when it fails."""
        mean = self._assumed.mean_seconds
        assert mean is not None
        if self._assumed.what == "Node":
            if pod.node in self._nodes:
                return
            self._nodes.add(pod.node)
            draws = self._world.draws("failure", self._number, pod.node)
        elif pod.role == _ROLES[self._assumed.what]:
            draws = self._world.draws("failure", self._number, *pod.purpose)
        else:
            return
        self._plan(pod, draws, mean)

    def _plan(self, pod: PodOnNode, draws: DrawStream, mean: float) -> None:
        when = max(self._world.heap.now, self._assumed.begins_seconds) + draws.exponential(mean)
        self._world.heap.at(when, self._due, pod, draws, mean)

    def _due(self, pod: PodOnNode, draws: DrawStream, mean: float) -> None:
        if self._assumed.what == "Node":
            if any(each.node == pod.node for each in self._pods.pods.values()):
                if pod.node not in self._pods.failed_nodes:
                    self._fail_nodes([pod.node], draws)
            else:  # no pod notices the failure, and none gets this node later
                self._pods.failed_nodes.add(pod.node)
        elif self._is_candidate(pod):
            self._fail([pod, *self._others(pod, draws)])
        elif pod.alive:  # a standby may be promoted later. The distribution has no memory, so the pod draws again.
            self._plan(pod, draws, mean)

    def _again(self) -> None:
        assert self._assumed.every_seconds is not None
        self._one()
        self._world.heap.after(self._assumed.every_seconds, self._again)

    def _one(self) -> None:
        candidates = self._candidates()
        draws = self._world.draws("failures", self._number, self._count)
        self._count += 1
        if self._assumed.what == "Node":
            nodes = sorted({pod.node for pod in candidates})
            if nodes:
                self._fail_nodes([nodes[draws.index(len(nodes))]], draws)
        elif candidates:
            first = candidates[draws.index(len(candidates))]
            self._fail([first, *self._others(first, draws)])

    def _candidates(self) -> list[PodOnNode]:
        return [pod for pod in self._pods.pods.values() if self._is_candidate(pod)]

    def _is_candidate(self, pod: PodOnNode) -> bool:
        what = self._assumed.what
        if not pod.alive or pod.started is None or pod.silent_since is not None:
            return False
        if what == "Node":
            return pod.node not in self._pods.failed_nodes
        if pod.is_leaving and self._assumed.notice_seconds is not None:
            return False  # it has its notice already
        if pod.role != _ROLES[what]:
            return False
        return pod.role == contract.ROLE_WORKER or (pod.server is not None) == (what == "ParameterServer")

    def _others(self, first: PodOnNode, draws: DrawStream) -> list[PodOnNode]:
        others = [pod for pod in self._candidates() if pod is not first]
        found = list[PodOnNode]()
        while others and len(found) < self._assumed.together - 1:
            found.append(others.pop(draws.index(len(others))))
        return found

    def _fail(self, pods: list[PodOnNode]) -> None:
        failures = self._world.tally.failures
        for pod in pods:
            failures[self._assumed.what] = failures.get(self._assumed.what, 0) + 1
            if self._assumed.notice_seconds is None:
                self._pods.kill(pod)
            else:
                self._pods.preempt(pod, self._assumed.notice_seconds)

    def _fail_nodes(self, nodes: list[int], draws: DrawStream) -> None:
        living = sorted({pod.node for pod in self._candidates()} - set(nodes))
        while living and len(nodes) < self._assumed.together:
            nodes.append(living.pop(draws.index(len(living))))
        self._pods.failed_nodes.update(nodes)
        failures = self._world.tally.failures
        failures["Node"] = failures.get("Node", 0) + len(nodes)
        for pod in [pod for pod in self._pods.pods.values() if pod.node in nodes]:
            if self._assumed.notice_seconds is None:
                self._pods.lose_node(pod)
            else:
                self._pods.preempt(pod, self._assumed.notice_seconds)
