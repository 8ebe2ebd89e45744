"""Find which products to leave in float32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

from optax_lossscale._autocast.products import PRODUCTS
from optax_lossscale._checks import check_number
from optax_lossscale._operations.operation import Operation, first_nonfinite
from optax_lossscale._operations.print_report import describe
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
        while names := search.names_to_add():
            search.leave_in_float32(names)
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
        self._operations, self._tolerance, self._count = operations, tolerance, count
        # JAX forgets some scopes in the backward pass of a loop; then the line tells.
        forward = [x for x in operations if _is_product(x) and not x.is_backward]
        self._scopes = {x.scope for x in forward if x.scope}
        self._lines = {x.where: x.scope for x in reversed(forward)}

    def leave_in_float32(self, names: Iterable[str]) -> None:
        """Runs the function with some more products left in float32."""
        self.chosen = sorted({*self.chosen, *names})
        self._operations = self._run(self.chosen)

    def names_to_add(self) -> list[str]:
        """The names of products to leave in float32 next.

        Raises:
          ValueError: If that would change nothing.
        """
        inexact = [x for x in self._operations if x.error > self._tolerance]
        products = [x for x in inexact if _is_product(x)]
        # JAX moves some casts of operands out of a loop.
        casts = [x for x in inexact if x.where in self._lines and _is_cast(x)]
        is_finite = self._operations.are_results_finite
        if is_finite:
            faults = products + [x for x in casts if not x.nonfinite]
        else:
            faults = [x for x in products + casts if x.nonfinite][:1]
        names = {self._name_of(x) for x in faults}
        if not is_finite and not faults:
            names = self._last_product_before_the_fault()
        if new := names - {*self.chosen}:
            return sorted(new)
        if is_finite and not products:
            return []
        got = _complaint(products[0]) if is_finite else self._what_is_wrong()
        raise ValueError(
            f"`operations` must have a fault that `autocast` made, got none. {got}"
        )

    def _last_product_before_the_fault(self) -> set[str]:
        """Its name, if the program is finite with all products in float32."""
        first = first_nonfinite(self._operations)
        if first is None or not self._is_finite_in_float32:
            return set()
        before = self._operations[: self._operations.index(first)]
        names = [self._name_of(x) for x in before if _is_product(x)]
        return {*[x for x in names if x not in self.chosen][-1:]}

    @functools.cached_property
    def _is_finite_in_float32(self) -> bool:
        products = filter(_is_product, self._operations)
        return self._run([*map(self._name_of, products)]).are_results_finite

    def _run(self, names: list[str]) -> Operations:
        operations = self._operations.run_again(names)
        self._count()
        return operations

    def _name_of(self, operation: Operation) -> str:
        """The scope of a product or a cast, or else its line."""
        scope = operation.scope
        if scope not in self._scopes:
            scope = self._lines.get(operation.where) or scope
        return f"{scope}/" if scope else operation.where

    def _what_is_wrong(self) -> str:
        first = first_nonfinite(self._operations)
        if first is None:
            return "NaN or infinity is in the arguments."
        return (
            f"The first: {describe(first)} (To leave products as they are written does "
            "not help: mend that line.)"
        )


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
    with tqdm(
        desc="suggest_full_precision", unit="run", delay=2, disable=None, leave=False
    ) as bar:
        yield bar.update
