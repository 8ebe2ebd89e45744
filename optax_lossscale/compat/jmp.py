"""The names of jmp, so that a script that uses it needs one changed import.

    import optax_lossscale.compat.jmp as jmp

All public names of jmp 0.0.4 are here, with its signatures, defaults, leaves, strings
and warnings. jmp itself is neither needed nor imported.

A loss scale is applied by `optax_lossscale.scale` and `optax_lossscale.unscale`. Where
jmp loses numbers, this module does not copy it; each class lists its departures.

`to_state()` carries a run over to `loss_scaled` at any step, and `from_state` brings it
back:

    tx = loss_scaled(optimizer, loss_scale.to_rule())
    opt_state = LossScaledState(loss_scale.to_state(), inner_opt_state)

    loss_scale = DynamicLossScale.from_state(opt_state, period=2000)
    inner_opt_state = opt_state.inner_state

The numbers are those of jmp to the bit while the scale is a power of two; otherwise the
last bit may differ under `jit`.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lossscale._ground.checks import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    check_concrete,
    python_number,
)
from optax_lossscale._ground.states import LossScaleState
from optax_lossscale._ground.tree import is_floating, is_numeric, strengthen
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.finite import all_finite as all_finite_in
from optax_lossscale._scaling.rules import LossScale as Rule
from optax_lossscale._scaling.rules import first_state, no_loss_scale, static_loss_scale
from optax_lossscale._scaling.scale import divide_out
from optax_lossscale._scaling.scale import scale as scale_tree
from optax_lossscale._scaling.state import find_loss_scale_state, with_arrays
from optax_lossscale.compat._jmp_policy import (
    Policy,
    cast_to_full,
    cast_to_half,
    get_policy,
    half_dtype,
)
from optax_lossscale.compat._jmp_policy import dtype_to_names as dtype_to_names
from optax_lossscale.presets import jmp as jmp_rule
from optax_lossscale.presets._settings import state_at

__version__ = "0.0.4"  # Of the jmp whose names these are.

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """A loss scale of 1 that leaves trees as they are: `no_loss_scale`.

        scale(tree) = unscale(tree) = tree;  adjust(grads_finite) = self

    As a pytree it has no leaves. There are no departures from jmp.

    Example:
      >>> from optax_lossscale.compat import jmp
      >>> jmp.NoOpLossScale().scale(3.0), jmp.NoOpLossScale().loss_scale
      (3.0, 1)

    References:
      jmp 0.0.4, `jmp/_src/loss_scale.py`.
    """

    @property
    def loss_scale(self) -> int:
        """Always 1."""
        return 1

    def scale(self, tree: PyTree) -> PyTree:
        """Returns the same object."""
        return tree

    def unscale(self, tree: PyTree) -> PyTree:
        """Returns the same object."""
        return tree

    def adjust(self, grads_finite: jax.typing.ArrayLike) -> NoOpLossScale:
        """Returns the same object."""
        del grads_finite
        return self

    def to_state(self) -> LossScaleState:
        """Returns the state with which `no_loss_scale` continues the run."""
        return no_loss_scale().init()

    @classmethod
    def from_state(cls, state: PyTree) -> NoOpLossScale:
        """Returns the loss scale of a run under `no_loss_scale`.

        `state` is any pytree that holds exactly one `LossScaleState`, of that rule.
        """
        _state_of_rule(state, no_loss_scale())
        return cls()


class _ScalesTrees:
    """The methods that a static and a dynamic loss scale share."""

    loss_scale: jax.typing.ArrayLike

    def scale(self, tree: PyTree) -> PyTree:
        """Multiplies every floating leaf, usually the loss, by the scale."""
        return scale_tree(tree, self._state())

    def unscale(self, tree: PyTree) -> PyTree:
        """Divides the scale out of every floating leaf."""
        return divide_out(tree, self._state().loss_scale, True)

    def _state(self) -> LossScaleState:
        """The scale, or 2**126 in place of a larger one, whose reciprocal is zero."""
        s = jnp.minimum(jnp.asarray(self.loss_scale, jnp.float32), LARGEST_SCALE)
        return first_state(s, ())


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_ScalesTrees):
    """A loss scale that never changes, as the rule `static_loss_scale`.

        scale(x) = widen(x) * loss_scale
        unscale(x) = widen(x) * (1 / loss_scale)
        adjust(grads_finite) = self

    where `widen` casts dtypes narrower than float32 to float32. As a pytree it has no
    leaves: `jit` compiles a program for each scale.

    Departures:
      * Half-precision leaves become float32 also if `loss_scale` is a Python number.
        jmp keeps them, so that a scaled float16 loss overflows, and small float16
        gradients are flushed to zero: `1e-3 / 2**15` is zero there. A script that
        needs float16 gradients casts them back: `policy.cast_to_param(grads)`.
      * Leaves that are not floating are returned unchanged. jmp multiplies integers,
        and raises an error for leaves that are not numbers.
      * The scale and its reciprocal are float32, also with 64-bit numbers, where jmp's
        may be wider.
      * A scale above `2**126` counts as `2**126`. In jmp all gradients are then zero,
        because the reciprocal of the scale is flushed to zero.
      * `loss_scale` can be a JAX or NumPy array under `jit` too, where jmp fails.

    Attributes:
      loss_scale: One number, dimensionless. It is not checked, except by `to_state`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.compat import jmp
      >>> loss_scale = jmp.StaticLossScale(2.0**15)
      >>> loss_scale.scale(jnp.float16(3.0))
      Array(98304., dtype=float32)

    References:
      jmp 0.0.4, `jmp/_src/loss_scale.py`.
    """

    loss_scale: jax.typing.ArrayLike

    def __hash__(self) -> int:
        return hash(python_number("loss_scale", self.loss_scale))

    def adjust(self, grads_finite: jax.typing.ArrayLike) -> StaticLossScale:
        """Returns the same object."""
        del grads_finite
        return self

    def to_state(self) -> LossScaleState:
        """Returns the state with which `static_loss_scale` continues the run."""
        return static_loss_scale(self.loss_scale).init()  # type: ignore[arg-type]

    @classmethod
    def from_state(cls, state: PyTree) -> StaticLossScale:
        """Returns the loss scale of a run under `static_loss_scale`.

        `state` is any pytree that holds exactly one `LossScaleState`, of that rule. It
        must not be traced.
        """
        s = _state_of_rule(state, static_loss_scale(1.0)).loss_scale
        check_concrete("state", s, "A `StaticLossScale` holds a number.")
        return cls(jnp.array(s))


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_ScalesTrees):
    """A loss scale that grows and backs off, as the rule `presets.jmp`.

    It scales and unscales as `StaticLossScale` does. A step is

        scaled_grads = grad(lambda params: loss_scale.scale(loss(params)))(params)
        grads = loss_scale.unscale(scaled_grads)
        grads_finite = all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        params, opt_state = select_tree(grads_finite, new, old)

    The leaves of the pytree are `[loss_scale, counter]`, with the key paths that they
    have in jmp. The other fields are static. `adjust` keeps the dtypes of both leaves.

    Departures:
      * `min_loss_scale` stays what it was. jmp forgets it, and goes on with 1, whenever
        the tree is rebuilt: by `jit`, `scan`, `vmap` and `tree.map`.
      * So `min_loss_scale`, `period` and `factor` must be concrete numbers. A traced
        one, such as `jnp.float32(0.25)` inside `jit`, is refused; write 0.25. Two
        objects with different floors are different trees.
      * `loss_scale` can be an integer, which becomes float32 when it is adjusted, or
        float16 or bfloat16, for which jmp's `adjust` raises an error. A change that a
        float16 scale cannot hold does not happen, so prefer float32.
      * The scale does not grow beyond `2**126`, where jmp goes to `2**127`. A larger
        scale, infinity or NaN becomes `2**126` when it is adjusted, and then backs off;
        jmp never leaves infinity and NaN. A floor below `2**-126` means `2**-126`.
      * If a restored `counter` already exceeds `period`, the scale grows at once. In
        jmp it first counts to a multiple of `period`.
      * Rebuilding a tree never warns, and takes leaves of any type.
      * `grads_finite` can be a Python bool. A NaN counts as not finite.
      * `adjust` raises an error for a `factor` that is not above 1, a `period` that is
        below 1 or not whole, and a floor that is above `2**126` or NaN.

    Attributes:
      loss_scale: `f32[]`, dimensionless. A warning says if it is not floating.
      counter: `i32[]`, finite steps since the scale last changed.
      period: As in `presets.jmp`.
      factor: As in `presets.jmp`.
      min_loss_scale: As in `presets.jmp`. A warning says if it is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.compat import jmp
      >>> loss_scale = jmp.DynamicLossScale(jnp.float32(2.0**15), period=2)
      >>> for grads_finite in [True, True, False]:
      ...     loss_scale = loss_scale.adjust(grads_finite)
      ...     print(loss_scale.loss_scale, loss_scale.counter)
      32768.0 1
      65536.0 0
      32768.0 0

    References:
      jmp 0.0.4, `jmp/_src/loss_scale.py`; its issue 47 (float16 scales) and pull
      request 44 (`min_loss_scale`).
    """

    loss_scale: jax.typing.ArrayLike
    counter: jax.typing.ArrayLike = dataclasses.field(
        default_factory=lambda: np.zeros((), np.int32)
    )
    period: int = 2000
    factor: float = 2
    min_loss_scale: jax.typing.ArrayLike = dataclasses.field(
        default_factory=lambda: np.ones((), np.float32)
    )

    def __post_init__(self) -> None:
        _warn_unless_floating("loss_scale", self.loss_scale)
        _warn_unless_floating("min_loss_scale", self.min_loss_scale)

    def adjust(self, grads_finite: jax.typing.ArrayLike) -> DynamicLossScale:
        """Returns the loss scale for the next step.

            self.to_rule().adjust(self.to_state(), grads_finite)

        Args:
          grads_finite: `bool[]`, whether the unscaled gradients were finite.

        Returns:
          A `DynamicLossScale` with the same settings and dtypes.

        Raises:
          AssertionError: If `grads_finite` is not a scalar, as in jmp.
          ValueError: If a setting is outside its range.
          TypeError: If a setting is of the wrong kind, or traced.
        """
        if jnp.ndim(grads_finite) != 0:
            raise AssertionError(
                "Expected boolean scalar for `grads_finite`, got shape "
                f"{jnp.shape(grads_finite)}. (Did you mean `all_finite(grads)`?)"
            )
        adjusted = self.to_rule().adjust(self.to_state(), grads_finite)
        # Strongly typed, as in jmp: a product with a float16 loss is then float32.
        old = strengthen(jnp.asarray(self.loss_scale))
        if not is_floating(old):
            old = old.astype(jnp.float32)
        s = adjusted.loss_scale.astype(old.dtype)
        # In float16 the scale may not fit.
        s = jnp.where(jnp.isfinite(s) & (s > 0), s, old)
        n = jnp.full_like(self.counter, adjusted.rule_state.growth_count)
        return dataclasses.replace(self, loss_scale=s, counter=n)

    def to_state(self) -> LossScaleState:
        """Returns the state with which `presets.jmp` continues the run.

        The counts of steps, which jmp does not keep, start at 0. For arrays with a
        leading axis of devices every field has that axis.
        """
        s = jnp.asarray(self.loss_scale, jnp.float32)
        s = jnp.where(s <= LARGEST_SCALE, s, LARGEST_SCALE)  # NaN too.
        return state_at(self.to_rule(), s, self.counter)

    @classmethod
    def from_state(
        cls,
        state: PyTree,
        period: int = 2000,
        factor: float = 2,
        min_loss_scale: jax.typing.ArrayLike = 1.0,
    ) -> DynamicLossScale:
        """Returns the loss scale of a run under `presets.jmp`.

        `state` is any pytree that holds exactly one `LossScaleState`, such as the
        optimizer's state. States of `dynamic_loss_scale` and of the presets of PyTorch,
        Flax and others have the same form and are taken too. A state does not hold the
        settings, so pass them again.
        """
        found = _state_of_rule(state, jmp_rule())
        s = jnp.array(found.loss_scale)
        n = jnp.array(found.rule_state.growth_count, jnp.int32)
        return cls(s, n, period, factor, min_loss_scale)

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[float, float, float]]:
        """Returns the two leaves, and the settings as numbers that can be hashed."""
        return (self.loss_scale, self.counter), self._settings()

    @classmethod
    def tree_unflatten(
        cls, settings: tuple[int, float, float], leaves: tuple[Any, Any]
    ) -> DynamicLossScale:
        """Makes a loss scale of settings and leaves, which JAX may have replaced."""
        period, factor, floor = (*settings, 1.0)[:3]  # jmp's own have two.
        loss_scale, counter = leaves
        rebuilt = object.__new__(cls)  # Leaves that stand for arrays must not warn.
        rebuilt.__dict__.update(
            loss_scale=loss_scale,
            counter=counter,
            period=period,
            factor=factor,
            min_loss_scale=np.asarray(floor, np.float32),
        )
        return rebuilt

    def _settings(self) -> tuple[float, float, float]:
        floor = float(np.float32(python_number("min_loss_scale", self.min_loss_scale)))
        period = python_number("period", self.period)
        return period, python_number("factor", self.factor), floor

    def to_rule(self) -> Rule:
        """Returns `presets.jmp` with these settings, for `loss_scaled`.

        It raises an error, as that does, for a setting outside its range.
        """
        period, factor, floor = self._settings()
        floor = max(floor, SMALLEST_SCALE)
        return jmp_rule(period=period, factor=factor, min_loss_scale=floor)  # type: ignore[arg-type]


LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale


def all_finite(tree: PyTree) -> jax.Array:
    """Returns whether no leaf holds a NaN or an infinity, as `bool[]`.

    It is `optax_lossscale.all_finite`. Departure: leaves that are not numbers count as
    finite, where jmp raises an error.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.compat import jmp
      >>> print(jmp.all_finite({"a": jnp.ones(3), "b": jnp.array([1.0, jnp.nan])}))
      False
    """
    return all_finite_in(tree)


def select_tree(pred: jax.typing.ArrayLike, a: PyTree, b: PyTree) -> PyTree:
    """Returns `a` if `pred` is True, and `b` otherwise.

    Both are pytrees of arrays, of the same structure and shapes. Use it to keep
    parameters and optimizer state on a step that overflowed. Inside `loss_scaled` this
    is not needed.

    Departure: floating leaves of `a` are cast to the dtypes of `b`, where jmp raises
    an error. So state that was float16 stays float16, although unscaled gradients are
    float32.

    Raises:
      AssertionError: If `pred` is not a boolean scalar, as in jmp.
      TypeError: If two leaves differ in shape, or in dtype and are not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_lossscale.compat import jmp
      >>> jmp.select_tree(jnp.bool_(False), {"a": jnp.ones(2)}, {"a": jnp.zeros(2)})
      {'a': Array([0., 0.], dtype=float32)}
    """
    if jnp.ndim(pred) != 0 or jnp.result_type(pred) != jnp.bool_:
        raise AssertionError(
            f"`pred` must be one bool, got {pred!r:.60}: expected boolean scalar. (Did "
            "you mean `all_finite(grads)`?)"
        )
    verdict = jnp.asarray(pred)

    def select(x: jax.typing.ArrayLike, y: jax.typing.ArrayLike) -> jax.Array:
        if is_floating(x) and is_floating(y):
            x = jnp.asarray(x).astype(jnp.result_type(y))
        return lax.select(verdict, x, y)

    return jax.tree.map(select, a, b)


def _state_of_rule(tree: PyTree, rule: Rule) -> LossScaleState:
    """The state that a tree holds, if a rule has states of this form."""
    state: LossScaleState = with_arrays(find_loss_scale_state(tree))
    form: object = jax.tree.structure(rule.init().rule_state)
    if form != jax.tree.structure(state.rule_state):
        raise ValueError(
            f"`state` must hold a state of {rule}, got one of another rule, whose "
            f"`rule_state` is a {type(state.rule_state).__name__}. (To take over only "
            "its scale, pass `get_loss_scale(state)` to the class.)"
        )
    return state


def _warn_unless_floating(name: str, value: object) -> None:
    """Warns of an integer. JAX may pass objects that stand for arrays."""
    if is_numeric(value):
        dtype = jnp.result_type(value)
        if not jnp.issubdtype(dtype, jnp.floating):
            message = f"Expected floating type for {name}, got {dtype}"
            warnings.warn(message, stacklevel=4)  # Where the class was called.
