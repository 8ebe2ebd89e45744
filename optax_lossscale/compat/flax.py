"""Flax's `DynamicScale`, run by this package: change one import.

    from optax_lossscale.compat.flax import DynamicScale
    from optax_lossscale.compat import flax as dynamic_scale_lib  # Or the whole module.

Scripts and checkpoints stay as they are. `DynamicScale` lists what differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._ground.axes import axes_varying, hint_at_axes, vary_over
from optax_lossscale._ground.checks import SMALLEST_SCALE
from optax_lossscale._ground.states import LossScaleState
from optax_lossscale._ground.tree import is_floating, widen
from optax_lossscale._ground.types import AxisName, PyTree
from optax_lossscale._scaling.finite import all_finite
from optax_lossscale._scaling.rules import DynamicRuleState, LossScale
from optax_lossscale._scaling.scale import scale
from optax_lossscale._scaling.state import find_loss_scale_state
from optax_lossscale.presets import flax as flax_rule

try:
    from flax import struct
except ImportError as error:
    raise ImportError(
        "`optax_lossscale.compat.flax` needs Flax. (Install it by `pip install flax`.)"
    ) from error

__all__ = ["DynamicScale", "DynamicScaleResult"]


class DynamicScaleResult(NamedTuple):
    """What the function of `DynamicScale.value_and_grad` returns.

    Attributes:
      dynamic_scale: The `DynamicScale` for the next step.
      finite: `bool[]`. False if the step must be skipped.
      aux: The true loss, or with `has_aux=True` a pair of it and the auxiliary data.
      grad: The true gradients, in float32 or wider.
    """

    dynamic_scale: DynamicScale
    finite: jax.Array
    aux: PyTree
    grad: PyTree


class DynamicScale(struct.PyTreeNode):
    """Flax's `DynamicScale`: computes true gradients, and the scale for the next step.

    It has the fields, methods and results of Flax's class. As there, the script itself
    keeps the old values if `finite` of the result is False:

        select = functools.partial(jnp.where, finite)
        opt_state = jax.tree.map(select, new.opt_state, old.opt_state)

    `loss_scaled` needs no selects, and `to_state` carries a run over to it. The scale
    follows `presets.flax`. While it is a power of two, all numbers are those of Flax to
    the bit (under `jit`, up to the last bits). Checkpoints can be restored from either
    class into the other. They hold `fin_steps` and `scale`, and the settings are those
    of the target.

    **Departures** where Flax is wrong:

    * In `shard_map` with its default `check_vma=True`, `axis_name` averages gradients
      as it does in `pmap`, in float32. Flax returns their sum. (Name all axes over
      which the batch is split. `pcast` is not needed.)
    * The loss is what the function returned, in float32 or wider. In Flax it passes
      through the scale, and a float16 loss is NaN at a scale of `2**16`.
    * Gradients in float64 and complex gradients keep their dtype. Flax casts them to
      float32.
    * The scale stays within `[2**-126, 2**126]`. Flax lets it fall to 0, and rise to
      the largest float32.
    * If a restored `fin_steps` exceeds `growth_interval`, the scale still grows.
    * Settings are Python numbers in the ranges of `presets.flax`. So a `growth_factor`
      of 1 is refused. (To keep the scale, pass `growth_interval=2**31 - 1`, and the
      same number as `scale` and `minimum_scale`.)

    Guide: https://optax-lossscale.github.io/optax_lossscale/migration/flax_and_jmp.html

    Attributes:
      growth_factor: As in `presets.flax`. Like all settings, it is not a leaf.
      backoff_factor: As in `presets.flax`.
      growth_interval: As in `presets.flax`.
      fin_steps: `i32[]`, steps. Finite steps since the scale last changed.
      scale: `f32[]`, dimensionless. The scale for the next loss.
      minimum_scale: As in `presets.flax`, the floor of the scale.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_lossscale.compat.flax import DynamicScale
      >>> @jax.jit
      ... def step(dynamic_scale, p):
      ...     grad_fn = dynamic_scale.value_and_grad(lambda p: jnp.float16(p) ** 2)
      ...     dynamic_scale, finite, loss, grad = grad_fn(p)
      ...     return dynamic_scale, jnp.where(finite, p - grad / 4, p), loss
      >>> dynamic_scale, p = DynamicScale(scale=2.0**15), jnp.float32(1.0)
      >>> for _ in range(2):
      ...     dynamic_scale, p, loss = step(dynamic_scale, p)
      ...     print(dynamic_scale.scale, p, loss)
      16384.0 1.0 1.0
      16384.0 0.5 1.0

    References:
      flax 0.12.8, `flax/training/dynamic_scale.py`.
    """

    growth_factor: float = struct.field(pytree_node=False, default=2.0)
    backoff_factor: float = struct.field(pytree_node=False, default=0.5)
    growth_interval: int = struct.field(pytree_node=False, default=2000)
    fin_steps: int | jax.Array = 0
    scale: float | jax.Array = 65536.0
    minimum_scale: float | None = struct.field(
        pytree_node=False, default=SMALLEST_SCALE
    )
    # JAX 0.10 compares two dataclasses by their settings alone. Without a setting that
    # Flax's class lacks, a function compiled for one class may be run for the other.
    _package: str = struct.field(
        pytree_node=False, default="optax_lossscale", repr=False, kw_only=True
    )

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: AxisName | None = None,
    ) -> Callable[..., DynamicScaleResult]:
        """Like `jax.value_and_grad`, with a scaled loss and true gradients.

        With scale `s` and loss `fun(x)`,

            grad = mean over devices of (d(widen(fun(x)) * s) / dx) / s
            finite = all_finite(grad)

        The mean is taken only if `axis_name` is given. `widen` casts dtypes narrower
        than float32 to float32.

        Args:
          fun: As in `jax.value_and_grad`.
          argnums: As in `jax.value_and_grad`.
          has_aux: As in `jax.value_and_grad`.
          axis_name: The axis of `pmap`, `vmap` or `shard_map`, or a tuple of axes, over
            which gradients are averaged. Leave it out under `jit` with sharded arrays.

        Returns:
          A function with the arguments of `fun` that returns a `DynamicScaleResult`.

        Raises:
          ValueError: If a setting is outside its range.
          TypeError: If a setting is of the wrong kind.
          NameError: If there is no axis of that name.
        """
        rule, state = self.to_rule(), self.to_state()

        @functools.wraps(fun)
        def scaled_fun(*args: Any, **kwargs: Any) -> tuple[jax.Array, PyTree]:
            value = fun(*args, **kwargs)
            loss, aux = (value[0], value[1]) if has_aux else (value, None)
            loss = widen(jnp.asarray(loss))
            return scale(loss, state), (loss, aux)

        scaled_value_and_grad = jax.value_and_grad(scaled_fun, argnums, has_aux=True)

        @functools.wraps(fun)
        def value_and_grad(*args: Any, **kwargs: Any) -> DynamicScaleResult:
            if axis_name is not None:
                with hint_at_axes(axis_name):
                    args = _differ_on_devices(args, argnums, axis_name)
            (scaled_loss, (loss, aux)), grads = scaled_value_and_grad(*args, **kwargs)
            # Not by the reciprocal, so that all bits are those of Flax.
            grads = jax.tree.map(lambda grad: widen(grad) / state.loss_scale, grads)
            if axis_name is not None:
                grads = _mean_over_devices(grads, scaled_loss, axis_name)
            finite = all_finite(grads)
            new = rule.adjust(state, finite)
            dynamic_scale = self.replace(
                fin_steps=new.rule_state.growth_count, scale=new.loss_scale
            )
            value = (loss, aux) if has_aux else loss
            return DynamicScaleResult(dynamic_scale, finite, value, grads)

        return value_and_grad

    def to_rule(self) -> LossScale:
        """Returns `presets.flax` with these settings, for `loss_scaled`."""
        return flax_rule(
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            minimum_scale=self.minimum_scale,
        )

    def to_state(self) -> LossScaleState:
        """Returns the state with which `loss_scaled` continues the run.

            tx = loss_scaled(optimizer, dynamic_scale.to_rule())
            opt_state = LossScaledState(dynamic_scale.to_state(), opt_state)

        All later steps have the same scales. If these are powers of two, parameters are
        the same up to a few ulp, because XLA may fuse two programs differently. Counts
        of skipped steps, which Flax does not keep, start at 0.
        """
        # Here and below `array` copies, so that both states can be donated.
        first = self.to_rule().init()
        count = jnp.array(self.fin_steps, jnp.int32)
        return first._replace(
            loss_scale=jnp.array(self.scale, jnp.float32),
            rule_state=first.rule_state._replace(growth_count=count),
        )

    @classmethod
    def from_state(cls, tree: PyTree, **settings: Any) -> DynamicScale:
        """Returns the `DynamicScale` that continues a run of `loss_scaled`.

        Args:
          tree: Any pytree that holds exactly one `LossScaleState`, of `presets.flax` or
            another rule that counts finite steps as `dynamic_loss_scale` does.
          **settings: `growth_factor`, `backoff_factor`, `growth_interval` and
            `minimum_scale`, which a state does not hold.

        Returns:
          A `DynamicScale` with the scale and the count of finite steps of the state.

        Raises:
          ValueError: If `tree` holds no `LossScaleState`, or several, or one of a rule
            that has no such count.
        """
        state = find_loss_scale_state(tree)
        if not isinstance(state.rule_state, DynamicRuleState):
            raise ValueError(
                "`tree` must hold the state of a rule that counts finite steps as "
                f"`presets.flax` does, got one with {state.rule_state}."
            )
        count = jnp.array(state.rule_state.growth_count)
        return cls(fin_steps=count, scale=jnp.array(state.loss_scale), **settings)


def _names(axis_name: AxisName) -> tuple[Hashable, ...]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def _differ_on_devices(
    args: tuple[PyTree, ...], argnums: int | Sequence[int], axis_name: AxisName
) -> tuple[PyTree, ...]:
    """Makes parameters vary over devices, so that each device has its own gradients.

    In `shard_map` JAX would sum the gradients of parameters that do not vary, in the
    dtype to which the function casts them, and before they are divided by the scale.
    """
    names = _names(axis_name)
    differentiated = {number % len(args) for number in np.ravel(argnums).tolist()}

    def vary(leaf: PyTree) -> PyTree:
        return vary_over(leaf, names) if is_floating(leaf) else leaf

    return tuple(
        jax.tree.map(vary, arg) if number in differentiated else arg
        for number, arg in enumerate(args)
    )


def _mean_over_devices(grads: PyTree, loss: jax.Array, axis_name: AxisName) -> PyTree:
    """Averages the gradients of the losses of all devices.

    Where JAX tracks what varies, a loss may be one for all devices, such as a mean. Its
    gradient is the sum of what each device adds to it.
    """

    def mean(grad: jax.Array) -> jax.Array:
        of_one_loss = axes_varying(grad) - axes_varying(loss)
        summed = tuple(name for name in _names(axis_name) if name in of_one_loss)
        averaged = tuple(name for name in _names(axis_name) if name not in of_one_loss)
        grad = lax.psum(grad, summed) if summed else grad
        return lax.pmean(grad, averaged) if averaged else grad

    return jax.tree.map(mean, grads)
