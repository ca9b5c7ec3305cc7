"""The utilization of a worker's devices, and the numbers of training that shard 0 exports."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from backstay._compute import GradientFn, peak_of
from backstay._compute._flops import flops_of
from backstay._coordination import Liveness, Updated
from backstay._roles._leader import Leader
from backstay._roles._learning_rate import LearningRate
from backstay._roles._metrics import Metrics
from backstay._roles._utilization import Utilization
from backstay._update import ShardEngine, analyse, describe, partition
from backstay._update._partition import gather
from backstay_rpc.control_pb2 import Commit, Contribution, GradientId, GradientInfo

H100 = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")


def value(metrics: Metrics, name: str) -> float | None:
    labels = {"training_job": "job", "role": metrics._who[1], "index": "0"}
    return metrics.registry.get_sample_value(f"backstay_{name}", labels)


def test_the_estimate_counts_the_products_of_forward_and_backward_pass() -> None:
    rows, size = 64, 128
    params = {"w": np.zeros((size, size), np.float32)}
    function = GradientFn(lambda p, batch: jnp.mean((batch @ p["w"]) ** 2), describe(params))
    flops = function.compile(np.zeros((rows, size), np.float32))
    assert flops is not None
    product = 2 * rows * size * size
    assert 2 * product <= flops < 3 * product  # the gradient of the batch is not needed


def test_a_function_with_a_loop_has_no_estimate() -> None:
    """XLA counts the body of a loop once: 32 layers would have the work of one."""
    params = {"w": np.zeros((32, 64, 64), np.float32)}

    def loss(p: Any, batch: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, p["w"])[0])

    assert GradientFn(loss, describe(params)).compile(np.zeros((8, 64), np.float32)) is None


@pytest.mark.parametrize("analysis", [None, {}, [], {"flops": -1.0}, RuntimeError("unsupported")])
def test_a_backend_without_an_estimate_has_none(analysis: object) -> None:
    def cost_analysis() -> object:
        if isinstance(analysis, Exception):
            raise analysis
        return analysis

    assert flops_of(SimpleNamespace(cost_analysis=cost_analysis, as_text=str), 2) is None
    assert flops_of(SimpleNamespace(cost_analysis=lambda: [{"flops": 3.0}], as_text=str), 2) == 6.0


def test_the_peak_is_that_of_all_devices_or_not_known() -> None:
    assert peak_of([H100, H100]) == 2 * 989.4e12
    assert peak_of([SimpleNamespace(device_kind="NVIDIA L40S")]) == 362e12, "and not that of the L4"
    assert peak_of([SimpleNamespace(device_kind="NVIDIA A100-SXM4-40GB")]) == 312e12
    for kind in ("NVIDIA L40", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "TPU v4 lite", "abacus"):
        assert peak_of([H100, SimpleNamespace(device_kind=kind)]) is None, kind
    assert peak_of([]) is None
    assert peak_of(jax.devices("cpu")) is None


def test_utilization_is_work_a_second_by_the_peak() -> None:
    metrics = Metrics("job", "Worker", 0)
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
    unknown = Metrics("job", "Worker", 0)
    work = Utilization(unknown, lambda: [SimpleNamespace(device_kind="abacus")])
    work.compiled(1e9)
    work.contributed(0.0)
    work.contributed(5.0)
    assert (value(unknown, "contribution_flops"), value(unknown, "mfu_ratio")) == (1e9, None)


def test_the_memory_of_each_device_is_what_it_reports_at_a_scrape() -> None:
    metrics = Metrics("job", "Worker", 0)
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
    processor = Metrics("job", "Worker", 0)
    Utilization(processor).compiled(None)
    assert b"device_memory_bytes{" not in processor.page()


def test_shard_0_counts_tokens_of_applied_contributions_and_shows_the_norm() -> None:
    metrics = Metrics("job", "ParameterServer", 0)
    leader = Leader(Liveness("Sync"), threading.Lock(), metrics, 10, 0)

    def update(version: int, tokens: list[float], *, skip: bool = False, norm: float | None = None) -> None:
        infos = tuple(GradientInfo(finite=not skip, examples=1, loss=1.0, metrics={"tokens": each}) for each in tokens)
        made = [Contribution(id=GradientId(rank=rank, version=version), weight=1.0) for rank in range(len(tokens))]
        commit = Commit(term=1, version=version, contributions=made, world=2, skip=skip)
        leader.updated(float(version), Updated(commit, infos, norm=norm))

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
    metrics = Metrics("job", "ParameterServer", 0)
    shown = LearningRate(metrics)
    shown.tick()
    shown.watch(engine)
    for rate in rates:
        engine.apply([[gather(block, [params["w"]]) for block in engine.blocks]], weights=[1.0], divisor=1)
        shown.tick()
        assert value(metrics, "learning_rate") == (None if rate is None else pytest.approx(rate))
    del engine
    shown.tick()
