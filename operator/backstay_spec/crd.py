"""The CustomResourceDefinition of a TrainingJob, generated so that it cannot drift from the models and the rules.

``python -m backstay_spec.crd`` prints it as YAML; `make generate` writes it where the chart and `kubectl apply`
find it.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from backstay_spec.contract import GROUP, KIND, PLURAL, SHORT_NAME, SINGULAR, VERSION
from backstay_spec.crd_schema import openapi_schema
from backstay_spec.crd_yaml import to_yaml

__all__ = ["build_crd", "main"]


def _column(name: str, kind: str, path: str, description: str, priority: int = 0) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    if priority:
        column["priority"] = priority
    return column


def build_crd() -> dict[str, Any]:
    """Returns the CustomResourceDefinition as JSON for ``apiextensions.k8s.io/v1``; the caller owns it."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [
            _column("Phase", "string", ".status.phase", "Where the job is in its life"),
            _column("Step", "integer", ".status.step", "Updates applied"),
            _column("Examples/s", "number", ".status.examplesPerSecond", "Examples trained on per second"),
            _column("Workers", "string", ".status.workers", "Workers ready/desired"),
            _column("Loss", "number", ".status.loss", "Loss of the newest update", priority=1),
            _column("Mode", "string", ".spec.update.mode", "How gradients become updates", priority=1),
            _column("Age", "date", ".metadata.creationTimestamp", "Time since the job was created"),
        ],
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.workers.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "schema": {"openAPIV3Schema": openapi_schema()},
    }
    crd: dict[str, Any] = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["all", "backstay"],
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }
    return copy.deepcopy(crd)


def main() -> None:
    """Prints the CustomResourceDefinition as YAML."""
    sys.stdout.write("# Generated from operator/backstay_spec by `make generate`; do not edit.\n")
    sys.stdout.write(to_yaml(build_crd()))


if __name__ == "__main__":
    main()
