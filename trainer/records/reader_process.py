# SPDX-License-Identifier: Apache-2.0
"""What runs in a reader process: requests of its worker, one after the other.

A request is the name of a method and its arguments; further packets are pieces of the batch that other
readers have read. The answer is the result, after a packet with None, or with the description of the error:
it is made here, where the traceback is.
"""

from __future__ import annotations

import faulthandler
import socket
import sys
from collections.abc import Callable
from typing import Any

from edl.trainer.records.wire import Closed, Packet, pack, receive, send
from edl.trainer.runtime.error_report import Relayed, relay

NO_ERROR = pack(None)


def serve(connection: socket.socket, make: Callable[[], Any]) -> None:
    """Answer requests until the worker closes the connection.

    Args:
        make: opens the data, and returns the object whose methods are called.
    """
    faulthandler.enable()  # a crash shows the Python stack in the worker's log
    service: Any = None
    failed: Relayed | None = None
    try:
        service = make()
    except BaseException as error:  # every request is answered with it
        failed = relay(error)
    while True:
        try:
            message = receive(connection)
            send(connection, [pack(failed)] if failed is not None else _answer(service, message))
        except Closed:
            return
        del message  # frees the shared memory
        sys.stdout.flush()
        sys.stderr.flush()


def _answer(service: Any, message: list[Packet]) -> list[Packet]:
    request, *pieces = message
    name, arguments = request.unpack()
    try:
        return [NO_ERROR, pack(getattr(service, name)(*arguments, *(piece.unpack() for piece in pieces)))]
    except BaseException as error:  # SystemExit too, as in a worker
        return [pack(relay(error))]
