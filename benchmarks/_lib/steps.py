"""Whole training steps of the models in `large_models.py`, in each way to train them.

Nothing here makes an array, so the steps can be compiled for an absent device.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import optax_lossscale as ols
from _lib.large_models import MODELS
from optax_lossscale._autocast import between, programs
from optax_lossscale._autocast.products import Factor
from optax_lossscale.compat import flax as compat

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adamw, clipped": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
    ),
    "adamw, accumulated": lambda: optax.MultiSteps(optax.adamw(1e-3), 4),
    "sgd with momentum": lambda: optax.sgd(1e-3, momentum=0.9),
}


class Way(NamedTuple):
    """A way to compute.

    Attributes:
      dtype: The dtype of Flax's layers, as one sets it by hand.
      level: The level of autocast, if it is used.
      low_dtype: The dtype to which autocast casts.
      precision: The precision of float32 products, or `None` for JAX's default, which
        is TF32 on a GPU that has it.
      has_masters: Whether the parameters are float16, with float32 masters.
      grad_bytes: Bytes of an entry of a weight's gradient, where it is produced.
      is_wide: Whether all gradients under autocast are float32, also between products.
    """

    dtype: Any = None
    level: str | None = None
    low_dtype: Any = jnp.float16
    precision: str | None = None
    has_masters: bool = False
    grad_bytes: int = 4
    is_wide: bool = False


WAYS = {
    "float32": Way(),
    "by hand": Way(dtype=jnp.float16, grad_bytes=2),
    "by hand, bfloat16": Way(dtype=jnp.bfloat16, grad_bytes=2),
    "autocast, O1": Way(level="O1"),
    "autocast, O1, float32 gradients": Way(level="O1", is_wide=True),
    "autocast, O2": Way(level="O2"),
    "masters": Way(dtype=jnp.float16, has_masters=True, grad_bytes=2),
    "float32, highest": Way(precision="highest"),
    "TF32": Way(precision="tensorfloat32"),
    "autocast, bfloat16": Way(level="O1", low_dtype=jnp.bfloat16),
    "O2, masters": Way(level="O2", has_masters=True, grad_bytes=2),
}
UNSCALED_WAYS = [
    "float32",
    "float32, highest",
    "TF32",
    "by hand, bfloat16",
    "autocast, bfloat16",
]
SCALERS = {
    "none": None,
    "loss_scaled": ols.dynamic_loss_scale,
    "loss_scaled, headroom": ols.headroom_loss_scale,
    "flax DynamicScale": DynamicScale,
    "compat.flax DynamicScale": compat.DynamicScale,
}
# Some scalers are measured in one way only.
WAY_OF_SCALER = {
    "flax DynamicScale": "by hand",
    "compat.flax DynamicScale": "by hand",
    "loss_scaled, headroom": "autocast, O1",
}


def fitting(scalers: list[str], way: str) -> list[str]:
    """Returns those scalers with which a step is measured in this way."""
    if way in UNSCALED_WAYS:
        return ["none"]
    return [scaler for scaler in scalers if WAY_OF_SCALER.get(scaler, way) == way]


class Step(NamedTuple):
    """A training step that is still to be compiled.

    Attributes:
      run: `run(params, state, *batch)` returns new parameters, new state and the loss.
      args: The shapes of its arguments.
      grad_bytes: Bytes of all gradients, in the dtype in which they are produced.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    grad_bytes: int


def make_step(
    model: str, way: str, optimizer: str, scaler: str, small: bool = False
) -> Step:
    """Makes the training step of a model; `small` ones are for tests."""
    chosen = WAYS[way]
    loss_fn, params, batch = MODELS[model](chosen.dtype, small)
    if chosen.level is not None:
        loss_fn = ols.autocast(loss_fn, chosen.low_dtype, level=chosen.level)
    inner = OPTIMIZERS[optimizer]()
    if chosen.has_masters:
        params = jax.eval_shape(ols.cast_params, params)
        inner = ols.master_weights(inner)
    make = run_flax if "DynamicScale" in scaler else run_ours
    init, run = make(loss_fn, inner, SCALERS[scaler])
    entries = sum(leaf.size for leaf in jax.tree.leaves(params))
    args = (params, jax.eval_shape(init, params), *batch)
    run = with_precision(run, chosen.precision)
    if chosen.is_wide:
        run = with_wide_gradients(run)
    return Step(run, args, entries * chosen.grad_bytes)


def batch_size(step: Step) -> int:
    """Returns the number of examples in the batch; labels or tokens come last."""
    size: int = step.args[-1].shape[0]
    return size


def with_batch(step: Step, size: int) -> Step:
    """Returns the step with another batch size."""
    params, state, *batch = step.args
    resized = [
        # Batch statistics, a dict, are no arrays of examples.
        part
        if isinstance(part, dict)
        else jax.ShapeDtypeStruct((size, *part.shape[1:]), part.dtype)
        for part in batch
    ]
    return step._replace(args=(params, state, *resized))


def with_precision(run: Callable[..., Any], precision: str | None) -> Any:
    """Returns a function that computes float32 products in a precision."""

    def run_with_precision(*args):
        # JAX reads this setting while it traces.
        with jax.default_matmul_precision(precision):
            return run(*args)

    return run_with_precision


def with_wide_gradients(run: Callable[..., Any]) -> Any:
    """Returns a function whose gradients between products are float32 as all others."""

    def nothing_known(rule, equation, inputs):
        return [Factor() for _ in equation.outvars]

    def run_with_wide_gradients(*args):
        # Autocast rewrites the program while JAX traces it, and keeps it.
        with (
            mock.patch.object(between.FactorRule, "of_operation", nothing_known),
            mock.patch.object(programs, "_CHANGED", weakref.WeakKeyDictionary()),
        ):
            return run(*args)

    return run_with_wide_gradients


def run_ours(loss_fn: Callable[..., Any], inner: Any, rule: Any) -> tuple[Any, Any]:
    """Trains with `loss_scaled`, or with the optimizer alone if there is no rule."""
    tx = inner if rule is None else ols.loss_scaled(inner, rule())

    def run(params, state, *batch):
        if rule is None:
            loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        else:
            loss, grads = ols.scaled_value_and_grad(loss_fn, state)(params, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return tx.init, run


def run_flax(loss_fn: Callable[..., Any], inner: Any, make: Any) -> tuple[Any, Any]:
    """Trains with Flax's `DynamicScale`, and selects as its documentation says."""

    def init(params):
        return make(), inner.init(params)

    def run(params, state, *batch):
        scale, old = state
        grad_fn = scale.value_and_grad(loss_fn)
        scale, finite, loss, grads = grad_fn(params, *batch)
        updates, new = inner.update(grads, old, params)
        updated = optax.apply_updates(params, updates)
        params, new = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (updated, new), (params, old)
        )
        return params, (scale, new), loss

    return init, run
