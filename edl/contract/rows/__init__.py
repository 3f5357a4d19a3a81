# SPDX-License-Identifier: Apache-2.0
"""Placement of rows on servers, and their transfer: buckets, placement, shares, and the wire format."""
