"""Find which products to leave in float32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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
    is the product that made the first ones. If another operation made them, such as a
    Cholesky decomposition of a rounded matrix, and would not if all products were in
    float32, it is the last product before that operation. The function is compiled and
    run again after each choice. In a terminal a progress bar counts the runs after two
    seconds, if tqdm is installed.

    * A name with a slash at its end is a scope. It stands for all products of that
      module or `jax.named_scope`.
    * Any other name is the line of a product that is in no scope, such as
      `"model.py:12 (loss_fn)"`. It changes when you edit the file. To keep it, put the
      line into a `jax.named_scope`, or what it calls into `full_precision`.

    Pass them to `autocast(fun, high=...)`.

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
    with _progress() as count:
        search = _Search(operations, tolerance, count)
        while new := search.faults():
            search.leave_in_float32(new)
    return search.chosen


class _Search:
    """Runs a function with more and more products left in float32.

    Attributes:
      chosen: Their scopes and lines, sorted.
    """

    def __init__(
        self, operations: Operations, tolerance: float, count: Callable[[], object]
    ) -> None:
        self.chosen: list[str] = []
        self._operations, self._tolerance = operations, tolerance
        self._run_again, self._count = operations.run_again, count
        # JAX forgets some scopes in the backward pass of a loop; then the line tells.
        forward = [x for x in operations if _is_product(x) and not x.is_backward]
        self._scopes = {x.scope: x.scope for x in forward}
        self._lines = {x.where: x.scope for x in reversed(forward)}

    def leave_in_float32(self, names: Iterable[str]) -> None:
        """Runs the function with some products left in float32, beside those chosen."""
        self.chosen = sorted({*self.chosen, *names})
        self._operations = self._run(self.chosen)

    def faults(self) -> list[str]:
        """The names of products to leave in float32 next.

        Raises:
          ValueError: If that would change nothing.
        """
        is_finite = self._operations.are_results_finite
        faults = [x for x in self._operations if x.error > self._tolerance]
        products = [x for x in faults if _is_product(x)]
        # JAX moves some casts of operands out of a loop.
        casts = [x for x in faults if x.where in self._lines and _is_cast(x)]
        if is_finite:
            casts = [x for x in casts if not x.nonfinite]
            names = [self._name_of(x) for x in (*products, *casts)]
        elif first := [x for x in (*products, *casts) if x.nonfinite]:
            names = [self._name_of(first[0])]
        else:
            names = self._names_before(first_nonfinite(self._operations))
        if not {*names} <= {*self.chosen}:
            return names
        if not is_finite:
            raise ValueError(_NO_PRODUCT + self._what_is_wrong())
        if products:
            raise ValueError(_NO_PRODUCT + _complaint(products[0]))
        return []

    def _names_before(self, first: Operation | None) -> list[str]:
        """The last product before an operation that is finite if all are in float32."""
        if first is None or not self._is_finite_in_float32:
            return []
        before = self._operations[: self._operations.index(first)]
        names = [self._name_of(x) for x in before if _is_product(x)]
        return [x for x in names if x not in self.chosen][-1:]

    @functools.cached_property
    def _is_finite_in_float32(self) -> bool:
        products = filter(_is_product, self._operations)
        return self._run(map(self._name_of, products)).are_results_finite

    def _run(self, names: Iterable[str]) -> Operations:
        operations = self._run_again([*names])
        self._count()
        return operations

    def _name_of(self, operation: Operation) -> str:
        """The scope of a product or a cast, or else its line."""
        scope = self._scopes.get(operation.scope)
        scope = scope or self._lines.get(operation.where) or operation.scope
        return f"{scope}/" if scope else operation.where

    def _what_is_wrong(self) -> str:
        first = first_nonfinite(self._operations)
        if first is None:
            return "NaN or infinity is in the arguments."
        return (
            f"The first: {describe(first)} (To leave products as they are written does "
            "not help: mend that line.)"
        )


_NO_PRODUCT = "`operations` must have a fault that `autocast` made, got none. "


def _is_product(operation: Operation) -> bool:
    return operation.primitive in _PRODUCTS


def _is_cast(operation: Operation) -> bool:
    return operation.primitive == "convert_element_type"


def _complaint(fault: Operation) -> str:
    return (
        f"{fault.primitive} at {fault.where} has an error of {fault.error:.1e} as "
        "written. (Does the function cast to float16 itself?)"
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[], object]]:
    """Yields what counts a run, in a bar after two seconds if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    # With `disable=None` there is no bar where standard error is no terminal.
    settings: dict[str, Any] = {"unit": "run", "delay": 2, "disable": None}
    with tqdm(desc="suggest_full_precision", leave=False, **settings) as bar:
        yield bar.update
