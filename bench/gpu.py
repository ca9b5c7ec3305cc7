"""The time of copies, codecs and steps on a GPU, alone and with parameter servers on the same machine.

It also runs on a CPU, where its numbers mean nothing; `--size tiny` is for that. Each part runs in its own processes,
because one process takes most of a GPU's memory. Servers use the CPU.

    python bench/gpu.py [--size tiny|100M|1B] [--tokens 65536] [--only PART ...] [--results FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from _common import allocator_environment, table

REPO = Path(__file__).resolve().parent.parent
SCRIPT = REPO / "bench" / "scripts" / "language.py"
ROUNDS: Final = 10
_CAPTURED: Final[Any] = {"capture_output": True, "text": True}
SKIPPED: Final = 3
"""Updates at the beginning that do not count."""


def median_ms(step: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Milliseconds of `step`, the median of some rounds after two that do not count."""
    times = []
    for number in range(rounds + 2):
        began = time.perf_counter()
        step()
        if number >= 2:
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def _wait_for(function: Callable[..., Any], *arguments: Any) -> None:
    import jax

    jax.block_until_ready(function(*arguments))


def on_gpu() -> bool:
    import jax

    return bool(jax.default_backend() == "gpu")


# ---- The parts that run in one process each ----


def versions(size: str, tokens: int) -> list[tuple[str, ...]]:
    """Returns the machine, and the highest rates of arithmetic and memory that a program reaches."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    rows: list[tuple[str, ...]] = [("machine", "")]
    rows.append(("python, jax, numpy", f"{sys.version.split()[0]}, {jax.__version__}, {np.__version__}"))
    rows.append(("devices", ", ".join(str(one.device_kind) for one in jax.local_devices())))
    rows.append(("processors", str(os.cpu_count())))
    if on_gpu():
        with contextlib.suppress(OSError):
            query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,pcie.link.gen.max", "--format=csv,noheader"]
            rows.append(("driver, memory, PCIe", subprocess.run(query, check=False, **_CAPTURED).stdout.strip()))
    rows.append(("memories", ", ".join(sorted(memory.kind for memory in device.addressable_memories()))))
    n = 8192 if on_gpu() else 512
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    ms = median_ms(lambda: jax.block_until_ready([product(a) for _ in range(10)])) / 10
    rows.append((f"bfloat16 product, {n}", f"{2 * n**3 / ms / 1e9:.0f} TFLOP/s"))
    big = jnp.zeros(1 << (28 if on_gpu() else 20), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    ms = median_ms(lambda: copy(big).block_until_ready())
    rows.append(("copy on the device", f"{2 * big.nbytes / ms / 1e6:.0f} GB/s, read and written"))
    return rows


def copies(size: str, tokens: int) -> list[tuple[str, ...]]:
    """Copies between the device and the host, with each function that JAX has for it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    device = jax.devices()[0]
    count = 1 << (28 if on_gpu() else 20)
    place: Any = SingleDeviceSharding
    pinned, here = place(device, memory_kind="pinned_host"), place(device)
    source = jax.random.normal(jax.random.key(0), (count,), jnp.float32)
    fresh = jax.jit(lambda x, k: x + k)
    host = np.asarray(fresh(source, 1.0)).copy()
    rows: list[tuple[str, ...]] = [(f"copies of {host.nbytes >> 20} MiB", "ms", "GB/s", "of an array that pages hold")]

    def row(name: str, before: Callable[[], Any], measured: Callable[[Any], Any]) -> None:
        try:
            times = []
            for number in range(ROUNDS + 2):
                given = before()
                began = time.perf_counter()
                got = measured(given)
                if number >= 2:
                    times.append(1e3 * (time.perf_counter() - began))
                del given, got
            ms = statistics.median(times)
            rows.append((name, f"{ms:.1f}", f"{host.nbytes / ms / 1e6:.1f}", ""))
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

    row("out: np.asarray", made, np.asarray)
    row("out: copy_to_host_async", made, asked)
    row("out: copy_to_host_async of 16 pieces", pieces, asked_all)
    row("out: device_put to pinned_host", made, lambda x: np.asarray(jax.device_put(x, pinned)))
    row(
        "out: device_put to pinned_host, 16 pieces",
        pieces,
        lambda x: [np.asarray(one) for one in jax.device_put(x, pinned)],
    )
    direct = jax.jit(lambda x, k: x + k, out_shardings=pinned)
    row("out: computed into pinned_host", lambda: None, lambda _: np.asarray(direct(source, 1.0)))
    row("in: device_put", lambda: None, lambda _: jax.device_put(host, here).block_until_ready())
    row(
        "in: device_put, may_alias",
        lambda: None,
        lambda _: jax.device_put(host, here, may_alias=True).block_until_ready(),
    )
    parts = np.split(host, 16)
    row("in: device_put of 16 pieces", lambda: None, lambda _: jax.block_until_ready(jax.device_put(parts, here)))
    take = jax.jit(lambda x: x[0])
    row("in: argument of a jitted function", lambda: None, lambda _: take(host).block_until_ready())
    row("host to pinned_host", lambda: None, lambda _: jax.device_put(host, pinned).block_until_ready())
    try:
        held = jax.device_put(host, pinned).block_until_ready()
    except Exception:  # noqa: BLE001
        return rows
    row("in: device_put from pinned_host", lambda: None, lambda _: jax.device_put(held, here).block_until_ready())
    view = np.asarray(held)
    shares = view.ctypes.data == held.unsafe_buffer_pointer()
    rows.append(("np.asarray of pinned_host shares its memory", str(shares), "", ""))
    other = np.empty_like(view)
    row("NumPy: copy out of pinned_host", lambda: None, lambda _: np.copyto(other, view))
    row("NumPy: copy between pages", lambda: None, lambda _: np.copyto(other, host))
    return rows


def codecs(size: str, tokens: int) -> list[tuple[str, ...]]:
    """Encoding on the device and on the host; and whether the bits are the same."""
    import jax
    import jax.numpy as jnp

    from backstay._update import CODECS, seed_of
    from backstay._update._codecs._codec import GROUP, encoded

    count = 1 << (26 if on_gpu() else 18)
    cpu = jax.devices("cpu")[0]
    values = np.array(jax.random.normal(jax.random.key(0), (count,), jnp.float32))
    values[: 1 << 16] *= np.float32(2.0) ** np.random.default_rng(0).integers(-140, 100, 1 << 16)
    numbers, seed = np.arange(count // GROUP, dtype=np.uint32), seed_of(0, 1, 2)
    rows: list[tuple[str, ...]] = [
        (f"codecs, {count >> 20} Mi elements", "device, ms", "host, ms", "decode, device", "decode, host", "bits")
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


def step(size: str, tokens: int) -> list[tuple[str, ...]]:
    """Returns a training step of one jitted function in JAX alone, with Adam and donated buffers."""
    import jax
    import optax
    from scripts.language import Model

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

    def one() -> None:
        held[0], held[1], loss = compiled(held[0], held[1], batch)
        float(loss)

    ms = median_ms(one)
    rate = model.operations(tokens) / ms / 1e9
    return [
        (f"{size}: {model.parameters / 1e6:.0f} M parameters, {tokens} tokens", "ms", "TFLOP/s"),
        ("gradient in JAX alone", f"{alone:.1f}", ""),
        ("step in JAX alone, Adam", f"{ms:.1f}", f"{rate:.0f}"),
    ]


PARTS: Final[Mapping[str, Callable[[str, int], list[tuple[str, ...]]]]] = {
    "versions": versions,
    "copies": copies,
    "codecs": codecs,
    "step": step,
}


# ---- Jobs ----


class _Started:
    """A process with the interface that `backstay.testing` expects of a pod's."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self.pid, self.signalled = process, process.pid, False

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def send_signal(self, number: int) -> None:
        self.signalled = True
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(9)


class _Starter:
    """Starts a new interpreter for each pod, which imports JAX itself: a GPU cannot be used in a forked process."""

    environ: Final = {**os.environ, **allocator_environment(), "PYTHONUNBUFFERED": "1"}

    def start(self, argv: Sequence[str], environ: Mapping[str, str], output: Path) -> _Started:
        with output.open("wb") as file:
            return _Started(subprocess.Popen(argv, env=environ, stdout=file, stderr=subprocess.STDOUT))


class JobOfBench:
    """One job of the language model, with its processes."""

    def __init__(
        self, platform: str, folder: Path, arguments: Sequence[str], *, shards: int, workers: int = 1, **config: Any
    ):
        from backstay.testing import Job

        self._platform, self.folder = platform, folder
        self._job = Job(
            [sys.executable, str(SCRIPT), *arguments],
            folder,
            _Starter(),  # type: ignore[arg-type]
            shards=shards,
            workers=workers,
            mode="Sync",
            **config,
        )
        self._job.environment |= {"SPANS": str(folder)}

    def __enter__(self) -> JobOfBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._job.end()

    def start(self, platforms: Sequence[str] | None = None) -> list[Any]:
        """Start all pods; returns the workers. `platforms` are those of each worker, or None for the machine's."""
        for shard in range(self._job.shards):
            self._job.server(shard, 1, JAX_PLATFORMS="cpu")
        ranks = range(self._job.workers)
        chosen = platforms or [self._platform for _ in ranks]
        return [self._job.worker(rank, 1, JAX_PLATFORMS=chosen[rank]) for rank in ranks]

    def worker(self, rank: int, incarnation: int) -> Any:
        """Start another worker in place of a dead one."""
        return self._job.worker(rank, incarnation, JAX_PLATFORMS=self._platform)

    def wait(self, pods: Sequence[Any], seconds: float = 300.0) -> None:
        """Wait until these pods have ended well.

        Raises:
            RuntimeError: one has not.
        """
        deadline = time.monotonic() + seconds
        for pod in pods:
            while pod.process.poll() is None and time.monotonic() < deadline and not self._dead():
                time.sleep(0.05)
            if pod.process.poll() != 0:
                each = (f"== {one.name}: {one.process.poll()}\n{one.output()[-1500:]}" for one in self._job.pods)
                raise RuntimeError("\n".join([f"{pod.name} has not ended well", *each]))

    def _dead(self) -> bool:
        """Returns whether a pod has failed that this program did not kill."""
        return any(one.process.poll() not in (None, 0) and not one.process.signalled for one in self._job.pods)

    def spans(self, pod: Any, role: str = "worker") -> dict[str, list[tuple[float, float, int]]]:
        """Returns the spans of a pod by point. Each has its beginning, its end and its step."""
        found: dict[str, list[tuple[float, float, int]]] = {}
        for point, began, ended, number in json.loads((self.folder / f"{role}-{pod.process.pid}.json").read_text()):
            found.setdefault(point, []).append((began, ended, number))
        return found

    def servers(self) -> list[Any]:
        return [pod for pod in self._job.pods if pod.role == "parameter-server"]


@contextlib.contextmanager
def job(platform: str, arguments: Sequence[str], **settings: Any) -> Iterator[JobOfBench]:
    with (
        tempfile.TemporaryDirectory(prefix="backstay-gpu-") as folder,
        JobOfBench(platform, Path(folder), arguments, **settings) as made,
    ):
        yield made


def lengths(spans: Sequence[tuple[float, float, int]]) -> float:
    """Returns the median of the spans after the first few, in milliseconds."""
    kept = spans[SKIPPED:] or spans
    return 1e3 * statistics.median(ended - began for began, ended, _ in kept) if kept else float("nan")


def parts_of(spans: Mapping[str, Sequence[tuple[float, float, int]]]) -> tuple[float, dict[str, float]]:
    """Returns the milliseconds between two updates, and of each part of a worker's step."""
    ends = [ended for _, ended, _ in spans["pull"]][SKIPPED - 1 :]
    between = 1e3 * statistics.median(b - a for a, b in itertools.pairwise(ends))
    points = ("batch_wait", "compute", "encode", "push", "update_wait", "pull")
    return between, {point: lengths(spans.get(point, ())) for point in points}


def with_servers(platform: str, size: str, tokens: int, bare: float | None, steps: int) -> list[tuple[str, ...]]:
    """Returns the step of one worker with servers beside it."""
    rows: list[tuple[str, ...]] = [
        (f"with servers, {size}", "ms", "share", "batch", "compute", "encode", "push", "wait", "pull", "apply")
    ]
    kinds: list[tuple[str, dict[str, str], int, dict[str, Any] | None]] = [
        ("Exact, 1 server", {}, 1, None),
        ("Exact, 4 servers", {}, 4, None),
        ("BFloat16 both ways, 4 servers", {"gradients": "BFloat16", "parameters": "BFloat16"}, 4, None),
        ("Int8, BFloat16 back, 1 server", {"gradients": "Int8", "parameters": "BFloat16"}, 1, None),
        ("Int8, BFloat16 back, 4 servers", {"gradients": "Int8", "parameters": "BFloat16"}, 4, None),
        ("24 local steps, Exact, 4 servers", {}, 4, {"count": 24}),
        ("24 local steps, Int8, 4 servers", {"gradients": "Int8", "parameters": "BFloat16"}, 4, {"count": 24}),
        (
            "24 local steps, overlap 2, Int8, 4 servers",
            {"gradients": "Int8", "parameters": "BFloat16"},
            4,
            {"count": 24, "overlap": 2},
        ),
    ]
    for name, wire, shards, local in kinds:
        updates = steps if local is None else max(SKIPPED + 3, steps // 4)
        arguments = ["--size", size, "--tokens", str(tokens), "--steps", str(updates)]
        arguments += ["--local", json.dumps(local)] if local else []
        try:
            with job(platform, arguments, shards=shards, wire=wire) as running:
                workers = running.start()
                running.wait(workers)
                between, parts = parts_of(running.spans(workers[0]))
                applied = lengths(running.spans(running.servers()[0], "parameter-server").get("apply", ()))
        except (RuntimeError, OSError) as error:
            print(error, file=sys.stderr, flush=True)
            rows.append((name, "failed", *[""] * 8))
            continue
        between /= 1 if local is None else local["count"]
        share = "" if bare is None else f"{bare / between:.2f}"
        rows.append((name, f"{between:.1f}", share, *(f"{value:.1f}" for value in (*parts.values(), applied))))
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def bits(platform: str, size: str, tokens: int) -> list[tuple[str, ...]]:
    """Returns whether two jobs give the same bits, with and without `deterministic`."""
    rows: list[tuple[str, ...]] = [("the same job twice", "bits of the parameters")]
    for name, extra in (("as it is", []), ("deterministic=True", ["--deterministic"])):
        found = []
        for _ in range(2):
            arguments = ["--size", size, "--tokens", str(tokens), "--steps", "10", *extra]
            with job(platform, arguments, shards=1, wire={"gradients": "Int8"}) as running:
                (worker,) = running.start()
                running.wait([worker])
                found.append([line for line in worker.output().splitlines() if line.startswith("digest")][-1])
        rows.append((name, "equal" if found[0] == found[1] else "different"))
    return rows


def killed(platform: str, size: str, tokens: int) -> list[tuple[str, ...]]:
    """Measure a worker that is killed in the middle, and its replacement on the same device."""
    with job(platform, ["--size", size, "--tokens", str(tokens), "--steps", "40"], shards=1) as running:
        (worker,) = running.start()
        deadline = time.monotonic() + 200
        (server,) = running.servers()
        while "step 15/40" not in server.output():
            if time.monotonic() > deadline or worker.process.poll() is not None:
                raise RuntimeError(f"the worker did not arrive at step 15:\n{worker.output()[-1500:]}")
            time.sleep(0.01)
        worker.process.kill()
        worker.process.wait()
        at = time.monotonic()
        replacement = running.worker(0, 2)
        running.wait([replacement])
        first = running.spans(replacement)["pull"][0][1] - at
    return [("SIGKILL of the worker", "s"), ("until the replacement's first update, no cache", f"{first:.1f}")]


def mixed(platform: str, size: str, tokens: int) -> list[tuple[str, ...]]:
    """Measure one worker on the machine's device and one on its CPU, in one job."""
    with job(platform, ["--size", "tiny", "--tokens", "512", "--steps", "20"], shards=1, workers=2) as running:
        workers = running.start([platform, "cpu"])
        running.wait(workers)
        digests = {line for one in workers for line in one.output().splitlines() if line.startswith("digest")}
    return [("a worker on each platform", f"{len(workers)} ended, {len(digests)} result")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*PARTS, "servers", "bits", "killed", "mixed")
    parser.add_argument("--size", choices=("tiny", "100M", "1B"), default="100M")
    parser.add_argument("--tokens", type=int, default=65536, help="of each batch")
    parser.add_argument("--steps", type=int, default=24, help="updates of a job without local steps")
    parser.add_argument("--bare", type=float, help="milliseconds of the bare step, where it is not measured here")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--role", choices=tuple(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        print(json.dumps(PARTS[arguments.role](arguments.size, arguments.tokens)), flush=True)
        return 0
    probe = "import jax; print(jax.default_backend())"
    found = subprocess.run([sys.executable, "-c", probe], check=False, **_CAPTURED)
    if found.returncode:
        print(f"JAX finds no device:\n{found.stderr}", file=sys.stderr)
        return 1
    platform = "cuda,cpu" if found.stdout.split()[-1] == "gpu" else "cpu"
    shape = (arguments.size, arguments.tokens)
    bare: float | None = arguments.bare
    tables: list[str] = []

    def show(rows: list[tuple[str, ...]]) -> None:
        tables.append(table(rows))
        print(f"\n{tables[-1]}", flush=True)
        if arguments.results:
            arguments.results.write_text("\n\n".join(tables) + "\n")

    for name in PARTS:
        if name not in arguments.only:
            continue
        command = [sys.executable, __file__, "--role", name, "--size", shape[0], "--tokens", str(shape[1])]
        environment = {**os.environ, "JAX_PLATFORMS": platform}
        ran = subprocess.run(command, env=environment, check=False, **_CAPTURED)
        if ran.returncode:
            show([(name, "failed"), (ran.stderr[-1500:], "")])
            continue
        rows = [tuple(row) for row in json.loads(ran.stdout.splitlines()[-1])]
        if name == "step":
            bare = float(rows[-1][1])
        show(rows)
    runs: dict[str, Callable[[], list[tuple[str, ...]]]] = {
        "servers": lambda: with_servers(platform, *shape, bare, arguments.steps),
        "bits": lambda: bits(platform, *shape),
        "killed": lambda: killed(platform, *shape),
        "mixed": lambda: mixed(platform, *shape),
    }
    for name, run in runs.items():
        if name in arguments.only:
            try:
                show(run())
            except (RuntimeError, OSError) as error:
                show([(name, "failed"), (str(error)[-3000:], "")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
