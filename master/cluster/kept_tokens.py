# SPDX-License-Identifier: Apache-2.0
"""Keeps the tokens of a release's running workers in the chart's own Secret, for the masters to come.

A chart that is only rendered (`helm template | kubectl apply`, GitOps) makes a new token each time. The
master at work accepts the old one, too, but a later master would refuse all running workers, and what they
have trained would be lost. No tool removes a key of the Secret that it has not written.

Promise: soon after a master acts, and after each change of the token, all tokens that it accepts are in the
key KEY-kept, the newest MAX_KEPT of them.
"""

from __future__ import annotations

import asyncio
import base64
import os

import structlog

from edl.contract.tokens import FILE, KEPT, MAX_KEPT, Tokens
from edl.errors import ConfigError
from edl.kubernetes.client import SOON, Api
from edl.master.backends.kubernetes.release import Place
from edl.master.backends.kubernetes.retry import until_answered

SECRET = "EDL_TOKEN_SECRET"  # in the environment: the Secret that the chart made; none for a user's own
SECONDS = 5.0  # between two looks at the file, which the kubelet updates about once a minute

log = structlog.get_logger()


async def keep_tokens(api: Api, place: Place, tokens: Tokens) -> None:
    """Keep the tokens until cancelled, or until the API refuses it."""
    secret, kept = os.environ.get(SECRET), [""]
    if not secret:
        return
    key = os.path.basename(os.environ[FILE]) + KEPT
    path = place.path("secrets", secret)
    while True:
        if (known := tokens.known()[-MAX_KEPT:]) != kept:
            text = base64.b64encode("\n".join(known).encode()).decode()
            try:
                await until_answered(api.pace, lambda text=text: api.patch(path, {"data": {key: text}}, SOON))  # type: ignore[misc]
            except ConfigError as error:
                log.warning(
                    f"the token is not kept for the next master, which needs it if it changes: {error}"
                )
                return
            kept = known
        await asyncio.sleep(SECONDS)
