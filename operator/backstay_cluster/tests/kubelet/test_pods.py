"""Pods run as processes, with ends, messages, environment, volumes, probes, logs and deletion seen through the API."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
import ssl

import aiohttp
import pytest

from backstay_cluster.client import ApiRequestError
from backstay_cluster.kubelet.probes import ProbeFailure, ProbeSpec, attempt

from .test_runtime import wait_gone

pytestmark = pytest.mark.e2e


def env(**values):
    return [{"name": name, **({"value": v} if isinstance(v, str) else {"valueFrom": v})} for name, v in values.items()]


# --- phases and ends


@pytest.mark.parametrize(
    ("script", "phase", "code", "reason"),
    [
        ("exit 0", "Succeeded", 0, "Completed"),
        ("exit 7", "Failed", 7, "Error"),
        ("kill -9 $$", "Failed", 137, "Error"),
        ("kill -TERM $$; sleep 600", "Failed", 143, "Error"),
    ],
)
async def test_phase_exit_code_and_reason(driver, script, phase, code, reason):
    end = await driver.ended(await driver.pod(script))
    assert (end["phase"], end["exitCode"], end["reason"]) == (phase, code, reason)


async def test_a_running_pod_has_address_times_conditions_and_events(driver):
    name = await driver.pod(
        "echo $POD_IP $BACKSTAY_BIND; exec sleep 600",
        container={"env": env(POD_IP={"fieldRef": {"fieldPath": "status.podIP"}})},
    )
    pod = await driver.phase(name, "Running")
    status = pod["status"]
    conditions = {c["type"]: c["status"] for c in status["conditions"]}
    assert conditions == dict.fromkeys(
        ("PodScheduled", "Initialized", "ContainersReady", "Ready", "PodReadyToStartContainers"), "True"
    )
    assert status["podIP"].startswith("127.")
    assert status["podIPs"] == [{"ip": status["podIP"]}]
    assert status["startTime"]
    assert status["containerStatuses"][0]["containerID"].startswith("process://")
    found = await driver.printed(name, r"(\S+) (\S+)\n")
    assert found.groups() == (status["podIP"],) * 2
    await driver.delete(name)
    await driver.gone(name)
    await driver.noted(name, "Scheduled", "Created", "Started", "Killing")


async def test_two_pods_listen_on_the_same_port(driver):
    script = (
        "import os,socket;s=socket.socket();s.bind((os.environ['BACKSTAY_BIND'],7077));s.listen();"
        "print('listening',flush=True);s.accept()"
    )
    names = [await driver.pod(container={"command": ["python", "-S", "-c", script]}) for _ in range(2)]
    for name in names:
        await driver.printed(name, "listening")
    addresses = {(await driver.phase(name, "Running"))["status"]["podIP"] for name in names}
    assert len(addresses) == 2
    for ip in addresses:
        _, writer = await asyncio.open_connection(ip, 7077)
        writer.close()
    for name in names:
        assert (await driver.ended(name))["exitCode"] == 0


@pytest.mark.parametrize(
    ("script", "policy", "message"),
    [
        ("printf whole >/dev/termination-log; exit 1", "File", "whole"),
        ("echo last words; exit 1", "FallbackToLogsOnError", "last words\n"),
        ("echo last words; exit 0", "FallbackToLogsOnError", ""),
        ("echo last words; exit 1", "File", ""),
        ("head -c 9000 /dev/zero | tr '\\0' x >/dev/termination-log", "File", "x" * 4096),
    ],
)
async def test_termination_message(driver, script, policy, message):
    end = await driver.ended(await driver.pod(script, container={"terminationMessagePolicy": policy}))
    assert end.get("message", "") == message


async def test_the_termination_message_may_have_its_own_path(driver):
    container = {"terminationMessagePath": "/out/said", "env": env(WHERE="/out/said")}
    end = await driver.ended(await driver.pod('printf "$WHERE" >&2; printf yes >"$WHERE"', container=container))
    assert end["message"] == "yes"


async def test_init_containers_run_in_order_before_the_others(driver):
    volume = {"volumes": [{"name": "v", "emptyDir": {}}]}
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}

    def init(name, script):
        return {"name": name, "image": "x", "command": ["sh", "-c", script], **mount}

    inits = [init("one", "echo 1 >>/v/f"), init("two", "echo 2 >>/v/f")]
    name = await driver.pod("cat /v/f", container=mount, initContainers=inits, **volume)
    assert (await driver.ended(name))["exitCode"] == 0
    await driver.printed(name, "^1\n2\n$")
    name = await driver.pod("exit 0", initContainers=[init("one", "exit 4"), init("two", "exit 0")], **volume)
    pod = await driver.phase(name, "Failed")
    codes = [s["state"].get("terminated", {}).get("exitCode") for s in pod["status"]["initContainerStatuses"]]
    assert codes[0] == 4


async def test_memory_over_its_limit_ends_as_oom_killed(driver):
    """O4: out of memory is a separate cause."""
    script = "b=bytearray(200<<20); b[::4096]=b'x'*len(b[::4096]); import time; time.sleep(600)"
    limits = {"resources": {"limits": {"memory": "100Mi"}}}
    end = await driver.ended(await driver.pod(container={"command": ["python", "-S", "-c", script], **limits}))
    assert (end["exitCode"], end["reason"]) == (137, "OOMKilled")


async def test_restart_policy_on_failure_starts_again_until_it_succeeds(driver):
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    script = "[ -e /v/f ] && exit 0; touch /v/f; exit 3"
    name = await driver.pod(script, container=mount, volumes=[{"name": "v", "emptyDir": {}}], restartPolicy="OnFailure")
    pod = await driver.phase(name, "Succeeded")
    status = pod["status"]["containerStatuses"][0]
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 3


async def test_active_deadline(driver):
    name = await driver.pod("exec sleep 600", activeDeadlineSeconds=1)
    pod = await driver.phase(name, "Failed")
    assert pod["status"]["reason"] == "DeadlineExceeded"


# --- what cannot start


async def waiting(driver, name: str, reason: str) -> str:
    def holds(pod):
        statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
        return (statuses[0].get("state") or {}).get("waiting", {}).get("reason") == reason

    pod = await driver.until(name, holds)
    assert pod["status"]["phase"] == "Pending"
    return pod["status"]["containerStatuses"][0]["state"]["waiting"].get("message", "")


async def test_an_invalid_image_name(driver):
    name = await driver.pod("exit 0", container={"image": "NOT valid"})
    assert "couldn't parse image name" in await waiting(driver, name, "InvalidImageName")
    await driver.delete(name)
    await driver.gone(name)


async def test_no_command(driver):
    name = await driver.pod()
    assert "`command` must be given" in await waiting(driver, name, "CreateContainerError")
    await driver.delete(name)
    await driver.gone(name)


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"command": ["no-such-program"]}, 'exec: "no-such-program": executable file not found in $PATH'),
        ({"command": ["/no/such"]}, 'exec: "/no/such": No such file or directory'),
        ({"command": ["sh"], "workingDir": "/no/such"}, "workingDir '/no/such': No such file or directory"),
    ],
)
async def test_a_command_that_cannot_be_executed(driver, container, message):
    end = await driver.ended(await driver.pod(container=container))
    assert (end["phase"], end["exitCode"], end["reason"], end["message"]) == ("Failed", 128, "StartError", message)


async def test_a_missing_secret_is_waited_for(driver):
    secret = driver.name()
    ref = {"secretKeyRef": {"name": secret, "key": "k"}}
    name = await driver.pod('[ "$S" = v ]', container={"env": env(S=ref)})
    assert await waiting(driver, name, "CreateContainerConfigError") == f'secret "{secret}" not found'
    await driver.make("secrets", secret, data={"other": ""})
    await driver.until(
        name,
        lambda pod: (
            "couldn't find key k"
            in pod["status"]["containerStatuses"][0]["state"].get("waiting", {}).get("message", "")
        ),
    )
    await driver.client.patch(driver.path(secret, "secrets"), {"data": {"k": base64.b64encode(b"v").decode()}})
    assert (await driver.ended(name))["exitCode"] == 0


async def test_a_missing_volume_source_is_waited_for(driver):
    config = driver.name()
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    name = await driver.pod("cat /v/f", container=mount, volumes=[{"name": "v", "configMap": {"name": config}}])
    await driver.noted(name, "FailedMount")
    await driver.make("configmaps", config, data={"f": "text"})
    assert (await driver.ended(name))["exitCode"] == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"nodeSelector": {"no": "such"}}, "node affinity/selector"),
        (
            {"containers": [{"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "99"}}}]},
            "Insufficient nvidia.com/gpu",
        ),
    ],
)
async def test_what_the_node_has_not_is_unschedulable(driver, spec, message):
    name = await driver.pod("exit 0", **spec)

    def refused(pod):
        conditions = (pod.get("status") or {}).get("conditions") or []
        return [c for c in conditions if c["type"] == "PodScheduled" and c["status"] == "False"]

    pod = await driver.until(name, refused)
    assert refused(pod)[0]["reason"] == "Unschedulable"
    assert message in refused(pod)[0]["message"]
    await driver.delete(name)
    await driver.gone(name)


# --- environment and volumes


async def test_environment(driver):
    config, secret = driver.name(), driver.name()
    await driver.make("configmaps", config, data={"A": "a", "B": "b"})
    await driver.make("secrets", secret, data={"T": base64.b64encode(b"t0ken").decode()})
    entries = env(
        ONE="1",
        TWO="$(ONE)2$$(ONE)$(NONE)",
        NAME={"fieldRef": {"fieldPath": "metadata.name"}},
        UID_={"fieldRef": {"fieldPath": "metadata.uid"}},
        LABEL={"fieldRef": {"fieldPath": "metadata.labels['x.org/l']"}},
        NOTE={"fieldRef": {"fieldPath": "metadata.annotations['n']"}},
        NODE={"fieldRef": {"fieldPath": "spec.nodeName"}},
        CPU={"resourceFieldRef": {"resource": "limits.cpu"}},
        MEM={"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}},
        T={"secretKeyRef": {"name": secret, "key": "T"}},
        CA={"configMapKeyRef": {"name": config, "key": "A"}},
        NOT={"configMapKeyRef": {"name": config, "key": "Z", "optional": True}},
        B="over",
    )
    container = {
        "env": entries,
        "envFrom": [{"configMapRef": {"name": config}}, {"prefix": "P_", "secretRef": {"name": secret}}],
        "resources": {"limits": {"cpu": "1500m", "memory": "64Mi"}},
        "args": ["$(ONE)"],
    }
    script = (
        'echo "|$TWO|$NAME|$UID_|$LABEL|$NOTE|$NODE|$CPU|$MEM|$T|$CA|${NOT-unset}|$A|$B|$P_T|$0|${KUBECONFIG-none}|"'
    )
    name = await driver.pod(script, container=container, labels={"x.org/l": "lab"}, annotations={"n": "note"})
    pod = await driver.phase(name, "Succeeded")
    found = await driver.printed(name, r"\|(.*)\|\n")
    uid = pod["metadata"]["uid"]
    expected = ["12$(ONE)$(NONE)", name, uid, "lab", "note", "backstay", "2", "64", "t0ken", "a", "unset", "a", "over"]
    assert found.group(1).split("|") == [*expected, "t0ken", "1", "none"]


async def test_python_is_this_python(driver):
    name = await driver.pod(container={"command": ["python", "-c", "import sys, aiohttp; print(sys.prefix)"]})
    assert (await driver.ended(name))["exitCode"] == 0
    assert (await driver.printed(name, r"(.+)\n")).group(1) == os.sys.prefix


async def test_volumes(driver, tmp_path):
    config, secret = driver.name(), driver.name()
    await driver.make("configmaps", config, data={"f": "text"}, binaryData={"b": base64.b64encode(b"\0\xff").decode()})
    await driver.make("secrets", secret, data={"s": base64.b64encode(b"hush").decode()})
    volumes = [
        {"name": "e", "emptyDir": {}},
        {
            "name": "c",
            "configMap": {"name": config, "items": [{"key": "f", "path": "sub/g"}, {"key": "b", "path": "b"}]},
        },
        {"name": "s", "secret": {"secretName": secret, "defaultMode": 0o400}},
        {"name": "h", "hostPath": {"path": str(tmp_path / "made"), "type": "DirectoryOrCreate"}},
        {"name": "d", "downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    ]
    mounts = [{"name": name, "mountPath": f"/mnt/{name}"} for name in "ecshd"]
    container = {
        "volumeMounts": mounts,
        "env": env(OUT="/mnt/h", URI="file:///mnt/h/uri"),
        "workingDir": "/mnt/e/deep",
    }
    script = (
        "set -e; cat /mnt/c/sub/g; od -An -tx1 /mnt/c/b; cat /mnt/s/s; stat -c %a /mnt/s/s; cat /mnt/d/l; "
        'echo; touch here; ls /mnt/e/deep; echo out >"$OUT/file"; echo "$URI"'
    )
    name = await driver.pod(script, container=container, volumes=volumes, labels={"l": "v"})
    end = await driver.ended(name)
    log = (driver.logs_dir / "default" / name / "main.log").read_text()
    assert end["exitCode"] == 0, log
    assert log == f'text 00 ff\nhush400\nl="v"\nhere\nfile://{tmp_path}/made/uri\n'
    assert (tmp_path / "made" / "file").read_text() == "out\n"


# --- probes


async def test_readiness_follows_the_probe(driver, tmp_path):
    flag = tmp_path / "ready"
    probe = {"exec": {"command": ["test", "-e", str(flag)]}, "periodSeconds": 1, "failureThreshold": 1}
    name = await driver.pod("exec sleep 600", container={"readinessProbe": probe})

    def ready(pod):
        return pod["status"]["containerStatuses"][0]["ready"]

    assert not ready(await driver.phase(name, "Running"))
    flag.touch()
    await driver.until(name, ready)
    flag.unlink()
    await driver.until(name, lambda pod: not ready(pod))
    await driver.noted(name, "Unhealthy")
    await driver.delete(name, gracePeriodSeconds=0)


SERVER = """
import http.server, os
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ok" and self.headers["X"] == "y" else 500)
        self.end_headers()
http.server.HTTPServer((os.environ["BACKSTAY_BIND"], 9400), H).serve_forever()
"""


async def test_a_probe_does_not_load_the_machines_certificates(monkeypatch):
    """They take 30 ms of processor time, a probe less than one: six pods that start would spend it twice a second."""

    def load(*_: object) -> None:
        raise AssertionError("the certificates were loaded")

    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", load)
    monkeypatch.setattr(ssl.SSLContext, "set_default_verify_paths", load)
    probe = ProbeSpec.of({"httpGet": {"port": 1, "host": "127.0.0.1"}})
    with pytest.raises(ProbeFailure, match="Connect"):
        await attempt(probe, {}, "127.0.0.1", lambda _: pytest.fail("no command"))


async def test_http_and_tcp_probes_and_startup_before_readiness(driver):
    http = {
        "httpGet": {"path": "/ok", "port": "metrics", "httpHeaders": [{"name": "X", "value": "y"}]},
        "periodSeconds": 1,
    }
    tcp = {"tcpSocket": {"port": 9400}, "periodSeconds": 1, "failureThreshold": 60}
    container = {
        "command": ["python", "-S", "-c", SERVER],
        "ports": [{"name": "metrics", "containerPort": 9400}],
        "readinessProbe": http,
        "startupProbe": tcp,
    }
    name = await driver.pod(container=container)
    pod = await driver.until(name, lambda pod: (pod["status"].get("containerStatuses") or [{}])[0].get("ready"))
    assert pod["status"]["containerStatuses"][0]["started"] is True
    await driver.delete(name, gracePeriodSeconds=0)


async def test_a_failed_liveness_probe_ends_the_container(driver):
    probe = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
    name = await driver.pod("exec sleep 600", container={"livenessProbe": probe})
    assert (await driver.ended(name))["exitCode"] == 143
    found = await driver.noted(name, "Killing")
    assert found["Killing"] == "Container main failed liveness probe"


# --- deletion


async def test_deletion_lets_the_container_finish(driver):
    """SIGTERM first, and the pod is there until the container has ended by itself."""
    name = await driver.pod("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done")
    await driver.printed(name, "up")
    await driver.delete(name)
    await driver.gone(name)
    await driver.printed(name, "saved")


async def test_after_the_grace_period_the_whole_group_is_killed(driver):
    name = await driver.pod("trap '' TERM; sleep 600 & echo pid $!; while :; do sleep 1; done")
    child = int((await driver.printed(name, r"pid (\d+)\n")).group(1))
    await driver.delete(name, gracePeriodSeconds=1)
    await driver.gone(name)
    await asyncio.to_thread(wait_gone, child)


async def test_a_pod_deleted_before_it_could_start(driver):
    name = await driver.pod("exit 0", container={"env": env(S={"secretKeyRef": {"name": "none", "key": "k"}})})
    await waiting(driver, name, "CreateContainerConfigError")
    await driver.delete(name)
    await driver.gone(name)


async def test_a_pod_killed_by_hand_is_seen(driver):
    name = await driver.pod("echo pid $$; exec sleep 600")
    os.kill(int((await driver.printed(name, r"pid (\d+)\n")).group(1)), signal.SIGKILL)
    assert (await driver.ended(name))["exitCode"] == 137


# --- logs


async def test_logs_through_the_api(driver):
    name = await driver.pod("for i in 1 2 3; do echo line $i; done; echo err >&2; printf '\\377\\0bin'; exec sleep 600")
    await driver.printed(name, "bin")
    assert await driver.log(name, tailLines="2") == "err\n\ufffd\0bin"
    assert (await driver.log(name)).startswith("line 1\nline 2\nline 3\nerr\n")
    stamped = await driver.log(name, timestamps="true", container="main")
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z line 1\n", stamped)
    assert (await driver.log(name, sinceSeconds="3600")).startswith("line 1\n")
    assert await driver.log(name, limitBytes="4") == "line"
    with pytest.raises(ApiRequestError):
        await driver.log(name, container="other")
    forever = aiohttp.ClientTimeout()
    path = f"{driver.path(name)}/log"
    async with driver.client.open("GET", path, timeout=forever, params={"follow": "true"}) as followed:
        assert followed.status == 200  # the request is there before the pod goes
        await driver.delete(name, gracePeriodSeconds=1)
        assert (await followed.text(errors="replace")).endswith("bin")
    await driver.gone(name)
    assert (driver.logs_dir / "default" / name / "main.log").read_bytes().endswith(b"err\n\xff\0bin")
