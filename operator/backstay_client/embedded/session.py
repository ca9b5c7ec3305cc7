"""The embedded cluster and the operator as child processes of the command, which never outlive it.

The operator is the same program as in a real cluster; the command imports neither of the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from backstay_client.kube import CRDS, ApiCalls, ApiRequestError
from backstay_spec.crd import build_crd

START_SECONDS = 120.0
STOP_SECONDS = 20.0
RESTART_SECONDS = 1.0
RESTARTS = 5
"""How often in a row `run` and `up` restart the operator. The count begins again after an operator ran for a minute."""
SHOWN_SECONDS = 10.0


class SessionError(Exception):
    """The cluster or the operator did not start, or died; the message names its log."""


@dataclass
class Keeper:
    """Records how the operator has ended last; it is started again when it ends.

    Attributes:
        last_end: how the operator last ended, in words; empty: the operator has not ended.
        at: the time at which it died, on the event loop's clock.
    """

    last_end: str = ""
    at: float = 0.0


@dataclass(frozen=True)
class Session:
    """A running embedded cluster with the operator.

    Attributes:
        folder: contains all data: logs of all pods, volumes, the kubeconfig.
        kubeconfig: the kubeconfig for kubectl and for `ApiCalls`.
        api: an open connection.
        died: completes with the name of the process when the cluster or the operator has ended by itself, permanently.
        operator: the last end of the operator.
    """

    folder: Path
    kubeconfig: Path
    api: ApiCalls
    died: asyncio.Task[str]
    operator: Keeper

    @property
    def trouble(self) -> str:
        """The way the operator ended a moment ago. It is empty if the operator runs, or has run for some time since."""
        ended_recently = asyncio.get_running_loop().time() < self.operator.at + SHOWN_SECONDS
        return self.operator.last_end if ended_recently else ""

    def death(self) -> SessionError:
        """Returns the exception to raise when `died` is set. It names the process that died, and the end of its log."""
        name = self.died.result()
        log = self.folder / f"{name}.log"
        return SessionError(f"the {name} died, see {log}{_tail(log)}")


@contextlib.asynccontextmanager
async def start_session(
    folder: Path,
    on_stage: Callable[[str], None] = lambda stage: None,
    *,
    restarts: int = 0,
    user_environment: bool = False,
    preload: str | None = None,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Session]:
    """Start the cluster and the operator, and apply the CRD.

    Args:
        folder: the folder for all files of the two processes.
        on_stage: called with the name of each stage.
        restarts: how often in a row an operator that died is started again, as a Deployment would.
        user_environment: pods get the environment of this process, except the variables of Backstay and Kubernetes.
        preload: the cluster's imports for all pods, from `backstay_client.embedded.preload`; None: no imports.
        env: more variables of every container.

    Raises:
        SessionError: a process did not start within a minute.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kubeconfig = folder / "backstay.kubeconfig"
    kubeconfig.unlink(missing_ok=True)  # of an earlier use of the folder: its server no longer exists
    key = folder / "operator.key"
    with contextlib.suppress(FileExistsError), open(key, "x", opener=_private) as file:
        file.write(secrets.token_hex(32))
    async with contextlib.AsyncExitStack() as stack:
        on_stage("starting the embedded cluster")
        cluster = await stack.enter_async_context(
            _process(
                "cluster",
                folder,
                "backstay_cluster",
                "--data-dir",
                str(folder),
                "--kubeconfig",
                str(kubeconfig),
                "--die-with-parent",
                *(["--user-environment"] if user_environment else []),
                *([] if preload is None else ["--preload", preload]),
                *(
                    f"--env={name}={value}"
                    for name, value in {**(for_scripts(os.environ) if user_environment else {}), **(env or {})}.items()
                ),
            )
        )
        await _wait_for_file(kubeconfig, cluster, folder / "cluster.log")
        api = await stack.enter_async_context(ApiCalls.of_kubeconfig(kubeconfig))
        await _wait_until_served(api, cluster, folder / "cluster.log")
        on_stage("starting the operator")
        arguments = ["--kubeconfig", str(kubeconfig), "--key-file", str(key), "--bind", "127.0.0.1"]
        keeper = Keeper()
        operator = asyncio.create_task(
            _keep(
                keeper,
                "operator",
                folder,
                "backstay_operator",
                *arguments,
                "--metrics-port",
                "0",
                "--die-with-parent",
                restarts=restarts,
            )
        )
        stack.push_async_callback(_end, operator)
        stack.callback(_wake, cluster)  # the operator releases its lease there
        await _apply_crd(api)  # the operator is importing in the meantime, and waits for it
        died = asyncio.create_task(_first_death({"cluster": asyncio.create_task(cluster.wait()), "operator": operator}))
        try:
            yield Session(folder, kubeconfig, api, died, keeper)
        finally:
            await _end(died)


_OF_START: Final = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONPLATLIBDIR",
    "PYTHONNOUSERSITE",
    "PYTHONUSERBASE",
    "PYTHONSAFEPATH",
)
"""The variables of Python without which a process may not find Backstay."""


def for_scripts(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that change how Python runs, such as `PYTHONWARNINGS`. They are meant for the script, and
    would end a process of Backstay for a warning of a library."""
    return {name: text for name, text in environ.items() if name.startswith("PYTHON") and name not in _OF_START}


def without_proxy_to_itself(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, in which a proxy for the network does not apply to this machine's own address."""
    hosts = [environ.get("no_proxy") or environ.get("NO_PROXY") or "", "127.0.0.1", "localhost"]
    no_proxy = ",".join(host for host in hosts if host)
    return {**environ, "no_proxy": no_proxy, "NO_PROXY": no_proxy}


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.asynccontextmanager
async def _process(name: str, folder: Path, module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    log = folder / f"{name}.log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a file in the current folder must not replace a module of a library
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={
                name: text
                for name, text in without_proxy_to_itself(os.environ).items()
                if name not in for_scripts(os.environ)
            },
            # A Ctrl-C at the terminal goes only to the command, which stops these two in order.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        await asyncio.shield(_stop(process))


async def _keep(keeper: Keeper, name: str, folder: Path, module: str, *arguments: str, restarts: int) -> None:
    """Run the operator, and start it again when it dies; returns after too many deaths."""
    loop = asyncio.get_running_loop()
    deaths = 0
    while deaths <= restarts:
        if deaths:
            await asyncio.sleep(RESTART_SECONDS)
        started = loop.time()
        async with _process(name, folder, module, *arguments) as process:
            code = await process.wait()
        deaths = deaths + 1 if loop.time() - started < START_SECONDS else 1
        last = _tail(folder / f"{name}.log", 1).removeprefix("\n  | ") or "it wrote no log"
        again = f"; it starts again ({deaths} of {restarts})" if deaths <= restarts else ""
        keeper.last_end, keeper.at = f"the {name} ended with exit status {code}: {last}{again}", loop.time()


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _wake(process: asyncio.subprocess.Process) -> None:
    """Continue a process that was stopped (SIGSTOP): otherwise it does not handle SIGTERM."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    _wake(process)
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _first_death(lives: dict[str, asyncio.Task[Any]]) -> str:
    try:
        done, _ = await asyncio.wait(lives.values(), return_when=asyncio.FIRST_COMPLETED)
        return next(name for name, life in lives.items() if life in done)
    finally:
        lives["cluster"].cancel()


def _tail(log: Path, lines: int = 12) -> str:
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    return "".join(f"\n  | {line}" for line in text.splitlines()[-lines:])


async def _wait_for_file(path: Path, process: asyncio.subprocess.Process, log: Path) -> None:
    try:
        async with asyncio.timeout(START_SECONDS):
            while not path.exists():
                _check_alive(process, log)
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise SessionError(
            f"the embedded cluster did not start within {START_SECONDS:.0f} s, see {log}{_tail(log)}"
        ) from None


def _check_alive(process: asyncio.subprocess.Process, log: Path) -> None:
    if process.returncode is not None:
        raise SessionError(f"the embedded cluster ended with exit status {process.returncode}, see {log}{_tail(log)}")


async def _wait_until_served(api: ApiCalls, process: asyncio.subprocess.Process, log: Path) -> None:
    import aiohttp

    try:
        async with asyncio.timeout(START_SECONDS):
            while True:
                _check_alive(process, log)
                with contextlib.suppress(aiohttp.ClientError, ApiRequestError):
                    await api.request("GET", "/api/v1/namespaces/default")
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise SessionError(f"the embedded cluster does not answer, see {log}{_tail(log)}") from None


async def _apply_crd(api: ApiCalls) -> None:
    crd = build_crd()
    try:
        await api.request("POST", CRDS, crd)
    except ApiRequestError as error:
        if error.reason != "AlreadyExists":
            raise
        # A folder that is used again has the CRD of the version that created it.
        stored = await api.request("GET", f"{CRDS}/{crd['metadata']['name']}")
        crd["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
        await api.request("PUT", f"{CRDS}/{crd['metadata']['name']}", crd)
    async with asyncio.timeout(START_SECONDS):
        while True:
            stored = await api.request("GET", f"{CRDS}/{crd['metadata']['name']}")
            # A real API server has null here before it has processed the definition.
            conditions = (stored.get("status") or {}).get("conditions") or []
            if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
                return
            await asyncio.sleep(0.02)
