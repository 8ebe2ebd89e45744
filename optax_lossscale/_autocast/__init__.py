"""Automatic mixed precision: only products run low, and nothing else changes."""

from optax_lossscale._autocast import derivatives as derivatives  # Adds rules to JAX.
