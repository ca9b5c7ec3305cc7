"""The committed Python code is generated from `control.proto`, and the names of the roles are the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from between import put
from google.protobuf.descriptor_pb2 import DescriptorProto

from backstay_rpc import AUTHORIZATION, bearer, control_pb2

PACKAGE = Path(control_pb2.__file__).parent


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    """Run `sh operator/backstay_rpc/generate.sh` after changing control.proto."""
    (tmp_path / "backstay_rpc").mkdir()
    put(tmp_path / "backstay_rpc" / "control.proto", (PACKAGE / "control.proto").read_text())
    subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "grpc_tools.protoc",
            "-I",
            ".",
            "--python_out=.",
            "--pyi_out=.",
            "--grpc_python_out=.",
            "backstay_rpc/control.proto",
        ],
        cwd=tmp_path,
        check=True,
    )
    for name in ("control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py"):
        assert (tmp_path / "backstay_rpc" / name).read_text() == (PACKAGE / name).read_text(), name


def test_numbers_of_fields_are_used_once_and_never_skipped_silently() -> None:
    """A number that is given up is to be reserved: renumbering would let old and new pods misread each other."""
    for message in control_pb2.DESCRIPTOR.message_types_by_name.values():
        if message.GetOptions().map_entry:
            continue
        numbers = {field.number for field in message.fields}
        written = DescriptorProto()
        message.CopyToProto(written)
        reserved = {number for part in written.reserved_range for number in range(part.start, part.end)}
        for block in (range(1, 30), *(range(at, at + 10) for at in range(30, 100, 10))):  # added at the same time
            used = (numbers | reserved) & set(block)
            assert used == set(block[: len(used)]), message.name


def test_the_token_travels_as_a_bearer() -> None:
    assert bearer("abc") == ((AUTHORIZATION, "Bearer abc"),)
