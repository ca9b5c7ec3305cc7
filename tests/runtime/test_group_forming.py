"""T8: a pod that is lost before its rank trains does not hold the others for long."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from backstay.testing import KILLED, Pod
from backstay_spec import contract

from .groups import GROUP_LOST_EXIT, JAX_ABORTS, GroupJob, ends_too, same
from .operator_calls import address_of_rank


def rank_of(job: GroupJob, held: int, where: str) -> list[Pod]:
    """Starts a rank of which one pod is held at one place; returns its pods in the order of members."""
    pods = [
        job.start(
            contract.ROLE_WORKER,
            0,
            1,
            environment={contract.ENV_MEMBER: str(member), **({"HOLD_IN": where} if member == held else {})},
        )
        for member in range(2)
    ]
    job.wait_for(pods[held], f"held in {where}")
    return pods


def trains(job: GroupJob, pods: Sequence[Pod], server: Pod, plain: Any) -> None:
    assert [pod.wait() for pod in (*pods, server)] == [0] * 3
    same(job.params(pods[0]), plain())


@pytest.mark.parametrize(
    ("where", "member", "sent"),
    [
        ("initialize", 0, signal.SIGSTOP),
        ("initialize", 1, signal.SIGKILL),
        ("compile", 0, signal.SIGKILL),
        ("compile", 1, signal.SIGSTOP),
    ],
)
def test_t8_a_pod_is_lost_before_the_first_step(group: Any, where: str, member: int, sent: signal.Signals) -> None:
    """The others wait for it in JAX, or compile."""
    job = group("fsdp", devices=1, pods_per_rank=2)
    job.server(0, 1)
    pods = rank_of(job, member, where)
    job.may_end_with(KILLED, GROUP_LOST_EXIT, JAX_ABORTS)
    pods[member].process.send_signal(sent)
    ends_too(pods[1 - member])


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_t8_a_pod_is_lost_while_its_rank_meets(group: Any, plain: Any, sent: signal.Signals) -> None:
    """The first pod has reported its address, and waits for the lost one until the operator creates the rank again. The
    new pods do not connect to it."""
    job = group("fsdp", devices=1, pods_per_rank=2)
    server, pods = job.server(0, 1), rank_of(job, 1, "meet")
    pods[1].process.send_signal(sent)
    job.until(lambda: address_of_rank(job, 0), "the first pod has reported its address", ignoring=(grpc.RpcError,))
    job.may_end_with(KILLED, 1)
    trains(job, job.rank(0, 2), server, plain)
    assert pods[0].wait() == 1
    assert "worker-0 of incarnation 1 was replaced by incarnation 2" in pods[0].output()


def test_t8_a_first_pod_is_stopped_after_it_has_reported_its_address(group: Any, plain: Any) -> None:
    job = group("fsdp", devices=1, pods_per_rank=2)
    server, pods = job.server(0, 1), rank_of(job, 1, "meet")
    job.until(lambda: address_of_rank(job, 0), "the first pod has reported its address", ignoring=(grpc.RpcError,))
    pods[0].process.send_signal(signal.SIGSTOP)
    job.may_end_with(KILLED, GROUP_LOST_EXIT)
    (job.folder / "let").touch()
    ends_too(pods[1])
    trains(job, job.rank(0, 2), server, plain)
