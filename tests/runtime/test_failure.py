"""The termination message describes an exception of the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstay._process._failure import describe


def test_a_missing_file_names_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pods of a YAML file run in its folder, and not in the one in which `backstay run` was called."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as relative:
        open("data/x.npy")  # noqa: SIM115, PTH123  # as a script does it
    assert describe(relative.value).message == (
        f"[Errno 2] No such file or directory: 'data/x.npy'; the current folder is {tmp_path}"
    )
    with pytest.raises(FileNotFoundError) as absolute:
        Path("/no/such").read_text()
    assert describe(absolute.value).message == "[Errno 2] No such file or directory: '/no/such'"
    assert describe(FileNotFoundError()).message == "FileNotFoundError"
