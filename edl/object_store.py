# SPDX-License-Identifier: Apache-2.0
"""Clients of object stores: S3, Google Cloud Storage, Azure, memory, and the others that fsspec supports.

Promise: `speaking` turns each error of a client into an OSError, so that callers need not know the clients.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_WORDS = 300  # greatest length of a client's error message
S3 = ("s3://", "s3a://")
# By default, s3fs makes five attempts of five by botocore each: a hanging store is reported after minutes.
_S3_RETRIES = 3
_REFUSED_CREDENTIALS = {
    *("ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired"),
    "403",
}
_BOTOCORE_RETRIES = {"config_kwargs": {"retries": {"max_attempts": 1}}}


def client(url: str) -> tuple[Any, str]:
    """The fsspec client for an address, and the path of the address within its store.

    fsspec caches clients, one for each process: they do not survive a fork.

    Raises:
        Exception: any error of the client, such as ImportError if its package is not installed.
    """
    import fsspec  # needed for addresses of object stores only

    # No cache of listings: changes by other processes must be visible.
    found, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **_options(url))
    if url.startswith(S3):
        found.retries = _S3_RETRIES
    return found, path


def forget_client(url: str) -> None:
    """Close no connection, but make `client` return a new client, which reads credentials anew."""
    import fsspec

    fsspec.get_filesystem_class(url.partition("://")[0]).clear_instance_cache()


def credentials_refused(error: OSError) -> bool:
    """Whether S3 refused a call because the credentials are unknown or have expired.

    The answer to HEAD has no body, only the code 403, which may also mean that a right is missing.
    """
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code") in _REFUSED_CREDENTIALS:
            return True
        cause = cause.__cause__
    return False


@contextmanager
def speaking() -> Iterator[None]:
    """Turn exceptions of the store's client into OSError.

    Raises:
        OSError: the client has raised an exception.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # from botocore, aiohttp, asyncio, ...: no complete list exists
        raise OSError(f"{type(error).__name__}: {short(error)}") from error


def short(error: Exception) -> str:
    """The first line of the error's message, cut at `MAX_WORDS` characters."""
    return str(error).partition("\n")[0][:MAX_WORDS]


def _options(url: str) -> dict[str, Any]:
    """Options of the store's client, unless the environment sets them."""
    is_ours = url.startswith(S3) and not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & os.environ.keys()
    return _BOTOCORE_RETRIES if is_ours else {}
