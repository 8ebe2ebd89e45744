"""Keras's `LossScaleOptimizer` for Optax optimizers."""
