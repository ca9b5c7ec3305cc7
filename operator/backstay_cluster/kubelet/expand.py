"""Applies pure rules about strings in a pod, which are `$(VAR)`, image names, and rewritten paths.

A pod here has no mount namespace, so a volume is not at its `mountPath` but in a folder of the host. `PathMap` rewrites
each mention of a mount path in arguments and environment to that folder. A mention must be a whole path: alone, a
parent folder, after `file://`, in `--dir=/data`, in a list such as `/a:/b`, inside JSON or a shell script. A mention
inside another word or a longer path (`s3://bucket/data`, `/old/data`, `/data2`) stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")
# https://github.com/distribution/reference: name[:tag][@digest]; the first component may be a domain with a port.
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_DOMAIN = (
    r"(?:(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
    r"(?:\.(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9]))*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?"
)
_IMAGE = re.compile(
    rf"(?:{_DOMAIN}/)?{_COMPONENT}(?:/{_COMPONENT})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    r"(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?"
)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(VAR)` by its value; `$$` is a dollar sign; a reference to an unknown variable stays the same."""

    def one(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        return variables.get(match.group(1), match.group(0))

    return _REFERENCE.sub(one, text)


def valid_image(name: str) -> bool:
    """Returns whether an image reference is well formed. The image need not exist, because no image is pulled."""
    return len(name) <= 512 and _IMAGE.fullmatch(name) is not None


class PathMap:
    """Replaces paths of the container by folders of the host.

    Args:
        paths: path in the container -> path on the host, both absolute; if one contains another, the longer one
            applies.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = {clean_path(path): host for path, host in paths.items()}
        names = sorted(self._paths, key=len, reverse=True)
        # Not inside a longer path or word, but after the two slashes of `file://`.
        self._pattern = re.compile(
            r"(?:(?<![\w.\-/])|(?<=\bfile://))(" + "|".join(re.escape(name) for name in names) + r")(?![\w.\-])"
            if names
            else r"(?!)"
        )

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._paths[match.group(1)], text)


def clean_path(path: str) -> str:
    """Returns an absolute path without a slash at its end and without double slashes."""
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
