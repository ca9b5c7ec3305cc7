"""The language of fault scripts, such as ``kill worker/1 @12; stop server/0 @30 5s``. Pure.

One fault is ``ACTION ROLE/INDEX[.POD][#INCARNATION] @STEP [POINT] [DURATION | CODE]``; faults are separated by ``;`` or
line ends. A misspelt fault must not be skipped silently, so all unknown words are errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from backstay_spec import contract
from backstay_spec.runtime import RuntimeConfig

__all__ = ["ENV_FAULTS", "POINTS", "Fault", "faults_of", "parse"]

ENV_FAULTS: Final = "FAULT_INJECTION"
"""Set by the user in the job's `env`; variables with Backstay's prefix are refused there."""

ROLES: Final = {
    "worker": contract.ROLE_WORKER,
    "server": contract.ROLE_SERVER,
    "evaluator": contract.ROLE_EVALUATOR,
}
POINTS: Final = {
    contract.ROLE_WORKER: ("compute", "push", "done"),
    contract.ROLE_SERVER: ("applied", "commit", "norm", "rename", "manifest", "done", "state", "follow"),
    contract.ROLE_EVALUATOR: ("evaluate",),
}
"""The points where a fault can be injected, by role; the first is the default."""

# Whether an action takes a duration: never, always, or optionally.
DURATIONS: Final = {
    "kill": "no",
    "stop": "may",
    "delay": "must",
    "hang": "no",
    "cut": "no",
    "corrupt": "no",
    "nan": "no",
    "fill": "must",
    "exit": "no",
}
_OF_STANDBYS: Final = ("state", "follow")  # points that only a standby reaches
_OF_CHECKPOINTS: Final = ("rename", "manifest")
_SECONDS: Final = re.compile(r"(\d+(?:\.\d+)?)s")
_LONGEST: Final = 86_400.0


@dataclass(frozen=True)
class Fault:
    """One fault, injected once in each process that it names.

    Attributes:
        action: see docs/faults.md.
        role: a value of `BACKSTAY_ROLE`.
        index: shard or rank; None for every one.
        incarnation: the pod's incarnation; None for every incarnation.
        step: the first step at which it may happen. A worker counts by its batches, a server by updates applied.
        point: one of the role's `POINTS`.
        seconds: how long it lasts; None where it has no end, or no duration.
        code: the exit status of ``exit``.
        member: a pod of a rank of several; None for every one.
    """

    action: str
    role: str
    index: int | None
    incarnation: int | None
    step: int
    point: str
    seconds: float | None = None
    code: int | None = None
    member: int | None = None

    def matches(self, role: str, index: int, incarnation: int, member: int = 0) -> bool:
        """Returns whether it is for that pod."""
        return (
            self.role == role
            and self.index in (None, index)
            and self.member in (None, member)
            # Pods of the operator count from 1; a process without an operator has no incarnation, which is 0.
            and (self.incarnation is None or self.incarnation == max(1, incarnation))
        )

    def __str__(self) -> str:
        short = next(name for name, role in ROLES.items() if role == self.role)
        index = "*" if self.index is None else str(self.index)
        incarnation = "#*" if self.incarnation is None else "" if self.incarnation == 1 else f"#{self.incarnation}"
        pod = "" if self.member is None else f".{self.member}"
        parts = [self.action, f"{short}/{index}{pod}{incarnation}", f"@{self.step}"]
        if self.point != POINTS[self.role][0]:
            parts.append(self.point)
        if self.seconds is not None:
            parts.append(f"{self.seconds:f}".rstrip("0").rstrip(".") + "s")
        if self.code is not None:
            parts.append(str(self.code))
        return " ".join(parts)


def parse(text: str) -> tuple[Fault, ...]:
    """Returns the faults of a script, in its order.

    Raises:
        ValueError: a fault cannot be parsed; the message quotes it, and states what would be valid.
    """
    return tuple(_one(clause) for line in text.splitlines() for clause in line.split(";") if clause.strip())


def faults_of(text: str, config: RuntimeConfig) -> tuple[Fault, ...]:
    """Returns the faults of a script for a job of this configuration. A worker may have any rank: the job may be
    scaled.

    Raises:
        ValueError: a fault cannot be parsed, or names a pod or a point that the job never has.
    """
    faults = parse(text)
    for fault in faults:
        why = None
        if fault.role == contract.ROLE_SERVER and (fault.index or 0) >= config.shards:
            why = f"the job has no server {fault.index}: must be less than {config.shards}"
        elif (fault.member or 0) >= config.pods_per_rank:
            why = f"a rank of the job has no pod {fault.member}: must be less than {config.pods_per_rank}"
        elif fault.role == contract.ROLE_EVALUATOR and not config.evaluator:
            why = "the job has no evaluator: must be a worker or a server"
        elif fault.role == contract.ROLE_EVALUATOR and fault.index:
            why = f"the job has no evaluator {fault.index}: must be evaluator/0"
        elif fault.role == contract.ROLE_SERVER:
            why = _never(fault, config)
        if why:
            raise _wrong(str(fault), why)
    return faults


def _never(fault: Fault, config: RuntimeConfig) -> str | None:
    """Returns why no server of the job has this fault, or None if one may have it."""
    if fault.point in _OF_STANDBYS and not config.standbys:
        return f"the job has no standby, so no server reaches the point {fault.point}: set parameterServers.standbys"
    if fault.point in _OF_STANDBYS and fault.incarnation == 1:
        pod = "*" if fault.index is None else fault.index
        return f"the first pod of a server is not a standby: must be such as server/{pod}#2, or server/{pod}#*"
    if fault.point == "manifest" and fault.index:
        return "only server 0 stores manifests: must be server/0"
    if (fault.point in _OF_CHECKPOINTS or fault.action == "fill") and config.checkpoint is None:
        what = "fill" if fault.action == "fill" else fault.point
        return f"the job stores no checkpoints, so {what} never happens: set checkpoint"
    return None


def _one(clause: str) -> Fault:
    words = iter(clause.split())
    action = next(words)
    if action not in DURATIONS:
        raise _wrong(clause, f"{action!r} is not an action: must be one of {', '.join(DURATIONS)}")
    role, index, member, incarnation = _target(clause, next(words, ""))
    step = next(words, "")
    if not step.startswith("@") or (at := _whole(step[1:])) is None:
        raise _wrong(clause, f"{step!r} is not a step: must be such as @12")
    point, seconds, code = _rest(clause, action, role, words)
    if action == "fill" and role != contract.ROLE_SERVER:
        raise _wrong(clause, "only servers write checkpoints: must be such as fill server/0 @25 10s")
    if action == "nan" and (role != contract.ROLE_WORKER or point not in ("", "compute")):
        raise _wrong(clause, "only workers compute: must be such as nan worker/1 @12")
    if action == "corrupt" and role == contract.ROLE_EVALUATOR:
        raise _wrong(clause, "an evaluator sends no tensors: must be a worker or a server")
    return Fault(action, role, index, incarnation, at, point or POINTS[role][0], seconds, code, member)


def _target(clause: str, text: str) -> tuple[str, int | None, int | None, int | None]:
    name, slash, rest = text.partition("/")
    if name not in ROLES or not slash:
        raise _wrong(clause, f"{text!r} is not a pod: must be such as worker/1, server/0 or evaluator/0")
    whole, hash_, life = rest.partition("#")
    number, dot, part = whole.partition(".")
    member = _whole(part) if dot else None
    if dot and (member is None or name != "worker"):
        raise _wrong(clause, f"{whole!r} is not a pod of a rank: must be such as worker/1.0, for a worker")
    index, incarnation = _whole(number), _whole(life) if hash_ else 1
    if index is None and number != "*":
        raise _wrong(clause, f"{number!r} is not an index: must be 0 or more, or * for every one")
    if (incarnation is None and life != "*") or incarnation == 0:
        raise _wrong(clause, f"{life!r} is not an incarnation: must be 1 or more, or * for every one")
    return ROLES[name], index, member, incarnation


def _rest(clause: str, action: str, role: str, words: Iterator[str]) -> tuple[str, float | None, int | None]:
    point, seconds, code = "", None, None
    # The words may have any order, because people write them by hand.
    for word in words:
        if word in POINTS[role] and not point:
            point = word
        elif (found := _SECONDS.fullmatch(word)) and seconds is None and DURATIONS[action] != "no":
            seconds = float(found[1])
            if not (math.isfinite(seconds) and 0 < seconds <= _LONGEST):
                raise _wrong(clause, f"{word!r} is not a duration: must be more than 0 s and at most a day")
        elif action == "exit" and code is None and (code := _whole(word)) is not None and code <= 255:
            continue
        else:
            raise _wrong(clause, f"{word!r} is not valid here: {_allowed(action, role)}")
    if DURATIONS[action] == "must" and seconds is None:
        raise _wrong(clause, f"the duration is missing: {_allowed(action, role)}")
    if action == "exit" and code is None:
        raise _wrong(clause, f"the exit status is missing: {_allowed(action, role)}")
    return point, seconds, code


def _allowed(action: str, role: str) -> str:
    more = {"must": " and a duration such as 3s", "may": ", and a duration such as 3s if it ends", "no": ""}
    status = " and an exit status of 0 to 255" if action == "exit" else ""
    return f"{action} takes one of {', '.join(POINTS[role])} (or none of them){more[DURATIONS[action]]}{status}"


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


def _wrong(clause: str, why: str) -> ValueError:
    return ValueError(f"{ENV_FAULTS}: {clause.strip()!r}: {why}")
