"""The documentation is true: generated pages are fresh, links lead somewhere, and every block of code is run.

Python runs in this process, page by page, from top to bottom. Shell blocks run in bash with programs that record their
arguments. Each recorded command is then checked, and kubectl commands run against an API server. Every YAML block is
validated. One job really runs: the job of docs/first-job.md, whose checkpoints other pages read.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import logging
import math
import os
import re
import runpy
import shlex
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from between import LONG, put
from typer.testing import CliRunner

import backstay
from backstay import testing
from backstay_cli.main import app
from backstay_cluster.apiserver import ApiServer
from backstay_spec.reasons import CONDITIONS
from backstay_spec.validation import parse_job

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Blocks of these kinds are not code: diagrams, output of programs, and names of tests.
NOT_CODE = {"text", ""}
_BLOCK = re.compile(r"^( *)```([\w-]*)([^\n]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_SETUP = re.compile(r"<!-- test-setup\n(.*?)-->", re.DOTALL)
# Programs that a page may name. A block runs with these alone, and each only records how it was called.
PROGRAMS = (
    "backstay",
    "chown",
    "curl",
    "docker",
    "git",
    "helm",
    "kill",
    "kubectl",
    "make",
    "openssl",
    "pgrep",
    "pip",
    "python",
    "python3",
)
# One `printf` is one write, so the two programs of a pipe do not write into each other's records.
_RECORDER = """#!/bin/sh
printf '%s\\000' "${{0##*/}}" "$@" '
' >> {log}
"""


@dataclass(frozen=True)
class Block:
    """One block of code of a page.

    Attributes:
        page: path of the page from the repository's root.
        language: the word after the fence.
        rest: the remainder of that line, such as a title.
        text: the code.
        line: line of the page on which the block begins.
    """

    page: str
    language: str
    rest: str
    text: str
    line: int

    @property
    def title(self) -> str:
        """The file name in `title="..."`; empty where there is none."""
        found = re.search(r'title="([^"]+)"', self.rest)
        return found.group(1) if found else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Returns every page that a person reads, the README included."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "helm" / "backstay" / "README.md",
        *sorted(DOCS.rglob("*.md")),
    ]


def blocks(page: Path) -> Iterator[Block]:
    """Yields each block of code of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        indent, language, rest, code = found.groups()
        lines = (line.removeprefix(indent) for line in code.splitlines())
        line = text.count("\n", 0, found.start()) + 1
        yield Block(str(page.relative_to(ROOT)), language, rest, "\n".join(lines) + "\n", line)


def setup(page: Path) -> str:
    """Returns the Python in a comment of the page, with names that its blocks use without defining them."""
    return "\n".join(_SETUP.findall(page.read_text(encoding="utf-8")))


def recorded(block: Block, folder: Path) -> list[list[str]]:
    """Run a block with bash, whose programs record their arguments; return the commands in order.

    Raises:
        AssertionError: bash refused the block, or the block names a program that is not in `PROGRAMS`.
    """
    programs, log = folder / "programs", folder / "commands"
    programs.mkdir(exist_ok=True)
    for name in PROGRAMS:
        put(programs / name, _RECORDER.format(log=log))
        (programs / name).chmod(0o755)
    log.write_text("")
    work = folder / "work"
    # The tutorials use a clone of the repository and its virtual environment.
    for activate in (work / ".venv" / "bin" / "activate", work / "backstay" / ".venv" / "bin" / "activate"):
        activate.parent.mkdir(parents=True, exist_ok=True)
        put(activate, "")
    done = subprocess.run(
        # `kill` is a builtin of bash, which the recorder must replace.
        ["/bin/bash", "-e", "-c", "enable -n kill\n" + block.text],
        cwd=work,
        env={"PATH": f"{programs}", "HOME": str(folder), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, f"{block}\n{done.stderr}"
    lines = os.fsdecode(log.read_bytes()).split("\x00\n\x00")
    return [line.split("\x00") for line in lines if line]


PAGES = pages()
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
SHELL = [block for page in PAGES for block in blocks(page) if block.language == "sh"]
YAML = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]
JOB = {
    "apiVersion": "backstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "digits"},
    "spec": {"image": "example.com/train:1"},
}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_list_begins_after_a_blank_line(page: Path) -> None:
    """Otherwise the site shows it as a part of the paragraph before it."""
    lines, in_fence, in_list, found = page.read_text().splitlines(), False, False, []
    for before, line in itertools.pairwise(["", *lines]):
        if line.strip().startswith("```"):
            in_fence = not in_fence
        elif not in_fence and re.match(r"(- |\d+\. )", line):
            if not in_list and before.strip() and not before.startswith("#"):
                found.append(line)
            in_list = True
        elif not in_fence and line.strip() and not line.startswith("  "):
            in_list = False
    assert found == []


def test_the_generated_pages_are_fresh() -> None:
    """Run `make generate` after a change of fields, commands, metrics, conditions, events or decisions."""
    stale = [name for name, text in generator().PAGES.items() if (DOCS / name).read_text() != text()]
    assert stale == []


def test_every_public_name_is_in_the_python_reference() -> None:
    page = (DOCS / "reference" / "python.md").read_text()
    public = [name for name in backstay.__all__ if not hasattr(backstay.errors, name)]
    assert [name for name in public if f"::: backstay.{name}\n" not in page] == []


# Links


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as Python-Markdown and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = (
            re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")).strip().lower()
        )
        found |= {re.sub(r"[-\s]+", "-", plain), plain.replace(" ", "-")}
    return found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        if page.is_relative_to(DOCS):
            assert target.is_relative_to(DOCS), f"{link} leaves the site: use the address on GitHub"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    found = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert listed == {name for name in found if not re.match(r"decisions/\d", name)}  # decisions/index.md lists these


def test_the_first_change_finds_the_tests_of_each_package() -> None:
    """A package that has no row, and a folder that does not exist, would send a first patch to CI untested."""
    page = (DOCS / "first-change.md").read_text().partition("## What the checks want")[0]
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", page, re.MULTILINE)
    changed = {name for packages, _ in rows for name in re.findall(r"`([^`]+)`", packages)}
    trainer = ROOT / "images" / "trainer" / "backstay"
    packages = {path.parent.name for path in trainer.glob("*/__init__.py")}
    packages |= {f"operator/{path.parent.name}" for path in (ROOT / "operator").glob("*/__init__.py")}
    assert changed == packages | {"docs", "examples", "helm"}
    for folder in {name for _, cell in rows for name in re.findall(r"tests/\w+", cell)}:
        assert list((ROOT / folder).glob("test_*.py")), folder


# Blocks


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_has_a_language_that_a_test_runs(page: Path) -> None:
    languages = {block.language for block in blocks(page)}
    assert languages <= {"python", "sh", "yaml", "dockerfile", *NOT_CODE}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it after docs/first-job.md: scripts, job.yaml, the examples and the chart."""
    folder = tmp_path_factory.mktemp("workshop")
    work = folder / "work"
    work.mkdir()
    for page in PAGES:
        for block in blocks(page):
            if block.title:
                put(work / block.title, block.text)
    put(work / "job.yaml", (ROOT / "examples" / "digits" / "job.yaml").read_text())
    for name in ("examples", "helm", "images", "Dockerfile", "bench", "tests"):
        (work / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def trained(workshop: Path) -> Path:
    """The job of docs/first-job.md has run, with checkpoints, and with the processes of docs/howto/test-your-script.md.

    `tests/e2e/test_command.py` runs other jobs with the command of the page.
    """
    work = workshop / "work"
    # It sets a variable that JAX reads. Pages import it, and then other processes than these would fork their pods.
    importlib.import_module("sklearn.datasets")
    testing.run(work / "train.py", servers=2, workers=2, folder=work, checkpoint_every=100)
    return work


@pytest.fixture
def quiet_logs() -> Iterator[None]:
    """Restore the root logger, which `train` configures for its own process."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before[0], before[1]


@pytest.mark.e2e
@pytest.mark.usefixtures("quiet_logs")
@pytest.mark.parametrize("page", WITH_PYTHON, ids=[str(page.relative_to(ROOT)) for page in WITH_PYTHON])
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    names: dict[str, Any] = {"__name__": "__page__"}
    exec(setup(page), names)
    for block in blocks(page):
        if block.language != "python":
            continue
        if block.title:
            names |= runpy.run_path(block.title, run_name="__main__")
            names["__name__"] = "__page__"
            if block.title.startswith("test_"):
                for test in [value for name, value in names.items() if name.startswith("test_")]:
                    test()
        else:
            # The name of the page and its line are in the traceback of a failure.
            exec(compile("\n" * block.line + block.text, block.page, "exec"), names)


@pytest.mark.parametrize("block", YAML, ids=str)
def test_every_yaml_block_is_valid(block: Block) -> None:
    for document in yaml.safe_load_all(block.text):
        kind = document.get("kind")
        if kind in (None, "TrainingJob"):
            merged = {**JOB, **document, "spec": {**JOB["spec"], **document["spec"]}}  # type: ignore[dict-item]
            parse_job(merged)
        else:
            assert kind in ("PersistentVolumeClaim", "TFJob")
            assert document["metadata"]["name"]
            assert document["apiVersion"]


def check_backstay(arguments: list[str]) -> None:
    """`run` prints its job instead of running it; `validate` runs; of other commands the options are checked."""
    if arguments[0] == "run":
        arguments = ["run", "--print-job", *arguments[1:]]
    elif arguments[0] not in {"validate", "--version"}:
        arguments = [*arguments, "--help"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"backstay {shlex.join(arguments)}\n{result.output}"


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert arguments[1] in ("venv", "pip", "pytest", "backstay_cluster"), arguments
    else:
        assert Path(arguments[0]).is_file(), f"{arguments[0]} does not exist"


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for argument in arguments[1:]:
        found = re.fullmatch(r"\.\[([\w,]+)\]", argument)
        assert found is None or set(found.group(1).split(",")) <= set(extras), argument


def check_docker(arguments: list[str]) -> None:
    if arguments[0] != "build":
        assert arguments[0] == "push", arguments
        return
    file = Path(arguments[arguments.index("-f") + 1] if "-f" in arguments else "Dockerfile")
    text = file.read_text()
    if "--target" in arguments:
        assert f"AS {arguments[arguments.index('--target') + 1]}\n" in text
    for number, argument in enumerate(arguments):
        if argument == "--build-arg":
            assert f"ARG {arguments[number + 1].partition('=')[0]}" in text


def check_make(arguments: list[str]) -> None:
    assert all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in arguments if "=" not in target)


def check_git(arguments: list[str]) -> None:
    assert arguments == ["clone", "https://github.com/backstay-dev/backstay"]


def check_curl(arguments: list[str]) -> None:
    """The pages send requests to `backstay serve` alone: the path exists, and a body is JSON with whole tensors."""
    url = next(argument for argument in arguments if argument.startswith("localhost:8080"))
    assert re.fullmatch(r"/metrics|/v2(/health/(live|ready)|/models/\w+(/ready|/infer)?)?", url.partition("8080")[2]), (
        url
    )
    assert ("-d" in arguments) == url.endswith("/infer")
    if "-d" in arguments:
        for tensor in json.loads(arguments[arguments.index("-d") + 1])["inputs"]:
            assert len(tensor["data"]) == math.prod(tensor["shape"]), tensor["name"]


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "backstay": check_backstay,
    "python": check_python,
    "python3": check_python,
    "pip": check_pip,
    "docker": check_docker,
    "make": check_make,
    "git": check_git,
    "curl": check_curl,
    # Of these the recording shell checks that they can be typed like this.
    "pgrep": lambda arguments: None,
    "kill": lambda arguments: None,
    "chown": lambda arguments: None,
    "openssl": lambda arguments: None,
}


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_every_shell_block_can_be_typed_as_it_is(block: Block, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = recorded(block, workshop)
    assert commands
    monkeypatch.chdir(workshop / "work")
    for program, *arguments in commands:
        if program not in ("kubectl", "helm"):
            CHECKS[program](arguments)


def test_each_program_is_checked() -> None:
    assert set(PROGRAMS) == {*CHECKS, "kubectl", "helm"}


@pytest.mark.tool("helm")
@pytest.mark.parametrize("block", [block for block in SHELL if "helm " in block.text], ids=str)
def test_the_helm_commands_have_values_of_the_chart(block: Block, workshop: Path, helm: Any) -> None:
    """`helm install` and `helm upgrade` become `helm template`, which refuses values that the schema does not have."""
    for program, *arguments in recorded(block, workshop):
        if program != "helm" or arguments[0] not in ("install", "upgrade"):
            continue
        rest = [
            argument
            for argument in arguments[1:]
            if argument not in ("--create-namespace", "--reuse-values", "--reset-then-reuse-values")
        ]
        done = helm.run("template", *[str(ROOT / one) if one == "helm/backstay" else one for one in rest])
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def kubeconfig(workshop: Path) -> Iterator[Path]:
    """An API server with the TrainingJob `digits`, and no kubelet."""
    loop, server = asyncio.new_event_loop(), ApiServer(token="a-token-of-the-docs")
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(LONG)

    run(server.start())
    path = workshop / "kubeconfig"
    put(path, server.kubeconfig())
    yield path
    run(server.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LONG)
    loop.close()


# These manifests have kinds that the embedded API server lacks, such as Deployment. `tests/chart/test_real_cluster.py`
# validates them on a real API server.
OF_A_CLUSTER = ("examples/digits/serve.yaml",)


@pytest.mark.tool("kubectl")
def test_the_kubectl_commands_of_the_docs_run(workshop: Path, kubeconfig: Path, tool: Callable[[str], str]) -> None:
    """Each page has its own namespace, with the job of examples/digits in it."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(workshop), "KUBECONFIG": str(kubeconfig)}

    definitions = "---\n".join(file.read_text() for file in (ROOT / "crds").iterdir())  # for a pipe of helm's output

    def kubectl(*arguments: str) -> None:
        done = subprocess.run(
            [tool("kubectl"), *arguments],
            cwd=workshop / "work",
            env=environment,
            input=definitions,
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
        assert done.returncode == 0, f"kubectl {shlex.join(arguments)}\n{done.stderr}"

    kubectl("apply", "-f", str(ROOT / "crds"))
    kubectl("wait", "--for=condition=Established", "crd/trainingjobs.backstay.dev", "--timeout=600s")
    for namespace in ("backstay-system", "research"):
        kubectl("create", "namespace", namespace)
    seen = set()
    for block in SHELL:
        for program, *arguments in recorded(block, workshop):
            # These wait for a cluster with nodes, or end at the reader's Ctrl-C. The embedded API server has no
            # server-side apply.
            without = ("--watch", "--follow", "--server-side", "--force-conflicts")
            wanted = [one for one in arguments if one not in without]
            if program != "kubectl" or "rollout" in wanted or "crd" in wanted:
                continue
            if wanted[:2] == ["apply", "-f"] and wanted[2] in OF_A_CLUSTER:
                continue
            if wanted[:2] == ["wait", "trainingjob"]:  # no operator sets the condition here
                awaited = {one.removeprefix("--for=condition=") for one in wanted if one.startswith("--for=")}
                assert awaited
                assert awaited <= {condition.type for condition in CONDITIONS}
                continue
            namespace = re.sub(r"\W+", "-", block.page.lower())
            if namespace not in seen:
                seen.add(namespace)
                kubectl("create", "namespace", namespace)
                kubectl("--namespace", namespace, "apply", "-f", "job.yaml")
            if "rolebinding" in wanted:
                wanted += ["--dry-run=client"]  # the embedded API server reads only JSON of this kind
            if "--namespace" not in wanted:
                wanted = ["--namespace", namespace, *wanted]
            kubectl(*wanted)
    assert len(seen) >= 3
