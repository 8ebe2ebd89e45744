"""The former module of two states, kept so that pickles of version 0.1.0 load."""

from optax_lossscale._headroom import HeadroomRuleState as HeadroomRuleState
from optax_lossscale._smooth import SmoothRuleState as SmoothRuleState
