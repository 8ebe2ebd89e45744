"""To which power of a loss scale a value is proportional.

With scale `s`, the gradients of a scaled loss are `s**1` times the true ones, whatever
lies between: a backward pass is linear. Unscaled ones are `s**0` times the true ones.
"""

from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives as p

from optax_lossscale._ground.cotangents import same_value_p
from optax_lossscale._programs.jax_internals import (
    name_p,
    optimization_barrier_p,
    psum_invariant_p,
    pvary_p,
    ragged_dot_general_p,
    reduce_scatter_p,
    split_p,
)
from optax_lossscale._programs.jaxprs import is_floating_variable

# A power; `UNLIKE` of a sum of unlike powers, which is none; None if nothing is known.
Power: TypeAlias = Fraction | Literal["unlike"] | None
UNLIKE: Literal["unlike"] = "unlike"


class Powers(NamedTuple):
    """What is known of a value as a function of several scales.

    Attributes:
      of: For each scale that the value was computed from, the power of it to which the
        value is proportional.
      is_zero: Whether the value is zero, and so proportional to every power.
    """

    of: frozenset[tuple[Hashable, Power]] = frozenset()
    is_zero: bool = False


CONSTANT = Powers()
ZERO = Powers(is_zero=True)


def first_power(scale: Hashable) -> Powers:
    """What is known of a scale itself."""
    return Powers(frozenset({(scale, Fraction(1))}))


class PowersRule:
    """Follows powers through operations; a `Rule`."""

    nothing = CONSTANT

    def of_constant(self, value: Any) -> Powers:
        return ZERO if _is_zero(value) else CONSTANT

    def of_operation(
        self, equation: core.JaxprEqn, inputs: Sequence[Powers]
    ) -> Sequence[Powers]:
        count, primitive = len(equation.outvars), equation.primitive
        if not all(map(is_floating_variable, equation.outvars)):
            return [_unknown(inputs)] * count
        if primitive in _LINEAR and len(inputs) == count:
            return inputs
        combine = _COMBINE.get(primitive)
        result = combine(inputs, equation.params) if combine else _unknown(inputs)
        return [result] * count

    def join(self, one: Powers, other: Powers) -> Powers:
        return _one_of([one, other])


def _is_zero(value: Any) -> bool:
    """Whether a constant is the number zero."""
    dtype = getattr(value, "dtype", None)  # JAX has classes of its own for literals.
    is_number = isinstance(value, float | int) or (
        dtype is not None and jnp.issubdtype(dtype, jnp.number)
    )
    if isinstance(value, jax.core.Tracer) or not is_number or np.ndim(value):
        return False
    return bool(np.asarray(value) == 0)


def _unknown(inputs: Sequence[Powers]) -> Powers:
    """Of a function of which nothing is known, which may be linear in no scale."""
    pairs = {pair for x in inputs for pair in x.of}
    varied = {scale for scale, power in pairs if power != 0}
    return Powers(frozenset((s, None if s in varied else power) for s, power in pairs))


def _sum(terms: Sequence[Powers]) -> Powers:
    """Of a sum, which has a power if all its terms have the same one."""
    return _common(terms, lambda powers: None if _may_be_same(powers) else UNLIKE)


def _may_be_same(powers: set[Power]) -> bool:
    """Whether unlike powers may be the same, because some are not known."""
    return None in powers and not {UNLIKE, Fraction(0)} & powers


def _one_of(choices: Sequence[Powers]) -> Powers:
    """Of a choice, which has a power if all have the same one."""
    return _common(choices, lambda powers: None)


def _common(
    inputs: Sequence[Powers], of_unlike: Callable[[set[Power]], Power]
) -> Powers:
    """For each scale the power that all inputs have, but those that are zero."""
    terms = [dict(x.of) for x in inputs if not x.is_zero]
    if not terms:
        return ZERO
    found = set[tuple[Hashable, Power]]()
    for scale in {scale for term in terms for scale in term}:
        powers: set[Power] = {term.get(scale, Fraction(0)) for term in terms}
        found.add((scale, powers.pop() if len(powers) == 1 else of_unlike(powers)))
    return Powers(frozenset(found))


def _product(inputs: Sequence[Powers], signs: Sequence[int] = (1, 1)) -> Powers:
    """Of a product of powers of the inputs."""
    if any(x.is_zero for x, sign in zip(inputs, signs, strict=True) if sign > 0):
        return ZERO
    powers: dict[Hashable, Power] = {}
    for x, sign in zip(inputs, signs, strict=True):
        for scale, power in x.of:
            old = powers.get(scale, Fraction(0))
            if isinstance(power, Fraction) and isinstance(old, Fraction):
                powers[scale] = old + sign * power
            else:  # Two such sums may cancel.
                is_one = UNLIKE in (old, power) and old != power
                powers[scale] = UNLIKE if is_one and None not in (old, power) else None
    return Powers(frozenset(powers.items()))


def _to_the(power: Fraction, x: Powers) -> Powers:
    pairs = {(s, old * power if isinstance(old, Fraction) else old) for s, old in x.of}
    return Powers(frozenset(pairs), x.is_zero and power > 0)


_Combine = Callable[[Sequence[Powers], dict[str, Any]], Powers]
_COMBINE: dict[core.Primitive, _Combine] = {}


def _operations(combine: _Combine, *primitives: core.Primitive) -> None:
    _COMBINE.update(dict.fromkeys(primitives, combine))


# Linear in their first input, or in each one for the result in its place. (Some are so
# for positive factors only.) Their other inputs are indices.
_LINEAR = (
    *(p.abs_p, p.all_gather_p, p.all_to_all_p, p.broadcast_in_dim_p, p.conj_p),
    *(p.convert_element_type_p, p.copy_p, p.cummax_p, p.cummin_p, p.cumsum_p),
    *(p.device_put_p, p.dynamic_slice_p, p.fft_p, p.gather_p, p.imag_p, name_p),
    *(p.neg_p, p.pmax_p, p.pmin_p, p.ppermute_p, p.psum_p, p.real_p, p.reduce_max_p),
    *(p.reduce_min_p, p.reduce_precision_p, p.reduce_sum_p, p.reduce_window_max_p),
    *(p.reduce_window_sum_p, p.reshape_p, p.rev_p, p.sharding_constraint_p, p.slice_p),
    *(p.squeeze_p, p.transpose_p, psum_invariant_p, pvary_p, reduce_scatter_p, split_p),
    *(p.select_and_gather_add_p, p.select_and_scatter_add_p, optimization_barrier_p),
)
_operations(lambda inputs, _: inputs[0], *_LINEAR, same_value_p)
_operations(
    lambda inputs, _: _sum(inputs),
    *(p.add_jaxvals_p, p.add_p, p.complex_p, p.concatenate_p, p.pad_p, p.sub_p),
)
_operations(lambda inputs, _: _one_of(inputs), p.clamp_p, p.max_p, p.min_p)
_operations(lambda inputs, _: _one_of(inputs[1:]), p.select_n_p)
_operations(lambda inputs, _: _sum(inputs[:2]), p.dynamic_update_slice_p)
_operations(
    lambda inputs, _: _sum([inputs[0], inputs[2]]),
    *(p.scatter_add_p, p.scatter_p, p.scatter_max_p, p.scatter_min_p),
)
_operations(lambda inputs, _: _product(inputs, (1, -1)), p.div_p)
_operations(lambda inputs, _: _product(inputs, (-1, 1)), p.triangular_solve_p)
_operations(lambda inputs, _: _to_the(Fraction(0), inputs[0]), p.sign_p)
_operations(
    lambda inputs, params: _to_the(Fraction(params["y"]), inputs[0]), p.integer_pow_p
)
_operations(lambda inputs, _: _to_the(Fraction(2), inputs[0]), p.square_p)
_operations(lambda inputs, _: _to_the(Fraction(1, 2), inputs[0]), p.sqrt_p)
_operations(lambda inputs, _: _to_the(Fraction(-1, 2), inputs[0]), p.rsqrt_p)


def is_product(*primitives: core.Primitive) -> None:
    """Says of operations that they are linear in each of their first two inputs."""
    _operations(lambda inputs, _: _product(inputs[:2]), *primitives)


is_product(p.mul_p, p.dot_general_p, p.conv_general_dilated_p, ragged_dot_general_p)
