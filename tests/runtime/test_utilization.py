"""The utilization of a worker's devices, and the numbers of training that shard 0 exports."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import optax
import pytest

from backstay._coordination import PeerTable, Updated
from backstay._report._job import JobObserver
from backstay._report._learning_rate import LearningRate
from backstay._report._metrics import PodMetrics
from backstay._report._utilization import Utilization
from backstay._update import ShardEngine, analyse, describe, partition
from backstay_rpc.control_pb2 import Commit, Contribution, GradientId, GradientInfo

H100 = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")


def value(metrics: PodMetrics, name: str) -> float | None:
    labels = {"training_job": "job", "role": metrics.who[1], "index": "0"}
    return metrics.registry.get_sample_value(f"backstay_{name}", labels)


def test_utilization_is_work_a_second_by_the_peak() -> None:
    metrics = PodMetrics("job", "Worker", 0)
    work = Utilization(metrics, lambda: [H100])
    work.contributed(0.0)
    assert value(metrics, "mfu_ratio") is None
    work.compiled(None)
    assert value(metrics, "contribution_flops") is None
    work.compiled(98.94e12)
    for second in range(11):
        work.contributed(0.5 * second)
    assert value(metrics, "contribution_flops") == 98.94e12
    assert value(metrics, "mfu_ratio") == pytest.approx(0.2)
    unknown = PodMetrics("job", "Worker", 0)
    work = Utilization(unknown, lambda: [SimpleNamespace(device_kind="abacus")])
    work.compiled(1e9)
    work.contributed(0.0)
    work.contributed(5.0)
    assert (value(unknown, "contribution_flops"), value(unknown, "mfu_ratio")) == (1e9, None)


def test_the_memory_of_each_device_is_what_it_reports_at_a_scrape() -> None:
    metrics = PodMetrics("job", "Worker", 0)
    used = {"bytes_in_use": 5, "peak_bytes_in_use": 7, "bytes_limit": 10}

    def broken() -> dict[str, int]:
        raise RuntimeError("not implemented")

    devices = [
        SimpleNamespace(device_kind="abacus", memory_stats=lambda: used),
        SimpleNamespace(device_kind="abacus", memory_stats=lambda: {"bytes_in_use": 3}),
        SimpleNamespace(device_kind="abacus", memory_stats=lambda: None),
        SimpleNamespace(device_kind="abacus", memory_stats=broken),
    ]
    Utilization(metrics, lambda: devices).compiled(None)

    def shown() -> dict[tuple[str, str], float]:
        (family,) = (f for f in metrics.registry.collect() if f.name == "backstay_device_memory_bytes")
        return {(sample.labels["device"], sample.labels["state"]): sample.value for sample in family.samples}

    assert shown() == {("0", "in_use"): 5, ("0", "peak"): 7, ("0", "limit"): 10, ("1", "in_use"): 3}
    used["bytes_in_use"] = 6
    assert shown()["0", "in_use"] == 6
    processor = PodMetrics("job", "Worker", 0)
    Utilization(processor).compiled(None)
    assert b"device_memory_bytes{" not in processor.page()


def test_shard_0_counts_tokens_of_applied_contributions_and_shows_the_norm() -> None:
    metrics = PodMetrics("job", "ParameterServer", 0)
    observer = JobObserver(PeerTable("Sync"), metrics, 10, 0)

    def update(version: int, tokens: list[float], *, skip: bool = False, norm: float | None = None) -> None:
        infos = tuple(GradientInfo(finite=not skip, examples=1, loss=1.0, metrics={"tokens": each}) for each in tokens)
        made = [Contribution(id=GradientId(rank=rank, version=version), weight=1.0) for rank in range(len(tokens))]
        commit = Commit(term=1, version=version, contributions=made, world=2, skip=skip)
        observer.updated(float(version), Updated(commit, infos, norm=norm))

    update(0, [100.0, 50.0])
    assert (value(metrics, "tokens_total"), value(metrics, "gradient_norm")) == (150.0, None)
    update(1, [100.0, math.nan], norm=2.5)
    update(2, [100.0, -1.0])
    update(3, [1000.0], skip=True)
    assert (value(metrics, "tokens_total"), value(metrics, "gradient_norm")) == (350.0, 2.5)


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        (optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.5, 0.0, 5)), [0.5, 0.4, 0.3]),
        (optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)), [0.25, 0.25, 0.25]),
        (optax.adam(1e-3), [None, None, None]),
    ],
)
def test_the_learning_rate_is_shown_where_the_optimizer_has_it(
    optimizer: optax.GradientTransformation, rates: list[float | None]
) -> None:
    params = {"w": np.ones((3, 3), np.float32)}
    tree = describe(params)
    rule = analyse(optimizer, tree)
    engine = ShardEngine(partition(tree, rule, 1, 512), 0, rule, params)
    metrics = PodMetrics("job", "ParameterServer", 0)
    shown = LearningRate(metrics)
    shown.tick()
    shown.watch(engine)
    for rate in rates:
        engine.apply([[np.ones(block.size, np.float32) for block in engine.blocks]], weights=[1.0], divisor=1)
        shown.tick()
        assert value(metrics, "learning_rate") == (None if rate is None else pytest.approx(rate))
    del engine
    shown.tick()
