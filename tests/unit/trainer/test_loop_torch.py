# SPDX-License-Identifier: Apache-2.0
"""edl.join with PyTorch, here alone: its state, its gradients, its data, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edl
from edl.trainer import join, loop, script
from edl.trainer.model.loop_state import LoopState

sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # else two LLVMs are in this process
torch: Any = pytest.importorskip("torch")

X = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
TRIAL = 4  # steps before the first one of the job; in the first of them there are no means


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(join, "host", None)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def data() -> Any:
    return torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


def network(*more: Any) -> Any:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), *more, torch.nn.Linear(4, 1))


def joined(state: Any, given: Any = None, **how: Any) -> loop.Job:
    return edl.join(data=given or data(), state=state, **{"batch_size": 4, "epochs": 2, "seed": 1, **how})


def failed(state: Any, body: Callable[[Any], object]) -> str:
    """The error of a loop with this body."""

    def run() -> None:
        for step in joined(state).steps():
            body(step)

    with pytest.raises(edl.EdlError) as error:
        run()
    return str(error.value)


def loss_of(model: Any, records: Any) -> Any:
    x, y = records
    return ((model(x) - y) ** 2).mean()


KINDS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_the_same_loop_without_edl(kind: str) -> None:
    """Slots that appear in the first step, a schedule, clipping, and an average of the weights."""

    def made() -> Any:
        torch.manual_seed(0)
        model = network(torch.nn.Tanh())
        optimizer = KINDS[kind](model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.02, total_steps=20, cycle_momentum=kind == "sgd"
        )
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        return model, optimizer, schedule, torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)

    model, optimizer, schedule, average = made()
    batches = []

    def update(model: Any, optimizer: Any, schedule: Any, average: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)

    job = joined([model, optimizer, {"schedule": schedule}, (average,)])
    for step in job.steps():
        optimizer.zero_grad()
        (loss := loss_of(model, step.records)).backward()
        if (mean := step.mean(model, loss=loss)) is None:
            assert model[0].weight.grad is None
            continue
        assert mean is model
        update(model, optimizer, schedule, average)
        batches.append([array.clone() for array in step.records])
    theirs, its, schedule_alone, average_alone = made()
    for records in batches[3:]:  # after the trial
        its.zero_grad()
        loss_of(theirs, records).backward()
        update(theirs, its, schedule_alone, average_alone)
    for ours, alone in ((model, theirs), (average, average_alone)):
        for name, value in ours.state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert schedule.state_dict() == schedule_alone.state_dict()


def usual(name: str, model: Any, graphs: Any) -> tuple[Callable[..., None], list[Any]]:
    """The body of a loop as people write it: the same text with edl, and without."""
    first, last = (torch.optim.Adam(part.parameters(), 0.01) for part in (model[0], model[-1]))
    seen = edl.State(losses=0.0)
    compiled = torch.compile(model, backend=graphs, dynamic=True) if name == "compiled" else model

    def body(step: Any, mean: Callable[[Any], Any]) -> None:
        x, y = step.records
        first.zero_grad()
        last.zero_grad()
        torch.manual_seed(step.seed)
        if name == "accumulation":
            for of_x, of_y in zip(x.split(2), y.split(2), strict=True):
                (loss_of(model, (of_x, of_y)) * len(of_x) / len(x)).backward()
        elif name == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                predicted = model(x)
            ((predicted.float() - y) ** 2).mean().backward()
        else:
            loss_of(compiled, step.records).backward()
        if mean({"first": model[0], "rest": [model[1:]]}) is None:
            return
        first.step()
        last.step()
        if step.ends_epoch:
            model.eval()
            with torch.no_grad():
                seen.losses += float(loss_of(model, (torch.from_numpy(X), torch.from_numpy(Y))))
            model.train()

    return body, [model, first, last, seen]


@pytest.mark.parametrize("name", ["accumulation", "autocast", "dropout", "compiled"])
def test_what_people_write_in_loops_trains_as_without_edl(name: str) -> None:
    """Two optimizers, a part at a time, halves, random masks, compiled graphs; evaluated after each epoch."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    more, graphs = [torch.nn.Dropout(0.5)] if name == "dropout" else [], CompileCounter()
    ours, alone = network(*more), network(*more)
    alone.load_state_dict(ours.state_dict())
    body, state = usual(name, ours, graphs)
    steps = []
    for step in joined(state).steps():
        body(step, step.mean)
        steps.append(step)
    assert {len(step.records[0]) for step in steps[TRIAL:]} == {4, 2}
    assert graphs.frame_count == (name == "compiled"), "compiled once, for parts of all sizes"
    body, (*_, seen) = usual(name, alone, graphs)
    for step in steps[TRIAL:]:
        body(step, lambda modules: modules)
    for key, value in ours.state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[key], rtol=1e-5, atol=1e-6)
    assert state[-1].losses == pytest.approx(seen.losses)


def test_a_new_worker_receives_slots_that_its_own_optimizer_has_not_made() -> None:
    one, two = network(), network()
    first, second = (torch.optim.Adam(model.parameters(), 0.01) for model in (one, two))
    states = [LoopState([model, optimizer]) for model, optimizer in ((one, first), (two, second))]
    fresh = dict(zip(states[1].names, states[1].arrays(), strict=True))
    for model, optimizer in ((one, first), (two, second)):  # as in the trial
        loss_of(model, (torch.from_numpy(X), torch.from_numpy(Y))).backward()
        optimizer.step()
        optimizer.step()
    for state in states:
        assert len(state.names) == len(fresh) + 3 * 4
    states[1].restore(fresh)
    assert not second.state, "an optimizer before its first step has no slots"
    assert states[1].names == states[0].names
    first.param_groups[0]["lr"] = 0.5
    states[1].take_over(states[1].prepared(states[0].parts()))
    assert np.array_equal(states[0].digests(), states[1].digests())
    assert second.param_groups[0]["lr"] == 0.5
    assert int(second.state[two[0].weight]["step"]) == 2
    second.zero_grad()
    loss_of(two, (torch.from_numpy(X), torch.from_numpy(Y))).backward()
    second.step()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64", "int32", "bool", "uint8"])
def test_values_of_all_types_are_copied_bit_for_bit(dtype: str) -> None:
    values = torch.tensor([0.1, 2.5, 0.0]).to(getattr(torch, dtype))
    one, two = torch.nn.Module(), torch.nn.Module()
    one.register_buffer("values", values)
    two.register_buffer("values", torch.zeros_like(values))
    ours, other = LoopState([one]), LoopState([two])
    assert ours.specs()[0].dtype == dtype
    other.take_over(other.prepared(ours.parts()))
    assert torch.equal(two.values, values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_gradients_of_other_types_come_back_in_their_type(dtype: str) -> None:
    kind = getattr(torch, dtype)
    model = network().to(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in joined([model, optimizer]).steps():
        x, y = step.records
        optimizer.zero_grad()
        loss_of(model, (x.to(kind), y.to(kind))).backward()
        if step.mean(model) is not None:
            assert {p.grad.dtype for p in model.parameters()} == {kind}
            optimizer.step()


def test_averages_of_batch_norm_are_averaged_with_the_gradients_and_undone_with_the_step() -> None:
    model, alone = network(torch.nn.BatchNorm1d(4)), network(torch.nn.BatchNorm1d(4))
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in joined([model, optimizer]).steps():
        optimizer.zero_grad()
        loss_of(model, step.records).backward()
        if step.mean(model) is None:
            assert int(model[1].num_batches_tracked) == 0
            continue
        optimizer.step()
    assert int(model[1].num_batches_tracked) == 6
    assert not torch.equal(model[1].running_mean, alone[1].running_mean)


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        return torch.full([i % 3 + 1], float(i)), f"w{i}", i


def padded(batch: Any) -> Any:
    rows, words, numbers = zip(*batch, strict=True)
    return {
        "x": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "word": list(words),
        "n": torch.tensor(numbers),
    }


def test_a_data_loader_gives_its_batches_as_it_makes_them() -> None:
    loader = torch.utils.data.DataLoader(
        Words(), batch_size=5, shuffle=False, collate_fn=padded, num_workers=2
    )
    weight, found = torch.zeros(1), []
    for step in edl.join(data=loader, state=[weight], epochs=1).steps():
        batch = step.records
        assert batch["x"].shape == (len(batch["n"]), 3)
        assert len(batch["word"]) == len(batch["n"])
        if step.mean([torch.ones(1)]) is not None:
            weight += 1
            found.append(batch["n"].tolist())
    assert found[3:] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_loader_that_chooses_its_records_is_refused() -> None:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 10, 10)
    loader = torch.utils.data.DataLoader(Words(), sampler=sampler)
    with pytest.raises(edl.EdlError, match="has the sampler WeightedRandomSampler; the job decides"):
        joined([torch.zeros(1)], loader)


def test_a_loader_that_differs_from_the_values_of_the_job_is_refused_with_all_values_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(join, "host", join.Alone(None, 32, 1, True))
    loader = torch.utils.data.DataLoader(Words(), batch_size=5)
    told = (
        "the DataLoader has batch_size=5 and shuffle=False, but the job has training.batchSize=32 and "
        "data.shuffle=true; start it with --set training.batchSize=5,data.shuffle=false, or"
    )
    with pytest.raises(edl.EdlError, match=told):
        edl.join(data=loader, state=[torch.zeros(1)])


def test_an_optimizer_that_steps_before_the_mean_is_refused_though_its_slots_are_new() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())

    def body(step: Any) -> None:
        loss_of(model, step.records).backward()
        optimizer.step()
        step.mean(model)

    told = failed([model, optimizer], body)
    assert "step 1 has made variables of the state before it called step.mean(); between two steps" in told


def test_an_optimizer_that_begins_later_is_told_to_step_before_the_loop() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())

    def body(step: Any) -> None:
        optimizer.zero_grad()
        loss_of(model, step.records).backward()
        if step.mean(model) is not None and step.number > 1:
            optimizer.step()

    told = failed([model, optimizer], body)
    assert "state[1].state.0.step was made after the trial steps" in told
    assert "let an optimizer step with zero gradients before edl.join()" in told


def test_the_training_ends_with_the_epoch_in_which_the_loop_asks_for_it() -> None:
    model, seen = network(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in (job := joined([model, optimizer], epochs=9)).steps():
        loss_of(model, step.records).backward()
        if step.mean(model) is None:
            continue
        optimizer.step()
        optimizer.zero_grad()
        seen.append(step.number)
        if step.number == 4:
            job.stop()
    assert seen[3:] == [0, 1, 2, 3, 4, 5]
    assert job.is_over


def refusals() -> Iterator[tuple[str, Callable[[], Any], str]]:
    meta = torch.nn.Linear(2, 1, device="meta")
    yield "meta", lambda: [meta], "state[0].weight is on the device 'meta'"
    yield "lazy", lambda: [torch.nn.LazyLinear(2)], "state[0].weight is not made yet; call the module once"
    parallel = torch.nn.DataParallel(torch.nn.Linear(1, 1))
    yield "wrapped", lambda: {"model": parallel}, "model is wrapped or sharded by DataParallel"
    yield "held", lambda: edl.State(model=torch.nn.Linear(1, 1)), "state['model'] is of type Linear"

    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    yield "extra", lambda: [Extra(1, 1)], "state[0]._extra_state is of type dict"


@pytest.mark.parametrize(("state", "told"), [pytest.param(*r[1:], id=r[0]) for r in refusals()])
def test_what_cannot_be_copied_is_refused_by_name(state: Callable[[], Any], told: str) -> None:
    with pytest.raises(edl.EdlError) as error:
        joined(state())
    assert told in str(error.value)


def test_a_schedule_that_is_missing_from_the_state_is_found_in_the_trial() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rate = [0.01]

    def body(step: Any) -> None:
        loss_of(model, step.records).backward()
        if step.mean(model) is not None:
            optimizer.step()
            optimizer.zero_grad()
            rate[0] *= 0.9
            optimizer.param_groups[0]["lr"] = rate[0]

    assert "something that the loop changes is missing from `state`" in failed(
        [model, optimizer, schedule], body
    )


def test_backward_must_be_called_before_mean() -> None:
    model = network()
    assert "modules without gradients; call loss.backward()" in failed([model], lambda step: step.mean(model))


def test_the_file_of_the_page_learns(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "custom-loops.md").read_text()
    after = text.split("```python\n")[2].partition("```")[0]
    script.run(after, [])
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    x = torch.randn(100, 8)
    assert float(((model(x) - x.sum(1, keepdim=True)) ** 2).mean().detach()) < 0.3
