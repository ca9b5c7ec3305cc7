"""JSON documents that contain their own checksum: a reader refuses a document that was changed in any way.

The checksum is the SHA-256 of the canonical form: keys sorted, no white space, ASCII. So the order of keys and white
space do not matter, and everything else does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from ..errors import CheckpointError

__all__ = ["CHECKSUM", "seal", "unseal"]

CHECKSUM: Final = "checksum"


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def seal(document: Mapping[str, Any]) -> bytes:
    """`document` as text, with its checksum.

    Raises:
        ValueError: the document has a number that JSON does not have, or the key `checksum`.
    """
    if CHECKSUM in document:
        raise ValueError(f"the document has the key {CHECKSUM!r}, which `seal` adds")
    sealed = {**document, CHECKSUM: hashlib.sha256(_canonical(document)).hexdigest()}
    return json.dumps(sealed, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False).encode()


def unseal(text: bytes, where: str) -> dict[str, Any]:
    """Returns the document in `text`, without its checksum.

    Args:
        where: names the file in messages.

    Raises:
        CheckpointError: `text` is not JSON, has a key twice, or does not have the checksum that it states.
    """
    try:
        document = json.loads(text.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant)
        if not isinstance(document, dict):
            raise ValueError("must be a JSON object")  # noqa: TRY004  # the text is invalid, and not an argument's type
        stated = document.pop(CHECKSUM, None)
        found = hashlib.sha256(_canonical(document)).hexdigest()
    except RecursionError:
        raise CheckpointError(f"{where} is damaged: its JSON is nested too deeply") from None
    except (ValueError, MemoryError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from None
    if stated is None:
        raise CheckpointError(f"{where} is damaged: it has no checksum")
    if stated != found:
        raise CheckpointError(f"{where} is damaged: its checksum is not the one that it states")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise ValueError(f"the key {key[:100]!r} appears twice")
        document[key] = value
    return document


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
