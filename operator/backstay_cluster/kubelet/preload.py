"""The modules that the cluster's owner imports before the first container starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final, Self

#: By one of these files JAX decides whether there is a GPU of NVIDIA.
_DEVICES: Final = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def without_gpu(devices: Sequence[str] = _DEVICES) -> dict[str, str]:
    """Returns the variables of a container without a GPU, on a machine with these files or not.

    JAX with CUDA fails if it finds one of them, and may use no GPU. On other machines it uses the CPU, or a TPU.
    """
    return {"JAX_PLATFORMS": "cpu"} if any(Path(device).exists() for device in devices) else {}


@dataclass(frozen=True)
class Preload:
    """Modules that one process imports once, so that containers that run Python scripts are forked from it.

    Attributes:
        modules: imported in this order; a module that fails, or that leaves a thread behind, is skipped.
        started_with: variables that most containers have and that take effect at the start of a process, such as the
            memory allocator's. The process is started with them.
        environ: set while they are imported, and removed afterwards.
        prefixes: names of environment variables that these modules read at import or that their C libraries read, as
            prefixes. A container in whose environment one of them differs is started without the preloaded modules.
        after_fork: `module:function`, called without arguments in each forked process, such as the seeding of a
            random number generator.
        copying: modules that copy the whole environment at their import, and use only what `prefixes` has. That they
            read a name does not count.
        finders: SHA-256 digests, as hexadecimal text, of programs that import modules from the Python files beside
            them, and change the import system only for that. A file `package--module.py` is a module of a package.
    """

    modules: tuple[str, ...]
    started_with: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()
    after_fork: tuple[str, ...] = ()
    copying: tuple[str, ...] = ()
    finders: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Returns the JSON text that `of_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Self:
        """Parse the JSON text. Raises `ValueError` if `text` is not a JSON object with these fields."""
        value = json.loads(text)
        names = [each.name for each in fields(cls)]
        if not isinstance(value, dict) or not {"modules"} <= set(value) <= set(names):
            raise ValueError(f"preload: {text[:200]!r} must be a JSON object with modules, and any of {names}")
        return cls(
            modules=tuple(map(str, value["modules"])),
            started_with={str(name): str(word) for name, word in value.get("started_with", {}).items()},
            environ={str(name): str(word) for name, word in value.get("environ", {}).items()},
            prefixes=tuple(map(str, value.get("prefixes", ()))),
            after_fork=tuple(map(str, value.get("after_fork", ()))),
            copying=tuple(map(str, value.get("copying", ()))),
            finders=tuple(map(str, value.get("finders", ()))),
        )
