"""O1, O4, T1, T3, T5, T6: the real planner and the real coordinator under one clock, in simulated jobs that fail."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay._simulator import Assumptions, simulate
from backstay._simulator._clock import DrawStream
from backstay._simulator._pods import SimulatedWorld
from backstay_spec.goodput import PARTS

from .conftest import assume, job_of


def failing(what: str, every: float, **more: Any) -> dict[str, Any]:
    return {"failures": [{"what": what, "everySeconds": every, **more}]}


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    job, assumed = job_of(backups=1, standbys=1), assume(**failing("ParameterServer", 9.0))
    one, same, other = simulate(job, assumed, 5), simulate(job, assumed, 5), simulate(job, assumed, 6)
    assert one == same
    assert one.to_json() == same.to_json()
    assert one.facts != other.facts


def uses_of_random_numbers(**fields: Any) -> dict[Any, list[str]]:
    """Returns the lines that take the numbers of each stream, in order."""
    found: dict[Any, list[str]] = {}
    draws_file = DrawStream.uniform.__code__.co_filename

    class Recorded(DrawStream):
        def __init__(self, seed: int, *purpose: str | int) -> None:
            super().__init__(seed, *purpose)
            self.uses = found[purpose] = []

        def uniform(self) -> float:
            caller = sys._getframe(1)
            while caller.f_code.co_filename == draws_file:
                caller = caller.f_back  # type: ignore[assignment]
            self.uses.append(f"{caller.f_code.co_name}:{caller.f_lineno}")
            return super().uniform()

    step = {"pausesPerHour": 500, "pauseSeconds": 2, **fields.pop("step", {})}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SimulatedWorld, "draws", lambda world, *purpose: Recorded(world.seed, *purpose))
        simulate(job_of(), assume(steps=60, step=step, **{**failing("Worker", 12.0), **fields}))
    return found


@pytest.fixture(scope="module")
def unchanged_uses() -> dict[Any, list[str]]:
    return uses_of_random_numbers()


@pytest.mark.parametrize(
    "change",
    [
        {"step": {"pausesPerHour": 3000}},
        {"step": {"pausesPerHour": 0}},
        {"step": {"pauseSeconds": 0}},
        {"step": {"sigma": 0}},
        {"step": {"machineSigma": 0}},
        {"starts": {"compileSeconds": 0, "sigma": 0}},
        failing("Worker", 12.0, together=2),
        failing("Worker", 12.0, noticeSeconds=2),
    ],
)
def test_a_changed_assumption_changes_no_other_random_number(unchanged_uses: dict[Any, list[str]], change: Any) -> None:
    """The n-th number of a stream has the same use in both simulations."""
    before, after = unchanged_uses, uses_of_random_numbers(**change)
    assert len(before.keys() & after.keys()) > 10
    for purpose in before.keys() & after.keys():
        length = min(len(before[purpose]), len(after[purpose]))
        assert before[purpose][:length] == after[purpose][:length], purpose


def test_o4_every_killed_worker_is_charged_and_replaced() -> None:
    run = simulate(job_of(), assume(**failing("Worker", 12.0)))
    assert run.phase == "Succeeded"
    killed = run.counts["failures"]["Worker"]
    assert killed > 2
    assert run.counts["restarts"]["Worker"] == killed
    assert run.counts["created"]["worker"] == 4 + killed
    assert run.counts["outcomes"] == {"applied": 4 * 100}, "T3: each rank contributes once to each update"


def test_o4_a_killed_pod_of_a_rank_costs_its_rank_one_restart() -> None:
    run = simulate(job_of(pods_per_rank=3), assume(**failing("Worker", 12.0)))
    assert run.phase == "Succeeded"
    killed = run.counts["failures"]["Worker"]
    assert killed > 2
    assert run.counts["restarts"]["Worker"] == killed, "the other pods of the rank are charged to nobody"
    assert run.counts["created"]["worker"] == 4 + killed
    assert run.counts["outcomes"] == {"applied": 4 * 100}, "T3: each rank contributes once to each update"


def test_the_pods_of_a_rank_have_an_interface_each(exact: dict[str, Any]) -> None:
    """A worker's streams to four servers share one interface, or two."""
    assumed = exact | {"steps": 20, "model": {"bytes": 4e9}, "network": {"gigabitsPerSecond": 8, "latencySeconds": 0}}
    one, two, four, eight = (
        simulate(job_of(workers=1, servers=4, pods_per_rank=pods), Assumptions.model_validate(assumed)).facts
        for pods in (1, 2, 4, 8)
    )
    computed = 0.2
    one, two, four, eight = (facts["updateSecondsMedian"] - computed for facts in (one, two, four, eight))
    assert two == pytest.approx(one / 2, rel=0.02)
    assert four == pytest.approx(one / 4, rel=0.04)
    assert eight == pytest.approx(four, rel=0.02), "then the interfaces of the servers are the limit"


def test_o4_preempted_workers_are_not_charged() -> None:
    run = simulate(job_of(), assume(**failing("Worker", 12.0, noticeSeconds=5)))
    assert run.counts["restarts"]["Worker"] == 0
    assert run.counts["disruptions"]["Worker"] == run.counts["failures"]["Worker"] > 0


def test_o4_a_job_fails_when_its_budget_is_spent() -> None:
    job = job_of()
    workers = job.spec.workers.model_copy(update={"max_restarts": 2})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"workers": workers})})
    run = simulate(job, assume(steps=1000, **failing("Worker", 12.0)))
    assert (run.phase, run.reason) == ("Failed", "MaxRestartsExceeded")


def test_t6_without_standbys_a_lost_server_costs_the_updates_since_the_checkpoint() -> None:
    run = simulate(job_of(), assume(steps=200, **failing("ParameterServer", 40.0)))
    assert run.phase == "Succeeded"
    assert run.facts["updatesRedone"] > 0
    assert run.worker_seconds["redone"] > 0


def test_t3_with_standbys_no_update_is_lost() -> None:
    run = simulate(job_of(standbys=1), assume(**failing("ParameterServer", 7.0)))
    assert run.phase == "Succeeded"
    assert run.facts["updatesRedone"] == 0
    assert run.facts["updates"] == 100
    assert "redone" not in run.worker_seconds


def test_a_lost_node_is_found_by_the_operators_rules_about_silence() -> None:
    run = simulate(job_of(standbys=1), assume(steps=250, **failing("Node", 40.0)))
    assert run.phase == "Succeeded"
    assert run.counts["failures"]["Node"] > 0
    assert sum(run.counts["disruptions"].values()) > 0
    assert sum(run.counts["restarts"].values()) == 0


def test_t5_async_updates_are_not_staler_than_allowed() -> None:
    run = simulate(job_of(workers=8, mode="Async", maxStaleness=9), assume(steps=300, step={"sigma": 0.5}))
    assert 0 < run.facts["stalenessMost"] <= 9
    assert run.counts["outcomes"].get("stale", 0) > 0


def test_t1_many_workers_share_the_memory_of_a_server() -> None:
    run = simulate(job_of(workers=21, standbys=1), assume(steps=30, **failing("ParameterServer", 11.0)))
    assert run.phase == "Succeeded"
    assert run.counts["outcomes"]["applied"] == 30 * 21


cases = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 6),
        "servers": st.integers(1, 3),
        "standbys": st.integers(0, 1),
        "every_steps": st.sampled_from([None, 3, 20]),
        "pods_per_rank": st.integers(1, 3),
    }
)
updates = st.one_of(
    st.fixed_dictionaries({"backups": st.integers(0, 2), "grace": st.sampled_from(["0s", "100ms", "Auto"])}),
    st.just({"mode": "Async", "maxStaleness": 16}),
)
failures = st.lists(
    st.fixed_dictionaries(
        {
            "what": st.sampled_from(["Worker", "ParameterServer", "Standby", "Node"]),
            "meanSeconds": st.sampled_from([20.0, 60.0, 200.0]),
            "noticeSeconds": st.sampled_from([None, 3.0]),
            "together": st.integers(1, 3),
        }
    ),
    max_size=3,
)


@settings(max_examples=25, deadline=None)
@given(cases, updates, failures, st.integers(0, 1000))
def test_o1_t1_t3_promises_hold_in_every_history(
    case: dict[str, Any], update: dict[str, Any], causes: list[dict[str, Any]], seed: int
) -> None:
    """`SimulatedJob` and `TimedShard` raise an error where a plan or a commit breaks a promise."""
    if case["workers"] <= update.get("backups", 0):
        update = {}
    assumed = assume(steps=30, seconds=300, failures=causes)
    run = simulate(job_of(**case, **update), assumed, seed)
    assert run.phase in {"Succeeded", "Running", "Failed"}
    if run.phase == "Succeeded":
        assert run.facts["updates"] == 30
    total, slots = sum(run.worker_seconds.values()), case["workers"] * run.facts["seconds"]
    assert set(run.worker_seconds) <= set(PARTS)
    assert all(value >= 0 for value in run.worker_seconds.values())
    assert total <= slots * 1.5 + 60, "the parts are the seconds of pods and of slots without one"


def test_one_worker_and_one_server_follow_the_formula(exact: dict[str, Any]) -> None:
    """With deterministic steps, an update takes the computation, and the bytes in both directions."""
    assumed = Assumptions.model_validate(
        {
            **exact,
            "steps": 50,
            "model": {"bytes": 125e6},
            "network": {"gigabitsPerSecond": 10, "latencySeconds": 0.001},
        }
    )
    run = simulate(job_of(workers=1, servers=1, every_steps=None), assumed)
    assert 1 / run.facts["updatesPerSecond"] == pytest.approx(0.2 + 2 * 0.1 + 2 * 0.001, rel=1e-6)


def test_n_workers_share_the_interface_of_one_server(exact: dict[str, Any]) -> None:
    """The contributions and the answers of all workers pass one interface (incast)."""
    assumed = Assumptions.model_validate(
        {
            **exact,
            "steps": 50,
            "model": {"bytes": 125e6},
            "network": {"gigabitsPerSecond": 10, "latencySeconds": 0},
        }
    )
    for workers in (2, 4, 6):
        run = simulate(job_of(workers=workers, servers=1, every_steps=None), assumed)
        assert 1 / run.facts["updatesPerSecond"] == pytest.approx(0.2 + workers * 2 * 0.1, rel=1e-3)


def test_async_is_a_queue_with_one_server(exact: dict[str, Any]) -> None:
    """In a closed queue with deterministic times, the server is busy, or every worker is."""
    costs = {**exact["costs"], "updateSeconds": 0.05}
    assumed = Assumptions.model_validate({**exact, "costs": costs, "steps": 400})
    few = simulate(job_of(workers=2, servers=1, every_steps=None, mode="Async"), assumed)
    assert few.facts["updatesPerSecond"] == pytest.approx(2 / 0.25, rel=0.02)
    many = simulate(job_of(workers=20, servers=1, every_steps=None, mode="Async"), assumed)
    assert many.facts["updatesPerSecond"] == pytest.approx(1 / 0.05, rel=0.02)


@pytest.fixture(scope="module")
def unchanged_facts() -> dict[str, Any]:
    return simulate(job_of(), assume(steps=60)).facts


@pytest.mark.parametrize(
    ("change", "fact", "more"),
    [
        ({"step": {"seconds": 0.4}}, "updatesPerSecond", False),
        ({"step": {"sigma": 0.5}}, "updatesPerSecond", False),
        ({"step": {"pausesPerHour": 3000, "pauseSeconds": 2}}, "updatesPerSecond", False),
        ({"model": {"bytes": 1e8}}, "updatesPerSecond", False),
        ({"model": {"bytes": 1e8}, "network": {"gigabitsPerSecond": 1}}, "updatesPerSecond", False),
        ({"costs": {"updateSeconds": 0.1}}, "updatesPerSecond", False),
        ({"step": {"examples": 64}}, "examplesPerSecond", True),
        ({"starts": {"compileSeconds": 60}}, "goodput", False),
        ({"checkpoints": {"snapshotBytesPerSecond": 1e6}}, "updatesPerSecond", False),
        (failing("Worker", 10.0), "goodput", False),
        ({"podPricePerHour": {"worker": 2, "server": 1}}, "cost", True),
        ({"nodes": {"cores": 0.5}, "step": {"processorSeconds": 0.1}}, "updatesPerSecond", False),
    ],
)
def test_a_changed_assumption_moves_the_result_in_its_direction(
    unchanged_facts: dict[str, Any], change: Any, fact: str, more: bool
) -> None:
    fields = {key: value for key, value in change.items() if key != "step"}
    before = unchanged_facts[fact]
    after = simulate(job_of(), assume(steps=60, step=change.get("step", {}), **fields)).facts[fact]
    assert (after > before * 1.001) if more else (after < before * 0.999)


def test_codecs_and_local_steps_save_bytes() -> None:
    job = job_of(every_steps=None)
    wire = job.spec.wire.model_copy(update={"gradients": "Int8", "parameters": "BFloat16"})
    coded = job.model_copy(update={"spec": job.spec.model_copy(update={"wire": wire})})
    plain, small = (simulate(each, assume(steps=40)).facts for each in (job, coded))
    assert 0.25 < small["sentBytes"] / plain["sentBytes"] < 0.3
    assert 0.5 <= small["receivedBytes"] / plain["receivedBytes"] < 0.52
    local = simulate(job, assume(steps=40, step={"localSteps": 8})).facts
    assert local["examplesPerSecond"] > plain["examplesPerSecond"]
    assert local["sentBytes"] == plain["sentBytes"]


@pytest.mark.parametrize("standbys", [0, 1])
def test_o4_the_mean_time_between_failures_of_servers_holds_also_for_promoted_standbys(standbys: int) -> None:
    """2 servers in 4000 s, with a failure each 200 s on average, have about 40."""
    assumed = assume(
        steps=None, seconds=4000, step={"seconds": 50}, failures=[{"what": "ParameterServer", "meanSeconds": 200}]
    )
    job = job_of(workers=1, standbys=standbys)
    assert 25 < simulate(job, assumed).counts["failures"]["ParameterServer"] < 55


@pytest.mark.parametrize(("notice", "nodes"), [(30, 1), (30, 2), (None, 1)])
def test_o4_nodes_fail_at_their_rate_until_the_end(notice: float | None, nodes: int) -> None:
    """A failed node gets no pods again, so each replacement has a node that can fail."""
    cause = {"what": "Node", "meanSeconds": 300, "noticeSeconds": notice}
    assumed = assume(steps=None, seconds=3000, step={"seconds": 30}, nodes={"pods": nodes}, failures=[cause])
    run = simulate(job_of(workers=4, servers=1), assumed)
    expected = 50 / nodes
    assert 0.6 * expected < run.counts["failures"]["Node"] < 1.4 * expected
    replaced = sum(run.counts["created"].values()) - 5
    assert run.counts["failures"]["Node"] - 5 <= replaced, "each had a pod, and the last ones are not replaced yet"
    assert sum(run.counts["disruptions"].values()) > 0


def test_a_pod_whose_node_is_lost_before_its_start_never_runs() -> None:
    """All nodes are lost while their pods start, and other pods replace them when the API server evicts these."""
    assumed = assume(
        steps=20,
        starts={"schedulingSeconds": 1, "sigma": 0, "worker": {"seconds": 60}, "server": {"seconds": 1}},
        failures=[{"what": "Node", "atSeconds": [30], "together": 9}],
        nodes={"pods": 9},
    )
    run = simulate(job_of(workers=2, servers=1), assumed)
    assert run.phase == "Succeeded"
    assert run.counts["created"] == {"parameter-server": 2, "worker": 4}
    assert run.facts["firstUpdateSeconds"] > 300


def test_a_pod_that_is_preempted_is_not_preempted_again() -> None:
    assumed = assume(steps=None, seconds=50, failures=[{"what": "Worker", "everySeconds": 20, "noticeSeconds": 15}])
    causes = assumed.failures * 3
    run = simulate(job_of(workers=2, servers=1), assumed.model_copy(update={"failures": causes}))
    assert run.counts["failures"]["Worker"] == run.counts["disruptions"]["Worker"] > 1
