# SPDX-License-Identifier: Apache-2.0
"""The client of a running master: its status, and requests to scale or stop the job."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import grpc

from edl.contract import artifacts
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.errors import EdlError, MasterUnavailable, Unauthenticated
from edl.net import tls

TIMEOUT_SECONDS = 5.0
UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Client:
    """A connection to one master, with the token that `contact` holds.

    Raises (every method but `follow`):
        MasterUnavailable: the master did not answer.
        Unauthenticated: the master does not accept the token.
        EdlError: the master refused the request; the message is the master's.
    """

    def __init__(self, contact: artifacts.Contact):
        self._address, self._ca = contact.address, contact.ca
        self._stub = rpc.MasterStub(tls.channel(contact.address, contact.ca))
        self._metadata = (("authorization", f"Bearer {contact.token}"),)

    def status(self) -> dict[str, Any]:
        """The current status of the job."""
        try:
            call = self._stub.Watch(pb.WatchRequest(), metadata=self._metadata, timeout=TIMEOUT_SECONDS)
            return dict(json.loads(next(iter(call)).json))
        except grpc.RpcError as error:
            raise self._typed(error) from error

    def follow(self, seconds: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield the job's status at each change, until the master ends or `seconds` have passed."""
        call = self._stub.Watch(pb.WatchRequest(follow=True), metadata=self._metadata, timeout=seconds)
        with contextlib.suppress(grpc.RpcError):
            for status in call:
                yield json.loads(status.json)

    def scale(self, workers: int | None, servers: int | None = None) -> str:
        """Request a different number of workers or parameter servers; return the master's answer."""
        return self._ask(self._stub.Scale, pb.ScaleRequest(workers=workers, servers=servers))

    def checkpoint(self) -> str:
        """Request a checkpoint; return the master's answer."""
        return self._ask(self._stub.Checkpoint, pb.CheckpointRequest())

    def stop(self, why: str, checkpoint: bool = False, force: bool = False, id: str = "") -> str:
        """Ask the master to stop the job; return its answer.

        Args:
            checkpoint: stop once the state is in a checkpoint.
            force: stop even if the checkpoint fails.
            id: id of this request; the status reports the outcome by this id.
        """
        return self._ask(self._stub.Stop, pb.StopRequest(why=why, checkpoint=checkpoint, force=force, id=id))

    def _ask(self, method: Any, request: Any) -> str:
        try:
            return str(method(request, metadata=self._metadata, timeout=TIMEOUT_SECONDS).text)
        except grpc.RpcError as error:
            raise self._typed(error) from error

    def _typed(self, error: grpc.RpcError) -> EdlError:
        """Convert the error of a failed call to a typed one."""
        if error.code() in UNAVAILABLE:
            why = tls.trouble(self._address, self._ca) or "it has exited or cannot be reached"
            return MasterUnavailable(f"the master at {self._address} does not answer: {why}")
        text = error.details() or str(error.code())
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(text)
        return EdlError(text)
