"""Codecs: how tensors are encoded on the wire, how much they lose by it, and what a server computes from them."""

from ._codec import GROUP, Bound, Codec, CodecName, Encoded, body_of, encoded
from ._integers import seed_of
from ._wires import CODECS, SMALL, BlockWire, Rounding, ShardWire, Wire, bound_of, coded_leaves, shard_wires

__all__ = [
    "CODECS",
    "GROUP",
    "SMALL",
    "BlockWire",
    "Bound",
    "Codec",
    "CodecName",
    "Encoded",
    "Rounding",
    "ShardWire",
    "Wire",
    "body_of",
    "bound_of",
    "coded_leaves",
    "encoded",
    "seed_of",
    "shard_wires",
]
