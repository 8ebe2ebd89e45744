"""Find which products to leave in float32."""

from __future__ import annotations

from collections.abc import Sequence

from optax_lossscale._autocast.levels import Left
from optax_lossscale._autocast.products import PRODUCTS
from optax_lossscale._checks import check_number
from optax_lossscale._operations.operation import Operation, first_nonfinite
from optax_lossscale._operations.report import describe
from optax_lossscale._operations.trace import Operations

_PRODUCTS = tuple(primitive.name for primitive in PRODUCTS)


def suggest_full_precision(
    operations: Operations, *, tolerance: float = 0.01
) -> list[str]:
    """Returns which products to leave in float32, by their scopes or lines.

    With these in float32, no product overflows, and none has an error above the
    tolerance, in the forward and in the backward pass:

        error = norm(product - float32_product) / norm(float32_product)

    Only products that are at fault are named. While there are NaN or infinities, that
    is the product that made the first ones; what comes after it is judged when it is
    finite. So the function is compiled and run again after each choice.

    * A name with a slash at its end is a scope: pass it to `autocast(fun, high=...)`.
      It holds all products of that module or `jax.named_scope`.
    * Any other name is the line of a product that is in no scope, such as
      `"model.py:12 (loss_fn)"`. Wrap what that line calls in `full_precision`, or put
      it into a `jax.named_scope`, and pass the name of that to `high`.

    Args:
      operations: What `trace_operations` returned.
      tolerance: The largest error of a product, dimensionless, positive. Rounding to
        float16 makes errors of about 3e-4, and rounding to bfloat16 errors of 2e-3.

    Returns:
      Scopes and lines, sorted. An empty list means that all products are exact enough
      as they are.

    Raises:
      TypeError: If `operations` is a part of what `trace_operations` returned.
      ValueError: If `tolerance` is not positive, or if no product is to blame: the
        message then names the operation that is, such as the logarithm of zero. Also
        if a product is in float16 because the function casts its operands itself.

    Example:
      >>> import jax, jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(ws, x):
      ...     for i, w in enumerate(ws):
      ...         with jax.named_scope(f"layer{i}"):
      ...             x = x @ w
      ...     return jnp.mean(x)
      >>> ws = [jnp.full((2, 2), number) for number in (1.0, 1e5, 1e-5)]
      >>> operations = ols.diagnostics.trace_operations(loss_fn, ws, jnp.ones((1, 2)))
      >>> names = ols.diagnostics.suggest_full_precision(operations)
      >>> names
      ['layer1/', 'layer2/']
      >>> loss_fn = ols.autocast(loss_fn, high=names)
    """
    if not isinstance(operations, Operations):
        raise TypeError(
            "`operations` must be what `trace_operations` returned, got "
            f"{type(operations).__name__}. (It holds the function, to run it again.)"
        )
    if not check_number("tolerance", tolerance, 0.0):
        raise ValueError(f"`tolerance` must be positive, got {tolerance}.")
    forward = [x for x in operations if _is_product(x) and not x.is_backward]
    chosen: list[str] = []
    while faults := _faults(operations, tolerance):
        new = {_name_of(fault, forward) for fault in faults}
        if new <= {*chosen}:
            raise ValueError(f"{_NO_PRODUCT}. {_complaint(faults[0])}")
        chosen = sorted({*chosen, *new})
        scopes = [tuple(x[:-1].split("/")) for x in chosen if x.endswith("/")]
        lines = [x for x in chosen if not x.endswith("/")]
        operations = operations.run_again(Left(tuple(scopes), tuple(lines)))
    return chosen


_NO_PRODUCT = "`operations` must have a fault that `autocast` made, got none"


def _is_product(operation: Operation) -> bool:
    return operation.primitive in _PRODUCTS


def _faults(operations: Operations, tolerance: float) -> list[Operation]:
    """The products to leave in float32 next, and casts to their operands."""
    lines = {x.where for x in operations if _is_product(x)}
    faults = [
        operation
        for operation in operations
        if operation.error > tolerance
        and (_is_product(operation) or operation.primitive == "convert_element_type")
        and operation.where in lines
    ]
    if operations.are_results_finite:
        return faults
    nonfinite = first_nonfinite(faults)
    if nonfinite is not None:
        return [nonfinite]
    first = first_nonfinite(operations)
    received = "NaN or infinity is in the arguments."
    what = received if first is None else f"The first: {describe(first)}"
    raise ValueError(f"{_NO_PRODUCT}. {what}")


def _name_of(fault: Operation, forward: Sequence[Operation]) -> str:
    """The scope of a product or a cast, or else its line.

    JAX forgets some scopes in the backward pass of a loop; then the line tells them.
    """
    scopes = {x.scope: x.scope for x in forward}
    lines = {x.where: x.scope for x in reversed(forward)}
    scope = scopes.get(fault.scope) or lines.get(fault.where) or fault.scope
    return f"{scope}/" if scope else fault.where


def _complaint(fault: Operation) -> str:
    return (
        f"{fault.primitive} at {fault.where} has an error of {fault.error:.1e} as "
        "written. (Does the function cast to float16 itself?)"
    )
