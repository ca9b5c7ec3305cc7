"""The time of copies, codecs and steps on a GPU, alone and with parameter servers on the same machine.

It also runs on a CPU, where its numbers mean nothing; `--size tiny` is for that. Each part runs in its own processes,
because one process takes most of a GPU's memory. Servers use the CPU. One GPU is used: the first one of the variable
CUDA_VISIBLE_DEVICES. The exit code is 1 if a part, or a row of `servers`, has failed.

    python bench/gpu.py [--size tiny|100M|1B] [--tokens 65536] [--only PART ...] [--rows NUMBER ...] [--results FILE]

`--rows` selects rows of `servers`, where all of them would take too long for one command; `--help` has their numbers.
`--bare` saves the measurement of the step without servers, which `servers` needs. For example:

    python bench/gpu.py --size 1B --only servers --bare MILLISECONDS --rows 5
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from _common import allocator_environment, table

REPO = Path(__file__).resolve().parent.parent
DEVICE = REPO / "bench" / "scripts" / "device.py"
SCRIPT = REPO / "bench" / "scripts" / "language.py"
Rows = list[tuple[str, ...]]
SKIPPED: Final = 3
"""Updates at the beginning that do not count."""
_KILLED: Final = 137
"""The exit code of a process after SIGKILL, as a container has it."""
_LONGEST: Final = 1200.0
"""Seconds within which a part without a job ends."""


# ---- Processes ----


class _Started:
    """A process with the interface that `backstay.testing` expects of a pod's."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        """Returns the exit code as a container has it; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def wait(self, seconds: float | None = None) -> int:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        return self.poll() or 0

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(9)


class _Starter:
    """Starts a new interpreter for each process, which imports JAX itself: a GPU cannot be used in a forked process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def start(self, argv: Sequence[str], environ: Mapping[str, str], output: Path) -> _Started:
        with output.open("wb") as file:
            return _Started(subprocess.Popen(argv, env=environ, stdout=file, stderr=subprocess.STDOUT))

    def close(self) -> None:
        pass


def rows_of(starter: Any, environ: Mapping[str, str], part: str, size: str, tokens: int) -> Rows:
    """Returns the rows of a part without a job, which a new process makes.

    Raises:
        RuntimeError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="backstay-gpu-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        argv = [sys.executable, str(DEVICE), part, size, str(tokens), str(answer)]
        process = starter.start(argv, environ, log)
        try:
            code = process.wait(_LONGEST)
        except TimeoutError:
            raise RuntimeError(f"it did not end in {_LONGEST:.0f} s:\n{log.read_text()[-1500:]}") from None
        finally:
            process.kill()
        if code:
            raise RuntimeError(f"exit code {code}:\n{log.read_text()[-1500:]}")
        return [tuple(row) for row in json.loads(answer.read_text())]


@dataclass
class Bench:
    """The settings of all parts.

    Attributes:
        platform: a value of JAX_PLATFORMS, for what uses the device.
        starter: starts all processes.
        size: the size of the model.
        tokens: the tokens of each batch.
        steps: the updates of a job without local steps.
        chosen: the numbers of the rows of `servers`.
        bare: the milliseconds of a step without servers; None: not known.
    """

    platform: str
    starter: Any
    size: str
    tokens: int
    steps: int
    chosen: Sequence[int]
    bare: float | None

    @property
    def small(self) -> bool:
        """Whether the machine has no GPU, so that no number counts."""
        return self.platform == "cpu"

    def limit(self, batches: int) -> float:
        """Returns the seconds within which a job with so many batches ends.

        The time of its step may be three times that of the bare one (docs/gpu.md). To compile, and to move and hash a
        billion parameters, takes minutes.
        """
        return 300.0 + 4e-3 * (self.bare or 0.0) * batches

    def arguments(self, steps: int, size: str | None = None, tokens: int | None = None) -> list[str]:
        """Returns the arguments of the script of a job."""
        return ["--size", size or self.size, "--tokens", str(tokens or self.tokens), "--steps", str(steps)]

    def alone(self, part: str) -> Rows:
        """Returns the rows of one of `PARTS`."""
        environ = {**self.starter.environ, "JAX_PLATFORMS": self.platform}
        return rows_of(self.starter, environ, part, self.size, self.tokens)


# ---- Jobs ----


class JobOfBench:
    """One job of the language model, with its processes.

    Attributes:
        codes: the exit codes that are not 0, by the name of the pod.
    """

    def __init__(
        self, bench: Bench, folder: Path, arguments: Sequence[str], *, shards: int, workers: int = 1, **config: Any
    ):
        from backstay.testing import Job
        from backstay_spec import contract

        self._platform, self.folder = bench.platform, folder
        self._limit = bench.limit
        self.codes: dict[str, int] = {}
        command = [sys.executable, str(SCRIPT), *arguments]
        self._job = Job(command, folder, bench.starter, shards=shards, workers=workers, mode="Sync", **config)
        self._job.environment |= {"SPANS": str(folder)}
        if not bench.small:  # a worker that finds no GPU fails then, and does not compute on the CPU
            self._job.environment[contract.ENV_GPUS] = "1"

    def __enter__(self) -> JobOfBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._job.end()

    def start(self, platforms: Sequence[str] | None = None, **environment: str) -> list[Any]:
        """Start all pods; returns the workers. `platforms` are those of each worker, or None for the machine's."""
        for shard in range(self._job.shards):
            self._job.server(shard, 1, JAX_PLATFORMS="cpu")
        ranks = range(self._job.workers)
        chosen = platforms or [self._platform for _ in ranks]
        return [self._job.worker(rank, 1, JAX_PLATFORMS=chosen[rank], **environment) for rank in ranks]

    def worker(self, rank: int, incarnation: int) -> Any:
        """Start another worker in place of a dead one."""
        return self._job.worker(rank, incarnation, JAX_PLATFORMS=self._platform)

    def wait(self, batches: int, pods: Sequence[Any] | None = None) -> None:
        """Wait until pods have ended as they should.

        Args:
            batches: the batches of the job.
            pods: None means all pods. Then each has written its spans.

        Raises:
            RuntimeError: one has not, or another one has failed.
        """
        pods = self._job.pods if pods is None else pods
        deadline = time.monotonic() + (seconds := self._limit(batches))
        while any(one.process.poll() is None for one in pods) and not self._failed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the job did not end in {seconds:.0f} s\n{self._outputs()}")
            time.sleep(0.01)
        if self._failed():
            raise RuntimeError(f"a pod has failed\n{self._outputs()}")

    def _failed(self) -> bool:
        return any(one.process.poll() not in (None, self.codes.get(one.name, 0)) for one in self._job.pods)

    def _outputs(self) -> str:
        return "\n".join(f"== {one.name}: {one.process.poll()}\n{one.output()[-1500:]}" for one in self._job.pods)

    def spans(self, pods: Sequence[Any]) -> Spans:
        """Returns the spans of some pods that have ended, by point."""
        found: Spans = {}
        for pod in pods:
            file = self.folder / f"{pod.role}-{pod.process.pid}.json"
            for point, began, ended, _ in json.loads(file.read_text()):
                found.setdefault(point, []).append((began, ended))
        return found

    def all_spans(self) -> Spans:
        return self.spans(self._job.pods)


@contextlib.contextmanager
def job(bench: Bench, arguments: Sequence[str], **settings: Any) -> Iterator[JobOfBench]:
    with (
        tempfile.TemporaryDirectory(prefix="backstay-gpu-") as folder,
        JobOfBench(bench, Path(folder), arguments, **settings) as made,
    ):
        yield made


Spans = dict[str, list[tuple[float, float]]]
"""The beginnings and ends of spans, by point."""
POINTS: Final = ("batch_wait", "compute", "encode", "push", "update_wait", "pull", "apply")


def covered(spans: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    """Returns the seconds of an interval in which one of the spans, or several, were open."""
    total, at = 0.0, began
    for first, last in sorted(spans):
        total += max(0.0, min(last, ended) - max(first, at))
        at = max(at, last)
    return total


def parts_of(spans: Spans, batches: int) -> tuple[float, list[str]]:
    """Returns the milliseconds between two updates, and of each of `POINTS` in that time; a dash where it has no span.

    All of them are divided by the number of batches of an update, and are medians of the updates.
    """
    updates = list(itertools.pairwise([ended for _, ended in spans["pull"]][SKIPPED - 1 :]))

    def ms(values: Iterable[float]) -> float:
        return 1e3 * statistics.median(values) / batches

    parts = [(ms(covered(spans[one], *each) for each in updates) if one in spans else None) for one in POINTS]
    return ms(b - a for a, b in updates), ["-" if part is None else f"{part:.3g}" for part in parts]


_INT8: Final = {"gradients": "Int8", "parameters": "BFloat16"}
KINDS: Final[Sequence[tuple[str, dict[str, str], dict[str, int] | None]]] = (
    ("Exact, 1 server", {}, None),
    ("Exact, {servers} servers", {}, None),
    ("BFloat16 both ways, {servers} servers", {"gradients": "BFloat16", "parameters": "BFloat16"}, None),
    ("Int8, BFloat16 back, 1 server", _INT8, None),
    ("Int8, BFloat16 back, {servers} servers", _INT8, None),
    ("{count} local steps, Exact, {servers} servers", {}, {}),
    ("{count} local steps, Int8, {servers} servers", _INT8, {}),
    ("{count} local steps, overlap 2, Int8, {servers} servers", _INT8, {"overlap": 2}),
)
"""The rows of `servers`. Each has a name, the wire, and the arguments of LocalSteps beside the count."""
SERVERS: Final = 4
COUNT: Final = 24
"""Local steps of an update."""


def with_servers(bench: Bench) -> Rows:
    """Returns the step of one worker with servers beside it.

    All times are those of a batch. An update with local steps has many batches, so what happens once in an update is
    divided by their number. A part counts as long as one thread or several do it, on any server. The parts overlap:
    `compute` has the waits for the batches after the first one.
    """
    rows: Rows = [
        (f"{bench.size}, ms of a batch", "all", "share", "batch", "compute", "encode", "push", "wait", "pull", "apply")
    ]
    servers, count = (2, 4) if bench.small else (SERVERS, COUNT)
    for title, wire, local in (KINDS[number] for number in bench.chosen):
        shards = servers if "{servers}" in title else 1
        name = title.format(servers=servers, count=count)
        batches = 1 if local is None else count
        updates = bench.steps if local is None else max(SKIPPED + 2, bench.steps // 4)
        arguments = bench.arguments(updates)
        arguments += [] if local is None else ["--local", json.dumps({"count": count, **local})]
        try:
            with job(bench, arguments, shards=shards, wire=wire) as running:
                running.start()
                running.wait(updates * batches)
                ms, parts = parts_of(running.all_spans(), batches)
        except (RuntimeError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            rows.append((name, "failed", *[""] * 8))
            continue
        share = "-" if bench.bare is None else f"{bench.bare / ms:.2f}"
        rows.append((name, f"{ms:.1f}", share, *parts))
        print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def digest_of(worker: Any) -> str:
    """Returns what a worker has printed about its result."""
    return next(line for line in worker.output().splitlines() if line.startswith("digest"))


def bits(bench: Bench) -> Rows:
    """Returns whether two jobs give the same bits, with and without `deterministic`."""
    rows: Rows = [("the same job twice", "bits of the parameters")]
    steps = 3 if bench.small else 10
    kinds: list[tuple[str, list[str]]] = [("as it is", []), ("deterministic=True", ["--deterministic"])]
    for name, extra in kinds[1:] if bench.small else kinds:  # it makes no difference on a CPU
        found = set()
        for _ in range(2):
            with job(bench, [*bench.arguments(steps), *extra], shards=1, wire={"gradients": "Int8"}) as running:
                (worker,) = running.start()
                running.wait(steps)
                found.add(digest_of(worker))
        rows.append((name, "equal" if len(found) == 1 else "different"))
    return rows


def killed(bench: Bench) -> Rows:
    """Measure a worker that is killed in the middle, and its replacement on the same device."""
    steps, at = (4, 2) if bench.small else (10, 5)
    with job(bench, bench.arguments(steps), shards=1) as running:
        (worker,) = running.start(FAULT_INJECTION=f"kill worker/0 @{at}")
        running.codes[worker.name] = _KILLED
        running.wait(steps, [worker])
        died = time.monotonic()
        replacement = running.worker(0, 2)
        running.wait(steps)
        first = running.spans([replacement])["pull"][0][1] - died
    cache = "a compilation cache" if os.environ.get("JAX_COMPILATION_CACHE_DIR") else "no cache"
    return [("SIGKILL of the worker", "s"), (f"until the replacement's first update, {cache}", f"{first:.2f}")]


def mixed(bench: Bench) -> Rows:
    """Measure one worker on the machine's device and one on its CPU, in one job."""
    steps = 5 if bench.small else 20
    with job(bench, bench.arguments(steps, "tiny", min(512, bench.tokens)), shards=1, workers=2) as running:
        workers = running.start([bench.platform, "cpu"])
        running.wait(steps)
        digests = {digest_of(one) for one in workers}
    return [("a worker on each platform", f"{len(workers)} ended, {len(digests)} result")]


PARTS: Final = ("versions", "copies", "codecs", "step")
JOBS: Final[Mapping[str, Callable[[Bench], Rows]]] = {
    "servers": with_servers,
    "bits": bits,
    "killed": killed,
    "mixed": mixed,
}


# ---- The command ----


def parsed() -> argparse.Namespace:
    """Returns the arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*PARTS, *JOBS)
    parser.add_argument("--size", choices=("tiny", "100M", "1B"), default="100M")
    parser.add_argument("--tokens", type=int, default=65536, help="of each batch")
    parser.add_argument("--steps", type=int, default=24, help="updates of a job without local steps")
    parser.add_argument("--bare", type=float, help="milliseconds of the step without servers, if not measured here")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    listed = "; ".join(f"{number}: {kind[0]}" for number, kind in enumerate(KINDS))
    listed = listed.format(servers=SERVERS, count=COUNT)
    numbers = range(len(KINDS))
    parser.add_argument("--rows", nargs="+", type=int, choices=numbers, default=numbers, help=f"of servers. {listed}")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    if arguments.steps < SKIPPED + 2:
        parser.error(f"--steps must be {SKIPPED + 2} or more: {SKIPPED} updates do not count, and two times are needed")
    if arguments.tokens < 1:
        parser.error("--tokens must be positive")
    return arguments


def main() -> int:
    arguments = parsed()
    environ = {**os.environ, **allocator_environment(), "PYTHONUNBUFFERED": "1"}
    try:
        ((backend, present),) = rows_of(_Starter(environ), environ, "probe", "tiny", 1)
    except RuntimeError as error:
        print(f"JAX finds no device: {error}", file=sys.stderr)
        return 1
    # Otherwise a job's worker would use all GPUs, and the step without servers one.
    environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    platform = "cuda,cpu" if backend == "gpu" else "cpu"
    starter: Any = _Starter(environ)
    if platform == "cpu":  # a forked process need not import JAX
        from backstay.testing import Forker

        starter = Forker({**environ, "JAX_PLATFORMS": "cpu"}, SCRIPT)
    try:
        bench = Bench(
            platform, starter, arguments.size, arguments.tokens, arguments.steps, arguments.rows, arguments.bare
        )
        return run(bench, arguments.only, present, arguments.results)
    finally:
        starter.close()


def run(bench: Bench, only: Sequence[str], present: str, results: Path | None) -> int:
    """Run the parts, and print their tables; returns the exit code. `present`: the number of the machine's devices."""
    tables: list[str] = []
    failed = False
    for name in (*PARTS, *JOBS):
        needed = name == "step" and "servers" in only and bench.bare is None
        if name not in only and not needed:
            continue
        try:
            rows = JOBS[name](bench) if name in JOBS else bench.alone(name)
        except Exception as error:  # noqa: BLE001  # the other parts may work
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            rows = [(name, "failed")]
        if name == "versions":
            rows.append(("devices present", present))
            rows.append(("CUDA_VISIBLE_DEVICES", bench.starter.environ["CUDA_VISIBLE_DEVICES"]))
        if name == "step" and rows[-1][1] != "failed":
            bench.bare = float(rows[-1][1])
        failed = failed or any(row[1] == "failed" for row in rows)
        tables.append(table(rows))
        print(f"\n{tables[-1]}", flush=True)
        if results:
            results.write_text("\n\n".join(tables) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
