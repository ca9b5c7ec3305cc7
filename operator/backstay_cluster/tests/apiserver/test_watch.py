"""A watch shows exactly the history: a client that lists and then watches gets the same state as the server."""

import json
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from backstay_cluster.apiserver import kinds
from backstay_cluster.apiserver.errors import ApiError
from backstay_cluster.apiserver.rest import Api, DeleteOptions
from backstay_cluster.apiserver.selectors import matcher
from backstay_cluster.apiserver.store import Change, Stored
from backstay_cluster.apiserver.watch import Watch
from backstay_cluster.tests.limits import LONG, slack

NAMES, LABELS = st.sampled_from(["a", "b", "c"]), st.sampled_from(["1", "2"])
SPACES = st.sampled_from(["default", "kube-system"])
OPERATIONS = st.one_of(
    st.tuples(st.just("create"), SPACES, NAMES, LABELS),
    st.tuples(st.just("label"), SPACES, NAMES, LABELS),
    st.tuples(st.just("delete"), SPACES, NAMES, LABELS),
    st.tuples(st.just("watch"), st.sampled_from(["default", None]), st.just(""), st.sampled_from(["", "l=1", "l!=1"])),
)


def state(items):
    return {(o["metadata"]["namespace"], o["metadata"]["name"]): o for o in items}


def replay(known, lines, start):
    last = start
    for line in lines:
        event = json.loads(line)
        data = event["object"]["metadata"]
        key, version = (data["namespace"], data["name"]), int(data["resourceVersion"])
        assert version > last, "events come in the order of their versions"
        last = version
        assert (event["type"] == "ADDED") == (key not in known)
        if event["type"] == "DELETED":
            del known[key]
        else:
            known[key] = event["object"]
    return known


def write(api, maps, operation):
    what, space, name, label = operation
    if what == "create":
        api.create(maps, space, {"metadata": {"name": name, "labels": {"l": label}}})
    elif what == "label":
        api.modify(maps, (space, name), lambda o: o["metadata"].update(labels={"l": label}))
    else:
        api.delete(maps, (space, name), DeleteOptions())


@given(st.lists(OPERATIONS, max_size=30), st.integers(0, 30))
def test_any_watch_from_any_version_replays_to_the_state_of_the_server(operations, later):
    """Live from where it was opened, and once more from the history afterwards."""
    api = Api()
    kinds.install(api, "127.96.0.0/16")
    maps = api.registry.must("", "configmaps")
    watches = []

    def now(space, selector):
        return state(s.obj for s in api.select(maps, space, matcher(maps.storage, selector, "")).items)

    for operation in operations:
        if operation[0] == "watch":
            _, space, _, selector = operation
            watch = Watch(matcher(maps.storage, selector, ""), lambda s: s.body)
            api.store.listen(maps.storage, space, watch.change)
            watches.append((space, selector, api.store.version, now(space, selector), watch))
            continue
        try:
            write(api, maps, operation)
        except ApiError as error:
            assert error.code in {404, 409}  # noqa: PT017
    for space, selector, version, known, watch in watches:
        live = watch.lines().splitlines()
        assert replay(dict(known), live, version) == now(space, selector)
        past = Watch(matcher(maps.storage, selector, ""), lambda s: s.body)
        for change in api.store.since(maps.storage, version):
            if space is None or change.after.key[0] == space:
                past.change(change)
        assert past.lines().splitlines() == live


def test_a_client_that_does_not_read_costs_a_limited_amount_of_memory():
    """The watch ends when the client reads again."""
    rendered = 0

    def render(stored):
        nonlocal rendered
        rendered += 1
        return b"{}"

    watch = Watch(None, render)
    for version in range(1, 60_000):
        watch.change(Change("MODIFIED", Stored({}, version), None))
    assert watch.overrun
    assert rendered < 50_100


def test_a_watch_from_an_old_version_is_answered_as_expired():
    api = Api(history=4)
    kinds.install(api, "127.96.0.0/16")
    maps = api.registry.must("", "configmaps")
    start = api.store.version
    for at in range(5):
        api.create(maps, "default", {"metadata": {"name": f"m{at}"}})
    assert len(api.store.since(maps.storage, start + 1)) == 4
    try:
        api.store.since(maps.storage, start)
    except ApiError as error:
        assert (error.code, error.reason) == (410, "Expired")  # noqa: PT017
    else:
        raise AssertionError("a version that is forgotten was served")


MAPS = "/api/v1/namespaces/default/configmaps"


def config_map(name, **labels):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}}


def test_a_watch_over_http_ends_with_its_timeout(api):
    version = api.get(MAPS).json["metadata"]["resourceVersion"]
    assert api.watch(f"{MAPS}?watch=1&timeoutSeconds=1&resourceVersion={version}&labelSelector=none") == []


def test_a_watch_over_http_is_live(api):
    version = api.get(MAPS).json["metadata"]["resourceVersion"]
    opened = threading.Event()
    found = []
    path = f"{MAPS}?watch=1&timeoutSeconds=60&resourceVersion={version}&labelSelector=live"
    reader = threading.Thread(target=lambda: found.extend(api.watch(path, opened=opened.set, most=2)))
    reader.start()
    assert opened.wait(LONG)
    assert api.post(MAPS, config_map("live", live="1")).status == 201
    assert api.post(MAPS, config_map("dead")).status == 201
    assert api.delete(f"{MAPS}/live").status == 200
    assert api.delete(f"{MAPS}/dead").status == 200
    reader.join()
    assert [(e["type"], e["object"]["metadata"]["name"]) for e in found] == [("ADDED", "live"), ("DELETED", "live")]


def test_a_watch_from_a_version_that_is_gone_gets_410_inside_the_stream(embedded):
    embedded.server.api.store.storage(("", "secrets")).forgotten = embedded.server.api.store.version
    path = "/api/v1/namespaces/default/secrets?watch=1&timeoutSeconds=5&resourceVersion=1"
    (event,) = embedded.watch(path)
    assert event["type"] == "ERROR"
    assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")


def test_a_list_at_a_future_version_gets_a_retryable_error(api):
    answer = api.get(f"{MAPS}?resourceVersion=999999999")
    assert (answer.status, answer.json["reason"]) == (504, "Timeout")


def test_a_watch_from_a_future_version_has_only_what_comes_after_it(api):
    version = int(api.get(MAPS).json["metadata"]["resourceVersion"])

    def create():
        for at in range(4):
            assert api.post(MAPS, config_map(f"future{at}", future="1")).status == 201

    path = f"{MAPS}?watch=1&timeoutSeconds=60&labelSelector=future&resourceVersion={version + 2}"
    found = api.watch(path, opened=create, most=2)
    assert [event["object"]["metadata"]["name"] for event in found] == ["future2", "future3"]
    assert api.delete(f"{MAPS}?labelSelector=future").status == 200


def test_a_client_that_leaves_ends_its_watch(embedded):
    await_watches(embedded, 0)  # those of the test before may still end
    connection = embedded._open(30)
    embedded._send(connection, "GET", f"{MAPS}?watch=1", None, "", "")
    assert embedded.within(lambda: len(embedded.server._watches)) == 1
    connection.close()
    await_watches(embedded, 0)


def await_watches(embedded, count):
    began = time.monotonic()
    while (found := embedded.within(lambda: len(embedded.server._watches))) != count:
        assert time.monotonic() < began + 30 * slack(), f"{found} watches are open"
        time.sleep(0.01)


def test_a_list_in_pages_is_of_one_version(api):
    for at in range(5):
        assert api.post(MAPS, config_map(f"page{at}", page="1")).status == 201
    path = f"{MAPS}?labelSelector=page&limit=2"
    first = api.get(path).json
    assert api.delete(f"{MAPS}/page4").status == 200
    names, page = [o["metadata"]["name"] for o in first["items"]], first
    while "continue" in page["metadata"]:
        page = api.get(f"{path}&continue={page['metadata']['continue']}").json
        assert page["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        names += [o["metadata"]["name"] for o in page["items"]]
    assert names == [f"page{at}" for at in range(5)]
    assert api.delete(f"{MAPS}?labelSelector=page").status == 200


def test_a_page_of_a_version_that_is_gone_gets_410(embedded):
    gone = embedded.get(f"{MAPS}?limit=2&continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiJ4XHUwMDAwIn0")
    assert (gone.status, gone.json["reason"]) == (410, "Expired")
