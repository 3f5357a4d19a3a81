# SPDX-License-Identifier: Apache-2.0
"""Ray Train's TorchTrainer, elastic, with a checkpoint every ten steps, as Ray's guide has it."""

import os
import tempfile
from pathlib import Path

import ray
import ray.train
from job import WORKERS, batch, done, share
from ray.train.torch import TorchTrainer, prepare_model

EVERY = 10  # steps


def train() -> None:
    import torch
    from torch_job import build, loss_of, sgd

    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    model = prepare_model(build())
    plain = model.module if size > 1 else model
    optimizer, step = sgd(model), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        optimizer.zero_grad()
        loss_of(model, *batch(step, rank, size)).backward()
        optimizer.step()
        done(step, size, share(step, rank, size))
        step += 1
        if step % EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(folder) / "state.pt")
                kept = ray.train.Checkpoint(folder) if rank == 0 else None
                ray.train.report({"step": step}, checkpoint=kept)


ray.init(address=os.environ["RAY_ADDRESS"])
TorchTrainer(
    train,
    scaling_config=ray.train.ScalingConfig(num_workers=(1, WORKERS), elastic_resize_monitor_interval_s=1),
    run_config=ray.train.RunConfig(
        storage_path=os.environ["BENCH_DIR"],
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        failure_config=ray.train.FailureConfig(max_failures=-1),
    ),
).fit()
