"""Serving is measured by the time of one answer, by throughput, and by versions that change under load.

    python bench/serve.py [--answers 20000] [--seconds 8]

One run compares `backstay.serve` with the bare jitted function, with itself without batches, and with a plain FastAPI
server that calls the same function. LitServe and MLServer are compared if they are installed. All servers answer the
same requests of the same clients, one server after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import logging
import os
import re
import runpy
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import backstay

SMALL, LARGE, LAYERS = 64, 3072, 3
CLIENTS = 32
SCRIPTS = Path(__file__).parent / "scripts"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=20_000, help="answers while versions change")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement of throughput")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # of training, which stores the versions
    with tempfile.TemporaryDirectory(prefix="backstay-serve-") as name:
        folder = Path(name)
        one_answer(folder)
        throughput(folder, args.seconds)
        versions(folder, args.answers)


def advance(checkpoints: Path, width: int, layers: int, steps: int) -> None:
    """Train until `steps`, and store it. The parameter `value` is the number of the step."""

    def init(key: Any) -> Any:
        keys = jax.random.split(key, layers)
        return {
            "value": jnp.zeros(1),
            "layers": [jax.random.normal(one, (width, width)) / width**0.5 for one in keys],
        }

    backstay.train(
        init=init,
        loss=lambda params, batch: -params["value"].sum() + 0 * batch,
        batches=lambda key: np.float32(0),
        optimizer=optax.sgd(1.0),
        steps=steps,
        checkpoint=backstay.StoreTo(str(checkpoints), keep=3),
        log_every=3600,
    )


@contextmanager
def server(folder: Path, script: str, checkpoints: Path, batch: int, width: int) -> Iterator[tuple[int, Any]]:
    """The port of a server that is ready, and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, str(SCRIPTS / f"{script}.py"), str(checkpoints), str(port), str(batch), str(width)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "BACKSTAY_SERVE_DRAIN_SECONDS": "0"}
    with (folder / f"{script}.log").open("w") as log:
        process = subprocess.Popen(words, cwd=folder, env=environment, stderr=log, stdout=log, start_new_session=True)
    try:
        path = "/health" if script == "serving_litserve" else "/v2/health/ready"
        end = time.monotonic() + 120
        while not ready(port, path):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{script} did not start:\n{(folder / f'{script}.log').read_text()}")
            time.sleep(0.1)
        yield port, process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):  # LitServe leaves its workers
            os.killpg(process.pid, signal.SIGKILL)


def ready(port: int, path: str) -> bool:
    """Returns whether a server answers its probe."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def body_of(width: int, rows: int = 1) -> bytes:
    """Returns a request with JSON."""
    data = np.random.default_rng(0).normal(size=rows * width).astype(np.float32).round(3).tolist()
    tensor = {"name": "input", "datatype": "FP32", "shape": [rows, width], "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


class LoadClient:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def infer(self, body: bytes) -> dict[str, Any]:
        self._connection.request("POST", "/v2/models/model/infer", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {content[:200]!r}")
        return dict(json.loads(content))

    def close(self) -> None:
        self._connection.close()


def timed(call: Callable[[], Any], count: int) -> list[float]:
    """Returns the sorted times of calls, in milliseconds."""
    for _ in range(100):
        call()
    found = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - began))
    return sorted(found)


def row(what: str, found: list[float]) -> None:
    """Print the row of some times in milliseconds."""
    print(
        f"  {what:<52} median {found[len(found) // 2]:7.2f} ms   99 % {found[len(found) * 99 // 100]:7.2f} ms",
        flush=True,
    )


def one_answer(folder: Path) -> None:
    """The time of one request without any other."""
    checkpoints = folder / "small"
    advance(checkpoints, SMALL, LAYERS, 1)
    predict = runpy.run_path(str(SCRIPTS / "serving_model.py"))["predict"]
    params = jax.device_put(backstay.load(str(checkpoints)).params)
    compiled = jax.jit(predict)
    x = np.ones((1, SMALL), np.float32)
    print(f"one client, {LAYERS} layers of {SMALL} x {SMALL}, {os.cpu_count()} cores")
    row("the bare jitted function", timed(lambda: jax.device_get(compiled(params, None, x)), 2000))
    with server(folder, "serving_backstay", checkpoints, 16, SMALL) as (port, _):
        client = LoadClient(port)
        row("backstay.serve, HTTP with JSON", timed(lambda: client.infer(body_of_small), 2000))
        client.close()
        grpc_port = int(re.search(r"gRPC on port (\d+)", (folder / "serving_backstay.log").read_text())[1])  # type: ignore[index]
        row("backstay.serve, gRPC", timed(grpc_call(grpc_port), 2000))
    with server(folder, "serving_fastapi", checkpoints, 1, SMALL) as (port, _):
        client = LoadClient(port)
        row("a plain FastAPI server", timed(lambda: client.infer(body_of_small), 2000))
        client.close()


body_of_small = body_of(SMALL)


def grpc_call(port: int) -> Callable[[], Any]:
    """Sends one request of the small model."""
    import grpc

    argv, sys.argv = sys.argv, sys.argv[:1]
    from kserve.protocol.grpc import grpc_predict_v2_pb2 as messages
    from kserve.protocol.grpc import grpc_predict_v2_pb2_grpc as services

    sys.argv = argv
    stub = services.GRPCInferenceServiceStub(grpc.insecure_channel(f"127.0.0.1:{port}"))
    tensor = messages.ModelInferRequest.InferInputTensor(name="input", datatype="FP32", shape=[1, SMALL])
    content = np.ones(SMALL, np.float32).tobytes()
    request = messages.ModelInferRequest(model_name="model", inputs=[tensor], raw_input_contents=[content])
    return lambda: stub.ModelInfer(request)


def load(port: int, body: bytes, seconds: float) -> tuple[float, list[float]]:
    """Answers a second to all clients, and the sorted times of answers in milliseconds."""
    times: list[float] = []
    start = time.perf_counter()
    end = start + seconds

    def send() -> None:
        client = LoadClient(port)
        while (began := time.perf_counter()) < end:
            client.infer(body)
            times.append(1e3 * (time.perf_counter() - began))
        client.close()

    threads = [threading.Thread(target=send) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(times) / (time.perf_counter() - start), sorted(times)  # the last answers come after the end


def throughput(folder: Path, seconds: float) -> None:
    """Requests of many clients, each with one example of a large model."""
    checkpoints = folder / "large"
    advance(checkpoints, LARGE, LAYERS, 1)
    body = body_of(LARGE)
    print(f"\n{CLIENTS} clients, {LAYERS} layers of {LARGE} x {LARGE} ({LAYERS * LARGE**2 * 4 >> 20} MB)")
    rows = [
        ("serving_backstay", "backstay.serve, batches of up to 32", 32),
        ("serving_backstay", "backstay.serve, batch=1", 1),
        ("serving_fastapi", "a plain FastAPI server", 1),
    ]
    for package in ("litserve", "mlserver"):
        if importlib.util.find_spec(package) is None:
            print(f"  {package} is not installed: not compared")
        elif package == "litserve":
            rows.append(("serving_litserve", "LitServe, batches of up to 32", 32))
    first = 0.0
    for script, what, batch in rows:
        with server(folder, script, checkpoints, batch, LARGE) as (port, _):
            load(port, body, 1.0)
            rate, found = load(port, body, seconds)
        first = first or rate
        print(
            f"  {what:<52} {rate:7.1f} answers/s   median {statistics.median(found):7.1f} ms   "
            f"{first / rate:5.2f} times slower than the first",
            flush=True,
        )


def versions(folder: Path, answers: int) -> None:
    """Ten versions under load, on two replicas of which one is killed again and again."""
    checkpoints = folder / "small"
    print(f"\nten versions, {answers} answers of two replicas; one of them is killed at every third version")
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    ports: list[int] = []
    stop = threading.Event()
    lock = threading.Lock()

    def send(number: int) -> None:
        clients: dict[int, LoadClient] = {}
        while not stop.is_set():
            number += 1
            for attempt in range(20):  # as a proxy retries a request whose connection broke, on another replica
                port = ports[(number + attempt) % 2]
                try:
                    answer = clients.setdefault(port, LoadClient(port)).infer(body_of_small)
                    step = int(answer["model_version"])
                    value = next(output["data"][0] for output in answer["outputs"] if output["name"] == "value")
                except (OSError, http.client.HTTPException):
                    clients.pop(port).close()
                    counts["retried"] += 1
                    time.sleep(0.01)
                    continue
                except RuntimeError as error:
                    counts["not ready yet" if "503" in str(error) else "failed"] += 1
                    time.sleep(0.01)
                    continue
                except (ValueError, LookupError, TypeError, StopIteration):  # an answer of another form
                    counts["failed"] += 1
                    continue
                with lock:
                    counts["answered"] += 1
                    counts["mixed"] += value != step
                    seen.add(step)
                break
            else:
                counts["failed"] += 1

    times: list[float] = []
    with server(folder, "serving_backstay", checkpoints, 16, SMALL) as (one, _):
        ports.append(one)
        with server_that_dies(folder, checkpoints) as (other, kill):
            ports.append(other)
            threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for version in range(2, 12):
                before = counts["answered"]
                advance(checkpoints, SMALL, LAYERS, version)
                began = time.monotonic()
                while version not in seen:
                    time.sleep(0.01)
                times.append(time.monotonic() - began)
                if version % 3 == 0:
                    kill()
                while counts["answered"] < before + answers // 10:
                    time.sleep(0.05)
            stop.set()
            for thread in threads:
                thread.join()
    shown = ", ".join(f"{name} {counts[name]}" for name in ("answered", "failed", "mixed", "retried", "not ready yet"))
    print(f"  {shown}; versions answered: {len(seen)}")
    print(
        f"  manifest stored -> the first answer of its version   median {statistics.median(times):5.2f} s   "
        f"slowest {max(times):5.2f} s",
        flush=True,
    )


@contextmanager
def server_that_dies(folder: Path, checkpoints: Path) -> Iterator[tuple[int, Callable[[], None]]]:
    """The port of a server, and a function that kills it with SIGKILL and starts the next one on the port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    running: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "BACKSTAY_SERVE_DRAIN_SECONDS": "0"}

    def begin() -> None:
        words = [sys.executable, str(SCRIPTS / "serving_backstay.py"), str(checkpoints), str(port), "16", str(SMALL)]
        with (folder / "dies.log").open("a") as log:
            running.append(subprocess.Popen(words, cwd=folder, env=environment, stderr=log, stdout=log))

    def kill() -> None:
        running[-1].kill()
        running[-1].wait()
        begin()

    begin()
    while not ready(port, "/v2/health/ready"):
        time.sleep(0.1)
    try:
        yield port, kill
    finally:
        running[-1].kill()
        running[-1].wait()


if __name__ == "__main__":
    main()
