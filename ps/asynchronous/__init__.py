"""Asynchronous updates: workers push in any order, and each step is applied once."""
