"""The process that decides: a pure core, and adapters that turn the world into its events.

Never imports TensorFlow, Horovod or user code.
"""
