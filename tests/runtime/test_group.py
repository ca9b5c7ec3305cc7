"""T4: a rank of several pods trains as a rank of one, even if one of its pods or a server dies."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from between import LONG
from small_examples import small_bytes

from backstay._faults import ENV_FAULTS
from backstay._process import SIGTERM_EXIT
from backstay.testing import KILLED, Pod
from backstay_spec import contract

from .groups import GROUP_LOST_EXIT, JAX_ABORTS, GroupJob, ends_too, same, trained
from .operator_calls import progress


def page(server: Pod) -> str:
    """Returns the status page of shard 0's server."""
    with urllib.request.urlopen(f"http://{server.metrics}/status", timeout=LONG) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    ("kind", "more", "config"),
    [
        ("fsdp", "rows", {"workers": 2, "evaluator": True}),  # and a loss with random keys
        ("tensor", "local", {"shards": 2, "workers": 2, "wire": {"gradients": "Int8", "parameters": "BFloat16"}}),
        ("pipeline", "frozen", {"mode": "Async"}),
        ("whole", "factored", {"shards": 2}),
    ],
)
def test_t4_ranks_of_two_pods_train_as_ranks_of_one(
    group: Any, tmp_path: Path, kind: str, more: str, config: dict[str, Any]
) -> None:
    """The pods of a rank are two processes whose devices JAX uses as one. The servers get only their number."""

    def stored(name: str) -> dict[str, Any]:
        return {"checkpoint": {"uri": str(tmp_path / name)}} if "evaluator" in config else {}

    alone = trained(group(kind, more, devices=4, **config, **stored("alone")))
    job = group(kind, more, pods_per_rank=2, **config, **stored("together"))
    coded = "wire" in config
    job.environment["ACCELERATED"] = "1" if coded else ""  # one rank, beside one whose host encodes
    same(trained(job), alone)
    for pod in job.pods:
        encoded = "encoded on an accelerator" in pod.output()
        assert encoded == (coded and (pod.role, pod.index) == ("worker", 1))
    if more == "rows":  # each pod reads the samples of the rows that its devices get
        read = [pod.output().partition("rows ")[2].partition("]")[0] for pod in job.pods if pod.role == "worker"]
        assert read == ["[0, 1, 2, 3", "[4, 5, 6, 7"] * 2


def test_three_pods_whose_devices_divide_nothing_train_too(group: Any, plain: Any) -> None:
    same(trained(group("", devices=1, pods_per_rank=3)), plain())


def test_t4_three_pods_that_divide_all_large_arrays_train_as_one_process(group: Any) -> None:
    job = group("fsdp", devices=1, pods_per_rank=3, shards=2)
    job.environment |= {"WIDTH": "288", "ROWS": "9"}
    same(trained(job), job.reference())


@pytest.mark.parametrize("grace", [0.0, LONG])
def test_t2_backups_and_grace_count_a_rank_of_which_one_pod_is_late(group: Any, grace: float) -> None:
    """One rank is the quorum. Without grace the other rank trains alone. With it, its update waits for the late one."""
    job = group("fsdp", devices=1, pods_per_rank=2, workers=2, backups=1, grace_seconds=grace)
    server = job.server(0, 1)
    late = [
        job.start(contract.ROLE_WORKER, 1, 1, environment={contract.ENV_MEMBER: str(member), **more})
        for member, more in ((0, {}), (1, {"HOLD": "2"}))
    ]
    job.until(lambda: progress(job).step == 2, "the late rank has made two updates", ignoring=(grpc.RpcError,))
    others = job.rank(0)
    if grace:
        job.until(lambda: 0 in progress(job).contributed, "the other rank has made a contribution")
        assert progress(job).step == 2
    else:
        job.wait_for(others[0], "stored")
    (job.folder / "let").touch()
    assert [pod.wait() for pod in (*others, *late, server)] == [0] * 5
    same(job.params(late[1]), job.params(others[0]))


@pytest.mark.parametrize(("killed", "where"), [(0, "push"), (1, "compute")])
def test_t4_a_pod_of_a_rank_dies_and_the_rank_starts_again(group: Any, plain: Any, killed: int, where: str) -> None:
    """The other pod ends, although it may wait in a collective. The other rank waits, and nothing is lost."""
    job = group("fsdp", devices=1, pods_per_rank=2, workers=2, shards=2)
    servers = [job.server(shard, 1) for shard in range(2)]
    others, pods = job.rank(0), job.rank(1, faults={killed: f"kill worker/1 @2 {where}"})
    job.may_end_with(GROUP_LOST_EXIT, JAX_ABORTS)
    assert pods[killed].wait() == KILLED
    ends_too(pods[1 - killed])
    again = job.rank(1, 2)
    assert [pod.wait() for pod in (*others, *again, *servers)] == [0] * 6
    same(job.params(again[1]), plain(workers=2))
    assert job.params(again[1]).keys() == job.params(others[0]).keys()


def test_t4_a_server_dies_and_its_ranks_continue(group: Any, plain: Any, tmp_path: Path) -> None:
    """All pods of a rank connect again, also those that have not lost it in the middle of an exchange."""
    job = group("fsdp", devices=1, pods_per_rank=2, shards=2, checkpoint={"uri": str(tmp_path / "c"), "every_steps": 1})
    job.environment[ENV_FAULTS] = ""
    dies = job.start(contract.ROLE_SERVER, 1, 1, environment={ENV_FAULTS: "kill server/1 @2 commit"})
    first, pods = job.server(0, 1), job.rank(0)
    assert dies.wait() == KILLED
    again = job.server(1, 2)
    assert [pod.wait() for pod in (*pods, first, again)] == [0] * 4
    same(job.params(pods[0]), plain())


@pytest.mark.parametrize("late", [0, 1])
def test_t4_a_server_dies_before_each_pod_of_a_rank_has_connected(group: Any, plain: Any, late: int) -> None:
    """All pods join again. One of them waited at another decision than the others."""
    job = group("fsdp", devices=1, pods_per_rank=2, shards=2)
    first, dies = job.server(0, 1), job.server(1, 1)
    pods = [
        job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: str(member), **more})
        for member, more in ((late, {"HOLD_IN": "join"}), (1 - late, {}))
    ]
    job.wait_for(pods[0], "held in join")
    dies.process.kill()
    assert dies.may_end_with(KILLED).wait() == KILLED
    (job.folder / "let").touch()
    again = job.server(1, 2)
    assert [pod.wait() for pod in (*pods, first, again)] == [0] * 4
    same(job.params(pods[0]), plain())


def test_sigterm_of_one_pod_ends_its_rank_in_order(group: Any) -> None:
    job = group("fsdp", devices=1, pods_per_rank=2, workers=2)
    job.environment |= {"HOLD": "2", "STOP": str(LONG)}  # after the usual 3 s, pod 1 would end by itself
    server, others, pods = job.server(0, 1), job.rank(0), job.rank(1)
    for pod in pods:
        job.wait_for(pod, "held at step 2")
    pods[1].process.send_signal(signal.SIGTERM)
    job.wait_for(pods[1], "has received SIGTERM")  # and all pods hold. After training it would only end pod 1
    (job.folder / "let").touch()
    job.may_end_with(SIGTERM_EXIT)
    assert [pod.wait() for pod in pods] == [SIGTERM_EXIT] * 2
    assert not any("the loss of another pod" in pod.output() for pod in pods), "it delays the news of the end"
    again = job.rank(1, 2)
    assert [pod.wait() for pod in (*others, *again, server)] == [0] * 5


def test_an_exception_of_one_pods_script_is_reported_by_it_and_ends_the_other(group: Any) -> None:
    job = group("fsdp", devices=1, pods_per_rank=2)
    server = job.server(0, 1)
    leader = job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: "0"})
    raises = job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: "1", "RAISE_AT": "2"})
    leader.may_end_with(GROUP_LOST_EXIT, JAX_ABORTS)
    assert raises.may_end_with(1).wait() == 1
    assert raises.final_message()["message"] == "no batch"
    assert "may follow from the loss of another pod of this rank" in raises.output()
    ends_too(leader)
    assert server.process.poll() is None


def test_t7_a_rank_that_comes_after_training_divides_the_checkpoint(group: Any, plain: Any, tmp_path: Path) -> None:
    """The servers have left, so its pods find each other by the checkpoint folder."""
    folder = tmp_path / "checkpoints"
    job = group("fsdp", devices=1, pods_per_rank=2, checkpoint={"uri": str(folder)})
    server, pods = job.server(0, 1), job.rank(0, faults={0: "kill worker/0 @0 done"})
    job.may_end_with(GROUP_LOST_EXIT, JAX_ABORTS)
    assert pods[0].wait() == KILLED
    ends_too(pods[1])
    assert server.wait() == 0
    words = server.final_message()
    said = json.dumps({name: words[name] for name in ("step", "checkpoint")})
    job.environment[contract.ENV_TRAINED] = said
    again = job.rank(0, 2)
    assert [pod.wait() for pod in again] == [0, 0]
    same(job.params(again[1]), plain())
    assert not list(folder.glob("address-*"))


@pytest.mark.parametrize("stopped", [0, 1])
def test_t8_a_stopped_pod_ends_its_rank(group: Any, plain: Any, stopped: int) -> None:
    """The other pods cannot wait for it: only the pings of their connection show that it does not run."""
    job = group("fsdp", devices=1, pods_per_rank=2)
    job.environment["HOLD"] = "2"
    server, pods = job.server(0, 1), job.rank(0)
    for pod in pods:
        job.wait_for(pod, "held at step 2")
    pods[stopped].process.send_signal(signal.SIGSTOP)
    (job.folder / "let").touch()
    ends_too(pods[1 - stopped])
    assert "has not answered 5 pings" in pods[1 - stopped].final_message()["message"]
    pods[stopped].process.send_signal(signal.SIGKILL)
    again = job.rank(0, 2)
    assert [pod.wait() for pod in (*again, server)] == [0] * 3
    same(job.params(again[0]), plain())


def test_t8_the_pod_that_others_wait_for_is_named_with_its_stack(group: Any) -> None:
    """The other pod waits in a collective, which has no name for it."""
    job = group("fsdp", devices=1, pods_per_rank=2)
    server = job.server(0, 1)
    waits = job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: "0"})
    held = job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: "1", "HOLD": "2"})
    job.wait_for(waits, "pod 1: waits for its input batch (step 2)")
    said = waits.output().partition("nothing has changed in the pods of this rank for ")[2]
    assert "pod 0: computes (step 2)" in said
    assert "in batches" in said.partition("Pod 1:\nThread backstay-batches-0:\n")[2]
    job.until(lambda: "pod 1 of worker 0 waits for its input batch" in page(server), "the server's page names it too")
    (job.folder / "let").touch()
    assert [pod.wait() for pod in (waits, held, server)] == [0] * 3
    assert waits.output().count("nothing has changed") == 1


@pytest.mark.parametrize("raises", [0, 1])
def test_an_exception_after_training_in_one_pod_ends_the_other(group: Any, raises: int) -> None:
    """The other one waits for it in a collective, or at its end."""
    job = group("fsdp", devices=1, pods_per_rank=2)
    server = job.server(0, 1)
    pods = [
        job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: str(member), **more})
        for member, more in ((raises, {"AFTER": "raise"}), (1 - raises, {}))
    ]
    job.may_end_with(1, GROUP_LOST_EXIT, JAX_ABORTS)
    assert pods[0].wait() == 1
    assert pods[0].final_message()["result"] == "AfterTrainingFailed"
    ends_too(pods[1])
    assert server.wait() == 0


def test_an_evaluate_that_raises_in_one_pod_ends_the_other(group: Any) -> None:
    """The other one waits for it in a collective of `evaluate`."""
    job = group("fsdp", devices=1, pods_per_rank=2)
    server = job.server(0, 1)
    waits = job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: "0"})
    raises = job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: "1", "EVALUATE": "raise"})
    job.may_end_with(1, GROUP_LOST_EXIT, JAX_ABORTS)
    assert raises.wait() == 1
    said = "evaluate raised in pod 1 of worker 0, and not in all others: ZeroDivisionError: no metrics"
    assert raises.final_message()["message"] == said
    ends_too(waits)
    assert server.process.poll() is None


def test_an_evaluate_that_raises_in_all_pods_costs_the_metrics(group: Any) -> None:
    job = group("fsdp", devices=1, pods_per_rank=2)
    job.environment["EVALUATE"] = "raise"
    server, pods = job.server(0, 1), job.rank(0)
    assert [pod.wait() for pod in (*pods, server)] == [0] * 3
    assert server.final_message()["evaluationError"] == "ZeroDivisionError: no metrics"
    assert "error" not in job.params(pods[0])


def test_t7_a_pod_that_is_killed_after_all_scripts_have_ended_ends_nothing(group: Any) -> None:
    """JAX would wait for it for ten minutes, although all scripts have ended."""
    job = group("fsdp", devices=1, pods_per_rank=2)
    server = job.server(0, 1)
    pods = [
        job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: str(member), **more})
        for member, more in ((0, {}), (1, {"AFTER": "late atexit"}))
    ]
    job.wait_for(pods[1], "held after training")
    pods[1].process.kill()
    assert pods[1].may_end_with(KILLED).wait() == KILLED
    assert [pods[0].wait(), server.wait()] == [0, 0]


@pytest.mark.parametrize("exits", [0, 1])
def test_a_script_that_exits_in_init_of_one_pod_ends_the_other(group: Any, exits: int) -> None:
    job = group("fsdp", devices=1, pods_per_rank=2)
    job.server(0, 1)
    pods = [
        job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: str(member), **more})
        for member, more in ((exits, {"INIT_EXITS": "no data"}), (1 - exits, {}))
    ]
    job.may_end_with(1, GROUP_LOST_EXIT, JAX_ABORTS)
    assert pods[0].wait() == 1
    assert "no data" in pods[0].output().splitlines(), "as Python prints the text of sys.exit"
    ends_too(pods[1])


def refused(job: GroupJob, **other: str) -> str:
    """Returns the message of two pods that end because these variables of the second one differ. JAX may abort another
    one when the first has ended."""
    job.server(0, 1)
    members = ({contract.ENV_MEMBER: "0"}, {contract.ENV_MEMBER: "1", **other})
    pods = [job.start(contract.ROLE_WORKER, 0, 1, environment=each) for each in members]
    job.may_end_with(1, JAX_ABORTS)
    codes = [pod.wait() for pod in pods]
    assert codes[0] == 1
    assert set(codes) <= {1, JAX_ABORTS}
    said = [pod.final_message() for pod, code in zip(pods, codes, strict=True) if code == 1]
    assert all(one == {**said[0], "traceback": one.get("traceback")} for one in said)
    assert said[0]["result"] == "Refused"
    return str(said[0]["message"])


def test_pods_with_another_script_are_refused(group: Any) -> None:
    """They waited for each other in a collective."""
    job = group("fsdp", devices=1, pods_per_rank=2)
    message = refused(job, OTHER_KIND="", MORE="frozen")
    assert message.startswith("pod 1 of worker 0 differs from pod 0 of worker 0: ")
    assert re.search(r"; frozen is \w.* in pod 1 of worker 0 and nothing in pod 0 of worker 0; ", message), message


def test_pods_with_another_sharding_are_refused_by_its_name(group: Any) -> None:
    job = group("fsdp", devices=1, pods_per_rank=2)
    message = refused(job, OTHER_KIND="")
    assert message.startswith(
        "pod 1 of worker 0 differs from pod 0 of worker 0: sharding is nothing in pod 1 of worker 0"
    )


def test_pods_with_another_mesh_are_refused_by_its_sizes(group: Any) -> None:
    job = group("whole", pods_per_rank=2)
    message = refused(job, OTHER_KIND="made")
    assert message.startswith(
        "pod 1 of worker 0 differs from pod 0 of worker 0: mesh is {'batch': 2, 'model': 2} in pod 1 of worker 0 and "
        "{'batch': 4} in pod 0 of worker 0"
    )


@pytest.mark.parametrize("at", ["gather", "end"])
def test_t7_a_pod_that_is_killed_after_training_ends_its_rank(group: Any, at: str) -> None:
    """JAX would see it after ten minutes."""
    job = group("fsdp", devices=1, pods_per_rank=2)
    server = job.server(0, 1)
    pods = [
        job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: str(member), **more})
        for member, more in ((0, {}), (1, {"AFTER": f"hold {at}"}))
    ]
    job.wait_for(pods[1], "held after training")
    if at == "end":
        job.wait_for(pods[0], "stored")
    job.may_end_with(KILLED, GROUP_LOST_EXIT, JAX_ABORTS)
    pods[1].process.kill()
    ends_too(pods[0])
    assert server.wait() == 0


def test_each_pod_of_a_rank_keeps_what_it_compiled(group: Any, tmp_path: Path) -> None:
    """A replaced rank then starts in half the time. JAX alone would write in the first process only."""
    job = group("fsdp", devices=1, pods_per_rank=2)
    server = job.server(0, 1)
    caches = [tmp_path / f"cache-{member}" for member in range(2)]
    pods = [
        job.start(
            contract.ROLE_WORKER,
            0,
            1,
            environment={contract.ENV_MEMBER: str(member), "JAX_COMPILATION_CACHE_DIR": str(cache)},
        )
        for member, cache in enumerate(caches)
    ]
    assert [pod.wait() for pod in (*pods, server)] == [0] * 3
    assert all(list(cache.glob("jit*")) for cache in caches)


def test_a_script_that_uses_a_device_before_train_is_refused_with_the_cure(group: Any) -> None:
    job = group("", devices=1, pods_per_rank=2)
    job.environment["USES_JAX"] = "1"
    job.server(0, 1)
    pods = job.rank(0)
    job.may_end_with(1, GROUP_LOST_EXIT, JAX_ABORTS)
    assert 1 in {pod.wait() for pod in pods}
    assert any("the script used a device of JAX before it called train" in pod.output() for pod in pods)


def test_a_script_that_initializes_its_rank_may_use_devices_before_train(group: Any) -> None:
    job = group("fsdp", devices=1, pods_per_rank=2)
    job.environment |= {"USES_JAX": "1", "INITIALIZE": "1"}
    server, pods = job.server(0, 1), job.rank(0)
    assert [pod.wait() for pod in (*pods, server)] == [0] * 3
    assert "error" in job.params(pods[1])


def test_sigterm_ends_a_pod_that_waits_for_its_rank(group: Any) -> None:
    job = group("", devices=1, pods_per_rank=2)
    job.server(0, 1)
    pod = job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: "1"})
    job.wait_for(pod, "waiting: pod 0 of worker 0 has not reported its address")
    pod.may_end_with(SIGTERM_EXIT)
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait() == SIGTERM_EXIT


def test_a_script_that_exits_in_one_pod_ends_the_rank_with_its_code(group: Any) -> None:
    job = group("fsdp", devices=1, pods_per_rank=2)
    server = job.server(0, 1)
    exits, other = (
        job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: str(member), **more})
        for member, more in ((0, {"EXIT_AT": "2"}), (1, {}))
    )
    other.may_end_with(GROUP_LOST_EXIT, JAX_ABORTS)
    assert exits.may_end_with(3).wait() == 3
    ends_too(other)
    assert server.process.poll() is None


def test_pods_with_other_devices_are_refused(group: Any) -> None:
    job = group("", devices=1, pods_per_rank=2)
    job.server(0, 1)
    pods = [
        job.start(contract.ROLE_WORKER, 0, 1, environment={contract.ENV_MEMBER: str(member), "DEVICES": str(devices)})
        for member, devices in ((0, 1), (1, 3))
    ]
    job.may_end_with(1, GROUP_LOST_EXIT, JAX_ABORTS)
    assert 1 in {pod.wait() for pod in pods}
    assert any("each of the 2 pods of a rank must have the same number" in pod.output() for pod in pods)


def bits(printed: str) -> float:
    """Returns the metric that a pod of the example has printed."""
    return float(printed.partition("bits per byte ")[2].split()[0])


@pytest.fixture
def example(tmp_path: Path) -> str:
    # A script that changed the imported module would not be forked.
    return str(small_bytes(tmp_path / "example") / "large.py")


def test_the_example_trains_the_same_in_each_layout(group: Any, example: str) -> None:
    """Tensor and pipeline parallelism in a rank of two pods, and one process."""

    def trained_by(layout: str, pods: int) -> float:
        command = (example, "--layout", layout, "--steps", "4")
        job = group("", devices=1, command=command, pods_per_rank=pods)
        server, workers = job.server(0, 1), job.rank(0)
        assert [pod.wait() for pod in (*workers, server)] == [0] * (pods + 1)
        assert ["bits per byte" in pod.output() for pod in workers] == [True] + [False] * (pods - 1)
        return bits(workers[0].output())

    alone = trained_by("replicate", 1)
    assert trained_by("tensor", 2) == pytest.approx(alone, abs=2e-3)
    assert trained_by("pipeline", 2) == pytest.approx(alone, abs=2e-3)


def test_the_example_trains_with_local_steps_in_two_ranks_of_two_pods(group: Any, example: str) -> None:
    command = (example, "--local-steps", "2", "--steps", "4")
    job = group("", devices=1, command=command, pods_per_rank=2, workers=2)
    server, workers = job.server(0, 1), [pod for rank in range(2) for pod in job.rank(rank)]
    assert [pod.wait() for pod in (*workers, server)] == [0] * 5
    assert "after 2 updates" in workers[0].output()
    assert 0 < bits(workers[0].output()) < 9
