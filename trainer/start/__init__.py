# SPDX-License-Identifier: Apache-2.0
"""How a worker comes to be, up to its loop.

startup          the process before the user's code, and limits of its time
build            a worker from the job's values and the user's module: its data (build_data), learner
                 (build_learner) and servers (build_servers); of a job without training (build_inference)
assembly         the loop and its parts, in their order
warm_up          the first step, in a ring of one
preimport        what forked workers share
"""
