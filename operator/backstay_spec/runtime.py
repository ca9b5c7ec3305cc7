"""The configuration of a pod, which is the part of a TrainingJob's spec that the training runtime needs.

The operator serialises one `RuntimeConfig` into `BACKSTAY_CONFIG` of every pod. Values that may change while a job runs
are sent again on the control channel (O8). The environment has only their first values.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

GradientCodec: TypeAlias = Literal["Exact", "BFloat16", "Int8", "Int4"]
ParameterCodec: TypeAlias = Literal["Exact", "BFloat16"]
UpdateMode: TypeAlias = Literal["Sync", "Async"]
Weighting: TypeAlias = Literal["Equal", "Examples"]
ContinueFrom: TypeAlias = Literal["SameJob", "Any"]
BestMode: TypeAlias = Literal["Max", "Min"]


class BestConfig(BaseModel):
    """Which checkpoint is kept as the best one."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    metric: str = Field(min_length=1)
    mode: BestMode


class CheckpointConfig(BaseModel):
    """Where and how often checkpoints are written."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    uri: str
    every_steps: int | None = Field(default=None, ge=1)
    every_seconds: float | None = Field(default=None, gt=0)
    keep: int = Field(default=3, ge=1)
    keep_best: BestConfig | None = None
    continue_from: ContinueFrom = "SameJob"


class WireConfig(BaseModel):
    """How tensors are encoded on the wire."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    gradients: GradientCodec = "Exact"
    parameters: ParameterCodec = "Exact"
    error_feedback: bool | None = None  # None: with local steps


class RuntimeConfig(BaseModel):
    """The job's settings for the runtime. Unknown fields are ignored: an older trainer runs under a newer operator."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    shards: int = Field(ge=1)
    workers: int = Field(ge=1)
    pods_per_rank: int = Field(default=1, ge=1)
    mode: UpdateMode = "Sync"
    backups: int | str = 0  # a number, or whole percents such as "5%": see `backstay_spec.quorum.backups_of`
    grace_seconds: float | None = Field(default=0.0, ge=0)  # None: `Auto`
    weighting: Weighting = "Equal"
    max_non_finite: int = Field(default=3, ge=1)
    max_staleness: int | None = Field(default=None, ge=0)
    staleness_damping: bool = False
    overlap: bool = False
    wire: WireConfig = Field(default_factory=WireConfig)
    stall_seconds: float = Field(default=300, gt=0)
    standbys: int = Field(default=0, ge=0, le=1)
    evaluator: bool = False
    checkpoint: CheckpointConfig | None = None
    trace_megabytes: int = Field(default=16, ge=0)
    log_format: Literal["text", "json"] = "text"


class Trained(BaseModel):
    """The end of training, which a worker that was created afterwards needs to return from `train`.

    Attributes:
        step: how many updates were applied.
        checkpoint: the manifest of the last one.
        metrics: the metrics of the last evaluation; empty if there was none.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int = Field(ge=0)
    checkpoint: str = Field(min_length=1)
    metrics: dict[str, float] = Field(default_factory=dict)
