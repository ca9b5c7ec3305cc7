"""Writes log lines to stderr as text for people, or as one JSON object for each line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal


class JsonFormatter(logging.Formatter):
    """One JSON object for each line, with the fields that log collectors expect."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Time, level and message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")


def set_up(kind: Literal["text", "json"], level: str) -> None:
    """Log to stderr. Kopf's own lines are shown from WARNING on, because it logs each event."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("kopf", "aiohttp", "asyncio", "grpc"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    if root.level > logging.DEBUG:
        # While the API server does not answer, each of Kopf's watches logs each try. The Lease's warning is enough.
        logging.getLogger("kopf._cogs.clients").setLevel(logging.CRITICAL)
