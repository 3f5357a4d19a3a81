# SPDX-License-Identifier: Apache-2.0
"""Threads and tasks of the product without which its process is useless: when one dies, the process ends.

Otherwise the process would live on without heartbeats, or with unanswered calls. Its peers would see that it
is silent, but not why.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

FAILED = 1  # exit code
_end: Callable[[BaseException], None] | None = None  # None: no entry point of the product has begun here


def _print_and_exit(error: BaseException) -> None:
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(FAILED)


def end_with_threads(end: Callable[[BaseException], None] = _print_and_exit) -> None:
    """End this process from now on when a thread or a `task` of the product dies of an exception.

    Threads of user code and of libraries may die as in any Python program. Call this when a process starts.

    Args:
        end: is called on the thread that died, with the exception. It reports the exception and ends the
            process.
    """
    global _end
    _end = end
    threading.excepthook = _thread_died


def task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task that is not awaited. Its exception ends the process."""
    begun = asyncio.get_running_loop().create_task(work, name=name)
    begun.add_done_callback(_task_ended)
    return begun


def _task_ended(ended: asyncio.Task[None]) -> None:
    if not ended.cancelled() and (error := ended.exception()) is not None:
        _died(f"task {ended.get_name()}", error)


def _thread_died(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or not _is_ours(args):
        threading.__excepthook__(args)
        return
    _died(f"thread {args.thread.name if args.thread is not None else '?'}", args.exc_value)


def _is_ours(args: threading.ExceptHookArgs) -> bool:
    """Whether the thread was started with a function of the product."""
    frame = args.exc_traceback
    while frame is not None and frame.tb_frame.f_globals.get("__name__") == "threading":
        frame = frame.tb_next
    module = str(frame.tb_frame.f_globals.get("__name__", "")) if frame is not None else ""
    return module.startswith("edl.") and not module.startswith("edl.zoo.")  # models are user code


def _died(what: str, error: BaseException) -> None:
    if _end is None:
        raise error
    print(f"edl: {what} died, and this process ends with it", file=sys.stderr)
    _end(error)
