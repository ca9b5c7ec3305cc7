"""docs/cluster.md is followed by hand: the jobs in it are valid, and its commands name what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from backstay_spec.validation import parse_job


def blocks(root: Path, language: str) -> list[str]:
    text = (root / "docs" / "cluster.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {key: merged(base.get(key), over[key]) if key in over else base[key] for key in base | over}
    return over if over is not None else base


def test_its_jobs_are_valid(root: Path) -> None:
    given = [yaml.safe_load(block) for block in blocks(root, "yaml")]
    (whole,) = (one for one in given if one.get("kind") == "TrainingJob")
    parts = [one for one in given if "kind" not in one]
    claims = [one for one in given if one.get("kind") == "PersistentVolumeClaim"]
    assert parts
    for job in (whole, *(merged(whole, part) for part in parts)):
        claimed = parse_job(job).spec.checkpoint.volume
        assert claimed == {"persistentVolumeClaim": {"claimName": claims[0]["metadata"]["name"]}}
    assert whole["spec"]["code"]["configMap"] in "".join(blocks(root, "sh"))


def test_its_commands_name_values_of_the_chart_and_targets_of_the_images(root: Path) -> None:
    commands = "".join(blocks(root, "sh"))
    values = yaml.safe_load((root / "helm/backstay/values.yaml").read_text())
    paths = re.findall(r"--set ([A-Za-z.]+)=", commands)
    assert len(paths) >= 3
    for path in paths:
        at: Any = values
        for key in path.split("."):
            # A map of the user's own keys, such as labels, ends the way.
            at = at[key] if at != {} else {}
    trainer = (root / "images/trainer/Dockerfile").read_text()
    for target in re.findall(r"--target (\w+)", commands):
        assert f"AS {target}\n" in trainer
