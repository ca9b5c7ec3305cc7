"""Sidecars, which are init containers with `restartPolicy: Always`, run beside the containers that start after them."""

from __future__ import annotations

import pytest

from .conftest import pid_lives

pytestmark = pytest.mark.e2e

FOREVER = "while :; do sleep 0.05; done"


def init(name: str, script: str, **fields) -> dict:
    # As Kubernetes documents, a doubled dollar sign is one.
    return {"name": name, "image": "x", "command": ["sh", "-c", script.replace("$$", "$$$$")], **fields}


def sidecar(name: str, script: str, **fields) -> dict:
    return init(name, script, restartPolicy="Always", **fields)


def until(file) -> str:
    """Returns a shell command that ends once the file exists."""
    return f"until [ -e {file} ]; do sleep 0.02; done"


def writes_pid(folder) -> str:
    """Returns a shell command that writes the shell's number to the file `pid`, which is complete once it exists."""
    return f"echo $$ >{folder}/.pid; mv {folder}/.pid {folder}/pid"


def status_of(pod: dict, name: str = "side") -> dict:
    statuses = (pod.get("status") or {}).get("initContainerStatuses") or []
    return next((status for status in statuses if status["name"] == name), {"state": {}, "restartCount": 0})


def is_ready(pod: dict) -> bool:
    conditions = {c["type"]: c["status"] for c in (pod.get("status") or {}).get("conditions") or ()}
    return conditions.get("Ready") == conditions.get("Initialized") == "True"


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (3, "Failed")])
async def test_it_runs_beside_the_main_container_and_ends_after_it(driver, tmp_path, code, phase):
    side = sidecar("side", f"trap 'echo ended; exit 5' TERM; {writes_pid(tmp_path)}; {FOREVER}")
    main = f"{until(tmp_path / 'pid')}; {until(tmp_path / 'go')}; exit {code}"
    name = await driver.pod(main, initContainers=[side])
    pod = await driver.until(name, is_ready)
    assert pod["status"]["phase"] == "Running"
    found = status_of(pod)
    assert (found["started"], found["ready"], found["restartCount"]) == (True, True, 0)
    assert "running" in found["state"]
    (tmp_path / "go").touch()
    end = await driver.ended(name)
    assert (end["phase"], end["exitCode"]) == (phase, code)
    assert status_of(await driver.phase(name, phase))["state"]["terminated"]["exitCode"] == 5
    assert not pid_lives(int((tmp_path / "pid").read_text()))
    assert await driver.log(name, container="side") == "ended\n"


async def test_it_is_restarted_while_the_main_container_runs(driver, tmp_path):
    side = sidecar("side", "exit 4")
    name = await driver.pod(until(tmp_path / "go"), initContainers=[side])

    def restarted(pod):
        found = status_of(pod)
        return found["restartCount"] >= 1 and found["state"].get("waiting")

    pod = await driver.until(name, restarted)
    assert status_of(pod)["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert status_of(pod)["lastState"]["terminated"]["exitCode"] == 4
    await driver.phase(name, "Running")
    (tmp_path / "go").touch()
    assert (await driver.ended(name))["phase"] == "Succeeded"


async def test_an_init_container_after_it_runs_while_it_runs(driver, tmp_path):
    side = sidecar("side", f"{writes_pid(tmp_path)}; {FOREVER}")
    usual = init("usual", f"{until(tmp_path / 'pid')}; kill -0 $(cat {tmp_path}/pid)")
    name = await driver.pod(f"kill -0 $(cat {tmp_path}/pid)", initContainers=[side, usual])
    assert (await driver.ended(name))["phase"] == "Succeeded"
    assert status_of(await driver.phase(name, "Succeeded"), "usual")["state"]["terminated"]["exitCode"] == 0


async def test_it_ends_if_an_init_container_after_it_fails(driver, tmp_path):
    side = sidecar("side", f"{writes_pid(tmp_path)}; {FOREVER}")
    usual = init("usual", f"{until(tmp_path / 'pid')}; exit 3")
    pod = await driver.phase(await driver.pod("exit 0", initContainers=[side, usual]), "Failed")
    assert status_of(pod, "usual")["state"]["terminated"]["exitCode"] == 3
    assert "terminated" in status_of(pod)["state"]
    assert not pid_lives(int((tmp_path / "pid").read_text()))


async def test_the_next_container_waits_for_its_startup_probe(driver, tmp_path):
    probe = {"exec": {"command": ["test", "-e", str(tmp_path / "up")]}, "periodSeconds": 1, "failureThreshold": 600}
    side = sidecar("side", FOREVER, startupProbe=probe)
    name = await driver.pod(f"test -e {tmp_path}/up", initContainers=[side])
    pod = await driver.until(name, lambda pod: "running" in status_of(pod)["state"])
    assert pod["status"]["phase"] == "Pending"
    assert status_of(pod)["started"] is False
    assert pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "PodInitializing"
    (tmp_path / "up").touch()
    assert (await driver.ended(name))["exitCode"] == 0


async def test_the_pod_is_ready_only_if_its_readiness_probe_succeeds(driver, tmp_path):
    probe = {"exec": {"command": ["test", "-e", str(tmp_path / "up")]}, "periodSeconds": 1}
    side = sidecar("side", FOREVER, readinessProbe=probe)
    name = await driver.pod(until(tmp_path / "go"), initContainers=[side])
    assert not is_ready(await driver.phase(name, "Running"))
    (tmp_path / "up").touch()
    await driver.until(name, is_ready)
    (tmp_path / "go").touch()
    assert (await driver.ended(name))["phase"] == "Succeeded"


async def test_deletion_ends_the_main_container_first_and_then_the_last_sidecar(driver, tmp_path):
    order = tmp_path / "order"

    def ends(name: str, first: str = ":") -> str:
        return f"trap '{first}; echo {name} >>{order}; exit 0' TERM; touch {tmp_path}/{name}; {FOREVER}"

    # The sidecars would end first if they got SIGTERM at the same time.
    main = f"{until(tmp_path / 'one')}; {until(tmp_path / 'two')}; {ends('main', 'sleep 0.5')}"
    sidecars = [sidecar("one", ends("one")), sidecar("two", ends("two", "sleep 0.5"))]
    probe = {"exec": {"command": ["test", "-e", str(tmp_path / "main")]}, "periodSeconds": 1}
    name = await driver.pod(main, container={"readinessProbe": probe}, initContainers=sidecars)
    await driver.until(name, is_ready)
    await driver.delete(name)
    await driver.gone(name)
    assert order.read_text().split() == ["main", "two", "one"]


@pytest.mark.parametrize("delete", [False, True])
async def test_it_is_killed_after_the_grace_period(driver, tmp_path, delete):
    side = sidecar("side", f"trap '' TERM; {writes_pid(tmp_path)}; {FOREVER}")
    main = f"{until(tmp_path / 'pid')}; touch {tmp_path}/up; {'exec sleep 600' if delete else ''}"
    probe = {"exec": {"command": ["test", "-e", str(tmp_path / "up")]}, "periodSeconds": 1}
    container = {"readinessProbe": probe}
    spec = {"initContainers": [side], "terminationGracePeriodSeconds": 1}
    name = await driver.pod(main, container=container, **spec)
    if delete:
        await driver.until(name, is_ready)
        await driver.delete(name)
        await driver.gone(name)
    else:
        assert status_of(await driver.phase(name, "Succeeded"))["state"]["terminated"]["exitCode"] == 137
    assert not pid_lives(int((tmp_path / "pid").read_text()))


async def test_a_sidecar_that_cannot_start_keeps_the_others_from_starting(driver):
    name = await driver.pod("exit 0", initContainers=[sidecar("side", "") | {"command": ["no-such-program"]}])
    pod = await driver.until(name, lambda pod: status_of(pod)["restartCount"] >= 1)
    assert pod["status"]["phase"] == "Pending"
    assert status_of(pod)["lastState"]["terminated"]["reason"] == "StartError"
    await driver.delete(name)
    await driver.gone(name)
