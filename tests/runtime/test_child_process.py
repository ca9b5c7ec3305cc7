"""T8: a process that multiprocessing spawns imports the script again; it must not become a second pod of the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from between import LONG, put

from backstay import _train
from backstay.errors import ConfigurationError

SCRIPT = """
import multiprocessing
import backstay

def work():
    print("worked")

if multiprocessing.current_process().name == "MainProcess":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    print(f"exit code of the child: {child.exitcode}")
else:
    backstay.train(init=work, loss=work, batches=work, optimizer=None, steps=1)
"""


@pytest.mark.parametrize("role", [None, "parameter-server"], ids=["alone", "in a pod"])
def test_t8_a_spawned_process_that_imports_the_script_does_not_train(tmp_path: Path, role: str | None) -> None:
    script, words = tmp_path / "unguarded.py", tmp_path / "termination"
    put(script, SCRIPT)
    environment = {**os.environ, "BACKSTAY_TERMINATION_LOG": str(words)} | ({"BACKSTAY_ROLE": role} if role else {})
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=LONG, check=True
    )
    assert done.stdout == "exit code of the child: 1\n"
    assert "call train under `if __name__ == '__main__':`" in done.stderr
    assert not words.exists()


def test_t8_a_forked_process_does_not_train_in_the_place_of_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_train, "_CALLED", [os.getpid() + 1])
    with pytest.raises(ConfigurationError, match="only in the first process"):
        _train._refuse_in_child()
    monkeypatch.setattr(_train, "_CALLED", [os.getpid()])
    _train._refuse_in_child()
