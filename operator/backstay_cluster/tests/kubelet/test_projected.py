"""The files of projected volumes are whole at any time, and have their modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstay_cluster.kubelet.files import write


def test_a_projected_file_is_replaced_and_not_written_in_place(tmp_path: Path) -> None:
    write(tmp_path, "folder/file", b"old", 0o640)
    file = tmp_path / "folder" / "file"
    with file.open("rb") as before:
        write(tmp_path, "folder/file", b"new", 0o666)
        assert before.read() == b"old"
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o666)
    with pytest.raises(TypeError):
        write(tmp_path, "folder/file", None, 0o600)  # type: ignore[arg-type]
    assert file.read_bytes() == b"new", "also after a write that failed"
    assert list(file.parent.iterdir()) == [file]


def test_a_key_of_a_config_map_may_be_as_long_as_a_name_of_a_file(tmp_path: Path) -> None:
    write(tmp_path, "k" * 253, b"value", 0o600)
    assert (tmp_path / ("k" * 253)).stat().st_mode & 0o777 == 0o600
