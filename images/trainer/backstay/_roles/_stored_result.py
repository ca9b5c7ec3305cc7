"""A worker that was created after training: it returns from `train` with the last checkpoint, and calls no server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from backstay_spec.contract import TRAINED

from .._checkpoint import load, load_in_parts, patiently
from .._process import write_termination
from .._result import Result
from .._script import FrozenPart, evaluated
from ..errors import CheckpointError

if TYPE_CHECKING:
    from backstay_spec.runtime import Trained

    from .._checkpoint import Checkpoint
    from .._process import Environment
    from .._script import Script, ScriptPlan

__all__ = ["restored"]

_LOG = logging.getLogger(__name__)


def restored(
    environment: Environment, trained: Trained, script: Script, plan: ScriptPlan, loaded: Callable[[int], None]
) -> Result:
    """Returns the result of the training, for a worker whose predecessor was lost before `train` returned there.

    If the servers have reported no evaluation, because the checkpoint was complete already, this worker evaluates.

    Args:
        trained: how training ended.
        script: the arguments of `train`.
        loaded: called with the step of the checkpoint, once it is loaded.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not fit the parameters of this script.
    """
    if environment.checkpoint_uri is None:
        raise CheckpointError("training has ended and the job stores no checkpoint: its result cannot be restored")
    # The folder may have another name in this pod.
    uri = f"{environment.checkpoint_uri.rstrip('/')}/{trained.checkpoint.rpartition('/')[2]}"
    tree = plan.partition.tree
    placement, like = script.placement, tree.shapes()
    # No pod of a rank holds the whole model. Each reads all of the files, to compare their checksums.
    read = partial(load_in_parts, placed=placement.leaf) if placement.spans else load
    checkpoint = patiently(lambda: read(uri, like))
    params, state = placement.for_script((checkpoint.params, checkpoint.state))
    average = placement.for_script(checkpoint.average)
    if tree.frozen_leaves:
        frozen = _frozen(script, plan, checkpoint)
        params, state = frozen.whole_model(params, state)
        average = None if average is None else frozen.whole(average)
    loaded(checkpoint.step)
    evaluation = trained.metrics
    if not evaluation and script.evaluate is not None:
        # `evaluate` may end the process. The exit code is then that of the script, as after `train` has returned.
        write_termination(
            environment.termination_log,
            {"result": TRAINED, "evaluates": True, "step": checkpoint.step, "checkpoint": trained.checkpoint},
        )
        evaluation = evaluated(script, params if average is None else average, state)
    _LOG.info("training has ended: the result of step %d comes from %s", checkpoint.step, uri)
    return Result(
        params=params,
        state=state,
        step=checkpoint.step,
        metrics=evaluation,
        checkpoint=trained.checkpoint,
        rank=environment.index,
        member=environment.member,
        average=average,
    )


def _frozen(script: Script, plan: ScriptPlan, checkpoint: Checkpoint) -> FrozenPart:
    """Returns the frozen arrays, which must be those of the training.

    Raises:
        CheckpointError: the arrays cannot be read, or are not those of the training.
    """
    beginning, record = script.beginning, checkpoint.frozen
    reference = beginning.reference("", record)
    part = FrozenPart(beginning, plan.agreement, lambda: script.placement)
    part.read(reference)
    if record is not None:
        here = beginning.record(part.agreement.frozen, reference)
        if why := record.difference(here, f"the checkpoint {checkpoint.uri}", "this pod"):
            raise CheckpointError(f"the frozen arrays are not those of the training: {why}")
    return part
