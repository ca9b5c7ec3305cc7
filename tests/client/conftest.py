"""One embedded cluster for all tests of the client that need a cluster, and the function that they train."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from between import put

from backstay_client import Client

# `gate` is a file: no batch of step `hold` and later ones exists before it.
TRAINING = """
import time
from pathlib import Path

import numpy as np
import optax

import backstay
from shapes import loss


def train(rate=0.1, steps=40, hold=None, gate=None, diverges=False):
    print(f"the rate is {rate}")

    def batches(key):
        deadline = time.monotonic() + 3600
        while hold is not None and key.step >= hold and not Path(gate).exists():
            assert time.monotonic() < deadline, "nobody opened the gate"
            time.sleep(0.02)
        return np.full(4, np.nan if diverges else 1.0, "float32")

    backstay.train(
        init=lambda key: {"w": np.zeros((), "float32")},
        loss=loss,
        batches=batches,
        optimizer=optax.sgd(rate),
        steps=steps,
        evaluate=lambda params: {"w": float(params["w"])},
    )
"""
LOSS = """
import jax.numpy as jnp


def loss(params, batch):
    return ((params["w"] - batch) ** 2).mean(), {"size": jnp.abs(params["w"])}
"""


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client.local(tmp_path_factory.mktemp("client") / "run") as client:
        yield client


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, like that of a user, whose modules can be imported."""
    folder = tmp_path / "user"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def written(user_folder: Path) -> Callable[[str, str], ModuleType]:
    """Writes a module into the user's folder, and imports it."""

    def write(name: str, text: str) -> ModuleType:
        path = user_folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return write


@pytest.fixture
def training(written: Callable[[str, str], ModuleType]) -> ModuleType:
    """The module with the function `train`, which imports another one."""
    written("shapes", LOSS)
    return written("training", TRAINING)
