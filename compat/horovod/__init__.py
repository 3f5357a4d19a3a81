# SPDX-License-Identifier: Apache-2.0
"""Horovod's Python interface for scripts that were written for Horovod, on Keras 3 and in edl's rings.

modules     installs everything below in place of Horovod's own modules, before the script runs
keras3      names of Keras 2 that such scripts use
optimizer   hvd.DistributedOptimizer, which averages gradients in `apply`
callbacks   hvd.callbacks
objects     hvd.broadcast_object and hvd.allgather_object
elastic     hvd.elastic: states, `run` and its callbacks
member      this process as a worker of the job: its rings, in place of horovodrun's driver
start       runs the script in a worker

Horovod's compiled wheel has the collectives and `hvd.DistributedGradientTape`; both are used as they are.
"""
