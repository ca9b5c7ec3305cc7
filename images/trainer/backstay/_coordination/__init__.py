"""Decides which gradients make an update, in what order, and what else happens at that version. Pure: without I/O.

Messages come in, decisions go out, the time is an argument. So tests can check the promises T1, T2, T3 and T5 over
every interleaving, and a standby can hold the same state (T6). The vocabulary is that of `backstay_rpc.control_pb2`.
"""

from __future__ import annotations

from ._coordinator import Coordinator
from ._decisions import (
    OUTCOME_OF,
    CheckpointFailed,
    Counted,
    Decision,
    Finished,
    Outcome,
    Redone,
    Restart,
    Send,
    Updated,
    WriteManifest,
)
from ._ledger import identity, used_in
from ._modes import MODES, Answering, Counting, held_by_shard
from ._observation import SAME, SAME_UPDATES, AsyncBlame, Blame, Blamed, Liveness, PeerTable, Rate, SameLosses
from ._one_process import Course, Dispatch, Then
from ._schedule import Intervals
from ._sequencer import Due, Observer, Sequencer, carry_out
from ._shard_messages import Coordination, Message, Report, ShardSink
from ._state import CoordinatorState, EpochEnded, Mode, Rules, Samples, after
from ._takeover import ServerPosition

__all__ = [
    "MODES",
    "OUTCOME_OF",
    "SAME",
    "SAME_UPDATES",
    "Answering",
    "AsyncBlame",
    "Blame",
    "Blamed",
    "CheckpointFailed",
    "Coordination",
    "Coordinator",
    "CoordinatorState",
    "Counted",
    "Counting",
    "Course",
    "Decision",
    "Dispatch",
    "Due",
    "EpochEnded",
    "Finished",
    "Intervals",
    "Liveness",
    "Message",
    "Mode",
    "Observer",
    "Outcome",
    "PeerTable",
    "Rate",
    "Redone",
    "Report",
    "Restart",
    "Rules",
    "SameLosses",
    "Samples",
    "Send",
    "Sequencer",
    "ServerPosition",
    "ShardSink",
    "Then",
    "Updated",
    "WriteManifest",
    "after",
    "carry_out",
    "held_by_shard",
    "identity",
    "used_in",
]
