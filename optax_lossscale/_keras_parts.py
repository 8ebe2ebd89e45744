"""The old place of two states; pickles of version 0.1.0 look for them here."""

from optax_lossscale._keras.parts import AverageAfterState as AverageAfterState
from optax_lossscale._keras.parts import DecayFirstState as DecayFirstState
