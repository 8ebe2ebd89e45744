"""The states of both wrappers, which find each other by type.

A name is not enough, because a parameter may be called `loss_scale` too.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from optax_lossscale._ground.types import PyTree, public


@public
class LossScaleState(NamedTuple):
    """The arrays that a loss scale carries from one step to the next.

    Read it with `find_loss_scale_state(opt_state)`. Under `loss_scaled` a rule sets
    only `loss_scale` and `rule_state`. The step itself writes the other fields, so they
    are true under every rule. They count every skipped step, whatever the reason:
    nonfinite gradients, `grads_finite=False`, `accept=False` or nonfinite updates.
    These invariants hold:

    * `2**-126 <= loss_scale <= 2**126`, so the scale and its reciprocal are positive,
      finite and normal numbers (a rule of your own must see to that itself);
    * `last_finite` is True exactly when `notfinite_count == 0`;
    * `notfinite_count <= total_notfinite <= step_count`;
    * every field is strongly typed, keeps its dtype, and has a buffer of its own, so
      that states can be donated (and the verdict that `adjust` was given with them).

    Attributes:
      loss_scale: `f32[]`, dimensionless. The factor for the next loss.
      last_finite: `bool[]`. True if the last step was applied, False if it was skipped,
        for whatever reason. `where_applied` reads it.
      notfinite_count: `i32[]`, steps. How many steps in a row were skipped up to now.
      total_notfinite: `i32[]`, steps. How many steps were skipped in all.
      step_count: `i32[]`, steps. How many steps were taken or skipped.
      rule_state: The rule's own state: a NamedTuple of arrays, or `()`.

    The counters saturate at `2**31 - 1`.

    Example:
      >>> import optax_lossscale as ols
      >>> state = ols.dynamic_loss_scale(2.0**10).init()
      >>> print(state.loss_scale, state.last_finite, state.step_count)
      1024.0 True 0

    References:
      Field names follow `optax.ApplyIfFiniteState` where it has them.
    """

    loss_scale: jax.Array
    last_finite: jax.Array
    notfinite_count: jax.Array
    total_notfinite: jax.Array
    step_count: jax.Array
    rule_state: PyTree


@public
class LossScaledState(NamedTuple):
    """State of an optimizer wrapped by `loss_scaled`.

    Attributes:
      loss_scale_state: The `LossScaleState`.
      inner_state: State of the inner optimizer, as its own `init` returns it.

    Example:
      >>> import jax.numpy as jnp, optax, optax_lossscale as ols
      >>> tx = ols.loss_scaled(optax.sgd(0.1, momentum=0.9))
      >>> opt_state = tx.init(jnp.ones(2))
      >>> opt_state.inner_state[0].trace
      Array([0., 0.], dtype=float32)
    """

    loss_scale_state: LossScaleState
    inner_state: PyTree


@public
class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
      master_params: The parameters in float32 or wider.
      inner_state: State of the inner optimizer.
    """

    master_params: PyTree
    inner_state: PyTree


@public
class NoLossScaleRuleState(NamedTuple):
    """The `rule_state` of `no_loss_scale()`, whose gradients are never unscaled."""
