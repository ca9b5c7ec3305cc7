"""Connects the lifecycle of each role with its reports and the HTTP port of the pod, and runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._process import SIGTERM_EXIT, show_role
from .._report import HttpPort, PodMetrics
from .._transport import ALONE, Members

if TYPE_CHECKING:
    from backstay_spec.runtime import Trained

    from .._process import Environment, Stop
    from .._result import Result
    from .._roles import Worker
    from .._script import Script, ScriptPlan

__all__ = ["PodRunner"]


@dataclass(frozen=True)
class PodRunner:
    """One pod of a job. Each method runs the lifecycle of one role.

    Names of `_roles` are imported when they are needed: a pod does not import the modules of other roles.
    """

    environment: Environment
    script: Script
    plan: ScriptPlan
    stop: Stop
    metrics: PodMetrics
    members: Members = ALONE

    def worker(self) -> Worker:
        """Returns the lifecycle of a worker, which `work` runs."""
        from .._report import WorkerMeasurements
        from .._roles import Worker

        measurements = WorkerMeasurements(self.script, self.plan, self.metrics, leads=self.members.member == 0)
        worker = Worker(self.environment, self.script, self.plan, self.stop, measurements, self.members)
        measurements.start()
        return worker

    def work(self, worker: Worker) -> Result:
        """Work until the job is done. The HTTP port stays open while the script continues. Raises as `Worker.run`."""
        http = self._http(lambda: worker.ready, worker.peers)
        try:
            return worker.run()
        finally:
            if not worker.returned:
                http.close()

    def restore(self, trained: Trained) -> Result:
        """Returns the result of a job that has ended, in a worker that was created afterwards. Raises as `restored`."""
        from .._roles import restored

        restores = True
        self._http(lambda: not restores)
        result = restored(self.environment, trained, self.script, self.plan, self.metrics.step.set)
        restores = False
        return result

    def evaluate(self) -> dict[str, Any]:
        """Evaluate until the job is done; returns the termination message. Raises as `Evaluator`."""
        from .._roles import Evaluator

        def evaluated(step: int, seconds: float) -> None:
            self.metrics.step.set(step)
            self.metrics.evaluation_seconds.observe(seconds)

        evaluator = Evaluator(self.environment, self.script, self.plan, self.stop, evaluated)
        http = self._http(lambda: evaluator.ready)
        try:
            return evaluator.run()
        finally:
            http.close()

    def serve(self) -> int:
        """Serve a shard until the job is done, after waiting as its standby; returns the exit status.

        Raises as `Server` and `Standby`.
        """
        from .._report import ServerReports
        from .._roles import Server, ServerContext, Standby

        inherited, http = None, None
        lifecycle: Standby | Server  # the standby, and the server that it becomes
        if self.environment.standby:
            lifecycle = standby = Standby(self.environment, self.script, self.plan, self.stop, self.metrics.step.set)
            http = self._http(lambda: lifecycle.ready)
            inherited = standby.run()
            if inherited is None:
                http.close()
                return SIGTERM_EXIT
            show_role(self.environment)
        context = ServerContext.of(self.environment, self.script, self.plan, self.stop, inherited)
        reports = ServerReports(context, self.metrics)
        lifecycle = server = Server(context, reports, inherited)
        http = http or self._http(lambda: lifecycle.ready)
        reports.start(http)
        try:
            return server.run()
        finally:
            http.close()

    def _http(self, is_ready: Callable[[], bool], peers: Callable[[], Any] = dict) -> HttpPort:
        """Health, metrics and pages. Raises as `HttpPort`."""
        environment = self.environment
        return HttpPort(self.metrics, is_ready, bind=environment.bind, port=environment.metrics_port, peers=peers)
