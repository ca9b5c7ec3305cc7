"""Writes the chart's dashboards and rules: `python helm/dashboards`, part of `make generate`. A test holds that they
are fresh.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from of_fleet import fleet
from of_job import job
from of_operator import operator
from rules import rules

CHART = Path(__file__).parents[1] / "backstay"


def files() -> dict[str, str]:
    """Path inside the chart -> contents."""
    dashboards = {"fleet": fleet(), "job": job(), "operator": operator()}
    made = {
        f"dashboards/{name}.json": json.dumps(one, indent=1, ensure_ascii=False) + "\n"
        for name, one in dashboards.items()
    }
    return {**made, "rules/backstay.yaml": rules()}


def main() -> int:
    """Write every file."""
    for path, text in files().items():
        (CHART / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
