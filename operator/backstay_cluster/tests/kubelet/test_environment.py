"""The variables that a container gets from the environment of the user who started the cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_cluster.kubelet.node import WITHHELD, local_gpus, python_environment, user_environment

_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
_VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(_NAMES, _VALUES))
def test_a_script_gets_the_users_variables_but_for_what_is_withheld(environ: dict[str, str]) -> None:
    given = user_environment(environ)
    for name, value in environ.items():
        withheld = name in WITHHELD or name.startswith(("BACKSTAY_", "KUBERNETES_"))
        if name not in {"PATH", "PYTHONUNBUFFERED"}:
            assert given.get(name) == (None if withheld else value)
    assert python_environment(environ).items() <= given.items()


def test_isolation_is_kept_and_settings_of_libraries_are_passed_on() -> None:
    """O6: a pod gets no access to an API server, and the kubelet alone lends GPUs."""
    passed = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--x", "PYTHONPATH": "/p", "HOME": "/h", "WANDB_API_KEY": "k"}
    withheld = {
        "BACKSTAY_ROLE": "worker",
        "BACKSTAY_TOKEN": "t",
        "KUBECONFIG": "/k",
        "KUBERNETES_SERVICE_HOST": "1.2.3.4",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOSTNAME": "me",
        "PWD": "/x",
    }
    given = user_environment({**passed, **withheld, "PATH": "/my/bin"})
    assert passed.items() <= given.items()
    assert not withheld.keys() & given.keys()
    first, *rest = given["PATH"].split(os.pathsep)
    assert (Path(first) / "python").exists()
    assert "/my/bin" in rest


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({}, ["0", "1", "2"]),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, ["2", "0"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f2a,1"}, ["GPU-8f2a", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_the_node_lends_the_gpus_that_its_user_may_use(
    tmp_path: Path, chosen: dict[str, str], found: list[str]
) -> None:
    """CUDA ignores what follows the first name that is not a GPU's."""
    for number in range(3):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    assert local_gpus(tmp_path, chosen) == found
    assert local_gpus(tmp_path / "none", chosen) == []
