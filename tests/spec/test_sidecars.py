"""A container whose name is close to `trainer` is reported; any other side-car is not."""

from __future__ import annotations

import pytest

from backstay_spec.sidecars import misspelt_containers
from backstay_spec.validation import parse_job


def job(role: str, *names: str):
    containers = [{"name": name, "image": "example.org/log:1"} for name in names]
    return parse_job(
        {
            "apiVersion": "backstay.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "a"},
            "spec": {"image": "i", "command": ["c"], role: {"template": {"spec": {"containers": containers}}}},
        }
    ).spec


@pytest.mark.parametrize("name", ["trainr", "tainer", "train", "trainers", "trainer-1"])
@pytest.mark.parametrize("role", ["parameterServers", "workers", "evaluator"])
def test_a_name_close_to_trainer_is_reported(role: str, name: str) -> None:
    (text,) = misspelt_containers(job(role, "trainer", name))
    assert text.startswith(f"spec.{role}.template.spec.containers[1].name is '{name}'")
    assert text.endswith("call it trainer")


def test_a_side_car_is_not_reported() -> None:
    names = ("trainer", "proxy", "tracer", "log-shipper", "main", "container", "train-metrics", "tensorboard")
    assert not list(misspelt_containers(job("workers", *names)))
