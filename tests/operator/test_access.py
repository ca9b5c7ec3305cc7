"""A service account and a plain kubeconfig name the API server and the user without the kubernetes package."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from between import LONG, put

from backstay_operator import access, errors
from backstay_operator.kube import CONNECTIONS, Kube
from backstay_operator.rights import PODS

PEM = "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"


def kubeconfig(folder: Path, cluster: dict[str, Any], user: dict[str, Any]) -> str:
    path = folder / "kubeconfig"
    put(
        path,
        yaml.safe_dump(
            {
                "clusters": [{"name": "other", "cluster": {"server": "x"}}, {"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": user}],
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "here",
            }
        ),
    )
    return str(path)


def token_of(found: access.ApiCredentials) -> str | None:
    async def ask() -> str | None:
        return await found.token()

    return asyncio.run(ask())


def test_a_kubeconfig_with_a_token_is_read_here(tmp_path: Path) -> None:
    data = base64.b64encode(PEM.encode()).decode()
    path = kubeconfig(tmp_path, {"server": "https://h:6443/", "certificate-authority-data": data}, {"token": "t"})
    found = access._plain(path)
    assert found is not None
    assert (found.host, found.ca_data, found.ca_path, token_of(found)) == ("https://h:6443", PEM, None, "t")
    path = kubeconfig(tmp_path, {"server": "https://h", "certificate-authority": "ca.crt"}, {"token": "t"})
    found = access._plain(path)
    assert found is not None
    assert found.ca_path == str(tmp_path / "ca.crt"), "relative to the kubeconfig"


@pytest.mark.parametrize(
    ("cluster", "user"),
    [
        ({"server": "https://h", "insecure-skip-tls-verify": True}, {"token": "t"}),
        ({"server": "https://h", "proxy-url": "http://p"}, {"token": "t"}),
        ({"server": "https://h"}, {"client-certificate": "c", "client-key": "k"}),
        ({"server": "https://h"}, {"exec": {"command": "x"}}),
        ({"server": "https://h"}, {"token": ""}),
        ({"server": "https://h", "certificate-authority-data": "!"}, {"token": "t"}),
        ({}, {"token": "t"}),
    ],
)
def test_what_is_not_plain_is_left_to_the_package(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any]
) -> None:
    assert access._plain(kubeconfig(tmp_path, cluster, user)) is None


def test_the_package_reads_the_rest(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, {"server": "https://h", "insecure-skip-tls-verify": True}, {"token": "t"})

    async def read() -> tuple[access.ApiCredentials, str | None]:
        found = await access.load(path)
        return found, await found.token()

    found, token = asyncio.run(read())
    assert (found.host, found.verify, token) == ("https://h", False, "t")
    put(tmp_path / "kubeconfig", "nothing: of use")
    with pytest.raises(access.AccessError, match="kubeconfig cannot be used"):
        asyncio.run(read())


def test_the_token_of_a_service_account_is_read_again(tmp_path: Path) -> None:
    """The kubelet replaces it before it runs out."""
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    for missing in ("ca.crt", "token"):
        with pytest.raises(access.AccessError, match=rf"{missing}.*--kubeconfig"):
            access._service_account(environ, tmp_path)
        put(tmp_path / missing, "one\n")
    found = access._service_account(environ, tmp_path)
    assert (found.host, found.ca_path, token_of(found)) == ("https://[fd00::1]:443", str(tmp_path / "ca.crt"), "one")
    now = 0.0
    token = access._ApiTokenFile(tmp_path / "token", lambda: now)
    token.read()
    put(tmp_path / "token", "two")
    assert asyncio.run(token()) == "one"
    now = 61.0
    assert asyncio.run(token()) == "two"
    put(tmp_path / "token", "")
    now = 200.0
    with pytest.raises(access.AccessError, match="is empty"):
        asyncio.run(token())


@contextlib.asynccontextmanager
async def answering(folder: Path, answer: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[Kube]:
    """An API server that answers each GET so, and a client of it."""
    app = web.Application()
    app.router.add_route("GET", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with Kube(kubeconfig(folder, {"server": f"http://{host}:{port}"}, {"token": "t"})) as kube:
            yield kube
    finally:
        await runner.cleanup()


def test_a_rotated_token_costs_each_open_request_an_error_and_no_task(tmp_path: Path) -> None:
    """One of them gets 401, and the session is closed. Those that waited for a connection were cancelled, and with them
    the reconciliation and its next time."""

    async def story() -> list[Any]:
        arrived, free = asyncio.Event(), asyncio.Event()
        held: list[str] = []

        async def answer(request: web.Request) -> web.Response:
            held.append(request.path)
            if len(held) == CONNECTIONS:
                arrived.set()
            if request.path.endswith("/pod-0"):
                await arrived.wait()
                return web.Response(status=401, text="{}")
            await free.wait()
            return web.Response(text="{}")

        async with answering(tmp_path, answer) as kube:
            requests = [kube.get(PODS, "team", f"pod-{number}") for number in range(2 * CONNECTIONS)]
            found = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), LONG)
            free.set()
            return found

    found = asyncio.run(story())
    assert {type(one) for one in found} == {errors.Unreachable, errors.Unauthorized}, found


def test_a_request_whose_task_is_cancelled_ends(tmp_path: Path) -> None:
    async def story() -> None:
        arrived, free = asyncio.Event(), asyncio.Event()

        async def answer(request: web.Request) -> web.Response:
            arrived.set()
            await free.wait()
            return web.Response(text="{}")

        async with answering(tmp_path, answer) as kube:
            task = asyncio.create_task(kube.get(PODS, "team", "pod"))
            await asyncio.wait_for(arrived.wait(), LONG)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            free.set()

    asyncio.run(story())
