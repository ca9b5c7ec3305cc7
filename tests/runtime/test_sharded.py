"""A model that is divided over the devices of a worker trains as one that is whole (T4)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from between import LONG

from backstay import testing
from backstay._faults import ENV_FAULTS
from backstay.testing import KILLED, Forker, Job

SCRIPT = Path(__file__).with_name("sharded.py")
DEVICES = {"DEVICES": "4", "JAX_PLATFORMS": "cpu"}


def alone(
    parent: Forker, folder: Path, kind: str, more: str, devices: dict[str, str]
) -> tuple[dict[str, np.ndarray], str]:
    out, log = folder / f"{kind}-{more}.npz", folder / f"{kind}-{more}.log"
    environment = {**parent.environ, **devices, "KIND": kind, "MORE": more, "OUT": str(out)}
    done = parent.start([sys.executable, str(SCRIPT)], environment, log)
    assert done.wait(LONG) == 0, log.read_text()
    return dict(np.load(out)), log.read_text()


@pytest.fixture(scope="module")
def plain(parent: Forker, tmp_path_factory: pytest.TempPathFactory):
    """The parameters of one process with one device."""
    made: dict[str, dict[str, np.ndarray]] = {}

    def of(more: str) -> dict[str, np.ndarray]:
        if more not in made:
            made[more] = alone(parent, tmp_path_factory.mktemp("plain"), "", more, {"JAX_PLATFORMS": "cpu"})[0]
        return made[more]

    return of


def same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("whole", ""),
        ("pipeline", ""),
        ("fsdp", "local"),
        ("tensor", "frozen"),
        ("fsdp", "factored"),
    ],
)
def test_t4_one_process_with_a_divided_model(kind: str, more: str, parent: Forker, plain, tmp_path: Path) -> None:
    got, log = alone(parent, tmp_path, kind, more, DEVICES)
    same(got, plain(more))
    warned = "does not divide all of odd float64[67,71], because the sizes of the mesh" in log
    assert warned == (kind in ("fsdp", "tensor"))


@pytest.mark.parametrize(
    ("kind", "more", "accelerated"),
    [("tensor", "local", True), ("fsdp", "frozen", False), ("", "", True)],
)
def test_t4_a_job_with_a_divided_model(kind: str, more: str, accelerated: bool, plain, tmp_path: Path) -> None:
    """The servers do not use the mesh. Each accelerator receives a part, and encodes one."""
    out = tmp_path / "out.npz"
    env = DEVICES | {"KIND": kind, "MORE": more, "OUT": str(out), "ACCELERATED": "0" if accelerated else ""}
    job = testing.run(SCRIPT, servers=2, env=env)
    assert job.succeeded
    (log,) = (log for name, log in job.logs.items() if name.startswith("worker"))
    assert ("encoded on an accelerator" in log) == accelerated
    same(dict(np.load(out)), plain(more))


def test_an_evaluator_whose_devices_fit_has_the_mesh(plain, tmp_path: Path) -> None:
    env = DEVICES | {"KIND": "pipeline", "OUT": str(tmp_path / "out.npz")}
    job = testing.run(SCRIPT, env=env, evaluator=True, checkpoint_every=4)
    assert job.result.metrics == pytest.approx({"error": float(plain("")["error"])})


def test_an_evaluator_whose_devices_do_not_fit_gets_whole_arrays(plain, tmp_path: Path) -> None:
    """A function that makes the mesh raises an error of NumPy there."""
    env = DEVICES | {"DEVICES_OF_EVALUATOR": "1", "KIND": "made", "OUT": str(tmp_path / "out.npz")}
    job = testing.run(SCRIPT, env=env, evaluator=True, checkpoint_every=4)
    assert job.result.metrics == pytest.approx({"error": float(plain("")["error"])})
    (log,) = (log for name, log in job.logs.items() if name.startswith("evaluator"))
    assert (
        "evaluate gets whole arrays and no mesh: mesh raised ValueError for the devices of this process (1 cpu)" in log
    )


class DividedJob(Job):
    """A job whose pods write their results into its folder."""

    def variables(self, name: str) -> dict[str, str]:
        return DEVICES | {"BACKSTAY_JOB": "divided", "KIND": "fsdp", "OUT": str(self.folder / f"{name}.npz")}


def test_t7_a_worker_that_comes_after_training_divides_the_checkpoint(parent: Forker, plain, tmp_path: Path) -> None:
    """No device may have room for the whole model. sharded.py checks where the parameters are."""
    folder = str(tmp_path / "checkpoints")
    job = DividedJob([sys.executable, str(SCRIPT)], tmp_path, parent, shards=1, workers=1, checkpoint={"uri": folder})
    try:
        job.environment = {ENV_FAULTS: "kill worker/0 @0 done"}
        server, dies = job.server(0, 1), job.worker(0, 1)
        assert [dies.wait(), server.wait()] == [KILLED, 0]
        words = server.final_message()
        said = {name: words[name] for name in ("step", "checkpoint")}
        comes = job.worker(0, 2, BACKSTAY_TRAINED=json.dumps(said))
        assert comes.wait() == 0, job.logs()
        same(dict(np.load(tmp_path / f"{comes.name}.npz")), plain(""))
    finally:
        job.end()


REFUSALS = """
import jax, jax.numpy as jnp, numpy as np, optax, backstay
from jax.sharding import Mesh, PartitionSpec as P
from sharded import settings

def refused(**changed):
    try:
        backstay.train(**settings("", "") | changed)
    except backstay.errors.ConfigurationError as error:
        print(str(error).replace(chr(10), " "))
    else:
        print("accepted")

one = {"in": P("batch"), "stages": None, "out": None, "odd": None, "bias": None}
explicit = (jax.sharding.AxisType.Explicit,)
refused(mesh={"batch": 3})
refused(mesh={"batch": -1, "model": -1})
refused(mesh=lambda devices: Mesh(np.asarray(devices).reshape(3, 2), ("a", "b")))
refused(mesh=lambda: None)
refused(sharding=lambda mesh: None)
with jax.set_mesh(jax.make_mesh((4,), ("x",), axis_types=explicit)):
    refused(sharding="fsdp")
refused(mesh={"batch": 0})
refused(mesh=4)
refused(mesh=Mesh(np.asarray(jax.devices()), ("batch",)))
refused(mesh=lambda devices: devices)
refused(mesh=lambda devices: Mesh(np.asarray(devices[:2]), ("batch",)))
refused(mesh=lambda devices: Mesh(np.asarray(devices), ("batch",), axis_types=explicit))
refused(sharding="FSDP")
refused(sharding=lambda mesh, shapes: one | {"out": P("model")})
refused(sharding=lambda mesh, shapes: one | {"bias": P(None, "batch")})
refused(sharding=lambda mesh, shapes: one | {"stages": P("batch", "batch")})
refused(sharding=lambda mesh, shapes: one | {"bias": "batch"})
refused(sharding=lambda mesh, shapes: {"in": P("batch")})
refused(sharding=lambda mesh, shapes: one | {"out": P(P.UNCONSTRAINED)})
refused(sharding=lambda mesh, shapes: one | {"out": P(1)})
refused(sharding=lambda mesh, shapes: one | {"out": P(None, unreduced={"batch"})})
refused(sharding=np.ones(2))
"""


STATES = """
import jax, optax
from backstay._compute import placement_of
from backstay._update import describe
from sharded import init

tree = describe(jax.eval_shape(init, jax.random.key(0)), has_state=True)
placement = placement_of(tree, None, "fsdp")
factored = optax.adafactor(1e-2, min_dim_size_to_factor=32)
parts = optax.partition({"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, lambda p: {n: "ab"[n == "bias"] for n in p})
sums = optax.MultiSteps(optax.sgd(1e-2, momentum=0.9), 2)
for optimizer in (optax.adam(1e-2), sums, factored, parts, optax.lbfgs(1e-2, 10, linesearch=None)):
    shapes = jax.tree.leaves(jax.eval_shape(optimizer.init, tree.parameters.shapes()))
    places = jax.tree.leaves(placement.state_of(optimizer, tree))
    print(sum(not place.is_fully_replicated for place in places), len(places) == len(shapes))
"""


def on_four_devices(program: str) -> list[str]:
    environment = os.environ | DEVICES | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_state_of_an_optimizer_lies_as_the_parameters_do() -> None:
    """Adam has two moments of two divided arrays, MultiSteps a sum and a trace of them; factors have other shapes.

    L-BFGS keeps the last parameters, the last updates, and ten differences of each as one array.
    """
    assert on_four_devices(STATES) == ["4 True", "4 True", "0 True", "4 True", "8 True"]


def test_a_mesh_or_a_sharding_that_does_not_fit_is_refused() -> None:
    wanted = [
        "mesh has the axes batch=3, and this process has 4 devices (cpu): the product of the sizes must be 4",
        "at most one axis takes the rest",
        "mesh raised ValueError for the devices of this process (4 cpu): cannot reshape array of size 4 into shape",
        "mesh raised TypeError for the devices of this process (4 cpu): ",
        "sharding raised TypeError for a mesh of batch=4: ",
        "a mesh whose axis 'x' is of the type Explicit: call it outside, and pass mesh= to train",
        "the axis 'batch' has the size 0: must be 1 or more, or -1 for the rest",
        "mesh is 4: must be the sizes of its axes",
        "mesh is a jax.sharding.Mesh: must be the sizes of its axes",
        "mesh returned list: must return a jax.sharding.Mesh",
        "mesh returned a mesh of 2 devices: must be of the devices of this process (4 cpu), each once",
        "whose axis 'batch' is not of the type Auto",
        "sharding is 'FSDP': must be 'replicate', 'fsdp', or a function",
        "for out float64[256,3]: 'model' is not an axis of the mesh, which has the axes 'batch'",
        "for bias float64[3]: must have at most 1 entries",
        "for stages float64[2,256,256]: 'batch' appears twice",
        "sharding returned str for a parameter: must be a jax.sharding.PartitionSpec, or None",
        "sharding returned another tree than that of the parameters",
        "for out float64[256,3]: UNCONSTRAINED must be the name of an axis of the mesh, or None",
        "for out float64[256,3]: 1 must be the name of an axis of the mesh, or None",
        "must not have reduced or unreduced axes",
        "sharding is array([1., 1.]): must be 'replicate', 'fsdp', or a function",
    ]
    said = on_four_devices(REFUSALS)
    assert len(said) == len(wanted), said
    for text, part in zip(said, wanted, strict=True):
        assert part in text, (part, text)
