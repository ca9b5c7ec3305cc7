"""T4, T6: pods that compute different updates never train together; the refusal says what differs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import backstay
from backstay._transport import Agreement
from backstay_rpc.control_pb2 import Leaf

LEAVES = (Leaf(path="w", shape=[2], dtype="float32"),)
SETTINGS = {
    "layout": "aa",
    "optimizer": "bb",
    "optimizer_state": "cc",
    "optimizer_constants": "-0.1 0.9",
    "steps": "10",
    "seed": "0",
    "clip_norm": "None",
    "wire.gradients": "Exact",
}
CASES = [
    ({"steps": "11"}, ["steps is 11 in worker 3 and 10 in shard 0"]),
    ({"seed": "1"}, ["seed is 1 in worker 3 and 0 in shard 0"]),
    ({"wire.gradients": "Int8"}, ["wire.gradients is Int8 in worker 3 and Exact in shard 0"]),
    ({"clip_norm": "0.5"}, ["clip_norm is 0.5 in worker 3 and None in shard 0"]),
    (
        {"layout": "ab", "optimizer": "bc", "optimizer_constants": "-0.01 0.9"},
        ["the optimizer computes another update in worker 3: its constants have -0.01 where shard 0 has -0.1"],
    ),
    (
        {"layout": "ab", "optimizer": "bc", "optimizer_state": "cd"},
        ["the optimizer's state has other arrays in worker 3 than in shard 0, with the same constants"],
    ),
    ({"layout": "ab"}, ["the number of shards, or a setting, is not the same (layout)"]),
    ({"steps": "11", "seed": "1"}, ["seed is 1 in worker 3", "steps is 11 in worker 3"]),
    ({"a later setting": "1"}, ["or a setting, is not the same (a later setting)"]),
]


@pytest.mark.parametrize(("changed", "said"), CASES)
def test_what_differs_is_named(changed: dict[str, str], said: list[str]) -> None:
    mine = Agreement(LEAVES, SETTINGS)
    text = mine.difference(LEAVES, SETTINGS | changed, "worker 3", "shard 0")
    assert [part for part in said if part not in text] == []
    assert mine.digest != Agreement(LEAVES, SETTINGS | changed).digest


@pytest.mark.parametrize("more", [{}, {"layout": "ab"}, {"steps": "11"}])
def test_another_codec_is_not_blamed_on_the_script(more: dict[str, str]) -> None:
    mine = Agreement(LEAVES, SETTINGS)
    text = mine.difference(LEAVES, SETTINGS | more | {"wire.gradients": "Int8"}, "worker 3", "shard 0")
    assert "spec.wire of the TrainingJob (of `backstay run`: --gradients and --parameters) must be the same" in text
    assert ("The script must be" in text) == ("steps" in more)


def test_another_jax_explains_a_difference_and_is_none_itself() -> None:
    """A changed version of JAX, or the x64 flag of one pod, shows as another program or another dtype."""
    mine = Agreement(LEAVES, SETTINGS | {"software": "jax 0.10.2 with x64 off"})
    other = SETTINGS | {"software": "jax 0.9.0 with x64 on"}
    assert mine.difference(LEAVES, other, "worker 3", "shard 0") == ""
    assert mine.digest == Agreement(LEAVES, other).digest
    named = "and so must JAX: worker 3 has jax 0.9.0 with x64 on, shard 0 has jax 0.10.2 with x64 off."
    assert named in mine.difference(LEAVES, other | {"optimizer": "bc"}, "worker 3", "shard 0")
    wide = (Leaf(path="w", shape=[2], dtype="float64"),)
    assert named in mine.difference(wide, other, "worker 3", "shard 0")
    assert "JAX" not in mine.difference(wide, SETTINGS, "worker 3", "shard 0"), "an older trainer does not say"


@pytest.mark.parametrize(("theirs", "named"), [({"version": "0.2.0"}, "0.2.0"), ({}, "an older one")])
def test_another_version_of_backstay_is_refused_and_explains_every_other_difference(
    theirs: dict[str, str], named: str
) -> None:
    """Nothing compared the versions of the pods, and a difference was blamed on the script."""
    mine = Agreement(LEAVES, SETTINGS | {"version": "0.1.0"})
    for more in ({}, {"layout": "ab", "steps": "11"}):
        text = mine.difference(LEAVES, SETTINGS | theirs | more, "worker 3", "shard 0")
        assert f"the version of Backstay is {named} in worker 3 and 0.1.0 in shard 0" in text
        assert "Suspend the job, set spec.image, and resume the job." in text
        assert "script" not in text


def test_the_version_that_pods_compare_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    assert backstay.__version__ == project["version"]


def test_a_pod_that_agrees_is_not_refused() -> None:
    mine = Agreement(LEAVES, SETTINGS)
    backwards = dict(reversed(SETTINGS.items()))
    assert mine.difference(LEAVES, backwards, "worker 3", "shard 0") == ""
    assert mine.digest == Agreement(LEAVES, backwards).digest


@pytest.mark.parametrize("missing", sorted(SETTINGS))
def test_a_setting_that_a_peer_does_not_send_is_a_difference(missing: str) -> None:
    theirs = {name: text for name, text in SETTINGS.items() if name != missing}
    text = Agreement(LEAVES, SETTINGS).difference(LEAVES, theirs, "worker 3", "shard 0")
    assert (text == "") == (missing == "optimizer_constants")  # the constants only explain


def test_t4_a_server_with_another_learning_rate_is_refused(job, tmp_path: Path) -> None:
    """The coordinator refuses shard 1, and shard 0 a worker, a worker of other steps and an evaluator, as real
    processes."""
    tiny = job(2, 2, evaluator=True, checkpoint={"uri": str(tmp_path / "checkpoints"), "every_steps": 4})
    tiny.may_end_with(1)
    tiny.server(0)
    other_server = tiny.server(1, LEARNING_RATE="1e-3")
    other_worker = tiny.worker(0, LEARNING_RATE="1e-3")
    other_steps = tiny.worker(1, STEPS="9")
    other_seed = tiny.start("evaluator", 0, environment={"SEED": "7"})
    for pod, peer in ((other_server, "parameter-server 1"), (other_worker, "worker 0")):
        assert pod.may_end_with(1).wait() == 1
        words = pod.final_message()
        assert words["result"] == "Refused"
        assert f"the optimizer computes another update in {peer}" in str(words["message"])
        assert "-0.001 where" in str(words["message"])
        assert "has -0.01" in str(words["message"])
    assert other_steps.may_end_with(1).wait() == 1
    assert "steps is 9 in worker 1 and 8 in shard 0" in str(other_steps.final_message()["message"])
    assert other_seed.may_end_with(1).wait() == 1
    assert "seed is 7 in evaluator 0 and 0 in shard 0" in str(other_seed.final_message()["message"])
    # With the right ones in their places the job trains to its end.
    tiny.server(1, 1)
    workers = [tiny.worker(rank, 1) for rank in range(2)]
    tiny.start("evaluator", 0, 1)
    assert [pod.wait() for pod in workers] == [0, 0]
    assert tiny.pods[0].wait() == 0


def test_t6_a_standby_with_another_learning_rate_is_refused(job) -> None:
    tiny = job(1, 1, standbys=1)
    tiny.environment = {"BACKSTAY_ACTIVE": "1"}
    tiny.server(0, 1)
    standby = tiny.start("parameter-server", 0, 2, ports=tiny.new_ports(), environment={"LEARNING_RATE": "1e-3"})
    assert standby.may_end_with(1).wait() == 1
    assert "the optimizer computes another update in parameter-server 0" in str(standby.final_message()["message"])
