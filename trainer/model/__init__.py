# SPDX-License-Identifier: Apache-2.0
"""The user's model and data: found, read, specified, fingerprinted and copied."""
