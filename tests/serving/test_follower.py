"""Which checkpoint is served: the newest whole one of the same job and model, and never a torn or a foreign one."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from between import put

import backstay
from backstay._serving._batcher import Batcher
from backstay._serving._choice import CheckpointChoice
from backstay._serving._follower import CheckpointFollower
from backstay._serving._metrics import ServingMetrics
from backstay._serving._program import ServingProgram
from backstay._serving._signature import Signature
from backstay.errors import ConfigurationError, StorageError

Store = Callable[..., Any]


class Following:
    """A `CheckpointFollower` of a folder, with a clock that the test sets.

    Attributes:
        predict: what is compiled for the first checkpoint.
    """

    now = 0.0

    def __init__(self, uri: Path | str, **choice: Any) -> None:
        self.metrics = ServingMetrics()
        self.batcher = Batcher(self.metrics, lambda answered: None, delay=0, patience=1, batches=1)
        self.choice = CheckpointChoice(str(uri), **choice)
        self.made = 0
        self.follower = CheckpointFollower(
            self.choice, self._program, self.batcher, self.metrics, retry=30.0, clock=lambda: self.now
        )

    def predict(self, params: Any, state: Any, x: Any) -> Any:
        return x * params["value"] + (0 if state is None else state["mean"])

    def _program(self, loaded: Any) -> ServingProgram:
        self.made += 1
        return ServingProgram(
            self.predict, Signature.of(np.zeros(2, np.float32)), (1, 2), (loaded.params, loaded.state)
        )

    def look(self) -> int | None:
        """Returns the step that is served after one look."""
        self.follower.look()
        return None if self.batcher.current is None else self.batcher.current[1].step

    def answer(self) -> float:
        """Returns the output of the served version for ones."""
        assert self.batcher.current is not None
        program, version = self.batcher.current
        [found] = program.run(version, np.ones((1, 2), np.float32), 1)
        return float(found[0, 0])

    def skipped(self, reason: str) -> float | None:
        return self.metrics.registry.get_sample_value("backstay_serving_skipped_checkpoints_total", {"reason": reason})


def damage(folder: Path, manifest: Any) -> None:
    file = folder / manifest.files[0].name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.chmod(0o644)
    put(file, content)


def forbid(following: Following, reads: list[int], times: dict[int, int]) -> dict[int, int]:
    """Let the next reads of some steps fail. Returns `times`, which may be changed; `reads` receives each read."""
    load = following.choice.load

    def forbidding(name: Any) -> Any:
        reads.append(name.version)
        if times.get(name.version, 0) > 0:
            times[name.version] -= 1
            raise StorageError("shard 3: 403 Forbidden")
        return load(name)

    following.choice.load = forbidding  # type: ignore[method-assign]
    return times


def test_t7_the_newest_checkpoint_is_served_and_followed_with_one_compilation(
    tmp_path: Path, store: Store, value_of: Any
) -> None:
    following = Following(tmp_path)
    assert following.look() is None
    assert "has no complete checkpoint yet" in following.follower.status
    store(tmp_path, 1, value_of(1))
    store(tmp_path, 2, value_of(2))
    assert (following.look(), following.answer()) == (2, 2.0)
    assert following.follower.look() is False, "nothing has changed"
    store(tmp_path, 3, value_of(3))
    store(tmp_path, 4, value_of(4))
    assert (following.look(), following.answer()) == (4, 4.0), "two in a row: the newer one"
    assert following.made == 1


def test_t7_a_damaged_checkpoint_is_passed_over_by_name_and_read_again_later(
    tmp_path: Path, store: Store, value_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store(tmp_path, 1, value_of(1))
    whole = store(tmp_path, 2, value_of(2))
    content = (tmp_path / whole.files[0].name).read_bytes()
    damage(tmp_path, whole)
    following = Following(tmp_path)
    with caplog.at_level(logging.WARNING, "backstay"):
        assert following.look() == 1
    assert whole.name in caplog.text
    assert "is damaged: its SHA-256 is not the manifest's" in caplog.text
    assert following.skipped("Damaged") == 1
    caplog.clear()
    following.now = 29.0
    store(tmp_path / "other", 9, value_of(9))
    assert following.look() == 1
    following.now = 31.0
    assert following.look() == 1
    assert caplog.text == "", "the same reason is logged once"
    put(tmp_path / whole.files[0].name, content)
    following.now = 60.0
    assert following.look() == 1, "the pause doubles"
    following.now = 92.0
    assert following.look() == 2, "a file that was incomplete at first"


@pytest.mark.parametrize("missing", ["file", "manifest"])
def test_t7_a_torn_checkpoint_is_never_served(tmp_path: Path, store: Store, value_of: Any, missing: str) -> None:
    store(tmp_path, 1, value_of(1))
    torn = store(tmp_path, 2, value_of(2))
    if missing == "file":
        (tmp_path / torn.files[0].name).unlink()
    else:
        text = (tmp_path / torn.name).read_text()
        put(tmp_path / torn.name, text[: len(text) // 2])
    assert Following(tmp_path).look() == 1


def test_t7_a_checkpoint_of_another_model_or_job_is_refused_with_the_reason(
    tmp_path: Path, store: Store, value_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store(tmp_path, 1, value_of(1))
    following = Following(tmp_path)
    assert following.look() == 1
    store(tmp_path, 2, {"value": np.zeros(3, np.float32)})
    assert following.look() == 1
    assert "it belongs to another model: value is float32[3], must be float32[1]" in caplog.text
    store(tmp_path, 3, {"other": np.zeros(1, np.float32)})
    assert following.look() == 1
    assert "its tree has another structure" in caplog.text
    store(tmp_path, 4, value_of(4), state={"mean": np.ones(1, np.float32)})
    assert following.look() == 1
    store(tmp_path, 5, {"value": np.zeros(1, np.float64)})
    assert following.look() == 1
    assert "value is float64[1], must be float32[1]" in caplog.text
    store(tmp_path, 6, value_of(6), job="else", history="00000000000000bb")
    assert following.look() == 1
    assert "the job default/else wrote it, and a checkpoint of default/digits is served" in caplog.text
    assert following.skipped("Foreign") == 5
    store(tmp_path, 7, value_of(7))
    assert (following.look(), following.answer()) == (7, 7.0)
    assert following.made == 1


def test_t6_a_rollback_of_training_is_followed_and_a_deletion_is_not(
    tmp_path: Path, store: Store, value_of: Any, rollback: Any
) -> None:
    first = store(tmp_path, 1, value_of(1))
    later = store(tmp_path, 5, value_of(5))
    following = Following(tmp_path)
    assert following.look() == 5
    (tmp_path / later.name).unlink()
    assert following.look() == 5, "a deleted file does not make older checkpoints newer"
    rollback(tmp_path, first, term=2)
    assert following.look() == 1
    store(tmp_path, 2, value_of(2), term=2)
    assert following.look() == 2
    store(tmp_path, 6, value_of(6), term=1)
    assert following.look() == 2, "a process of the older term still writes"


def test_t6_a_new_history_in_the_folder_is_followed_although_its_numbers_are_lower(
    tmp_path: Path, store: Store, value_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder was deleted while it was served, and the job trained again."""
    store(tmp_path / "ck", 50, value_of(50), term=3)
    following = Following(tmp_path / "ck")
    assert following.look() == 50
    shutil.rmtree(tmp_path / "ck")
    assert (following.look(), following.answer()) == (50, 50.0)
    assert "has no checkpoints any more" in caplog.text
    assert following.metrics.registry.get_sample_value("backstay_serving_storage_available") == 0
    store(tmp_path / "ck", 1, value_of(1), history="00000000000000cc")
    assert following.look() == 1
    assert following.metrics.registry.get_sample_value("backstay_serving_storage_available") == 1


def test_t8_storage_that_fails_leaves_the_served_version_and_is_read_again(
    tmp_path: Path, store: Store, value_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store(tmp_path, 1, value_of(1))

    class Failing(CheckpointChoice):
        fails = False

        def look(self, served: Any) -> Any:
            if self.fails:
                raise StorageError("the bucket does not answer")
            return super().look(served)

    following = Following(tmp_path)
    failing = Failing(str(tmp_path))
    following.follower = CheckpointFollower(
        failing, following._program, following.batcher, following.metrics, retry=30.0
    )
    failing.fails = True
    assert following.look() is None
    assert following.follower.status == "the bucket does not answer"
    assert "no new checkpoints can be read, no checkpoint is served: the bucket does not answer" in caplog.text
    failing.fails = False
    assert following.look() == 1
    caplog.clear()
    failing.fails = True
    store(tmp_path, 2, value_of(2))
    with caplog.at_level(logging.INFO, "backstay"):
        assert following.look() == 1
        assert following.look() == 1
    assert caplog.text.count("the bucket does not answer") == 1
    failing.fails = False
    assert following.look() == 2


def test_t8_a_file_that_cannot_be_read_leaves_older_checkpoints_and_is_read_again_later(
    tmp_path: Path, store: Store, value_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder itself can be listed."""
    store(tmp_path, 1, value_of(1))
    store(tmp_path, 2, value_of(2))
    following, reads = Following(tmp_path), list[int]()
    forbidden = forbid(following, reads, {1: 9, 2: 9})
    available = "backstay_serving_storage_available"
    with caplog.at_level(logging.INFO, "backstay"):
        assert [following.look() for _ in range(3)] == [None, None, None]
        assert reads == [2, 2, 2], "the newest one is read at each look"
        following.now = 31.0
        assert [following.look() for _ in range(3)] == [None, None, None]
        assert reads == [2, 2, 2, 2, 1], "each is read once until its pause has passed"
        assert following.follower.status.count("403 Forbidden") == 2, "once for each checkpoint"
        forbidden[1] = 0
        following.now = 62.0
        assert [following.look() for _ in range(3)] == [1, 1, 1]
        assert reads == [2, 2, 2, 2, 1, 2, 1]
        assert caplog.text.count("403 Forbidden") == 2
        assert "can be read" not in caplog.text
    assert following.metrics.registry.get_sample_value(available) == 1
    assert following.skipped("Unreadable") == 2
    forbidden[2] = 0
    following.now = 121.0
    assert following.look() == 1, "the pause doubles"
    following.now = 123.0
    assert following.look() == 2


@pytest.mark.parametrize("newer", ["same", "job", "model"])
@pytest.mark.parametrize("follow", [True, False])
def test_t8_an_error_of_one_read_at_the_start_makes_no_older_checkpoint_the_served_one(
    tmp_path: Path, store: Store, value_of: Any, newer: str, follow: bool
) -> None:
    """The job and the model of the first one are the only ones to be served until a restart."""
    store(tmp_path, 1, value_of(1))
    values = {"value": np.zeros(2, np.float32)} if newer == "model" else value_of(2)
    store(tmp_path, 2, values, term=2, job="other" if newer == "job" else "digits")
    following = Following(tmp_path)
    forbid(following, [], {2: 1})
    if follow:
        assert [following.look(), following.look()] == [None, 2]
    else:
        stop = threading.Event()
        timer = threading.Timer(5.0, stop.set)
        timer.start()
        following.follower.run(stop, 0.0, follow=False)
        timer.cancel()
        assert following.look() == 2


def test_t8_an_older_checkpoint_is_not_read_before_a_newer_one_whose_pause_is_longer(
    tmp_path: Path, store: Store, value_of: Any
) -> None:
    store(tmp_path, 1, value_of(1), job="other")
    following = Following(tmp_path)
    forbidden = forbid(following, [], {1: 999, 2: 999})
    for now in (0.0, 31.0, 62.0):
        following.now = now
        assert following.look() is None
    following.now = 100.0
    store(tmp_path, 2, value_of(2), term=2)
    assert following.look() is None
    following.now = 121.0
    forbidden.clear()
    while following.look() is None and following.now < 300:
        following.now += 1.0
    assert following.look() == 2


def test_t8_after_an_outage_of_an_hour_a_checkpoint_is_served_within_a_minute(
    tmp_path: Path, store: Store, value_of: Any
) -> None:
    store(tmp_path, 1, value_of(1))
    following, reads = Following(tmp_path), list[int]()
    forbidden = forbid(following, reads, {1: 3600})
    for now in range(3600):
        following.now = float(now)
        assert following.look() is None
    assert len(reads) < 100
    forbidden.clear()
    following.now += 61.0
    assert following.look() == 1


def test_t8_without_following_a_newer_checkpoint_of_the_start_is_read_again_and_later_ones_are_not(
    tmp_path: Path, store: Store, value_of: Any
) -> None:
    store(tmp_path, 1, value_of(1))
    store(tmp_path, 2, value_of(2))
    following, reads = Following(tmp_path), list[int]()
    forbid(following, reads, {2: 70})
    steps = []

    class Passing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            following.now += 1.0
            steps.append(following.batcher.current[1].step if following.batcher.current else None)
            if following.now == 40.0:
                store(tmp_path, 3, value_of(3))
            if following.now > 10_000:
                self.set()
            return self.is_set()

    stop = Passing()
    following.follower.run(stop, 1.0, follow=False)
    assert not stop.is_set(), "nothing is left to be read"
    assert following.batcher.current is not None
    assert (following.batcher.current[1].step, 3 in reads) == (2, False)
    assert set(steps) == {None, 1}


def test_t8_a_version_that_does_not_fit_into_memory_leaves_the_served_one(
    tmp_path: Path, store: Store, value_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store(tmp_path, 1, value_of(1))

    class Full(ServingProgram):
        fails = False

        def check(self, version: Any) -> None:
            if Full.fails:
                raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")
            super().check(version)

    following = Following(tmp_path)

    def program(loaded: Any) -> ServingProgram:
        return Full(following.predict, Signature.of(np.zeros(2, np.float32)), (1,), (loaded.params, loaded.state))

    following.follower = CheckpointFollower(
        following.choice, program, following.batcher, following.metrics, retry=30.0, clock=lambda: following.now
    )
    Full.fails = True
    assert following.look() is None
    Full.fails = False
    following.now = 31.0
    assert following.look() == 1
    Full.fails = True
    store(tmp_path, 2, value_of(2))
    assert (following.look(), following.answer()) == (1, 1.0)
    assert "step 1 stays served: RuntimeError: RESOURCE_EXHAUSTED" in caplog.text
    Full.fails = False
    following.now = 62.0
    assert following.look() == 2


def test_an_error_of_predict_with_the_first_checkpoint_ends_serving(
    tmp_path: Path, store: Store, value_of: Any
) -> None:
    store(tmp_path, 1, value_of(1))
    following = Following(tmp_path)
    following.predict = lambda params, state, x: params["missing"]  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="`predict` raised KeyError"):
        following.look()


@pytest.mark.parametrize("sizes", range(6))
def test_o11_the_sizes_after_sigterm_are_not_compiled_or_computed(
    tmp_path: Path, store: Store, value_of: Any, sizes: int
) -> None:
    """Two sizes are compiled, then computed, and then an example is compared."""
    store(tmp_path, 1, value_of(1))
    following, called, stop = Following(tmp_path), list[int](), threading.Event()

    def stopped() -> bool:
        if len(called) == sizes:
            stop.set()
        called.append(1)
        return stop.is_set()

    def program(loaded: Any) -> ServingProgram:
        signature = Signature.of(np.zeros(2, np.float32))
        return ServingProgram(following.predict, signature, (1, 2), (loaded.params, loaded.state), stopped)

    follower = CheckpointFollower(following.choice, program, following.batcher, following.metrics, retry=30.0)
    follower.run(stop, 0.0, follow=True)
    assert len(called) == sizes + 1
    assert following.batcher.current is None


def test_one_step_or_one_manifest_is_served_and_not_followed(tmp_path: Path, store: Store, value_of: Any) -> None:
    manifests = [store(tmp_path, step, value_of(step)) for step in (1, 2, 3)]
    assert Following(tmp_path, step=2).look() == 2
    one = Following(tmp_path / manifests[0].name)
    assert one.look() == 1
    assert one.choice.fixed
    missing = Following(tmp_path, step=7)
    assert missing.look() is None
    assert "no complete checkpoint of step 7 yet" in missing.follower.status
    with pytest.raises(ConfigurationError, match="which is not the name of a checkpoint's manifest"):
        CheckpointChoice(str(tmp_path / "x.manifest.json"))


def test_a_model_state_is_served(tmp_path: Path, store: Store, value_of: Any) -> None:
    store(tmp_path, 1, value_of(2), state={"mean": np.full(1, 10, np.float32)})
    following = Following(tmp_path)
    assert (following.look(), following.answer()) == (1, 12.0)


def test_the_average_of_a_trained_job_is_served_if_it_is_wanted(tmp_path: Path) -> None:
    """Real training writes the checkpoints."""
    for folder, average in (("with", 0.5), ("without", None)):
        result = backstay.train(
            init=lambda key: {"value": jnp.zeros(1)},
            loss=lambda params, batch: ((params["value"] - 1) ** 2).mean(),
            batches=lambda key: np.zeros(1, np.float32),
            optimizer=optax.sgd(0.1),
            steps=3,
            average=average,
            checkpoint=str(tmp_path / folder),
        )
        if average is not None:
            following = Following(tmp_path / folder, average=True)
            assert following.look() == 3
            assert following.answer() == float(result.average["value"][0]) != float(result.params["value"][0])
        following = Following(tmp_path / folder)
        assert following.look() == 3
        assert following.answer() == pytest.approx(float(result.params["value"][0]))
    with pytest.raises(ConfigurationError, match="has no moving average: train with"):
        Following(tmp_path / "without", average=True).look()


@pytest.mark.parametrize("by_init", [False, True])
def test_frozen_parameters_are_read_from_their_place(tmp_path: Path, by_init: bool) -> None:
    """A base that `init` made has no place, so it is given."""
    base = {"value": np.full(1, 3.0, np.float32)}
    safetensors.numpy.save_file(base, tmp_path / "base.safetensors")
    settings: dict[str, Any] = {
        "init": lambda key: {"value": jnp.full(1, 2.0), "other": jnp.zeros(1)},
        "loss": lambda params, batch: ((params["other"] - params["value"]) ** 2).mean(),
        "batches": lambda key: np.zeros(1, np.float32),
        "optimizer": optax.sgd(0.1),
        "steps": 3,
        "frozen": lambda name: name == "value",
    }
    result = backstay.train(
        **settings,
        start_from=None if by_init else backstay.StartFrom(str(tmp_path / "base.safetensors"), missing="init"),
        checkpoint=str(tmp_path / "stored"),
    )
    if by_init:
        with pytest.raises(ConfigurationError, match=r"give it as `base`, such as base=init"):
            Following(tmp_path / "stored").look()
        # The next checkpoint names the first one as the place of its base, which has no place.
        backstay.train(**settings, start_from=str(tmp_path / "stored"), checkpoint=str(tmp_path / "again"))
        with pytest.raises(ConfigurationError, match=r"give it as `base`, such as base=init"):
            Following(tmp_path / "again").look()
    following = Following(tmp_path / "stored", base=result.params if by_init else True)
    assert following.look() == 3
    assert following.answer() == (2.0 if by_init else 3.0)
