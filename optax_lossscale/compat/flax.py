"""Flax's `DynamicScale`, run by this package: change one import.

    from optax_lossscale.compat.flax import DynamicScale
    from optax_lossscale.compat import flax as dynamic_scale_lib  # Or the whole module.

Scripts and checkpoints stay as they are. `DynamicScale` lists what differs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._ground.axes import axes_varying, hint_at_axes, vary_over
from optax_lossscale._ground.checks import SMALLEST_SCALE, python_number
from optax_lossscale._ground.states import LossScaleState
from optax_lossscale._ground.tree import is_floating, map_floating, wide_dtype, widen
from optax_lossscale._ground.types import AxisName, PyTree
from optax_lossscale._scaling.finite import all_finite
from optax_lossscale._scaling.rules import DynamicRuleState, LossScale
from optax_lossscale._scaling.scale import divide_leaves
from optax_lossscale._scaling.scale import scale as scale_loss
from optax_lossscale._scaling.state import find_loss_scale_state
from optax_lossscale._scaling.verdict import repair_scale
from optax_lossscale.presets import flax as flax_rule
from optax_lossscale.presets._settings import state_at

try:
    from flax import struct
except ImportError as error:
    raise ImportError(
        "`optax_lossscale.compat.flax` needs Flax. (Install it by `pip install flax`.)"
    ) from error

__all__ = ["DynamicScale", "DynamicScaleResult"]

_Axes = tuple[Hashable, ...]  # Names of axes.
_LONGEST_INTERVAL = 2**31 - 2  # The count of `presets.flax` goes one further.


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

    On a CPU these selects take several times as long as the optimizer; `loss_scaled`
    does not need them, and `to_state` carries a run over to it. The scale follows
    `presets.flax`. While it is a power of two, all numbers are those of Flax to the
    bit. Checkpoints can be restored from either class into the other. They hold
    `fin_steps` and `scale`, and the settings are those of the target.

    **Departures** where Flax is wrong:

    * In `shard_map` with its default `check_vma=True`, `axis_name` averages gradients
      as it does in `pmap`, in float32. Flax returns their sum. (Name all axes over
      which the batch is split, and do not call `pcast`.) All devices have one `finite`.
    * The loss is what the function returned, in float32 or wider. In Flax it passes
      through the scale, so a float16 loss of 3 overflows in the first step.
    * Gradients in float64 and complex gradients keep their dtype. Flax casts them to
      float32.
    * The scale stays within `[2**-126, 2**126]`. Flax lets it fall to 0, and rise to
      the largest float32. A scale outside, say from an old checkpoint, skips the step,
      and the rule goes on from 65536 as after an overflow.
    * If a restored `fin_steps` exceeds `growth_interval`, the scale still grows.
    * A `growth_factor` or `backoff_factor` of 1 and a `growth_interval` of 0 are
      refused. (To keep the scale, pass `growth_interval=jnp.inf`, and the same number
      as `scale` and `minimum_scale`.)

    Attributes:
      growth_factor: As in `presets.flax`. Like all settings, it is not a leaf.
      backoff_factor: As in `presets.flax`.
      growth_interval: As in `presets.flax`. From `2**31 - 2` on it means never.
      fin_steps: `i32[]`, steps. Finite steps since the scale last changed.
      scale: `f32[]`, dimensionless. The scale for the next loss.
      minimum_scale: Floor of the scale. None, and all below `2**-126`, mean `2**-126`.

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
    # Flax's class lacks, a function that was compiled for one may be run for the other.
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
        rule, given = self.to_rule(), self.to_state()
        state, was_usable = repair_scale(given, rule)

        @functools.wraps(fun)
        def scaled_fun(*args: Any, **kwargs: Any) -> Any:
            value = fun(*args, **kwargs)
            loss, aux = (value[0], value[1]) if has_aux else (value, None)
            loss = _as_wide_float(loss)
            return scale_loss(loss, given), (loss, aux)

        scaled_value_and_grad = jax.value_and_grad(scaled_fun, argnums, has_aux=True)

        @functools.wraps(fun)
        def value_and_grad(*args: Any, **kwargs: Any) -> DynamicScaleResult:
            names, tracked = _axes(axis_name)
            args = _vary_arguments(args, argnums, tracked)
            (scaled, (loss, aux)), grads = scaled_value_and_grad(*args, **kwargs)
            grads = map_floating(divide_leaves, grads, given.loss_scale)
            grads = _mean_over_devices(grads, scaled, names, tracked)
            finite = all_finite(grads, axis_name=axis_name) & was_usable
            dynamic_scale = self._with(rule.adjust(state, finite))
            value = (loss, aux) if has_aux else loss
            return DynamicScaleResult(dynamic_scale, finite, value, grads)

        return value_and_grad

    def to_rule(self) -> LossScale:
        """Returns `presets.flax` with these settings, for `loss_scaled`.

        It raises an error, as that does, for a setting outside its range.
        """
        interval = python_number("growth_interval", self.growth_interval)
        floor = self.minimum_scale
        if floor is not None:
            floor = max(python_number("minimum_scale", floor), SMALLEST_SCALE)
        return flax_rule(
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=min(interval, _LONGEST_INTERVAL),  # type: ignore[arg-type]
            minimum_scale=floor,
        )

    def to_state(self) -> LossScaleState:
        """Returns the state with which `loss_scaled` continues the run.

            tx = loss_scaled(optimizer, dynamic_scale.to_rule())
            opt_state = LossScaledState(dynamic_scale.to_state(), opt_state)

        All later steps have the same scales. If these are powers of two, parameters are
        the same up to a few ulp, because XLA may fuse two programs differently. Counts
        of skipped steps, which Flax does not keep, start at 0. If the fields have an
        entry per device, so has every array of the state.
        """
        return state_at(self.to_rule(), self.scale, self.fin_steps)

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
                f"`presets.flax` does, got {state.rule_state}."
            )
        # Copies, so that both states can be donated.
        count = jnp.array(state.rule_state.growth_count)
        return cls(fin_steps=count, scale=jnp.array(state.loss_scale), **settings)

    def _with(self, state: LossScaleState) -> DynamicScale:
        """This object with another scale and count, in the dtypes that it has.

        A loop under 64-bit numbers carries those that Flax's class would have, and a
        scale that a checkpoint restored in half precision becomes float32, as there.
        """
        count, dtype = state.rule_state.growth_count, jnp.result_type(self.scale)
        if not jnp.issubdtype(dtype, jnp.floating):  # As in `DynamicScale(scale=1024)`.
            dtype = jnp.dtype(jnp.float32)
        return dataclasses.replace(
            self,
            fin_steps=count.astype(jnp.result_type(self.fin_steps)),
            scale=state.loss_scale.astype(wide_dtype(dtype)),
        )


def _as_wide_float(loss: jax.typing.ArrayLike) -> jax.Array:
    """The loss in float32 or wider. A constant 0 may be an integer."""
    array = jnp.asarray(loss)
    return widen(array) if is_floating(array) else array.astype(jnp.float32)


def _axes(axis_name: AxisName | None) -> tuple[_Axes, _Axes]:
    """All named axes, and those for which JAX tracks which arrays vary over them."""
    if axis_name is None:
        return (), ()
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    with hint_at_axes(axis_name):
        tracked = (name for name in names if name in axes_varying(lax.axis_index(name)))
        return names, tuple(tracked)


def _vary_arguments(
    args: tuple[PyTree, ...], argnums: int | Sequence[int], tracked: _Axes
) -> tuple[PyTree, ...]:
    """Makes parameters vary over devices, so that each device has its own gradients.

    JAX would sum the gradients of parameters that do not vary, in the dtype to which
    the function casts them, and before they are divided by the scale.
    """
    if not tracked:
        return args

    def vary(leaf: PyTree) -> PyTree:
        return vary_over(leaf, tracked) if is_floating(leaf) else leaf

    numbers = np.ravel(argnums).tolist()
    return tuple(
        jax.tree.map(vary, arg) if i in numbers or i - len(args) in numbers else arg
        for i, arg in enumerate(args)
    )


def _mean_over_devices(
    grads: PyTree, loss: jax.Array, names: _Axes, tracked: _Axes
) -> PyTree:
    """Averages the gradients of the losses of all devices.

    Where JAX tracks what varies, a loss may be one for all devices, such as a mean. Its
    gradient is the sum of what each device adds to it.
    """
    of_one_loss = tuple(n for n in tracked if n not in axes_varying(loss))
    of_many = tuple(n for n in names if n not in of_one_loss)

    def mean(grad: jax.Array) -> jax.Array:
        added = tuple(n for n in of_one_loss if n in axes_varying(grad))
        grad = lax.psum(grad, added) if added else grad
        return lax.pmean(grad, of_many) if of_many else grad

    return jax.tree.map(mean, grads)
