"""Claims of addresses never overlap, and the proxy of Services follows the selector (O3)."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random

import pytest

from backstay_cluster.kubelet.proxy import ServiceProxy, endpoints, target_port
from backstay_cluster.net import blocks, claim_block
from backstay_cluster.tests.limits import LONG

# --- addresses


def test_blocks_are_loopback_do_not_overlap_and_spare_the_first():
    found = list(blocks(random.Random(1)))
    assert len(found) == len(set(found)) == 2047
    assert all(block.subnet_of(ipaddress.IPv4Network("127.0.0.0/8")) for block in found)
    assert not any(ipaddress.IPv4Address(ip) in block for block in found for ip in ("127.0.0.1", "127.0.1.1"))


def test_two_claims_with_the_same_luck_get_two_blocks_and_a_closed_claim_is_free_again():
    with contextlib.ExitStack() as stack:
        first = claim_block(random.Random(7))
        stack.callback(first.close)
        second = claim_block(random.Random(7))
        stack.callback(second.close)
        cidrs = [ipaddress.ip_network(c) for b in (first, second) for c in (b.pod_cidr, b.service_cidr)]
        assert all(not a.overlaps(b) for a in cidrs for b in cidrs if a is not b)
        assert all(cidr.num_addresses >= 2048 for cidr in cidrs)
        first.close()
        third = claim_block(random.Random(7))
        stack.callback(third.close)
        assert third.pod_cidr == first.pod_cidr


# --- the proxy by itself


def pod(name: str, ip: str, *, ready: bool = True, phase: str = "Running", uid: str = "", **labels: str) -> dict:
    return {
        "metadata": {"name": name, "namespace": "default", "uid": uid or name, "labels": labels},
        "spec": {"containers": [{"name": "c", "ports": [{"name": "rpc", "containerPort": 7077}]}]},
        "status": {
            "phase": phase,
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def service(ip: str, *, unready: bool = False, port: int = 7077, **selector: str) -> dict:
    return {
        "metadata": {"name": "s", "namespace": "default", "uid": "s"},
        "spec": {
            "clusterIP": ip,
            "selector": selector,
            "publishNotReadyAddresses": unready,
            "ports": [{"port": port, "targetPort": "rpc"}],
        },
    }


def test_endpoints_and_ports():
    pods = {
        ("default", name): one
        for name, one in {
            "ready": pod("ready", "127.1.0.1", a="1"),
            "unready": pod("unready", "127.1.0.2", ready=False, a="1"),
            "ended": pod("ended", "127.1.0.3", phase="Failed", a="1"),
            "other": pod("other", "127.1.0.4", a="2"),
        }.items()
    }
    port = {"port": 1, "targetPort": "rpc"}
    assert [e.ip for e in endpoints(service("x", a="1"), port, pods)] == ["127.1.0.1"]
    assert [e.ip for e in endpoints(service("x", unready=True, a="1"), port, pods)] == ["127.1.0.1", "127.1.0.2"]
    assert endpoints({"metadata": {"namespace": "default"}, "spec": {}}, port, pods) == []
    assert target_port({"port": 80}, pods["default", "ready"]) == 80
    assert target_port({"port": 80, "targetPort": 8080}, pods["default", "ready"]) == 8080
    assert target_port({"port": 80, "targetPort": "none"}, pods["default", "ready"]) is None


class World:
    """A block of addresses, a proxy, and servers that say who they are and then echo."""

    def __init__(self) -> None:
        self.block = claim_block()
        self.proxy = ServiceProxy()
        self.servers: list[asyncio.Server] = []
        pods, services = (ipaddress.ip_network(c) for c in (self.block.pod_cidr, self.block.service_cidr))
        self.ips = [str(pods[i]) for i in range(2, 6)]
        self.service_ip = str(services[1])

    async def serve(self, ip: str) -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(f"{ip}\n".encode())
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
                writer.write_eof()
            writer.close()

        self.servers.append(await asyncio.start_server(echo, ip, 7077))

    async def call(self) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the Service once something listens; returns the pod that answered."""
        async with asyncio.timeout(LONG):
            while True:
                try:
                    reader, writer = await asyncio.open_connection(self.service_ip, 7077)
                    who = await reader.readline()
                except ConnectionError:
                    await asyncio.sleep(0.005)
                    continue
                if who:
                    return who.decode().strip(), reader, writer
                writer.close()


@pytest.fixture
async def world():
    made = World()
    yield made
    await made.proxy.close()
    for server in made.servers:
        server.close()
    made.block.close()
    await asyncio.sleep(0)


async def ended(reader: asyncio.StreamReader) -> None:
    """Wait until the connection was cut."""
    async with asyncio.timeout(LONG):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


async def test_a_changed_selector_cuts_old_connections_and_new_ones_go_to_the_new_pod(world):
    """O3: failing over is one patch of the selector; no connection to the old incarnation stays open."""
    for ip, incarnation in zip(world.ips, "12", strict=False):
        await world.serve(ip)
        world.proxy.pod_changed(("default", f"p{incarnation}"), pod(f"p{incarnation}", ip, incarnation=incarnation))
    world.proxy.service_changed(("default", "s"), service(world.service_ip, incarnation="1"))
    who, reader, writer = await world.call()
    assert who == world.ips[0]
    world.proxy.service_changed(("default", "s"), service(world.service_ip, incarnation="2"))
    await ended(reader)
    writer.close()
    who, reader, writer = await world.call()
    assert who == world.ips[1]
    world.proxy.pod_changed(("default", "p2"), pod("p2", world.ips[1], phase="Failed", incarnation="2"))
    await ended(reader)
    writer.close()


async def test_without_a_pod_a_caller_is_refused(world):
    await world.serve(world.ips[0])
    key, ready = ("default", "p"), pod("p", world.ips[0], a="1")
    world.proxy.service_changed(("default", "s"), service(world.service_ip, a="1"))
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(world.service_ip, 7077)
    world.proxy.pod_changed(key, ready)
    _, reader, writer = await world.call()
    # No longer ready: no new connections, but what is connected stays.
    world.proxy.pod_changed(key, pod("p", world.ips[0], ready=False, a="1"))
    async with asyncio.timeout(LONG):
        while True:
            try:
                _, refused = await asyncio.open_connection(world.service_ip, 7077)
                refused.close()
            except ConnectionError:
                break
    writer.write(b"still")
    assert await reader.readexactly(5) == b"still"
    # Another pod of the same name is not the one that was connected to.
    world.proxy.pod_changed(key, pod("p", world.ips[0], uid="another", a="1"))
    await ended(reader)
    writer.close()


async def test_bulk_goes_through_whole_in_both_directions_with_half_close(world):
    await world.serve(world.ips[0])
    world.proxy.pod_changed(("default", "p"), pod("p", world.ips[0], a="1"))
    world.proxy.service_changed(("default", "s"), service(world.service_ip, a="1"))
    _, reader, writer = await world.call()
    data = random.Random(0).randbytes(8 << 20)
    back = asyncio.create_task(reader.read(-1))
    writer.write(data)
    await writer.drain()
    writer.write_eof()
    async with asyncio.timeout(LONG):
        assert await back == data
    writer.close()


async def test_a_taken_port_is_listened_on_once_it_is_free(world):
    await world.serve(world.ips[0])
    taken = await asyncio.start_server(lambda *_: None, world.service_ip, 7077)
    world.proxy.pod_changed(("default", "p"), pod("p", world.ips[0], a="1"))
    world.proxy.service_changed(("default", "s"), service(world.service_ip, a="1"))
    await asyncio.sleep(0)
    taken.close()
    who, _, writer = await world.call()
    assert who == world.ips[0]
    writer.close()


# --- through the cluster


SAY = (
    "import os,socket;s=socket.create_server((os.environ['BACKSTAY_BIND'],7077))\n"
    "print('up',flush=True)\n"
    "while True:\n c,_=s.accept(); c.sendall(os.environ['HOSTNAME'].encode()+b'\\n'); c.recv(1)"
)


@pytest.mark.e2e
async def test_a_service_of_the_cluster_follows_a_patch_of_its_selector(driver):
    """O3 holds end to end, with the ClusterIP from the API server, a JSON patch of the selector, and the proxy that
    follows."""
    name, names = driver.name(), []
    for incarnation in ("1", "2"):
        command = {"command": ["python", "-S", "-c", SAY], "ports": [{"name": "rpc", "containerPort": 7077}]}
        names.append(await driver.pod(container=command, labels={"svc": name, "incarnation": incarnation}))
    for one in names:
        await driver.printed(one, "up")
    ports = [{"name": "rpc", "port": 7077, "targetPort": "rpc"}]
    selector = {"svc": name, "incarnation": "1"}
    spec = {"selector": selector, "ports": ports, "publishNotReadyAddresses": True}
    made = await driver.make("services", name, spec=spec)
    ip = made["spec"]["clusterIP"]

    async def ask(expected: str) -> None:
        async with asyncio.timeout(LONG):
            who = ""
            while who != expected:
                with contextlib.suppress(ConnectionError):
                    reader, writer = await asyncio.open_connection(ip, 7077)
                    who = (await reader.readline()).decode().strip()
                    writer.close()

    await ask(names[0])
    reader, writer = await asyncio.open_connection(ip, 7077)
    assert (await reader.readline()).decode().strip() == names[0]
    patch = [
        {"op": "test", "path": "/spec/selector/incarnation", "value": "1"},
        {"op": "replace", "path": "/spec/selector/incarnation", "value": "2"},
    ]
    await driver.client.patch(driver.path(name, "services"), patch, "application/json-patch+json")
    await ended(reader)
    writer.close()
    await ask(names[1])
    # A pod that is started later gets the addresses of its Services.
    variable = f"{name.upper().replace('-', '_')}_SERVICE_HOST"
    assert (await driver.ended(await driver.pod(f'[ "${variable}" = {ip} ]')))["exitCode"] == 0
    for one in names:
        await driver.delete(one, gracePeriodSeconds=0)
