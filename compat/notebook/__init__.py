# SPDX-License-Identifier: Apache-2.0
"""`edl.fit`: a job from a notebook or a script, with functions that are defined there."""
