"""Computes an update by trees of parameters, partition into shards and blocks, update rules, kernels and engine.

The names that other rooms use, in the order in which a job uses them:

- `describe` gives the `TreeSpec` of a model, `analyse` the `Rule` of an optimizer on it, `partition` the `Partition`
  into shards and blocks;
- a `ShardEngine` holds the state of one shard and applies updates; `Snapshot` and `array_specs` are for checkpoints,
  and `entries_of` for those of one process;
- `Tree` adds many contributions in a fixed order; `mean` and `state_mean` add those of one update, and `clip_factor`
  bounds its norm;
- `Wire` selects codecs, and `shard_wires` gives the form of each block on the wire;
- `Objective` is a script's loss and its gradient; `LocalSteps` are steps of a worker alone; `Turns` are fragments;
- `averaged` adds an average of the parameters to an optimizer;
- `Untrained` finds leaves that no gradient reaches.

Names are loaded when they are first used: `train` must not import JAX before its caller does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._lazy import lazily

if TYPE_CHECKING:
    from ._array_specs import STATE, array_specs
    from ._average import AVERAGE, average_of, averaged
    from ._clip import clip_factor
    from ._codecs import (
        CODECS,
        GROUP,
        BlockWire,
        DeviceArray,
        DeviceBlock,
        Encoded,
        Rounding,
        ShardWire,
        Wire,
        body_of,
        coded_leaves,
        encoded_with,
        host_of,
        on_host,
        pinned_memory,
        placed_from,
        residual_dtype,
        seed_of,
        shard_wires,
        shares_host_memory,
    )
    from ._codecs._alignment import ALIGNMENT, aligned_empty
    from ._engine import ShardEngine
    from ._engine._kernels import Mean, enable_x64, mean, state_mean
    from ._engine._sums import BRANCHES, Tree
    from ._fragments import Turns, fragments_of
    from ._frozen import digest_of, merged, selected, some_of
    from ._lazy_blocks import LazyBlocks
    from ._local_steps import LocalSteps, default_outer, local_settings, outer_optimizer
    from ._objective import NON_FINITE_LOSS, Objective, OwnGradients, all_finite, check_metric_name
    from ._partition import Block, Partition, Piece, partition, parts_of_leaves, range_length
    from ._rules import Rule, Trace, analyse, bind, called, only_trained, trace, unchanged_parameters
    from ._selection import ALL, ALL_AVERAGED, ALL_EXACT, Selection, Values
    from ._snapshot import Entry, Snapshot
    from ._tree import (
        MODEL_STATE,
        PARAMS,
        FrozenSpec,
        LeafSpec,
        TreeSpec,
        as_leaf,
        describe,
        leaf_names,
        multiplied,
        refuse_objects,
        refuse_shared,
    )
    from ._untrained import UPDATES, SameLeaves, Untrained, ZeroLeaves, unchanged_warning, warning
    from ._whole_state import entries_of, model_from, optimizer_state_from

__all__ = [
    "ALIGNMENT",
    "ALL",
    "ALL_AVERAGED",
    "ALL_EXACT",
    "AVERAGE",
    "BRANCHES",
    "CODECS",
    "GROUP",
    "MODEL_STATE",
    "NON_FINITE_LOSS",
    "PARAMS",
    "STATE",
    "UPDATES",
    "Block",
    "BlockWire",
    "DeviceArray",
    "DeviceBlock",
    "Encoded",
    "Entry",
    "FrozenSpec",
    "LazyBlocks",
    "LeafSpec",
    "LocalSteps",
    "Mean",
    "Objective",
    "OwnGradients",
    "Partition",
    "Piece",
    "Rounding",
    "Rule",
    "SameLeaves",
    "Selection",
    "ShardEngine",
    "ShardWire",
    "Snapshot",
    "Trace",
    "Tree",
    "TreeSpec",
    "Turns",
    "Untrained",
    "Values",
    "Wire",
    "ZeroLeaves",
    "aligned_empty",
    "all_finite",
    "analyse",
    "array_specs",
    "as_leaf",
    "average_of",
    "averaged",
    "bind",
    "body_of",
    "called",
    "check_metric_name",
    "clip_factor",
    "coded_leaves",
    "default_outer",
    "describe",
    "digest_of",
    "enable_x64",
    "encoded_with",
    "entries_of",
    "fragments_of",
    "host_of",
    "leaf_names",
    "local_settings",
    "mean",
    "merged",
    "model_from",
    "multiplied",
    "on_host",
    "only_trained",
    "optimizer_state_from",
    "outer_optimizer",
    "partition",
    "parts_of_leaves",
    "pinned_memory",
    "placed_from",
    "range_length",
    "refuse_objects",
    "refuse_shared",
    "residual_dtype",
    "seed_of",
    "selected",
    "shard_wires",
    "shares_host_memory",
    "some_of",
    "state_mean",
    "trace",
    "unchanged_parameters",
    "unchanged_warning",
    "warning",
]

_HOMES: Final = {
    "ALIGNMENT": "._codecs._alignment",
    "ALL": "._selection",
    "ALL_AVERAGED": "._selection",
    "ALL_EXACT": "._selection",
    "AVERAGE": "._average",
    "BRANCHES": "._engine._sums",
    "CODECS": "._codecs",
    "GROUP": "._codecs",
    "MODEL_STATE": "._tree",
    "PARAMS": "._tree",
    "STATE": "._array_specs",
    "UPDATES": "._untrained",
    "Block": "._partition",
    "BlockWire": "._codecs",
    "DeviceArray": "._codecs",
    "DeviceBlock": "._codecs",
    "Encoded": "._codecs",
    "Entry": "._snapshot",
    "FrozenSpec": "._tree",
    "LazyBlocks": "._lazy_blocks",
    "LeafSpec": "._tree",
    "LocalSteps": "._local_steps",
    "Mean": "._engine._kernels",
    "NON_FINITE_LOSS": "._objective",
    "Objective": "._objective",
    "OwnGradients": "._objective",
    "Partition": "._partition",
    "Piece": "._partition",
    "Rounding": "._codecs",
    "Rule": "._rules",
    "SameLeaves": "._untrained",
    "Selection": "._selection",
    "Values": "._selection",
    "ShardEngine": "._engine",
    "ShardWire": "._codecs",
    "Snapshot": "._snapshot",
    "Trace": "._rules",
    "Tree": "._engine._sums",
    "TreeSpec": "._tree",
    "Turns": "._fragments",
    "Untrained": "._untrained",
    "Wire": "._codecs",
    "ZeroLeaves": "._untrained",
    "aligned_empty": "._codecs._alignment",
    "all_finite": "._objective",
    "analyse": "._rules",
    "as_leaf": "._tree",
    "array_specs": "._array_specs",
    "average_of": "._average",
    "averaged": "._average",
    "bind": "._rules",
    "body_of": "._codecs",
    "called": "._rules",
    "check_metric_name": "._objective",
    "clip_factor": "._clip",
    "coded_leaves": "._codecs",
    "default_outer": "._local_steps",
    "describe": "._tree",
    "digest_of": "._frozen",
    "enable_x64": "._engine._kernels",
    "encoded_with": "._codecs",
    "entries_of": "._whole_state",
    "fragments_of": "._fragments",
    "host_of": "._codecs",
    "leaf_names": "._tree",
    "multiplied": "._tree",
    "local_settings": "._local_steps",
    "mean": "._engine._kernels",
    "merged": "._frozen",
    "model_from": "._whole_state",
    "on_host": "._codecs",
    "only_trained": "._rules",
    "optimizer_state_from": "._whole_state",
    "outer_optimizer": "._local_steps",
    "partition": "._partition",
    "parts_of_leaves": "._partition",
    "range_length": "._partition",
    "pinned_memory": "._codecs",
    "placed_from": "._codecs",
    "refuse_objects": "._tree",
    "refuse_shared": "._tree",
    "residual_dtype": "._codecs",
    "seed_of": "._codecs",
    "selected": "._frozen",
    "shard_wires": "._codecs",
    "shares_host_memory": "._codecs",
    "some_of": "._frozen",
    "state_mean": "._engine._kernels",
    "trace": "._rules",
    "unchanged_parameters": "._rules",
    "unchanged_warning": "._untrained",
    "warning": "._untrained",
}

__getattr__ = lazily(__name__, _HOMES)
