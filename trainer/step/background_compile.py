# SPDX-License-Identifier: Apache-2.0
"""XLA compiles a graph in the background, for each size that steps keep having, while they run uncompiled.

XLA compiles a graph anew for each shape of its arguments, for seconds. A ring change gives each rank another
number of records, so all ranks would wait for that. The uncompiled graph computes the same, but for rounding,
for any number of records. So steps use it until XLA has compiled their size.

Two alternatives cost each step, and not only those after a ring change. Padding a part to one of a few sizes
took 1.1 to 1.7 times as long as the exact size, on a CPU. Micro-batches of one fixed size change the
statistics of BatchNormalization, and sum all gradients more often. Neither avoids the first compilation.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from edl.trainer.model.graphs import concrete, flat
from edl.trainer.runtime.error_report import format_error
from edl.trainer.runtime.log import log

SETTLED = 5  # calls: fewer are a trial, the last part of an epoch, or a ring that soon changes again

Sizes = tuple[tuple[int, ...], ...]


class BackgroundCompiled:
    """A graph that XLA compiles in the background; meanwhile TensorFlow runs it uncompiled.

    A compilation ends with a run, whose result is dropped. So it needs the memory of a step once more.

    Args:
        graph: a concrete function without side effects.
        signature: the types of its arguments.
    """

    def __init__(self, graph: Any, signature: Sequence[tf.TensorSpec]):
        self._uncompiled = flat(graph)
        # The graph is called by one that XLA compiles, because to trace the model again would take seconds.
        self._compiled = flat(concrete(lambda *tensors: graph(*tensors), *signature, jit=True))
        self._calls = Counter[Sizes]()
        self._ready: set[Sizes] = set()
        self._failed = False
        self._thread: threading.Thread | None = None

    def __call__(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Call the graph with tensors of its signature; returns a flat list."""
        sizes = tuple(tuple(tensor.shape) for tensor in tensors)
        if sizes in self._ready:
            return self._compiled(*tensors)
        self._calls[sizes] += 1
        if self._calls[sizes] >= SETTLED and not self._failed and not self.is_compiling:
            self._thread = threading.Thread(
                target=self._compile, args=(sizes, tensors), name="XLA", daemon=True
            )
            self._thread.start()
        return self._uncompiled(*tensors)

    @property
    def is_compiling(self) -> bool:
        """Whether a size is being compiled."""
        return self._thread is not None and self._thread.is_alive()

    def _compile(self, sizes: Sizes, tensors: tuple[tf.Tensor, ...]) -> None:
        began = time.monotonic()
        try:
            self._compiled(*tensors)
        except Exception as error:  # the uncompiled graph trains the same model
            self._failed = True
            log.warning(f"the model is trained without XLA, which cannot compile it: {format_error(error)}")
            return
        self._ready.add(sizes)
        log.info(f"XLA has compiled the step for arrays of {sizes[0]} in {time.monotonic() - began:.1f} s")
