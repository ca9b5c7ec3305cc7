"""Claims a private block of loopback for one embedded cluster, so that each pod and Service has its own address.

On Linux a process can listen on every address in 127.0.0.0/8, without root or set-up. A cluster takes one of 2047
blocks of 8192 addresses: half for pods, half for Services. Two clusters never share a block: the claim is a name in the
kernel's abstract socket namespace. It ends with the last process that holds it, and belongs to the same network
namespace as the addresses. (A fixed TCP port could be blocked by a program that listens on that port of all addresses.)
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

LOOPBACK = ipaddress.IPv4Network("127.0.0.0/8")
BLOCK_PREFIX = 19
HALF_PREFIX = 20


class NetworkError(Exception):
    """No block of addresses is available."""


@dataclass(frozen=True)
class LoopbackBlock:
    """A claimed block; free again once `close` was called and no process holds its descriptor.

    Attributes:
        pod_cidr: 4096 addresses, the second of which is the node's.
        service_cidr: the range of the Services' addresses, 4096 of them.
        claim: the socket that holds the claim.
    """

    pod_cidr: str
    service_cidr: str
    claim: socket.socket

    @property
    def node_ip(self) -> str:
        """The node's address."""
        return str(ipaddress.IPv4Network(self.pod_cidr)[1])

    def close(self) -> None:
        """Release the claim."""
        self.claim.close()


def blocks(shuffle: random.Random) -> Iterator[ipaddress.IPv4Network]:
    """Yields all blocks in some order, without the first one, which contains 127.0.0.1 and Debian's 127.0.1.1."""
    indices = list(range(1, 1 << (BLOCK_PREFIX - LOOPBACK.prefixlen)))
    shuffle.shuffle(indices)
    size = 1 << (32 - BLOCK_PREFIX)
    for index in indices:
        yield ipaddress.IPv4Network((int(LOOPBACK.network_address) + index * size, BLOCK_PREFIX))


def claim_block(shuffle: random.Random | None = None) -> LoopbackBlock:
    """Claim a free block.

    Args:
        shuffle: the order in which blocks are tried; random by default.

    Raises:
        NetworkError: the system is not Linux, the machine allows no other loopback address, or all blocks are in use.
    """
    if sys.platform != "linux":
        raise NetworkError(
            f"the embedded cluster runs only on Linux, and not on {sys.platform}, "
            "because only Linux has all addresses of 127.0.0.0/8"
        )
    for block in blocks(shuffle or random.SystemRandom()):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0backstay-cluster-{block.network_address}")
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRINUSE:
                continue
            raise NetworkError(f"cannot claim addresses of the loopback block {block}: {error}") from error
        pods, services = block.subnets(new_prefix=HALF_PREFIX)
        found = LoopbackBlock(str(pods), str(services), claim)
        try:
            with contextlib.closing(socket.socket()) as trial:
                trial.bind((found.node_ip, 0))
        except OSError as error:
            found.close()
            raise NetworkError(f"cannot listen on {found.node_ip}, an address of 127.0.0.0/8: {error}") from error
        return found
    raise NetworkError("all loopback blocks are in use by other embedded clusters")
