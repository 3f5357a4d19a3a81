# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel with a snapshot every ten steps, as PyTorch's guide to torchrun has it."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from job import PLAIN, batch, done, share
from torch.nn.parallel import DistributedDataParallel
from torch_job import build, loss_of, sgd

EVERY = 10  # steps
snapshot = Path(os.environ["BENCH_DIR"]) / "snapshot.pt"
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(build())
optimizer, step = sgd(model), 0
if not PLAIN and snapshot.exists():
    state = torch.load(snapshot)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while True:
    optimizer.zero_grad()
    loss_of(model, *batch(step, rank, size)).backward()
    optimizer.step()
    done(step, size, share(step, rank, size))
    step += 1
    if not PLAIN and rank == 0 and step % EVERY == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, snapshot.with_suffix(".new"))
        snapshot.with_suffix(".new").replace(snapshot)
