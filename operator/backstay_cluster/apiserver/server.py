"""Serves sockets, authentication, routing, and long answers (watches and logs)."""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import ssl
from collections.abc import Callable
from typing import Any, Final

import aiohttp
from aiohttp import web

from backstay_cluster.apiserver import discovery, kinds, openapi, request
from backstay_cluster.apiserver.certs import Certificate, make_certificate
from backstay_cluster.apiserver.connections import Connections
from backstay_cluster.apiserver.controllers import Controllers
from backstay_cluster.apiserver.definitions import Definitions
from backstay_cluster.apiserver.errors import (
    ApiError,
    PlainNotFound,
    bad_request,
    invalid,
    invalid_value,
    method_not_allowed,
    unauthorized,
)
from backstay_cluster.apiserver.handlers import ApiAnswer, Call, Handlers
from backstay_cluster.apiserver.objects import Obj, encode
from backstay_cluster.apiserver.request import Target
from backstay_cluster.apiserver.rest import Api
from backstay_cluster.apiserver.subresources import Subresources
from backstay_cluster.apiserver.watch import Watch, bookmark, event

log = logging.getLogger(__name__)

_HEALTH: Final = frozenset(("/healthz", "/livez", "/readyz"))
_BODY_LIMIT: Final = 3 * 1024 * 1024  # the same as in a real server
_BOOKMARK_SECONDS: Final = 60.0
_WATCH_SECONDS: Final = 1800


class ApiServer:
    """One Kubernetes API on one port.

    Args:
        host: the address to listen on; normally loopback.
        port: the port; 0: any free one (see `url` after `start`).
        token: the bearer token that every request needs, except health checks.
        service_cidr: the network of the Services' addresses.
        tls: whether to serve https, with a certificate that is created at the start (clients must trust `ca`).
            kubectl sends its token over https only.
        history: the number of changes of each kind that are kept for watches that start in the past.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str,
        service_cidr: str = "127.96.0.0/16",
        tls: bool = True,
        history: int = 8192,
    ) -> None:
        if not token:
            raise ValueError("token: must not be empty, because every request is authenticated by it")
        self._host, self._port = host, port
        self._token = token
        self._certificate: Certificate | None = make_certificate([host, "localhost"]) if tls else None
        self.api = Api(history=history)
        kinds.install(self.api, service_cidr)
        self._definitions = Definitions(self.api)
        self._controllers = Controllers(self.api, self._definitions)
        self._handlers = Handlers(self.api, self._definitions.type_of)
        self._subresources = Subresources(self.api, self._handlers, token)
        self._openapi = openapi.OpenApi(self.api.registry, self._definitions.type_of)
        self._runner: web.ServerRunner | None = None
        self._connections: Connections | None = None
        self._session: aiohttp.ClientSession | None = None
        self._watches: set[Watch] = set()
        self._stopping = False

    # Lifecycle

    @property
    def ca(self) -> str | None:
        """The certificate that clients must trust, in PEM; None without TLS."""
        return self._certificate.pem if self._certificate else None

    @property
    def token(self) -> str:
        """The bearer token."""
        return self._token

    @property
    def url(self) -> str:
        """Returns the URL for clients, with scheme, host and port."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._certificate else 'http'}://{host}:{self._port}"

    def client_context(self) -> ssl.SSLContext | None:
        """Returns a TLS context for a client in this process that trusts this server; None without TLS."""
        return ssl.create_default_context(cadata=self.ca) if self.ca else None

    def kubeconfig(self, name: str = "backstay") -> str:
        """Returns a kubeconfig for this server, as JSON (which is YAML)."""
        import base64
        import json

        cluster: Obj = {"server": self.url}
        if self.ca:
            cluster["certificate-authority-data"] = base64.b64encode(self.ca.encode()).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": name, "user": {"token": self._token}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
            "current-context": name,
        }
        return json.dumps(config, indent=1)

    async def start(self) -> None:
        """Listen on the address.

        Raises:
            OSError: the port is in use, or the address does not belong to this machine.
        """
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=10))
        self._connections = Connections(
            self._serve, request_factory=self._request, handler_cancellation=True, access_log=None
        )
        self._runner = web.ServerRunner(self._connections, shutdown_timeout=1.0)
        await self._runner.setup()
        context = self._certificate.server_context() if self._certificate else None
        site = web.TCPSite(self._runner, self._host, self._port, ssl_context=context, backlog=1024)
        try:
            await site.start()
        except OSError:
            await self.stop()
            raise
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """End all watches and close the port."""
        self._stopping = True
        for watch in list(self._watches):
            watch.stop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._connections is not None:
            await self._connections.closed(1.0)
            self._connections = None
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> ApiServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @staticmethod
    def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=_BODY_LIMIT)

    # Requests

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(http)
        except PlainNotFound:
            return web.Response(status=404, text="404 page not found\n")
        except ApiError as error:
            return _response(ApiAnswer(encode(error.status()), error.code))
        except web.HTTPRequestEntityTooLarge:
            text = f"Request entity too large: limit is {_BODY_LIMIT}"
            return _response(ApiAnswer(encode(ApiError(413, "RequestEntityTooLarge", text).status()), 413))
        except RecursionError:
            return _response(ApiAnswer(encode(bad_request("exceeded max depth").status()), 400))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("%s %s failed", http.method, http.path_qs)
            failure = ApiError(500, "InternalError", "Internal error occurred: see the log of the API server")
            return _response(ApiAnswer(encode(failure.status()), 500))

    def _authenticate(self, http: web.BaseRequest) -> None:
        scheme, _, token = http.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            token.strip().encode(errors="surrogateescape"), self._token.encode()
        ):
            raise unauthorized()

    async def _route(self, http: web.BaseRequest) -> web.StreamResponse:
        path = http.path.rstrip("/") or "/"
        if path in _HEALTH or path.startswith(("/livez/", "/readyz/", "/healthz/")):
            return web.Response(text="ok")
        self._authenticate(http)
        call = Call(
            method=http.method,
            path=path,
            query=http.query,
            accept=http.headers.get("Accept", ""),
            content_type=http.headers.get("Content-Type", "").partition(";")[0].strip().lower(),
        )
        if http.method in {"POST", "PUT", "PATCH", "DELETE"}:
            call.body = await http.read()
        answer = self._documents(call)
        if answer is not None:
            return _response(answer)
        target = request.locate(self.api.registry, path)
        if target.subresource == "log":
            if self._session is None:  # pragma: no cover  # the session exists between start and stop
                raise bad_request("the server is stopping")
            return await self._subresources.logs(target, call, http, self._session)
        if self._subresources.serves(target):
            return _response(self._subresources.dispatch(target, call))
        if call.method == "GET" and request.flag(call.query, "watch"):
            return await self._watch(target, call, http)
        answer = self._handlers.dispatch(target, call)
        if target.resource.custom and (text := self._definitions.type_of(target.resource).warning):
            answer.warnings.append(text)
        return _response(answer)

    def _documents(self, call: Call) -> ApiAnswer | None:
        """Returns the answers about the API itself and not about objects."""
        registry, path, parts = self.api.registry, call.path, call.path.strip("/").split("/")
        if parts[0] not in {"version", "api", "apis", "openapi"}:
            raise PlainNotFound
        if len(parts) > (2 if parts[0] == "api" else 3) and parts[0] != "openapi":
            return None
        if call.method != "GET":
            raise method_not_allowed()
        if path == "/version":
            return ApiAnswer(encode(discovery.VERSION))
        if path in {"/api", "/apis"} and "as=APIGroupDiscoveryList" in call.accept and "v=v2" in call.accept:
            body = encode(discovery.aggregated(registry, core=path == "/api"))
            return ApiAnswer(body, content_type=discovery.AGGREGATED)
        if path == "/api":
            return ApiAnswer(encode(discovery.versions(f"{self._host}:{self._port}")))
        if path == "/apis":
            return ApiAnswer(encode(discovery.groups(registry)))
        if parts[0] == "openapi":
            return self._openapi_answer(parts, call)
        if parts[0] == "api":
            return ApiAnswer(encode(discovery.resources(registry, "", parts[1])))
        if len(parts) == 2:
            return ApiAnswer(encode(discovery.group(registry, parts[1])))
        return ApiAnswer(encode(discovery.resources(registry, parts[1], parts[2])))

    def _openapi_answer(self, parts: list[str], call: Call) -> ApiAnswer:
        if parts[1:] == ["v2"]:
            if "protobuf" in call.accept:
                return ApiAnswer(openapi.v2_protobuf(), content_type=openapi.V2_PROTOBUF)
            return ApiAnswer(encode(openapi.v2_json()))
        if parts[1:] == ["v3"]:
            return ApiAnswer(encode(self._openapi.index()))
        if parts[1:2] == ["v3"]:
            return ApiAnswer(self._openapi.document("/".join(parts[2:])))
        raise PlainNotFound

    # Watches

    async def _watch(self, target: Target, call: Call, http: web.BaseRequest) -> web.StreamResponse:
        resource, query = target.resource, call.query
        form = request.accepted(call.accept)
        bookmarks = request.flag(query, "allowWatchBookmarks")
        start = request.version_option(query)
        initial = self._initial(query, start)
        matches = self._handlers.matcher(target, query)
        watch = Watch(matches, self._handlers.render_event(resource, form, query), start or 0)
        store = self.api.store
        head: Obj = {"kind": resource.kind, "apiVersion": resource.group_version}
        extra: Obj = {"spec": {"containers": None}, "status": {}} if resource.storage == ("", "pods") else {}
        try:
            if initial:
                watch.initial(self.api.select(resource, target.namespace, matches).items)
                if request.flag(query, "sendInitialEvents"):
                    watch.push(bookmark(head, store.version, initial_end=True, extra=extra))
            else:
                for change in store.since(resource.storage, start or 0):
                    if target.namespace is None or change.after.key[0] == target.namespace:
                        watch.change(change)
        except ApiError as error:
            if error.code != 410:
                raise
            # Expired history is reported inside the watch, after its 200.
            watch.push(event("ERROR", encode(error.status())))
            watch.stop()
        stop: Callable[[], object] = watch.stop
        if not watch.overrun:
            stop = store.listen(resource.storage, target.namespace, watch.change)
        self._watches.add(watch)
        try:
            return await self._stream(watch, http, call, lambda: bookmark(head, store.version, extra=extra), bookmarks)
        finally:
            stop()
            self._watches.discard(watch)

    @staticmethod
    def _initial(query: Any, start: int | None) -> bool:
        """Returns whether the watch begins with the existing objects."""
        requested = "sendInitialEvents" in query
        if requested and query.get("resourceVersionMatch") != "NotOlderThan":
            text = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
            cause = invalid_value("resourceVersionMatch", query.get("resourceVersionMatch", ""), text)
            raise invalid("meta.k8s.io", "ListOptions", "", [cause])
        if requested:
            return request.flag(query, "sendInitialEvents")
        return not start

    async def _stream(
        self, watch: Watch, http: web.BaseRequest, call: Call, mark: Any, bookmarks: bool
    ) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        # Random, so that clients that started at the same time do not all return at the same time.
        limit = request.number(call.query, "timeoutSeconds") or random.uniform(1, 2) * _WATCH_SECONDS  # noqa: S311
        end = loop.time() + limit
        next_mark = loop.time() + min(_BOOKMARK_SECONDS, max(limit - 2, 0.001)) if bookmarks else float("inf")
        if limit <= 2:
            next_mark = float("inf")
        response = web.StreamResponse(
            headers={"Content-Type": "application/json", "Cache-Control": "no-cache, private"}
        )
        response.enable_chunked_encoding()
        await response.prepare(http)
        while not self._stopping:
            lines = await watch.take(min(end, next_mark) - loop.time())
            if lines:
                await response.write(lines)
            if watch.overrun or loop.time() >= end:
                break
            if loop.time() >= next_mark:
                next_mark = loop.time() + _BOOKMARK_SECONDS
                await response.write(mark())
        await response.write_eof()
        return response


def _response(answer: ApiAnswer) -> web.Response:
    response = web.Response(body=answer.body, status=answer.status, headers={"Content-Type": answer.content_type})
    for text in answer.warnings:
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{escaped}"')
    return response
