# SPDX-License-Identifier: Apache-2.0
"""The journal's format, and the proof from it that each record counted once."""
