"""Selects the modules that the embedded cluster imports once for all pods, of the trainer's dependencies and the
script's.

This module only has their names, and does not import them: the command starts the trainer as a program.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from backstay_cluster.kubelet.preload import without_gpu
from backstay_spec.manifests_pod import ALLOCATOR, GRPC_LOG

# In the order of their import. A name that is not installed is skipped.
TRAINER: Final = (
    "numpy",
    "jax",
    "jax.numpy",
    "optax",
    "ml_dtypes",
    "safetensors",
    "grpc",
    "grpc._channel",
    "fsspec",
    "backstay._train",
    "backstay._pod",
    "backstay._report._server_reports",
    "backstay._report._worker_measurements",
    "backstay._roles._worker",
    "backstay._roles._server",
    "backstay._roles._standby",
    "backstay._roles._evaluator",
    "backstay._single._reference",
    "backstay._data._dataset",
    # JAX imports it before it compiles for the first time.
    "jaxlib.mlir.dialects.mhlo",
    # The standard library imports it for the first name of a host.
    "encodings.idna",
)
# A script may import pyarrow. One of its allocators would start a thread, and forked processes have no threads of the
# parent.
ENVIRON: Final = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Variables that the C libraries of these modules read, and those that fsspec finds in the whole environment.
PREFIXES: Final = (
    "ABSL_",
    "ARROW_",
    "BLIS_",
    "FSSPEC_",
    "GOMP_",
    "GOTO_",
    "GRPC_",
    "JAX_",
    "JE_ARROW_",
    "KMP_",
    "LIBTPU_",
    "MIMALLOC_",
    "MKL_",
    "MLIR_",
    "NPY_",
    "NUMEXPR_",
    "OMP_",
    "OPENBLAS_",
    "PJRT_",
    "TF_",
    "TPU_",
    "XLA_",
)
# fsspec keeps `FSSPEC_...` of its copy. A server of CGI scripts, which no job is, uses the other one.
COPYING: Final = ("fsspec.config", "wsgiref.handlers")
# Forked processes would draw the same numbers; the standard library's generator seeds itself again.
AFTER_FORK: Final = ("numpy.random:seed",)
# An import of these connects to other processes or starts threads.
NEVER: Final = frozenset({"mpi4py", "horovod", "tensorflow", "torch_xla"})
# It adds a finder for what was submitted with the client. This module must not import those above it.
ENTRY: Final = Path(__file__).parents[1] / "code" / "backstay_entry.py"


def preload(job: dict[str, Any] | None = None, *, environ: Mapping[str, str] | None = None) -> str:
    """Returns the value of the cluster's option ``--preload``.

    Args:
        job: a localised TrainingJob: the imports of its script are added, and those of its variables that take effect
            at an import. None for jobs to come.
        environ: variables that the pods of jobs to come will have.
    """
    learned = [] if job is None else list(_learned(job))
    variables = _plain_variables(job) if job is not None else environ or {}
    return json.dumps(
        {
            "modules": list(dict.fromkeys([*TRAINER, *learned])),
            "started_with": {
                **ALLOCATOR,
                **GRPC_LOG,
                **without_gpu(),
                **{name: value for name, value in variables.items() if name.startswith(PREFIXES)},
            },
            "environ": ENVIRON,
            "prefixes": PREFIXES,
            "after_fork": AFTER_FORK,
            "copying": COPYING,
            "finders": [hashlib.sha256(ENTRY.read_bytes()).hexdigest()],
        }
    )


def _plain_variables(job: dict[str, Any]) -> dict[str, str]:
    """Returns the variables of all pods whose values are in the job itself."""
    found = {one["name"]: one.get("value") for one in job["spec"].get("env") or []}
    return {name: value for name, value in found.items() if isinstance(value, str) and "$(" not in value}


def _learned(job: dict[str, Any]) -> Iterator[str]:
    spec = job["spec"]
    words = [*(spec.get("command") or []), *(spec.get("args") or [])]
    script = next(
        (Path(spec["workingDir"], word) for word in words if isinstance(word, str) and word[-3:] == ".py"), None
    )
    if script is not None:
        yield from imports_of(script)


def imports_of(script: Path) -> list[str]:
    """Modules of installed distributions that a script imports when it starts, directly or through files beside it.

    A file that cannot be read or parsed adds nothing: its pod will report the error.
    """
    installed = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    found: dict[str, None] = {}
    seen: set[Path] = set()
    todo = [script]
    while todo:
        file = todo.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for name in _imported(file):
            top = name.partition(".")[0]
            local = [script.parent / f"{top}.py", script.parent / top / "__init__.py"]
            if any(path.is_file() for path in local):
                todo += [path for path in local if path.is_file()]
            elif top not in NEVER and PathFinder.find_spec(top, installed) is not None:
                found[name] = None
    return list(found)


def _imported(file: Path) -> Iterator[str]:
    """Yields the names in the import statements that run whenever the file runs."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            yield statement.module
            # Each may be a module or something in one; what is not a module is skipped.
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names if alias.name != "*")
