"""Prepares a pod for the GPUs that its container requests, so that a template needs nothing but the limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from backstay_spec import contract

__all__ = ["gpus_of", "prepare"]

_PREFIX: Final = "nvidia.com/"  # nvidia.com/gpu, nvidia.com/gpu.shared, nvidia.com/mig-1g.10gb
_GPU: Final = "nvidia.com/gpu"
_PLATFORMS: Final = "JAX_PLATFORMS"
_MEMORY: Final = "/dev/shm"  # noqa: S108  # the folder of shared memory
_VOLUME: Final = "backstay-shared-memory"


def gpus_of(container: Mapping[str, Any]) -> int:
    """The number of GPUs, or parts of GPUs, that a container requests; 0 where the limit is not a whole number."""
    limits = (container.get("resources") or {}).get("limits") or {}
    asked = [str(value) for name, value in limits.items() if str(name).startswith(_PREFIX)]
    return sum(int(value) for value in asked if value.isascii() and value.isdigit())


def prepare(spec: dict[str, Any], container: dict[str, Any]) -> None:
    """Add to a pod what its GPUs need, unless the template says something else.

    - Variables: JAX uses CUDA, and the CPU beside it. The trainer refuses to train on the CPU instead.
    - A toleration of the taint that keeps other pods away from nodes with GPUs. Only some clouds add it.
    - With several GPUs, shared memory for NCCL. The default of 64 MiB is too small.

    Args:
        spec: the pod's spec, with the template merged.
        container: its container `trainer`.
    """
    number = gpus_of(container)
    if not number:
        return
    variables = container.setdefault("env", [])
    variables.append({"name": contract.ENV_GPUS, "value": str(number)})
    if not any(item.get("name") == _PLATFORMS for item in variables):
        variables.append({"name": _PLATFORMS, "value": "cuda,cpu"})
    tolerations = spec.setdefault("tolerations", [])
    if not any(item.get("key") in (_GPU, None) for item in tolerations):
        tolerations.append({"key": _GPU, "operator": "Exists", "effect": "NoSchedule"})
    mounts = container.setdefault("volumeMounts", [])
    if number > 1 and not any(item.get("mountPath") == _MEMORY for item in mounts):
        spec.setdefault("volumes", []).append({"name": _VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
        mounts.append({"name": _VOLUME, "mountPath": _MEMORY})
