"""Encodes tensors on the wire by codecs, bounds what they lose, and decodes them on servers."""

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
