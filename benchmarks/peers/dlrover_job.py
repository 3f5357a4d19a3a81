# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel with a flash checkpoint in memory every five steps, as DLRover's guide has it."""

import os

import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from job import batch, done, share
from torch.nn.parallel import DistributedDataParallel
from torch_job import build, loss_of, sgd

EVERY = 5  # steps
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(build())
optimizer, step = sgd(model), 0
folder = os.path.join(os.environ["BENCH_DIR"], "checkpoints")
checkpointer = DdpCheckpointer(folder)
if state := checkpointer.load_checkpoint():
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while True:
    optimizer.zero_grad()
    loss_of(model, *batch(step, rank, size)).backward()
    optimizer.step()
    done(step, size, share(step, rank, size))
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        checkpointer.save_checkpoint(step, state, f"{folder}/{step}.pt", storage_type=StorageType.MEMORY)
