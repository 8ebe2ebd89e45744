"""Stochastic variational inference in NumPyro, with a loss scale.

    from optax_lossscale.compat.numpyro import optax_to_numpyro

    svi = SVI(model, guide, optax_to_numpyro(loss_scaled(optax.adam(1e-3))), loss)

NumPyro takes the gradients of its loss itself, and does not know the loss scale.
`optax_to_numpyro` has the name, the argument and the result of NumPyro's function, and
takes the scaled gradients that `loss_scaled` expects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lossscale._ground.checks import check_optimizer
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.finite import all_finite
from optax_lossscale._scaling.masking import where_applied
from optax_lossscale._scaling.scale import scale

__all__ = ["optax_to_numpyro"]

_Objective = Callable[[PyTree], tuple[jax.Array, PyTree]]  # Loss, and mutable state.
_Evaluated = tuple[tuple[jax.Array, PyTree], PyTree]


def optax_to_numpyro(transformation: optax.GradientTransformation) -> Any:
    """Makes an optimizer for `numpyro.infer.SVI` from a loss-scaled one.

    Use it in place of NumPyro's function of this name:

        svi = SVI(model, guide, optax_to_numpyro(loss_scaled(optax.adam(1e-3))), loss)

    With loss scale `s`, parameters `p` and the loss of `SVI`, such as `Trace_ELBO`,

        grads = d(widen(loss(p)) * s) / dp
        updates, opt_state = transformation.update(grads, opt_state, p, value=loss(p))

    If a gradient is not finite, `SVI.update` and `SVI.run` keep the parameters and the
    optimizer's state, but not the mutable state, such as batch statistics. Keep that by
    `where_applied(new_state, new_state.mutable_state, old_state.mutable_state)`.
    `SVI.stable_update` also skips a step whose loss is not finite, under every rule,
    and then returns NaN as the loss.

    The functions of this package take the `SVIState`, its `optim_state`, and what
    `SVI.run` returns as the state: `raise_if_stalled(svi_state)`. A model cannot be
    under `autocast`, because its `numpyro.sample` statements are side effects; decorate
    the functions in it that compute products. With `forward_mode_differentiation=True`
    no loss scale keeps gradients of float16 products from underflow. `SteinVI` is not
    supported: it computes gradients without the loss scale.

    Args:
      transformation: An optimizer that `loss_scaled` made, or that contains one, but
        not the link `loss_scaled()`, which cannot hold back the links after it.

    Returns:
      What `numpyro.optim.optax_to_numpyro` returns.

    Raises:
      TypeError: If `transformation` is not an optimizer.
      ValueError: From the first step, if `transformation` is not loss-scaled.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_lossscale as ols
      >>> from optax_lossscale.compat.numpyro import optax_to_numpyro
      >>> optimizer = optax_to_numpyro(ols.loss_scaled(optax.sgd(0.5)))
      >>> state = optimizer.init(jnp.ones(2))
      >>> step = jax.jit(lambda s: optimizer.eval_and_update(loss_fn, s))
      >>> def loss_fn(params):  # SVI makes one of a model and a guide.
      ...     return (params**2).sum(), None
      >>> (loss, _), state = step(state)
      >>> print(loss, optimizer.get_params(state), ols.get_loss_scale(state))
      2.0 [0. 0.] 32768.0

    References:
      numpyro 0.22.0, `numpyro/optim.py` and `numpyro/infer/svi.py`.
    """
    from numpyro import optim

    tx = check_optimizer("transformation", transformation)

    def update_if_finite(
        grads: optax.Updates, state: PyTree, params: PyTree, *, value: jax.Array
    ) -> Any:
        accept = jnp.isfinite(value) & all_finite(grads)
        return tx.update(grads, state, params, value=value, accept=accept)

    optimizer = optim.optax_to_numpyro(tx)
    stable = optim.optax_to_numpyro(
        optax.GradientTransformationExtraArgs(tx.init, update_if_finite)
    )

    def evaluate(fn: _Objective, state: PyTree, is_forward: bool) -> _Evaluated:
        def scaled(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
            loss, aux = fn(params)
            return scale(loss, state), (loss, aux)

        grad = jax.jacfwd if is_forward else jax.grad
        grads, result = grad(scaled, has_aux=True)(optimizer.get_params(state))
        return result, grads

    def eval_and_update(
        fn: _Objective, state: PyTree, forward_mode_differentiation: bool = False
    ) -> _Evaluated:
        (loss, aux), grads = evaluate(fn, state, forward_mode_differentiation)
        return (loss, aux), optimizer.update(grads, state, value=loss)

    def eval_and_stable_update(
        fn: _Objective, state: PyTree, forward_mode_differentiation: bool = False
    ) -> _Evaluated:
        (loss, aux), grads = evaluate(fn, state, forward_mode_differentiation)
        state = stable.update(grads, state, value=loss)
        return (where_applied(state, loss, jnp.full_like(loss, jnp.nan)), aux), state

    optimizer.eval_and_update = eval_and_update
    optimizer.eval_and_stable_update = eval_and_stable_update
    return optimizer
