"""The old place of two states; pickles of version 0.1.0 look for them here."""

from optax_lossscale._headroom import HeadroomRuleState as HeadroomRuleState
from optax_lossscale._smooth import SmoothRuleState as SmoothRuleState
