"""Valid jobs that probably do something else than their author means."""

from __future__ import annotations

from typing import Any

import pytest

from backstay_spec.advice import advice
from backstay_spec.validation import parse_job

QUEUE = "kueue.x-k8s.io/queue-name"
MESH = "sidecar.istio.io/inject"


def of(metadata: dict[str, Any], **spec: Any) -> list[tuple[str, str]]:
    job = {
        "apiVersion": "backstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "a", **metadata},
        "spec": {"image": "x", "command": ["python", "train.py"], **spec},
    }
    return [(event.reason, event.message) for event in advice(parse_job(job))]


def test_the_queue_as_a_label_names_the_field() -> None:
    [(reason, text)] = of({"labels": {QUEUE: "team", "app": "a"}})
    assert reason == "LabelIgnored"
    assert text == f"metadata.labels has {QUEUE}, which the pods do not get: write spec.scheduling.queue: team"
    assert of({"labels": {QUEUE: "team"}}, scheduling={"queue": "team"}) == []


@pytest.mark.parametrize("kind", ["labels", "annotations"])
def test_what_a_mesh_reads_from_pods_names_the_templates(kind: str) -> None:
    [(reason, text)] = of({kind: {MESH: "false"}})
    assert reason == "LabelIgnored"
    assert f"write it into template.metadata.{kind} of spec.parameterServers, spec.workers" in text
    assert of({kind: {MESH: "false"}}, workers={"template": {"metadata": {kind: {MESH: "false"}}}}) == []


def test_arguments_without_a_command_name_it() -> None:
    [(reason, text)] = of({}, command=[], args=["--lr", "1"])
    assert reason == "ArgsWithoutCommand"
    assert 'write spec.command, such as ["python", "train.py"]' in text


def test_an_ordinary_job_has_no_advice() -> None:
    assert of({"labels": {"app": "a", "team": "b"}, "annotations": {"note": "c"}}, args=["--lr", "1"]) == []
