# SPDX-License-Identifier: Apache-2.0
"""Requests that are repeated until the API answers, and messages for its refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from edl.errors import ConfigError
from edl.kubernetes.client import ApiError
from edl.kubernetes.rate_limit import Backoff
from edl.kubernetes.timing import Timing

T = TypeVar("T")


async def until_answered(pace: Timing, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Repeat a request until the API answers.

    Raises:
        ConfigError: the API refuses the request.
    """
    backoff = Backoff(pace.first_pause, pace.most_pause)
    while True:
        try:
            return await ask()
        except ApiError as error:
            if not error.out:
                raise ConfigError(refusal(error)) from error
            await asyncio.sleep(max(backoff.next(), error.retry_after))


def refusal(error: ApiError) -> str:
    """Describe why the API refuses, for the user that installed the release."""
    if error.status == 403 and ' User "' not in error.message:  # by admission: a class, an account, a profile
        return f"Kubernetes does not allow it: {error.message}"
    if error.status == 403:
        return (
            f"Kubernetes does not allow it: {error.message} (the Role of the master's account; rbac.create)"
        )
    return f"Kubernetes refuses: {error.message}"
