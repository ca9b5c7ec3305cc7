"""The pods that the node's scheduler refuses or binds."""

from __future__ import annotations

from decimal import Decimal

import pytest

from backstay_cluster.kubelet.scheduler import unschedulable_reason

LABELS = {"kubernetes.io/os": "linux", "zone": "a", "n": "5"}
NODE = {"cpu": "2", "memory": "4Gi", "pods": "3", "nvidia.com/gpu": "2"}
GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}


def pod(**spec) -> dict:
    return {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", **spec.pop("container", {})}], **spec}}


def affinity(*expressions) -> dict:
    terms = {"nodeSelectorTerms": [{"matchExpressions": list(expressions)}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}


@pytest.mark.parametrize(
    ("spec", "used", "reason"),
    [
        ({}, {}, None),
        # The same job runs on a laptop, slower: shared resources are not counted.
        ({"container": {"resources": {"requests": {"cpu": "64", "memory": "1Ti"}}}}, {}, None),
        ({"container": {"resources": {"limits": {"nvidia.com/gpu": "2"}}}}, {}, None),
        (
            {"container": {"resources": {"limits": {"nvidia.com/gpu": "2"}}}},
            {"nvidia.com/gpu": 1},
            "Insufficient nvidia",
        ),
        # A sidecar keeps its devices beside the containers that start after it. An init container has ended before.
        ({"container": GPU, "initContainers": [{"name": "s", "restartPolicy": "Always", **GPU}]}, {}, None),
        (
            {"container": GPU, "initContainers": [{"name": "s", "restartPolicy": "Always", **GPU}]},
            {"nvidia.com/gpu": 1},
            "Insufficient nvidia",
        ),
        ({"container": GPU, "initContainers": [{"name": "i", **GPU}]}, {"nvidia.com/gpu": 1}, None),
        ({"container": {"resources": {"limits": {"example.org/tpu": 1}}}}, {}, "1 Insufficient example.org/tpu"),
        ({}, {"pods": 3}, "Too many pods"),
        ({"nodeSelector": {"zone": "a"}}, {}, None),
        ({"nodeSelector": {"zone": "b"}}, {}, "node affinity/selector"),
        (affinity({"key": "zone", "operator": "In", "values": ["a", "b"]}), {}, None),
        (affinity({"key": "zone", "operator": "NotIn", "values": ["a"]}), {}, "node affinity/selector"),
        (affinity({"key": "gone", "operator": "Exists"}), {}, "node affinity/selector"),
        (affinity({"key": "gone", "operator": "DoesNotExist"}), {}, None),
        (affinity({"key": "n", "operator": "Gt", "values": ["4"]}), {}, None),
        (affinity({"key": "zone", "operator": "Lt", "values": ["4"]}), {}, "node affinity/selector"),
    ],
)
def test_why_not(spec, used, reason):
    found = unschedulable_reason(pod(**spec), LABELS, NODE, {name: Decimal(value) for name, value in used.items()})
    if reason is None:
        assert found is None
    else:
        assert reason in found
        assert found.startswith("0/1 nodes are available: ")
