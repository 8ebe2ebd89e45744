"""What is saved for the backward pass: in loops, and by `jax.checkpoint`.

JAX stacks what the body of a scan saves, in the dtype that it has. Products are low;
the rest is float32. So the body may save its products and what takes long to compute,
and compute the cheap operations again. It does so if that saves fewer bytes.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives as p

from optax_lossscale._autocast.jax_internals import (
    NEWER_ELEMENTWISE,
    pvary_p,
    remat_p,
    split_p,
)
from optax_lossscale._autocast.products import PRODUCTS, low_product_p
from optax_lossscale._autocast.programs import (
    Program,
    aval_of,
    bind,
    changed_once,
    consts_of,
    equations_of,
    jaxpr_of,
    with_equations,
    with_params,
    with_programs,
)
from optax_lossscale._ground.types import PyTree

# One entry of the result takes one entry of each operand.
ELEMENTWISE = frozenset(
    {
        *(p.abs_p, p.acos_p, p.acosh_p, p.add_jaxvals_p, p.add_p, p.and_p, p.asin_p),
        *(p.asinh_p, p.atan2_p, p.atan_p, p.atanh_p, p.bitcast_convert_type_p),
        *(p.cbrt_p, p.ceil_p, p.clamp_p, p.complex_p, p.conj_p),
        *(p.convert_element_type_p, p.cos_p, p.cosh_p, p.div_p, p.eq_p, p.erf_p),
        *(p.erfc_p, p.exp2_p, p.exp_p, p.expm1_p, p.floor_p, p.ge_p, p.gt_p, p.imag_p),
        *(p.integer_pow_p, p.is_finite_p, p.le_p, p.log1p_p, p.log_p, p.logistic_p),
        *(p.lt_p, p.max_p, p.min_p, p.mul_p, p.ne_p, p.neg_p, p.nextafter_p, p.not_p),
        *(p.or_p, p.pow_p, p.real_p, p.reduce_precision_p, p.rem_p, p.round_p),
        *(p.rsqrt_p, p.select_n_p, p.shift_left_p, p.shift_right_arithmetic_p),
        *(p.shift_right_logical_p, p.sign_p, p.sin_p, p.sinh_p, p.sqrt_p, p.square_p),
        *(p.stop_gradient_p, p.sub_p, p.tan_p, p.tanh_p, p.xor_p),
        *NEWER_ELEMENTWISE,
    }
)
_CHEAP = ELEMENTWISE.union(
    {
        # Moves, and what makes entries from nothing.
        *(p.broadcast_in_dim_p, p.concatenate_p, p.copy_p, p.dynamic_slice_p),
        *(p.dynamic_update_slice_p, p.gather_p, p.iota_p, p.pad_p, p.reshape_p),
        *(p.rev_p, p.sharding_constraint_p, p.slice_p, p.squeeze_p, p.transpose_p),
        *(pvary_p, split_p),
    }
)


def save_products(primitive: core.Primitive, *avals: Any, **params: Any) -> bool:
    """A policy for `jax.checkpoint` that saves only low products.

    Use it as `jax.checkpoint(layer, policy=save_products)` under `autocast`. The low
    products have half the bytes of float32, and everything else is computed again in
    the backward pass. Outside of `autocast`, the products of float16 or bfloat16 arrays
    are saved.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/autocast.html

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> @ols.autocast
      ... def loss_fn(w, x):
      ...     layer = jax.checkpoint(
      ...         lambda w, x: jnp.tanh(x @ w), policy=ols.save_products
      ...     )
      ...     return jnp.mean(layer(w, x))
      >>> grads = jax.grad(loss_fn)(jnp.ones((3, 2)), jnp.ones((1, 3)))

    References:
      https://docs.jax.dev/en/latest/gradient-checkpointing.html
    """
    return primitive in PRODUCTS and all(x.dtype.itemsize < 4 for x in avals[:2])


def _save_all_but_cheap(primitive: core.Primitive, *_: Any, **__: Any) -> bool:
    """The policy in loops. What is not known to be cheap is saved."""
    return primitive not in _CHEAP


def with_lean_loops(program: Program, is_decided: bool = False) -> Program:
    """The program whose loops compute cheap operations again, if that saves bytes.

    The outermost loop of a nest decides for all loops in it; then it is decided.
    """

    def lean(equation: core.JaxprEqn) -> core.JaxprEqn:
        body: Any = equation.params.get("jaxpr")
        if equation.primitive is not p.scan_p or not _can_recompute(body):
            return with_programs(equation, lambda x: with_lean_loops(x, is_decided))
        recomputed = _recomputed(with_lean_loops(body, is_decided=True))
        if is_decided or _saves_less(equation, recomputed, body):
            return with_params(equation, {**equation.params, "jaxpr": recomputed})
        return equation

    def change() -> Program:
        return with_equations(program, list(map(lean, jaxpr_of(program).eqns)))

    return changed_once(program, ("loops", is_decided), change)


def _saves_less(loop: core.JaxprEqn, recomputed: Program, as_written: Program) -> bool:
    """Whether a scan saves less for its backward pass if its body is recomputed.

    JAX says what the gradient of the whole scan saves. To compute operations again
    takes time, so it has to save a tenth at least. Where JAX cannot say, the body is
    recomputed: sizes are unknown, the scan is in a `jax.shard_map` that `autocast` is
    around, or it has no gradient.
    """
    try:
        return _saved_bytes(loop, recomputed) < 0.9 * _saved_bytes(loop, as_written)
    except Exception:  # Whatever JAX or a rule of the user raises.
        return True


def _saved_bytes(loop: core.JaxprEqn, body: Program) -> int:
    """How many bytes the gradient of a scan with this body stacks, by its residuals."""

    def residuals(*inputs: jax.Array) -> PyTree:
        def run(*inputs: jax.Array) -> Sequence[jax.Array]:
            return bind(loop.primitive, inputs, {**loop.params, "jaxpr": body})

        return jax.vjp(run, *inputs)[1]

    program = jax.make_jaxpr(residuals)(*map(aval_of, loop.invars)).jaxpr
    saved = {x for x in program.outvars if isinstance(x, core.Var)}
    # An input that is saved is there anyway.
    avals = [aval_of(x) for x in saved.difference(program.invars)]
    length = loop.params["length"]
    return sum(
        math.prod(x.shape) * x.dtype.itemsize for x in avals if x.shape[:1] == (length,)
    )


def _can_recompute(body: Program) -> bool:
    """Whether the body of a loop has low products, and may be computed again.

    Effects would happen twice. A body with a `jax.checkpoint` says itself what it
    saves. Complex numbers that a checkpoint reads and saves make JAX fail.
    """
    equations = list(equations_of(body))
    has_product = any(equation.primitive is low_product_p for equation in equations)
    has_checkpoint = any(equation.primitive is remat_p for equation in equations)
    results = [x.aval for equation in equations for x in equation.outvars]
    # A token has no dtype.
    is_complex = any("complex" in str(getattr(x, "dtype", "")) for x in results)
    is_closed = not (body.effects or consts_of(body))
    return has_product and is_closed and not (has_checkpoint or is_complex)


def _recomputed(body: Program) -> Program:
    """The body of a scan, which saves less for its backward pass.

    It becomes the one equation of a new program. To trace it again would need the axis
    names that are bound around the loop, as in a `jax.shard_map`.
    """
    checkpoint = jax.checkpoint(
        lambda x: x, prevent_cse=False, policy=_save_all_but_cheap
    )
    (equation,) = jax.make_jaxpr(checkpoint)(0.0).eqns
    if equation.primitive is not remat_p:  # With `jax_remat3` no scan can hold it.
        return body
    jaxpr = jaxpr_of(body)
    inputs, results = (
        [core.Var(atom.aval) for atom in atoms]
        for atoms in (jaxpr.invars, jaxpr.outvars)
    )
    equation = equation.replace(
        invars=inputs,
        outvars=results,
        params={**equation.params, "jaxpr": jaxpr},
        ctx=jaxpr.eqns[0].ctx,  # With the mesh around the loop.
    )
    return with_equations(body, [equation], invars=inputs, outvars=results)
