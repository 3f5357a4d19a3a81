# SPDX-License-Identifier: Apache-2.0
"""Digits by a network of PyTorch, with BatchNorm, dropout, a schedule, clipping and early stopping."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import edl

torch.manual_seed(0)  # all workers begin with the same weights, as in a loop alone
digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
train, held_out = TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])

layers = torch.nn
model = layers.Sequential(
    layers.Linear(64, 64), layers.BatchNorm1d(64), layers.ReLU(), layers.Dropout(0.1), layers.Linear(64, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.998)
best = edl.State(accuracy=0.0, epochs_ago=0)


def accuracy() -> float:
    """The share of the held-out digits that the model knows."""
    model.eval()
    with torch.no_grad():
        found = float((model(held_out[0]).argmax(1) == held_out[1]).float().mean())
    model.train()
    return found


loader = DataLoader(train, batch_size=64, shuffle=True)
job = edl.join(data=loader, state=[model, optimizer, schedule, best], epochs=30)
for step in job.steps():
    torch.manual_seed(step.seed)  # for the dropout
    images, labels = step.records
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    if step.mean(model, loss=loss) is None:
        continue
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step.ends_epoch:
        found = accuracy()
        best.accuracy, best.epochs_ago = max(found, best.accuracy), best.epochs_ago + 1
        if found >= best.accuracy:
            best.epochs_ago = 0
        if best.epochs_ago == 5:
            job.stop()

print(f"accuracy {accuracy():.3f}")
job.save(lambda directory: torch.save(model.state_dict(), directory / "model.pt"))
