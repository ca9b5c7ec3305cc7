"""Checks the names of the fields that Kubernetes defines: pod templates, and the volume of checkpoints.

The TrainingJob's schema accepts most fields there, because the API server checks pods when the operator creates them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["wrong_fields"]

_PLACES: Final = (
    ("parameterServers.template", "V1PodTemplateSpec"),
    ("workers.template", "V1PodTemplateSpec"),
    ("evaluator.template", "V1PodTemplateSpec"),
    ("checkpoint.volume", "V1Volume"),
)


def wrong_fields(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each field that the embedded API server does not have, and for the first value of a wrong
    type.

    Args:
        spec: the spec of a valid TrainingJob, as it was written.
    """
    from backstay_cluster.apiserver.types import TypeMismatch, decode  # it loads the whole API server

    for place, kind in _PLACES:
        value: Any = spec
        for name in place.split("."):
            value = (value or {}).get(name)
        if not value:
            continue
        try:
            unknown = decode(kind, _without_directives(value))[1]
        except TypeMismatch as error:
            yield f"spec.{place} has a value of a wrong type: {error}"
            continue
        for path in unknown:
            yield f"spec.{place}.{path} is not a field that Kubernetes defines"


def _without_directives(value: Any) -> Any:
    """Returns the value without the directives of a strategic merge, such as `$patch`, which are not fields of a
    pod."""
    if isinstance(value, dict):
        return {k: _without_directives(v) for k, v in value.items() if not str(k).startswith("$")}
    if isinstance(value, list):
        return [_without_directives(v) for v in value]
    return value
