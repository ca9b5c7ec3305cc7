"""A healthy pod is never replaced, and a dead one always, over random histories of pauses, lost leases and starvation
(O5, T8).

A model of servers, a worker, a kubelet and an operator in steps of 0.1 s. The parts that judge are the real ones:
`Attention` and `Calls` of the operator, `reported`, and the planner. Time is an argument of all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from backstay_operator.contact import TICK, Attention, Calls
from backstay_operator.progress import reported
from backstay_spec import contract
from backstay_spec.actions import DeletePod

STEP = 0.1
SERVER = contract.ROLE_SERVER


def during(spans, t):
    return any(start <= t < end for start, end in spans)


@dataclass
class Call:
    """One request to a server on its way, whose `work` grows while the server has a processor."""

    kind: str
    uid: str
    began: float
    generation: int = 0
    work: float = 0.0
    answered: float | None = None


@dataclass
class Heart:
    """A worker's heartbeats to one shard."""

    answered: float = 0.0
    missed: int = 0
    due: float = 0.0
    call: Call | None = None


@dataclass
class World:
    """The injected interruptions, as spans of seconds.

    Attributes:
        stopped: name -> when its process is stopped. Names: a pod's, ``operator``, ``kubelet``, ``worker``.
        starved: when each answer of the node's processes takes `latency` seconds of their time.
        follows: when another operator holds the Lease.
    """

    cluster: object
    stopped: dict
    starved: list
    latency: float
    follows: list
    uids: dict = field(default_factory=dict)

    def __post_init__(self):
        self.start = self.cluster.now
        self.uids = {
            pod["metadata"]["uid"]: name
            for name, pod in self.cluster.pods.items()
            if "-ps-" in name and pod["status"]["phase"] == "Running"
        }
        self.shard = {
            uid: int(self.cluster.pods[name]["metadata"]["labels"][contract.LABEL_INDEX])
            for uid, name in self.uids.items()
        }
        self.active = {
            uid
            for uid, name in self.uids.items()
            if self.cluster.pods[name]["metadata"]["labels"][contract.LABEL_INCARNATION] == "1"
        }
        self.deleted = {}
        self.calls, self.contact, self.planned = Calls(), None, None
        self.flying, self.round, self.round_began, self.next_round = [], set(), -1.0, 0.0
        self.clock = 0.0
        self.attention = Attention(lambda: self.clock)
        self.next_tick, self.next_probe = 0.0, 0.0
        self.failures, self.ready = dict.fromkeys(self.uids, 0), dict.fromkeys(self.uids, True)
        self.hearts = {shard: Heart() for shard in set(self.shard.values())}
        self.cluster.contact = lambda: self.contact

    def runs(self, name, t):
        return not during(self.stopped.get(name, ()), t)

    def slow(self, t):
        return self.latency if during(self.starved, t) else 0.02

    def run(self, seconds, since=0):
        for step in range(round(since / STEP), round(seconds / STEP)):
            t = self.clock = round(step * STEP, 1)
            self.cluster.now = self.start + timedelta(seconds=t)
            flying = [*self.flying, *(heart.call for heart in self.hearts.values() if heart.call)]
            for call in flying:
                if self.uids[call.uid] not in self.deleted.values() and self.runs(self.uids[call.uid], t):
                    call.work += STEP
                    if call.answered is None and call.work >= self.slow(t):
                        call.answered = t
            if self.runs("worker", t):
                self.heartbeats(t)
            if self.runs("kubelet", t) and t >= self.next_probe:
                self.probe(t)
            if self.runs("operator", t):
                self.operate(t)

    def heartbeats(self, t):
        for shard, heart in self.hearts.items():
            call = heart.call
            if call is None:
                if t >= heart.due:
                    uid = next(uid for uid in self.active if self.shard[uid] == shard)
                    heart.call = Call("heartbeat", uid, t)
            elif call.answered is not None and call.answered <= call.began + 5:
                heart.answered, heart.missed, heart.call, heart.due = t, 0, None, t + 2
            elif t >= call.began + 5:
                heart.missed = heart.missed + 1 if t - call.began < 6 else 0
                heart.call, heart.due = None, t + 2

    def probe(self, t):
        self.next_probe = t + 2
        for uid, name in self.uids.items():
            if name in self.cluster.pods and name not in self.deleted.values():
                fine = self.runs(name, t) and self.slow(t) <= 2
                self.failures[uid] = 0 if fine else self.failures[uid] + 1
                if self.ready[uid] != fine and (fine or self.failures[uid] >= 3):
                    self.ready[uid] = fine
                    self.cluster.run(name, ready=fine)

    def operate(self, t):
        if t >= self.next_tick:
            self.attention.tick()
            self.next_tick = t + TICK
        if during(self.follows, t):
            self.calls, self.contact, self.flying, self.round = Calls(), None, [], set()
            return
        for call in list(self.flying):
            self.complete(call, t)
        if self.round_began >= 0 and not self.round & {call.uid for call in self.flying if call.kind == "short"}:
            self.finish(t)
        elif self.round_began < 0 and t >= self.next_round:
            self.begin(t)
        if self.contact is self.planned:
            return  # the operator plans when a round of calls ended
        self.planned = self.contact
        todo = self.cluster.plan()
        for action in todo.actions:
            if isinstance(action, DeletePod) and action.uid in self.uids:
                self.deleted.setdefault(t, action.name)
        self.cluster.apply(todo)

    def complete(self, call, t):
        limit = 1.5 if call.kind == "short" else 8.0
        over = t >= call.began + limit
        # Where answer and deadline came while the operator was stopped, it finds the deadline first.
        if (
            call.answered is not None
            and call.answered < call.began + limit
            and not (over and t - call.began > limit + STEP)
        ):
            if call.kind == "short":
                self.calls.answered(call.uid, self.cluster.now)
            else:
                self.calls.long_answered(call.uid)
        elif not over:
            return
        elif call.kind == "short":
            self.calls.missed(call.uid, self.cluster.now, proves=self.attention.awake_since(call.began))
            if not any(c.kind == "long" and c.uid == call.uid for c in self.flying):
                self.flying.append(Call("long", call.uid, t, self.calls.generation))
        elif self.attention.awake_since(call.began):
            self.calls.long_missed(call.uid, call.generation)
        self.flying.remove(call)

    def begin(self, t):
        if self.attention.paused_since(self.next_round):
            self.calls.reset()
        self.round_began, self.next_round = t, t + 2
        self.round = {uid for uid, name in self.uids.items() if name not in self.deleted.values()}
        self.flying += [Call("short", uid, t) for uid in self.round]

    def finish(self, t):
        if self.attention.paused_since(self.round_began):
            self.calls.reset()
        else:
            suspects = {self.shard[uid] for uid in self.calls.silent() & self.active}
            reports = []
            if self.runs("worker", t) and self.slow(t) < 1.5:
                said = {s: {"answered": t - h.answered, "missed": h.missed} for s, h in self.hearts.items()}
                reports = [json.dumps(said)]
            self.contact = self.calls.contact(self.cluster.now, *reported(reports, suspects))
        self.round_began = -1.0


@pytest.fixture
def make_world(running):
    def make(servers, standbys, **happens):
        cluster = running(
            {
                "parameterServers": {"replicas": servers, "standbys": standbys},
                "workers": {"replicas": 1},
                "runPolicy": {"pendingDeadlineSeconds": 10**6},
            }
        )
        cluster.answer(step=7, reached=frozenset(range(servers)))
        cluster.settle()
        return World(cluster, **{"stopped": {}, "starved": [], "latency": 0.02, "follows": [], **happens})

    return make


def names_of(world):
    return sorted(world.uids.values())


SPANS = st.lists(
    st.tuples(st.integers(5, 60), st.sampled_from([0.5, 1, 2, 4, 8, 20, 45])).map(lambda s: (s[0], s[0] + s[1])),
    max_size=3,
)
SHORT = st.lists(
    st.tuples(st.integers(5, 60), st.sampled_from([1, 3, 6])).map(lambda s: (s[0], s[0] + s[1])), max_size=1
)
QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


@QUICK
@given(
    shape=st.sampled_from([(1, 0), (1, 1), (2, 0), (2, 1)]),
    node=SPANS,
    operator=SPANS,
    kubelet=SPANS,
    follows=SPANS,
    starved=SPANS,
    latency=st.sampled_from([1.0, 3.0, 6.0, 30.0]),
    own=SHORT,
    which=st.integers(0, 3),
    later=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4),
)
def test_o5_a_healthy_pod_is_never_replaced(
    make_world, shape, node, operator, kubelet, follows, starved, latency, own, which, later
):
    """The node and all its processes, the operator, the kubelet and one server stop for a while, alone and
    together. The Lease is lost, and the node has too little CPU time. All of them continue afterwards, some later than
    others."""
    world = make_world(*shape, starved=starved, latency=latency, follows=follows)
    servers = names_of(world)
    world.stopped = {
        name: [(begin, end + seconds) for begin, end in node]
        for name, seconds in zip((*servers, "worker"), (*later[: len(servers)], 0.0), strict=True)
    }
    world.stopped[servers[which % len(servers)]] += own
    world.stopped |= {"operator": operator, "kubelet": kubelet}
    world.run(120)
    assert not world.deleted
    assert not world.cluster.deaths
    assert world.cluster.status.get("active", {}) == dict.fromkeys(world.cluster.status.get("active", {}), 1)


@QUICK
@given(
    shape=st.sampled_from([(1, 0), (1, 1), (2, 0), (2, 1)]),
    operator=SPANS,
    follows=SPANS,
    which=st.integers(0, 3),
    at=st.integers(5, 40),
)
def test_t8_a_dead_server_is_replaced_within_a_bound(make_world, shape, operator, follows, which, at):
    """The server's process is stopped permanently. Its pod is replaced 20 s after the operator's last
    interruption, and the death is charged.
    """
    world = make_world(*shape, follows=follows)
    name = names_of(world)[which % len(world.uids)]
    quiet = max([at, *(end for _, end in (*operator, *follows))])
    world.stopped = {name: [(at, 10**6)], "operator": operator}
    world.run(quiet + 20)
    assert list(world.deleted.values()) == [name]
    assert [(d.cause, d.charged) for d in world.cluster.deaths] == [("Stalled", True)]


@pytest.mark.parametrize("lag", [0.5, 1.0, 1.5, 3.0])
def test_o5_a_server_that_continues_later_than_the_others_is_not_replaced(make_world, lag):
    for tenths in range(0, 20, 2):
        world = make_world(2, 1)
        end = 20 + tenths / 10
        world.stopped = {name: [(5, end)] for name in (*names_of(world), "worker")}
        world.stopped[names_of(world)[0]] = [(5, end + lag)]
        world.run(40)
        assert not world.deleted


@pytest.mark.parametrize("shape", [(1, 0), (2, 1)])
def test_t8_a_server_that_hangs_is_replaced_within_12_s_where_nothing_interrupts(make_world, shape):
    for tenths in range(0, 40, 7):
        world = make_world(*shape)
        at = 5 + tenths / 10
        world.stopped = {names_of(world)[0]: [(at, 10**6)]}
        world.run(20)
        assert min(world.deleted) <= at + 12.5


def test_t8_when_nothing_answers_for_minutes_the_servers_are_replaced_without_charge(make_world):
    """Everything is silent at the same time and no witness is left: the observer or the node may be the cause. Nothing
    is replaced for 5 minutes, and nothing is charged."""
    world = make_world(2, 0)
    world.stopped = {name: [(5, 10**6)] for name in (*names_of(world), "worker")}
    world.run(295)
    assert not world.deleted
    world.run(340, since=295)
    assert {(d.cause, d.charged) for d in world.cluster.deaths} == {("Unresponsive", False)}
    assert world.cluster.status["roles"]["ParameterServer"]["restarts"] == 0


def test_o5_all_servers_silent_is_not_charged_though_a_worker_confirms_it(make_world):
    world = make_world(2, 0)
    world.stopped = {name: [(5, 10**6)] for name in names_of(world)}
    world.run(25)
    assert {(d.index, d.cause, d.charged) for d in world.cluster.deaths} == {
        (0, "Unresponsive", False),
        (1, "Unresponsive", False),
    }
