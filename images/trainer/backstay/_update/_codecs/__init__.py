"""Encodes tensors on the wire by codecs, bounds what they lose, and decodes them on servers."""

from ._codec import GROUP, Bound, Codec, CodecName, Encoded, body_of, encoded
from ._device import (
    DeviceArray,
    DeviceBlock,
    host_of,
    on_host,
    pinned_like,
    pinned_memory,
    placed_from,
    shares_host_memory,
    use_ordinary_memory,
)
from ._integers import residual_dtype, seed_of
from ._wires import (
    CODECS,
    SMALL,
    BlockWire,
    Rounding,
    ShardWire,
    Wire,
    bound_of,
    coded_leaves,
    encoded_with,
    shard_wires,
)

__all__ = [
    "CODECS",
    "GROUP",
    "SMALL",
    "BlockWire",
    "Bound",
    "Codec",
    "CodecName",
    "DeviceArray",
    "DeviceBlock",
    "Encoded",
    "Rounding",
    "ShardWire",
    "Wire",
    "body_of",
    "bound_of",
    "coded_leaves",
    "encoded",
    "encoded_with",
    "host_of",
    "on_host",
    "pinned_like",
    "pinned_memory",
    "placed_from",
    "residual_dtype",
    "seed_of",
    "shard_wires",
    "shares_host_memory",
    "use_ordinary_memory",
]
