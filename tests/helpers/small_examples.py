"""Examples that are small enough for a test."""

from __future__ import annotations

import shutil
from pathlib import Path

from between import put

_BYTES = Path(__file__).parents[2] / "examples/bytes"
_SIZES, _SOURCES = "CONTEXT, WIDTH, HEADS, LAYERS, BATCH = ", 'root = Path(sysconfig.get_path("stdlib"))'
_SMALLER = {f"{_SIZES}128, 128, 4, 2, 16": f"{_SIZES}32, 32, 4, 2, 8", _SOURCES: f'{_SOURCES} / "asyncio"'}


def small_bytes(folder: Path) -> Path:
    """Copies examples/bytes, with a smaller model and a shorter text.

    Args:
        folder: the path of the copy, which must not exist.

    Returns:
        The folder.
    """
    shutil.copytree(_BYTES, folder)
    text = (folder / "train.py").read_text()
    for large, small in _SMALLER.items():
        assert text.count(large) == 1, large
        text = text.replace(large, small)
    put(folder / "train.py", text)
    return folder
