"""The parts of bench/gpu.py without a job, which run in one process each.

    python bench/scripts/device.py PART SIZE TOKENS FILE

writes the rows of the part's table into the file, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

Rows = list[tuple[str, ...]]
ROUNDS: Final = 10


def probe(size: str, tokens: int) -> Rows:
    """Returns the backend of JAX, and the number of its devices."""
    import jax

    return [(jax.default_backend(), str(jax.local_device_count()))]


def median_ms(measured: Callable[..., Any], before: Callable[[], Any] | None = None) -> float:
    """Returns the median of the milliseconds of some calls, after two that do not count.

    Args:
        before: is called before each; the result is the argument of `measured`.
    """
    times = []
    for number in range(2 + (ROUNDS if on_gpu() else 2)):
        given = () if before is None else (before(),)
        began = time.perf_counter()
        got = measured(*given)
        if number >= 2:
            times.append(1e3 * (time.perf_counter() - began))
        del given, got  # their memory is free for the next call
    return statistics.median(times)


def _wait_for(function: Callable[..., Any], *arguments: Any) -> None:
    import jax

    jax.block_until_ready(function(*arguments))


def on_gpu() -> bool:
    import jax

    return bool(jax.default_backend() == "gpu")


def versions(size: str, tokens: int) -> Rows:
    """Returns the machine, and the highest rates of arithmetic and memory that a program reaches."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    rows: Rows = [("machine", "")]
    rows.append(("python, jax, numpy", f"{sys.version.split()[0]}, {jax.__version__}, {np.__version__}"))
    rows.append(("devices used", ", ".join(str(one.device_kind) for one in jax.local_devices())))
    rows.append(("processors", str(os.cpu_count())))
    if on_gpu():
        with contextlib.suppress(OSError):
            query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,pcie.link.gen.max", "--format=csv,noheader"]
            found = subprocess.run(query, check=False, capture_output=True, text=True).stdout.splitlines()
            rows.append(("driver, memory, PCIe", "; ".join(dict.fromkeys(found))))  # it has a line for each GPU
    rows.append(("memories", ", ".join(sorted(memory.kind for memory in device.addressable_memories()))))
    n = 8192 if on_gpu() else 128
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    ms = median_ms(lambda: jax.block_until_ready([product(a) for _ in range(10)])) / 10
    rows.append((f"bfloat16 product, {n}", f"{2 * n**3 / ms / 1e9:.3g} TFLOP/s"))
    big = jnp.zeros(1 << (28 if on_gpu() else 16), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    ms = median_ms(lambda: copy(big).block_until_ready())
    rows.append(("copy on the device", f"{2 * big.nbytes / ms / 1e6:.0f} GB/s, read and written"))
    return rows


def copies(size: str, tokens: int) -> Rows:
    """Copies between the device and the host, with each function that JAX has for it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    device = jax.devices()[0]
    count = 1 << (28 if on_gpu() else 16)
    place: Any = SingleDeviceSharding
    pinned, here = place(device, memory_kind="pinned_host"), place(device)
    source = jax.random.normal(jax.random.key(0), (count,), jnp.float32)
    fresh = jax.jit(lambda x, k: x + k)
    host = np.asarray(fresh(source, 1.0)).copy()
    rows: Rows = [(f"copies of {host.nbytes >> 10} KiB", "ms", "GB/s", "error")]

    def row(name: str, measured: Callable[..., Any], before: Callable[[], Any] | None = None) -> None:
        try:
            ms = median_ms(measured, before)
            rows.append((name, f"{ms:.3g}", f"{host.nbytes / ms / 1e6:.1f}", ""))
        except Exception as error:  # noqa: BLE001  # a way that this version does not have
            rows.append((name, "-", "-", str(error).splitlines()[0][:80]))

    def made() -> Any:
        return fresh(source, 1.0).block_until_ready()

    def asked(x: Any) -> Any:
        x.copy_to_host_async()
        return np.asarray(x)

    in_pieces = jax.jit(lambda x, k: [part + k for part in jnp.split(x, 16)])

    def pieces() -> Any:
        return jax.block_until_ready(in_pieces(source, 1.0))

    def asked_all(parts: Any) -> Any:
        for part in parts:
            part.copy_to_host_async()
        return [np.asarray(part) for part in parts]

    row("out: np.asarray", np.asarray, made)
    row("out: copy_to_host_async", asked, made)
    row("out: copy_to_host_async of 16 pieces", asked_all, pieces)
    row("out: device_put to pinned_host", lambda x: np.asarray(jax.device_put(x, pinned)), made)
    put: Any = jax.device_put
    row("out: device_put to pinned_host, 16 pieces", lambda x: [np.asarray(one) for one in put(x, pinned)], pieces)
    direct = jax.jit(lambda x, k: x + k, out_shardings=pinned)
    row("out: computed into pinned_host", lambda: np.asarray(direct(source, 1.0)))
    row("in: device_put", lambda: put(host, here).block_until_ready())
    row("in: device_put, may_alias", lambda: put(host, here, may_alias=True).block_until_ready())
    parts = np.split(host, 16)
    row("in: device_put of 16 pieces", lambda: jax.block_until_ready(put(parts, here)))
    take = jax.jit(lambda x: x[0])
    row("in: argument of a jitted function", lambda: take(host).block_until_ready())
    row("host to pinned_host", lambda: put(host, pinned).block_until_ready())
    try:
        held = put(host, pinned).block_until_ready()
    except Exception:  # noqa: BLE001  # the row before has the reason
        return rows
    row("in: device_put from pinned_host", lambda: put(held, here).block_until_ready())
    view = np.asarray(held)
    shares = view.ctypes.data == held.unsafe_buffer_pointer()
    rows.append(("np.asarray of pinned_host shares its memory", str(shares), "", ""))
    other = np.empty_like(view)
    row("NumPy: copy out of pinned_host", lambda: np.copyto(other, view))
    row("NumPy: copy between pages", lambda: np.copyto(other, host))
    return rows


def codecs(size: str, tokens: int) -> Rows:
    """Encoding on the device and on the host; and whether the bits are the same."""
    import jax
    import jax.numpy as jnp

    from backstay._update import CODECS, seed_of
    from backstay._update._codecs._codec import GROUP, encoded

    count = 1 << (26 if on_gpu() else 16)
    cpu = jax.devices("cpu")[0]
    values = np.array(jax.random.normal(jax.random.key(0), (count,), jnp.float32))
    wide = min(count // 4, 1 << 16)
    values[:wide] *= np.float32(2.0) ** np.random.default_rng(0).integers(-140, 100, wide)
    numbers, seed = np.arange(count // GROUP, dtype=np.uint32), seed_of(0, 1, 2)
    rows: Rows = [
        (f"codecs, {count >> 10} Ki elements", "device, ms", "host, ms", "decode, device", "decode, host", "bits")
    ]
    for name, codec in CODECS.items():
        for dtype in (jnp.float32, jnp.bfloat16):
            if not codec.covers(np.dtype(dtype)):
                continue
            encode = jax.jit(lambda v, n, s, codec=codec: encoded(codec, v, n, s))
            decode = jax.jit(lambda block: block.decode())
            found, cells = [], []
            for device in (jax.devices()[0], cpu):
                given = jax.device_put((values.astype(dtype), numbers, seed), device)
                block = encode(*given)
                found.append([np.asarray(leaf) for leaf in jax.tree_util.tree_leaves((block, decode(block)))])
                both: Any = ((encode, *given), (decode, block))
                cells.append([f"{median_ms(partial(_wait_for, *each)):.2f}" for each in both])
            same = [bool((a.view(np.uint8) == b.view(np.uint8)).all()) for a, b in zip(*found, strict=True)]
            wrong = [int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in zip(*found, strict=True)]
            bits = "equal" if all(same) else f"{wrong} bytes differ"
            title = f"{name}, {np.dtype(dtype).name}"
            rows.append((title, cells[0][0], cells[1][0], cells[0][1], cells[1][1], bits))
    return rows


def step(size: str, tokens: int) -> Rows:
    """Returns a training step of one jitted function in JAX alone, with Adam and donated buffers.

    The rate counts the operations of the model. A large model computes some values a second time, to save memory: the
    rate leaves that out.
    """
    import jax
    import optax
    from language import Model

    model, optimizer = Model(size), optax.adam(1e-4)
    params = jax.jit(model.init)(jax.random.key(0))
    state = jax.jit(optimizer.init)(params)
    batch = jax.device_put(model.tokens(0, 0, tokens))

    def update(params: Any, state: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(model.loss)(params, batch)
        changes, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, changes), state, loss

    compiled = jax.jit(update, donate_argnums=(0, 1))
    alone = median_ms(partial(_wait_for, jax.jit(jax.value_and_grad(model.loss)), params, batch))
    held = [params, state]
    del params, state
    losses = []

    def one() -> None:
        held[0], held[1], loss = compiled(held[0], held[1], batch)
        losses.append(float(loss))

    ms = median_ms(one)
    if not np.isfinite(losses).all():
        raise RuntimeError(f"the losses are {losses}")
    count = model.sequences(tokens) * model.context
    rate = model.operations(count) / ms / 1e9
    head = f"{size}: {model.parameters / 1e6:.3g} M parameters, {count} tokens"
    return [
        (head, "ms", "TFLOP/s, without what is computed again"),
        ("gradient in JAX alone", f"{alone:.1f}", ""),
        ("step in JAX alone, Adam", f"{ms:.1f}", f"{rate:.3g}"),
    ]


PARTS: Final[Mapping[str, Callable[[str, int], Rows]]] = {
    "probe": probe,
    "versions": versions,
    "copies": copies,
    "codecs": codecs,
    "step": step,
}


if __name__ == "__main__":
    part, size, tokens, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(PARTS[part](size, int(tokens))))
