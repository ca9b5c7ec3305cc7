"""The small pure parts are back-off, merge patch, key file, command line, metrics and slimming."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import stat
from pathlib import Path
from typing import Any

import kopf
import pytest
from between import put
from hypothesis import given
from hypothesis import strategies as st

from backstay_operator import __main__ as command
from backstay_operator import app, errors, slim
from backstay_operator.backoff import Backoffs, Curve
from backstay_operator.keyfile import KeyFileError, read_key
from backstay_operator.logs import JsonFormatter
from backstay_operator.merge import merge_patch
from backstay_operator.metrics import metric_names
from backstay_operator.settings import Patience, kopf_settings
from backstay_operator.watching import KopfWatch

json_values = st.recursive(
    st.booleans() | st.integers(-3, 3) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
documents = st.dictionaries(st.sampled_from("abc"), json_values, max_size=3)


def applied(old: Any, patch: Any) -> Any:
    """RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = applied(result.get(name), value)
    return result


@given(documents, documents)
def test_a_merge_patch_makes_the_new_out_of_the_old_and_is_empty_when_they_are_equal(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    patch = merge_patch(old, new)
    assert applied(old, patch) == new
    assert merge_patch(new, new) == {}


@given(st.integers(0, 200), st.floats(0, 1, exclude_max=True))
def test_backoff_stays_in_its_bounds(attempt: int, chance: float) -> None:
    curve = Curve(first=0.5, most=20.0, jitter=0.4)
    assert 0.3 <= curve.seconds(attempt, lambda: chance) <= 20.0


def test_backoffs_are_each_their_own_and_obey_the_server() -> None:
    offs: Backoffs[str] = Backoffs(Curve(first=1.0, most=10.0, jitter=0.0), lambda: 0.0)
    assert [offs.failed("a", 0.0) for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, 10.0]
    assert offs.failed("b", 0.0, at_least=3.0) == 3.0
    assert offs.remaining("a", 4.0) == 6.0
    assert offs.remaining("never", 0.0) == 0.0
    offs.succeeded("a")
    assert offs.remaining("a", 0.0) == 0.0
    offs.forget_where(lambda key: key == "b")
    assert offs.remaining("b", 0.0) == 0.0


def test_retries_have_no_end_and_each_request_starts_with_the_first_delay() -> None:
    patience = Patience(0.1, 1, then=5)
    for _ in range(2):
        delays = iter(patience)
        assert [next(delays) for _ in range(4)] == [0.1, 1, 5, 5]


def test_kopf_writes_nothing_and_copies_nothing_of_an_object() -> None:
    settings = kopf_settings()
    body = kopf.Body({"metadata": {"name": "a"}, "spec": {"image": "b"}})
    storage = settings.persistence.diffbase_storage
    assert storage is settings.persistence.progress_storage
    assert storage.fetch(body=body) is None
    essence = storage.build(body=body)
    assert essence == {}
    assert settings.persistence.progress_storage.clear(essence=essence) is essence
    patch = kopf.Patch()
    storage.store(body=body, patch=patch, essence=essence)
    assert not patch
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    assert settings.persistence.finalizer.startswith("backstay.dev/")
    assert settings.watching.inactivity_timeout
    assert settings.watching.server_timeout
    assert isinstance(settings.watching.server_timeout, int)  # Kubernetes refuses a fraction in timeoutSeconds


async def test_the_watch_runs_as_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod the user is a number that no passwd file has; Kopf's own way to name itself ends there."""

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 65532")

    monkeypatch.setattr("getpass.getuser", nameless)

    def sink(*_: Any) -> None: ...

    watch = KopfWatch(None, None, slim=slim.SLIM, sink=sink, indexed=sink, lease=sink, me="backstay-0/uid")
    watch.stop()
    await watch.run()


def test_a_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "key"
    first = read_key(str(file))
    assert len(first) >= 32
    assert read_key(str(file)) == first
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_bad_key_file_is_named(tmp_path: Path) -> None:
    short = tmp_path / "short"
    put(short, "abc\n")
    with pytest.raises(KeyFileError, match=r"short holds 3 bytes: at least 32"):
        read_key(str(short))
    with pytest.raises(KeyFileError, match="nowhere/key cannot be used"):
        read_key(str(tmp_path / "nowhere" / "key"))


def test_the_command_line_and_the_environment() -> None:
    options = command.parse(
        ["--key-file", "k", "--metrics-port", "0", "--operator-labels", "a=b, c=d"],
        {"BACKSTAY_OPERATOR_NAMESPACE": "team", "KUBECONFIG": "/cfg"},
    )
    assert (options.namespace, options.kubeconfig, options.metrics_port) == ("team", "/cfg", 0)
    assert options.operator_labels == {"a": "b", "c": "d"}
    assert options.lease_namespace == "team"
    assert command.parse([], {"BACKSTAY_OPERATOR_KEY_FILE": "k"}).operator_labels == {}


@pytest.mark.parametrize(
    "arguments", [[], ["--key-file", "k", "--operator-labels", "x"], ["--key-file", "k", "--nope"]]
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.parse(arguments, {})
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_every_metric_follows_the_conventions() -> None:
    names = metric_names()
    assert all(name.startswith(("backstay_operator_", "backstay_job_")) for name in names), names
    assert "backstay_operator_pods_replaced_total" in names
    assert "backstay_operator_reconcile_duration_seconds_bucket" in names
    assert "backstay_operator_watch_age_seconds" in names


def test_a_pod_is_kept_small_and_whole_enough() -> None:
    env = [{"name": "OTHER", "value": "x"}, {"name": "BACKSTAY_SERVERS", "value": "10.0.0.1:7077"}]
    pod = {
        "metadata": {
            "name": "p",
            "uid": "u",
            "managedFields": [{"x": 1}],
            "labels": {"l": "1"},
            "annotations": {"a": "b"},
        },
        "spec": {
            "nodeName": "n",
            "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}],
            "containers": [{"name": "trainer", "env": env}, {"name": "side"}],
            "initContainers": [{"name": "proxy", "restartPolicy": "Always", "image": "x"}],
        },
        "status": {
            "phase": "Failed",
            "podIP": "127.1.2.3",
            "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 1}}, "volumeMounts": [1]}],
            "initContainerStatuses": [{"name": "proxy", "lastState": {"terminated": {"exitCode": 128}}, "imageID": ""}],
            "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "x", "lastProbeTime": None}],
        },
    }
    kept = slim.pod(pod)
    assert kept["metadata"] == {"name": "p", "uid": "u", "labels": {"l": "1"}}
    assert kept["spec"] == {
        "nodeName": "n",
        "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}],
        "containers": [{"name": "trainer", "env": [{"name": "BACKSTAY_SERVERS", "value": "10.0.0.1:7077"}]}],
        "initContainers": [{"name": "proxy", "restartPolicy": "Always"}],
    }
    assert kept["status"]["containerStatuses"] == [{"name": "trainer", "state": {"terminated": {"exitCode": 1}}}]
    proxy = {"name": "proxy", "lastState": {"terminated": {"exitCode": 128}}}
    assert kept["status"]["initContainerStatuses"] == [proxy]
    assert kept["status"]["conditions"] == [{"type": "DisruptionTarget", "status": "True", "reason": "x"}]
    assert "managedFields" in pod["metadata"], "the event that others may hold is not changed"


@pytest.mark.parametrize(
    ("code", "reason", "kind", "wait"),
    [
        (409, "AlreadyExists", errors.AlreadyExists, 0.0),
        (409, "Conflict", errors.Conflict, 0.0),
        (403, "Forbidden", errors.Forbidden, 0.0),
        (422, "Invalid", errors.Invalid, 0.0),
        (429, "TooManyRequests", errors.Busy, 7.0),
        (503, "", errors.Busy, 7.0),
        (410, "Expired", errors.Gone, 0.0),
        (418, "", errors.Answered, 0.0),
    ],
)
def test_an_answer_becomes_the_error_that_states_what_to_do(
    code: int, reason: str, kind: type[errors.Answered], wait: float
) -> None:
    error = errors.answered("create pods a/b", code, {"reason": reason, "message": "m"}, "7" if wait else None)
    assert type(error) is kind
    assert error.retry_after == wait
    assert "create pods a/b" in str(error)


def test_json_lines_are_json() -> None:
    record = logging.LogRecord("backstay", logging.WARNING, "f", 1, "job %s: ⚓", ("a",), None)
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["message"]) == ("warning", "job a: ⚓")


def test_a_signal_ends_the_wait_for_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1 of a container receives only signals that it has handlers for."""
    assert not command.interrupted(0.01)

    def on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        app.on_signals(loop, stop)
        loop.call_soon(os.kill, os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command, "on_signals", on_signals)
    assert command.interrupted(60.0)
