"""A run starts with the programs that an earlier run compiled, without incomplete entries or another processor's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from between import put

from backstay_client.embedded import program_store
from backstay_cluster.cluster import COMPILED_ENV, NAMES_ENV

SETTINGS = "import jax; jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)"


def entry(folder: Path, name: str, size: int = 10, age: float = 0.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-cache"
    put(path, bytes(size))
    os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))


def names(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix("-cache") for path in folder.glob("*-cache"))


def test_entries_go_from_one_run_to_the_next(tmp_path: Path) -> None:
    first, store, second = tmp_path / "first", tmp_path / "store", tmp_path / "second"
    entry(first, "jit_loss")
    (first / "init.lock").touch()
    assert program_store.seed(store, first) == 0
    assert program_store.keep(first, store) == 1
    assert program_store.keep(first, store) == 0
    assert program_store.seed(store, second) == 1
    assert names(second) == ["jit_loss"]
    assert program_store.keep(tmp_path / "no such run", store) == 0


def test_the_name_of_an_entry_does_not_depend_on_the_folder_of_its_run(tmp_path: Path) -> None:
    """Otherwise no run would find an entry of an earlier one."""
    found = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        program = f"{SETTINGS}; jax.jit(lambda x: x + 1)(1.0)"
        environ = os.environ | NAMES_ENV | {COMPILED_ENV: str(folder), "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, "-c", program], env=environ, check=True)
        found.append(names(folder))
    assert found[0] == found[1] != []


def test_the_store_is_bounded_and_loses_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_store, "MOST_BYTES", 25)
    for age, name in enumerate(("new", "middle", "old")):
        entry(tmp_path / "run", name, age=age)
    program_store.keep(tmp_path / "run", tmp_path / "store")
    assert names(tmp_path / "store") == ["middle", "new"]
    assert names(tmp_path / "run") == ["middle", "new", "old"], "a run that goes on keeps what it has"


def test_two_runs_that_end_at_the_same_time_keep_their_programs(tmp_path: Path) -> None:
    """The other one deletes an entry while this one looks at it."""
    entry(tmp_path / "run", "jit_loss")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "deleted-cache").symlink_to("nowhere")
    assert program_store.keep(tmp_path / "run", tmp_path / "store") == 1


def test_another_processor_has_its_own_store(tmp_path: Path) -> None:
    def info(text: str) -> Path:
        put(tmp_path / "cpuinfo", text)
        return program_store.store_in(tmp_path, tmp_path / "cpuinfo")

    one = info("processor : 0\nmodel name : A\nflags : avx avx2\ncpu MHz : 2000\n")
    assert info("processor : 0\nmodel name : A\nflags : avx avx2\ncpu MHz : 2600\n") == one
    assert info("processor : 0\nmodel name : A\nflags : avx\n") != one
    assert program_store.store_in(tmp_path, tmp_path / "none") != one
