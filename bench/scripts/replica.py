"""A replica of torchft's DDP whose parameters count the applied gradients, as those of witness.py do.

bench/torchft.py starts it in an environment that has torch and torchft. It follows the settings of torchft's own
example of DDP with Gloo. It imports nothing of Backstay.

The parameter `count` has an element for each (step, replica). A gradient adds 1 divided by the number of replicas in
the update to its own element. In the end, the elements of a row that are not 0 are the gradients of that update.

Environment variables: RANK_OF_JOB, REPLICAS, ROWS, SIZE, COMPUTE, TIMEOUT, TORCHFT_LIGHTHOUSE and TIMELINE. SIZE is
the number of elements of a further parameter. COMPUTE is the time in seconds that each gradient takes without a
processor. TIMEOUT is the timeout of the process group in seconds. In the folder TIMELINE, the file `last` names the
last step. Each replica then writes `count` into a file there.
"""

from _timeline import mark  # isort: split

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torchft
from torch import nn
from torchft.checkpointing.pg_transport import PGTransport

mark("imports")

RANK = int(os.environ["RANK_OF_JOB"])
FOLDER = Path(os.environ["TIMELINE"])
COMPUTE = float(os.environ["COMPUTE"])


class Witness(nn.Module):
    """The parameters. The forward pass takes the time of a computation on an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(int(os.environ["ROWS"]), int(os.environ["REPLICAS"])))
        self.further = nn.Parameter(torch.zeros(int(os.environ["SIZE"])))

    def forward(self, row: int) -> torch.Tensor:
        """Returns the loss, whose gradient is -1 at the element of this row and replica."""
        time.sleep(COMPUTE)
        return (self.further**2).mean() - self.count[row, RANK]


def last_step() -> int | None:
    """Returns the last step of the job, when it is known."""
    try:
        return int((FOLDER / "last").read_text())
    except FileNotFoundError:
        return None


def main() -> None:
    """Train until the last step."""
    # torchrun would provide the store; here each replica is one process.
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=float(os.environ["TIMEOUT"])))
    module = Witness()
    # Before the manager, whose heartbeats let the others wait for this replica: it imports for about a second.
    inner = torch.optim.SGD(module.parameters(), lr=1.0)

    def state_dict() -> dict:
        return {"model": module.state_dict(), "optim": optimizer.state_dict()}

    def load_state_dict(state: dict) -> None:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    manager = torchft.Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{RANK}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device=torch.device("cpu")),
        hostname="localhost",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
    )
    model = torchft.DistributedDataParallel(manager, module)
    optimizer = torchft.Optimizer(manager, inner)
    mark("joined")
    step = 0
    while (last := last_step()) is None or step < last:
        optimizer.zero_grad()
        model(manager.current_step()).backward()
        optimizer.step()
        if manager.current_step() != step:
            step = manager.current_step()
            mark(f"step {step}")
    (FOLDER / f"count-{RANK}.json").write_text(json.dumps(module.count[:step].tolist()))
    os._exit(0)  # without the threads of the manager


if __name__ == "__main__":
    main()
