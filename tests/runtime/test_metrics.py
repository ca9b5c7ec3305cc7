"""The metrics that each role exports, with bounded labels."""

from __future__ import annotations

from typing import get_args

import pytest

from backstay._roles._metrics import Metrics, metric_names
from backstay_spec.types_status import Role


@pytest.mark.parametrize("role", get_args(Role))
def test_a_pod_exports_its_roles_metrics_only(role: Role) -> None:
    page = Metrics("job", role, 1).page().decode()
    mine = {name for name in metric_names() if f"\n{name}{{" in page}
    assert mine <= metric_names(role, 1)
    shared = {"backstay_step"}
    for other in set(get_args(Role)) - {role}:
        assert mine & metric_names(other, 1) == shared
    assert "_created" not in page
    lines = [line for line in page.splitlines() if line.startswith("backstay_")]
    assert len(lines) < 60, role  # a thousand workers are a thousand times that
    labels = f'index="1",role="{role}",training_job="job"'
    assert f"backstay_step{{{labels}}} 0.0" in lines


def test_only_shard_0_exports_the_series_of_the_job() -> None:
    assert "backstay_updates_total" in metric_names("ParameterServer", 0)
    assert "backstay_updates_total" not in metric_names("ParameterServer", 1)


def test_a_script_cannot_make_series_without_end() -> None:
    metrics = Metrics("job", "ParameterServer", 0)
    for number in range(200):
        metrics.train(f"name{number}").set(number)
        metrics.evaluation("x" * 1000 + str(number)).set(number)
    metrics.train("name3").set(-1)
    page = metrics.page().decode()
    assert page.count("\nbackstay_train_metric{") == 50
    assert 'name="name3",role="ParameterServer",training_job="job"} -1.0' in page
    assert page.count("\nbackstay_evaluation{") <= 50
    assert "x" * 101 not in page


def test_of_many_stragglers_the_slowest_are_exported() -> None:
    metrics = Metrics("job", "ParameterServer", 0)
    metrics.stragglers({rank: float(rank) for rank in range(100)})
    page = metrics.page().decode()
    assert page.count("\nbackstay_straggler_delay_seconds{") == 16
    assert 'rank="99"' in page
    assert 'rank="83"' not in page
    metrics.stragglers({3: 1.0})
    assert metrics.page().decode().count("\nbackstay_straggler_delay_seconds{") == 1
