"""Keras callbacks in an elastic job, and the history that they see."""
