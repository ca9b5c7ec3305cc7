"""A container whose name looks like a misspelt `trainer` is reported by an event."""

from __future__ import annotations


def test_a_misspelt_container_is_reported_once(make_cluster):
    """Kubernetes takes it for a side-car, so nothing else says that the resources it sets reach no training."""
    container = {"name": "trainr", "image": "i", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    cluster = make_cluster({"workers": {"template": {"spec": {"containers": [container]}}}})
    cluster.settle()
    cluster.tick(30)
    cluster.settle()
    (text,) = [text for reason, text in cluster.events if reason == "UnusualContainerName"]
    assert "spec.workers.template.spec.containers[0].name is 'trainr'" in text
