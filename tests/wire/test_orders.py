"""`Orders` alone decides what a shard carries out next, with each commit once, in order of version (T3)."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay._shard._orders import Orders
from backstay_rpc.control_pb2 import Commit, Contribution, NormRequest, Save

Order = Commit | NormRequest | Save


class Keeping:
    """Orders, with an applier that returns what it is called for."""

    def __init__(self) -> None:
        applier = SimpleNamespace(
            save=lambda term: Save(version=term.version),
            prepare=lambda term, request: request,
            apply=lambda term, commit, arrived: commit,
        )
        self.orders = Orders(applier)  # type: ignore[arg-type]

    def add(self, order: Order) -> None:
        match order:
            case Commit():
                self.orders.commit(order)
            case NormRequest():
                self.orders.prepare(order)
            case Save():
                self.orders.save(order)

    def take(self, version: int) -> object:
        work = self.orders.take(SimpleNamespace(version=version))  # type: ignore[arg-type]
        return None if work is None else work()


ORDERS = st.one_of(
    st.builds(Commit, version=st.integers(0, 4), world=st.integers(1, 3)),
    st.builds(NormRequest, version=st.integers(0, 4), round=st.integers(1, 5)),
    st.builds(Save, version=st.integers(0, 4)),
)


@given(st.lists(ORDERS, max_size=30), st.integers(0, 4))
def test_t3_of_commits_the_first_and_of_requests_the_newest_counts(added: list[Order], version: int) -> None:
    orders = Keeping()
    for order in added:
        orders.add(order)
    taken = []
    while (order := orders.take(version)) is not None:
        taken.append(order)
    mine = [order for order in added if order.version == version]
    saves = [order for order in mine if isinstance(order, Save)][-1:]
    requests = [order for order in mine if isinstance(order, NormRequest)][-1:]
    commits = [order for order in mine if isinstance(order, Commit)][:1]
    assert taken == [*saves, *requests, *commits]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(named=st.lists(st.integers(0, 3), max_size=4, unique=True), rejected=st.integers(0, 3))
def test_a_request_that_names_a_rejected_gradient_is_withdrawn(
    kit: SimpleNamespace, named: list[int], rejected: int
) -> None:
    orders = Keeping()
    contributions = [Contribution(id=kit.gid(rank), weight=1.0) for rank in named]
    orders.add(NormRequest(version=0, contributions=contributions))
    orders.add(Commit(version=0, contributions=contributions))
    orders.orders.withdraw(kit.gid(rejected))
    assert isinstance(orders.take(0), Commit if rejected in named else NormRequest)


def test_a_new_term_drops_all_orders() -> None:
    orders = Keeping()
    for order in (Commit(version=1), NormRequest(version=1), Save(version=1)):
        orders.add(order)
    orders.orders.clear()
    assert orders.take(1) is None
