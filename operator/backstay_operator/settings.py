"""The operator's options, and the settings of Kopf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import kopf

from backstay_operator.rights import LEASE_NAME, LEASES, NETWORK_POLICIES, PODS, SERVICES
from backstay_spec import contract


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        kubeconfig: path of a kubeconfig; None: the pod's own service account.
        namespace: the one namespace to watch; None: all of them.
        operator_namespace: the operator's namespace; each job's NetworkPolicy admits calls from it.
        operator_labels: the labels of the operator's pods there; empty: any pod of that namespace.
        key_file: the file with the operator's key, from which the jobs' tokens are derived.
        bind: address of the HTTP port.
        metrics_port: HTTP port of /metrics, /healthz and /readyz; 0 selects a free port.
        log_format: the format of the log lines on stderr.
        log_level: the level of the operator's log lines; Kopf's lines are shown from WARNING on.
        die_with_parent: stop when the process that started this one has ended.
        parallel: the number of jobs that are reconciled at the same time.
        verify_seconds: seconds between two comparisons of the watches with a list.
    """

    kubeconfig: str | None = None
    namespace: str | None = None
    operator_namespace: str = "default"
    operator_labels: Mapping[str, str] = field(default_factory=dict)
    key_file: str | None = None
    bind: str = "0.0.0.0"  # noqa: S104  the port of a pod; the chart's NetworkPolicy and `--bind` restrict it
    metrics_port: int = 8080
    log_format: Literal["text", "json"] = "text"
    log_level: str = "INFO"
    die_with_parent: bool = False
    parallel: int = 32
    verify_seconds: float = 300.0

    @property
    def lease_namespace(self) -> str:
        """Returns the namespace of the Lease, which is the same for all operators that watch one namespace."""
        return self.namespace or self.operator_namespace


class Patience:
    """Delays between tries without an end, because Kopf must wait and not end while the API server does not answer.

    Kopf starts a new iteration for each request; a finite list would end the operator after its last element.
    """

    def __init__(self, *first: float, then: float) -> None:
        self._first = first
        self._then = then

    def __iter__(self) -> Iterator[float]:
        yield from self._first
        while True:
            yield self._then


class NoState(kopf.DiffBaseStorage, kopf.ProgressStorage):
    """A storage that stores nothing in objects and reads nothing from them.

    At each event, Kopf requests the part of the object that its handlers may compare. Its own storages copy the whole
    object twice for that, which is almost half of the time of an event. They also fail for an object that is nested
    deeper than Python's stack allows, and the operator's handlers would never receive that object.
    """

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        """Returns the part of an object that Kopf may compare: nothing."""
        return kopf.BodyEssence({})

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Returns `essence`, which has none of Kopf's own fields."""
        return essence

    def fetch(self, **_: Any) -> None:
        """Returns None, because no value is stored."""

    def store(self, **_: Any) -> None:
        """Store nothing."""

    def purge(self, **_: Any) -> None:
        """Remove nothing."""

    def touch(self, **_: Any) -> None:
        """Change nothing."""


def kopf_settings() -> kopf.OperatorSettings:
    """Settings that make Kopf a source of events only: it writes nothing to any object."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    # Namespaces and CRDs would have to be readable cluster-wide. The operator waits for its CRD by discovery instead.
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None

    # The server ends a watch after this time. A dead connection is detected by missing bookmarks (one a minute).
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

    # Kopf has one worker for each object with events; this operator's handlers take only microseconds.
    settings.queueing.worker_limit = None
    settings.queueing.idle_timeout = 1.0
    settings.queueing.exit_timeout = 1.0

    # No handler of this operator keeps state in objects, and none needs a finalizer.
    settings.persistence.finalizer = f"{contract.ANNOTATION_PREFIX}/finalizer"
    settings.persistence.progress_storage = settings.persistence.diffbase_storage = NoState()
    return settings
