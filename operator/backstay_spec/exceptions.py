"""Reads which exception ended a pod from its termination message, as the trainer's JSON or the last lines of its log.

The trainer's JSON names the exception and its place. A script that fails before it imports `backstay` leaves the end of
its log (``FallbackToLogsOnError``), in which Python's traceback has the same facts. A script that ends with exit code 0
before it has called `backstay.train` raises nothing; it counts like an exception, because another attempt ends in the
same way.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from backstay_spec.causes import Cause, terminated_state, verdict_of
from backstay_spec.observed import Manifest

__all__ = ["NOT_TRAINED", "Raised", "raised_by"]

#: The type of a script's end without training.
NOT_TRAINED: Final = "NotTrained"
_NOT_TRAINED: Final = (
    "the script ended with exit code 0 before training had ended; the script of spec.command must call backstay.train, "
    "and must wait for what it returns"
)

_FOLDERS: Final = re.compile(r"[^\s'\":]*/")
_NUMBER: Final = re.compile(r"\d+")
_FRAME: Final = re.compile(r'\s*File "([^"]+)", line (\d+)')
# How Python draws an ExceptionGroup and the exceptions in it, at the beginning of each line.
_GROUP: Final = re.compile(r"^\s*(?:[+|] |\+(?:-\+)?-+(?: \d+ -+)?$)")
_FINAL: Final = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Z_]\w*)(?:: (.*))?$")
_BEGINS: Final = ("Traceback ", "Exception Group Traceback ")
_OUTER_GROUP: Final = f"  + {_BEGINS[1]}"
_BETWEEN: Final = ("The above exception was the direct cause of ", "During handling of the above exception, ")
_NOTE: Final = "--------"  # JAX's, about its traceback
_MOST_LINES: Final = 3  # after an exception, of its text; more of them may be the output of something else
_PYTHON: Final = re.compile(r"\S*python[\d.]*: (.*)$")
# The last line of argparse and click, and a line of absl, when they refuse the arguments of a script. Other programs
# exit with 2 and such a line too, but not after their usage. Of a long usage, the message may lack the first lines.
_USAGE_ERROR: Final = re.compile(r"(?:[\w./ -]+: )?[Ee]rror: (.+)$")
_USAGE: Final = re.compile(r"[Uu]sage: \S")
_ARGUMENTS: Final = re.compile(r"unrecognized arguments: |the following arguments are required: |argument \S+: ")
_SYSTEM_ERROR: Final = "[Errno "  # argparse.FileType could not open a file, and its storage may recover
_USAGE_CODE: Final = 2
_ABSL_USAGE: Final = "FATAL Flags parsing error:"
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<")
# Exceptions after which the same call may succeed: of the network, of memory, or of a storage.
_TRANSIENT: Final = re.compile(
    r"Time(?:d)?out|Connect|Network|Unavailable|Throttl|Socket|SSL|HTTP|Http|URLError|gaierror|BrokenPipe|Temporar|"
    r"RateLimit|IncompleteRead|ClientError|EndpointError|RpcError|MemoryError|StorageError|PeerLost|WaitedTooLong|"
    r"Superseded|KeyboardInterrupt|^(?:OSError|IOError|BlockingIOError|InterruptedError)$"
)
# In the last line of a log, if nothing else is known about the end of the program.
_TRANSIENT_LINE: Final = re.compile(
    r"time[d]?[ -]?out|connect|network|unavailable|temporar|throttl|socket|ssl|http|refused|unreachable|resolve|"
    r"\[errno |memory|retry|try again|not ready",
    re.IGNORECASE,
)
# In messages of an accelerator's runtime, or of a library that calls a service: the failure may be temporary.
_TRANSIENT_TEXT: Final = re.compile(r"RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|out of memory", re.IGNORECASE)
_TRANSIENT_STATUS: Final = re.compile(r"\b(?:RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED)\b")
# Exit codes above it are 128 + a signal's number; 128 itself is a container that could not be started.
_LAST_CODE: Final = 128


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception that ended a pod.

    Attributes:
        type: the name of the exception's type without its module, such as ``KeyError``; ``python`` and ``StartError``
            where no Python code ran; ``SystemExit`` where the script refused its arguments; `NOT_TRAINED` where the
            script ended without an exception.
        at: ``file:line`` of the innermost frame of the script; empty where none is known.
        text: the exception's message.
        traceback: a bounded traceback; empty if there is none.
        transient: whether the same call may succeed later.
        guessed: whether only the exit code and the last line of the log are known, such as after ``sys.exit("why")``.
            `type` is the exit code then. One such death of each pod proves less than an exception.
    """

    type: str
    at: str
    text: str
    traceback: str = ""
    transient: bool = False
    guessed: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Equal for the same exception at the same place; without a place, for the same exception and message.

        Folders do not count: the folder of a volume, such as that of `spec.code`, may have another path in each pod.
        Numbers of a guessed text, such as the time, do not count either.
        """
        text = _FOLDERS.sub("", self.at or self.text)
        return self.type, _NUMBER.sub("0", text) if self.guessed else text

    @property
    def summary(self) -> str:
        """The exception in one line, such as ``KeyError: 'x' (train.py:12)``."""
        message = f"{self.type}: {self.text}" if self.text and self.text != self.type else self.type
        return f"{message} ({self.at})" if self.at else message


def raised_by(pod: Manifest) -> Raised | None:
    """Returns the exception that ended this pod; None where a signal or a disruption ended it, or nothing says why."""
    state = terminated_state(pod)
    cause = verdict_of(pod).cause if state is not None else None
    if state is not None and cause is Cause.EXITED_EARLY and not state.get("message"):
        # Every role of `train` leaves a message. A foreign one was written by the script, maybe after training (O10).
        return Raised(NOT_TRAINED, "", _NOT_TRAINED)
    if state is None or cause is not Cause.CRASHED:
        return None
    code = state.get("exitCode")
    if not isinstance(code, int) or not 0 < code <= _LAST_CODE:
        return None
    message = str(state.get("message") or "")
    if code == _LAST_CODE or state.get("reason") in ("StartError", "ContainerCannotRun"):
        return Raised("StartError", "", message.strip()) if message.strip() else None
    try:
        parsed = json.loads(message)
    except (ValueError, RecursionError):
        return _from_log(message, code) or _usage_error(message, code) or _last_line(message, code)
    return _from_message(parsed) if isinstance(parsed, dict) else None


def _from_message(message: dict[str, Any]) -> Raised | None:
    reason, at, text, traceback = (str(message.get(name) or "") for name in ("reason", "at", "message", "traceback"))
    if not reason:
        return None
    transient = message.get("transient") is True or _is_transient(reason, text)
    return Raised(reason, at, text, traceback, transient)


def _from_log(log: str, code: int) -> Raised | None:
    printed = log.rstrip().splitlines()
    lines = [_GROUP.sub("", line) for line in printed]
    frames = [(number, found) for number, line in enumerate(lines) if (found := _FRAME.match(line))]
    if not frames:
        found = _PYTHON.match(lines[-1]) if lines else None
        return None if found is None else Raised("python", "", found[1])
    last = frames[-1][0] + 1
    ends = ((at, found) for at, line in enumerate(lines[last:]) if line[:1].strip() and (found := _FINAL.match(line)))
    at, final = next(ends, (0, None))
    rest = itertools.takewhile(lambda line: not line.startswith(_NOTE), printed[last + at + 1 :])
    more = [line.strip() for line in rest if line.strip() and not _GROUP.match(line)]
    if final is None:
        return None
    start = _beginning(printed, lines, last)
    traceback = "\n".join(lines[start:])
    name, text = final[1].rpartition(".")[2], final[2] or ""
    # Exceptions that this one was raised from stand above it, and those in a group below it.
    parts = (line for at, line in enumerate(lines[start:], start) if at < last or _GROUP.match(printed[at]))
    others = (found[1].rpartition(".")[2] for line in parts if (found := _FINAL.match(line)))
    transient = _is_transient(name, text) or any(_TRANSIENT.search(other) for other in others)
    if more and code != 1:
        # Python itself ends with 1, so the script has survived this exception, and its last line may say why it ended.
        guess = _usage_error(log, code) or _last_line(log, code)
        return guess and replace(guess, traceback=traceback, transient=guess.guessed and (guess.transient or transient))
    transient = transient or any(_TRANSIENT_STATUS.search(line) for line in more)
    own = [found for number, found in frames if number >= start and not _LIBRARY.search(found[1])] or [frames[-1][1]]
    if len(more) > _MOST_LINES + 1:
        more[_MOST_LINES:-1] = ["..."]
    return Raised(name, f"{own[-1][1]}:{own[-1][2]}", " ".join([text, *more]).strip(), traceback, transient)


def _beginning(printed: list[str], lines: list[str], last: int) -> int:
    """Returns the first line of a traceback, with those of the exceptions that its exception was raised from, or
    contains.

    Args:
        printed: the lines of the log.
        lines: the same lines without the frame of an ExceptionGroup.
        last: the line after the last frame of the traceback.
    """
    begins = [number for number, line in enumerate(lines[:last]) if line.startswith(_BEGINS)]
    if not begins:
        return next(number for number, line in enumerate(lines) if _FRAME.match(line))
    for start in reversed(begins):
        before = next((line for line in reversed(lines[:start]) if line.strip()), "")
        is_inner = _GROUP.match(printed[start]) and not printed[start].startswith(_OUTER_GROUP)
        if not is_inner and not before.startswith(_BETWEEN):
            return start
    return 0  # the log begins in the middle of it


def _usage_error(log: str, code: int) -> Raised | None:
    """Returns the refusal of the script's arguments, which each pod repeats."""
    lines = [line.strip() for line in log.rstrip().splitlines()]
    for line, after in itertools.pairwise((*lines, "")):
        if line.startswith(_ABSL_USAGE):  # an error of several lines begins on the next line
            return Raised("SystemExit", "", line.removeprefix(_ABSL_USAGE).strip() or after or _ABSL_USAGE)
    refused = _USAGE_ERROR.match(lines[-1]) if code == _USAGE_CODE and lines else None
    if refused is None or _SYSTEM_ERROR in refused[1]:
        return None
    if not (_ARGUMENTS.match(refused[1]) or any(_USAGE.match(line) for line in lines)):
        return None
    return Raised("SystemExit", "", lines[-1])


def _last_line(log: str, code: int) -> Raised | None:
    """Returns the end of a program that printed why, and no traceback."""
    lines = [line.strip() for line in log.rstrip().splitlines()]
    if not lines or not lines[-1]:
        return None
    transient = _TRANSIENT_LINE.search(lines[-1]) is not None or _is_transient("", lines[-1])
    return Raised(f"exit code {code}", "", lines[-1], transient=transient, guessed=True)


def _is_transient(name: str, text: str) -> bool:
    return bool(_TRANSIENT.search(name) or _TRANSIENT_TEXT.search(text))
