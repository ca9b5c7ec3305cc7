"""Decides which gradients make an update, in what order, and what else happens at that version. Pure: without I/O.

Messages come in, decisions go out, the time is an argument. So tests can check the promises T1, T2, T3 and T5 over
every interleaving, and a standby can hold the same state (T6). The vocabulary is that of `backstay_rpc.control_pb2`.
"""

from __future__ import annotations

from ._blame import AsyncBlame, Blame, Blamed
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
from ._ledger import identity
from ._liveness import Liveness
from ._mode import UpdateMode, held_by_shard
from ._modes import MODES
from ._one_process import advance, begin_alone
from ._rate import Rate
from ._same_losses import SAME, SAME_UPDATES, SameLosses
from ._samples import EpochEnded, Samples
from ._schedule import Intervals
from ._state import CoordinatorState, Mode, Rules, after
from ._takeover import ServerPosition
from .seam import Coordination, Message, Report, ShardSink

__all__ = [
    "MODES",
    "OUTCOME_OF",
    "SAME",
    "SAME_UPDATES",
    "AsyncBlame",
    "Blame",
    "Blamed",
    "CheckpointFailed",
    "Coordination",
    "Coordinator",
    "CoordinatorState",
    "Counted",
    "Decision",
    "EpochEnded",
    "Finished",
    "Intervals",
    "Liveness",
    "Message",
    "Mode",
    "Outcome",
    "Rate",
    "Redone",
    "Report",
    "Restart",
    "Rules",
    "SameLosses",
    "Samples",
    "Send",
    "ServerPosition",
    "ShardSink",
    "UpdateMode",
    "Updated",
    "WriteManifest",
    "advance",
    "after",
    "begin_alone",
    "held_by_shard",
    "identity",
]
