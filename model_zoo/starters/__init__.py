# SPDX-License-Identifier: Apache-2.0
"""Files that `edl new` copies: complete models of the usual kinds, each with made data."""
