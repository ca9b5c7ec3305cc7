"""bench/gpu.py, which few machines can run in earnest, works on the CPU."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from tiers import QUICK_COMPILER

ROOT = Path(__file__).resolve().parents[2]
QUICK = f"{os.environ.get('XLA_FLAGS', '')} {' '.join(QUICK_COMPILER)}".strip()


# Of a machine that shows its user two GPUs of more, and has none.
SHOWN = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "2,3", "XLA_FLAGS": QUICK}


def tables(text: str) -> list[dict[str, list[str]]]:
    """Returns the cells of each row by its first cell; those of the head by `head`. Cells lie two spaces apart."""
    found = []
    for one in text.split("\n\n"):
        head, line, *rows = one.splitlines()
        widths = [len(column) for column in line.split()]
        starts = [sum(widths[:at]) + 2 * at for at in range(len(widths))]
        cells = [
            [row[at : at + width].strip() for at, width in zip(starts, widths, strict=True)] for row in (head, *rows)
        ]
        found.append({"head": cells[0], **{first: rest for first, *rest in cells[1:]}})
    return found


def test_each_part_of_the_benchmark_of_gpus_gives_numbers_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported JAX."""
    results = tmp_path / "table.txt"
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    for name, value in SHOWN.items():
        monkeypatch.setenv(name, value)
    arguments = ["--size", "tiny", "--tokens", "64", "--steps", "5", "--rows", "6", "--results", str(results)]
    monkeypatch.setattr(sys, "argv", ["bench/gpu.py", *arguments])
    code = importlib.import_module("gpu").main()
    said = "".join(capsys.readouterr())
    assert code == 0, said
    versions, copies, codecs, step, servers, bits, killed, mixed = tables(results.read_text())

    assert versions["CUDA_VISIBLE_DEVICES"] == ["2"], "one GPU is used: the first that the user chose"
    assert versions["devices used"] == ["cpu"]
    assert versions["devices present"] == ["1"]
    assert float(versions["bfloat16 product, 128"][0].split()[0]) > 0

    measured = {name: cells for name, cells in copies.items() if name[:3] in ("out", "in:")}
    assert len(measured) == 11, copies
    assert all(float(cells[0]) > 0 and cells[2] == "" for cells in measured.values()), copies

    assert len(codecs) == 1 + 5
    assert all(cells[-1] == "equal" for name, cells in codecs.items() if name != "head"), codecs

    gradient, whole = (float(step[name][0]) for name in ("gradient in JAX alone", "step in JAX alone, Adam"))
    assert 0 < gradient < math.inf
    assert step["head"][0].endswith("64 tokens")
    # 64 tokens, each with six operations for each of 131,392 parameters, and 6 * 2 * 64 * 64 of attention.
    assert float(step["step in JAX alone, Adam"][1]) == pytest.approx(64 * 837_504 / whole / 1e9, rel=0.05)

    names, row = servers["head"][1:], servers["4 local steps, Int8, 2 servers"]
    assert row[0] != "failed", said
    cells = dict(zip(names, row, strict=True))
    all_of_it = float(cells["all"])
    assert float(cells["share"]) == pytest.approx(whole / all_of_it, rel=0.05, abs=0.01)
    assert cells["encode"] == "-", "so small a contribution is encoded as it is sent"
    times = {name: float(cells[name]) for name in ("batch", "compute", "push", "wait", "pull", "apply")}
    # Each is a part of the same time, so none of them can be longer: all are of a batch, and not of an update.
    assert all(0 <= value < 1.05 * all_of_it for value in times.values()), cells
    assert times["compute"] > 0
    assert times["apply"] > 0

    assert bits["deterministic=True"] == ["equal"]
    ((recovery, (seconds,)),) = [each for each in killed.items() if each[0] != "head"]
    assert recovery.startswith("until the replacement's first update")
    assert 0 < float(seconds) < math.inf
    assert mixed["head"][1] == "2 ended, 1 result"


def test_the_gradient_of_a_billion_parameters_leaves_room_on_a_gpu() -> None:
    spec = importlib.util.spec_from_file_location("language_of_gpu_bench", ROOT / "bench" / "scripts" / "language.py")
    assert spec is not None
    assert spec.loader is not None
    language = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(language)
    model = language.Model("1B")
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((model.sequences(65536), model.context + 1), np.int32)
    kept = jax.eval_shape(lambda *given: jax.vjp(partial(model.loss, tokens=given[1]), given[0])[1], params, batch)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree_util.tree_leaves(kept)) < 40e9


def test_all_times_of_a_row_are_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    gpu = importlib.import_module("gpu")
    spans: dict[str, list[tuple[float, float]]] = {"pull": [], "compute": [], "batch_wait": [], "apply": []}
    for began in range(10):  # an update takes a second, and has four batches
        spans["compute"].append((began, began + 0.8))
        spans["batch_wait"] += [(began + at, began + at + 0.02) for at in (0.0, 0.2, 0.4, 0.6)]
        spans["apply"] += [(began + 0.8, began + 0.9), (began + 0.85, began + 0.92)]  # on two servers at the same time
        spans["pull"].append((began + 0.96, began + 1.0))
    update, parts = gpu.parts_of(spans, 4)
    assert update == pytest.approx(250)
    assert dict(zip(gpu.POINTS, parts, strict=True)) == {
        "batch_wait": "20",
        "compute": "200",
        "encode": "-",
        "push": "-",
        "update_wait": "-",
        "pull": "10",
        "apply": "30",
    }


@pytest.mark.parametrize("wrong", [("--steps", "4"), ("--tokens", "0")])
def test_arguments_without_a_result_are_refused(wrong: tuple[str, str]) -> None:
    started = [sys.executable, "bench/gpu.py", "--size", "tiny", "--only", "versions", *wrong]
    ran = subprocess.run(started, cwd=ROOT, env={**os.environ, **SHOWN}, capture_output=True, text=True, check=False)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert wrong[0] in ran.stderr
    assert "Traceback" not in ran.stderr
