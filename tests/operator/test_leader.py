"""One operator acts, by a Lease (O1), and the Lease is the heartbeat that proves that the watch moves."""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
from collections.abc import Callable
from typing import Any, cast

import pytest

from backstay_operator import errors
from backstay_operator.bus import Bus, LeadChanged
from backstay_operator.clocks import Clocks
from backstay_operator.kube import Kube
from backstay_operator.leader import Leader, identity, is_dead, pod_reference


class Leases:
    """An API server that knows one Lease."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] | None = None
        self.version = 0
        self.away = False

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.stored = copy.deepcopy(body)
        self.stored["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.stored)

    def _reach(self) -> None:
        if self.away:
            raise errors.Unreachable("as configured")

    async def get(self, *_: Any) -> dict[str, Any]:
        self._reach()
        if self.stored is None:
            raise errors.NotFound("get", 404, "NotFound", "")
        return copy.deepcopy(self.stored)

    async def create(self, _resource: Any, _namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        self._reach()
        if self.stored is not None:
            raise errors.AlreadyExists("create", 409, "AlreadyExists", "")
        return self._store(body)

    async def replace(self, _resource: Any, _namespace: str, _name: str, body: dict[str, Any]) -> dict[str, Any]:
        self._reach()
        if self.stored is None:
            raise errors.NotFound("update", 404, "NotFound", "")
        if body["metadata"]["resourceVersion"] != self.stored["metadata"]["resourceVersion"]:
            raise errors.Conflict("update", 409, "Conflict", "")
        return self._store(body)

    def delete(self, *leaders: Leader) -> None:
        assert self.stored is not None
        gone, self.stored = self.stored, None
        for one in leaders:
            one.deleted(gone)

    @property
    def holder(self) -> str:
        assert self.stored is not None
        return cast(str, self.stored["spec"]["holderIdentity"])


def leader(leases: Leases, me: str, notified: list[bool] | None = None) -> Leader:
    loop = asyncio.get_running_loop()
    sink: list[bool] = [] if notified is None else notified
    bus = Bus()
    bus.subscribe(LeadChanged, lambda event: sink.append(event.leads))
    return Leader(cast(Kube, leases), "ns", me, bus, clocks=Clocks(loop.time))


def show(leases: Leases, *leaders: Leader) -> None:
    assert leases.stored is not None
    for one in leaders:
        one.saw(leases.stored)


def test_the_first_acts_the_second_waits_and_takes_over_when_the_first_is_silent(
    virtual: Callable[..., Any],
) -> None:
    async def story() -> None:
        leases, notified = Leases(), list[bool]()
        first, second = leader(leases, "a"), leader(leases, "b", notified)
        await first.step()
        await second.step()
        assert (first.leads(), second.leads()) == (True, False)
        for _ in range(10):  # the first renews: the second never acts
            await asyncio.sleep(4)
            await first.step()
            await second.step()
            assert (first.leads(), second.leads()) == (True, False)
        await asyncio.sleep(10.5)  # the first is stuck: it must itself cease before the other may begin
        assert not first.leads()
        await second.step()
        assert not second.leads()
        await asyncio.sleep(5)
        await second.step()
        assert second.leads()
        assert notified == [True]
        await first.step()
        assert not first.leads()
        assert leases.holder == "b"

    virtual(story())


def test_of_two_operators_that_start_at_the_same_time_only_one_acts(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        leases = Leases()
        both = [leader(leases, "a"), leader(leases, "b")]
        await asyncio.gather(*(one.step() for one in both))
        assert sum(one.leads() for one in both) == 1

    virtual(story())


def test_a_clean_exit_releases_the_lease_immediately(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        leases = Leases()
        first, second = leader(leases, "a"), leader(leases, "b")
        await first.step()
        task = asyncio.create_task(second.run())
        await asyncio.sleep(1)
        await first.release()
        show(leases, second)
        await asyncio.sleep(0.1)
        assert second.leads()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual(story())


def test_a_leader_that_cannot_renew_stops_and_is_notified_when_it_leads_again(virtual: Callable[..., Any]) -> None:
    """Triggers are dropped while it does not act, so it must be notified that it acts again, and check every job."""

    async def story() -> None:
        leases, notified = Leases(), list[bool]()
        one = leader(leases, "a", notified)
        await one.step()
        leases.away = True
        await asyncio.sleep(11)
        assert not one.leads()
        leases.away = False
        await one.step()
        assert one.leads()
        assert notified == [True, False, True]

    virtual(story())


def test_a_lease_is_deleted_with_its_holders_pod_and_the_next_operator_acts_immediately(
    virtual: Callable[..., Any],
) -> None:
    """Uninstalling the chart deletes the operator's rights first, so it cannot give the Lease back."""
    owner = pod_reference({"BACKSTAY_OPERATOR_POD": "backstay-7/0d9e"})
    assert owner == {"apiVersion": "v1", "kind": "Pod", "name": "backstay-7", "uid": "0d9e"}
    assert pod_reference({}) is None

    async def story() -> None:
        leases = Leases()
        loop = asyncio.get_running_loop()
        first = Leader(cast(Kube, leases), "ns", "a", Bus(), clocks=Clocks(loop.time), owner=owner)
        second = Leader(
            cast(Kube, leases), "ns", "b", Bus(), clocks=Clocks(loop.time), owner={**owner, "name": "backstay-8"}
        )
        await first.step()
        assert leases.stored is not None
        assert leases.stored["metadata"]["ownerReferences"] == [owner]
        task = asyncio.create_task(second.run())
        await asyncio.sleep(1)
        assert not second.leads()
        leases.delete(second)
        await asyncio.sleep(0.1)
        assert second.leads()
        assert leases.stored["metadata"]["ownerReferences"][0]["name"] == "backstay-8"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual(story())


def test_whose_lease_is_deleted_acts_no_longer_until_it_holds_it_again(virtual: Callable[..., Any]) -> None:
    """A pod that was deleted by force may still run: it must not act beside its successor."""

    async def story() -> None:
        leases, notified = Leases(), list[bool]()
        one, other = leader(leases, "a", notified), leader(leases, "b")
        await one.step()
        leases.delete(one)
        assert not one.leads()
        await other.step()
        await one.step()
        assert (one.leads(), other.leads()) == (False, True)
        assert notified == [True, False]
        leases.delete(one, other)
        await one.step()
        await other.step()
        assert (one.leads(), other.leads()) == (True, False)
        assert notified == [True, False, True]

    virtual(story())


def test_a_renewal_is_one_request_and_survives_a_foreign_write(virtual: Callable[..., Any]) -> None:
    class Counting(Leases):
        gets = 0

        async def get(self, *arguments: Any) -> dict[str, Any]:
            self.gets += 1
            return await super().get(*arguments)

    async def story() -> None:
        leases = Counting()
        one = leader(leases, "a")
        await one.step()
        for _ in range(3):
            await asyncio.sleep(4)
            await one.step()
        assert leases.gets == 1  # the first look
        assert leases.stored is not None
        leases.stored["metadata"]["resourceVersion"] = "7000"  # `kubectl annotate lease`
        await asyncio.sleep(4)
        await one.step()
        assert (one.leads(), leases.gets) == (True, 2)
        leases.stored["spec"]["holderIdentity"] = "b"
        leases.stored["metadata"]["resourceVersion"] = "8000"
        await one.step()
        assert not one.leads()
        assert leases.holder == "b"

    virtual(story())


def test_a_lease_that_ran_out_is_given_back_too(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        leases = Leases()
        one = leader(leases, "a")
        await one.step()
        await asyncio.sleep(11)
        assert not one.leads()
        await one.release()
        assert leases.holder == ""

    virtual(story())


def test_a_lapse_while_the_renewal_is_under_way_is_reported(virtual: Callable[..., Any]) -> None:
    """O5: the operator drops triggers while it does not hold the Lease, however short the lapse was."""

    class Slow(Leases):
        seconds = 0.0

        async def replace(self, *arguments: Any) -> dict[str, Any]:
            await asyncio.sleep(self.seconds)
            return await super().replace(*arguments)

    async def story() -> None:
        leases, notified = Slow(), list[bool]()
        one = leader(leases, "a", notified)
        await one.step()
        await asyncio.sleep(9.5)
        leases.seconds = 1.0  # the Lease runs out after 10 s, and the answer arrives after 10.5 s
        await one.step()
        assert one.leads()
        assert notified == [True, False, True]

    virtual(story())


def test_a_watch_that_does_not_move_is_noticed_only_while_the_api_server_answers(
    virtual: Callable[..., Any],
) -> None:
    async def story() -> None:
        leases = Leases()
        one = leader(leases, "a")
        await one.step()
        assert not one.seen
        show(leases, one)
        assert one.seen
        assert one.behind() == 0.0
        for _ in range(5):  # renewed, and not shown
            await asyncio.sleep(4)
            await one.step()
        assert one.behind() == pytest.approx(16.0)
        leases.away = True
        for _ in range(20):
            await asyncio.sleep(4)
            await one.step()
        assert one.behind() == pytest.approx(0.0)  # nothing is owed by a watch of a server that is away
        assert not one.reached
        leases.away = False
        await asyncio.sleep(4)
        await one.step()
        assert one.reached
        assert one.behind() == pytest.approx(4.0)
        show(leases, one)
        assert one.behind() == 0.0

    virtual(story())


def test_a_watch_that_is_late_but_moves_is_not_dead(virtual: Callable[..., Any]) -> None:
    """A slow API server shows each renewal 100 s later: a restart would not make it faster."""

    async def story() -> None:
        leases = Leases()
        one = leader(leases, "a")
        written: list[dict[str, Any]] = []
        for number in range(60):
            await one.step()
            assert leases.stored is not None
            written.append(copy.deepcopy(leases.stored))
            if number >= 25:
                one.saw(written[number - 25])
            assert one.behind() <= 100.0 if number < 25 else one.behind() <= 8.0
            await asyncio.sleep(4)

    virtual(story())


def test_one_who_waits_expects_to_see_the_holders_renewals(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        leases = Leases()
        first, second = leader(leases, "a"), leader(leases, "b")
        for _ in range(6):
            await first.step()
            await second.step()
            show(leases, first)
            await asyncio.sleep(4)
        assert first.behind() == 0.0
        assert second.behind() == pytest.approx(24.0)

    virtual(story())


def test_only_a_process_of_this_machine_can_be_found_dead() -> None:
    me = identity({}, lambda: 0.5)
    host, space, pid, _ = me.split("_")
    assert pid == str(os.getpid())
    assert is_dead(f"{host}_{space}_{pid}_00000000", me)  # the process id is ours now
    assert not is_dead(me, me)
    assert not is_dead(f"{host}_{space}_1_00000000", me)
    assert not is_dead(f"elsewhere_{space}_999999_00000000", me)
    assert not is_dead("some-pod-name", me)
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    assert is_dead(f"{host}_{space}_{ended.pid}_00000000", me)
    assert identity({"BACKSTAY_OPERATOR_POD": "pod-1"}, lambda: 0.5) == "pod-1"
