# SPDX-License-Identifier: Apache-2.0
"""GPUs of this machine, dealt out to workers: a worker has its GPU until its process has ended.

NCCL refuses two ranks of one host on one GPU. So each GPU has numbered places, and the workers in places of
one number form a host of their own to NCCL: on different GPUs they use its fast transports, and on one GPU
they use sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from edl.contract.gpus import HIDDEN
from edl.contract.ids import WorkerId


class Place(NamedTuple):
    """A worker's share of a GPU.

    Args:
        device: a token of CUDA_VISIBLE_DEVICES.
        number: differs between the workers of one GPU.
    """

    device: str
    number: int


class Gpus:
    """The places of workers on GPUs.

    Args:
        devices: tokens of CUDA_VISIBLE_DEVICES.
        each: how many workers may use one GPU; None for any number; 0: workers use no GPU.
    """

    def __init__(self, devices: Sequence[str] = (), each: int | None = None):
        self._devices, self._each = devices, each
        self._places: dict[WorkerId, Place] = {}
        self._leaving: set[WorkerId] = set()
        self._freed = asyncio.Event()

    def assign(self, worker: WorkerId) -> list[str] | None:
        """Assign a place on the least used GPU.

        Returns:
            arguments for the worker's process; None if no place is free.
        """
        if self._each == 0:
            return ["--gpu", HIDDEN]
        if not self._devices:
            return [] if self._each is None else None
        held = {
            device: {p.number for p in self._places.values() if p.device == device}
            for device in self._devices
        }
        # The GPU of a worker that is ending is preferred: its successor shall not share a different one.
        stay = [place.device for w, place in self._places.items() if w not in self._leaving]
        load = {d: (stay.count(d) if self._each is None else len(held[d])) for d in self._devices}
        device = min(self._devices, key=lambda d: load[d])
        if self._each is not None and load[device] >= self._each:
            return None
        number = next(n for n in range(len(held[device]) + 1) if n not in held[device])
        self._places[worker] = Place(device, number)
        return ["--gpu", device, "--nccl-host", f"edl-{number}"]

    def leaves(self, worker: WorkerId) -> None:
        """The worker was ordered to end."""
        self._leaving.add(worker)

    def release(self, worker: WorkerId) -> None:
        """The worker's process has ended, or was never started: its place is free."""
        self._places.pop(worker, None)
        self._leaving.discard(worker)
        self._freed.set()
        self._freed = asyncio.Event()

    async def wait(self) -> None:
        """Wait until a worker is released."""
        await self._freed.wait()
