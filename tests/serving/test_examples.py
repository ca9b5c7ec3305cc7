"""The served example answers to curl, and its manifests agree with what the process has."""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from between import LONG, put
from typer.testing import CliRunner

from backstay._serving._settings import VARIABLES, ServingPorts, ServingSettings
from backstay_cli.main import app

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
COMMAND = [sys.executable, "-m", "backstay_cli.main", "serve"]


def containers() -> list[Any]:
    """Returns the container of the Deployment and of the ServingRuntime, each with the volumes of its pod."""
    [deployment] = [one for one in documents("serve.yaml") if one["kind"] == "Deployment"]
    [runtime] = [one for one in documents("serve-kserve.yaml") if one["kind"] == "ServingRuntime"]
    pods = [deployment["spec"]["template"]["spec"], runtime["spec"]]
    return [pytest.param(pod["containers"][0], pod["volumes"], id=name) for pod, name in zip(pods, "dr", strict=True)]


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DIGITS / name).read_text()))


@pytest.mark.parametrize(("container", "volumes"), containers())
def test_the_manifests_agree_with_the_process(container: Any, volumes: Any) -> None:
    assert {entry["name"] for entry in container["env"]} <= set(VARIABLES)
    assert {volume["name"] for volume in volumes} == {mount["name"] for mount in container["volumeMounts"]}
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in ("/v2/health/ready", "/v2/health/live")
    assert "ready" in container["readinessProbe"]["httpGet"]["path"]
    assert "live" in container["livenessProbe"]["httpGet"]["path"], "a pod without a checkpoint is not restarted"
    ports = [port["containerPort"] for port in container["ports"]]
    assert set(ports) <= {ServingPorts().http, ServingPorts().grpc}
    assert f"--target serving -t {container['image']}" in re.sub(
        r" +", " ", (ROOT / "images/trainer/Dockerfile").read_text()
    )


def test_o11_a_pod_has_the_time_to_answer_what_it_accepted() -> None:
    """The grace period is longer than the drain and the last answers, and a new pod is ready first."""
    deployment, service, budget = documents("serve.yaml")
    pod = deployment["spec"]["template"]["spec"]
    settings = ServingSettings()
    assert pod["terminationGracePeriodSeconds"] > settings.drain + settings.finish
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels
    assert pod["automountServiceAccountToken"] is False
    [job, claim] = documents("job.yaml")
    assert claim["metadata"]["name"] == pod["volumes"][1]["persistentVolumeClaim"]["claimName"]
    assert job["spec"]["checkpoint"]["volume"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_page_names_every_variable() -> None:
    page = (ROOT / "docs" / "howto" / "serve.md").read_text()
    assert [name for name in VARIABLES if f"`{name}`" not in page] == []


def test_backstay_serve_refuses_invalid_arguments(tmp_path: Path) -> None:
    put(tmp_path / "serve.py", "")
    for arguments, message in (
        (["missing.py"], "missing.py is not a file with the ending .py"),
        ([str(tmp_path)], "is not a file with the ending .py"),
        (["--follow", "--step", "4", str(tmp_path / "serve.py")], "--follow and --step exclude each other"),
    ):
        result = CliRunner().invoke(app, ["serve", *arguments])
        assert result.exit_code == 2
        assert message in result.output


@pytest.mark.e2e
@pytest.mark.tool("curl")
def test_the_digits_are_trained_served_and_answered_to_curl(
    tmp_path: Path, compiled: Path, curl: Any, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands of the page, with the example as it is in the repository."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(compiled)}
    train = (DIGITS / "train.py").read_text().replace("steps=400", "steps=60")
    put(tmp_path / "train.py", train)
    put(tmp_path / "serve.py", (DIGITS / "serve.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BACKSTAY_CHECKPOINT", "ck")
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    monkeypatch.setattr(root, "level", root.level)
    runpy.run_path("train.py", run_name="__main__")
    log = tmp_path / "log"
    with log.open("w") as out:
        served = subprocess.Popen(
            [*COMMAND, "--checkpoint", "ck", "--step", "60", "--port", "0", "--grpc-port", "0", "serve.py"],
            cwd=tmp_path,
            env={**environment, "BACKSTAY_SERVE_DRAIN_SECONDS": "0"},
            stderr=out,
        )
    try:
        eventually(lambda: "step 60 is served" in log.read_text() or served.poll() is not None)
        port = re.search(r"HTTP on port (\d+)", log.read_text())
        assert port is not None, log.read_text()
        from sklearn.datasets import load_digits

        digits = load_digits()
        tensor = {"name": "image", "datatype": "FP32", "shape": [32, 8, 8], "data": digits.images[:32].ravel().tolist()}
        answer = curl.run(f"localhost:{port[1]}/v2/models/digits/infer", "-d", json.dumps({"inputs": [tensor]}))
        outputs = {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
        assert np.mean(np.array(outputs["digit"]) == digits.target[:32]) > 0.7
        assert json.loads(answer)["model_version"] == "60"
        metadata = json.loads(curl.run(f"localhost:{port[1]}/v2/models/digits"))
        assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 8, 8]}]
        served.terminate()
        assert served.wait(LONG) == 0, "the command is the server: it receives the signal"
    finally:
        served.kill()
        served.wait()
