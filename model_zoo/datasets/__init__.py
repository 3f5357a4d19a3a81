# SPDX-License-Identifier: Apache-2.0
"""Data that models of the zoo share: not models, so `edl zoo list` does not show them."""
