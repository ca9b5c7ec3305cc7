"""The API server answers as a real one did: a recorded session is replayed, request by request.

Only the differences in this file are allowed. Some values differ from run to run (generated names, uids, versions,
times, addresses). Other programs of a cluster write some fields (the scheduler's condition). Some texts have other
words (descriptions of columns). And this server refuses some requests.
"""

import json
import re
import threading
import time
from pathlib import Path

import pytest

from backstay_cluster.tests.limits import slack

TRANSCRIPT = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "transcript.jsonl").read_text().splitlines()
]

# Server-side apply needs a field manager for every field of every object; nothing of ours uses it.
REFUSED = {"server-side apply": 415, "server-side apply: conflict": 415}
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
ACCEPT = {
    "list: as a table": TABLE,
    "cr list as a table": TABLE,
    "list: metadata only": "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json",
}
# Watches during which pod `w` was created, patched twice and deleted.
MUTATED = {
    "watch from a list's resourceVersion",
    "watch by label: an object that stops matching is DELETED",
    "watch: bookmarks asked for",
}
# These take effect after a moment, not immediately.
EVENTUAL = {"the owned pod afterwards", "crd get: established", "crd discovery", "crd group discovery", "list after it"}

# Of another build of the real server.
BUILD = {"gitVersion", "goVersion"}
UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+(:\d+)?")
RANDOM = re.compile(r"\b(kube-api-access-|g-|e-)[a-z0-9]{5}\b")
# A platform's admission plugin adds this to every pod's token volume; upstream Kubernetes does not.
PLATFORM = "openshift-service-ca.crt"


def foreign(value):
    """Without what other programs put into objects."""
    if isinstance(value, list):
        return [foreign(v) for v in value if not (isinstance(v, dict) and _platform(v))]
    if isinstance(value, dict):
        return {k: foreign(v) for k, v in value.items()}
    return value


def _platform(value):
    return value.get("type") == "PodScheduled" or (value.get("configMap") or {}).get("name") == PLATFORM


def comparable(value, key=""):
    """Without what differs from run to run."""
    if isinstance(value, list):
        return [comparable(v) for v in value]
    if isinstance(value, dict):
        found = {
            k: comparable(v, k) for k, v in value.items() if k not in {"managedFields", "storageVersionHash"} | BUILD
        }
        if key == "labels":
            found.pop("ssa", None)  # set by the server-side apply that is refused
        if key == "status" and found.get("conditions") == []:
            del found["conditions"]  # the scheduler's was the only one
        if "priority" in found and "format" in found:
            del found["description"]  # of a column
        return found
    if key in {"resourceVersion", "continue"} and value:
        return f"<{key}>"
    if key == "age" or (isinstance(value, str) and re.fullmatch(r"\d+s", value)):
        return "<age>"
    if isinstance(value, str):
        value = value.split("\n@@")[0]  # a diff of Go structs follows
        for pattern, text in ((UID, "<uid>"), (TIME, "<time>"), (ADDRESS, "<ip>"), (RANDOM, r"\1<random>")):
            value = pattern.sub(text, value)
    return value


def events(value):
    """Events of a watch without those that came of what other programs wrote."""
    found, last = [], {}
    for item in comparable(foreign(value)):
        name = item["object"].get("metadata", {}).get("name")
        if item["type"] == "MODIFIED" and last.get(name) == item["object"]:
            continue
        last[name] = item["object"]
        found.append(item)
    return found


class Replay:
    """Returns the recorded request in terms of this run, with its current versions, uids and generated names."""

    def __init__(self, api):
        self.api, self.known, self.token = api, {}, ""

    def learn(self, recorded, found, key=""):
        if isinstance(recorded, dict) and isinstance(found, dict):
            for name in recorded.keys() & found.keys():
                self.learn(recorded[name], found[name], name)
        elif isinstance(recorded, list) and isinstance(found, list):
            for one, other in zip(recorded, found, strict=False):
                self.learn(one, other, key)
        elif key in {"uid", "resourceVersion"} or (key == "name" and RANDOM.fullmatch(recorded)):
            self.known[recorded] = found

    def translate(self, value):
        if isinstance(value, dict):
            return {k: self.translate(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.translate(v) for v in value]
        return self.known.get(value, value) if isinstance(value, str) else value

    def path(self, path):
        path = re.sub(r"continue=[^&]*", lambda _: f"continue={self.token}", path)
        return re.sub(r"(?<=resourceVersion=)(\d+)", lambda m: self.version(m[1]), path)

    def version(self, recorded):
        if recorded != "1" and recorded not in self.known:
            self.known[recorded] = self.api.get("/api/v1/namespaces/facts/pods").json["metadata"]["resourceVersion"]
        return self.known.get(recorded, recorded)

    def mutate(self):
        pods = "/api/v1/namespaces/facts/pods"
        self.pod("w", {"w": "1"})
        assert self.api.merge(f"{pods}/w", {"metadata": {"labels": {"v": "2"}}}).status == 200
        assert self.api.merge(f"{pods}/w", {"metadata": {"labels": {"w": "2"}}}).status == 200
        assert self.api.delete(f"{pods}/w").status == 200

    def pod(self, name, labels):
        spec = TRANSCRIPT[5]["request"]["body"]["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
        assert self.api.post("/api/v1/namespaces/facts/pods", pod).status == 201

    def watch(self, entry):
        name, path = entry["name"], self.path(entry["request"]["path"])
        if "bookmarks" not in name:
            path = re.sub(r"timeoutSeconds=\d+", "timeoutSeconds=1", path)  # no need to wait for nothing longer
        if name not in MUTATED:
            return self.api.watch(path)
        writer = threading.Thread(target=self.mutate)
        found = self.api.watch(path, opened=writer.start)
        writer.join()
        return found

    def call(self, entry):
        asked = entry["request"]
        body = asked.get("body")
        if isinstance(body, str):
            body = body.encode()
        elif body is not None:
            body = self.translate(foreign(body))
        return self.api.call(
            asked["method"],
            self.path(asked["path"]),
            body,
            content_type=asked.get("contentType", ""),
            accept=ACCEPT.get(entry["name"], ""),
        )


def content(answer):
    return answer.json if answer.headers["Content-Type"].startswith("application/json") else answer.raw.decode()


@pytest.fixture(scope="module")
def replayed(api):
    """Yields every request in order, with its name, the recorded answer and the received one."""
    replay, results = Replay(api), {}
    for entry in TRANSCRIPT:
        name, expected = entry["name"], entry["response"]
        if name == "list by labels: app=x":
            for at in range(5):
                replay.pod(f"p{at}", {"app": "yx"[at % 2 == 0], "n": str(at)})
        if "events" in expected:
            results[name] = (200, "", events(expected["events"])), (200, "", events(replay.watch(entry)))
            continue
        answer = replay.call(entry)
        began = time.monotonic()
        while name in EVENTUAL and time.monotonic() < began + 120 * slack():
            if comparable(foreign(content(answer))) == comparable(foreign(expected["body"])):
                break
            time.sleep(0.05)
            answer = replay.call(entry)
        found = content(answer)
        replay.learn(expected["body"], found)
        if name == "list: limit 2":
            replay.token = found["metadata"]["continue"]
        results[name] = (
            (expected["status"], expected["contentType"], comparable(foreign(expected["body"]))),
            (answer.status, answer.headers["Content-Type"], comparable(foreign(found))),
        )
    return results


@pytest.mark.parametrize("name", [entry["name"] for entry in TRANSCRIPT])
def test_it_answers_as_a_real_server_did(replayed, request, name):
    expected, found = replayed[name]
    if request.node.callspec.params["api"] == "real" and name == "watch: bookmarks asked for":
        # A real server sends bookmarks by its timer, which depends on when the watch began.
        expected, found = ([e for e in answer[2] if e["type"] != "BOOKMARK"] for answer in (expected, found))
    if name in REFUSED and found[0] == REFUSED[name]:
        assert found[2]["reason"] == "UnsupportedMediaType"
        return
    assert found == expected
