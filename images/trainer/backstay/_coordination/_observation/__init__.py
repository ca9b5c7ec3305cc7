"""Observes the liveness and rates of workers, equal losses, and the ranks that updates wait for. Pure."""

from __future__ import annotations

from ._blame import AsyncBlame, Blame, Blamed, Charge
from ._liveness import Liveness
from ._peer_table import PeerTable
from ._rate import Rate
from ._same_losses import SAME, SAME_UPDATES, SameLosses

__all__ = [
    "SAME",
    "SAME_UPDATES",
    "AsyncBlame",
    "Blame",
    "Blamed",
    "Charge",
    "Liveness",
    "PeerTable",
    "Rate",
    "SameLosses",
]
