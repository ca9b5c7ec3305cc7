"""The version of Backstay. All pods of a job must have the same one."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
