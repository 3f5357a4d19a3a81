"""One training step: gradients, their all-reduce, and the update of the model."""
