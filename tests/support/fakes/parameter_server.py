# SPDX-License-Identifier: Apache-2.0
"""A parameter server in dicts: all of the protocol (edl/contract/proto/ps.proto), and none of the speed.

A row begins as zeros, and a step subtracts the sum of its gradients, as SGD does at rate one. What it has
outlives its being out of reach: that is a server whose log is kept. A new one is one that has lost it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn

import grpc
import numpy as np

from edl.checkpoints import Checkpoint, Store
from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc as rpc
from edl.contract.rows.buckets import server_of

REQUESTS: dict[str, Any] = {
    method.name: getattr(pb, method.input_type.name)
    for method in pb.DESCRIPTOR.services_by_name["ParameterServer"].methods
}
Rows = dict[tuple[int, int], np.ndarray]  # by table and id


class Refused(Exception):
    """The call fails with this code."""

    def __init__(self, code: grpc.StatusCode, words: str):
        super().__init__(words)
        self.code = code


class GenerationPending(Exception):
    """The call waits until its generation is settled."""


class FakeServer:
    """What one server has.

    Args:
        index, servers: which one of how many.
        store: of checkpoints; None: the job has none.
    """

    def __init__(self, index: int = 0, servers: int = 1, store: Store | None = None):
        self.index, self.servers, self.store = index, servers, store
        self.tables: list[pb.Table] = []
        self.generation = self.step = 0
        self.empty = True
        self.rows: Rows = {}
        self.staged: dict[int, list[pb.Gradients]] = {}  # by rank, for the present step
        self._before: Rows | None = None  # of the rows that the last step has changed
        self._restored = (0, 0, "")
        self.committed: list[tuple[int, str]] = []

    def handle(self, method: str, request: Any) -> Any:
        """The answer to a call. Raises: Refused, GenerationPending."""
        match method:
            case "Declare":
                if self.tables and self.tables != list(request.tables):
                    raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "the tables are others than before")
                self.tables = list(request.tables)
            case "StartGeneration":
                self._start_generation(request)
            case "Restore":
                self._restore(request)
            case "Pull":
                self._is_settled(request.generation)
                self._advance(request)
                return pb.Rows(rows=[self._pull(ids) for ids in request.ids])
            case "Push":
                self._is_settled(request.generation)
                if request.step != self.step:
                    raise Refused(grpc.StatusCode.ABORTED, f"is at step {self.step}, not {request.step}")
                self.staged.setdefault(request.rank, list(request.gradients))
                return pb.Progress(step=self.step, empty=self.empty)
            case "WritePart":
                if request.generation > self.generation:
                    raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "the server has lost its log")
                self._is_settled(request.generation)
                self._advance(request)
                return self._write(request)
            case "Committed":
                self.committed.append((request.step, request.attempt))
            case "Describe":
                return pb.Description(position=self.position)
        return self.position

    @property
    def position(self) -> pb.Position:
        return pb.Position(generation=self.generation, step=self.step, empty=self.empty)

    def _is_settled(self, generation: int) -> None:
        if generation < self.generation:
            raise Refused(grpc.StatusCode.ABORTED, f"is in generation {self.generation}")
        if generation > self.generation:
            raise GenerationPending

    def _start_generation(self, request: pb.StartGenerationRequest) -> None:
        if request.generation < self.generation:
            raise Refused(grpc.StatusCode.ABORTED, f"is in generation {self.generation}")
        if request.generation == self.generation:
            return
        if request.step == self.step - 1 and self._before is not None:
            self.rows.update(self._before)
            self.step, self._before = request.step, None
        elif not self.empty and request.step == self.step + 1 and request.HasField("last"):
            self._advance(request)
        self.generation, self.staged = request.generation, {}

    def _advance(self, request: Any) -> None:
        if request.step == self.step:
            return
        last = request.last if request.HasField("last") else None
        if last is None or last.step != self.step or request.step != self.step + 1:
            raise Refused(grpc.StatusCode.ABORTED, f"is at step {self.step}, not at {request.step}")
        changed: Rows = {}
        for _, gradients in sorted(self.staged.items()) if not last.skipped else ():
            for one in gradients:
                ids = np.frombuffer(one.ids, "<i8").tolist()
                for id_, value in zip(ids, self._shaped(one.table, one.values), strict=True):
                    key = one.table, id_
                    changed.setdefault(key, self._row(key))
                    self.rows[key] = self._row(key) - np.float32(last.scale) * value
        self._before, self.staged, self.step = changed, {}, self.step + 1

    def _row(self, key: tuple[int, int]) -> np.ndarray:
        row = self.rows.get(key)
        return np.zeros(self.tables[key[0]].dim, np.float32) if row is None else row

    def _shaped(self, table: int, values: bytes) -> np.ndarray:
        return np.frombuffer(values, "<f4").reshape(-1, self.tables[table].dim)

    def _pull(self, ids: pb.Ids) -> bytes:
        asked = np.frombuffer(ids.ids, "<i8").tolist()
        assert len(set(asked)) == len(asked), "an id is asked for twice"
        assert (server_of(np.array(asked), self.servers) == self.index).all(), "not of this server"
        return b"".join(self._row((ids.table, id_)).tobytes() for id_ in asked)

    # --- checkpoints

    def _write(self, request: pb.WritePartRequest) -> pb.Written:
        assert self.store is not None
        kept = [[table, id_, row.tolist()] for (table, id_), row in self.rows.items()]
        name = f"rows-{request.index:05d}-of-{request.of:05d}.json"
        writing = self.store.begin(request.step, request.attempt)
        part, why = writing, ""
        data = json.dumps(kept).encode()
        try:
            part.place.write(writing.directory, name, iter([memoryview(data)]))
        except OSError as error:
            why = str(error)
        return pb.Written(name=name, nbytes=len(data), sha256=_sha256(data), why=why)

    def _restore(self, request: pb.RestoreRequest) -> None:
        if request.generation < self.generation:
            raise Refused(grpc.StatusCode.ABORTED, f"is in generation {self.generation}")
        again = request.generation, request.step, request.attempt
        if again == self._restored:
            return
        self.rows, self.staged, self._before = {}, {}, None
        if request.step:
            self._load(request.step, request.attempt)
        self.generation, self.step, self.empty, self._restored = (
            request.generation,
            request.step,
            False,
            again,
        )

    def _load(self, step: int, attempt: str) -> None:
        assert self.store is not None
        found = [c for c in self.store.checkpoints() if (c.step, c.attempt) == (step, attempt)]
        if not found:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"there is no checkpoint {attempt} of {step}")
        self.rows = {
            key: row
            for key, row in rows_of(found[0]).items()
            if server_of(np.array([key[1]]), self.servers)[0] == self.index
        }


def rows_of(checkpoint: Checkpoint) -> Rows:
    """All rows in a checkpoint, of all servers."""
    rows: Rows = {}
    for name in checkpoint.manifest.of_servers:
        with checkpoint.place.open(checkpoint.directory, name) as file:
            for table, id_, row in json.loads(file.read()):
                rows[table, id_] = np.array(row, np.float32)
    return rows


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Listening(rpc.ParameterServerServicer):
    """A fake server that listens on a port of this machine, until it is killed; it may come back there."""

    def __init__(self, server: FakeServer, port: int = 0, token: str = "token"):
        self.server, self._token = server, token
        self._changed = threading.Condition()
        self.calls: list[tuple[str, Any]] = []
        self.before: Callable[[str], object] = lambda method: None  # each call
        self._ended = False
        self._grpc = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        rpc.add_ParameterServerServicer_to_server(self, self._grpc)
        self.port = self._grpc.add_insecure_port(f"127.0.0.1:{port}")
        self._grpc.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Make all calls fail, and stop listening."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._grpc.stop(0).wait()

    def comes_to(self, method: str) -> Any:
        """Wait until this was called."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(m == method for m, _ in self.calls), 20), method
            return next(request for m, request in self.calls if m == method)

    def reaches(self, step: int) -> None:
        """Wait until it is at that step."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.server.step == step, 20), self.server.step

    def _check_token(self, context: Any) -> None:
        if dict(context.invocation_metadata()).get("authorization") != f"Bearer {self._token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not the job's")

    def _answer(self, method: str, request: Any, context: Any) -> Any:
        self._check_token(context)
        with self._changed:
            self.calls.append((method, request))
            self._changed.notify_all()
        self.before(method)
        with self._changed:
            while True:
                try:
                    answer = self.server.handle(method, request)
                except GenerationPending:
                    if self._ended or not context.is_active():
                        context.abort(grpc.StatusCode.UNAVAILABLE, "it ends")
                    self._changed.wait(0.2)
                except Refused as refused:
                    context.abort(refused.code, str(refused))
                else:
                    self._changed.notify_all()
                    return answer

    def Converse(self, asks: Iterator[pb.Ask], context: grpc.ServicerContext) -> Iterator[pb.Answer]:
        self._check_token(context)
        answers = SimpleQueue[pb.Answer | None]()

        def read() -> None:
            with suppress(Exception):  # of a stream that is cancelled
                for ask in asks:
                    threading.Thread(target=answer, args=(ask,), daemon=True).start()
            answers.put(None)

        def answer(ask: pb.Ask) -> None:
            request = REQUESTS[ask.method].FromString(ask.request)
            try:
                found = self._answer(ask.method, request, _OfStream(context))
            except Refused as refused:
                code = refused.code.value[0]
                answers.put(pb.Answer(number=ask.number, code=code, why=str(refused)))
            else:
                answers.put(pb.Answer(number=ask.number, answer=found.SerializeToString()))

        threading.Thread(target=read, daemon=True).start()
        yield from iter(answers.get, None)

    def WritePart(self, request: Any, context: Any) -> Any:
        answer = self._answer("WritePart", request, context)
        context.send_initial_metadata(())
        self.before("written")
        return answer


class _OfStream:
    """What a call over a stream sees of gRPC."""

    def __init__(self, stream: grpc.ServicerContext):
        self.invocation_metadata, self.is_active = stream.invocation_metadata, stream.is_active

    def abort(self, code: grpc.StatusCode, words: str) -> NoReturn:
        raise Refused(code, words)


def _served(method: str) -> Any:
    return lambda self, request, context: self._answer(method, request, context)


for _method in ("Declare", "StartGeneration", "Restore", "Pull", "Push", "Committed", "Describe"):
    setattr(Listening, _method, _served(_method))
