"""Makes one attempt of each kind of probe, and turns attempts into a verdict by counters."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

FIRST_RETRY = 0.05


class ProbeFailure(Exception):  # noqa: N818  # not an error of the kubelet: a negative result
    """An attempt failed; the message has the reason."""


Exec = Callable[[Sequence[str]], Awaitable[int]]


@dataclass(frozen=True)
class ProbeSpec:
    """A probe's numbers with their defaults."""

    handler: Mapping[str, Any]
    initial_delay: float
    period: float
    timeout: float
    success: int
    failure: int

    @classmethod
    def of(cls, probe: Mapping[str, Any]) -> ProbeSpec:
        """Returns the spec of a v1.Probe."""
        return cls(
            handler=probe,
            initial_delay=float(probe.get("initialDelaySeconds") or 0),
            period=float(probe.get("periodSeconds") or 10),
            timeout=float(probe.get("timeoutSeconds") or 1),
            success=int(probe.get("successThreshold") or 1),
            failure=int(probe.get("failureThreshold") or 3),
        )


def port_of(port: int | str, container: Mapping[str, Any]) -> int:
    """Returns a probe's port, which may be the name of one of the container's ports.

    Raises:
        ProbeFailure: the container has no port of that name.
    """
    if isinstance(port, int) or str(port).isdigit():
        return int(port)
    for entry in container.get("ports") or []:
        if entry.get("name") == port:
            return int(entry["containerPort"])
    raise ProbeFailure(f"couldn't find port: {port!r}")


async def attempt(spec: ProbeSpec, container: Mapping[str, Any], pod_ip: str, run: Exec) -> None:
    """Make one attempt.

    Raises:
        ProbeFailure: the result is negative, or no result arrived within the probe's timeout.
    """
    try:
        async with asyncio.timeout(spec.timeout):
            if (http := spec.handler.get("httpGet")) is not None:
                await _http(http, container, pod_ip)
            elif (tcp := spec.handler.get("tcpSocket")) is not None:
                _, writer = await asyncio.open_connection(tcp.get("host") or pod_ip, port_of(tcp["port"], container))
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            elif (command := spec.handler.get("exec")) is not None:
                code = await run(command.get("command") or [])
                if code != 0:
                    raise ProbeFailure(f"command {command.get('command')} ended with exit code {code}")
            else:
                raise ProbeFailure("this kubelet supports httpGet, tcpSocket and exec probes only")
    except TimeoutError:
        raise ProbeFailure(f"no answer within {spec.timeout:g} s") from None
    except (OSError, aiohttp.ClientError) as error:
        raise ProbeFailure(str(error) or type(error).__name__) from error


async def _http(http: Mapping[str, Any], container: Mapping[str, Any], pod_ip: str) -> None:
    scheme = (http.get("scheme") or "HTTP").lower()
    host = http.get("host") or pod_ip
    url = f"{scheme}://{host}:{port_of(http['port'], container)}/{(http.get('path') or '/').lstrip('/')}"
    headers = {entry["name"]: entry["value"] for entry in http.get("httpHeaders") or []}
    connector = aiohttp.TCPConnector(ssl=_unverified(), force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.get(url, headers={"User-Agent": "kube-probe/1.36", **headers}, allow_redirects=False) as answer,
    ):
        if not 200 <= answer.status < 400:
            raise ProbeFailure(f"HTTP probe failed with statuscode: {answer.status}")


@functools.cache
def _unverified() -> ssl.SSLContext:
    """Returns a context without verification, because a probe checks health and not identity, as in Kubernetes'
    kubelet.

    It does not load the machine's certificates, because that takes longer than the probe.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def watch_probe(
    spec: ProbeSpec,
    attempt: Callable[[ProbeSpec], Awaitable[None]],
    verdict: Callable[[bool, str, int], None],
    *,
    eager: bool,
    until_success: bool = False,
) -> None:
    """Make attempts until cancelled. Report each failure, and each success that reaches the threshold.

    Args:
        spec: the probe.
        attempt: makes one attempt; raises `ProbeFailure`.
        verdict: called with the result, the failure's message, and the number of failures in a row (`spec.failure` of
            them make the probe fail).
        eager: make attempts more often than the period before the first success, so that readiness is detected
            early. Only for probes whose failure has no consequence.
        until_success: return at the first success: a startup probe.
    """
    await asyncio.sleep(spec.initial_delay)
    successes = failures = 0
    seen = False
    quick = FIRST_RETRY
    while True:
        try:
            await attempt(spec)
        except ProbeFailure as failure:
            successes = 0
            failures += 1
            verdict(False, str(failure), failures)
        else:
            failures = 0
            successes += 1
            if successes >= spec.success:
                verdict(True, "", 0)
                seen = True
                if until_success:
                    return
        if eager and not seen and quick < spec.period:
            await asyncio.sleep(quick)
            quick *= 1.5
        else:
            await asyncio.sleep(spec.period)


async def exec_in(start: Callable[[int], Awaitable[Any]], kill: Callable[[Any], None]) -> int:
    """Run a command to its end without keeping its output; kill it when the caller is cancelled. Returns the exit code.

    Args:
        start: starts the command with its output going to a descriptor, and returns a `Process`.
        kill: ends the container.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        process = await start(null)
    finally:
        os.close(null)
    try:
        return int(await asyncio.shield(process.exited))
    finally:
        if not process.exited.done():
            kill(process)
