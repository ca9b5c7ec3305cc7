"""The documentation is true: generated pages are fresh, its YAML is valid, its Python runs, its commands exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from typer.testing import CliRunner

from backstay_cli.main import app
from backstay_spec.validation import parse_job

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
USER_PAGES = sorted([*DOCS.glob("*.md"), *(DOCS / "reference").glob("*.md"), ROOT / "README.md"])
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> Iterator[tuple[str, str, str]]:
    """(page, what follows the language, text) of each code block of a language on the users' pages."""
    for page in USER_PAGES:
        for found, rest, text in _BLOCK.findall(page.read_text()):
            if found == language:
                yield page.name, rest, text


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["trainingjob.md", "command.md", "metrics.md"])
def test_the_generated_pages_are_fresh(name: str) -> None:
    """Run `make generate` after a change of fields, commands or metrics."""
    assert (DOCS / "reference" / name).read_text() == generator().PAGES[name]()


def test_every_trainingjob_of_the_docs_is_valid() -> None:
    jobs = [
        (page, document)
        for page, _, text in blocks("yaml")
        for document in yaml.safe_load_all(text)
        if isinstance(document, dict) and document.get("kind") == "TrainingJob"
    ]
    assert len(jobs) >= 2
    for _, job in jobs:
        parse_job(job)


def test_every_script_of_the_docs_runs(tmp_path: Path) -> None:
    """Blocks with a title are whole scripts; they run in one process as a reader would run them."""
    scripts = [(page, text) for page, rest, text in blocks("python") if "title=" in rest]
    assert scripts
    for number, (page, text) in enumerate(scripts):
        script = tmp_path / f"script_{number}.py"
        script.write_text(text)
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, f"{page}\n{done.stderr[-2000:]}"


def test_every_other_python_block_is_python() -> None:
    for page, _, text in blocks("python"):
        compile(text, page, "exec")


def backstay_commands() -> list[tuple[str, list[str]]]:
    lines = [(page, line) for page, _, text in blocks("sh") for line in text.splitlines()]
    return [(page, shlex.split(line, comments=True)[1:]) for page, line in lines if line.startswith("backstay ")]


@pytest.mark.parametrize(("page", "arguments"), backstay_commands())
def test_every_command_of_the_docs_has_valid_options(
    page: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` prints its job instead of running it; for `validate` the file is there; of others the help is asked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text((ROOT / "examples/digits/job.yaml").read_text())
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if arguments[0] == "run":
        arguments = ["run", "--print-job", *arguments[1:]]
    elif arguments[0] not in {"validate", "--version"}:
        arguments = [*arguments, "--help"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"{page}: backstay {shlex.join(arguments)}\n{result.output}"
