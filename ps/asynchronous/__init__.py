"""Asynchronous SGD (mode=ps): workers push steps in any order, and each server applies each step once."""
