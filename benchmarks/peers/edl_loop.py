# SPDX-License-Identifier: Apache-2.0
"""The job as a training loop in PyTorch with `edl.join`."""

from job import X, Y
from stamped import stamp_steps
from torch_job import build, loss_of, sgd

import edl

stamp_steps()
model = build()
optimizer = sgd(model)
job = edl.join(data=(X, Y), state=[model, optimizer])
for step in job.steps():
    optimizer.zero_grad()
    loss = loss_of(model, *step.records)
    loss.backward()
    if step.mean(model, loss=loss) is not None:
        optimizer.step()
