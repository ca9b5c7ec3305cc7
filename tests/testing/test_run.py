"""`backstay.testing.run` runs whole jobs, with the promises of training that a user's test can observe."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from between import put

from backstay import testing
from backstay.errors import ConfigurationError, JobFailed
from backstay.testing._run import forker_for

SCRIPT = Path(__file__).with_name("script.py")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_t4_a_worker_that_dies_after_it_computed_changes_no_result(script: ModuleType) -> None:
    """T3, T4: as a function and as a script, with a worker killed before it sends; the same parameters."""
    first = testing.run(script.main, workers=2)
    second = testing.run(SCRIPT, workers=2, faults=["kill worker/1 @5 push", "nan worker/0 @100"])
    assert [(death.slot, death.incarnation, death.exit_code) for death in second.deaths] == [
        ("worker/1", 1, testing.KILLED)
    ]
    np.testing.assert_array_equal(first.params["w"], second.params["w"])
    for job in (first, second):
        assert sorted(job.results) == [0, 1]
        assert [update.step for update in job.updates] == list(range(script.STEPS))
        assert {update.ranks for update in job.updates} == {(0, 1)}
        assert job.outcomes() == {"applied": 2 * script.STEPS}
    assert {one.incarnation for one in second.of_rank(1) if one.step >= 5} == {2}


def test_t3_a_standby_continues_without_a_rollback() -> None:
    """T3: the coordinator dies, and each contribution still counts once."""
    job = testing.run(SCRIPT, workers=2, standbys=1, faults="kill server/0 @4; nan worker/1 @8")
    assert job.rollbacks == ()
    assert [update.step for update in job.updates if update.skipped] == [8]
    assert len(job.updates) == len(job.of_rank(0)) == 12
    assert [death.slot for death in job.deaths] == ["server/0"]


def test_a_fault_makes_the_contribution_of_its_step_not_finite_although_it_was_computed_early() -> None:
    job = testing.run(SCRIPT, mode="Async", overlap=True, faults="nan worker/0 @0; nan worker/0 @4")
    assert [one.step for one in job.contributions if one.outcome == "non_finite"] == [0, 4]


def test_pods_have_the_environment_of_their_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that forks them is older."""
    monkeypatch.setenv("REMOVED", "1")
    forker = forker_for(SCRIPT)
    assert forker.environ["REMOVED"] == "1"
    monkeypatch.delenv("REMOVED")
    monkeypatch.setenv("ADDED", "1")
    assert forker_for(SCRIPT) is forker
    assert forker.environ["ADDED"] == "1"
    assert "REMOVED" not in forker.environ


def test_scripts_that_import_other_modules_share_one_process_that_imports_jax(tmp_path: Path) -> None:
    """A process starts for a package that the last one has not imported, and the next ones have it."""
    put(tmp_path / "names.py", "from jax.sharding import PartitionSpec\nimport numpy.linalg\n")
    put(tmp_path / "package.py", "import yaml\n")
    first = forker_for(SCRIPT)
    assert forker_for(tmp_path / "names.py") is first
    second = forker_for(tmp_path / "package.py")
    assert second is not first
    assert second.imports >= first.imports | {"yaml"}
    assert forker_for(SCRIPT) is second


def test_pods_are_forked_though_a_library_has_set_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-learn sets one when it is imported. Pods that start with another value than JAX are executed."""
    monkeypatch.delenv("KMP_INIT_AT_FORK", raising=False)  # a test before this one may have imported it
    before = forker_for(SCRIPT)
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")
    after = forker_for(SCRIPT)
    assert after is not before
    assert after.forks(after.environ)
    assert not after.forks(before.environ)


def test_an_exception_of_the_script_fails_the_job_with_its_traceback() -> None:
    with pytest.raises(JobFailed, match="the data ends here") as caught:
        testing.run(SCRIPT, ["--fail"])
    assert "script.py" in caught.value.message
    found = testing.run(SCRIPT, faults="exit worker/0#* @2 1", max_restarts=1, check=False)
    assert (found.succeeded, found.reason, len(found.deaths)) == (False, "MaxRestartsExceeded", 2)


@pytest.mark.parametrize("weighting", ["Equal", "Examples"])
def test_o4_a_batch_without_rows_of_one_rank_fails_the_job(script: ModuleType, weighting: str) -> None:
    """The gradient of a mean over 0 rows is 0, so the job would succeed without the work of this rank."""
    with pytest.raises(JobFailed, match="batch of step 3 of rank 1 has no rows") as caught:
        testing.run(SCRIPT, ["--empty"], workers=2, weighting=weighting)
    assert caught.value.reason == "EmptyBatch"


def test_o4_a_worker_that_holds_the_interpreters_lock_for_less_than_stall_seconds_is_not_replaced() -> None:
    """It sends no heartbeat for 9 s and answers no call. It was replaced 3/4 of the limit before the limit."""
    job = testing.run(SCRIPT, ["--hold"], workers=2, stall_seconds=30)
    assert not job.deaths
    assert len(job.updates) == 12


def test_a_job_continues_in_the_folder_of_a_previous_one(tmp_path: Path) -> None:
    """T7: the second job finds the training complete, and its workers return the same parameters."""
    first = testing.run(SCRIPT, checkpoint_every=5, folder=tmp_path, faults="kill server/0 @8")
    assert [(back.term, len(first.updates)) for back in first.rollbacks] == [(2, 12)]
    again = testing.run(SCRIPT, checkpoint_every=5, folder=tmp_path)
    assert (again.updates, again.result.step) == ((), 12)
    np.testing.assert_array_equal(first.params["w"], again.params["w"])


def test_a_script_that_does_not_train_fails_the_job(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    put(script, "print('nothing')\n")
    with pytest.raises(JobFailed, match="ended with exit code 0 before training had ended"):
        testing.run(script)


def test_invalid_arguments_are_refused_before_a_pod_starts(tmp_path: Path) -> None:
    of_a_cell: dict[str, object] = {}
    exec(compile("def train(): ...", "<ipython-input-1>", "exec"), of_a_cell)
    for arguments, message in (
        ({"script": tmp_path / "none.py"}, "none.py"),
        ({"script": lambda: None}, "top level of a file"),
        ({"script": of_a_cell["train"]}, "function of a notebook or of a terminal to a file first"),
        ({"faults": "kil worker/1 @2"}, "'kil' is not an action"),
        ({"max_stale": 3}, "max_stale is not a setting of a job: must be one of .*max_staleness"),
        ({"evaluator": True}, "evaluator needs checkpoint_every"),
        ({"wire": {"gradients": "Int2"}}, "wire.gradients"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            testing.run(**{"script": SCRIPT, **arguments})
