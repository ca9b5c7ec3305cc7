"""The parts of foreign Kubernetes objects that a TrainingJob carries and that we look into.

A pod template, an environment variable and a volume belong to Kubernetes. The job passes them on unchanged, and the API
server checks them when a pod is created. This module declares only the fields that the operator uses. CEL rules can
read declared fields only, and common mistakes in them are found early. These models are never instantiated: the schema
of the CustomResourceDefinition is made from them. ``extra="allow"`` keeps other fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

__all__ = ["Anything", "EnvFrom", "EnvVar", "Free", "PodTemplate", "Shape", "Volume"]

Free: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Marks a free-form field in `types` with the model whose schema it gets."""

    model: type[BaseModel]


class Anything(BaseModel):
    """A value of any kind, kept as it is."""

    model_config = ConfigDict(extra="allow")


AnyValue: TypeAlias = Annotated[Any, Shape(Anything)]

Quantity: TypeAlias = int | str
"""An amount, such as 2, "500m" or "4Gi"."""


class OpenModel(BaseModel):
    """An object that has other fields too, which are kept."""

    model_config = ConfigDict(extra="allow", alias_generator=to_camel, use_attribute_docstrings=True)


class ClosedModel(BaseModel):
    """An object that has no other fields."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, use_attribute_docstrings=True)


class EnvVar(ClosedModel):
    """An environment variable, as in a container."""

    name: str
    """Name of the variable. The prefix `BACKSTAY_` is reserved."""

    value: str | None = None
    """Value of the variable. Numbers and booleans must be quoted."""

    value_from: Annotated[Free | None, Shape(OpenModel)] = None
    """Source of the value (EnvVarSource)."""


class EnvFrom(OpenModel):
    """A source of environment variables (EnvFromSource)."""


class Volume(OpenModel):
    """A Volume without its name."""

    name: str | None = None
    """Must be absent, because the operator names the volume."""

    empty_dir: Annotated[Free | None, Shape(OpenModel)] = None
    """Must be absent, because an emptyDir belongs to one pod and is deleted with the pod."""


class Resources(OpenModel):
    """Requests and limits of a container (ResourceRequirements)."""

    requests: dict[str, Quantity] | None = None
    """Free resources that the node must have, such as `cpu: 500m` and `memory: 4Gi`."""

    limits: dict[str, Quantity] | None = None
    """The most that the container may use, such as `nvidia.com/gpu: 1`."""


class Container(OpenModel):
    """A container of a pod template (Container)."""

    name: str
    """`trainer` changes the container that trains. Another name adds a container."""

    image: str | None = None
    """Image of this container."""

    command: list[str] | None = None
    """Command of this container."""

    args: list[str] | None = None
    """Arguments of this container."""

    env: Annotated[list[Free] | None, Shape(EnvVar)] = None
    """Environment variables of this container."""

    resources: Annotated[Free | None, Shape(Resources)] = None
    """Resources of this container, such as `limits: {nvidia.com/gpu: 1}`."""

    volume_mounts: AnyValue = None
    """Mounts of this container."""

    security_context: AnyValue = None
    """Security context of this container."""


class PodSpec(OpenModel):
    """The spec of a pod template (PodSpec). Fields that are not listed here are kept too."""

    restart_policy: Literal["Never"] | None = None
    """Only `Never`, because the operator replaces pods, and the kubelet must not restart them."""

    containers: Annotated[list[Free] | None, Shape(Container)] = None
    """Containers that the operator merges by name into those that it builds."""

    # Declared so that a change of one of them is detected. CEL treats two objects as equal if they differ only in the
    # *name* of an undeclared field.
    init_containers: AnyValue = None
    """Containers that run before the other containers."""

    volumes: AnyValue = None
    """Volumes."""

    node_selector: AnyValue = None
    """Labels that a node must have."""

    affinity: AnyValue = None
    """Affinity."""

    tolerations: AnyValue = None
    """Tolerations."""

    topology_spread_constraints: AnyValue = None
    """How to spread over zones and nodes."""

    service_account_name: AnyValue = None
    """Service account."""

    security_context: AnyValue = None
    """Security context of the pod."""

    image_pull_secrets: AnyValue = None
    """Secrets to pull images with."""

    runtime_class_name: AnyValue = None
    """Runtime class."""

    termination_grace_period_seconds: AnyValue = None
    """Seconds between SIGTERM and SIGKILL."""


class TemplateMeta(OpenModel):
    """The metadata of a pod template."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels. The prefix `backstay.dev/` is reserved."""

    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations."""


class PodTemplate(ClosedModel):
    """A PodTemplateSpec."""

    metadata: Annotated[Free | None, Shape(TemplateMeta)] = None
    """Labels and annotations of the pods."""

    spec: Annotated[Free | None, Shape(PodSpec)] = None
    """Spec of the pods, merged strategically over what the operator builds."""
