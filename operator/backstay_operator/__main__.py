"""Runs the operator as a process (``python -m backstay_operator``)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from backstay_operator import access, logs
from backstay_operator.app import App, WatchEnded, follow_parent, on_signals
from backstay_operator.backoff import Curve
from backstay_operator.keyfile import KeyFileError, read_key
from backstay_operator.settings import Options

log = logging.getLogger("backstay_operator")

_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def _labels(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not name.strip() or not mark for name, mark, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} must be labels such as app=backstay,tier=operator")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    def env(name: str) -> str | None:
        return environ.get(f"BACKSTAY_OPERATOR_{name}") or None

    parser = argparse.ArgumentParser(
        prog="python -m backstay_operator",
        description="Runs TrainingJobs on a Kubernetes cluster.",
        epilog="Each option can be given as BACKSTAY_OPERATOR_<NAME> in the environment instead.",
    )
    add = parser.add_argument
    add(
        "--kubeconfig",
        default=env("KUBECONFIG") or environ.get("KUBECONFIG") or None,
        help="how to reach the API server (default: KUBECONFIG, else the pod's service account)",
    )
    add("--namespace", default=env("NAMESPACE"), help="serve this namespace only (default: all)")
    add(
        "--operator-namespace",
        default=env("OPERATOR_NAMESPACE") or _own_namespace(),
        help="the namespace that this operator runs in (default: the pod's, else 'default')",
    )
    add(
        "--operator-labels",
        type=_labels,
        default=env("OPERATOR_LABELS") or "",
        help="the labels of the operator's own pods, for the jobs' NetworkPolicies: a=b,c=d",
    )
    add(
        "--key-file",
        default=env("KEY_FILE"),
        help="file with the key that the jobs' tokens are derived from; a missing file is created",
    )
    add("--bind", default=env("BIND") or "0.0.0.0", help="address of the HTTP port (default: %(default)s)")  # noqa: S104
    add(
        "--metrics-port",
        type=int,
        default=env("METRICS_PORT") or "8080",
        help="HTTP port of /metrics, /healthz and /readyz; 0 takes a free one (default: %(default)s)",
    )
    add("--log-format", choices=("text", "json"), default=env("LOG_FORMAT") or "text")
    add("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), default=env("LOG_LEVEL") or "INFO")
    add("--die-with-parent", action="store_true", help="stop when the process that started this one is gone")
    return parser


def _own_namespace() -> str:
    try:
        return _SERVICE_ACCOUNT.read_text().strip() or "default"
    except OSError:
        return "default"


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Parse a command line. Exits with status 2 if the command line is invalid."""
    parser = _parser(environ)
    given = parser.parse_args(arguments)
    if not given.key_file:
        parser.error("no key: name a file with --key-file or BACKSTAY_OPERATOR_KEY_FILE; a missing file is created")
    return Options(**vars(given))


async def _once(options: Options, key: bytes, stop: asyncio.Event, parent: int) -> None:
    draw = random.SystemRandom().random
    app = App(options, key, environ=os.environ, draw=draw)
    watcher = asyncio.create_task(follow_parent(stop, parent)) if options.die_with_parent else None
    try:
        await app.run(stop)
    finally:
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)


def interrupted(seconds: float) -> bool:
    """Wait for `seconds`, or until SIGTERM or SIGINT.

    Process 1 of a container receives these signals only if it has installed handlers for them (pid_namespaces(7)).

    Returns:
        Whether a signal arrived.
    """

    async def wait() -> bool:
        stop = asyncio.Event()
        on_signals(asyncio.get_running_loop(), stop)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), seconds)
        return stop.is_set()

    return asyncio.run(wait())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit status.

    Kopf may end, for example when the CRD was deleted. Then this process starts all parts again, with back-off.
    No state is lost, because all state is in the cluster.
    """
    parent = os.getppid()
    options = parse(sys.argv[1:] if arguments is None else arguments, os.environ)
    logs.set_up(options.log_format, options.log_level)
    try:
        key = read_key(options.key_file or "")
        asyncio.run(access.load(options.kubeconfig))
    except (KeyFileError, access.AccessError) as error:
        log.error("%s", error)
        return 2
    curve, failures = Curve(first=0.5, most=30.0), 0
    while True:

        async def run() -> float:
            loop = asyncio.get_running_loop()
            started = loop.time()
            try:
                await _once(options, key, asyncio.Event(), parent)
            except WatchEnded as error:
                log.error("%s: starting again", error)
                return loop.time() - started
            return -1.0

        try:
            lasted = asyncio.run(run())
        except OSError as error:
            log.error("the port %s:%s cannot be used: %s", options.bind, options.metrics_port, error)
            return 2
        if lasted < 0:
            return 0
        failures = 0 if lasted > 60.0 else failures + 1
        if interrupted(curve.seconds(failures, random.SystemRandom().random)):
            return 0


if __name__ == "__main__":
    sys.exit(main())
