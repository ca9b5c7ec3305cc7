"""The commands of the README run as they are printed, against `backstay up` with the real kubectl."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from between import LONG, put, read_until

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_readme_prints_the_example_as_it_is() -> None:
    example = (ROOT / "examples/digits/job.yaml").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert [list(yaml.safe_load_all(block)) for block in blocks] == [list(yaml.safe_load_all(example))]
    assert blocks[0].strip() in example


DIGITS = """digits = SimpleNamespace(
    images=np.random.default_rng(1).uniform(0, 16, (1797, 8, 8)), target=np.arange(1797) % 10
)
"""


def kubectl_commands() -> list[list[str]]:
    """Returns the kubectl commands of the README."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("kubectl ")]


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[str]:
    """The output of `backstay up`, which runs during the test."""
    up = subprocess.Popen(
        [sys.executable, "-m", "backstay_cli.main", "up", "--data-dir", str(tmp_path / "up")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield read_until(up.stdout, "export KUBECONFIG=").rpartition("export KUBECONFIG=")[2].strip()
    finally:
        up.send_signal(signal.SIGINT)
        out, _ = up.communicate(timeout=LONG)
    assert up.returncode == 0 or "nothing is left running" in out


@pytest.mark.tool("kubectl")
def test_the_example_runs_with_backstay_up_and_the_kubectl_commands_of_the_readme(
    kubeconfig: str, tmp_path: Path
) -> None:
    """It waited for a ConfigMap and a claim that do not exist.

    It has two workers, the least with a backup, and a few updates, which have the metrics. The digits are random: each
    pod would import scikit-learn for them, which takes a second of a processor. `tests/serving/test_examples.py` trains
    the example with its digits.
    """
    shutil.copytree(ROOT / "examples" / "digits", tmp_path / "examples" / "digits")
    for name, large, small in (
        ("job.yaml", "replicas: 4", "replicas: 2"),
        ("train.py", "steps=400", "steps=20"),
        ("train.py", "from sklearn.datasets import load_digits\n", "from types import SimpleNamespace\n"),
        ("train.py", "digits = load_digits()\n", DIGITS),
    ):
        file = tmp_path / "examples" / "digits" / name
        assert file.read_text().count(large) == 1
        put(file, file.read_text().replace(large, small))
    environment = {**os.environ, "KUBECONFIG": kubeconfig}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=LONG)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    commands = kubectl_commands()
    assert [command[1] for command in commands] == ["create", "apply"]
    for command in commands:
        run(*command)
    # A step, and not the end: 400 updates take long on a busy machine.
    run("kubectl", "wait", "--for=jsonpath={.status.trainMetrics.accuracy}", "tj/digits", "--timeout=600s")
    assert "Bound" in run("kubectl", "get", "pvc", "digits-checkpoints")
