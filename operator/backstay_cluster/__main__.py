"""Runs an embedded cluster as a process until SIGTERM or SIGINT, and then ends all processes."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence

from backstay_cluster.cluster import EmbeddedCluster
from backstay_cluster.kubelet.node import user_environment
from backstay_cluster.kubelet.preload import Preload
from backstay_cluster.net import NetworkError
from backstay_cluster.realserver import AssetsError


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    made = argparse.ArgumentParser(prog="python -m backstay_cluster", description=__doc__)
    made.add_argument(
        "--data-dir", help="folder for the logs of pods (default: a temporary folder, removed at the end)"
    )
    made.add_argument("--kubeconfig", help="where to write the kubeconfig; the name must end in .kubeconfig")
    made.add_argument("--ready-fd", type=int, help="descriptor for one line of JSON, written when pods can be created")
    made.add_argument(
        "--die-with-parent",
        nargs="?",
        type=int,
        const=0,
        metavar="PID",
        help="stop when the parent process (with this id) has ended",
    )
    made.add_argument(
        "--user-environment",
        action="store_true",
        help="give containers this process' environment, without the variables of Backstay, Kubernetes and the shell",
    )
    made.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of every container; may be repeated",
    )
    made.add_argument("--no-kubelet", action="store_true", help="the API server only: pods stay Pending")
    made.add_argument(
        "--preload",
        type=Preload.of_json,
        metavar="JSON",
        help='modules that are imported once for all containers that run Python scripts: {"modules": ["numpy"]}',
    )
    made.add_argument("--log-level", default="WARNING", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    return made


async def run(args: argparse.Namespace) -> None:
    """Serve until a signal, or until the parent has ended."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if args.die_with_parent is not None:
        watch_parent(args.die_with_parent or os.getppid(), stop)
    cluster = EmbeddedCluster(
        args.data_dir,
        kubeconfig_path=args.kubeconfig,
        kubelet=not args.no_kubelet,
        base_env=user_environment() if args.user_environment else None,
        preload=args.preload,
        extra_env=dict(setting.split("=", 1) for setting in args.env),
    )
    starting = asyncio.ensure_future(cluster.start())
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)  # the task cleans up after itself
        return
    await starting
    try:
        if args.ready_fd is not None:
            ready = {
                "url": cluster.url,
                "token": cluster.token,
                "ca": cluster.ca,
                "kubeconfig": str(cluster.kubeconfig),
                "logsDir": str(cluster.logs_dir),
            }
            with os.fdopen(args.ready_fd, "w") as file:
                file.write(json.dumps(ready) + "\n")
        print(f"ready: {cluster.url} kubeconfig {cluster.kubeconfig} logs {cluster.logs_dir}", flush=True)
        await stop.wait()
    finally:
        await cluster.stop()


def watch_parent(parent: int, stop: asyncio.Event) -> None:
    """Set `stop` when the parent has ended, even by SIGKILL. It does not matter which of its threads started us."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        stop.set()
        return
    asyncio.get_running_loop().add_reader(descriptor, stop.set)
    if os.getppid() != parent:
        stop.set()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the process' exit code: 0 after a signal, 1 if the cluster could not start."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(run(args))
    except (NetworkError, AssetsError, OSError, ValueError) as error:  # a TimeoutError is an OSError
        print(f"backstay_cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
