"""Every deadline, interval and pause of a training pod, as one value, which is injected: a test can shorten any."""

from __future__ import annotations

from dataclasses import dataclass

from backstay_spec import end_of_job, silence

__all__ = ["Timeouts", "current", "use"]


@dataclass(frozen=True)
class Timeouts:
    """All timeouts of a pod, in seconds. A pod uses `Environment.timeouts`.

    Attributes:
        heartbeat: the interval between two heartbeats of a worker or evaluator to each server.
        silent: a peer without a heartbeat, or a server without an answer, for this time is lost. A lost worker is
            replaced after a longer time (`backstay_spec.silence`).
        call: the deadline of one control call.
        leave: the deadline of the call with which a pod leaves.
        join: how long a pod tries to join. Servers may wait for nodes, and the operator ends what takes too long.
        join_pauses: the pauses between two attempts to join a server; the last one repeats.
        join_stale: an answer to a join that is older than a failed join by more than this is requested again.
        link_answer: how long the coordinator may take to accept a link; then the shard connects again.
        link_pauses: the pauses between two attempts to link; the last one repeats.
        message: how long a server waits for the message of a call whose token is valid.
        second_look: how long a server that waits for the operator's report delays such a call. The operator may have
            cancelled the call already, which shows after the delay.
        shutdown: how long a server stays for workers that did not receive the end of the job.
        result: how long the servers of a job without checkpoints stay for a worker of rank 0 without the result.
        confirm: how long the worker of rank 0 tries to report that it has the result. Shard 0's server stays 15 s.
        newcomer: minimum uptime of a promoted server, so that a worker that was cut off in a pull can connect again.
        standby_closed, standby_silent: how long a server that lost its standby waits for the operator to report the
            active server. The first: the connection was closed. The second: the standby stopped answering.
        latecomer: how long a replacement of a server that finds the training complete waits for rank 0 to join. Rank 0
            may still evaluate.
        gone: how long a server that received SIGTERM, or the end of the job, waits for another one that is not linked.
        last_save: how long a server that received SIGTERM waits for its checkpoint. Pods have 60 s.
        stop: how long a worker that received SIGTERM waits for the gradient that it computes. A preemption's notice
            may be short.
        reconnect_pause: the pause between two attempts of a worker or standby to connect again.
        evaluator_check: the interval of the heartbeats of an evaluator, whose answers name the newest checkpoint.
        peer_check: how often a stream that waits for a version checks whether its peer is still connected. A stream
            that waits for memory also checks whether others still send.
        replica_beat: the interval of messages to a standby when there is nothing else to send.
        held, held_least: the longest and the shortest time that a standby may need for one message before its server
            disconnects it. See `Replica.patience`.
        compiling: how long a pod waits for another one on its machine that compiles the same program.
        compile: a worker that starts or compiles for longer than this, and than `stallSeconds`, is stalled.
        paused_after: a server without a tick for this time was paused, and the silence of its peers does not count.
        restoring: how long training waits for checkpoints that cannot be read, before the job fails.
        restore_again: the pause between two attempts to read them.
        evaluation: how long a job waits for the evaluation of its last version.
        succession: how long a coordinator that took over at the end waits for an evaluator to connect. It may have
            reported to the previous coordinator, and left.
        storing: how long a job tries to store its last version before it fails.
        store_again: the longest pause between two of these attempts; the first is 1 s.
        unproven: a connection on which no call carried the token for this time is closed.
        refused: a data stream that was refused is received for this time, so that the caller can read the refusal.
    """

    heartbeat: float = silence.HEARTBEAT
    silent: float = silence.LOST
    call: float = 5.0
    leave: float = 1.0
    join: float = 3600.0
    join_pauses: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, *(0.25,) * 16, 0.5, 1.0)
    join_stale: float = 5.0
    link_answer: float = 10.0
    link_pauses: tuple[float, ...] = (0.02, 0.05, 0.1, 0.25)
    message: float = 10.0
    second_look: float = 0.1
    shutdown: float = end_of_job.SHUTDOWN
    result: float = end_of_job.RESULT
    confirm: float = end_of_job.CONFIRM
    newcomer: float = end_of_job.NEWCOMER
    latecomer: float = end_of_job.LATECOMER
    standby_closed: float = 10.0
    standby_silent: float = 30.0
    gone: float = end_of_job.GONE
    last_save: float = end_of_job.LAST_SAVE
    stop: float = 3.0
    reconnect_pause: float = 0.1
    evaluator_check: float = 0.25
    peer_check: float = 1.0
    replica_beat: float = 2.0
    held: float = 10.0
    held_least: float = 1.0
    compiling: float = 10.0
    compile: float = 1800.0
    paused_after: float = 4.0
    restoring: float = 600.0
    restore_again: float = 1.0
    evaluation: float = end_of_job.EVALUATION
    succession: float = end_of_job.SUCCESSION
    storing: float = end_of_job.STORING
    store_again: float = 30.0
    unproven: float = 10.0
    refused: float = 1.0

    @property
    def end(self) -> float:
        """How long a worker that has the last version waits for the job to be done."""
        return self.evaluation + self.storing + end_of_job.MARGIN


_current = Timeouts()


def current() -> Timeouts:
    """Returns the value of a pod that this process becomes."""
    return _current


def use(timeouts: Timeouts) -> None:
    """Replace the value of `current`: `backstay.testing` shortens waits."""
    global _current  # noqa: PLW0603  # one process, one pod
    _current = timeouts
