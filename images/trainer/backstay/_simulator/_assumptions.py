"""Defines the assumptions of a simulation, which a TrainingJob does not state, such as times, sizes and rates."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

__all__ = [
    "Assumptions",
    "CheckpointAssumptions",
    "CostAssumptions",
    "FailureAssumption",
    "ModelAssumptions",
    "NetworkAssumptions",
    "NodeAssumptions",
    "OperatorAssumptions",
    "PriceAssumptions",
    "StartAssumption",
    "StartAssumptions",
    "StepAssumptions",
]

Seconds: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Assumed(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        alias_generator=to_camel,
        use_attribute_docstrings=True,
    )


class StepAssumptions(_Assumed):
    """The steps of a worker."""

    seconds: Seconds = 1.0
    """The median time of one step's computation, in seconds."""

    sigma: Number = 0.05
    """The spread of a step's time, as the standard deviation of its logarithm."""

    machine_sigma: Number = 0.03
    """The spread between machines. A pod keeps its factor until it ends."""

    factors: dict[int, Rate] = Field(default_factory=dict)
    """rank -> the factor of its steps' time, in place of a drawn one."""

    processor_seconds: Seconds = 0.0
    """The part of a step's time in which it uses a processor of its node. The rest is spent on an accelerator."""

    data_seconds: Seconds = 0.0
    """How long a step waits for its batch."""

    pauses_per_hour: Number = 0.0
    """How often a worker pauses, in an hour of its computation."""

    pause_seconds: Seconds = 10.0
    """The mean length of a pause. The lengths have an exponential distribution."""

    examples: Number = 32.0
    """The examples of one step of one worker."""

    local_steps: Annotated[int, Field(ge=1)] = 1
    """Steps between two updates (`backstay.LocalSteps(count=...)`)."""

    fragments: Annotated[int, Field(ge=1)] = 1
    """Fragments of local steps. An update exchanges one of them."""


class ModelAssumptions(_Assumed):
    """The sizes of the model."""

    bytes: Number = 100e6
    """The bytes of the parameters, in float32."""

    exact_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of the parameters in small leaves, which no codec encodes."""

    state_factor: Annotated[float, Field(ge=1)] = 3.0
    """The bytes of a server's state for each byte of parameters, which are 3 with Adam and 1 with plain SGD."""


class NetworkAssumptions(_Assumed):
    """The network interfaces of the pods. Streams share an interface equally, in each direction."""

    gigabits_per_second: Rate = 10.0
    """The rate of a pod's interface in each direction."""

    latency_seconds: Seconds = 0.0002
    """The time of a small message."""


class CostAssumptions(_Assumed):
    """Processor time of the runtime. The defaults are measured with `bench/wire.py`."""

    contribution_seconds: Seconds = 0.0004
    """A server's fixed time for each contribution that it receives."""

    receive_bytes_per_second: Rate = 4e9
    """The rate at which a processor of a server receives contributions."""

    add_bytes_per_second: Rate = 6e9
    """The rate at which a server adds contributions."""

    update_seconds: Seconds = 0.0008
    """A server's fixed time for an update."""

    apply_bytes_per_second: Rate = 2e9
    """The rate at which a server computes new parameters."""

    answer_seconds: Seconds = 0.0002
    """A server's fixed time for each answer that it sends."""

    send_bytes_per_second: Rate = 4e9
    """The rate at which a processor sends parameters or contributions."""

    exchange_seconds: Seconds = 0.001
    """A worker's fixed time for an exchange, such as reading the gradient from its device."""


class StartAssumption(_Assumed):
    """The start of a pod of one role."""

    seconds: Seconds = 2.0
    """From the node until the process begins its work: pulling an image that is cached, and starting the container."""

    processor_seconds: Seconds = 3.0
    """Processor time until the process joins: importing libraries, reading data."""


class StartAssumptions(_Assumed):
    """How long pods take to start."""

    scheduling_seconds: Seconds = 1.0
    """From the creation of a pod until it has a node."""

    sigma: Number = 0.1
    """The spread of these times, as the standard deviation of their logarithms."""

    worker: StartAssumption = StartAssumption()
    """Workers."""

    server: StartAssumption = StartAssumption()
    """Parameter servers and standbys."""

    compile_seconds: Seconds = 5.0
    """Processor time in which a worker compiles its step before its first parameters arrive."""

    compile_again_seconds: Seconds = 1.0
    """The same for a pod that replaces another one, and finds compiled programs."""

    end_seconds: Seconds = 0.4
    """From the end of training until the process of a worker has ended."""


class NodeAssumptions(_Assumed):
    """The nodes."""

    cores: Rate | None = None
    """The processors of one machine that all pods share, as with `backstay run`; absent: each pod has its own ones."""

    pods: Annotated[int, Field(ge=1)] = 1
    """Pods on a node, which fail together with it."""

    lost_after_seconds: Seconds = 40.0
    """How long after a node's failure the API server reports it."""


class FailureAssumption(_Assumed):
    """One cause of failures. Exactly one of `meanSeconds`, `everySeconds` and `atSeconds` is set."""

    what: Literal["Worker", "ParameterServer", "Standby", "Node"] = "Worker"
    """The kind of pod that fails. `ParameterServer` is an active server. With its node, all pods on a node end."""

    mean_seconds: Rate | None = None
    """The mean time between two failures of one such pod or node. The times have an exponential distribution."""

    every_seconds: Rate | None = None
    """The time between two failures of the whole job, each of one pod or node at random."""

    at_seconds: tuple[Seconds, ...] = ()
    """The times of failures, each of one pod or node at random."""

    notice_seconds: Seconds | None = None
    """The pod is preempted with this notice (SIGTERM); absent: it is killed."""

    together: Annotated[int, Field(ge=1)] = 1
    """How many pods or nodes fail at the same time."""

    begins_seconds: Seconds = 0.0
    """The earliest time of such a failure. The times of `atSeconds` and `everySeconds` begin there."""

    @model_validator(mode="after")
    def _has_one_interval(self) -> Self:
        given = [self.mean_seconds is not None, self.every_seconds is not None, bool(self.at_seconds)]
        if sum(given) != 1:
            raise ValueError("exactly one of meanSeconds, everySeconds and atSeconds must be set")
        return self


class CheckpointAssumptions(_Assumed):
    """The cost of checkpoints."""

    snapshot_bytes_per_second: Rate = 4e9
    """The rate at which a server copies its state. Its updates wait for the copy."""

    write_seconds: Seconds = 0.05
    """The fixed time of a server's files."""

    write_bytes_per_second: Rate = 2e8
    """The rate at which a server writes its files, while updates continue."""

    manifest_seconds: Seconds = 0.05
    """The time of a manifest."""

    read_seconds: Seconds = 0.2
    """The fixed time to read a checkpoint."""

    read_bytes_per_second: Rate = 4e8
    """The rate at which a server reads its state."""


class OperatorAssumptions(_Assumed):
    """The operator."""

    plan_seconds: Seconds = 0.02
    """From a change until the operator has acted on it."""

    pod_seconds: Seconds = 0.0001
    """The operator's processor time for each pod of the job, at each plan."""

    call_seconds: Rate = 2.0
    """The interval of its calls to the servers."""


class PriceAssumptions(_Assumed):
    """The prices of pods, by role, for an hour."""

    worker: Number = 0.0
    """A worker."""

    server: Number = 0.0
    """A parameter server or a standby."""


class Assumptions(_Assumed):
    """All assumptions of a simulation."""

    seconds: Rate = 3600.0
    """The longest simulated time. The simulation ends earlier with the job."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Updates at which training ends; absent: training ends after `seconds`."""

    step: StepAssumptions = StepAssumptions()
    """A worker's steps."""

    model: ModelAssumptions = ModelAssumptions()
    """The model."""

    network: NetworkAssumptions = NetworkAssumptions()
    """The network."""

    costs: CostAssumptions = CostAssumptions()
    """The runtime's processor time."""

    starts: StartAssumptions = StartAssumptions()
    """The start of pods."""

    nodes: NodeAssumptions = NodeAssumptions()
    """The nodes."""

    failures: tuple[FailureAssumption, ...] = ()
    """The failures; absent: nothing fails."""

    checkpoints: CheckpointAssumptions = CheckpointAssumptions()
    """The checkpoints."""

    operator: OperatorAssumptions = OperatorAssumptions()
    """The operator."""

    pod_price_per_hour: PriceAssumptions = PriceAssumptions()
    """The prices."""
