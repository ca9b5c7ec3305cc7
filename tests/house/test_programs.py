"""The next run of the tests has the programs of this one that were written to the end (tests/helpers/programs.py)."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
from between import put
from programs import FOLDER, share_programs
from tiers import STORE


def test_complete_programs_are_kept_and_the_next_run_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "before")
    monkeypatch.setenv("BACKSTAY_TEST_STATE", str(tmp_path))
    store = tmp_path / "store"
    whole = zlib.compress(b"a program" * 100)
    end = share_programs(store)
    folder = Path(os.environ[FOLDER])
    for name, content in {"whole": whole, "torn": whole[:-1], "empty": b"", "other": b"no program"}.items():
        put(folder / f"{name}-cache", content)
    end()
    assert os.environ[FOLDER] == "before"
    assert not folder.parent.exists()
    assert [entry.name for entry in store.iterdir()] == ["whole-cache"]
    monkeypatch.setenv(STORE, str(store))
    end = share_programs()
    assert [entry.read_bytes() for entry in Path(os.environ[FOLDER]).iterdir()] == [whole]
    end()
    assert [entry.name for entry in store.iterdir()] == ["whole-cache"]
