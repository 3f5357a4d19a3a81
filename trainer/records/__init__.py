# SPDX-License-Identifier: Apache-2.0
"""From the reader of a split to the batch of a step.

read        splits      the reader of each split
arrange     records     records in the order of an epoch, as batches (arrays, transform)
prefetch    batches     batches that are read ahead, on a thread
hand over   parallel_records: batches from reader processes (processes, fork_server, reader_process, wire,
            step_part, service, workers)
"""
