"""How Taylor series, `checkify` and policies of `jax.checkpoint` treat a `low_product`.

Each knows the products of JAX only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import checkify, jet
from jax.extend import core
from jax.interpreters import partial_eval as pe

from optax_lossscale._autocast.products import low_product_p
from optax_lossscale._autocast.written import as_written, product_of, split


def _jet(
    primals: Sequence[Any], series: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    """The Taylor series of a product."""
    copied, float8 = params.pop("copied"), params.pop("float8")
    (primals, _), (series, _) = (
        split(some, copied, float8) for some in (primals, series)
    )
    function = functools.partial(as_written, copied=(False, False), **params)
    result, out_series = jet.jet(function, primals, series, factorial_scaled=False)
    if float8 is not None:  # The series itself is in the low dtype.
        params = {**params, "copied": (False, False), "float8": float8}
        result = low_product_p.bind(*primals, **params)
    return result, out_series


_RECOMPUTE = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "host")(
    None
)


def _partial_eval(
    saveable: Callable[..., Any],
    unknown: Sequence[bool],
    instantiated: Sequence[bool],
    equation: Any,
) -> Any:
    """Asks a policy of `jax.checkpoint` about the product, the only one that it knows.

    All else is as JAX treats any operation.
    """
    pairs = zip(equation.invars, instantiated, strict=True)
    residuals = [x for x, flag in pairs if not flag and isinstance(x, core.Var)]
    if any(unknown):
        return None, equation, [True], [True], residuals
    product = product_of(equation.params["jaxpr"])
    avals = [x.aval for x in product.invars]
    decision = saveable(product.primitive, *avals, **product.params)
    is_float8 = equation.params["float8"] is not None
    if isinstance(decision, tuple) and is_float8:  # What it consists of has no rules.
        decision = False
    if isinstance(decision, tuple):  # Two memories, of the device and of the host.
        function = jax.jit(functools.partial(as_written, **equation.params))
        (call,) = jax.make_jaxpr(function)(*(x.aval for x in equation.invars)).eqns
        equation = equation.replace(primitive=call.primitive, params=call.params)
        rule = pe.partial_eval_jaxpr_custom_rules[call.primitive]
        return rule(saveable, unknown, instantiated, equation)
    if decision is False or decision is _RECOMPUTE:
        return equation, equation, [False], [True], residuals
    return equation, None, [False], [False], []


def register_rules() -> None:
    """Adds the rules of this file to the tables of JAX."""
    rules: dict[core.Primitive, Any] = jet.jet_rules
    rules[low_product_p] = _jet
    pe.partial_eval_jaxpr_custom_rules[low_product_p] = _partial_eval
    # `checkify` looks for NaN in the results of a product, and has no public table.
    checks = checkify.checkify.__globals__.get("error_checks", {})
    check = checks.get(core.primitives.dot_general_p)
    if isinstance(check, functools.partial):
        checks[low_product_p] = functools.partial(check.func, low_product_p)
