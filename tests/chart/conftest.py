"""What the tests of the chart share: helm, without a cluster and without a home."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

NAMESPACE = "backstay-system"


class Helm:
    """The installed helm, on our chart."""

    def __init__(self, program: str, chart: Path, home: Path) -> None:
        self.program = program
        self.chart = chart
        folders = ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")
        self._env = {"PATH": os.environ["PATH"], "HOME": str(home), **{name: str(home / name) for name in folders}}

    def run(self, *arguments: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = self._env if kubeconfig is None else {**self._env, "KUBECONFIG": str(kubeconfig)}
        return subprocess.run([self.program, *arguments], capture_output=True, text=True, env=env, timeout=120)

    def template(self, *arguments: str, namespace: str = NAMESPACE) -> str:
        """The rendered manifests; fails with helm's message."""
        done = self.run(
            "template",
            "backstay",
            str(self.chart),
            f"--namespace={namespace}",
            *arguments,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def objects(self, *arguments: str, namespace: str = NAMESPACE) -> list[dict[str, Any]]:
        """The rendered manifests, read."""
        return [o for o in yaml.safe_load_all(self.template(*arguments, namespace=namespace)) if o]


@pytest.fixture(scope="session")
def chart(root: Path) -> Path:
    return root / "helm" / "backstay"


@pytest.fixture(scope="session")
def helm(tool: Callable[[str], str], chart: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(tool("helm"), chart, tmp_path_factory.mktemp("helm"))
