"""What loss scaling would need in `optax.contrib`: one wrapper and one function.

Nothing here imports `optax_lossscale`, so that it can be copied, under Apache 2.0. It
has the classic rule alone, and masks the state at the end of the step, which XLA fuses
on a GPU; on a CPU this takes about five times as long as the masks of
`ols.loss_scaled` (benchmarks/results/optimizations.md). A test compares the two:
`tests/integration/test_sketch_for_optax.py`.

`optax.apply_if_finite` cannot do it. It never unscales, has no scale to adjust, and
applies a bad step after some in a row.

Why it is as it is:

* The scale is float32, and so is its product with the loss: `2**16` is infinite in
  float16. Gradients are cast to float32 before the division, or small ones would
  underflow again.
* There is one verdict for all gradients, because half of the updates is a step in
  another direction. Only the verdict crosses devices: with `check_vma=True`,
  `shard_map` has already summed the gradients of replicated parameters.
* The mask is `jnp.where`, not `lax.cond`, whose result `shard_map` takes for replicated
  although devices took different branches (https://github.com/jax-ml/jax/issues/40823).
* The inner state is masked too, or one NaN would stay in Adam's moments for ever.
* Without a floor and a cap the scale reaches 0 or infinity, and training ends silently.
* Accumulation goes inside, `loss_scaled(optax.MultiSteps(...))`, or the scale would not
  fall for a NaN, which stays in the accumulator unless `skip_not_finite` is passed.
* All scalars of the state are strongly typed, and moments are float32 from the start,
  or the step would be compiled twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class LossScaledState(NamedTuple):
    """Strongly typed scalars, and the state of the inner optimizer."""

    loss_scale: jax.Array  # f32[]
    growth_count: jax.Array  # i32[], finite steps since the scale changed.
    last_finite: jax.Array  # bool[]
    total_notfinite: jax.Array  # i32[], skipped steps.
    inner_state: optax.OptState


def wide(x: jax.Array) -> jax.Array:
    """Casts floating arrays to float32, unless they are as wide already."""
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if is_float else x


def loss_scaled(
    inner: optax.GradientTransformation,
    init_scale: float = 2.0**15,
    growth_interval: int = 2000,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Unscales the gradients, and skips the step if one of them is not finite."""
    if not 2.0**-24 <= init_scale <= 2.0**24:
        raise ValueError("`init_scale` must be from 2**-24 to 2**24")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LossScaledState:
        scale = jnp.asarray(init_scale, jnp.float32)
        # Two arrays, because the state may be donated.
        count, skipped = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)
        inner_state = inner.init(jax.tree.map(wide, params))
        return LossScaledState(scale, count, jnp.array(True), skipped, inner_state)

    def update(
        updates: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        scale, skipped = state.loss_scale, state.total_notfinite
        grads = jax.tree.map(lambda g: wide(g) / scale, updates)
        leaves = jax.tree.leaves(grads)
        finite = jnp.array([jnp.isfinite(leaf).all() for leaf in leaves]).all()
        if axis_name is not None:  # Right whether the devices' verdicts differ or not.
            finite = jax.lax.pmin(finite, axis_name)
        grads = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), grads)
        new_updates, inner_state = inner.update(
            grads, state.inner_state, jax.tree.map(wide, params), **extra_args
        )
        # Adding -0.0 changes no bit of a parameter (XLA on CPU flushes subnormals).
        new_updates = jax.tree.map(lambda u: jnp.where(finite, u, -0.0), new_updates)
        inner_state = optax.tree.where(finite, inner_state, state.inner_state)
        count = jnp.where(finite, state.growth_count + 1, 0)
        grows = count >= growth_interval
        larger = jnp.where(grows, jnp.minimum(2 * scale, 2.0**24), scale)
        smaller = jnp.maximum(scale / 2, 2.0**-24)
        return new_updates, LossScaledState(
            jnp.where(finite, larger, smaller),
            jnp.where(grows, 0, count),
            finite,
            jnp.where(finite, skipped, optax.safe_increment(skipped)),
            inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def scaled_value_and_grad(
    fun: Callable[..., Any], state: Any, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """As `jax.value_and_grad`: the true loss, and scaled gradients."""
    scale = optax.tree.get(state, "loss_scale")

    def scaled(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        value = fun(*args, **kwargs)
        loss = value[0] if has_aux else value
        return wide(jnp.asarray(loss)) * scale, value

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        grad_fn = jax.value_and_grad(scaled, has_aux=True)
        (_, value), grads = grad_fn(*args, **kwargs)
        return value, grads

    return run
