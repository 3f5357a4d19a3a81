# SPDX-License-Identifier: Apache-2.0
"""torchft with its manager's all-reduce of one flat gradient.

Each worker has its own third of each batch, as torchft's README has it: while a worker is away, its records
are left out.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from job import batch, done, share
from torch.distributed import TCPStore
from torch_job import build, loss_of, sgd
from torchft import Manager, ProcessGroupGloo

rank, size = int(os.environ["BENCH_INDEX"]), int(os.environ["BENCH_WORKERS"])
model = build()
optimizer = sgd(model)
parameters = list(model.parameters())


def load(state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=1)),
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    min_replica_size=1,
    replica_id=f"worker{rank}-",
    store_addr="localhost",
    store_port=store.port,
    rank=0,
    world_size=1,
)
while True:
    step = manager.current_step()
    manager.start_quorum()
    optimizer.zero_grad()
    loss_of(model, *batch(step, rank, size)).backward()
    flat = torch.cat([p.grad.flatten() for p in parameters])
    manager.allreduce(flat).wait()
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(part.view_as(p))
    if manager.should_commit():
        optimizer.step()
        done(step, manager.num_participants(), share(step, rank, size))
