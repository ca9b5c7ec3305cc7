"""Warns of valid TrainingJobs that probably do something else than their author means.

`backstay validate` prints the warnings, and the operator sends each as an event when the job starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from backstay_spec import contract
from backstay_spec.events import Event, warning
from backstay_spec.sidecars import misspelt_containers
from backstay_spec.types import ObjectMeta, TrainingJob, TrainingJobSpec

__all__ = ["advice", "args_without_command"]

_OF_PODS: Final = (
    "kueue.x-k8s.io/",
    "sidecar.istio.io/",
    "istio.io/",
    "linkerd.io/",
    "volcano.sh/",
    "scheduling.volcano.sh/",
    "scheduling.x-k8s.io/",
    "yunikorn.apache.org/",
    "cluster-autoscaler.kubernetes.io/",
    "karpenter.sh/",
    "prometheus.io/",
    "vault.hashicorp.com/",
    "k8s.aliyun.com/",
)
"""Prefixes of labels and annotations that queues, schedulers, meshes and other controllers read from pods."""


def advice(job: TrainingJob) -> Iterator[Event]:
    """Yields an event for each doubtful part of a valid job."""
    for text in misspelt_containers(job.spec):
        yield warning("UnusualContainerName", text)
    for text in args_without_command(job.spec):
        yield warning("ArgsWithoutCommand", text)
    for text in _ignored(job.metadata, job.spec):
        yield warning("LabelIgnored", text)


def args_without_command(spec: TrainingJobSpec) -> Iterator[str]:
    """Yields a sentence about arguments that replace the command of the trainer image."""
    if spec.args and not spec.command:
        yield (
            "spec.args without spec.command replaces the command of the image, unless the image has an entrypoint. The "
            'image of Backstay has none: write spec.command, such as ["python", "train.py"]'
        )


def _ignored(metadata: ObjectMeta, spec: TrainingJobSpec) -> Iterator[str]:
    """Yields a sentence for each label or annotation of the job that only has an effect on pods.

    The pods have the labels and annotations of their templates, and not those of the job.
    """
    evaluator = None if spec.evaluator is None else spec.evaluator.template
    given_templates = (spec.parameter_servers.template, spec.workers.template, evaluator)
    templates = [(template or {}).get("metadata") or {} for template in given_templates]
    for kind, given in (("labels", metadata.labels), ("annotations", metadata.annotations)):
        for name in sorted(given):
            if not name.startswith(_OF_PODS) or any(name in (one.get(kind) or {}) for one in templates):
                continue
            if name == contract.LABEL_QUEUE and spec.scheduling.queue is not None:
                continue
            yield f"metadata.{kind} has {name}, which the pods do not get: {_instead(name, kind, given)}"


def _instead(name: str, kind: str, given: Mapping[str, Any]) -> str:
    if name == contract.LABEL_QUEUE:
        return f"write spec.scheduling.queue: {given[name]}"
    return f"write it into template.metadata.{kind} of spec.parameterServers, spec.workers and spec.evaluator"
