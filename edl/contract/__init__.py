# SPDX-License-Identifier: Apache-2.0
"""The contract between the processes of a job: the protocol, and the shared words, numbers and arithmetic.

Only `artifacts` and `tokens` read files, and no module here opens a connection.
"""
