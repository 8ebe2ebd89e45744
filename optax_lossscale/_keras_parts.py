"""The former module of two states, kept so that pickles of version 0.1.0 load."""

from optax_lossscale._keras.parts import AverageAfterState as AverageAfterState
from optax_lossscale._keras.parts import DecayFirstState as DecayFirstState
