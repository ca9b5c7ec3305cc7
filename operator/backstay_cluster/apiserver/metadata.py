"""Checks the names, labels, annotations and owners of ObjectMeta for every kind."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, Final

from backstay_cluster.apiserver.errors import StatusCause, forbidden_field, invalid_value, required
from backstay_cluster.apiserver.objects import Obj
from backstay_cluster.apiserver.selectors import LABEL_NAME, LABEL_VALUE

_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = rf"{_LABEL}(\.{_LABEL})*"
_DNS1035: Final = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_SUFFIX: Final = "bcdfghjklmnpqrstvwxz2456789"  # no vowels, so that no word is ever spelled

NameRule = Callable[[str], list[str]]


def _too_long(limit: int) -> str:
    return f"must be no more than {limit} characters"


def subdomain(name: str) -> list[str]:
    """Returns the errors of `name` as a DNS-1123 subdomain."""
    found = [_too_long(253)] if len(name) > 253 else []
    if not re.fullmatch(_SUBDOMAIN, name):
        found.append(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must "
            "start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
            f"'{_SUBDOMAIN}')"
        )
    return found


def label(name: str) -> list[str]:
    """Returns the errors of `name` as a DNS-1123 label."""
    found = [_too_long(63)] if len(name) > 63 else []
    if not re.fullmatch(_LABEL, name):
        found.append(
            "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and "
            "end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
            f"'{_LABEL}')"
        )
    return found


def label_1035(name: str) -> list[str]:
    """Returns the errors of `name` as a DNS-1035 label (the names of Services)."""
    found = [_too_long(63)] if len(name) > 63 else []
    if not re.fullmatch(_DNS1035, name):
        found.append(
            "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic "
            "character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for "
            f"validation is '{_DNS1035}')"
        )
    return found


def generate_name(prefix: str) -> str:
    """`prefix` and five random characters, at most 63 characters in total."""
    return prefix[:58] + "".join(random.choices(_SUFFIX, k=5))  # noqa: S311  # not a secret


def qualified_name(key: str) -> list[str]:
    """Returns the errors of `key` as the key of a label or an annotation."""
    prefix, slash, name = key.rpartition("/")
    found = []
    if slash:
        if not prefix:
            found.append("prefix part must be non-empty")
        else:
            found += [f"prefix part {text}" for text in subdomain(prefix)]
    if not name:
        found.append("name part must be non-empty")
    elif len(name) > 63:
        found.append(f"name part {_too_long(63)}")
    if not LABEL_NAME.fullmatch(name):
        found.append(
            "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
            "alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
            "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
        )
    return found


def check_labels(labels: Any, path: str) -> list[StatusCause]:
    """Returns the errors of a map of labels at `path`, as causes."""
    causes: list[StatusCause] = []
    for key, value in (labels or {}).items():
        causes += [invalid_value(path, key, text) for text in qualified_name(key)]
        if len(value) > 63:
            causes.append(invalid_value(path, value, _too_long(63)))
        if not LABEL_VALUE.fullmatch(value):
            causes.append(
                invalid_value(
                    path,
                    value,
                    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and "
                    "must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', "
                    "regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')",
                )
            )
    return causes


def check(data: Obj, rule: NameRule, *, custom: bool = False) -> list[StatusCause]:
    """Returns the errors of an object's metadata, as causes.

    Args:
        custom: whether it is of a custom resource, whose finalizers need no prefix.
    """
    causes: list[StatusCause] = []
    if "generateName" in data and not data.get("name"):
        causes += [invalid_value("metadata.generateName", data["generateName"], t) for t in rule(data["generateName"])]
    if not data.get("name"):
        causes.append(required("metadata.name", "name or generateName is required"))
    else:
        causes += [invalid_value("metadata.name", data["name"], text) for text in rule(data["name"])]
    causes += check_labels(data.get("labels"), "metadata.labels")
    annotations = data.get("annotations") or {}
    for key in annotations:
        causes += [invalid_value("metadata.annotations", key, text) for text in qualified_name(key.lower())]
    size = sum(len(k.encode()) + len(v.encode()) for k, v in annotations.items())
    if size > 256 * 1024:
        causes.append(
            StatusCause(
                "metadata.annotations", "FieldValueTooLong", f"Too long: may not be more than {256 * 1024} bytes"
            )
        )
    causes += _owners(data.get("ownerReferences") or [])
    causes += _finalizers(data.get("finalizers") or [], custom=custom)
    return causes


def _finalizers(finalizers: list[str], *, custom: bool) -> list[StatusCause]:
    causes: list[StatusCause] = []
    for at, finalizer in enumerate(finalizers):
        causes += [invalid_value("metadata.finalizers", finalizer, text) for text in qualified_name(finalizer)]
        if custom:
            continue
        if "/" not in finalizer and finalizer not in {"orphan", "foregroundDeletion", "kubernetes"}:
            causes.append(
                invalid_value(
                    f"metadata.finalizers[{at}]",
                    finalizer,
                    "name is neither a standard finalizer name nor is it fully qualified",
                )
            )
    return causes


def check_new_finalizers(data: Obj, old: Obj) -> list[StatusCause]:
    """Returns the error of an object that is being deleted and gets a further finalizer, as causes."""
    new = [name for name in data.get("finalizers") or () if name not in (old.get("finalizers") or ())]
    if not old.get("deletionTimestamp") or not new:
        return []
    found = ", ".join(json.dumps(name) for name in new)
    text = f"no new finalizers can be added if the object is being deleted, found new finalizers []string{{{found}}}"
    return [forbidden_field("metadata.finalizers", text)]


def _owners(owners: list[Obj]) -> list[StatusCause]:
    causes: list[StatusCause] = []
    for at, owner in enumerate(owners):
        path = f"metadata.ownerReferences[{at}]"
        causes += [
            invalid_value(f"{path}.{name}", owner.get(name, ""), f"{name} must not be empty")
            for name in ("apiVersion", "kind", "name", "uid")
            if not owner.get(name)
        ]
    controllers = [o for o in owners if o.get("controller")]
    if len(controllers) > 1:
        first, second = (f"{o.get('kind')}/{o.get('name')}" for o in controllers[:2])
        causes.append(
            invalid_value(
                "metadata.ownerReferences",
                controllers[:2],
                'Only one reference can have Controller set to true. Found "true" in references for '
                f"{first} and {second}",
            )
        )
    return causes
