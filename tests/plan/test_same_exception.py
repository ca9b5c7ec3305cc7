"""O4: pods that raise the same exception before the first update fail the job immediately, with the traceback."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay_spec import contract
from backstay_spec.exceptions import raised_by

SERVER, WORKER, EVALUATOR = contract.ROLE_SERVER, contract.ROLE_WORKER, contract.ROLE_EVALUATOR
SPEC = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 4}}
ONE_EACH = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 1}}
LOG = """step 1
Traceback (most recent call last):
  File "/backstay/code/train.py", line 7, in <module>
    import sklearn.datasets
  File "/usr/lib/python3.11/importlib/__init__.py", line 126, in import_module
    return _bootstrap._gcd_import(name)
ModuleNotFoundError: No module named 'sklearn'
"""


TRACEBACK = LOG.removeprefix("step 1\n")


def says(reason="KeyError", at="train.py:12", **more):
    return json.dumps({"reason": reason, "message": "'x'", "at": at, "traceback": f"  {at}\n{reason}: 'x'", **more})


def started(make_cluster, spec=SPEC):
    cluster = make_cluster(spec)
    cluster.settle()
    cluster.tick(1)
    return cluster


def crash(cluster, role, index, message, code=1):
    cluster.end(cluster.named(role, index), code, message)
    cluster.settle()


def test_most_workers_with_one_exception_fail_the_job_immediately(make_cluster):
    cluster = started(make_cluster)
    for rank in (0, 3):
        crash(cluster, WORKER, rank, says())
        assert cluster.status["phase"] != "Failed", "half of them may have a node in common"
    crash(cluster, WORKER, 1, says())
    failed = cluster.condition("Failed")
    assert failed["reason"] == "ScriptFailed"
    first, *trace = failed["message"].splitlines()
    assert first.startswith("KeyError: 'x' (train.py:12): raised by 3 of 4 workers, so another attempt")
    assert trace == ["  train.py:12", "KeyError: 'x'"]
    assert "\n" not in cluster.events[-1][1]
    assert not cluster.living()


@pytest.mark.parametrize(
    "said",
    [
        lambda folder: says("ValueError", f"{folder}/train.py:3"),
        lambda folder: LOG.replace("/backstay/code", folder),
        lambda folder: f"python: can't open file '{folder}/train.py': [Errno 2] No such file or directory",
        lambda folder: f"usage: {folder}/train.py [-h] N\n{folder}/train.py: error: argument N: invalid int value: 'x'",
    ],
    ids=["message", "log", "no file", "usage"],
)
def test_the_folder_of_the_script_may_differ_between_pods(make_cluster, said):
    """A node that runs pods as processes has another folder of `spec.code` for each."""
    cluster = started(make_cluster)
    for index, (role, number) in enumerate([(SERVER, 0), (SERVER, 1), (WORKER, 0), (WORKER, 1), (WORKER, 2)]):
        if cluster.status["phase"] == "Failed":
            break
        crash(cluster, role, number, said(f"/run/{index:032x}/volumes/backstay-code"), 2 if "usage" in said("") else 1)
    assert cluster.condition("Failed")["reason"] == "ScriptFailed"
    assert "train.py" in cluster.condition("Failed")["message"]


def test_an_import_that_fails_is_read_from_the_log(make_cluster):
    """A script that fails before it imports backstay leaves its log's end; all servers are enough."""
    cluster = started(make_cluster)
    crash(cluster, SERVER, 0, LOG)
    crash(cluster, WORKER, 2, LOG)
    crash(cluster, SERVER, 1, LOG)
    message = cluster.condition("Failed")["message"]
    assert message.startswith("ModuleNotFoundError: No module named 'sklearn' (/backstay/code/train.py:7)")
    assert message.endswith("ModuleNotFoundError: No module named 'sklearn'")


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/backstay/code/train.py", line 9, in <module>
  |     raise ExceptionGroup("loading", errors)
  | ExceptionGroup: loading (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: no column "x"
    +---------------- 2 ----------------
    | KeyError: 'y'
    +------------------------------------
"""


def test_a_group_of_exceptions_is_an_exception(make_cluster):
    cluster = started(make_cluster)
    for rank in (0, 1, 2):
        crash(cluster, WORKER, rank, GROUP)
    message = cluster.condition("Failed")["message"]
    assert message.startswith(
        "ExceptionGroup: loading (2 sub-exceptions) (/backstay/code/train.py:9): raised by 3 of 4"
    )
    assert 'ValueError: no column "x"' in message


def test_a_line_of_an_exception_stays_as_it_is(make_cluster):
    """Signs that draw a group at the beginning of a line may be anywhere in a script."""
    cluster = started(make_cluster)
    for rank in (0, 1, 2):
        log = LOG.replace("ModuleNotFoundError: No module named 'sklearn'", "ValueError: n | None + 1 is no number")
        crash(cluster, WORKER, rank, log)
    message = cluster.condition("Failed")["message"]
    assert message.endswith("ValueError: n | None + 1 is no number")


def test_a_temporary_exception_in_a_group_may_pass(make_cluster):
    cluster = started(make_cluster)
    for rank in range(4):
        crash(cluster, WORKER, rank, GROUP.replace("KeyError", "TimeoutError"))
    assert cluster.status["phase"] != "Failed"


def test_the_same_last_line_twice_in_each_pod_fails_the_job(make_cluster):
    """``sys.exit("why")`` prints no traceback. Another attempt of each pod must end in the same way."""
    cluster = started(make_cluster)
    for attempt in (1, 2):
        for rank in (0, 1, 2):
            assert cluster.status["phase"] != "Failed"
            crash(cluster, WORKER, rank, f"loading\n/run/{rank}{attempt}/config.yaml of {attempt}{rank}: no key\n")
        cluster.tick(2)
        cluster.settle()
    failed = cluster.condition("Failed")
    assert failed["reason"] == "ScriptFailed"
    assert failed["message"].startswith("exit code 1: /run/")
    assert ": the end of 3 of 4 workers, so another attempt" in failed["message"]


@pytest.mark.parametrize("last", ["", "cannot connect to data:80", "Connection refused", "the server is not ready"])
def test_the_end_of_a_program_that_may_pass_is_tried_again(make_cluster, last):
    cluster = started(make_cluster)
    for _ in (1, 2):
        for rank in range(4):
            crash(cluster, WORKER, rank, f"loading\n{last}\n" if last else "")
        cluster.tick(2)
        cluster.settle()
    assert cluster.status["phase"] != "Failed"


def test_a_slot_whose_newest_pod_works_no_longer_counts(make_cluster):
    """Two replacements work, so the exception of the third worker is not one that every attempt raises."""
    cluster = started(make_cluster)
    for rank in (0, 1):
        crash(cluster, WORKER, rank, says())
    cluster.tick(2)
    cluster.settle()
    for rank in (0, 1):
        cluster.run(cluster.named(WORKER, rank, 2))
    crash(cluster, WORKER, 2, says())
    assert cluster.status["phase"] != "Failed"


def test_with_one_pod_of_a_role_its_second_failure_decides(make_cluster):
    cluster = started(make_cluster, ONE_EACH)
    cluster.run(cluster.named(SERVER, 0))
    crash(cluster, WORKER, 0, says())
    assert cluster.status["phase"] != "Failed"
    cluster.tick(1)
    cluster.settle()
    crash(cluster, WORKER, 0, says(at="train.py:13"))
    assert cluster.status["phase"] != "Failed", "another place is another exception"
    cluster.tick(2)
    cluster.settle()
    crash(cluster, WORKER, 0, says(at="train.py:13"))
    assert "raised by the only worker, twice" in cluster.condition("Failed")["message"]


def test_one_server_and_one_worker_agree(make_cluster):
    cluster = started(make_cluster, ONE_EACH)
    crash(cluster, SERVER, 0, LOG)
    assert cluster.status["phase"] != "Failed"
    crash(cluster, WORKER, 0, LOG)
    assert "raised by 2 of 2 pods" in cluster.condition("Failed")["message"]


def test_after_the_first_update_budgets_decide(make_cluster):
    cluster = started(make_cluster)
    cluster.answer(step=1)
    for rank in range(3):
        crash(cluster, WORKER, rank, says())
    assert cluster.status["phase"] != "Failed"


@pytest.mark.parametrize("seconds", [3, 60])
def test_exceptions_from_before_a_suspension_do_not_count(make_cluster, seconds):
    """The dead pods of before are still there; the next ones run another spec."""
    cluster = started(make_cluster)
    for rank in range(2):
        crash(cluster, WORKER, rank, says())
    cluster.edit(runPolicy={"suspend": True})
    cluster.settle()
    cluster.bury()
    cluster.settle()
    cluster.tick(seconds)
    cluster.edit(runPolicy={"suspend": False}, image="train:2")
    cluster.settle()
    for rank in (2, 3):
        crash(cluster, WORKER, rank, says())
    assert cluster.status["phase"] != "Failed"


def test_a_command_that_does_not_exist_fails_the_job(make_cluster):
    cluster = started(make_cluster)
    for shard in range(2):
        name = cluster.named(SERVER, shard)
        cluster.end(name, 128, 'exec: "pyton": executable file not found in $PATH', reason="StartError")
        cluster.settle()
    assert '"pyton": executable file not found' in cluster.condition("Failed")["message"]


def test_a_script_that_never_trains_fails_the_job(make_cluster):
    """With exit code 0 without `train`, every attempt would end in the same way, and no log explains it."""
    cluster = started(make_cluster)
    crash(cluster, SERVER, 0, "", 0)
    assert cluster.status["phase"] != "Failed"
    crash(cluster, SERVER, 1, "", 0)
    failed = cluster.condition("Failed")
    assert failed["reason"] == "ScriptFailed"
    assert "exit code 0 before training had ended" in failed["message"]
    assert "backstay.train" in failed["message"]
    assert "2 of 2 parameter servers" in failed["message"]


@pytest.mark.parametrize("result", ["Trained", "AlreadyComplete", "Succeeded"])
def test_a_script_that_has_trained_is_not_one_that_never_trains(make_cluster, result):
    cluster = started(make_cluster)
    for rank in range(1, 4):
        crash(cluster, WORKER, rank, json.dumps({"result": result}), 0)
        assert raised_by(cluster.pods[cluster.named(WORKER, rank, 1)]) is None
    assert cluster.status["phase"] != "Failed"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (says("ConnectionResetError"), 1),
        (says("RuntimeError", transient=True), 1),
        (says("XlaRuntimeError", message="RESOURCE_EXHAUSTED: out of memory"), 1),
        (says(), 137),
        (says(), 143),
        ("no traceback at all", 1),
        (LOG.replace("ModuleNotFoundError", "urllib.error.URLError"), 1),
        (
            "ConnectionError: refused\n\nDuring handling of the above exception, another one occurred:\n\n" + TRACEBACK,
            1,
        ),
    ],
)
def test_what_may_succeed_later_is_retried(make_cluster, message, code):
    """Budgets decide about signals, networks and memory, because a retry may help."""
    cluster = started(make_cluster)
    for role, count in ((SERVER, 2), (WORKER, 4)):
        for index in range(count):
            crash(cluster, role, index, message, code)
    assert cluster.status["phase"] != "Failed"


def test_a_disruption_does_not_count_as_an_exception(make_cluster):
    cluster = started(make_cluster)
    for rank in range(4):
        name = cluster.named(WORKER, rank)
        cluster.disrupt(name, "PreemptionByScheduler")
        cluster.end(name, 1, says())
        assert raised_by(cluster.pods[name]) is None
    cluster.settle()
    assert cluster.status["phase"] != "Failed"


@pytest.mark.parametrize(
    ("log", "key"),
    [
        (LOG, ("ModuleNotFoundError", "/backstay/code/train.py:7")),
        (
            '  File "t.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid syntax',
            ("SyntaxError", "t.py:3"),
        ),
        (
            "python: can't open file '/c/tran.py': [Errno 2] No",
            ("python", "can't open file '/c/tran.py': [Errno 2] No"),
        ),
        (LOG + "\n--------\nFor simplicity, JAX", ("ModuleNotFoundError", "/backstay/code/train.py:7")),
        (LOG[LOG.index('  File "/usr') :], ("ModuleNotFoundError", "/usr/lib/python3.11/importlib/__init__.py:126")),
    ],
)
def test_what_python_prints_names_the_exception(make_cluster, log, key):
    cluster = started(make_cluster)
    name = cluster.named(WORKER, 0)
    cluster.end(name, 1, log)
    raised = raised_by(cluster.pods[name])
    assert (raised.type, raised.at or raised.text) == key


MISSING = "ModuleNotFoundError: No module named 'sklearn'"


@pytest.mark.parametrize(
    ("code", "printed", "says"),
    [
        (4, "ERROR: the data set is empty", "exit code 4: ERROR: the data set is empty"),
        (4, "a\nb\nc\nno data", "exit code 4: no data"),
        (4, "", f"{MISSING} (/backstay/code/train.py:7)"),
        (2, "usage: t\nt: error: unrecognized arguments: x", "SystemExit: t: error: unrecognized arguments: x"),
        # It may be the second line of the exception's text.
        (1, "it is empty", f"{MISSING} it is empty (/backstay/code/train.py:7)"),
        (1, "a\nb\nc\nd", f"{MISSING} a b c d (/backstay/code/train.py:7)"),
        (1, "a\nb\nc\nd\ne\nf", f"{MISSING} a b c ... f (/backstay/code/train.py:7)"),
    ],
)
def test_the_text_that_a_script_prints_after_a_traceback_is_not_lost(make_cluster, code, printed, says):
    """It had survived this exception, and `sys.exit` ended it."""
    cluster = started(make_cluster)
    name = cluster.named(WORKER, 0)
    cluster.end(name, code, f"{LOG}{printed}\n")
    raised = raised_by(cluster.pods[name])
    assert raised.summary == says
    assert not raised.transient


@pytest.mark.parametrize(
    ("code", "log", "transient"),
    [
        (1, f"{LOG}wandb: the network is unavailable\n", False),
        (3, f"{LOG}wandb: the network is unavailable\n", True),  # the script has survived the exception
        (1, f"{LOG}UNAVAILABLE: no answer of the compiler\n", True),
        (1, f"{LOG.replace('ModuleNotFoundError', 'ConnectionRefusedError')}giving up\n", True),
        (3, f"{LOG.replace('ModuleNotFoundError', 'ConnectionRefusedError')}giving up\n", True),
        (1, f"{LOG.replace('ModuleNotFoundError', 'TimeoutError')}used the old file\n{LOG}", False),
    ],
)
def test_what_may_succeed_later_is_seen_in_the_log(make_cluster, code, log, transient):
    cluster = started(make_cluster)
    name = cluster.named(WORKER, 0)
    cluster.end(name, code, log)
    assert raised_by(cluster.pods[name]).transient is transient


def test_an_exception_has_the_traceback_and_the_place_that_belong_to_it(make_cluster):
    cluster = started(make_cluster)
    handled = LOG.replace("train.py", "handled.py")
    chained = "\nThe above exception was the direct cause of the following exception:\n\n"
    library = TRACEBACK.replace("/backstay/code/train.py", "/usr/lib/python3.11/runpy.py")
    cause = TRACEBACK.replace("line 7", "line 3")
    for rank, log in enumerate((f"{handled}again\n{library}", f"{handled}again\n{cause}{chained}{library}")):
        name = cluster.named(WORKER, rank)
        cluster.end(name, 1, log)
    first, second = (raised_by(cluster.pods[cluster.named(WORKER, rank)]) for rank in (0, 1))
    assert first.at.startswith("/usr/lib")
    assert first.traceback == library.rstrip()
    assert second.at == "/backstay/code/train.py:3"
    assert second.traceback == f"{cause}{chained}{library}".rstrip()


USAGE = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --rl 1\n"
UNREADABLE = "usage: train.py [-h]\ntrain.py: error: argument --data: can't open 'x': [Errno 110] timed out\n"
CLICK = "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option: --rl\n"
ABSL = "FATAL Flags parsing error: Unknown command line flag 'rl'\nPass --helpshort or --helpfull to see help.\n"


@pytest.mark.parametrize(
    ("code", "log", "says"),
    [
        (2, USAGE, "SystemExit: train.py: error: unrecognized arguments: --rl 1"),
        (2, CLICK, "SystemExit: Error: No such option: --rl"),
        (1, ABSL, "SystemExit: Unknown command line flag 'rl'"),
        (1, ABSL.replace("error: ", "error:\n  "), "SystemExit: Unknown command line flag 'rl'"),
        (1, "FATAL Flags parsing error:", "SystemExit: FATAL Flags parsing error:"),
        (2, USAGE.partition("\n")[2], "SystemExit: train.py: error: unrecognized arguments: --rl 1"),
        (1, USAGE, None),
        (2, 'psql: error: connection to server at "db" failed: Connection refused\n', None),
        (2, "error: Failed to fetch: `https://pypi.org/simple/numpy/`\n", None),
        (2, UNREADABLE, None),
        (2, "error: the disk is full\nhello\n", None),
        (2, "", None),
    ],
)
def test_o4_a_script_that_refuses_its_arguments_fails_the_job_immediately(make_cluster, code, log, says):
    """O4: Python ends without a traceback, before `train`, and every pod gets the same arguments."""
    cluster = started(make_cluster)
    for role in (SERVER, WORKER):
        for index in (0, 1):
            if cluster.status["phase"] != "Failed":
                crash(cluster, role, index, log, code)
    assert (cluster.status["phase"] == "Failed") == (says is not None)
    if says is not None:
        failed = cluster.condition("Failed")
        assert failed["reason"] == "ScriptFailed"
        assert failed["message"].startswith(f"{says}: raised by 2 of 2 parameter servers, so another attempt")


MESSAGES = st.sampled_from(["a", "b", "transient", "signal"])


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    servers=st.integers(1, 3),
    workers=st.integers(1, 4),
    data=st.data(),
    trained=st.booleans(),
)
def test_o4_the_job_fails_exactly_when_most_pods_of_a_role_agree(make_cluster, servers, workers, data, trained):
    """O4: against a count that is made from what each slot's last pod raised."""
    cluster = started(make_cluster, {"parameterServers": {"replicas": servers}, "workers": {"replicas": workers}})
    if trained:
        cluster.answer(step=1)
    slots = [(SERVER, i) for i in range(servers)] + [(WORKER, i) for i in range(workers)]
    raised = {}
    for role, index in data.draw(st.permutations(slots)):
        kind = data.draw(MESSAGES)
        if kind in ("a", "b"):
            raised[role, index] = kind
        message = says(at=f"train.py:{kind}", **({"transient": True} if kind == "transient" else {}))
        crash(cluster, role, index, message, 137 if kind == "signal" else 1)
        agreed = any(
            sum(raised.get(slot) == key for slot in group) >= max(2, len(group) // 2 + 1)
            for key in "ab"
            for group in (slots, [s for s in slots if s[0] == SERVER], [s for s in slots if s[0] == WORKER])
        )
        ranks = [raised.get((WORKER, rank)) for rank in range(workers)]
        all_ranks = workers > 1 and ranks[0] is not None and len(set(ranks)) == 1
        assert (cluster.status["phase"] == "Failed") == (all_ranks if trained else agreed)
        if cluster.status["phase"] == "Failed":
            return
