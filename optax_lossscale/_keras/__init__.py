"""Keras's `LossScaleOptimizer` over any Optax optimizer."""
