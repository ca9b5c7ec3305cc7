"""The devices that a pod computes on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import entry_points

from backstay_spec import contract

from ..errors import BackstayError, ConfigurationError

__all__ = ["use_devices"]

_LOG = logging.getLogger(__name__)


def use_devices(role: str, variables: Mapping[str, str]) -> None:
    """Keep a server off the node's GPUs, and check that any other pod has those that its container requests.

    JAX uses the CPU where it finds no GPU, without an error, even if `JAX_PLATFORMS` names CUDA first. A server would
    take most of the memory of each GPU of its node. The CUDA image sees them all if NVIDIA's runtime is the default.

    Args:
        role: a value of `BACKSTAY_ROLE`.
        variables: the environment of this process.

    Raises:
        ConfigurationError: the image has no CUDA packages of JAX.
        BackstayError: JAX finds fewer GPUs on this node.
    """
    import jax

    platforms = str(getattr(jax.config, "jax_platforms", None) or "")
    if role == contract.ROLE_SERVER:
        if not platforms:
            jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
        if (backend := jax.default_backend()) != "cpu":
            _LOG.warning(
                "this parameter server computes on %s, and takes memory from the workers of its node. The script used "
                "JAX before it called train, or JAX_PLATFORMS is %r. Set that variable in the template of the workers "
                "only",
                backend,
                platforms,
            )
        return
    asked = variables.get(contract.ENV_GPUS)
    if asked is None or (platforms and not {"cuda", "gpu"} & set(platforms.split(","))):
        return
    # Before JAX initializes, because it raises another error where the node has a GPU.
    if not any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins")):
        raise ConfigurationError(
            f"the container requests {asked} GPUs, and its image has no CUDA packages of JAX. Use the image "
            "trainer:VERSION-cuda, or install jax[cuda12] or jax[cuda13]"
        )
    try:
        found, why = sum(device.platform == "gpu" for device in jax.local_devices()), ""
        if found >= int(asked):
            return
    except RuntimeError as error:
        found, why = 0, f" ({error})"
    raise BackstayError(
        f"JAX can use {found} of the {asked} GPUs of this container{why}: run `nvidia-smi` in a pod on this node. It "
        "shows whether the driver works, and its version, which may be too old for the image. Of shared or divided "
        "GPUs, a container can use one only"
    )
