"""Which texts name a folder that checkpoints can be written to, as far as the text alone shows it."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["NOT_WRITABLE", "refusal"]

NOT_WRITABLE: Final = "^([a-z0-9]+::)*(http|https|data|zip|tar|gist)://"
"""File systems of fsspec without an operation that deletes a file. It means the same in Python and in CEL (RE2)."""

_ONE_SLASH = re.compile(r"([a-z0-9]{2,}):(?!//|:)(/?)", re.IGNORECASE)


def refusal(uri: str) -> str | None:
    """Returns the reason why checkpoints cannot be stored in the folder `uri`. It is None if `uri` is a path or a URI
    that may be written."""
    if found := _ONE_SLASH.match(uri):
        scheme, rest = found[1].lower(), uri[found.end() :]
        there = f"file:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
        return (
            f"the checkpoint folder is {uri!r}, a path without '//' after the scheme: must be {there} for the scheme "
            f"{scheme}, or ./{uri} for a folder that has this name"
        )
    if re.match(NOT_WRITABLE, uri):
        return f"the checkpoint folder {uri} can only be read: must be a path, or a URI such as s3://bucket/folder"
    return None
