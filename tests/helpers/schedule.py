"""The groups of tests that run in one process, and their order.

At any time, about as many processes of pytest-xdist compute as there are cores.
"""

from __future__ import annotations

from typing import Any, Final

from xdist.scheduler import LoadScopeScheduling

CLUSTER: Final = "tests/e2e/ in one cluster"
JOBS: Final = "tests/runtime/"
"""Each test takes the processor for half of its time."""

WAITING: Final = (
    "tests/e2e/test_paused.py",
    CLUSTER,
    "tests/docs/test_docs.py",
    "tests/testing/",
    "tests/serving/test_process.py",
    "tests/runtime/test_gpu_bench.py",
    "tests/runtime/test_standby.py",
    "tests/runtime/test_group.py::test_an_evaluate_that_raises_in_one_pod",
    "tests/runtime/test_after_training.py",
    "tests/runtime/test_group.py::test_t8_",
    "tests/runtime/test_group.py::test_t7_a_rank_that_comes_after_training",
    "tests/runtime/test_sharded.py::test_t7_",
    "tests/runtime/test_group_forming.py::test_t8_",
    "tests/runtime/test_timeline.py",
    "tests/runtime/test_one_folder.py",
    "tests/runtime/test_average.py::test_t4_",
)
"""The beginnings of groups that take the processor for less than a third of their time. The longest ones come first."""

LONG: Final = (
    "tests/e2e/test_command.py",
    "tests/trainer_math/test_engine.py",
    "tests/operator/",
    "tests/trainer_math/",
    "operator/backstay_cluster/",
    "tests/simulator/",
    "tests/serving/test_examples.py",
)
"""Others that begin before the rest, so that at the end no process runs alone."""


def group_of(test: str) -> str:
    """Returns the group of a test. The tests of a group follow each other in one process.

    The end-to-end tests are one: they share a cluster, and two of their jobs at the same time are many processes. The
    tests of the command start their own clusters, and those of paused processes mostly wait: each of both is a group.
    Those with a real kube-apiserver are one, because a second one would take a core. The training jobs of tests/runtime
    and the runs of pytest in tests/house are each alone. The others in tests/house are one, and parse each file once.
    All others keep with those of their file, with which they share fixtures and what JAX compiled.
    """
    if test.startswith("tests/chart/test_real_cluster.py") or "test_both.py" in test or "[real" in test:
        return "a real kube-apiserver"
    if test.startswith("tests/e2e/") and not test.startswith(("tests/e2e/test_command.py", "tests/e2e/test_paused.py")):
        return CLUSTER
    if test.startswith((JOBS, "tests/house/test_twice.py")):
        return test
    return "tests/house/" if test.startswith("tests/house/") else test.partition("::")[0]


def order(tests: list[str]) -> dict[str, float]:
    """Returns the place of each test. Groups that mostly wait come first, and `Groups` begins with others beside them.

    The training jobs are spread evenly over the others, so that at any time some tests compute.
    """
    groups = {test: group_of(test) for test in tests}
    waiting = {test: float(_first(WAITING, group)) for test, group in groups.items() if group.startswith(WAITING)}
    jobs = [test for test in tests if test.startswith(JOBS) and test not in waiting]
    others = [test for test in tests if not test.startswith(JOBS) and test not in waiting]
    others.sort(key=lambda test: _first(LONG, test))
    begun: dict[str, int] = {}  # the place in `others` of the first test of each group, which the others follow
    for number, test in enumerate(others):
        begun.setdefault(groups[test], number)
    after = len(WAITING)
    # A group is longer than a job, so none of them is the last.
    places = {test: after + 0.9 * begun[groups[test]] / len(others) for test in others}
    return waiting | places | {test: after + (number + 0.5) / len(jobs) for number, test in enumerate(jobs)}


def _first(beginnings: tuple[str, ...], name: str) -> int:
    """Returns the number of the first of these with which the name begins; their count, if there is none."""
    return next((number for number, start in enumerate(beginnings) if name.startswith(start)), len(beginnings))


class Groups(LoadScopeScheduling):
    """Gives half of the processes the groups that mostly wait, and the others all else.

    A process whose half is done gets what is left of the other half.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        waits = 2 * self.nodes.index(node) < len(self.nodes)
        wanted = (group for group in self.workqueue if group.startswith(WAITING) == waits)
        if (first := next(wanted, None)) is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
