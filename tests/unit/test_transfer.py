"""A member's state on its way to another: it comes as it was sent, or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from trainer.ring.transfer import PIECE, Giver, StateDamaged, TransferFailed, take

SIZES = (0, 1, 8, PIECE - 1, PIECE, 2 * PIECE + 3)


@pytest.fixture
def parts() -> list[np.ndarray]:
    some = np.random.default_rng(3)
    return [some.integers(0, 256, size, np.uint8) for size in SIZES]


@pytest.fixture
def giver(parts: list[np.ndarray]) -> Iterator[Giver]:
    giver = Giver("127.0.0.1", parts, 2)
    yield giver
    giver.close()


def same(found: list[np.ndarray], parts: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, parts, strict=True))


def test_a_state_comes_as_it_was_given_to_each_who_takes_it(giver: Giver, parts: list[np.ndarray]) -> None:
    found: list[list[np.ndarray]] = []
    takers = [threading.Thread(target=lambda: found.append(take(giver.address))) for _ in range(2)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(10)
    assert len(found) == 2 and all(same(each, parts) for each in found)


def test_who_does_not_know_the_secret_gets_nothing_and_takes_nobodys_place(
    giver: Giver, parts: list[np.ndarray]
) -> None:
    host, port, secret = giver.address.split()
    for wrong in ("00" * 32, secret[:-2] + "00" if secret[-2:] != "00" else secret[:-2] + "01", "00"):
        with socket.create_connection((host, int(port)), 10) as stranger:
            stranger.sendall(bytes.fromhex(wrong))
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    assert same(take(giver.address), parts)
    assert same(take(giver.address), parts)


def test_a_giver_that_is_closed_gives_nothing(giver: Giver) -> None:
    giver.close()
    with pytest.raises(TransferFailed, match=r"127\.0\.0\.1:\d+: Connection refused"):
        take(giver.address)


def between(address: str, change: dict[int, int], stop: int | None = None) -> str:
    """The address of somebody between the two, who changes bytes of what is sent, or breaks it off."""
    host, port, secret = address.split()
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        taker, _ = listener.accept()
        with listener, taker, socket.create_connection((host, int(port)), 10) as giver:
            giver.sendall(taker.recv(32, socket.MSG_WAITALL))
            at = 0
            while data := bytearray(giver.recv(1 << 20)):
                if stop is not None and at + len(data) > stop:
                    return
                for place, value in change.items():
                    if at <= place < at + len(data):
                        data[place - at] ^= value
                at += len(data)
                try:
                    taker.sendall(data)
                except ConnectionError:  # what came was refused before its end
                    return

    threading.Thread(target=pass_on, daemon=True).start()
    return f"127.0.0.1 {listener.getsockname()[1]} {secret}"


LENGTH = 8 * (1 + len(SIZES)) + sum(SIZES) + 32


@pytest.mark.parametrize("place", [LENGTH - 1, LENGTH - 33, 8 * (1 + len(SIZES)), PIECE + 5])
def test_one_bit_that_is_not_as_it_was_sent_is_found(giver: Giver, place: int) -> None:
    with pytest.raises(StateDamaged, match="another digest than it was sent with"):
        take(between(giver.address, {place: 4}))


def test_what_is_no_state_is_refused_before_memory_is_taken_for_it(giver: Giver) -> None:
    with pytest.raises(StateDamaged, match=r"a state of \d+ parts was announced, expected at most"):
        take(between(giver.address, {6: 255}))


@pytest.mark.parametrize("stop", [0, 60, PIECE, LENGTH - 1])
def test_a_state_that_breaks_off_does_not_come(giver: Giver, stop: int) -> None:
    with pytest.raises(TransferFailed):
        take(between(giver.address, {}, stop))
