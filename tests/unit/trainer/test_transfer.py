# SPDX-License-Identifier: Apache-2.0
"""A member's state on its way to another: it comes as it was sent, or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from edl.trainer.ring.transfer import (
    CHUNK,
    PeerListener,
    StateDamaged,
    StateSender,
    TransferFailed,
    receive_state,
)

SIZES = (0, 1, 8, CHUNK - 1, CHUNK, 2 * CHUNK + 3)


@pytest.fixture
def parts() -> list[np.ndarray]:
    some = np.random.default_rng(3)
    return [some.integers(0, 256, size, np.uint8) for size in SIZES]


@pytest.fixture
def sender(parts: list[np.ndarray]) -> Iterator[StateSender]:
    sender = StateSender("127.0.0.1", parts)
    yield sender
    sender.close()


@pytest.fixture
def forward_to() -> Iterator[PeerListener]:
    listener = PeerListener("127.0.0.1")
    yield listener
    listener.close()


def same(found: list[np.ndarray], parts: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, parts, strict=True))


def test_a_state_comes_as_it_was_given_to_each_to_whom_it_is_passed_on(
    sender: StateSender, parts: list[np.ndarray]
) -> None:
    between = [PeerListener("127.0.0.1") for _ in range(3)]
    with ThreadPoolExecutor(4) as threads:
        addresses = [sender.address, *(listener.address for listener in between)]
        found = list(
            threads.map(lambda at, to: receive_state(at, forward_to=to), addresses, [*between, None])
        )
    assert len(found) == 4 and all(same(each, parts) for each in found)


@pytest.mark.parametrize("bytes_taken", [0, 8, CHUNK])
def test_who_passes_it_on_has_it_even_if_the_next_one_takes_it_no_longer(
    sender: StateSender, parts: list[np.ndarray], forward_to: PeerListener, bytes_taken: int
) -> None:
    host, port, secret = forward_to.address.split()
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(receive_state, sender.address, forward_to=forward_to)
        with socket.create_connection((host, int(port)), 10) as next_one:
            next_one.sendall(bytes.fromhex(secret))
            next_one.recv(bytes_taken, socket.MSG_WAITALL)
        assert same(taken.result(10), parts)


def test_who_waits_for_somebody_to_pass_it_on_to_is_told_when_it_is_broken_off(
    sender: StateSender, forward_to: PeerListener
) -> None:
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(receive_state, sender.address, forward_to=forward_to)
        forward_to.close()
        with pytest.raises(TransferFailed, match="broken off"):
            taken.result(10)


def test_who_does_not_know_the_secret_gets_nothing_and_takes_nobodys_place(
    sender: StateSender, parts: list[np.ndarray]
) -> None:
    host, port, secret = sender.address.split()
    for wrong in ("00" * 32, secret[:-2] + "00" if secret[-2:] != "00" else secret[:-2] + "01", "00"):
        with socket.create_connection((host, int(port)), 10) as stranger:
            stranger.sendall(bytes.fromhex(wrong))
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    assert same(receive_state(sender.address), parts)
    with pytest.raises(TransferFailed, match="refused"):  # there is one place
        receive_state(sender.address)


def test_a_giver_that_is_closed_gives_nothing(sender: StateSender) -> None:
    sender.close()
    with pytest.raises(TransferFailed, match=r"127\.0\.0\.1:\d+: Connection refused"):
        receive_state(sender.address)


def between(address: str, change: dict[int, int], stop: int | None = None) -> str:
    """The address of a proxy that changes bytes of what is sent, or breaks it off."""
    host, port, secret = address.split()
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        receiver, _ = listener.accept()
        with listener, receiver, socket.create_connection((host, int(port)), 10) as sender:
            sender.sendall(receiver.recv(32, socket.MSG_WAITALL))
            at = 0
            while data := bytearray(sender.recv(1 << 20)):
                if stop is not None and at + len(data) > stop:
                    return
                for place, value in change.items():
                    if at <= place < at + len(data):
                        data[place - at] ^= value
                at += len(data)
                try:
                    receiver.sendall(data)
                except ConnectionError:  # what came was refused before its end
                    return

    threading.Thread(target=pass_on, daemon=True).start()
    return f"127.0.0.1 {listener.getsockname()[1]} {secret}"


DIGEST = 16
LENGTH = 8 * (1 + len(SIZES)) + sum(SIZES) + DIGEST


@pytest.mark.parametrize("place", [LENGTH - 1, LENGTH - DIGEST - 1, 8 * (1 + len(SIZES)), CHUNK + 5])
def test_one_bit_that_is_not_as_it_was_sent_is_found(sender: StateSender, place: int) -> None:
    with pytest.raises(StateDamaged, match="another digest than it was sent with"):
        receive_state(between(sender.address, {place: 4}))


def test_what_is_passed_on_damaged_is_found_by_all_who_come_after(
    sender: StateSender, forward_to: PeerListener
) -> None:
    with ThreadPoolExecutor(2) as threads:
        damaged = between(sender.address, {CHUNK + 5: 4})
        for taken in [
            threads.submit(receive_state, damaged, forward_to=forward_to),
            threads.submit(receive_state, forward_to.address),
        ]:
            with pytest.raises(StateDamaged, match="another digest than it was sent with"):
                taken.result(10)


def test_what_is_no_state_is_refused_before_memory_is_taken_for_it(sender: StateSender) -> None:
    with pytest.raises(StateDamaged, match=r"a state of \d+ parts was announced, expected at most"):
        receive_state(between(sender.address, {6: 255}))


@pytest.mark.parametrize("stop", [0, 60, CHUNK, LENGTH - 1])
def test_a_state_that_breaks_off_does_not_come(sender: StateSender, stop: int) -> None:
    with pytest.raises(TransferFailed):
        receive_state(between(sender.address, {}, stop))
