"""bench/gpu.py, which few machines can run in earnest, works on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmark_of_gpus_runs_on_the_cpu(tmp_path: Path) -> None:
    results = tmp_path / "table.txt"
    command = [sys.executable, "bench/gpu.py", "--size", "tiny", "--tokens", "512", "--results", str(results)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [*command, "--only", "codecs", "mixed"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    table = results.read_text()
    assert table.count("equal") == 5, table  # the bits of each codec and dtype
    assert "2 ended, 1 result" in table, table
