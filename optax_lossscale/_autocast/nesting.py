"""The one table of operations that hold programs, and of how autocast treats them.

To add an operation, write a function for it in `control_flow.py`, or in
`custom_derivatives.py` if it has a derivative rule of its own, and a row here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive, primitives

from optax_lossscale._autocast.control_flow import (
    Call,
    cond,
    inline,
    jit,
    remat,
    scan,
    shard_map,
    while_loop,
)
from optax_lossscale._autocast.custom_derivatives import custom_jvp, custom_vjp
from optax_lossscale._autocast.markers import reason_of_marker
from optax_lossscale._autocast.policy import Policy
from optax_lossscale._autocast.products import low_product_p
from optax_lossscale._autocast.values import Value


class Nesting(NamedTuple):
    """How an operation that holds programs is treated.

    Attributes:
      rebuild: Evaluates its programs, and makes the operation anew around them.
      body: Name of the parameter that holds its program, if operands and results match
        that program's one to one. `rounding.py` then looks inside.
    """

    rebuild: Callable[[Call], list[Value]]
    body: str | None = None


# Keyed by the primitive where JAX exports it, else by the primitive's name.
_NESTINGS: dict[Primitive | str, Nesting] = {
    primitives.jit_p: Nesting(jit, body="jaxpr"),
    "remat2": Nesting(remat, body="jaxpr"),  # JAX 0.7 has no `remat_p`.
    primitives.scan_p: Nesting(scan),
    primitives.while_p: Nesting(while_loop),
    primitives.cond_p: Nesting(cond),
    primitives.closed_call_p: Nesting(inline),
    "eval_jaxpr": Nesting(inline),
    "shard_map": Nesting(shard_map),
    primitives.custom_jvp_call_p: Nesting(custom_jvp, body="call_jaxpr"),
    primitives.custom_vjp_call_p: Nesting(custom_vjp),
}
NESTED_NAMES = frozenset(
    key.name if isinstance(key, Primitive) else key for key in _NESTINGS
)


def nesting_of(equation: Any) -> Nesting | None:
    """The row of an operation that holds programs; None for any other operation."""
    primitive = equation.primitive
    return _NESTINGS.get(primitive) or _NESTINGS.get(primitive.name)


def reason_left_alone(equation: Any, policy: Policy) -> str | None:
    """Why an operation is left as it is written, or None if it is not."""
    if policy.is_in_scope(equation):
        return "in a scope kept in float32"
    reason = reason_of_marker(equation)
    if reason is not None:
        return reason
    if equation.primitive is low_product_p:
        return "autocast inside"
    if any(not isinstance(x.aval, jax.core.ShapedArray) for x in equation.invars):
        return "works in place"
    return None
