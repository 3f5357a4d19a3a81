# SPDX-License-Identifier: Apache-2.0
"""The worker's session with its master: the stream, and what is known on both sides of it."""
