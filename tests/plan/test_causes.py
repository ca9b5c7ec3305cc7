"""O4: why a pod died, or why it cannot start, as read from its status."""

from __future__ import annotations

import json

import pytest

from backstay_spec.causes import Cause, exit_text, finite, obstacle_of, outcome_of, verdict_of

DELETED = {"deletionTimestamp": "2026-03-01T12:00:40Z", "deletionGracePeriodSeconds": 30}


def pod(status, **metadata):
    return {"metadata": metadata, "status": status}


def ended(code, reason="Error", message="", finished="2026-03-01T12:00:10Z"):
    state = {"exitCode": code, "reason": reason, "finishedAt": finished, "message": message}
    return {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": [{"name": "trainer", "state": {"terminated": state}}],
    }


def target(why, kind="DisruptionTarget", **more):
    condition = {"type": kind, "status": "True", "reason": why, "message": "because"}
    return {"phase": "Running", "conditions": [condition], **more}


@pytest.mark.parametrize(
    ("seen", "cause", "text"),
    [
        (pod(ended(1)), "Crashed", "exit code 1"),
        (pod(ended(139)), "Crashed", "exit code 139 (SIGSEGV)"),
        (
            pod(ended(128, "StartError", "no such file: pyton")),
            "Crashed",
            "exit code 128, StartError: no such file: pyton",
        ),
        (pod(ended(1, message="Traceback\n  line\nValueError: no")), "Crashed", "ValueError: no"),
        (pod(ended(1, message='{"reason": "ShapesDiffer", "message": "leaf w"}')), "Crashed", "ShapesDiffer: leaf w"),
        (
            pod(ended(1, message='{"result": "Trained", "step": 9, "stderr": "warming up\\nno place to export to"}')),
            "Crashed",
            "exit code 1; its standard error ends: warming up\nno place to export to",
        ),
        (pod(ended(0, "Completed")), "ExitedEarly", "exit code 0"),
        (
            pod(
                target("WorkloadEvictedDueToPreempted", kind="TerminationTarget"),
                deletionTimestamp="2026-03-01T12:00:05Z",
            ),
            "Evicted",
            "WorkloadEvictedDueToPreempted: because",
        ),
        (pod(ended(137, "OOMKilled")), "OutOfMemory", "OOMKilled"),
        (pod(ended(137, "ContainerStatusUnknown")), "NodeLost", "ContainerStatusUnknown"),
        (pod({"phase": "Failed"}), "Crashed", "no exit status"),
        (
            pod({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}),
            "Evicted",
            "Evicted: low on memory",
        ),
        (pod({"phase": "Failed", "reason": "NodeLost"}), "NodeLost", "NodeLost"),
        (pod({"phase": "Failed", "reason": "Terminated"}), "NodeShutdown", "Terminated"),
        (pod({"phase": "Failed", "reason": "OutOfnvidia.com/gpu"}), "NotAdmitted", "OutOf"),
        (pod({"phase": "Failed", "reason": "UnexpectedAdmissionError"}), "NotAdmitted", "Unexpected"),
        (pod(target("PreemptionByScheduler"), **DELETED), "Preempted", "because"),
        (pod(target("EvictionByEvictionAPI"), **DELETED), "Evicted", "because"),
        (pod(target("DeletionByTaintManager"), **DELETED), "NodeLost", "because"),
        (pod(target("DeletionByPodGC", phase="Failed")), "NodeLost", "because"),
        (pod(target("TerminationByKubelet", phase="Failed", reason="Evicted")), "Evicted", "because"),
        (pod(target("TerminationByKubelet", phase="Failed", reason="Terminated")), "NodeShutdown", "because"),
        (pod(target("SomethingNew")), "Evicted", "because"),
        (pod({"phase": "Running"}, **DELETED), "Deleted", "deleted"),
        (pod(ended(143), **DELETED), "Deleted", "deleted"),
        (pod(ended(137, finished="2026-03-01T12:00:09Z"), **DELETED), "Crashed", "SIGKILL"),
        (pod(ended(0, "Completed", finished="2026-03-01T12:00:20Z"), **DELETED), "Deleted", "deleted"),
    ],
)
def test_every_cause_has_its_name(seen, cause, text):
    verdict = verdict_of(seen)
    assert verdict.cause == cause
    assert text in verdict.text


def test_the_program_pays_for_its_own_deaths_only():
    assert {c for c in Cause if c.charged} == {"Crashed", "OutOfMemory", "ExitedEarly", "Stalled"}


@pytest.mark.parametrize("message", ["TypeError: no such leaf", "no such leaf"])
def test_the_final_message_names_the_error_once(message):
    said = json.dumps({"reason": "TypeError", "message": message})
    state = {"exitCode": 1, "reason": "Error", "message": said}
    pod = {"status": {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": state}}]}}
    assert verdict_of(pod).text == "exit code 1: TypeError: no such leaf"


def test_the_progress_of_a_process_that_was_killed_does_not_explain_its_end():
    """The kubelet cuts the first line of a log's end anywhere."""
    progress = "06:36:33 worker-1: step 16952/60000  loss 0.000440761  accuracy 1  1101.1 examples/s"
    for log, shown in (
        (f"{progress[30:]}\n{progress}\n", ""),
        (f"{progress[-20:]}\n{progress}\nMemoryError\n{progress}", "; its log ends: MemoryError"),
    ):
        state = {"exitCode": 137, "reason": "Error", "message": log}
        pod = {
            "status": {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": state}}]}
        }
        assert verdict_of(pod).text == f"exit code 137 (SIGKILL){shown}"


def test_a_killed_pod_has_no_termination_message_only_a_log_and_lines_of_json_are_read():
    """The kubelet gives the log's end as the message of any that failed, however old it is."""
    log = '{"level": "info", "message": "checkpoint of step 5"}\n{"level": "info", "message": "step 7"}\nfree text\n[1]'
    states = {code: {"exitCode": code, "reason": "Error", "message": log} for code in (1, 137)}
    texts = {
        code: verdict_of(
            {"status": {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": state}}]}}
        ).text
        for code, state in states.items()
    }
    assert texts[1] == "exit code 1: checkpoint of step 5\nstep 7\nfree text\n[1]"
    assert texts[137] == "exit code 137 (SIGKILL); its log ends: checkpoint of step 5\nstep 7\nfree text\n[1]"


def test_an_unknown_signal_is_still_a_number():
    assert exit_text(128 + 99) == "exit code 227"
    assert exit_text(-1) == "exit code -1"


@pytest.mark.parametrize(
    "message", ["", "[1]", "{}", "NaN", '{"result": "Fine"}', '{"result": ["Failed"]}', "{" * 5000, "[" * 4096]
)
def test_a_message_without_an_outcome_gives_none(message):
    assert outcome_of(pod(ended(0, message=message))) is None


def test_an_outcome_of_odd_types_keeps_what_can_be_kept():
    said = {"result": "Succeeded", "step": True, "checkpoint": 5, "metrics": {"a": float("nan"), "b": "x", "c": 1}}
    outcome = outcome_of(pod(ended(0, message=json.dumps(said))))
    assert (outcome.step, outcome.checkpoint, finite(outcome.report().metrics)) == (None, "", {"c": 1.0})


@pytest.mark.parametrize(
    ("status", "blocked"),
    [
        ({"phase": "Pending"}, "NotStarted"),
        ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]}, "Unschedulable"),
        ({"phase": "Pending", "initContainerStatuses": [{"name": "i", "state": {"running": {}}}]}, "NotStarted"),
        (
            {
                "phase": "Pending",
                "initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}],
                "containerStatuses": [{"name": "trainer", "state": {"running": {}}}],
            },
            None,
        ),
        ({"phase": "Running"}, None),
    ],
)
def test_what_keeps_a_pod_from_starting(status, blocked):
    obstacle = obstacle_of(pod(status))
    assert (obstacle.blocked if obstacle else None) == blocked


def test_an_init_container_that_runs_is_named_and_a_sidecar_is_not():
    """T8: the pod has not started, so `pendingDeadlineSeconds` counts."""
    states = [{"name": name, "state": {"running": {}}} for name in ("proxy", "download")]
    waiting = [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}]
    status = {"phase": "Pending", "initContainerStatuses": states, "containerStatuses": waiting}
    spec = {"initContainers": [{"name": "proxy", "restartPolicy": "Always"}, {"name": "download"}]}
    obstacle = obstacle_of({"spec": spec, "status": status})
    assert obstacle.text == "its containers have not started: the init container download runs"
    obstacle = obstacle_of({"spec": spec, "status": {**status, "initContainerStatuses": states[:1]}})
    assert obstacle.blocked == "NotStarted"
    assert "init container" not in obstacle.text


SIDECAR = {"initContainers": [{"name": "side", "restartPolicy": "Always"}, {"name": "download"}]}
FAILED_SIDE = {"terminated": {"exitCode": 4, "reason": "Error"}}


def test_a_sidecar_is_an_obstacle_only_if_it_keeps_the_trainer_from_starting():
    """T8: a sidecar is named while it cannot start, and not while it restarts beside the trainer."""
    missing = {"terminated": {"exitCode": 128, "reason": "StartError", "message": 'exec: "none": not found'}}
    side = {"name": "side", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": missing}
    trainer = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    status = {"phase": "Pending", "initContainerStatuses": [side], "containerStatuses": [trainer]}
    obstacle = obstacle_of({"spec": SIDECAR, "status": status})
    assert obstacle.blocked == "NotStarted"
    assert "the container side ends again and again: exit code 128, StartError" in obstacle.text
    runs = {**trainer, "state": {"running": {}}}
    assert obstacle_of({"spec": SIDECAR, "status": {**status, "phase": "Running", "containerStatuses": [runs]}}) is None
    starting = {"name": "side", "state": {"running": {}}, "started": False}
    obstacle = obstacle_of({"spec": SIDECAR, "status": {**status, "initContainerStatuses": [starting]}})
    assert obstacle.text.endswith("the startup probe of the sidecar side has not succeeded")


def test_a_sidecar_that_ended_with_its_pod_is_not_why_it_died():
    """O4: the pod ended its sidecar with SIGTERM after an init container had failed."""
    states = [{"name": "side", "state": FAILED_SIDE}, {"name": "download", "state": {"terminated": {"exitCode": 3}}}]
    trainer = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    status = {"phase": "Failed", "initContainerStatuses": states, "containerStatuses": [trainer]}
    assert verdict_of({"spec": SIDECAR, "status": status}).text == "the init container download failed with exit code 3"


def test_what_a_script_printed_cannot_move_a_reader_s_cursor():
    """O4: its final message is in the status, and `kubectl` prints it unchanged."""
    red = "\x1b[31mValueError\x1b[0m:\ttoo hot\r\n"
    state = {"terminated": {"exitCode": 1, "message": red}}
    verdict = verdict_of({"status": {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": state}]}})
    assert "ValueError" in verdict.text
    assert "too hot" in verdict.text
    assert not {"\x1b", "\r", "\t"} & set(verdict.text)
