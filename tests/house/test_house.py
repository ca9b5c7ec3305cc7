"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from sources import module_of, nodes_of

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    path for root in (ROOT / "operator", ROOT / "images" / "trainer") for path in root.iterdir() if path.is_dir()
)
MODULES = sorted(
    path
    for package in PACKAGES
    for path in package.rglob("*.py")
    if "_pb2" not in path.name and path.relative_to(package).parts[0] != "tests"
)


def test_operator_never_becomes_a_package_that_shadows_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    for folder in (ROOT, ROOT / "operator", ROOT / "images" / "trainer"):
        found = subprocess.run(
            [sys.executable, "-c", "import operator; print(operator.__file__, operator.add(1, 2))"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert str(ROOT) not in found
        assert found.rstrip().endswith(" 3")


def test_a_module_has_a_docstring_and_stays_small() -> None:
    assert len(MODULES) > 500
    silent = [str(module.relative_to(ROOT)) for module in MODULES if not ast.get_docstring(module_of(module))]
    assert silent == [], "its first docstring says why it exists"
    lines = {str(module.relative_to(ROOT)): len(module.read_text().splitlines()) for module in MODULES}
    assert {module: number for module, number in lines.items() if number > 600} == {}, "a few hundred at most"


@pytest.mark.parametrize(
    "imports",
    [
        {
            "backstay_client": {"aiohttp", "yaml", "jax", "kopf", "kubernetes"},
            "backstay_spec.plan": {"jax", "numpy", "grpc", "yaml", "kopf", "kubernetes", "aiohttp"},
            "backstay_cli.main": {"jax", "kopf", "pyarrow", "backstay"},
            "backstay_operator.app": {"jax", "optax", "numpy", "pyarrow", "backstay"},
        },
        {
            "backstay": {"jax", "pyarrow", "grpc", "kopf", "kubernetes"},
            "backstay._train": {"kopf", "kubernetes", "aiohttp"},
        },
    ],
    ids=["without the trainer", "the trainer"],
)
def test_what_an_import_never_pulls_in(imports: dict[str, set[str]]) -> None:
    """One process imports several modules, so a module has what those before it have, too."""
    code = "import sys\n" + "".join(
        f"import {module}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))\n" for module in imports
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    for (module, never), loaded in zip(imports.items(), done.stdout.splitlines(), strict=True):
        assert not never & set(loaded.split()), module


def test_nothing_is_ever_pickled() -> None:
    """T7: on disk or on the wire."""
    for module in MODULES:
        for node in nodes_of(module):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & {
                name.split(".")[0] for name in names
            }, module


def test_every_locked_version_satisfies_what_is_declared() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    wanted = []
    for file in (ROOT / "pyproject.toml", ROOT / "operator" / "backstay_cluster" / "pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        wanted += [Requirement(line) for line in project["dependencies"]]
        wanted += [Requirement(line) for extra in project["optional-dependencies"].values() for line in extra]
    locked: dict[str, set[str]] = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line and line[0].isalnum():
            requirement = Requirement(line.rstrip("\\ ").strip())
            version = next(iter(requirement.specifier)).version
            locked.setdefault(canonicalize_name(requirement.name), set()).add(version)
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        if name in {"backstay", "backstay-cluster"}:
            continue
        assert name in locked, f"{name} is declared and not locked: make lock"
        assert all(requirement.specifier.contains(version) for version in locked[name]), f"{name}: make lock"


def test_the_two_commands_of_the_readme_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in readme
        assert f"\n{command}:" in makefile


def test_the_page_about_the_runtime_names_modules_and_classes_that_exist() -> None:
    page = (ROOT / "docs" / "internals" / "runtime.md").read_text()
    trainer = ROOT / "images" / "trainer" / "backstay"
    named = set(re.findall(r"`(_\w+(?:/\w+)*/_?\w+\.py)`", page))
    assert len(named) > 15
    assert sorted(name for name in named if not (trainer / name).exists()) == []
    path = page.split("## The path of a contribution")[1].split("\n## ")[0]
    source = "\n".join(module.read_text() for module in trainer.rglob("*.py"))
    classes = set(re.findall(r"`([A-Z]\w+)`", path)) - {"GradientId", "Staged", "Commit"}  # messages
    assert len(classes) > 10
    assert sorted(name for name in classes if not re.search(rf"^class {name}\b", source, re.M)) == []
