"""The dtypes that a checkpoint can hold."""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

from .._update import TreeSpec
from ..errors import TreeError

__all__ = ["BY_NAME", "STORED", "check_storable"]

# https://huggingface.co/docs/safetensors: the names of dtypes in a file's header.
STORED: Final[dict[str, np.dtype[np.generic]]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "C64": np.dtype(np.complex64),
}

BY_NAME: Final = {dtype.name: dtype for dtype in STORED.values()}
"""dtypes by NumPy's name, which manifests use."""


def check_storable(tree: TreeSpec) -> None:
    """Check that a checkpoint can hold the arrays of a model. A job sends its result in the same format.

    Raises:
        TreeError: an array has another dtype than those of `BY_NAME`.
    """
    for leaf in tree.leaves:
        if leaf.dtype.name not in BY_NAME:
            wanted = "complex64, or two arrays of float64" if leaf.dtype.kind == "c" else ", ".join(sorted(BY_NAME))
            raise TreeError(f"leaf {leaf.name} is {leaf.dtype.name}, which a checkpoint cannot hold: must be {wanted}")
