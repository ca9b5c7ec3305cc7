"""Warns of a container whose name looks like a misspelt `trainer`.

A pod template may add containers with other names. But if such a name is similar to that of the container that trains,
it is probably a mistake. The resources, volumes or variables that the template sets would then not apply to training.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, Final

from backstay_spec.contract import CONTAINER
from backstay_spec.types import TrainingJobSpec

__all__ = ["misspelt_containers"]

# "train", "trainr", "trainers" and "trainer-1" are as similar; "training", "tracer" and "container" are not.
_SIMILAR: Final = 0.8


def misspelt_containers(spec: TrainingJobSpec) -> Iterator[str]:
    """Yields a sentence for each container of a template that is probably meant to be the container that trains."""
    templates: tuple[tuple[str, dict[str, Any] | None], ...] = (
        ("parameterServers", spec.parameter_servers.template),
        ("workers", spec.workers.template),
        ("evaluator", spec.evaluator.template if spec.evaluator is not None else None),
    )
    for role, template in templates:
        containers = ((template or {}).get("spec") or {}).get("containers") or []
        for index, container in enumerate(containers):
            name = container["name"]
            if name != CONTAINER and get_close_matches(name, [CONTAINER], cutoff=_SIMILAR):
                yield (
                    f"spec.{role}.template.spec.containers[{index}].name is {name!r}: the pods get another container "
                    f"of that name; to change the container that trains, call it {CONTAINER}"
                )
