"""Simulated against real runs: updates a second, and the parts of goodput (docs/simulator.md).

Real jobs of bench/scripts/witness.py run in an embedded cluster. Two of them calibrate the simulator.
The quiet job gives the processor time of an exchange. The job with killed workers gives the time of a start. The other
rows are predictions. Other work on the machine delays the real jobs, so the load is printed beside each row.

    python bench/simulate.py [--seconds 20] [--cases 0,1,2] [--measured FILE]

With `--measured`, the real runs that the file has are not repeated, and new ones are added to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _cluster import BenchCluster, BenchJob, cluster, seconds_per_step
from _common import table
from chaos import Chaos
from goodput import all_train

from backstay._simulator import Assumptions, SimulatedRun, simulate
from backstay_spec.types import TrainingJob

COMPUTE = 0.2
EVERY_STEPS = 50
ELEMENTS = 250_000
CASES: tuple[tuple[str, str, float, dict[str, Any]], ...] = (
    ("4 workers", "", 0, {"workers": 4}),
    ("... a worker killed every 10 s", "worker", 10.0, {"workers": 4}),
    ("4 workers, 1 backup, a worker killed every 10 s", "worker", 10.0, {"workers": 4, "backups": 1}),
    ("... grace Auto", "worker", 10.0, {"workers": 4, "backups": 1, "grace": "Auto"}),
    ("4 workers, standbys, a server killed every 10 s", "server", 10.0, {"workers": 4, "standbys": 1}),
    ("4 workers, no standbys, a server killed every 15 s", "server", 15.0, {"workers": 4, "checkpoints": 20}),
    ("4 workers, Async", "", 0, {"workers": 4, "mode": "Async"}),
    ("8 workers", "", 0, {"workers": 8}),
    ("8 workers, 2 backups, a worker killed every 5 s", "worker", 5.0, {"workers": 8, "backups": 2}),
    ("4 workers, 8 local steps", "", 0, {"workers": 4, "local": 8}),
)
QUIET, KILLED = 0, 1
PARTS = ("applied", "starting", "compiling", "wait", "missing")


async def measure(on: BenchCluster, case: int, seconds: float, seed: int) -> dict[str, Any]:
    """Run the job of a case; return what was measured."""
    _, what, every, shape = CASES[case]
    shape = dict(shape)
    stored, local = shape.pop("checkpoints", EVERY_STEPS), shape.get("local", 0)
    steps = int(seconds / (COMPUTE * max(1, local)) * (shape["workers"] if shape.get("mode") == "Async" else 1))
    job = BenchJob(
        on,
        f"simulated-{case}",
        steps=steps,
        servers=2,
        pause=0.0,
        every_steps=stored,
        env={"COMPUTE": str(COMPUTE), "SIZE": str(ELEMENTS)},
        **shape,
    )
    await job.submit()
    await job.wait("all of them train", lambda: all_train(job), 300)
    chaos, began = Chaos(on, job, seed, 0), time.time()
    while (await job.look()).get("phase") == "Running":
        await asyncio.sleep(every or 0.5)
        if what and (await job.look()).get("phase") == "Running":
            await chaos.cause(chaos.kill_worker if what == "worker" else chaos.kill_active_server)
    await job.wait_for_end(180)
    await asyncio.sleep(2.0)
    await job.look()
    updates = [update for update in job.updates() if update.at >= began]
    found = {
        "steps": steps,
        "updatesPerSecond": 1 / seconds_per_step(updates),
        "workerSeconds": dict(job.status["workerSeconds"]),
        "killed": [fault.at - began for fault in chaos.faults],
        "starts": starts(job, [fault.at for fault in chaos.faults] if what == "worker" else []),
        "load": os.getloadavg()[0],
    }
    await job.delete()
    return found


def starts(job: BenchJob, killed: Sequence[float]) -> dict[str, list[float]]:
    """Returns the seconds of starts: of the first pods, of replacements, and from a kill to the process of the
    replacement."""
    found: dict[str, list[float]] = {"first": [], "again": [], "created": []}
    for rank in range(job.workers):
        for number, pod in enumerate(job.pods(f"worker-{rank}")):
            marks = {what: at for at, what in job.marks(pod)}
            if "joined" in marks:
                found["again" if number else "first"].append(marks["joined"] - marks["process"])
            if number and (before := [at for at in killed if at < marks["process"]]):
                found["created"].append(marks["process"] - max(before))
    return found


def job_of(case: int) -> TrainingJob:
    """Returns the TrainingJob of a case."""
    shape = CASES[case][3]
    update: dict[str, Any] = {"mode": shape.get("mode", "Sync")}
    if update["mode"] == "Sync":
        update |= {"backups": shape.get("backups", 0), "grace": shape.get("grace", "0s")}
    spec = {
        "image": "backstay.dev/trainer:local",
        "parameterServers": {"replicas": 2, "maxRestarts": 10_000, "standbys": shape.get("standbys", 0)},
        "workers": {"replicas": shape["workers"], "maxRestarts": 10_000},
        "update": update,
        "checkpoint": {"uri": "file:///checkpoints", "everySteps": shape.get("checkpoints", EVERY_STEPS)},
    }
    return TrainingJob.model_validate({"metadata": {"name": f"simulated-{case}", "namespace": "default"}, "spec": spec})


def assumed(case: int, steps: int, calibrated: Mapping[str, float], kills: Sequence[float] = ()) -> Assumptions:
    """Returns the assumptions of a case.

    Args:
        steps: updates at which training ends.
        calibrated: the values that the two calibrating runs gave.
        kills: the times of the failures, in simulated seconds.
    """
    _, what, _, shape = CASES[case]
    cost = calibrated["exchange"]
    failures = []
    if kills:
        failures = [{"what": "Worker" if what == "worker" else "ParameterServer", "atSeconds": list(kills)}]
    return Assumptions.model_validate(
        {
            "steps": steps,
            "seconds": 600,
            "step": {
                "seconds": COMPUTE,
                "sigma": 0.002,
                "machineSigma": 0,
                "localSteps": max(1, shape.get("local", 0)),
                "processorSeconds": calibrated["step"],
            },
            "model": {"bytes": 4 * ELEMENTS, "stateFactor": 1},
            "network": {"gigabitsPerSecond": 100, "latencySeconds": 0.0002},
            "costs": {
                "exchangeSeconds": 0.1 * cost,
                "contributionSeconds": 0.15 * cost,
                "answerSeconds": 0.15 * cost,
                "updateSeconds": 0.3 * cost,
            },
            "starts": {
                "schedulingSeconds": 0.01,
                "sigma": 0.05,
                "worker": {"seconds": calibrated["created"], "processorSeconds": calibrated["start"]},
                "server": {
                    "seconds": calibrated["created"],
                    "processorSeconds": calibrated["start"] + calibrated["compile"],  # of its update
                },
                "compileSeconds": calibrated["compile"],
                "compileAgainSeconds": calibrated["compile"],
            },
            "nodes": {"cores": os.cpu_count()},
            "failures": failures,
        }
    )


def simulated(
    case: int, real: Mapping[str, Any], calibrated: Mapping[str, float], seeds: int = 5
) -> list[SimulatedRun]:
    """Simulate a case with several seeds, and with failures at the times of the real run `real`."""
    quiet = simulate(job_of(case), assumed(case, 5, calibrated))
    begins = quiet.facts["firstUpdateSeconds"]
    kills = [begins + at for at in real["killed"]]
    return [simulate(job_of(case), assumed(case, real["steps"], calibrated, kills), seed) for seed in range(seeds)]


def calibrate(measured: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values of the two calibrating runs."""
    quiet, killed = measured[str(QUIET)], measured[str(KILLED)]
    again, created = killed["starts"]["again"], killed["starts"]["created"]
    found = {
        "created": max(0.0, sorted(created)[len(created) // 2] - 0.03),
        "start": sorted(again)[len(again) // 2],
        "compile": 0.5,
        "step": 0.002,
        "exchange": 0.01,
    }
    solve(found, "exchange", 0.1, QUIET, quiet)
    solve(found, "compile", 5.0, KILLED, killed)
    return found


def solve(found: dict[str, float], name: str, most: float, case: int, real: Mapping[str, Any]) -> None:
    """Find the value from 0 to `most` with which the simulated updates a second are those of a real run."""
    low, high = 0.0, most
    for _ in range(12):
        found[name] = (low + high) / 2
        pace = mean([run.facts["updatesPerSecond"] for run in simulated(case, real, found, seeds=3)])
        low, high = (found[name], high) if pace > real["updatesPerSecond"] else (low, found[name])


def mean(values: Sequence[float]) -> float:
    """Returns the mean."""
    return sum(values) / len(values)


def report(measured: Mapping[str, Any]) -> str:
    """Returns the table."""
    calibrated = calibrate(measured)
    rows: list[tuple[str, ...]] = [("", "updates/s", "simulated", "", *(f"{p}, simulated" for p in PARTS), "load")]
    for number, (name, *_) in enumerate(CASES):
        if (real := measured.get(str(number))) is None:
            continue
        runs = simulated(number, real, calibrated)
        pace = mean([run.facts["updatesPerSecond"] for run in runs])
        total = sum(real["workerSeconds"].values())
        shares = [
            (
                real["workerSeconds"].get(part, 0.0) / total,
                mean([run.worker_seconds.get(part, 0.0) / sum(run.worker_seconds.values()) for run in runs]),
            )
            for part in PARTS
        ]
        rows.append(
            (
                name + (" (calibrates)" if number in {QUIET, KILLED} else ""),
                f"{real['updatesPerSecond']:.2f}",
                f"{pace:.2f}",
                f"{pace / real['updatesPerSecond'] - 1:+.1%}",
                *(f"{own:.1%}, {other:.1%}" for own, other in shares),
                f"{real['load']:.0f}",
            )
        )
    print("calibrated:", {name: round(value, 4) for name, value in calibrated.items()})
    return table(rows)


async def run(arguments: argparse.Namespace, wanted: Sequence[int], measured: dict[str, Any]) -> None:
    """Run the real jobs that were not measured yet."""
    missing = [case for case in wanted if str(case) not in measured]
    if not missing:
        return
    async with cluster() as on:
        for case in missing:
            measured[str(case)] = await measure(on, case, arguments.seconds, arguments.seed)
            if arguments.measured is not None:
                arguments.measured.write_text(json.dumps(measured, indent=1))


def main() -> None:
    """Parse arguments, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="seconds of successive computation in a job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default=",".join(map(str, range(len(CASES)))), help="numbers of cases")
    parser.add_argument("--measured", type=Path, help="a file with real runs, which is read and written")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    measured: dict[str, Any] = {}
    if arguments.measured is not None and arguments.measured.exists():
        measured = json.loads(arguments.measured.read_text())
    wanted = [int(case) for case in arguments.cases.split(",")]
    asyncio.run(run(arguments, sorted({QUIET, KILLED, *wanted}), measured))
    print(report(measured))


if __name__ == "__main__":
    main()
