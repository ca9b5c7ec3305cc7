"""T6, O5: a server whose standby was lost continues only when the standby was certainly not promoted."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from between import LONG, until

from backstay._roles._ending import Ending
from backstay._roles._server._arbiter import Arbiter
from backstay._roles._server._loading import Loader
from backstay._timeouts import Timeouts
from backstay.errors import Superseded
from backstay_rpc.control_pb2 import Rollback

FOREVER = replace(Timeouts(), standby_closed=3600.0, standby_silent=3600.0)


def never() -> bool:
    return False


def asked(arbiter: Arbiter, when: float = 0.0) -> tuple[threading.Thread, list[str]]:
    """Returns an apply thread that waits, and what came of it."""
    results: list[str] = []

    def wait() -> None:
        try:
            arbiter.standby_lost(when, False, never)
            results.append("continues")
        except Superseded:
            results.append("ends")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: arbiter.asking or not thread.is_alive())
    return thread, results


def test_a_word_of_the_operator_from_before_the_loss_does_not_count() -> None:
    arbiter = Arbiter(1, FOREVER, Ending())
    arbiter.confirm()
    thread, results = asked(arbiter, when=time.monotonic() + 3600)
    assert arbiter.asking
    arbiter.confirm()
    assert not results
    arbiter.close()
    thread.join(LONG)
    assert results == ["ends"]
    assert not arbiter.asking


@pytest.mark.parametrize("what", ["confirmed", "superseded"])
def test_the_operator_decides(what: str) -> None:
    ending = Ending()
    arbiter = Arbiter(1, FOREVER, ending)
    thread, results = asked(arbiter, when=time.monotonic())
    if what == "confirmed":
        arbiter.confirm()
    else:
        arbiter.supersede(2)
    thread.join(LONG)
    assert results == ["continues" if what == "confirmed" else "ends"]
    assert isinstance(ending.error, Superseded) == (what == "superseded")


def test_a_standby_that_connects_again_was_not_promoted() -> None:
    Arbiter(1, FOREVER, Ending()).standby_lost(0.0, True, lambda: True)


def test_o5_without_an_operator_the_server_continues_after_its_patience() -> None:
    Arbiter(1, replace(FOREVER, standby_closed=0.0), Ending()).standby_lost(time.monotonic(), True, never)


def test_only_the_newest_term_that_waits_is_loaded() -> None:
    begun: list[int] = []
    go, done = threading.Event(), threading.Event()

    def begin(term: Rollback) -> None:
        begun.append(term.term)
        assert go.wait(LONG)
        if term.term == 4:
            done.set()

    loader = Loader(begin, failed=lambda error: None)
    loader.put(Rollback(term=1))
    loader.start()
    until(lambda: begun)
    for term in (2, 3, 4):
        loader.put(Rollback(term=term))
    go.set()
    assert done.wait(LONG)
    loader.close()
    assert begun == [1, 4]


def test_what_loading_raises_is_reported_once() -> None:
    failures: list[BaseException] = []
    seen = threading.Event()

    def failed(error: BaseException) -> None:
        failures.append(error)
        seen.set()

    loader = Loader(lambda term: (_ for _ in ()).throw(SystemExit(7)), failed)
    loader.start()
    loader.put(Rollback(term=1))
    assert seen.wait(LONG)
    assert [type(error) for error in failures] == [SystemExit]
