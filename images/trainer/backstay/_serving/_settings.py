"""The ports, bounds and deadlines of a serving process, and the environment variables that replace arguments."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from backstay_spec.whole import set_whole

from ..errors import ConfigurationError

__all__ = ["VARIABLES", "ServingPorts", "ServingSettings"]

_T = TypeVar("_T", int, float)

VARIABLES: Final = {
    "BACKSTAY_SERVE_CHECKPOINT": "the checkpoint folder, or one manifest; replaces `checkpoint`",
    "BACKSTAY_SERVE_NAME": "the name of the model; replaces `name`",
    "BACKSTAY_SERVE_STEP": "the step to serve, without following newer ones; replaces `step`",
    "BACKSTAY_SERVE_FOLLOW": "`false`: serve the checkpoint that is the newest one at the start, until the end",
    "BACKSTAY_SERVE_BIND": "the address of both ports; replaces `ServingPorts.bind`",
    "BACKSTAY_SERVE_HTTP_PORT": "the port of HTTP; replaces `ServingPorts.http`",
    "BACKSTAY_SERVE_GRPC_PORT": "the port of gRPC; replaces `ServingPorts.grpc`",
    "BACKSTAY_SERVE_TOKEN_FILE": "a file with a token, which clients must send as `Authorization: Bearer`",
    "BACKSTAY_SERVE_DRAIN_SECONDS": "how long the process answers new requests after SIGTERM",
}
"""The environment variables of a serving process, with their meaning."""

_ANY: Final = "0.0.0.0"  # noqa: S104  # a pod's ports are for the Service
_LOCAL: Final = "127.0.0.1"
_LAST_PORT: Final = 65535
_LAST_STEP: Final = 10**12


@dataclass(frozen=True)
class ServingPorts:
    """The address and ports where `serve` listens.

    Attributes:
        http: the port of HTTP, for requests, probes and metrics; 0: any free port.
        grpc: the port of gRPC; 0: any free port.
        bind: the address to listen on. By default all addresses in a pod of Kubernetes, and 127.0.0.1 elsewhere.

    Raises:
        ConfigurationError: a port is not a whole number from 0 to 65535, or `bind` is not a text.
    """

    http: int = 8080
    grpc: int = 8081
    bind: str | None = None

    def __post_init__(self) -> None:
        set_whole(self, "http", "grpc")
        _require_whole("ServingPorts.http", self.http, _LAST_PORT)
        _require_whole("ServingPorts.grpc", self.grpc, _LAST_PORT)
        if self.bind is not None and not isinstance(self.bind, str):
            raise ConfigurationError(f"ServingPorts.bind is {self.bind!r:.100}: must be an address as a text, or None")


def _require_whole(name: str, value: object, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= highest:
        raise ConfigurationError(f"{name} is {value!r:.100}: must be a whole number from 0 to {highest}")


_OF_SERVICE: Final = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_ADDRESSES: Final = ("tcp://", "udp://", "sctp://")


def _is_of_service(key: str, value: str) -> bool:
    """Returns whether Kubernetes sets this variable because of a Service.

    https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
    """
    if value.startswith(_ADDRESSES):
        return True
    return key not in VARIABLES and _OF_SERVICE.fullmatch(key) is not None


@dataclass(frozen=True)
class ServingSettings:
    """All numbers of a serving process; times are in seconds. Its constructor raises `ConfigurationError`.

    Attributes:
        name: the model's name in URLs.
        step: the step to serve; None: the newest one.
        follow: whether newer checkpoints replace the served one.
        token: what clients must send; None: nothing.
        ports: see `ServingPorts`.
        drain: how long the process answers new requests after SIGTERM, so that the load balancer can remove it.
        finish: how long requests that were accepted, and the preparation of a checkpoint, may take after that.
        look: the interval at which the checkpoint folder is listed.
        retry: the pause before a checkpoint that could not be loaded is read again. It doubles, up to 600 s, or to
            60 s after an error of the storage.
        patience: how long a request may wait for its answer.
        stuck: a batch that takes longer than this makes the process not live, and the kubelet restarts it.
        head, receive, send: the time for a client to send the head of a request, its body, and to read the answer.
        idle: how long a connection without a request stays open.
        queued_batches: full batches that may wait. Further requests are refused with 429.
        connections: open connections of HTTP, and concurrent calls of gRPC.
        receiving: bytes of all bodies that are being received at the same time, or those of the largest valid request.
    """

    name: str = "model"
    step: int | None = None
    follow: bool = True
    token: str | None = field(default=None, repr=False)
    ports: ServingPorts = ServingPorts()
    drain: float = 5.0
    finish: float = 20.0
    look: float = 1.0
    retry: float = 30.0
    patience: float = 30.0
    stuck: float = 60.0
    head: float = 10.0
    receive: float = 20.0
    send: float = 20.0
    idle: float = 75.0
    queued_batches: int = 32
    connections: int = 1000
    receiving: int = 256 << 20

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"name is {self.name!r:.100}: must be a text that is not empty")
        set_whole(self, "step")
        if self.step is not None:
            _require_whole("step", self.step, _LAST_STEP)
        if not isinstance(self.ports, ServingPorts):
            raise ConfigurationError(f"ports is {self.ports!r:.100}: must be backstay.ServingPorts(http=..., grpc=...)")

    @property
    def bind(self) -> str:
        """The address to listen on."""
        return self.ports.bind or (_ANY if "KUBERNETES_SERVICE_HOST" in os.environ else _LOCAL)

    def with_environment(self, environment: Mapping[str, str]) -> ServingSettings:
        """These settings, with what the variables of `VARIABLES` replace.

        Raises:
            ConfigurationError: a variable has an invalid value, or is unknown.
        """
        # Kubernetes sets such variables for a Service whose name begins with backstay-serve.
        environment = {key: value for key, value in environment.items() if not _is_of_service(key, value)}
        unknown = next((key for key in environment if key.startswith("BACKSTAY_SERVE_") and key not in VARIABLES), None)
        if unknown is not None:
            raise ConfigurationError(f"{unknown} is not a variable of a serving process: {', '.join(VARIABLES)} are")

        def number(key: str, highest: int, kind: Callable[[str], _T], what: str = "a whole number") -> _T | None:
            text = environment.get(key)
            if text is None:
                return None
            with contextlib.suppress(ValueError):
                value = kind(text)
                if 0 <= value <= highest:
                    return value
            raise ConfigurationError(f"{key} is {text!r:.100}: must be {what} from 0 to {highest}")

        settings, ports = self, self.ports
        if (name := environment.get("BACKSTAY_SERVE_NAME")) is not None:
            settings = replace(settings, name=name)
        if (step := number("BACKSTAY_SERVE_STEP", _LAST_STEP, int)) is not None:
            settings = replace(settings, step=step)
        if (follow := environment.get("BACKSTAY_SERVE_FOLLOW")) is not None:
            if follow not in ("true", "false"):
                raise ConfigurationError(f"BACKSTAY_SERVE_FOLLOW is {follow!r}: must be true or false")
            settings = replace(settings, follow=follow == "true")
        if (drain := number("BACKSTAY_SERVE_DRAIN_SECONDS", 3600, float, "a number")) is not None:
            settings = replace(settings, drain=drain)
        if (file := environment.get("BACKSTAY_SERVE_TOKEN_FILE")) is not None:
            settings = replace(settings, token=_token(file))
        if (bind := environment.get("BACKSTAY_SERVE_BIND")) is not None:
            ports = replace(ports, bind=bind)
        if (http := number("BACKSTAY_SERVE_HTTP_PORT", _LAST_PORT, int)) is not None:
            ports = replace(ports, http=http)
        if (grpc := number("BACKSTAY_SERVE_GRPC_PORT", _LAST_PORT, int)) is not None:
            ports = replace(ports, grpc=grpc)
        return replace(settings, ports=ports)


def _token(file: str) -> str:
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"BACKSTAY_SERVE_TOKEN_FILE: {file} cannot be read: {error}") from None
    if not token.isascii() or not token:
        raise ConfigurationError(f"BACKSTAY_SERVE_TOKEN_FILE: {file} must have one line of ASCII text")
    return token
