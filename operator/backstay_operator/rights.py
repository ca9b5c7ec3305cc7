"""The operator's rights at the API server (O6).

A test compares the chart's ClusterRole with this table. Another test records every request of a running operator, and
checks that the two sets are the same.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from backstay_spec import contract


class ResourceKind(NamedTuple):
    """A kind of object in the API, with its group ("" for the core), version and plural name."""

    group: str
    version: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Returns the URL path of the collection, one object, or one subresource of it."""
        parts = ["/api" if not self.group else f"/apis/{self.group}", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/".join(parts)


JOBS: Final = ResourceKind(contract.GROUP, contract.VERSION, contract.PLURAL)
PODS: Final = ResourceKind("", "v1", "pods")
SERVICES: Final = ResourceKind("", "v1", "services")
SECRETS: Final = ResourceKind("", "v1", "secrets")
EVENTS: Final = ResourceKind("", "v1", "events")
NETWORK_POLICIES: Final = ResourceKind("networking.k8s.io", "v1", "networkpolicies")
LEASES: Final = ResourceKind("coordination.k8s.io", "v1", "leases")

#: The name of the operator's Lease; the chart restricts the rights on Leases to this name, except for creation.
LEASE_NAME: Final = "backstay-operator"

#: (group, resource or resource/subresource) -> verbs, in the jobs' namespaces (all, or the one in the options).
RIGHTS: Final[dict[tuple[str, str], frozenset[str]]] = {
    (JOBS.group, JOBS.plural): frozenset({"get", "list", "watch", "delete"}),
    (JOBS.group, f"{JOBS.plural}/status"): frozenset({"patch"}),
    (PODS.group, PODS.plural): frozenset({"get", "list", "watch", "create", "delete"}),
    (SERVICES.group, SERVICES.plural): frozenset({"get", "list", "watch", "create", "patch", "delete"}),
    (SECRETS.group, SECRETS.plural): frozenset({"create", "delete"}),
    (NETWORK_POLICIES.group, NETWORK_POLICIES.plural): frozenset({"get", "list", "watch", "create", "delete"}),
    (EVENTS.group, EVENTS.plural): frozenset({"create", "patch"}),
}

#: The same for the operator's own Lease, in the operator's namespace, restricted to its name where the API allows it.
LEASE_RIGHTS: Final[dict[tuple[str, str], frozenset[str]]] = {
    (LEASES.group, LEASES.plural): frozenset({"get", "list", "watch", "create", "update"}),
}

#: Paths that are not objects; every authenticated client may read them (the built-in role `system:discovery`).
DISCOVERY: Final = ("/api", "/apis", "/version")
