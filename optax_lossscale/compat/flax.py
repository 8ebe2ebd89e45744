"""Flax's `DynamicScale`, run by this package: change one import.

    from optax_lossscale.compat.flax import DynamicScale

Scripts and checkpoints stay as they are. `DynamicScale` lists what differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._finite import all_finite
from optax_lossscale._grad import scaled_value_and_grad
from optax_lossscale._rules import DynamicRuleState, LossScale
from optax_lossscale._state import LossScaleState, as_array, find_loss_scale_state
from optax_lossscale._tree import map_floating, widen
from optax_lossscale._types import AxisName, PyTree
from optax_lossscale._verdict import repair_scale
from optax_lossscale.presets._jax import flax as flax_rule

try:
    from flax import struct
except ImportError as error:
    raise ImportError(
        "`optax_lossscale.compat.flax` needs Flax. (Install it by `pip install flax`.)"
    ) from error


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
    aux: Any
    grad: Any


class DynamicScale(struct.PyTreeNode):
    """A loss scale that computes true gradients and the scale for the next step.

    It has the fields, the methods and the results of Flax's class. As there, a step is
    skipped by the script itself, with the `finite` of the result:

        select = functools.partial(jnp.where, finite)
        opt_state = jax.tree.map(select, new.opt_state, old.opt_state)

    The scale follows `presets.flax`, where the formula is. Checkpoints of Flax's class
    are restored into this one, and the other way round.

    **Departures**, each where Flax is wrong:

    * `value_and_grad(..., axis_name=...)` averages gradients in `shard_map` with its
      default `check_vma=True` too. There they arrive summed over devices, and Flax
      returns this sum. `finite` is the same on all devices, even if the gradients
      differ.
    * The loss is what the function returned, in float32 or wider. Flax multiplies it by
      the scale and divides again, so it can overflow: a loss of 3 in float16 does in
      the first step.
    * Gradients in float64 stay in float64.
    * The scale stays within `[2**-126, 2**126]`, where gradients can be divided by it.
      Flax lets it fall to 0 without `minimum_scale`, and rise to the largest float32. A
      scale outside, such as infinity in an old checkpoint, skips one step and
      becomes 32768.
    * If a restored `fin_steps` exceeds `growth_interval`, the scale still grows.
    * A setting outside the range that `presets.flax` gives raises an error. For a fixed
      scale use `static_loss_scale`.

    **Cost.** Gradients are checked in groups, as by `loss_scaled`, but the selects are
    still the script's own. On a CPU they take several times as long as the optimizer,
    because XLA copies parameters and state for them. `loss_scaled` needs none of these
    copies, and `to_state` carries a run over to it.

    Attributes:
      growth_factor: Above 1. Static, as are the next two and `minimum_scale`.
      backoff_factor: Strictly between 0 and 1.
      growth_interval: Finite steps in a row before the step that grows, at least 1.
      fin_steps: `i32[]`, steps. Finite steps since the scale last changed.
      scale: `f32[]`, dimensionless. The scale for the next loss.
      minimum_scale: Floor of the scale, at least `2**-126`. None means `2**-126`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_lossscale.compat.flax import DynamicScale
      >>> def loss_fn(p):
      ...     return p.astype(jnp.float16) ** 2
      >>> @jax.jit
      ... def step(dynamic_scale, p):
      ...     value_and_grad = dynamic_scale.value_and_grad(loss_fn)
      ...     dynamic_scale, finite, loss, grad = value_and_grad(p)
      ...     return dynamic_scale, jnp.where(finite, p - grad / 4, p), loss
      >>> dynamic_scale, p = DynamicScale(scale=2.0**15), jnp.float32(1.0)
      >>> for _ in range(3):
      ...     dynamic_scale, p, loss = step(dynamic_scale, p)
      ...     print(dynamic_scale.scale, p, loss)
      16384.0 1.0 1.0
      16384.0 0.5 1.0
      16384.0 0.25 0.25

    References:
      flax 0.12.8, `flax/training/dynamic_scale.py`.
    """

    growth_factor: float = struct.field(pytree_node=False, default=2.0)
    backoff_factor: float = struct.field(pytree_node=False, default=0.5)
    growth_interval: int = struct.field(pytree_node=False, default=2000)
    fin_steps: int | jax.Array = 0
    scale: float | jax.Array = 65536.0
    minimum_scale: float | None = struct.field(
        pytree_node=False, default=np.finfo(np.float32).tiny
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
          fun: A function that returns a scalar floating loss, or with `has_aux=True` a
            pair of the loss and auxiliary data.
          argnums: As in `jax.value_and_grad`.
          has_aux: As in `jax.value_and_grad`.
          axis_name: The axis of `pmap`, `vmap` or `shard_map`, or a tuple of axes, over
            which gradients are averaged. Leave it out under `jit` with sharded arrays.

        Returns:
          A function with the arguments of `fun` that returns a `DynamicScaleResult`.

        Raises:
          ValueError: If a setting is outside its range.
          TypeError: If `fun` is not a function, or raised by JAX, for example for a
            loss that is not a scalar.

        Example:
          >>> import jax.numpy as jnp
          >>> from optax_lossscale.compat.flax import DynamicScale
          >>> value_and_grad = DynamicScale().value_and_grad(lambda x: x**2)
          >>> dynamic_scale, finite, loss, grad = value_and_grad(jnp.float32(3.0))
          >>> print(finite, loss, grad, dynamic_scale.fin_steps)
          True 9.0 6.0 1
        """
        rule = self._rule()
        state, was_usable = repair_scale(self.to_state(), rule)
        scaled = scaled_value_and_grad(fun, state, argnums, has_aux)

        @functools.wraps(fun)
        def value_and_grad(*args: Any, **kwargs: Any) -> DynamicScaleResult:
            value, grads = scaled(*args, **kwargs)
            loss = value[0] if has_aux else value
            grads = map_floating(_divide, grads, state.loss_scale)
            if axis_name is not None:
                grads = _mean_over_devices(grads, loss, axis_name)
            finite = all_finite(grads, axis_name=axis_name) & was_usable
            adjusted = rule.adjust(state, finite)
            dynamic_scale = self.replace(
                fin_steps=adjusted.rule_state.growth_count, scale=adjusted.loss_scale
            )
            aux = (widen(loss), value[1]) if has_aux else widen(loss)
            return DynamicScaleResult(dynamic_scale, finite, aux, grads)

        return value_and_grad

    def to_state(self) -> LossScaleState:
        """Returns the state with which `loss_scaled` continues the run.

        With the rule of the same settings, the scale of every later step is the same,
        and so are gradients and updates, bit for bit, if the scales are powers of two:

            rule = presets.flax(growth_interval=...)  # The settings of this object.
            tx = loss_scaled(optimizer, rule)
            opt_state = LossScaledState(dynamic_scale.to_state(), opt_state)

        Returns:
          A `LossScaleState` of `presets.flax`. Its counts of skipped steps, which Flax
          does not keep, start at 0. If the fields have an entry per device, so has
          every array of the state.

        Raises:
          ValueError: If a setting is outside its range.

        Example:
          >>> from optax_lossscale.compat.flax import DynamicScale
          >>> state = DynamicScale(scale=8.0, fin_steps=3).to_state()
          >>> print(state.loss_scale, state.rule_state.growth_count)
          8.0 3
        """
        first: LossScaleState = self._rule().init()
        scale = as_array(self.scale, jnp.float32)
        first = jax.tree.map(lambda x: jnp.broadcast_to(x, scale.shape), first)
        count = as_array(self.fin_steps, jnp.int32)
        rule_state = first.rule_state._replace(growth_count=count)
        return first._replace(loss_scale=scale, rule_state=rule_state)

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

        Example:
          >>> import optax_lossscale as ols
          >>> from optax_lossscale.compat.flax import DynamicScale
          >>> state = ols.presets.flax(8.0).init()
          >>> print(DynamicScale.from_state(state, growth_interval=100).scale)
          8.0
        """
        state = find_loss_scale_state(tree)
        if not isinstance(state.rule_state, DynamicRuleState):
            raise ValueError(
                "`tree` must hold the state of a rule that counts finite steps as "
                f"`presets.flax` does, got {state.rule_state}."
            )
        count = state.rule_state.growth_count
        return cls(fin_steps=count, scale=state.loss_scale, **settings)

    def _rule(self) -> LossScale:
        return flax_rule(
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            minimum_scale=self.minimum_scale,
        )


def _divide(leaves: list[Any], scale: jax.Array) -> list[jax.Array]:
    """Divides gradients by the scale, as Flax does.

    `unscale` multiplies by the reciprocal, which differs in the last bit if the scale
    is not a power of two.
    """

    def divide(leaf: Any) -> jax.Array:
        grad = widen(leaf)
        divisor = scale.astype(jnp.finfo(grad.dtype).dtype)
        if jnp.iscomplexobj(grad):
            return lax.complex(lax.real(grad) / divisor, lax.imag(grad) / divisor)
        return grad / divisor

    return [divide(leaf) for leaf in leaves]


def _mean_over_devices(grads: PyTree, loss: jax.Array, axis_name: AxisName) -> PyTree:
    """Averages the gradients of one loss for each device.

    Where `shard_map` tracks which arrays vary over devices, gradients of parameters
    that do not vary are sums over devices already, unless the loss itself does not
    vary: then they are the gradients of that one loss.
    """
    names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    tracked = {name for name in names if name in _varying(lax.axis_index(name))}

    def mean(grad: jax.Array) -> jax.Array:
        is_mean_of = tuple(n for n in names if n not in tracked or n in _varying(grad))
        is_sum = [n for n in names if n not in is_mean_of and n in _varying(loss)]
        if is_mean_of:
            grad = lax.pmean(grad, is_mean_of)
        return grad / lax.psum(1, tuple(is_sum)) if is_sum else grad

    return jax.tree.map(mean, grads)


def _varying(array: jax.Array) -> frozenset[Any]:
    """The axes over which an array is known to vary."""
    kind: Any = jax.typeof(array)
    # JAX 0.7 has the first name, and JAX 0.10 the second.
    is_named_vma = hasattr(kind, "vma")
    axes: frozenset[Any] = kind.vma if is_named_vma else kind.manual_axis_type.varying
    return axes
