"""O1, O2: a job becomes its objects, with any failure in between; running again changes nothing."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from backstay_operator import errors
from backstay_operator.bus import Called, Changed, LeadChanged, PodEnded, Progressed
from backstay_operator.rights import EVENTS, JOBS, NETWORK_POLICIES, PODS, SECRETS, SERVICES
from backstay_spec import contract
from backstay_spec.job_report import JobReport
from backstay_spec.observed import Contact, Progress
from backstay_spec.token import token_for

from .fake_pods import KEY, Json, MakeJob, crash, names, of_role, run_all, status


def running_on(kube: Any, operator_on: Any, job: Json) -> Any:
    """Returns an operator whose job has pods that run."""
    kube.put(JOBS, "team", job)
    operator = operator_on(kube)
    operator.settle()
    run_all(kube)
    operator.settle()
    return operator


def test_a_job_becomes_its_objects_all_owned_by_it(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    kube.put(JOBS, "team", make_job())
    operator = operator_on(kube)
    operator.settle()
    uid = kube.objects["trainingjobs", *KEY]["metadata"]["uid"]
    assert len(names(kube)) == 5
    assert len(kube.all(SERVICES)) == 2
    assert len(kube.all(NETWORK_POLICIES)) == 1
    (secret,) = kube.all(SECRETS)
    assert base64.b64decode(secret["data"]["token"]).decode() == token_for(b"k" * 32, uid)
    for resource in (PODS, SERVICES, SECRETS, NETWORK_POLICIES):
        for obj in kube.all(resource):
            assert [owner["uid"] for owner in obj["metadata"]["ownerReferences"]] == [uid]
            assert "finalizers" not in obj["metadata"]
    assert "finalizers" not in kube.objects["trainingjobs", *KEY]["metadata"]
    assert set(status(kube)["incarnations"].values()) == {1}
    assert operator.metrics.registry.get_sample_value("backstay_operator_pods_created_total", {"role": "Worker"}) == 3


def test_running_again_writes_nothing(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    kube.put(JOBS, "team", make_job())
    operator = operator_on(kube)
    operator.settle()
    before = len(kube.writes())
    for _ in range(5):
        operator.reconcile()
    assert len(kube.writes()) == before


def test_running_again_before_the_watch_shows_anything_writes_nothing(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    """The overlay of our writes replaces the watch."""
    kube.put(JOBS, "team", make_job())
    operator = operator_on(kube)
    operator.show()
    for _ in range(6):
        operator.reconcile()
    assert len(names(kube)) == 5
    assert kube.count("create", "pods") == 5
    assert kube.count("get", "pods") == 0
    before = len(kube.writes())
    operator.reconcile()
    assert len(kube.writes()) == before


def test_incarnations_are_on_record_before_their_pods_are_created(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    kube.put(JOBS, "team", make_job())

    def check(verb: str, plural: str, _: str) -> None:
        if (verb, plural) == ("create", "pods"):
            assert len(status(kube)["incarnations"]) == 5

    kube.fail = check
    operator_on(kube).settle()
    assert len(names(kube)) == 5


def test_a_dead_worker_is_replaced_and_only_it(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    operator = running_on(kube, operator_on, make_job())
    dead = of_role(kube, "worker")[1]["metadata"]["name"]
    others = set(names(kube)) - {dead}
    crash(kube, dead, 137)
    operator.show()
    operator.seconds += 0.05
    operator.reconcile()
    fresh = set(names(kube)) - others - {dead}
    assert len(fresh) == 1
    assert others <= set(names(kube))
    value = operator.metrics.registry.get_sample_value
    assert value("backstay_operator_pods_replaced_total", {"role": "Worker", "cause": "Crashed"}) == 1
    assert value("backstay_operator_replacement_duration_seconds_count") == 1
    assert value("backstay_operator_replacement_duration_seconds_sum") == pytest.approx(0.05)
    assert value("backstay_job_restarts_total", {"namespace": "team", "training_job": "digits", "role": "Worker"}) == 1


def test_the_time_of_a_replacement_begins_with_the_end_of_the_pod_that_it_replaces(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    """An older pod of the slot may end, and be deleted, after it has got its replacement."""
    operator = running_on(kube, operator_on, make_job())
    slot = {"backstay.dev/role": "worker", "backstay.dev/index": "1"}

    def dies() -> str:
        newest = of_role(kube, "worker")
        (dead,) = [
            pod["metadata"]["name"]
            for pod in newest
            if slot.items() <= pod["metadata"]["labels"].items() and pod["status"]["phase"] == "Running"
        ]
        kube.change(PODS, "team", dead, {"metadata": {"deletionTimestamp": "2099-01-01T00:00:00Z"}})
        operator.show()
        operator.reconcile()
        return dead

    first = dies()
    crash(kube, first, 143)
    operator.show()
    operator.settle()
    kube.remove(PODS, "team", first)
    operator.show()
    operator.settle()
    run_all(kube)
    operator.settle()
    operator.seconds += 3600
    operator.settle()
    dies()
    value = operator.metrics.registry.get_sample_value
    assert value("backstay_operator_replacement_duration_seconds_count") == 2
    assert value("backstay_operator_replacement_duration_seconds_sum") < 60


def test_a_pod_of_an_earlier_job_with_the_same_name_reports_nothing(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    """The server may store for a minute after the job was replaced, and its last message has another step."""
    operator = running_on(kube, operator_on, make_job())
    memory = operator.reconciler._known.memory(KEY)
    operator.bus.send(
        Progressed(KEY, Progress(operator.now(), reached=frozenset({0}), report=JobReport(term=1, step=3)))
    )
    server = copy.deepcopy(of_role(kube, "parameter-server")[0])
    server["metadata"]["uid"] = "of-the-old-job"
    message = json.dumps({"term": 9, "step": 100})
    state = {"terminated": {"exitCode": 143, "message": message}}
    server["status"] = {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": state}]}
    for uid, step in (("another", 3), (server["metadata"]["ownerReferences"][0]["uid"], 100)):
        server["metadata"]["ownerReferences"][0]["uid"] = uid
        operator.bus.send(PodEnded(KEY, server))
        assert memory.progress.report.step == step
        assert bool(memory.ended) == (step == 100)


def test_an_answer_of_an_earlier_job_with_the_same_name_does_not_count(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    operator = running_on(kube, operator_on, make_job())
    memory = operator.reconciler._known.memory(KEY)
    progress = Progress(operator.now(), reached=frozenset({0}), report=JobReport(term=9, step=100))
    contact = Contact(operator.now(), {}, {}, frozenset(), frozenset())
    for uid, counts in (("of-the-old-job", False), (memory.uid, True)):
        token = token_for(b"k" * 32, uid)
        operator.bus.send(Called(KEY, contact, token))
        operator.bus.send(Progressed(KEY, progress, token))
        assert (memory.contact is not None, memory.progress is not None) == (counts, counts)


def test_an_operator_that_does_not_act_reports_no_job(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    """A round of calls, or a reconciliation, may end after the Lease was lost."""
    kube.put(JOBS, "team", make_job())
    operator = operator_on(kube)
    operator.settle()
    operator.metrics.job.clear()
    operator.leads = False
    operator.bus.send(
        Progressed(KEY, Progress(operator.now(), reached=frozenset({0}), report=JobReport(term=1, step=3)))
    )
    operator.reconciler._report(KEY)
    assert b'training_job="digits"' not in generate_latest(operator.metrics.registry)


def test_an_operator_that_acts_again_does_not_report_an_interruption(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    """It called no server in the meantime, and training continued."""
    operator = running_on(kube, operator_on, make_job())

    def progress(step: int) -> Progressed:
        report = JobReport(term=1, step=step, world=3)
        return Progressed(KEY, Progress(operator.now(), reached=frozenset({0, 1}), report=report))

    for step in (1, 2):
        operator.bus.send(progress(step))
        operator.seconds += 11
        operator.settle()
    assert condition(kube, "Training")["status"] == "True"
    operator.seconds += 400
    operator.bus.send(LeadChanged(True))
    operator.settle()
    assert condition(kube, "Training")["status"] == "True"
    operator.bus.send(progress(60))
    operator.seconds += 11
    operator.settle()
    assert status(kube)["step"] == 60
    assert not [entry for entry in status(kube)["history"] if entry["reason"] == "TrainingInterrupted"]


def condition(kube: Any, kind: str) -> Json:
    """Returns a condition of the job."""
    return next(found for found in status(kube)["conditions"] if found["type"] == kind)


def test_a_pod_of_a_queue_is_created_when_the_old_one_has_ended(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    """O9: Kueue counts the old pod, and would delete the new one. The operator sends no request while it waits."""
    job = make_job()
    job["spec"]["scheduling"] = {"queue": "gpus"}
    kube.put(JOBS, "team", job)
    operator = operator_on(kube)
    operator.settle()
    for name in names(kube):
        kube.change(PODS, "team", name, {"spec": {"nodeName": "node-1"}})
    run_all(kube)
    operator.settle()
    old = of_role(kube, "worker")[1]["metadata"]["name"]
    kube.change(PODS, "team", old, {"metadata": {"deletionTimestamp": "2099-01-01T00:00:00Z"}})
    operator.show()
    operator.settle()
    assert len(of_role(kube, "worker")) == 3
    sent = len(kube.requests)
    operator.settle()
    assert len(kube.requests) == sent
    crash(kube, old, 143)
    operator.show()
    operator.settle()
    groups = {pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] for pod in of_role(kube, "worker")}
    assert (len(of_role(kube, "worker")), len(groups)) == (4, 1)


def test_a_worker_that_did_no_work_waits_and_is_counted_when_it_is_replaced(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    """O4: a rank that crashes before its first gradient backs off."""
    kube.put(JOBS, "team", make_job())
    operator = operator_on(kube)
    operator.settle()
    crash(kube, of_role(kube, "worker")[1]["metadata"]["name"])
    operator.show()
    wait = operator.reconcile()
    assert 0 < wait <= 2
    value = operator.metrics.registry.get_sample_value
    assert value("backstay_operator_pod_deaths_total", {"role": "Worker", "cause": "Crashed"}) == 1
    assert value("backstay_operator_pods_replaced_total", {"role": "Worker", "cause": "Crashed"}) == 0
    operator.seconds += 3
    operator.reconcile()
    assert len(of_role(kube, "worker")) == 4
    assert value("backstay_operator_pods_replaced_total", {"role": "Worker", "cause": "Crashed"}) == 1
    assert value("backstay_operator_replacement_duration_seconds_count") == 0


def test_a_restarted_operator_changes_nothing(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    """O5: no pod restarted, none doubled, no count lost."""
    operator = running_on(kube, operator_on, make_job())
    crash(kube, of_role(kube, "worker")[0]["metadata"]["name"])
    operator.settle()
    before, pods = status(kube), names(kube)
    again = operator_on(kube)
    again.seconds = operator.seconds
    again.settle()
    assert names(kube) == pods
    assert status(kube)["incarnations"] == before["incarnations"]
    assert status(kube)["roles"] == before["roles"]


def test_a_pod_deleted_while_the_operator_was_away_is_found_missing_by_a_live_get(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    first = running_on(kube, operator_on, make_job())
    gone = of_role(kube, "worker")[2]["metadata"]["name"]
    kube.remove(PODS, "team", gone)
    again = operator_on(kube)
    again.seconds = first.seconds
    again.settle()
    assert ("get", "pods", gone) in kube.requests
    assert gone not in names(kube)
    assert len(of_role(kube, "worker")) == 3


def test_a_deletion_without_a_watch_event_is_found_by_comparing_with_a_list(
    kube: Any, operator_on: Any, make_job: MakeJob, virtual: Any
) -> None:
    """Kopf lists again after a gap, and does not report the deletions in between."""
    from backstay_operator.verify import Verifier

    operator = running_on(kube, operator_on, make_job())
    gone = of_role(kube, "worker")[0]["metadata"]["name"]
    kube.remove(PODS, "team", gone)
    operator.shown = len(kube.history)  # the watch missed it
    operator.reconcile()
    assert len(of_role(kube, "worker")) == 2
    verifier = Verifier(kube, operator.cluster, None, operator.metrics, operator.bus, every=300)
    operator.marked.clear()
    assert virtual(verifier.compare()) == [(PODS, gone)]
    assert operator.marked == [KEY]
    assert virtual(verifier.compare()) == []
    operator.settle()
    assert len(of_role(kube, "worker")) == 3


def test_foreign_objects_are_left_alone(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    labels = {contract.LABEL_JOB: "digits", contract.LABEL_ROLE: "worker", contract.LABEL_INDEX: "0"}
    kube.put(PODS, "team", {"metadata": {"name": "stranger", "labels": {**labels, contract.LABEL_INCARNATION: "9"}}})
    kube.put(JOBS, "team", make_job())
    operator_on(kube).settle()
    assert "stranger" in names(kube)
    assert status(kube)["incarnations"]["worker-0"] == 1
    assert not [request for request in kube.writes() if request[2] == "stranger"]


def test_a_name_taken_by_another_owner_is_retried_and_never_adopted(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    kube.put(JOBS, "team", make_job())
    first = operator_on(kube)
    first.settle()
    taken = of_role(kube, "worker")[0]["metadata"]["name"]
    for resource in (PODS, SERVICES, SECRETS, NETWORK_POLICIES):
        for name in names(kube, resource):
            kube.remove(resource, "team", name)
    kube.objects["trainingjobs", *KEY].pop("status")
    kube.put(PODS, "team", {"metadata": {"name": taken, "ownerReferences": [{"uid": "other", "controller": True}]}})
    operator = operator_on(kube)
    for _ in range(6):
        operator.show()
        operator.reconcile()
        operator.seconds += 6
    assert kube.objects["pods", "team", taken]["metadata"]["ownerReferences"][0]["uid"] == "other"
    assert ("delete", "pods", taken) not in kube.requests
    kube.remove(PODS, "team", taken)
    operator.settle()
    assert len(of_role(kube, "worker")) == 3
    assert taken in names(kube)


def test_a_create_whose_answer_was_lost_is_not_made_twice(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    kube.put(JOBS, "team", make_job())
    lost: set[str] = set()

    def lose(verb: str, plural: str, name: str) -> Exception | None:
        if verb == "create" and name not in lost and plural != "events":
            lost.add(name)
            return errors.Unreachable("the answer was lost")
        return None

    kube.lose = lose
    operator = operator_on(kube)
    for _ in range(12):
        operator.reconcile()
        operator.seconds += 1
        operator.show(0)
        if operator.shown == 0:
            operator.show(1)  # the job itself; nothing else is ever shown
    assert len(names(kube)) == len(set(names(kube))) == 5
    assert set(status(kube)["incarnations"].values()) == {1}


def test_a_pod_that_the_api_refuses_as_invalid_fails_the_job(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    kube.put(JOBS, "team", make_job())

    def fail(verb: str, plural: str, _: str) -> Exception | None:
        if (verb, plural) == ("create", "pods"):
            return errors.Invalid("create pods", 422, "Invalid", "spec.containers[0].image: Required value")
        return None

    kube.fail = fail
    operator = operator_on(kube)
    operator.settle()
    assert status(kube)["phase"] == "Failed"
    (failed,) = [condition for condition in status(kube)["conditions"] if condition["type"] == "Failed"]
    assert "Required value" in failed["message"]
    assert names(kube) == []


def test_a_quota_delays_the_pods_it_hits_and_no_others(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    kube.put(JOBS, "team", make_job())
    full = True

    def fail(verb: str, plural: str, name: str) -> Exception | None:
        if full and (verb, plural) == ("create", "pods") and "-worker-2-" in name:
            return errors.Forbidden("create pods", 403, "Forbidden", "exceeded quota: pods")
        return None

    kube.fail = fail
    operator = operator_on(kube)
    for _ in range(4):
        operator.show()
        operator.reconcile()
        operator.seconds += 1
    assert len(names(kube)) == 4
    tries = sum(1 for verb, plural, name in kube.requests if "-worker-2-" in name and verb == "create")
    assert tries <= 2, "a quota is not asked about again and again"
    full = False
    operator.settle()
    assert len(names(kube)) == 5
    assert status(kube)["incarnations"]["worker-2"] == 1


@pytest.mark.parametrize(
    "error", [errors.Busy("create", 500, "InternalError", "failed calling webhook"), errors.Unreachable("x")]
)
@pytest.mark.parametrize("pods_per_rank", [1, 2])
def test_pods_are_created_again_when_their_creates_no_longer_fail(
    kube: Any, operator_on: Any, make_job: MakeJob, error: Exception, pods_per_rank: int
) -> None:
    """A webhook does not answer. The status has the reason, and not each try takes a new incarnation."""
    job = make_job()
    job["spec"]["workers"]["podsPerRank"] = pods_per_rank
    kube.put(JOBS, "team", job)
    operator = operator_on(kube)
    operator.settle()
    made = len(names(kube))
    failing = True
    kube.fail = lambda verb, plural, _: error if failing and (verb, plural) == ("create", "pods") else None
    crash(kube, of_role(kube, "worker")[-1]["metadata"]["name"])
    for _ in range(40):
        operator.show()
        operator.reconcile()
        operator.seconds += 1
    tries = sum(1 for verb, plural, _ in kube.requests if (verb, plural) == ("create", "pods")) - made
    assert tries <= 20 * pods_per_rank
    assert status(kube)["incarnations"]["worker-2"] <= (2 if isinstance(error, errors.Busy) else 8)
    if isinstance(error, errors.Busy):
        (created,) = [each for each in status(kube)["conditions"] if each["type"] == "PodsCreated"]
        assert "webhook" in created["message"]
    failing = False
    operator.seconds += 60
    operator.settle()
    last = status(kube)["incarnations"]["worker-2"]
    found = [pod for pod in of_role(kube, "worker") if pod["metadata"]["labels"]["backstay.dev/index"] == "2"]
    newest = [pod for pod in found if pod["metadata"]["labels"]["backstay.dev/incarnation"] == str(last)]
    assert len(newest) == pods_per_rank


def test_o9_a_quota_of_two_pods_goes_to_the_servers_and_not_to_workers(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    """The requests of one plan run at the same time; a worker's must not overtake a server's."""
    kube.put(JOBS, "team", make_job())
    limit = 1

    def fail(verb: str, plural: str, _: str) -> Exception | None:
        if (verb, plural) == ("create", "pods") and len(names(kube)) >= limit:
            return errors.Forbidden("create pods", 403, "Forbidden", "exceeded quota: pods")
        return None

    kube.fail = fail
    operator = operator_on(kube)
    for _ in range(4):
        operator.show()
        operator.reconcile()
        operator.seconds += 6
    assert [name for name in names(kube) if "-ps-" not in name] == []
    assert len(names(kube)) == 1
    assert not [name for verb, plural, name in kube.requests if verb == "create" and "-worker-" in name]
    limit = 10
    operator.seconds += 6
    operator.settle()
    assert len(names(kube)) == 5
    assert set(status(kube)["incarnations"].values()) == {1}


def test_a_user_who_changes_the_job_meanwhile_is_not_overwritten(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    kube.put(JOBS, "team", make_job())
    operator = operator_on(kube)
    operator.settle()
    kube.change(JOBS, "team", "digits", {"spec": {"workers": {"replicas": 4}}})
    crash(kube, of_role(kube, "worker")[0]["metadata"]["name"])
    operator.show()
    stale = operator.indexes[JOBS][KEY][0]
    old = type(stale)(stale.uid, stale.name, stale.version - 1, _with_old_version(stale.value))
    operator.indexes[JOBS][KEY] = [old]
    operator.settle()
    assert kube.objects["trainingjobs", *KEY]["spec"]["workers"]["replicas"] == 4
    assert len([pod for pod in of_role(kube, "worker") if pod["status"]["phase"] == "Pending"]) == 4


def _with_old_version(value: Json) -> Json:
    metadata = {**value["metadata"], "resourceVersion": "1", "generation": 1}
    return {**value, "metadata": metadata, "spec": {**value["spec"], "workers": {"replicas": 3}}}


def test_an_invalid_spec_that_was_stored_all_the_same_fails_with_the_reason_and_no_pods(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    """An older CRD, or none, may have let it in."""
    kube.put(JOBS, "team", make_job(workers={"replicas": -3}, nonsense=1))
    operator = operator_on(kube)
    operator.settle()
    assert status(kube)["phase"] == "Failed"
    (failed,) = [condition for condition in status(kube)["conditions"] if condition["type"] == "Failed"]
    assert failed["reason"] == "InvalidSpec"
    assert "spec.workers.replicas" in failed["message"]
    assert names(kube) == []
    assert [event["reason"] for event in kube.all(EVENTS)] == ["Failed"]


def test_a_status_that_cannot_be_written_stops_everything_after_it(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    kube.put(JOBS, "team", make_job())
    operator = operator_on(kube)
    operator.show()
    busy = errors.Busy("x", 503, "", "")
    kube.fail = lambda verb, plural, _: busy if (verb, plural) == ("patch", "trainingjobs") else None
    for _ in range(4):
        with pytest.raises(errors.Busy):
            operator.reconcile()
    assert names(kube) == []
    kube.fail = lambda *_: None
    operator.settle()
    assert len(names(kube)) == 5


def test_events_that_cannot_be_sent_delay_nothing(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    kube.put(JOBS, "team", make_job())
    kube.fail = lambda _, plural, __: errors.Forbidden("x", 403, "Forbidden", "") if plural == "events" else None
    operator = operator_on(kube)
    operator.settle()
    assert len(names(kube)) == 5
    assert operator.metrics.registry.get_sample_value("backstay_operator_errors_total", {"kind": "event"}) > 0


def test_an_operator_that_does_not_lead_does_nothing(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    kube.put(JOBS, "team", make_job())
    operator = operator_on(kube)
    operator.leads = False
    operator.show()
    assert operator.reconcile() is None
    assert kube.requests == []


def test_a_job_made_again_under_its_name_starts_with_nothing(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    kube.put(JOBS, "team", make_job())
    operator = operator_on(kube)
    operator.settle()
    old = set(names(kube))
    for resource in (PODS, SERVICES, SECRETS, NETWORK_POLICIES, JOBS):
        for name in names(kube, resource):
            kube.remove(resource, "team", name)
    operator.settle()
    assert "digits" not in str(list(operator.metrics.registry.collect()))
    kube.put(JOBS, "team", make_job())
    operator.settle()
    assert len(names(kube)) == 5
    assert not old & set(names(kube))


def test_the_round_of_calls_goes_to_the_servers_that_run(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    kube.put(JOBS, "team", make_job(checkpoint={"uri": "file:///c", "everySteps": 5}))
    operator = operator_on(kube)
    operator.settle()
    assert operator.reconciler.round(KEY) is None
    run_all(kube)
    operator.settle()
    todo = operator.reconciler.round(KEY)
    assert [(server.shard, server.incarnation) for server in todo.servers] == [(0, 1), (1, 1)]
    assert all(server.address.endswith(":7077") for server in todo.servers)
    assert (todo.world, todo.stall_seconds, todo.checkpoint.every_steps) == (3, 300, 5)
    assert todo.token == token_for(b"k" * 32, kube.objects["trainingjobs", *KEY]["metadata"]["uid"])
    crash(kube, of_role(kube, "parameter-server")[0]["metadata"]["name"])
    operator.show()
    assert [server.shard for server in operator.reconciler.round(KEY).servers] == [1]


def test_o8_answers_with_nothing_new_cost_one_plan_in_ten_seconds(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    """Servers answer every 2 s. A status that does not change is written long ago, and that must not mean: plan now."""
    kube.put(JOBS, "team", make_job())
    operator = operator_on(kube)
    operator.settle()
    progress = Progress(taken=operator.now(), reached=frozenset({0, 1}), report=JobReport(term=1, step=7))
    operator.bus.send(Progressed(KEY, progress))
    operator.settle()
    plans, due = 0, float("inf")

    def changed(event: Changed) -> None:
        nonlocal due
        due = min(due, operator.seconds + event.after)

    operator.bus.subscribe(Changed, changed)
    for _ in range(30):
        operator.seconds += 2.0
        operator.bus.send(Progressed(KEY, progress))
        if operator.seconds >= due:
            plans, due = plans + 1, float("inf")
            operator.reconcile()
    assert 5 <= plans <= 6


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_killed_at_any_request_and_started_again_there_is_never_a_second_pod_of_one_place(
    new_kube: Any, operator_on: Any, make_job: MakeJob, data: st.DataObject
) -> None:
    """O1, O2, O5: the operator dies before or after any request; what it left is picked up, nothing is doubled."""
    kube = new_kube()
    kube.put(JOBS, "team", make_job(parameterServers={"replicas": 1}, workers={"replicas": 2}))
    seconds = 0.0
    for _ in range(data.draw(st.integers(1, 3), label="lives")):
        left = data.draw(st.integers(0, 14), label="requests until it dies")
        late = data.draw(st.booleans(), label="dies after the request was carried out")

        def die(*_: str) -> Exception | None:
            nonlocal left
            left -= 1
            return Killed() if left < 0 else None

        setattr(kube, "lose" if late else "fail", die)
        operator = operator_on(kube)
        operator.seconds = seconds
        with contextlib.suppress(Killed):
            operator.settle()
        seconds = operator.seconds + 1
        kube.fail = kube.lose = lambda *_: None
        if data.draw(st.booleans(), label="a worker crashes meanwhile"):
            alive = [pod for pod in of_role(kube, "worker") if pod["status"]["phase"] in ("Pending", "Running")]
            if alive:
                crash(kube, alive[0]["metadata"]["name"])
    operator = operator_on(kube)
    operator.seconds = seconds
    operator.settle()
    for _ in range(8):  # back-offs run out
        run_all(kube)
        operator.seconds += 70
        operator.settle()
    alive = [pod for pod in kube.all(PODS) if pod["status"]["phase"] in ("Pending", "Running")]
    places = [
        (pod["metadata"]["labels"][contract.LABEL_ROLE], pod["metadata"]["labels"][contract.LABEL_INDEX])
        for pod in alive
        if not pod["metadata"].get("deletionTimestamp")
    ]
    assert sorted(places) == [("parameter-server", "0"), ("worker", "0"), ("worker", "1")]
    crashed = sum(1 for pod in of_role(kube, "worker") if pod["status"]["phase"] == "Failed")
    assert status(kube)["roles"]["Worker"]["restarts"] >= crashed
    for pod in alive:
        labels = pod["metadata"]["labels"]
        place = f"{labels[contract.LABEL_ROLE]}-{labels[contract.LABEL_INDEX]}"
        assert status(kube)["incarnations"][place] == int(labels[contract.LABEL_INCARNATION])


class Killed(BaseException):
    """The process ends here: no handler of the operator's sees it."""
