# SPDX-License-Identifier: Apache-2.0
"""Numba as the servers use it: the cache of compiled code, and intrinsics that Numba lacks.

Read-only arrays may be unaligned, for example inside a received message.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from edl import scratch


def _prepare_cache() -> None:
    """Set the cache directory of compiled code: compiling takes half a minute, loading a tenth of a second.

    An image contains the code compiled at build time, in a read-only directory. Numba requires write access,
    so a copy is used.
    """
    given = os.environ.get("NUMBA_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(given) if given else Path(os.environ.get("EDL_CACHE") or base / "edl") / "numba"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError:
        copy = scratch.of_this_process()
        if cache.is_dir():
            shutil.copytree(cache, copy, dirs_exist_ok=True)
        cache = copy
    os.environ["NUMBA_CACHE_DIR"] = str(cache)
    # Compile the same code on every machine: so the code of an image fits, and rows do not depend on the
    # processor. These kernels wait for memory, so the instructions of newer processors make them no faster.
    os.environ["NUMBA_CPU_NAME"] = "generic"


_prepare_cache()

import numba as numba  # noqa: E402
from llvmlite import ir  # noqa: E402
from numba import types as types  # noqa: E402
from numba.core import cgutils  # noqa: E402
from numba.extending import intrinsic  # noqa: E402
from numba.np.arrayobj import make_array  # noqa: E402

IDS = types.Array(types.int64, 1, "C", readonly=True, aligned=False)
VALUES = types.Array(types.float32, 1, "C", readonly=True, aligned=False)


@intrinsic
def prefetch(_, array, at):
    """Prefetch the element at this index of an array, without waiting for it."""

    def made(context, builder, signature, arguments):
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        byte = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(call, [byte, *(ir.Constant(number, n) for n in (0, 3, 1))])  # for reading, to stay, data
        return context.get_dummy_value()

    return types.void(array, types.int64), made


@intrinsic
def copy(_, to, at, of, start, count):
    """Copy `count` elements into an array of the same type; the two ranges must not overlap."""

    def made(context, builder, signature, arguments):
        to, at, of, start, count = arguments
        target = builder.gep(make_array(signature.args[0])(context, builder, to).data, [at])
        source = builder.gep(make_array(signature.args[2])(context, builder, of).data, [start])
        size = context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        cgutils.raw_memcpy(builder, target, source, count, size)
        return context.get_dummy_value()

    return types.void(to, types.int64, of, types.int64, types.int64), made
