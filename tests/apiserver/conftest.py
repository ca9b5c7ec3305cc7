"""A server to test, and a client for it.

Without anything in the environment it is the embedded one, fresh for each module. With BACKSTAY_TEST_KUBECONFIG set,
tests that take `api` run against that cluster; those that take `embedded` need what only the embedded one has.
"""

import asyncio
import base64
import concurrent.futures
import http.client
import itertools
import json
import os
import shutil
import ssl
import threading
import urllib.parse
from pathlib import Path

import pytest
import yaml

from backstay_cluster.apiserver import ApiServer, cel

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
    """Blocking HTTP to one API server: a fresh connection for each call, so that tests share nothing."""

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

    def watch(self, path, *, accept="", opened=None, most=None):
        """At most `most` events, until the server ends the watch; `opened` is called when it has begun."""
        connection = self._open(60)
        try:
            response = self._send(connection, "GET", path, None, "", accept)
            if opened:
                opened()
            if response.status != 200:
                return Answer(response.status, response.headers, response.read())
            return [json.loads(line) for line in itertools.islice(response, most)]
        finally:
            connection.close()


class Embedded(Client):
    """An embedded server in a separate thread, and a client for it."""

    def __init__(self, **options):
        self.server = ApiServer(token=TOKEN, **options)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.run(self.server.start())
        except BaseException:
            self._end()
            raise
        super().__init__(self.server.url, TOKEN, self.server.client_context())

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def within(self, function, *arguments):
        """Call a function in the server's loop."""
        done = concurrent.futures.Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(function(*arguments)))
        return done.result(30)

    def _end(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()

    def stop(self):
        if self.loop.is_closed():
            return
        try:
            self.run(self.server.stop())
        finally:
            self._end()


def from_kubeconfig(path):
    """A client for the current context of a kubeconfig (token or client certificate)."""
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


@pytest.fixture(scope="module")
def api(request):
    outside = os.environ.get("BACKSTAY_TEST_KUBECONFIG")
    return from_kubeconfig(outside) if outside else request.getfixturevalue("embedded")


@pytest.fixture(autouse=True)
def _tools(request):
    for mark in request.node.iter_markers("tool"):
        if shutil.which(mark.args[0]) is None:
            pytest.skip(f"{mark.args[0]} is not installed")
