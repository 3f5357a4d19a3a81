# SPDX-License-Identifier: Apache-2.0
"""FarmHash's 64-bit fingerprint of a text, from which ids are made: equal to TensorFlow's, in pure Python.

This is Geoff Pike's `farmhashna::Hash64` in Python; it takes a few microseconds per text. Where TensorFlow is
available, its implementation is faster.
"""

from __future__ import annotations

_WORD = (1 << 64) - 1
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F


def fingerprint(text: bytes) -> int:
    """The fingerprint of `text`, from 0 to 2^64 - 1."""
    size = len(text)
    if size <= 16:
        return _to_16(text, size)
    if size <= 32:
        return _to_32(text, size)
    return _to_64(text, size) if size <= 64 else _longer(text, size)


def _to_16(s: bytes, n: int) -> int:
    mul = _K2 + 2 * n
    if n >= 8:
        a, b = _at(s, 0) + _K2, _at(s, n - 8)
        return _mix(_turn(b, 37) * mul + a, (_turn(a, 25) + b) * mul, mul)
    if n >= 4:
        first, last = int.from_bytes(s[:4], "little"), int.from_bytes(s[-4:], "little")
        return _mix(n + (first << 3), last, mul)
    if n:
        y, z = s[0] + (s[n >> 1] << 8), n + (s[n - 1] << 2)
        return _shift(y * _K2 ^ z * _K0) * _K2 & _WORD
    return _K2


def _to_32(s: bytes, n: int) -> int:
    mul = _K2 + 2 * n
    a, b, c, d = _at(s, 0) * _K1, _at(s, 8), _at(s, n - 8) * mul, _at(s, n - 16) * _K2
    return _mix(_turn(a + b, 43) + _turn(c, 30) + d, a + _turn(b + _K2, 18) + c, mul)


def _to_64(s: bytes, n: int) -> int:
    mul = _K2 + 2 * n
    a, b, c, d = _at(s, 0) * _K2, _at(s, 8), _at(s, n - 8) * mul, _at(s, n - 16) * _K2
    y = _turn(a + b, 43) + _turn(c, 30) + d
    z = _mix(y, a + _turn(b + _K2, 18) + c, mul)
    e, f = _at(s, 16) * mul, _at(s, 24)
    g, h = (y + _at(s, n - 32)) * mul, (z + _at(s, n - 24)) * mul
    return _mix(_turn(e + f, 43) + _turn(g, 30) + h, e + _turn(f + a, 18) + g, mul)


def _longer(s: bytes, n: int) -> int:
    x = 81
    y = (81 * _K1 + 113) & _WORD
    z = _shift(y * _K2 + 113) * _K2 & _WORD
    v, w = (0, 0), (0, 0)
    x = x * _K2 + _at(s, 0)
    for at in range(0, (n - 1) // 64 * 64, 64):
        x, y, z, v, w = _round(s, at, x, y, z, v, w, _K1, 1)
    mul = _K1 + ((z & 0xFF) << 1)
    first = w[0] + ((n - 1) & 63)
    v = (v[0] + first, v[1])
    w = (first + v[0], w[1])
    x, y, z, v, w = _round(s, n - 64, x, y, z, v, w, mul, 9)
    left = _mix(v[0], w[0], mul) + _shift(y) * _K0 + z
    return _mix(left, _mix(v[1], w[1], mul) + x, mul)


_Pair = tuple[int, int]


def _round(
    s: bytes, at: int, x: int, y: int, z: int, v: _Pair, w: _Pair, mul: int, times: int
) -> tuple[int, int, int, _Pair, _Pair]:
    x = _turn(x + y + v[0] + _at(s, at + 8), 37) * mul
    y = _turn(y + v[1] + _at(s, at + 48), 42) * mul
    x = (x ^ w[1] * times) & _WORD
    y = (y + v[0] * times + _at(s, at + 40)) & _WORD
    z = _turn(z + w[0], 33) * mul & _WORD
    v = _weak(s, at, v[1] * mul, x + w[0])
    w = _weak(s, at + 32, z + w[1], y + _at(s, at + 16))
    return z, y, x, v, w


def _weak(s: bytes, at: int, a: int, b: int) -> _Pair:
    a += _at(s, at)
    b = _turn(b + a + _at(s, at + 24), 21)
    c = a
    a += _at(s, at + 8) + _at(s, at + 16)
    b += _turn(a, 44)
    return (a + _at(s, at + 24)) & _WORD, (b + c) & _WORD


def _at(s: bytes, place: int) -> int:
    return int.from_bytes(s[place : place + 8], "little")


def _turn(value: int, bits: int) -> int:
    value &= _WORD
    return (value >> bits | value << (64 - bits)) & _WORD


def _shift(value: int) -> int:
    value &= _WORD
    return value ^ value >> 47


def _mix(u: int, v: int, mul: int) -> int:
    a = _shift((u ^ v) * mul)
    return _shift((v ^ a) * mul) * mul & _WORD
