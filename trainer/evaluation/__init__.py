"""Evaluation and prediction, by the ring and by one worker."""
