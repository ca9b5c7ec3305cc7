"""Prepares a pod for the GPUs that its container requests, so that a template needs nothing but the limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from backstay_spec import contract

__all__ = ["gpus_of", "prepare", "shared"]

_GPU: Final = "nvidia.com/gpu"
_NAMES: Final = (_GPU, "nvidia.com/mig-")  # such as nvidia.com/gpu.shared and nvidia.com/mig-1g.10gb
_SHARED: Final = ".shared"  # NVIDIA's plugin appends it to a resource that several containers use at the same time
_PARTS: Final = (_GPU + _SHARED, "nvidia.com/mig-")
_PLATFORMS: Final = "JAX_PLATFORMS"
_VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"
_PREALLOCATE: Final = "XLA_PYTHON_CLIENT_PREALLOCATE"
_NCCL_LOG: Final = "NCCL_DEBUG"
_MEMORY: Final = "/dev/shm"  # noqa: S108  # the folder of shared memory
_VOLUME: Final = "backstay-shared-memory"


def _limits_of(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the limits of a container's resources."""
    return (container.get("resources") or {}).get("limits") or {}


def gpus_of(container: Mapping[str, Any]) -> int:
    """Returns the number of GPUs, or parts of GPUs, that a container requests; 0 where the limit is not a whole
    number."""
    limits = _limits_of(container)
    asked = [str(value) for name, value in limits.items() if str(name).startswith(_NAMES)]
    return sum(int(value) for value in asked if value.isascii() and value.isdigit())


def shared(container: Mapping[str, Any]) -> bool:
    """Returns whether a container requests a part of a GPU, or one that others use too."""
    limits = _limits_of(container)
    return any(str(name).startswith(_PARTS) for name in limits)


def whole(workers: Mapping[str, Any]) -> bool:
    """Returns whether workers in ranks of several pods get whole GPUs.

    NCCL refuses two processes on one GPU, and a part of a GPU has no fast way to another one.
    """
    containers = ((workers.get("template") or {}).get("spec") or {}).get("containers") or ()
    return workers["podsPerRank"] == 1 or not any(shared(container) for container in containers)


def prepare(spec: dict[str, Any], container: dict[str, Any], role: str, members: int = 1) -> None:
    """Add to a pod what its GPUs need, unless the template says something else.

    - Variables: JAX uses CUDA, and the CPU beside it. The trainer refuses to train on the CPU instead.
    - On a GPU that other pods use too, JAX takes memory when it needs it, and not most of it at its start.
    - A toleration of the taint that keeps other pods away from nodes with GPUs. Only some clouds add it.
    - With several GPUs, or several pods in a rank, shared memory for NCCL. The default of 64 MiB is too small.
    - With several pods in a rank, the warnings of NCCL.

    A server or evaluator without a GPU gets a variable that hides the GPUs of its node. The CUDA image sees them all if
    NVIDIA's runtime is the default one, and JAX takes most of the memory of each.

    Args:
        spec: the pod's spec, with the template merged.
        container: its container `trainer`.
        role: a value of `BACKSTAY_ROLE`.
        members: the number of pods in the pod's rank.
    """
    number, variables = gpus_of(container), container.setdefault("env", [])
    if not number or role == contract.ROLE_SERVER:  # servers apply updates on the CPU
        if not number and role != contract.ROLE_WORKER and not any(item.get("name") == _VISIBLE for item in variables):
            variables.append({"name": _VISIBLE, "value": "void"})
        return
    # CUDA shows a process one part of a divided GPU, and several shares may be of one GPU.
    variables.append({"name": contract.ENV_GPUS, "value": str(1 if shared(container) else number)})
    if not any(item.get("name") == _PLATFORMS for item in variables):
        variables.append({"name": _PLATFORMS, "value": "cuda,cpu"})
    sliced = any(str(name).startswith(_NAMES) and str(name).endswith(_SHARED) for name in _limits_of(container))
    if sliced and not any(item.get("name") == _PREALLOCATE for item in variables):
        variables.append({"name": _PREALLOCATE, "value": "false"})
    tolerations = spec.setdefault("tolerations", [])
    if not any(item.get("key") in (_GPU, None) and item.get("effect") in ("NoSchedule", None) for item in tolerations):
        tolerations.append({"key": _GPU, "operator": "Exists", "effect": "NoSchedule"})
    mounts = container.setdefault("volumeMounts", [])
    if members > 1 and not any(item.get("name") == _NCCL_LOG for item in variables):
        variables.append({"name": _NCCL_LOG, "value": "WARN"})
    if number * members > 1 and not any(item.get("mountPath") == _MEMORY for item in mounts):
        spec.setdefault("volumes", []).append({"name": _VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}})
        mounts.append({"name": _VOLUME, "mountPath": _MEMORY})
