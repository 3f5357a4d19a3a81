# SPDX-License-Identifier: Apache-2.0
"""Numbers out of bounds: refused where a message arrives, by their name, and nothing has changed then."""

from __future__ import annotations

import asyncio
import inspect
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]

from edl.contract.bounds import BOUNDS, MAXIMUM, violation
from edl.contract.proto import edl_pb2, ps_pb2
from edl.contract.proto import ps_pb2 as pb
from edl.contract.tokens import Tokens
from edl.net.listener import Listener
from edl.ps.rpc.service import OPTIONS, Service
from edl.ps.server import ParameterServer
from tests.support.ps.requests import RUN, pull, stage, start_generation, tables
from tests.unit.ps.test_calls import Caller

INT32, INT64 = FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64
KINDS: list[Any] = [
    kind
    for module in (edl_pb2, ps_pb2)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, Message)
]
WHOLE = [
    (kind, field) for kind in KINDS for field in kind.DESCRIPTOR.fields if field.cpp_type in (INT32, INT64)
]


def with_one(kind: Any, field: FieldDescriptor, value: int) -> Message:
    message: Message = kind(**{field.name: [value] if field.is_repeated else value})
    return message


@pytest.mark.parametrize("field", WHOLE, ids=lambda found: f"{found[0].__name__}.{found[1].name}")
def test_each_whole_number_has_bounds_and_is_named_when_it_is_outside(
    field: tuple[Any, FieldDescriptor],
) -> None:
    kind, number = field
    name = f"{kind.__name__}.{number.name}"
    low, high = BOUNDS.get(name, (0, MAXIMUM))
    width = 31 if number.cpp_type == INT32 else 63
    least, most = max(low, -(1 << width)), min(high, (1 << width) - 1)
    for value in (least, most):
        assert violation(with_one(kind, number, value)) == ""
    for value in (low - 1, high + 1):
        if -(1 << width) <= value < 1 << width:
            expected = f"{name} is {value}: expected {low} to {high}"
            assert violation(with_one(kind, number, value)) == expected


def test_numbers_inside_of_other_messages_and_of_maps_are_looked_at() -> None:
    form = edl_pb2.Form(members=[0, 1], shares=[1, -5])
    assert violation(edl_pb2.ToWorker(generation=3, form=form)).startswith("Form.shares is -5:")
    ready = edl_pb2.Ready(held_out={"test": -1})
    assert violation(edl_pb2.FromWorker(ready=ready)).startswith("Ready.held_out is -1:")
    stepped = edl_pb2.Stepped(step=1, stall_seconds=float("nan"))
    assert "Stepped.stall_seconds is nan: expected a finite" in violation(edl_pb2.FromWorker(stepped=stepped))
    assign = ps_pb2.AssignRequest(to=ps_pb2.ShardAssignment(servers=1 << 30))
    assert violation(assign) == "ShardAssignment.servers is 1073741824: expected 0 to 64"
    not_finite = edl_pb2.Heartbeat(step=1, loss=float("nan"))
    assert violation(not_finite) == "", "a loss may be NaN"


def made_up(chance: random.Random, kind: Any, depth: int = 0) -> Message:
    """A message whose fields are set or not, with numbers at and beyond the bounds."""
    numbers = [0, 0, 1, 2, 4096, (1 << 31) - 1, MAXIMUM, -1, 1 << 62, (1 << 63) - 1, -(1 << 63)]
    arguments: dict[str, Any] = {}
    for field in kind.DESCRIPTOR.fields:
        if chance.random() < 0.4 and field.name != "run_id":
            continue
        values: list[Any] = []
        for _ in range(chance.randrange(3) if field.is_repeated else 1):
            if field.message_type is not None:
                if depth < 3:
                    values.append(made_up(chance, getattr(ps_pb2, field.message_type.name), depth + 1))
            elif field.cpp_type in (INT32, INT64):
                width = 31 if field.cpp_type == INT32 else 63
                values.append(chance.choice([n for n in numbers if -(1 << width) <= n < 1 << width]))
            elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
                values.append(chance.random() < 0.5)
            elif field.type == FieldDescriptor.TYPE_BYTES:
                values.append(chance.choice([b"", b"1", bytes(8), bytes(range(16)), b"\xff" * 24]))
            elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
                values.append(RUN if field.name == "run_id" else chance.choice(["", "a", "[]", "../x"]))
            else:
                values.append(chance.choice([0.0, 0.5, -1.0, float("nan"), float("inf")]))
        if values:
            arguments[field.name] = values if field.is_repeated else values[0]
    message: Message = kind(**arguments)
    return message


CALLS = ps_pb2.DESCRIPTOR.services_by_name["ParameterServer"].methods_by_name
DOCUMENTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # it waits for a generation
}


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_a_call_says_a_server_answers_or_refuses_it_by_a_documented_status(
    seed: int, tmp_path: Path
) -> None:
    service = Service(ParameterServer(0, 1, RUN, tmp_path / "log", str(tmp_path / "checkpoints"), 1 << 20))
    listener, chance = Listener(Tokens("token"), options=OPTIONS), random.Random(seed)
    call = Caller(await listener.start("127.0.0.1:0", service.register))
    await call("Declare", tables())

    async def one(name: str) -> tuple[str, grpc.StatusCode, str] | None:
        request = made_up(chance, getattr(ps_pb2, CALLS[name].input_type.name))
        try:
            await call(name, request, 0.5)
        except grpc.aio.AioRpcError as error:
            if error.code() not in DOCUMENTED:
                return name, error.code(), f"{error.details()} <- {request}"
        return None

    names = [name for name in CALLS if name not in ("Converse", "End")]
    for _ in range(30):
        found = await asyncio.gather(*(one(name) for name in names))
        assert not any(found), (seed, [each for each in found if each])
    assert (await call("Describe", pb.DescribeRequest())).run_id == RUN
    await call.close()
    await listener.close(0)
    await service.close()


async def test_a_generation_after_which_there_is_no_other_is_refused_and_changes_nothing(
    tmp_path: Path,
) -> None:
    service = Service(ParameterServer(0, 1, RUN, tmp_path / "log"))
    listener = Listener(Tokens("token"), options=OPTIONS)
    call = Caller(await listener.start("127.0.0.1:0", service.register))
    await call("Declare", tables())
    for generation in ((1 << 63) - 1, MAXIMUM + 1, -1):
        with pytest.raises(
            grpc.aio.AioRpcError, match=rf"StartGenerationRequest\.generation is {generation}"
        ):
            await call("StartGeneration", start_generation(generation, 0))
    for name, request, outside in (
        ("Pull", pull(1, 0, [1], pb.Commit(step=-3)), "Commit.step is -3"),
        ("Push", pb.PushRequest(run_id=RUN, generation=1, rank=-1), "PushRequest.rank is -1"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(name, request)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.value.details() or "").startswith(outside)
    assert (await call("StartGeneration", start_generation(1, 0))).generation == 1
    await call("Push", stage(1, 0))
    await call.close()
    await listener.close(0)
    await service.close()
