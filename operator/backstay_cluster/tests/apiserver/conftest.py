"""A server to test, and a client for it.

Tests that take `api` run twice: against the embedded server, fresh for each module, and against a real kube-apiserver.
With BACKSTAY_TEST_KUBECONFIG set, that cluster is the real one. Tests that take `embedded` need what only the
embedded server has.
"""

import asyncio
import base64
import concurrent.futures
import http.client
import itertools
import json
import os
import ssl
import threading
import urllib.parse
from pathlib import Path

import pytest
import yaml

from backstay_cluster.apiserver import ApiServer, cel
from backstay_cluster.client import ApiClient
from backstay_cluster.gc import GarbageCollector
from backstay_cluster.realserver import RealServer
from backstay_cluster.tests.limits import LONG

# cel-python raises the recursion limit when it is first used, which must not be in the middle of a property test.
cel.compile_error("true")

TOKEN = "a-token-for-tests"


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.raw = status, headers, body

    @property
    def json(self):
        return json.loads(self.raw)

    def __repr__(self):
        return f"<{self.status} {self.raw[:500]!r}>"


class Client:
    """Blocking HTTP to one API server with a fresh connection for each call, so that tests share nothing."""

    def __init__(self, url, token="", context=None):
        self.url, self.token, self.context = url.rstrip("/"), token, context

    def _open(self, timeout):
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme == "https":
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout, context=self.context)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)

    def _send(self, connection, method, path, body, content_type, accept):
        headers = {"Accept": accept} if accept else {}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        if body is not None:
            headers["Content-Type"] = content_type
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, body=body, headers=headers)
        return connection.getresponse()

    def call(self, method, path, body=None, *, content_type="application/json", accept=""):
        connection = self._open(60)
        try:
            response = self._send(connection, method, path, body, content_type, accept)
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def get(self, path, **options):
        return self.call("GET", path, **options)

    def post(self, path, body, **options):
        return self.call("POST", path, body, **options)

    def put(self, path, body, **options):
        return self.call("PUT", path, body, **options)

    def merge(self, path, body, **options):
        return self.call("PATCH", path, body, content_type="application/merge-patch+json", **options)

    def delete(self, path, body=None, **options):
        return self.call("DELETE", path, body, **options)

    def watch(self, path, *, accept="", opened=None, most=None, last=None):
        """At most `most` events, until the server ends the watch or the object named `last` has an event; `opened` is
        called when it has begun.
        """
        connection = self._open(60)
        try:
            response = self._send(connection, "GET", path, None, "", accept)
            if opened:
                opened()
            if response.status != 200:
                return Answer(response.status, response.headers, response.read())
            found = []
            for line in itertools.islice(response, most):
                found.append(json.loads(line))
                if last is not None and found[-1]["object"]["metadata"].get("name") == last:
                    break
            return found
        finally:
            connection.close()


class Threaded(Client):
    """A server in a separate thread, and a client for it."""

    def __init__(self, server):
        self.server = server
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.run(self.server.start())
        except BaseException:
            self._end()
            raise

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(LONG)

    def within(self, function, *arguments):
        """Call a function in the server's loop."""
        done = concurrent.futures.Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(function(*arguments)))
        return done.result(LONG)

    def _end(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LONG)
        self.loop.close()

    def stop(self):
        if self.loop.is_closed():
            return
        try:
            self.run(self.server.stop())
        finally:
            self._end()


class Embedded(Threaded):
    """An embedded server."""

    def __init__(self, **options):
        super().__init__(ApiServer(token=TOKEN, **options))
        Client.__init__(self, self.server.url, TOKEN, self.server.client_context())


class Real(Threaded):
    """A real etcd and kube-apiserver, with what a controller manager adds: ServiceAccounts, garbage collection."""

    def __init__(self, programs, folder):
        super().__init__(RealServer(programs, folder, "127.96.0.0/16", TOKEN, service_accounts=True))
        Client.__init__(self, self.server.url, TOKEN, self.server.client_tls())
        self.add_accounts("default")
        self._api = ApiClient(self.server.url, TOKEN, ssl=self.server.client_tls())
        self._collector = self.run(self._collect())

    async def _collect(self):
        return asyncio.create_task(GarbageCollector(self._api).run())

    def add_accounts(self, namespace):
        """Create what the controller manager creates in a namespace."""
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        assert super().call("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account).status == 201

    def call(self, method, path, body=None, **options):
        answer = super().call(method, path, body, **options)
        if (method, path, answer.status) == ("POST", "/api/v1/namespaces", 201):
            self.add_accounts(answer.json["metadata"]["name"])
        return answer

    def stop(self):
        self.run(self._end_collector())
        super().stop()

    async def _end_collector(self):
        self._collector.cancel()
        await asyncio.gather(self._collector, return_exceptions=True)
        await self._api.close()


def from_kubeconfig(path):
    """Returns a client for the current context of a kubeconfig (token or client certificate)."""
    config = yaml.safe_load(Path(path).read_text())
    named = {kind: {e["name"]: e for e in config[kind]} for kind in ("clusters", "users", "contexts")}
    context = named["contexts"][config["current-context"]]["context"]
    cluster, user = named["clusters"][context["cluster"]]["cluster"], named["users"][context["user"]]["user"]
    authority = cluster.get("certificate-authority-data")
    trust = ssl.create_default_context(
        cafile=cluster.get("certificate-authority"), cadata=base64.b64decode(authority).decode() if authority else None
    )
    if user.get("client-certificate"):
        trust.load_cert_chain(user["client-certificate"], user["client-key"])
    return Client(cluster["server"], user.get("token", ""), trust)


@pytest.fixture(scope="module")
def embedded():
    server = Embedded()
    yield server
    server.stop()


@pytest.fixture
def start():
    """Start another embedded server, with its own options."""
    started = []

    def one(**options):
        started.append(Embedded(**options))
        return started[-1]

    yield one
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def real(tool, tmp_path_factory):
    """One for all modules of a test process, because it takes seconds to start."""
    server = Real(Path(tool("kube-apiserver")).parent, tmp_path_factory.mktemp("real"))
    yield server
    server.stop()


@pytest.fixture(
    scope="module", params=["embedded", pytest.param("real", marks=pytest.mark.tool("etcd", "kube-apiserver"))]
)
def api(request):
    """Either server; with BACKSTAY_TEST_KUBECONFIG, that cluster as the real one."""
    outside = os.environ.get("BACKSTAY_TEST_KUBECONFIG")
    if outside and request.param == "real":
        return from_kubeconfig(outside)
    return request.getfixturevalue(request.param)
