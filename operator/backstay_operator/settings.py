"""How the operator is run, and how Kopf is set up for production."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import kopf

from backstay_operator.rights import LEASE_NAME, LEASES, NETWORK_POLICIES, PODS, SERVICES
from backstay_spec import contract


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        kubeconfig: path of a kubeconfig; None: the pod's own service account.
        namespace: the one namespace to serve; None: all of them.
        operator_namespace: where the operator itself runs; each job's NetworkPolicy lets its calls in.
        operator_labels: the labels of the operator's pods there; empty: any pod of that namespace.
        key_file: holds the operator's key, from which the jobs' tokens are made.
        bind: address of the HTTP port.
        metrics_port: HTTP port of /metrics, /healthz and /readyz; 0 takes a free one.
        log_format: of the log lines on stderr.
        log_level: of our own log lines; Kopf's are shown from WARNING on.
        die_with_parent: stop when the process that started this one is gone.
        parallel: how many jobs are reconciled at once.
        verify_seconds: how often the watches are compared with a list.
    """

    kubeconfig: str | None = None
    namespace: str | None = None
    operator_namespace: str = "default"
    operator_labels: Mapping[str, str] = field(default_factory=dict)
    key_file: str | None = None
    bind: str = "0.0.0.0"  # noqa: S104  a pod's port; the chart's NetworkPolicy and `--bind` narrow it
    metrics_port: int = 8080
    log_format: Literal["text", "json"] = "text"
    log_level: str = "INFO"
    die_with_parent: bool = False
    parallel: int = 32
    verify_seconds: float = 300.0

    @property
    def lease_namespace(self) -> str:
        """Where the Lease is: two operators for one namespace must meet there, whichever namespaces they run in."""
        return self.namespace or self.operator_namespace


class Patience:
    """Delays between tries, without end: while the API server is away, Kopf must wait and not give up.

    Kopf iterates over it anew for each request; a finite list would end the operator when it is used up.
    """

    def __init__(self, *first: float, then: float) -> None:
        self._first = first
        self._then = then

    def __iter__(self) -> Iterator[float]:
        yield from self._first
        while True:
            yield self._then


class NoState(kopf.DiffBaseStorage, kopf.ProgressStorage):
    """Nothing is stored in objects, so nothing is read from them.

    Kopf asks at each event for the part of the object that its handlers may compare. Its own storages copy the whole
    object for that, twice, which is almost half of the time that an event takes. And an object that is nested deeper
    than Python's stack allows would never reach our handlers.
    """

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        """Of an object that Kopf may compare: nothing."""
        return kopf.BodyEssence({})

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Of `essence` without Kopf's own fields: all of it, as there are none."""
        return essence

    def fetch(self, **_: Any) -> None:
        """What was stored in an object: nothing."""

    def store(self, **_: Any) -> None:
        """Store nothing."""

    def purge(self, **_: Any) -> None:
        """Remove nothing."""

    def touch(self, **_: Any) -> None:
        """Change nothing."""


def kopf_settings() -> kopf.OperatorSettings:
    """Kopf as a source of events and nothing else: it writes nothing to any object."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    # Namespaces and CRDs would have to be readable cluster-wide; we wait for our CRD by discovery instead.
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None

    # The server ends a watch after this long; a dead connection is noticed by the missing bookmarks (one a minute).
    settings.watching.server_timeout = 600
    settings.watching.client_timeout = 660
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = 90
    settings.watching.reconnect_backoff = 0.1
    settings.watching.chunk_size = 500
    settings.watching.label_selectors[PODS.plural] = contract.LABEL_JOB
    settings.watching.label_selectors[SERVICES.plural] = contract.LABEL_JOB
    settings.watching.label_selectors[NETWORK_POLICIES.plural] = contract.LABEL_JOB
    settings.watching.field_selectors[LEASES.plural] = f"metadata.name={LEASE_NAME}"

    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = Patience(0.1, 0.2, 0.5, 1, 2, then=5)

    # A worker of Kopf's lives for each object with news; ours is a hand-over, done in microseconds.
    settings.queueing.worker_limit = None
    settings.queueing.idle_timeout = 1.0
    settings.queueing.exit_timeout = 1.0

    # No handler of ours keeps state in objects, and none needs a finalizer.
    settings.persistence.finalizer = f"{contract.ANNOTATION_PREFIX}/finalizer"
    settings.persistence.progress_storage = settings.persistence.diffbase_storage = NoState()
    return settings
