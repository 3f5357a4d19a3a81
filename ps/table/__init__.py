"""Rows of embedding tables in memory, and the compiled kernels that update them."""
