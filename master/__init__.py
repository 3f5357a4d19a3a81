# SPDX-License-Identifier: Apache-2.0
"""The master, which makes all decisions: a pure core, and adapters that turn the outside world into events.

It never imports TensorFlow, Horovod or user code.
"""
