"""Grafana's dashboard-linter accepts the dashboards, with the exclusions in `helm/dashboards/.lint`.

`go install` cannot build the linter (docs/decisions/0046), so no command of this repository installs it. Without it,
the test is skipped, also in CI, where `test_dashboard.py` checks what the linter found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from between import LONG, put


@pytest.fixture
def exclusions(root: Path) -> Path:
    return root / "helm" / "dashboards" / ".lint"


def test_an_exclusion_names_dashboards_and_a_reason(exclusions: Path, dashboards: Any) -> None:
    titles = {dashboard.json["title"] for dashboard in dashboards}
    for rule, given in yaml.safe_load(exclusions.read_text())["exclusions"].items():
        assert given["reason"].endswith("."), rule
        assert {entry["dashboard"] for entry in given["entries"]} <= titles, rule


@pytest.mark.parametrize("name", ["fleet", "job", "operator"])
def test_the_linter_accepts_the_dashboard(name: str, exclusions: Path, root: Path, tmp_path: Path) -> None:
    places = [str(root / ".tools" / "bin"), os.environ.get("PATH", os.defpath)]
    program = shutil.which("dashboard-linter", path=os.pathsep.join(places))
    if program is None:
        pytest.skip("not installed: dashboard-linter v0.1.1 (docs/decisions/0046)")

    def lint(file: Path) -> subprocess.CompletedProcess[str]:
        command = [program, "lint", "--strict", "--config", str(exclusions), str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=LONG)

    file = root / "helm" / "backstay" / "dashboards" / f"{name}.json"
    done = lint(file)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / "broken.json"
    put(broken, file.read_text().replace("${prometheus_datasource}", "mine"))
    assert lint(broken).returncode != 0, "a check that cannot fail"
