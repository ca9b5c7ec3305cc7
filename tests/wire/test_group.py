"""The members of a rank decide the same at the same points, and know when one of them is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import pytest
from between import LONG
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay._transport import (
    ALONE,
    FLAG,
    FollowingMember,
    Form,
    LeadingMember,
    MemberLost,
    Members,
    OwnMember,
    Pulled,
    messages,
    pulled_together,
)
from backstay._transport._members._line import END, LineEnd, MemberLine
from backstay._update import Selection
from backstay.errors import ConfigurationError, JobFailed, PeerLost, Refused, Superseded, WaitedTooLong
from backstay_rpc.control_pb2 import Frame, JoinReply, MemberMessage, Peer
from backstay_rpc.credentials import Credentials

from .certificates import credentials_of

NUMBER = Form(lambda value: str(value).encode(), int)
ERRORS = (
    PeerLost("a connection broke"),
    WaitedTooLong("nothing answered"),
    Refused("INVALID_ARGUMENT", "no"),
    Superseded("PERMISSION_DENIED", "replaced"),
    JobFailed("NonFiniteGradients", "the gradients are not finite"),
    ConfigurationError("batches returned nothing"),
)
TOKEN = "a" * 32


def peer(member: int, *, rank: int = 3, incarnation: int = 1) -> Peer:
    return Peer(role="worker", index=rank, incarnation=incarnation, member=member)


class Rank:
    """The members of a rank in threads of one process."""

    def __init__(self, count: int, credentials: Credentials, interval: float = 2.0) -> None:
        self.lost: list[tuple[int, int, str]] = []  # who saw it, the lost member, and why
        self.changed = threading.Condition()
        self.credentials = credentials
        leader = LeadingMember(OwnMember(peer(0), count, credentials, self.seen_by(0), interval), "127.0.0.1")
        self.address = f"127.0.0.1:{leader.port}"
        self.members: list[Any] = [leader]
        self.members += [
            FollowingMember(OwnMember(peer(member), count, credentials, self.seen_by(member), interval), self.address)
            for member in range(1, count)
        ]
        assert leader.linked(LONG) == []

    def seen_by(self, own: int) -> Callable[[int, str], None]:
        def lost(member: int, why: str) -> None:
            with self.changed:
                self.lost.append((own, member, why))
                self.changed.notify_all()

        return lost

    def wait_lost(self, count: int) -> list[tuple[int, int, str]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.lost) >= count, LONG), self.lost
            return sorted(self.lost)

    def each(self, function: Callable[[Members], Any]) -> list[Any]:
        """Returns the result of a function in each member, or its exception."""
        results: list[Any] = [None] * len(self.members)

        def run(at: int) -> None:
            try:
                results[at] = function(self.members[at])
            except Exception as error:  # noqa: BLE001  # it is the result
                results[at] = error

        threads = [threading.Thread(target=run, args=(at,)) for at in range(len(self.members))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()
        return results


@contextlib.contextmanager
def rank_of(count: int, credentials: Credentials, interval: float = 2.0) -> Iterator[Rank]:
    rank = Rank(count, credentials, interval)
    try:
        yield rank
    finally:
        rank.each(lambda group: group.close())


# For each point: whether the leader decides alone; of each member, its value or the number of its error.
POINTS = st.lists(
    st.tuples(st.booleans(), st.lists(st.one_of(st.integers(0, 9), st.integers(-6, -1)), min_size=3, max_size=3)),
    max_size=12,
)


@settings(deadline=None, max_examples=30)
@given(points=POINTS)
def test_t4_all_members_have_the_same_values_and_errors(points: Sequence[tuple[bool, Sequence[int]]]) -> None:
    def made(value: int) -> int:
        if value < 0:
            raise ERRORS[value]
        return value

    def run(group: Members) -> list[Any]:
        found: list[Any] = []
        for alone, values in points:
            own = values[group.member]
            try:
                if alone:
                    found.append(group.share("share", NUMBER, lambda own=own: made(own)))
                else:
                    found.append(group.agree("agree", NUMBER, lambda own=own: made(own), sum))
            except (PeerLost, Refused, JobFailed, ConfigurationError) as error:
                found.append((type(error), str(error)))
        return found

    def wanted(alone: bool, values: Sequence[int]) -> Any:
        decides = values[:1] if alone else values
        errors = [ERRORS[value] for value in decides if value < 0]
        # Another connection may succeed, but not what was refused.
        errors.sort(key=lambda error: type(error) is PeerLost)
        return (type(errors[0]), str(errors[0])) if errors else sum(decides)

    with rank_of(3, credentials_of(TOKEN, "")) as rank:
        results = rank.each(run)
    assert results == [[wanted(*point) for point in points]] * 3
    assert rank.lost == []


@pytest.mark.parametrize("error", [PeerLost("the node is gone"), Refused("INVALID_ARGUMENT", "not the codec's bytes")])
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_an_error_that_ends_the_waits_of_the_others_is_that_of_all(
    credentials: Credentials, fails: int, error: Exception
) -> None:
    """The others are cut off because of it. A lasting refusal was taken as a lost connection, and repeated."""

    def run(group: Members) -> Any:
        cut = threading.Event()

        def make() -> int:
            if group.member == fails:
                raise error
            assert cut.wait(LONG)
            raise PeerLost("another pod of this rank lost a server")

        return group.agree("pull", NUMBER, make, sum, cut.set)

    with rank_of(3, credentials) as rank:
        found = rank.each(run)
    assert [(type(one), str(one)) for one in found] == [(type(error), str(error))] * 3


def test_t1_what_a_rank_has_received_is_what_all_its_members_have(credentials: Credentials) -> None:
    """A quorum without this rank makes the versions 5 and 6. One member is answered before the second of them, and
    pulls again: then all. The other one has received the fragments of both."""

    def run(group: Members) -> tuple[Pulled, list[int]]:
        again: list[int] = []

        def pull(version: int) -> Pulled:
            again.append(version)
            return Pulled(1, version, 2)

        fragments = {0: frozenset({1}), 1: frozenset({1, 2})}[group.member]
        first = Pulled(1, 5 + group.member, 2, selection=Selection(fragments))
        return pulled_together(group, "Sync", lambda: first, pull, lambda: None, pushed=True), again

    with rank_of(2, credentials) as rank:
        found = rank.each(run)
    assert [(pulled.version, pulled.selection, again) for pulled, again in found] == [
        (6, Selection(frozenset({1, 2})), [6]),
        (6, Selection(frozenset({1, 2})), []),
    ]


@pytest.mark.parametrize("mode", ["Sync", "Async"])
def test_t1_members_with_parameters_of_several_terms_join_again(credentials: Credentials, mode: str) -> None:
    """A rollback may give the same number to another version."""

    def run(group: Members) -> Any:
        answer = Pulled(1 + group.member, 5, 2)
        return pulled_together(group, mode, lambda: answer, lambda version: answer, lambda: None, pushed=False)

    with rank_of(2, credentials) as rank:
        assert [str(error) for error in rank.each(run)] == [
            "the pods of this rank are in the terms [1, 2]: a server started again"
        ] * 2


def test_a_rank_of_one_pod_decides_alone() -> None:
    assert ALONE.share("x", NUMBER, lambda: 7) == 7
    assert ALONE.agree("x", NUMBER, lambda: 7, sum) == 7
    with pytest.raises(PeerLost, match="broke"):
        ALONE.agree("x", NUMBER, lambda: (_ for _ in ()).throw(ERRORS[0]), sum)
    assert (ALONE.member, ALONE.count) == (0, 1)
    ALONE.close()


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.text(max_size=40)), max_size=5))
def test_messages_travel_as_they_are(values: list[tuple[int, str]]) -> None:
    replies = [JoinReply(term=term, data_address=address) for term, address in values]
    form = messages(JoinReply)
    assert form.decode(form.encode(replies)) == replies


def test_members_at_different_points_end_with_both_names(credentials: Credentials) -> None:
    with rank_of(2, credentials) as rank:
        found = rank.each(lambda group: group.agree(f"point of {group.member}", NUMBER, lambda: 1, sum))
        assert isinstance(found[0], RuntimeError)
        assert "member 1 of this rank is at point 1, 'point of 1', and this member at point 1, 'point of 0'" in str(
            found[0]
        )


def test_an_exception_that_is_not_of_backstay_is_raised_in_its_member_alone(credentials: Credentials) -> None:
    """The end of its process ends the others."""

    def raises(group: Members) -> int:
        if group.member == 1:
            raise ZeroDivisionError
        return 1

    with rank_of(3, credentials) as rank:
        results: list[Any] = []
        rank.members[1].agree, agree = None, rank.members[1].agree
        with pytest.raises(ZeroDivisionError):
            agree("x", NUMBER, lambda: raises(rank.members[1]), sum)
        rank.members[1]._line._stream.close()
        rank.members.pop(1)
        results = rank.each(lambda group: group.agree("x", NUMBER, lambda: 1, sum))
        assert all(isinstance(error, MemberLost) for error in results), results
        assert (0, 1, "the connection was closed") in rank.wait_lost(2)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (peer(1), "member 1 of worker 3 is connected already"),
        (
            peer(2),
            "worker 3, member 2, of incarnation 1 is not of this rank, which is worker 3 of incarnation 1 with 2",
        ),
        (peer(1, incarnation=2), "worker 3, member 1, of incarnation 2 is not of this rank"),
        (peer(1, rank=4), "worker 4, member 1, of incarnation 1 is not of this rank"),
        (peer(0), "worker 3, member 0, of incarnation 1 is not of this rank"),
    ],
)
def test_t6_pods_that_are_not_of_the_rank_are_refused(credentials: Credentials, other: Peer, why: str) -> None:
    lost: list[str] = []
    with rank_of(2, credentials) as rank:
        own = OwnMember(other, 2, credentials, lambda member, text: lost.append(text))
        stranger = FollowingMember(own, rank.address)
        with pytest.raises(MemberLost, match=why):
            stranger.share("x", FLAG, lambda: True)
        assert len(lost) == 1
        assert rank.each(lambda group: group.agree("x", NUMBER, lambda: 1, sum)) == [2, 2]
        stranger._line.close()


def test_an_error_of_one_member_may_follow_from_the_loss_of_another(credentials: Credentials) -> None:
    """A broken collective raises `JaxRuntimeError`, or `ValueError` where a function is dispatched. An error that all
    members have agreed on follows from none."""
    slept: list[float] = []

    def refused() -> int:
        raise Refused("INVALID_ARGUMENT", "not the codec's bytes")

    def waits(group: Members, error: BaseException) -> bool:
        slept.clear()
        group.settle(error)
        return bool(slept)

    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    with rank_of(2, credentials) as rank, patch("backstay._transport._members._group.time", clock):
        agreed = rank.each(lambda group: group.agree("x", NUMBER, refused, sum))
        for group, error in zip(rank.members, agreed, strict=True):
            assert isinstance(error, Refused)
            assert not waits(group, error)
            assert waits(group, ValueError("UNKNOWN: Gloo AllGather failed"))
            assert waits(group, OSError())
            assert not waits(group, KeyboardInterrupt())


def test_a_pod_without_the_token_is_refused(credentials: Credentials) -> None:
    with rank_of(2, credentials) as rank:
        other = SimpleNamespace(token="b" * 32, accepts=None, connects=None)
        own = OwnMember(peer(1), 2, other, lambda member, why: None)  # type: ignore[arg-type]
        stranger = FollowingMember(own, rank.address)
        with pytest.raises(MemberLost, match="belongs to another job"):
            stranger.share("x", FLAG, lambda: True)
        stranger._line.close()


@pytest.fixture(scope="module")
def starter() -> Iterator[socket.socket]:
    """The end of a socket of a process that has imported what members need."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = [sys.executable, str(Path(__file__).with_name("member_of_a_rank.py"))]
    # Without a second thread, as it forks.
    with ours, subprocess.Popen(program, stdin=theirs, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}) as process:
        theirs.close()
        yield ours
        ours.close()
        process.wait(LONG)


@pytest.mark.parametrize("what", ["ends", "SIGKILL of a member", "SIGKILL of the leader", "SIGSTOP"])
def test_t8_a_lost_process_ends_the_others(stack: ExitStack, starter: socket.socket, what: str) -> None:
    """A kill shows in the connection, and a stop in the answers to pings. After an end in order, no process is lost."""

    def ended(pid: int) -> int:
        running.discard(pid)
        starter.send(f"end {pid}".encode())
        return int(starter.recv(64))

    def start(member: int, *more: str) -> tuple[int, IO[str], IO[str]]:
        (its_input, given), (taken, its_output) = os.pipe(), os.pipe()
        socket.send_fds(starter, [" ".join([str(member), "3", TOKEN, "0.2", *more]).encode()], [its_input, its_output])
        pid = int(starter.recv(64))
        os.close(its_input)
        os.close(its_output)
        running.add(pid)
        return pid, stack.enter_context(os.fdopen(given, "w")), stack.enter_context(os.fdopen(taken))

    def end_all() -> None:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        for pid in list(running):
            ended(pid)

    running: set[int] = set()
    stack.callback(end_all)
    leader = start(0)
    address = f"127.0.0.1:{leader[2].readline().strip()}"
    every = [leader, start(1, address), start(2, address)]
    for _, _, output in every:
        assert output.readline() == "running\n"
    killed = {"ends": None, "SIGKILL of the leader": 0}.get(what, 2)
    if killed is None:
        leader[1].write("\n")
        leader[1].flush()
    else:
        os.kill(every[killed][0], signal.SIGSTOP if what == "SIGSTOP" else signal.SIGKILL)
    for member, (pid, _, output) in enumerate(every):
        if member == killed:
            continue
        text = output.read()
        code = ended(pid)
        if killed is None:
            assert (text, code) == ("ended\n", 0)
        else:
            assert code == 81, text
            assert text.startswith(f"member {0 if member else killed} is lost: "), text


class LeftInOrder:
    """A stream whose other end has sent its last message, and then takes nothing any more."""

    def __init__(self, *last: str) -> None:
        self.refused = threading.Event()
        self.arrived = iter([Frame(member=MemberMessage(number=9, point=point)) for point in last])

    def keep_alive(self) -> None:
        pass

    def post(self, frame: Frame) -> None:
        self.refused.set()
        raise PeerLost("the connection broke")

    def read(self) -> tuple[Frame, bytes] | None:
        assert self.refused.wait(LONG)
        frame = next(self.arrived, None)
        return None if frame is None else (frame, b"")


@pytest.mark.parametrize(("last", "lost"), [([END], []), ([], ["the connection was closed"])])
def test_t8_a_failed_ping_is_not_a_loss_if_the_last_message_has_arrived(last: list[str], lost: list[str]) -> None:
    """The other process ends at the same time. Its last message may not be read yet."""
    found: list[str] = []
    stream: Any = LeftInOrder(*last)
    line = MemberLine(stream, 0.2, LineEnd(found.append, lambda number: None))
    line.serve()
    with pytest.raises(MemberLost):
        line.send(MemberMessage())
    assert found == lost


def test_t8_members_that_wait_for_each_other_end(credentials: Credentials) -> None:
    """This is a defect, after which a new incarnation may work."""

    def run(group: Members) -> Any:
        if group.member == 0:
            return group.agree("pull", NUMBER, lambda: 1, sum)
        return group.share("reconnect", FLAG, lambda: True)

    with rank_of(2, credentials, interval=0.05) as rank:
        results = rank.each(run)
        assert [type(result) for result in results] == [MemberLost, MemberLost]
        assert "pod 0: waits for the others at 'pull'" in rank.wait_lost(1)[0][2]


@pytest.mark.parametrize("broken", range(3))
def test_t8_no_member_waits_where_another_has_an_error(credentials: Credentials, broken: int) -> None:
    """The others wait for servers, which may wait for the part of this member. Then they pass the next point."""
    ends = [threading.Event() for _ in range(3)]
    canceled: list[int] = []

    def wait(group: Members) -> int:
        if group.member == broken:
            raise ERRORS[0]
        assert ends[group.member].wait(LONG)
        raise PeerLost("canceled")

    def cancel(group: Members) -> None:
        canceled.append(group.member)
        ends[group.member].set()

    def run(group: Members) -> Any:
        with pytest.raises(PeerLost) as error:
            group.agree("pull", NUMBER, lambda: wait(group), sum, lambda: cancel(group))
        return str(error.value), group.agree("pull", NUMBER, lambda: 1, sum, lambda: cancel(group))

    with rank_of(3, credentials) as rank:
        results = rank.each(run)
    assert {type(result) for result in results} == {tuple}, results
    assert [total for _, total in results] == [3, 3, 3]
    assert len({why for why, _ in results}) == 1
    assert set(canceled) <= {0, 1, 2} - {broken}
