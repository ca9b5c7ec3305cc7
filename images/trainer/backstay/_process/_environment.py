"""Reads a pod's environment variables; their names are those of `backstay_spec.contract`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from backstay_rpc.control_pb2 import Peer
from backstay_rpc.credentials import Credentials
from backstay_spec import contract
from backstay_spec.runtime import RuntimeConfig, Trained

from .._timeouts import Timeouts, current
from ..errors import ConfigurationError

__all__ = ["Environment"]

_ROLES = (contract.ROLE_SERVER, contract.ROLE_WORKER, contract.ROLE_EVALUATOR)


@dataclass(frozen=True)
class Environment:
    """A pod of a job.

    Attributes:
        index: shard, rank, or 0.
        servers: ``host:port`` of each shard's control service.
        bind: the address to listen on.
        active: the incarnation of its shard's active server when the pod was created; 0: unknown.
        pod_ip: what other pods connect to.
        checkpoint_uri: where checkpoints are; None when none are stored.
        trained: how training ended, in a worker that was created afterwards; None in every other pod.
        timeouts: every deadline and interval of the pod.
        namespace, uid: the job's namespace and uid; each run of the job has another uid.
        keep: a folder of this pod that outlives it; None: there is none.
        most_steps: the most updates that `train` makes, in a dry run; None: it makes all.
        member: the index of a worker's pod inside its rank.
    """

    job: str
    role: str
    index: int
    incarnation: int
    servers: tuple[str, ...]
    port: int
    data_port: int
    metrics_port: int
    bind: str
    pod_name: str
    pod_ip: str
    credentials: Credentials
    config: RuntimeConfig
    checkpoint_uri: str | None
    termination_log: Path | None
    active: int = 0
    trained: Trained | None = None
    timeouts: Timeouts = field(default_factory=current)
    namespace: str = "default"
    uid: str = ""
    keep: Path | None = None
    most_steps: int | None = None
    member: int = 0

    @property
    def standby(self) -> bool:
        """Whether this pod was created as the standby of its shard."""
        return self.role == contract.ROLE_SERVER and self.config.standbys > 0 and 0 < self.active < self.incarnation

    @property
    def name(self) -> str:
        """The name of the pod's slot, such as ``worker-3``, or ``worker-3.1`` where a rank has several pods."""
        of_several = self.members > 1
        return f"{self.role}-{self.index}.{self.member}" if of_several else f"{self.role}-{self.index}"

    @property
    def members(self) -> int:
        """The number of pods of this pod's rank; 1 for the pods of all other roles."""
        return self.config.pods_per_rank if self.role == contract.ROLE_WORKER else 1

    @property
    def peer(self) -> Peer:
        """This pod, as it names itself to other pods."""
        return Peer(
            role=self.role, index=self.index, incarnation=self.incarnation, pod=self.pod_name, member=self.member
        )

    @property
    def short_uid(self) -> str:
        """The first eight digits of the job's uid, for names of files."""
        return self.uid.replace("-", "")[:8]

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Environment | None:
        """Returns the environment of this pod; None outside of a job.

        Raises:
            ConfigurationError: a variable is missing or malformed; the message names it.
        """
        if contract.ENV_ROLE not in variables:
            return None

        def text(name: str, default: str | None = None) -> str:
            value = variables.get(name, default)
            if value is None:
                raise ConfigurationError(f"{contract.ENV_ROLE} is set but {name} is not: a job's pod has both")
            return value

        def number(name: str, default: int | None = None) -> int:
            value = text(name, None if default is None else str(default))
            if not (value.isascii() and value.isdigit()):
                raise ConfigurationError(f"{name} is {value!r}: must be a whole number of 0 or more")
            return int(value)

        role = text(contract.ENV_ROLE)
        if role not in _ROLES:
            raise ConfigurationError(f"{contract.ENV_ROLE} is {role!r}: must be one of {', '.join(_ROLES)}")
        try:
            config = RuntimeConfig.model_validate_json(text(contract.ENV_CONFIG))
        except ValidationError as error:
            why = f"{contract.ENV_CONFIG} is not a runtime configuration: {_first_of(error)}"
            raise ConfigurationError(why) from None
        trained: Trained | None = None
        if ended := variables.get(contract.ENV_TRAINED):
            try:
                trained = Trained.model_validate_json(ended)
            except ValidationError as error:
                raise ConfigurationError(
                    f"{contract.ENV_TRAINED} is not the result of a training: {_first_of(error)}"
                ) from None
        # The operator wrote all of these, so a contradiction comes from another version of it.
        servers = tuple(part for part in text(contract.ENV_SERVERS).split(",") if part)
        if len(servers) != config.shards:
            raise ConfigurationError(
                f"{contract.ENV_SERVERS} names {len(servers)} servers, the job has {config.shards} shards"
            )
        index = number(contract.ENV_INDEX)
        if role == contract.ROLE_SERVER and index >= config.shards:
            raise ConfigurationError(f"{contract.ENV_INDEX} is {index}: the job has shards 0 to {config.shards - 1}")
        member = number(contract.ENV_MEMBER, 0)
        if member >= (config.pods_per_rank if role == contract.ROLE_WORKER else 1):
            raise ConfigurationError(
                f"{contract.ENV_MEMBER} is {member}: a rank of the job has {config.pods_per_rank} pods, and every "
                "other role has one"
            )
        token = text(contract.ENV_TOKEN)
        if not token:
            raise ConfigurationError(f"{contract.ENV_TOKEN} is empty: a job without a token would accept any caller")
        log = variables.get(contract.ENV_TERMINATION_LOG)
        bind = variables.get(contract.ENV_BIND)
        return cls(
            job=text(contract.ENV_JOB, "job"),
            role=role,
            index=index,
            incarnation=number(contract.ENV_INCARNATION, 0),
            servers=servers,
            port=number(contract.ENV_PORT, contract.PORT_CONTROL),
            data_port=number(contract.ENV_DATA_PORT, contract.PORT_DATA),
            metrics_port=number(contract.ENV_METRICS_PORT, contract.PORT_METRICS),
            bind=bind or "0.0.0.0",  # noqa: S104  # all addresses of the pod's own network
            pod_name=text(contract.ENV_POD_NAME, f"{role}-{index}"),
            pod_ip=variables.get(contract.ENV_POD_IP) or bind or "127.0.0.1",
            credentials=Credentials(token),
            config=config,
            checkpoint_uri=config.checkpoint.uri if config.checkpoint else None,
            termination_log=Path(log) if log else None,
            active=number(contract.ENV_ACTIVE, 0),
            trained=trained,
            namespace=text(contract.ENV_NAMESPACE, "default"),
            uid=text(contract.ENV_JOB_UID, ""),
            keep=Path(keep) if (keep := variables.get(contract.ENV_KEEP)) else None,
            most_steps=number(contract.ENV_MOST_STEPS) if contract.ENV_MOST_STEPS in variables else None,
            member=member,
        )


def _first_of(error: ValidationError) -> str:
    """Returns the first error of a value, with its place."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'the whole'}: {first['msg']}"
