"""A model that the devices of several pods hold together is sent and received in parts, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from between import LONG
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiers import QUICK_COMPILER

from backstay._transport import DividedArrangement
from backstay._update import analyse, describe, partition
from backstay.errors import ConfigurationError


@pytest.mark.parametrize(("what", "least"), [([], [100, 50]), (["optimized"], [10])])
def test_t1_the_members_parts_are_the_leaves_with_any_sharding(what: list[str], least: list[int]) -> None:
    """For two, three and six members, meshes of one and two axes, and leaves that no mesh divides. `test_device` of the
    codecs compares the bits of optimized programs, so that one of them is enough here."""
    program = Path(__file__).with_name("divided.py")
    env = {**os.environ, **({} if what else {"XLA_FLAGS": " ".join(QUICK_COMPILER)})}
    ended = subprocess.run(
        [sys.executable, str(program), *what], capture_output=True, text=True, env=env, timeout=LONG, check=False
    )
    assert ended.returncode == 0, ended.stderr
    compared = list(map(int, ended.stdout.split()))
    assert all(found > few for found, few in zip(compared, least, strict=True)), compared


@pytest.mark.parametrize("processes", [(0, 1, 0, 1), (1, 1, 0, 0), (0, 0, 1, 2)])
def test_devices_in_another_order_than_the_pods_are_refused(processes: tuple[int, ...]) -> None:
    tree = describe({"w": np.zeros(40_000, np.float32)})
    parts = partition(tree, analyse(optax.sgd(0.1), tree), 1, members=2)
    devices = np.asarray([SimpleNamespace(process_index=process) for process in processes])
    sharding = SimpleNamespace(mesh=SimpleNamespace(devices=devices))
    with pytest.raises(ConfigurationError, match="They must be in the order of the pods"):
        DividedArrangement(parts, [sharding], 0)  # type: ignore[list-item]


def test_a_mesh_whose_devices_the_members_do_not_divide_is_refused() -> None:
    tree = describe({"w": np.zeros(40_000, np.float32)})
    parts = partition(tree, analyse(optax.sgd(0.1), tree), 1, members=2)
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("batch",))
    with pytest.raises(ConfigurationError, match=r"the mesh has 1 devices, of the processes \[0\]: each of the 2"):
        DividedArrangement(parts, [NamedSharding(mesh, PartitionSpec())], 0)
