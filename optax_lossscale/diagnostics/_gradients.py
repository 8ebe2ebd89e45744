"""Compare the gradient in half precision with the gradient in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from optax_lossscale._autocast.context import without_autocast
from optax_lossscale._autocast.report import aligned
from optax_lossscale._autocast.transform import autocast
from optax_lossscale._ground.checks import check_scale
from optax_lossscale._ground.nnx import (
    flax_nnx,
    is_module,
    map_leaves,
)
from optax_lossscale._ground.tree import is_floating_array, widen
from optax_lossscale._ground.types import PyTree
from optax_lossscale.diagnostics._trace import (
    check_call,
    run,
    trace_gradients,
    undisturbed,
)


class GradientError(NamedTuple):
    """How far the gradient of a parameter is from that in float32.

    With the gradient `h` in half precision, unscaled, and `g` in float32:

    Attributes:
      relative_error: `norm(h - g) / norm(g)`, of the entries that are finite in both;
        infinite if there are none. A product in float16 rounds by up to 2**-11, or
        0.0005, one in bfloat16 by 0.004.
      flushed: Of the entries that are nonzero in `g`, the share that is zero in `h`.
      nonfinite: The share of entries that are finite in `g`, and NaN or infinite in
        `h`.
      norm: `norm(g)`, of the entries that are finite in it.
      size: The number of entries.
    """

    relative_error: float
    flushed: float
    nonfinite: float
    norm: float
    size: int


def gradient_errors(
    fun: Callable[..., Any],
    *args: Any,
    dtype: jax.typing.DTypeLike = jnp.float16,
    level: str = "O1",
    loss_scale: float = 1.0,
    argnums: int | Sequence[int] = 0,
    reference: Callable[..., Any] | None = None,
) -> dict[str, GradientError]:
    """Compares the gradient in half precision with that in float32, leaf by leaf.

    It answers "is my gradient right?" on one batch. Pass the function that computes the
    loss, not the training step, and outside `jit`:

        errors = ols.diagnostics.gradient_errors(loss_fn, params, x, loss_scale=2.0**15)
        ols.diagnostics.print_gradient_errors(errors)

    The gradient is computed twice: as `autocast` makes it, with a loss scale, and in
    float32, where `autocast` changes nothing and half-precision arguments are cast to
    float32. Nothing is trained, and no module is changed.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/debugging_a_skipped_step.html

    Args:
      fun: A function that returns a loss, or a tuple or list that begins with one. If
        it is under `autocast`, or calls a function that is, it runs as it is. Otherwise
        it runs as `autocast(fun, dtype, level=level)`.
      *args: Its arguments, with values. Bind keyword arguments by `functools.partial`.
      dtype: float16 or bfloat16.
      level: `"O0"` to `"O3"`, as in `autocast`. `"O0"` takes a model that casts by
        itself as it is.
      loss_scale: The loss scale, dimensionless, from `2**-126` to `2**126`. With 1,
        small gradients are flushed to zero; use the scale that you train with.
      argnums: What to differentiate by, as in `scaled_value_and_grad`.
      reference: The function whose gradient is right. None is `fun` itself; a model
        that casts by itself, such as one with `dtype=jnp.float16`, needs the loss of
        its float32 twin.

    Returns:
      A dict from the path of each gradient, such as `"layer/kernel"`, to its
      `GradientError`.

    Raises:
      TypeError: If `fun` is not a function or returns no scalar loss, if an argument
        has no values, as inside `jit`, if no argument holds an array, or raised by JAX.
      ValueError: If `loss_scale` is outside its range, or raised by `autocast`.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(params, x):
      ...     return jnp.mean(x @ params["w"]) * 1e-7
      >>> params, x = {"w": jnp.ones((3, 2))}, jnp.ones((4, 3))
      >>> for scale in (1.0, 2.0**15):
      ...     errors = ols.diagnostics.gradient_errors(
      ...         loss_fn, params, x, loss_scale=scale
      ...     )
      ...     print(errors["w"].flushed, errors["w"].relative_error < 0.001)
      1.0 False
      0.0 True
    """
    check_call(fun, args)
    loss_scale = check_scale("loss_scale", loss_scale)
    cast = functools.partial(autocast, dtype=dtype, level=level)
    with undisturbed():
        low = _gradients(fun, args, loss_scale, argnums, cast)
        with without_autocast():
            right = _gradients(reference or fun, _in_float32(args), 1.0, argnums, cast)
    return {name: _error_of(low[name], right[name]) for name in right}


def _gradients(
    fun: Callable[..., Any],
    args: tuple[PyTree, ...],
    loss_scale: float,
    argnums: int | Sequence[int],
    cast: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> dict[str, np.ndarray]:
    """The unscaled gradients by their paths, as one compiled program computes them."""
    traced, names = trace_gradients(fun, args, loss_scale, argnums, cast)
    grads = map(np.asarray, run(traced.program, traced.arrays)[: len(names)])
    wide = [x.astype(complex if np.iscomplexobj(x) else float) for x in grads]
    return {name: x / loss_scale for name, x in zip(names, wide, strict=True)}


def _in_float32(tree: PyTree) -> PyTree:
    """The tree with half-precision arrays in float32, also in modules."""

    def widen_array(leaf: PyTree) -> PyTree:
        return widen(leaf) if is_floating_array(leaf) else leaf

    def widen_node(node: PyTree) -> PyTree:
        if is_module(node):  # As one graph, so that tied variables stay tied.
            graph, state = flax_nnx().split(node)
            return flax_nnx().merge(graph, jax.tree.map(widen_array, state))
        return jax.tree.map(widen_array, node)

    return map_leaves(widen_node, tree)


def _error_of(low: np.ndarray, right: np.ndarray) -> GradientError:
    is_right, is_low = np.isfinite(right), np.isfinite(low)
    both = is_right & is_low
    difference = float(np.linalg.norm(low[both] - right[both]))
    in_both, norm = (float(np.linalg.norm(right[x])) for x in (both, is_right))
    is_lost = np.any(is_right) and not np.any(both)
    without_norm = np.inf if difference or is_lost else 0.0
    flushed = int(np.sum((low == 0) & (right != 0)))
    return GradientError(
        relative_error=difference / in_both if in_both else without_norm,
        flushed=flushed / max(int(np.sum(right != 0)), 1),
        nonfinite=int(np.sum(is_right & ~is_low)) / max(right.size, 1),
        norm=norm,
        size=right.size,
    )


def print_gradient_errors(
    errors: Mapping[str, GradientError],
    *,
    limit: int = 20,
    file: TextIO | None = None,
) -> None:
    """Prints a line for each gradient, the worst first.

    The worst have the largest share of nonfinite entries, and then the largest relative
    error, or share of entries flushed to zero.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/debugging_a_skipped_step.html

    Args:
      errors: What `gradient_errors` returned, or a part of it.
      limit: The largest number of lines.
      file: The text file to print to. None means standard output.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> def loss_fn(params, x):
      ...     return jnp.mean(x @ params["w"]) * 1e-7 + jnp.mean(params["b"])
      >>> params, x = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((4, 3))
      >>> errors = ols.diagnostics.gradient_errors(loss_fn, params, x)
      >>> ols.diagnostics.print_gradient_errors(errors)
      gradient  relative error  flushed  nonfinite      norm  size
      w                1.0e+00   100.0%       0.0%  1.22e-07     6
      b                0.0e+00     0.0%       0.0%     0.707     2
    """

    def badness(error: GradientError) -> tuple[float, float]:
        return error.nonfinite, max(error.relative_error, error.flushed)

    worst = sorted(errors, key=lambda name: badness(errors[name]), reverse=True)
    titles = ("gradient", "relative error", "flushed", "nonfinite", "norm", "size")
    rows = [titles]
    for name in worst[:limit]:
        error, flushed, nonfinite, norm, size = errors[name]
        shares = f"{flushed:.1%}", f"{nonfinite:.1%}"
        rows.append((name, f"{error:.1e}", *shares, f"{norm:.3g}", str(size)))
    lines = aligned(rows, right=titles[1:])
    if len(worst) > limit:
        lines.append(f"... and {len(worst) - limit} more")
    print("\n".join(lines), file=file)
