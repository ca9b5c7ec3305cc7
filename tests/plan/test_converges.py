"""O1, O2, O4, O5: after any events about the pods, in any order, the planner reaches the expected state.

A random history has all actions of kubelets, nodes, people and operators on one job. After every step the planner runs
once, or until no action is left, or is killed while it carries out a plan.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from backstay_spec import contract
from backstay_spec.observed import Stalled
from backstay_spec.planner.promotion import STARTS_WITHIN

BUDGET = 2
ROLE_FIELDS = {"parameter-server": "ParameterServer", "worker": "Worker", "evaluator": "Evaluator"}


@pytest.mark.parametrize(("standbys", "members"), [(0, 1), (1, 1), (0, 3)])
def test_any_history_converges(make_cluster, standbys, members):
    class History(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.cluster = make_cluster(
                {
                    "parameterServers": {"replicas": 2, "maxRestarts": BUDGET, "standbys": standbys},
                    "workers": {"replicas": 3, "maxRestarts": BUDGET, "podsPerRank": members},
                    "evaluator": {"maxRestarts": BUDGET},
                    "checkpoint": {"uri": "file:///ckpt"},
                    "runPolicy": {"pendingDeadlineSeconds": 10**6},
                }
            )
            self.crashes = 0

        def some(self, data, names):
            return data.draw(st.sampled_from(sorted(names)))

        def awaited_standby(self, place):
            active = self.cluster.status.get("active", {}).get(place, 10**6)
            for name in self.cluster.living():
                pod = self.cluster.pods[name]
                labels, uid = pod["metadata"]["labels"], pod["metadata"]["uid"]
                if f"{labels[contract.LABEL_ROLE]}-{labels[contract.LABEL_INDEX]}" == place:
                    made = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
                    pending = pod["status"].get("phase") in (None, "Pending")
                    starts = pending and self.cluster.now - made < STARTS_WITHIN
                    yield int(labels[contract.LABEL_INCARNATION]) > active and (uid in self.cluster.silent or starts)

        def may_store(self, place):
            """Returns whether the active server of a shard with a standby stores a checkpoint before it ends."""
            active = self.cluster.status.get("active", {}).get(place)
            for pod in self.cluster.pods.values():
                labels, until = pod["metadata"]["labels"], pod["metadata"].get("deletionTimestamp")
                slot = f"{labels[contract.LABEL_ROLE]}-{labels[contract.LABEL_INDEX]}"
                if slot == place and int(labels[contract.LABEL_INCARNATION]) == active and until is not None:
                    return pod["status"]["phase"] == "Running" and datetime.fromisoformat(until) > self.cluster.now
            return False

        def rank_of(self, name):
            """Returns the pods of the pod's rank and incarnation, by member."""
            labels = self.cluster.pods[name]["metadata"]["labels"]
            same = (contract.LABEL_ROLE, contract.LABEL_INDEX, contract.LABEL_INCARNATION)
            return {
                int(pod["metadata"]["labels"].get(contract.LABEL_MEMBER, "0")): other
                for other, pod in self.cluster.pods.items()
                if all(pod["metadata"]["labels"][label] == labels[label] for label in same)
            }

        def whole(self, name):
            """Returns whether all pods of a pod's rank live. The first one must, and others may have ended in order."""
            rank = self.rank_of(name)
            is_worker = self.cluster.pods[name]["metadata"]["labels"][contract.LABEL_ROLE] == contract.ROLE_WORKER
            there = [n for n in rank.values() if n in self.cluster.living() or self.left_in_order(n)]
            return rank.get(0) in self.cluster.living() and len(there) == (members if is_worker else 1)

        def left_in_order(self, name):
            pod = self.cluster.pods[name]
            return pod["status"]["phase"] == "Succeeded" and not pod["metadata"].get("deletionTimestamp")

        def ended(self):
            return self.cluster.status.get("phase") in ("Failed", "Succeeded")

        # Possible events.

        @rule(data=st.data(), ready=st.booleans())
        @precondition(lambda self: self.cluster.living())
        def runs(self, data, ready):
            self.cluster.run(self.some(data, self.cluster.living()), ready=ready)

        @rule(data=st.data(), code=st.sampled_from([0, 1, 137, 143]))
        @precondition(lambda self: self.cluster.living())
        def ends(self, data, code):
            self.cluster.end(self.some(data, self.cluster.living()), code)
            self.crashes += 1

        @rule(data=st.data(), seconds=st.sampled_from([0, 2]), times=st.integers(1, 3))
        @precondition(lambda self: self.cluster.living())
        def crash_one_after_the_other(self, data, seconds, times):
            for _ in range(times):
                living = self.cluster.living()
                if living:
                    name = self.some(data, living)
                    self.cluster.run(name)
                    self.cluster.tick(seconds)
                    self.cluster.run(name)
                    self.cluster.end(name, 1)
                    self.crashes += 1
                self.cluster.apply(self.cluster.plan())

        @rule(data=st.data())
        @precondition(lambda self: self.cluster.living())
        def is_deleted(self, data):
            self.cluster.delete(self.some(data, self.cluster.living()))

        @rule(data=st.data(), reason=st.sampled_from(["EvictionByEvictionAPI", "DeletionByTaintManager"]))
        @precondition(lambda self: self.cluster.living())
        def is_disrupted(self, data, reason):
            self.cluster.disrupt(self.some(data, self.cluster.living()), reason)

        @rule(data=st.data())
        @precondition(lambda self: self.cluster.pods)
        def vanishes(self, data):
            self.cluster.vanish(self.some(data, self.cluster.pods))

        @rule()
        def terminations_end(self):
            self.cluster.bury()

        @rule(seconds=st.sampled_from([0.3, 1, 5, 61]))
        def time_passes(self, seconds):
            self.cluster.tick(seconds)

        @rule(world=st.integers(1, 5), rank=st.integers(0, 4), incarnation=st.integers(1, 3))
        @precondition(lambda self: self.cluster.status)
        def servers_answer(self, world, rank, incarnation):
            self.cluster.answer(world=world, step=3, contributed={rank: incarnation})

        @rule(data=st.data(), in_sync=st.sets(st.integers(0, 1)), ago=st.sampled_from([0, 30]))
        @precondition(lambda self: self.cluster.status)
        def all_servers_answer(self, data, in_sync, ago):
            cluster = self.cluster
            for name in sorted(name for name in cluster.pods if "-ps-" in name):
                if data.draw(st.booleans()):
                    cluster.speak(name)
                else:
                    cluster.silence(name, since=cluster.now - timedelta(seconds=ago))
            newest = cluster.status.get("incarnations", {})
            following = {shard: newest.get(f"parameter-server-{shard}", 1) for shard in in_sync}
            cluster.answer(step=3, reached=frozenset({0, 1}), in_sync=following)

        @rule(data=st.data())
        @precondition(lambda self: any("-worker-" in n for n in self.cluster.living()))
        def hangs(self, data):
            name = self.some(data, {n for n in self.cluster.living() if "-worker-" in n})
            labels = self.cluster.pods[name]["metadata"]["labels"]
            hung = Stalled(int(labels[contract.LABEL_INDEX]), int(labels[contract.LABEL_INCARNATION]))
            self.cluster.answer(step=3, stalled=(hung,))
            self.crashes += 1

        @rule(replicas=st.integers(1, 5))
        def is_scaled(self, replicas):
            self.cluster.edit(workers={"replicas": replicas})

        @rule(flag=st.booleans())
        def is_suspended(self, flag):
            self.cluster.edit(runPolicy={"suspend": flag})

        @rule(prefix=st.sampled_from(["mnist-worker", "mnist-ps-0", "mnist-"]))
        def creates_are_refused(self, prefix):
            self.cluster.refuse = {prefix: ("Forbidden", "exceeded quota")}

        @rule()
        def creates_are_accepted(self):
            self.cluster.refuse = {}

        @rule(data=st.data())
        @precondition(lambda self: self.cluster.services)
        def a_service_is_deleted(self, data):
            del self.cluster.services[self.some(data, self.cluster.services)]

        @rule()
        def the_operator_restarts(self):
            self.cluster.restart_operator()

        @rule(data=st.data())
        def the_operator_dies_in_the_middle(self, data):
            """After the status, and any number of the actions."""
            todo = self.cluster.plan()
            self.cluster.write(todo)
            for action in todo.actions[: data.draw(st.integers(0, len(todo.actions)))]:
                self.cluster.act(action)
            self.cluster.restart_operator()

        @rule()
        def is_planned_once(self):
            self.cluster.apply(self.cluster.plan())

        @rule()
        def is_settled(self):
            """O2: then no place is without a pod because an old one still terminates."""
            cluster = self.cluster
            cluster.settle(30)
            if members > 1:  # the pod of a rank that has the cause of its death may be seen last
                cluster.tick(5)
                cluster.settle(30)
            if self.ended() or cluster.refuse or cluster.memory.refused or cluster.job.spec.run_policy.suspend:
                return
            current, active = {}, cluster.status.get("active", {})
            for name, pod in cluster.pods.items():
                labels = pod["metadata"]["labels"]
                place = f"{labels[contract.LABEL_ROLE]}-{labels[contract.LABEL_INDEX]}"
                incarnation = int(labels[contract.LABEL_INCARNATION])
                # The first pod of a rank stands for all.
                member = int(labels.get(contract.LABEL_MEMBER, "0"))
                if active.get(place, incarnation) == incarnation and not member:
                    current[place] = max(current.get(place, (0,)), (incarnation, name))
            living = {place for place, (_, name) in current.items() if self.whole(name)}
            for place in cluster.status["incarnations"]:
                rank = int(place.rpartition("-")[2])
                wanted = not place.startswith("worker") or rank < cluster.job.spec.workers.replicas
                waits = cluster.status.get("backoff", {}).get(place, {}).get("notBefore")
                # With exit code 0 it may be the first that leaves a complete job, which the servers must confirm.
                left = place in current and cluster.pods[current[place][1]]["status"]["phase"] == "Succeeded"
                # It starts, or is called again, before it is promoted or given up.
                asked = any(self.awaited_standby(place)) or self.may_store(place)
                assert place in living or waits or left or asked or not wanted, f"{place} has no pod"

        # Invariants.

        @invariant()
        def the_budget_is_never_exceeded(self):
            for role, counters in self.cluster.status.get("roles", {}).items():
                assert counters["restarts"] <= BUDGET, role
                assert counters["restarts"] == sum(
                    d.charged for d in self.cluster.deaths if ROLE_FIELDS[d.role] == role
                ), "each charged death is counted once"

        @invariant()
        def no_pod_dies_twice(self):
            dead = [d.pod for d in self.cluster.deaths]
            assert len(dead) == len(set(dead))

        @invariant()
        @precondition(lambda self: self.ended())
        def a_job_that_has_ended_knows_whether_its_pods_were_created(self):
            assert self.cluster.condition("PodsCreated")["status"] != "Unknown"

        # Where it must end.

        def teardown(self):
            cluster = self.cluster
            cluster.refuse = {}
            cluster.speak(*cluster.pods)  # a server that stays silent is replaced after minutes
            cluster.edit(runPolicy={"suspend": False})
            for _ in range(4):
                cluster.tick(70)
                if cluster.status:  # pods, and thus servers, are created after the first status
                    cluster.answer(step=9, world=cluster.job.spec.workers.replicas)
                cluster.settle(30)
                cluster.bury()
            if self.ended():
                assert self.crashes > 0, "disruptions and people never fail a job"
                assert not cluster.living()
                return
            wanted = {("parameter-server", i) for i in range(2)} | {("evaluator", 0)}
            wanted |= {("worker", i) for i in range(cluster.job.spec.workers.replicas)}
            found = {}
            for name in cluster.living():
                labels = cluster.pods[name]["metadata"]["labels"]
                assert self.whole(name), "with all pods of its rank"
                if int(labels.get(contract.LABEL_MEMBER, "0")):
                    continue
                place = (labels[contract.LABEL_ROLE], int(labels[contract.LABEL_INDEX]))
                found.setdefault(place, []).append(int(labels[contract.LABEL_INCARNATION]))
            assert set(found) == wanted
            spent = cluster.status["roles"]["ParameterServer"]["restarts"] == BUDGET
            for (role, index), living in found.items():
                newest, active = cluster.status["incarnations"][f"{role}-{index}"], cluster.status.get("active", {})
                serves = active.get(f"{role}-{index}", newest)
                allowed = [[serves, newest]] if role == "parameter-server" and standbys else [[newest]]
                if standbys and spent:
                    allowed.append([serves])
                assert sorted(living) in allowed, "as many pods in the place as it shall have, and the right ones"
            for shard in range(2):
                (service,) = [s for n, s in cluster.services.items() if n.startswith(f"mnist-ps-{shard}")]
                selected = service["spec"]["selector"][contract.LABEL_INCARNATION]
                newest = cluster.status["incarnations"][f"parameter-server-{shard}"]
                assert selected == str(cluster.status.get("active", {}).get(f"parameter-server-{shard}", newest))
            cluster.tick(60)
            assert cluster.plan().status is None

    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=100 if not standbys else 60,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            # Without `explain`, which traces every line.
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
