"""Real processes serve checkpoints over both protocols, change versions under load, and end."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from between import LONG, put, slack

Start = Callable[..., Any]
ONE = [[1.0, 2.0]]


def request_of(rows: int) -> bytes:
    head = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [rows, 2], "data": [0.5] * rows * 2}]}
    return json.dumps(head).encode()


def values(answer: Any) -> dict[str, Any]:
    return {output["name"]: output["data"] for output in answer["outputs"]}


class Load:
    """Clients that send requests of different sizes, as long as the process is ready. One of them is mostly in the
    process.

    Attributes:
        answered: the number of answers.
        steps: the steps in the answers, in the order of arrival.
        problems: what was not a complete answer of one version.
    """

    def __init__(self, process: Any, clients: int = 4) -> None:
        self.answered, self.steps = 0, []  # type: tuple[int, list[int]]
        self.problems: list[str] = []
        self._process, self._stop = process, threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._send, args=(1 + client % 3,)) for client in range(clients)]
        for thread in self._threads:
            thread.start()

    def _send(self, rows: int) -> None:
        while not self._stop.wait(0.02):
            try:
                if self._process.call("GET", "/v2/health/ready")[0] != 200:
                    return  # as a Service stops to send requests
                status, answer = self._process.call("POST", "/v2/models/small/infer", request_of(rows))
            except OSError as error:
                self.problems.append(repr(error))
                return
            with self._lock:
                self.answered += 1
                if status != 200:
                    self.problems.append(f"{status} {answer}")
                    continue
                step = int(answer["model_version"])
                found = values(answer)
                if found["value"] != [step] * rows or found["sum"] != [step] * rows or len(found["echo"]) != 2 * rows:
                    self.problems.append(f"a mixed answer: {answer}")
                self.steps.append(step)

    def end(self) -> None:
        """Wait for the clients."""
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_t7_a_checkpoint_is_answered_over_http_and_grpc_to_the_clients_of_other_projects(
    start: Start, small: Path, tmp_path: Path, store: Any, value_of: Any
) -> None:
    """The clients of Triton and of KServe, each over both protocols, with JSON and with bytes."""
    store(tmp_path / "ck", 5, value_of(5))
    process = start(small, tmp_path / "ck")
    process.until_served(5)
    status, answer = process.infer(ONE, id="mine", outputs=[{"name": "echo"}])
    assert (status, answer["id"], answer["model_version"], values(answer)) == (200, "mine", "5", {"echo": [1.0, 2.0]})
    of_triton = f"""
import numpy as np, tritonclient.grpc as tg, tritonclient.http as th
x = np.arange(6, dtype=np.float32).reshape(3, 2)
for module, port in ((th, {process.port("HTTP")}), (tg, {process.port("gRPC")})):
    client = module.InferenceServerClient(f"127.0.0.1:{{port}}")
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("small")
    given = module.InferInput("input", [3, 2], "FP32")
    given.set_data_from_numpy(x)
    found = client.infer("small", [given])
    assert (found.as_numpy("echo") == x).all() and (found.as_numpy("value") == 5).all()
    client.close()
print("answered")
"""
    of_kserve = f"""
import asyncio, numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
x = np.arange(6, dtype=np.float32).reshape(3, 2)

async def kserve():
    given = InferInput("input", [3, 2], "FP32", data=x.reshape(-1).tolist())
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    base = "http://127.0.0.1:{process.port("HTTP")}"
    found = await rest.infer(base, InferRequest("small", [given]), model_name="small")
    assert "step-000000000005" in found.parameters["checkpoint"] and found.outputs[0].name == "echo", found
    remote = InferenceGRPCClient("127.0.0.1:{process.port("gRPC")}")
    given = InferInput("input", [3, 2], "FP32", data=x.reshape(-1).tolist())
    found = await remote.infer(InferRequest("small", [given]))
    assert (found.outputs[0].as_numpy() == x).all(), found
    await remote.close(); await rest.close()

asyncio.run(kserve())
print("answered")
"""
    for client in (of_triton, of_kserve):
        done = subprocess.run([sys.executable, "-c", client], capture_output=True, text=True)
        assert done.stdout.endswith("answered\n"), done.stderr
    assert process.end() == 0


def test_t6_o11_new_versions_and_sigterm_under_load_cost_no_answer(
    start: Start, small: Path, tmp_path: Path, store: Any, value_of: Any, eventually: Any
) -> None:
    """No answer fails or mixes versions. After SIGTERM the process is not ready immediately, and answers for the drain
    period. Then it ends with exit code 0."""
    folder = tmp_path / "ck"
    store(folder, 1, value_of(1))
    process = start(small, folder, BACKSTAY_SERVE_DRAIN_SECONDS=str(round(3 * slack())))
    process.until_served(1)
    load = Load(process)
    for step in range(2, 7):
        store(folder, step, value_of(step))
        process.until_served(step)
        seen = load.answered
        eventually(lambda: load.answered > seen + 5)  # noqa: B023
    process.process.send_signal(signal.SIGTERM)
    process.wait_for("SIGTERM")
    assert process.call("GET", "/v2/health/ready")[0] == 503
    assert process.call("GET", "/v2/health/live")[0] == 200
    status, answer = process.infer(ONE)  # a load balancer that has not noticed it yet
    assert status == 200, answer
    load.end()
    assert load.problems == []
    assert set(load.steps) == set(range(1, 7))
    assert process.process.wait() == 0
    process.wait_for("all requests are answered")


BLOCKED = """
import functools, sys, time
import jax, jax.numpy as jnp
import backstay
from backstay._serving import _serve

_serve.ServingSettings = functools.partial(_serve.ServingSettings, finish=0.1)

def block(x):
    print("XLA computes", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.001)  # the thread takes Python's lock again and again, as a compilation does

def predict(params, state, x):
    return jax.pure_callback(block, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

backstay.serve(predict, example=jnp.zeros(2), batch=1, name="small")
"""


def test_o11_sigterm_while_xla_computes_ends_the_process_with_code_0(
    start: Start, tmp_path: Path, store: Any, value_of: Any
) -> None:
    """The interpreter cannot end such a thread: the process would abort."""
    store(tmp_path / "ck", 1, value_of(1))
    script = tmp_path / "serve.py"
    put(script, BLOCKED)
    process = start(script, tmp_path / "ck")
    process.wait_for("XLA computes")
    assert process.end() == 0
    process.wait_for("the process ends without its result")


def test_t7_t8_without_a_checkpoint_it_waits_and_damaged_ones_and_a_deleted_folder_leave_the_served_one(
    start: Start, small: Path, tmp_path: Path, store: Any, value_of: Any
) -> None:
    folder = tmp_path / "ck"
    process = start(small, folder)
    process.port("HTTP")
    assert process.call("GET", "/v2/health/live") == (200, {"live": True})
    assert process.call("GET", "/v2/health/ready") == (503, {"ready": False})
    status, answer = process.infer(ONE)
    assert status == 503
    assert f"{folder} has no complete checkpoint yet" in answer["error"]
    store(folder, 1, value_of(1))
    process.until_served(1)
    assert process.call("GET", "/v2/health/ready")[0] == 200
    load = Load(process, clients=2)
    building = tmp_path / "other"
    torn = store(building, 2, value_of(2))
    content = (building / torn.files[0].name).read_bytes()
    put(folder / torn.files[0].name, content[:-4] + b"\x00\x00\x00\x00")
    (building / torn.name).rename(folder / torn.name)
    assert torn.files[0].name in process.wait_for("is damaged")
    store(folder, 3, value_of(3))
    process.until_served(3)
    shutil.rmtree(folder)
    process.wait_for("step 3 stays served")
    load.end()
    assert load.problems == []
    assert 2 not in load.steps
    assert process.infer(ONE)[1]["model_version"] == "3"
    _, page = process.call("GET", "/metrics")
    assert b"backstay_serving_storage_available 0.0" in page
    assert b'skipped_checkpoints_total{reason="Damaged"} 1.0' in page


def test_t8_slow_huge_and_torn_requests_cost_only_themselves(
    start: Start, small: Path, tmp_path: Path, store: Any, value_of: Any
) -> None:
    """One that is refused before its body leaves the connection usable."""
    store(tmp_path / "ck", 1, value_of(1))
    process = start(small, tmp_path / "ck")
    process.until_served(1)

    def opened(text: bytes) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", process.port("HTTP")), LONG)
        with contextlib.suppress(OSError):
            sock.sendall(text)
        return sock

    def answer_to(text: bytes) -> bytes:
        with opened(text) as sock, contextlib.suppress(ConnectionResetError):
            return sock.recv(4096)
        return b""

    head = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\n"
    slow = [opened(head), opened(head + b"Content-Length: 50\r\n\r\n{"), opened(b"")]
    assert answer_to(head + b"Content-Length: 99999999999\r\n\r\n").startswith(b"HTTP/1.1 413")
    chunk = b"%x\r\n" % (1 << 16) + b" " * (1 << 16) + b"\r\n"
    assert answer_to(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 40)[:12] in (b"HTTP/1.1 413", b"")
    assert answer_to(head + b"X: " + b"y" * (1 << 18))[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
    assert answer_to(b"\x00\xff\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert process.infer(ONE)[0] == 200
    for sock in slow:
        sock.close()

    # A client that pins a version gets 404 at each change, and not a reset of its connection.
    connection = http.client.HTTPConnection("127.0.0.1", process.port("HTTP"), timeout=LONG)
    for size in (1 << 10, 1 << 20):
        for _ in range(2):
            connection.request("POST", "/v2/models/small/versions/9/infer", b" " * size)
            answer = connection.getresponse()
            assert (answer.status, b"version '9' is not served" in answer.read()) == (404, True)
    kept = connection.sock
    connection.request("GET", "/v2/health/ready")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b'{"ready":true}')
    assert connection.sock is kept, "it is the same connection"
    connection.close()
    assert process.end() == 0


def test_o7_with_a_token_only_probes_and_metrics_are_open(
    start: Start, small: Path, tmp_path: Path, store: Any, value_of: Any
) -> None:
    import grpc

    store(tmp_path / "ck", 1, value_of(1))
    put(tmp_path / "token.txt", "secret\n")  # a module has the name without an ending
    process = start(small, tmp_path / "ck", BACKSTAY_SERVE_TOKEN_FILE=str(tmp_path / "token.txt"))
    process.until_served(1)
    for path in ("/v2/health/live", "/v2/health/ready", "/metrics", "/v2/models/small/ready"):
        assert process.call("GET", path)[0] == 200
    for wrong in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
        assert process.call("POST", "/v2/models/small/infer", request_of(1), wrong)[0] == 401
        assert process.call("GET", "/v2/models/small", None, wrong)[0] == 401
    assert process.call("POST", "/v2/models/small/infer", request_of(1), {"Authorization": "Bearer secret"})[0] == 200
    with grpc.insecure_channel(f"127.0.0.1:{process.port('gRPC')}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"")
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        unload = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelUnload")
        with pytest.raises(grpc.RpcError) as refused:
            unload(b"", metadata=(("authorization", "Bearer secret"),))
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_t8_a_full_disk_does_not_stop_answers(
    start: Start, small: Path, tmp_path: Path, store: Any, value_of: Any, eventually: Any
) -> None:
    """The log goes to a device that is full, and the folder has the rest of a checkpoint that could not be written."""
    folder = tmp_path / "ck"
    store(folder, 1, value_of(1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start(small, folder, log=Path("/dev/full"), BACKSTAY_SERVE_HTTP_PORT=str(port))

    def served() -> str:
        try:
            return str(process.infer(ONE)[1].get("model_version"))
        except ConnectionError:
            return "it does not listen yet"

    eventually(lambda: served() == "1")
    put(folder / store(tmp_path / "other", 2, value_of(2)).files[0].name, b"torn")
    store(folder, 3, value_of(3))
    eventually(lambda: served() == "3")


def test_a_script_with_an_invalid_predict_ends_with_its_reason(
    start: Start, tmp_path: Path, store: Any, value_of: Any
) -> None:
    store(tmp_path / "ck", 1, value_of(1))
    script = tmp_path / "serve.py"
    put(
        script,
        "import backstay, numpy as np\n"
        "backstay.serve(lambda params, state, x: x.sum(), example=np.zeros(2, np.float32), batch=4)\n",
    )
    process = start(script, tmp_path / "ck")
    assert process.process.wait() == 1
    assert "the first dimension must be 4" in process.wait_for("ConfigurationError: `predict` returns the shape ()")
