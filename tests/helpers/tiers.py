"""The folders of tests by what they need, the compiler of most of them, and where compiled programs are kept."""

from __future__ import annotations

from typing import Final

PURE: Final = ("tests/coordination", "tests/house", "tests/plan", "tests/rpc", "tests/spec")
"""They need no processes and no training."""

# A third of the time of the tests was XLA's. These flags change no test's result, but they change the last bits of
# what is computed. So tests of bits run without them.
QUICK_COMPILER: Final = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)

STORE: Final = "BACKSTAY_TEST_STORE"
"""The variable with the folder where the tests find and keep what JAX compiled, if not the one in the user's cache."""
