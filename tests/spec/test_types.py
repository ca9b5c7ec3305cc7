"""The models do not change, equal themselves after a round trip, and turn into labels."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from backstay_spec import contract
from backstay_spec.contract import ROLE_WORKER
from backstay_spec.status_model import format_time
from backstay_spec.types import QueueGroup, Scheduling, TrainingJobSpec
from backstay_spec.types_status import Backoff, TrainingJobStatus, slot_key


def test_a_spec_does_not_change() -> None:
    spec = TrainingJobSpec(image="i")
    with pytest.raises(ValidationError):
        spec.image = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        TrainingJobSpec.model_validate({"image": "i", "imgae": "i"})
    with pytest.raises(ValidationError):
        TrainingJobSpec.model_validate({"image": "i", "workers": {"replicas": "3"}})


def test_a_status_equals_itself_after_a_round_trip() -> None:
    """An unchanged status is not written again (O1): times are in UTC and have the precision that is written."""
    east = timezone(timedelta(hours=2))
    status = TrainingJobStatus(
        start_time=datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=east),
        backoff={slot_key(ROLE_WORKER, 3): Backoff(failures=1, not_before=datetime(2026, 1, 1, 0, 0, 1, 250999))},
        loss=math.nan,
        examples_per_second=math.inf,
        step=0,
    )
    assert status.start_time == datetime(2026, 1, 1, 10, tzinfo=UTC)
    assert status.loss is None
    assert status.examples_per_second is None
    written = status.to_dict()
    assert written["startTime"] == "2026-01-01T10:00:00Z"
    assert written["backoff"] == {"worker-3": {"failures": 1, "notBefore": "2026-01-01T00:00:01.250Z"}}
    assert TrainingJobStatus.model_validate(written) == status
    assert format_time(datetime(2026, 1, 1, 12, tzinfo=east)) == "2026-01-01T10:00:00Z"


def test_a_queue_and_a_gang_are_labels_of_the_pods() -> None:
    """Kueue admits pods by a label; gang schedulers find a PodGroup's pods by a label or an annotation."""
    read = Scheduling.model_validate
    assert read({"queue": "q"}).pod_labels() == {"kueue.x-k8s.io/queue-name": "q"}
    coscheduling = read({"gang": {"podGroup": "g"}})
    assert coscheduling.pod_labels() == {"scheduling.x-k8s.io/pod-group": "g"}
    assert coscheduling.pod_annotations(contract.ROLE_SERVER) == {}
    volcano = read({"gang": {"podGroup": "g", "kind": "Volcano"}})
    assert volcano.pod_labels() == {}
    assert volcano.pod_annotations(contract.ROLE_SERVER) == {"scheduling.k8s.io/group-name": "g"}
    assert read({}).pod_labels() == read({}).pod_annotations(contract.ROLE_SERVER) == {}


def test_the_pods_of_a_rank_are_admitted_together() -> None:
    """Kueue counts the pods with a name, and a rank that is created again has another one."""
    read, group = Scheduling.model_validate, QueueGroup("llama-worker-3-2-x", 0, 4, is_of_job=False)
    queued, worker = read({"queue": "q"}), contract.ROLE_WORKER
    assert queued.pod_labels(3, group) == {
        "kueue.x-k8s.io/queue-name": "q",
        "kueue.x-k8s.io/pod-group-name": group.name,
    }
    assert queued.pod_annotations(worker, 3, group) == {
        "kueue.x-k8s.io/pod-group-total-count": "4",
        "kueue.x-k8s.io/retriable-in-group": "false",
        "kueue.x-k8s.io/safe-to-forcefully-delete": "true",
    }
    assert (queued.pod_labels(3), queued.pod_annotations(worker, 3)) == (queued.pod_labels(), {})
    coscheduling = read({"gang": {"podGroup": "g", "by": "Rank"}})
    assert coscheduling.pod_labels(3) == {"scheduling.x-k8s.io/pod-group": "g-3"}
    volcano = read({"gang": {"podGroup": "g", "by": "Rank", "kind": "Volcano"}})
    assert volcano.pod_annotations(worker, 3) == {"scheduling.k8s.io/group-name": "g-3"}
    assert coscheduling.pod_labels() == volcano.pod_annotations(contract.ROLE_SERVER) == {}


def test_the_pods_that_a_job_needs_have_two_roles_for_the_queue() -> None:
    """Kueue has a role for each affinity, and a rank or a shard may have its own. It accepts eight roles."""
    queued, group = Scheduling.model_validate({"queue": "q"}), QueueGroup("llama-group-9-x", 2, 8)
    assert queued.pod_labels(3, group)["backstay.dev/admitted-together"] == "2.8"
    annotations = queued.pod_annotations(contract.ROLE_SERVER, None, group)
    assert annotations["kueue.x-k8s.io/role-hash"] == "parameter-server"
    assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "10"
