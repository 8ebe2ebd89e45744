"""Look for overflow and underflow in any pytree."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._ground.checks import (
    check_concrete,
    check_float_dtype,
    check_number,
    check_scale,
)
from optax_lossscale._ground.tree import floating_leaves, real_parts, widen
from optax_lossscale._ground.types import PyTree
from optax_lossscale._scaling.finite import max_magnitude
from optax_lossscale._scaling.headroom import power_of_quotient


class ExponentHistogram(NamedTuple):
    """The number of entries `x` with each exponent, `floor(log2(abs(x)))`.

    Attributes:
      exponents: `i32[n]`, ascending. The first also stands for all lower exponents, and
        the last for all higher ones.
      counts: `i32[n]`. The number of entries with each exponent.
      zero_count: `i32[]`. The number of entries that are zero.
      nonfinite_count: `i32[]`. The number of entries that are NaN or infinite.
    """

    exponents: jax.Array
    counts: jax.Array
    zero_count: jax.Array
    nonfinite_count: jax.Array


def nonfinite_report(tree: PyTree) -> dict[str, dict[str, Any]]:
    """Counts the NaN and infinite entries of every floating leaf.

    Call it on the gradients of a skipped step, or on a model's intermediate values.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/debugging_a_skipped_step.html

    Args:
      tree: Any pytree.

    Returns:
      A dict from the path of each floating leaf, such as `"layer/kernel"`, to a dict of
      `nan` `i32[]`, `inf` `i32[]` and `size` (an `int`), all in entries. A complex
      number is one entry here, and counts as NaN if one of its parts is NaN.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> tree = {"w": jnp.array([1.0, jnp.inf, jnp.nan]), "step": 3}
      >>> for path, of_leaf in ols.diagnostics.nonfinite_report(tree).items():
      ...     print(path, int(of_leaf["nan"]), int(of_leaf["inf"]), of_leaf["size"])
      w 1 1 3
    """
    report = {}
    for path, leaf in floating_leaves(tree).items():
        wide = widen(leaf)
        is_nan = jnp.isnan(wide)
        report[path] = {
            "nan": jnp.sum(is_nan, dtype=jnp.int32),
            "inf": jnp.sum(jnp.isinf(wide) & ~is_nan, dtype=jnp.int32),
            "size": int(wide.size),
        }
    return report


def print_nonfinite_report(tree: PyTree, *, file: TextIO | None = None) -> None:
    """Prints a line for each leaf with NaN or infinite entries, worst leaf first.

    Call it outside `jit`. The worst leaf has the largest share of nonfinite entries.

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/debugging_a_skipped_step.html

    Args:
      tree: Any pytree, or a report that `nonfinite_report` returned. Its arrays must be
        concrete.
      file: The text file to print to. None means standard output.

    Raises:
      TypeError: If it is called inside `jit`.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> tree = {"w": jnp.array([1.0, jnp.inf, jnp.nan]), "b": jnp.ones(2)}
      >>> ols.diagnostics.print_nonfinite_report(tree)
      1 of 2 floating leaves hold nonfinite entries
      w: 1 nan, 1 inf of 3
    """
    check_concrete(
        "tree",
        tree,
        "Return `nonfinite_report(tree)` from the compiled function and print that, or "
        "call `jax.debug.callback(print_nonfinite_report, tree)`.",
    )
    is_report = isinstance(tree, dict) and all(
        isinstance(of_leaf, dict) and set(of_leaf) == {"nan", "inf", "size"}
        for of_leaf in tree.values()
    )
    report = jax.device_get(tree if is_report else nonfinite_report(tree))
    shares = {
        path: (of_leaf["nan"] + of_leaf["inf"]) / max(of_leaf["size"], 1)
        for path, of_leaf in report.items()
    }
    worst_first = sorted(filter(shares.get, report), key=lambda x: -shares[x])
    count = f"{len(worst_first)} of {len(report)}"
    lines = [f"{count} floating leaves hold nonfinite entries"]
    for path in worst_first:
        nan, inf, size = (report[path][kind] for kind in ("nan", "inf", "size"))
        lines.append(f"{path or 'the array'}: {nan} nan, {inf} inf of {size}")
    print(*lines, sep="\n", file=file)


def exponent_histogram(
    tree: PyTree, *, min_exponent: int = -40, max_exponent: int = 20
) -> ExponentHistogram:
    """Counts the entries of a pytree by their exponents.

    Use it to see how gradients lie in the range of a dtype, and pass the result to
    `plotting.plot_exponent_histogram`.

        counts[i] = number of entries x with floor(log2(abs(x))) == exponents[i]

    Guide: https://optax-lossscale.github.io/optax_lossscale/do_i_need_this.html

    Args:
      tree: Any pytree.
      min_exponent: The lowest exponent. Entries with lower exponents count here too.
      max_exponent: The highest exponent. Entries with higher exponents count here too.

    Returns:
      An `ExponentHistogram` of `n = max_exponent - min_exponent + 1` exponents.

    Raises:
      ValueError: If `min_exponent` is above `max_exponent`.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> ols.diagnostics.exponent_histogram(
      ...     jnp.array([1.0, 1.9, -4.0, 0.0]), min_exponent=0, max_exponent=2
      ... ).counts
      Array([2, 0, 1], dtype=int32)
    """
    if min_exponent > max_exponent:
        raise ValueError(
            f"`min_exponent` must be at most `max_exponent`, got {min_exponent} and "
            f"{max_exponent}. (Did you swap them?)"
        )
    n = max_exponent - min_exponent + 1
    # The last two bins are for zero and for nonfinite entries.
    bins = jnp.arange(n + 2, dtype=jnp.int32)
    counts = jnp.zeros_like(bins)
    for x in _real_arrays(tree):
        exponent = jnp.frexp(x)[1] - 1  # Its mantissa is from 1/2 to 1.
        index = jnp.clip(exponent, min_exponent, max_exponent) - min_exponent
        index = jnp.where(x == 0, n, index)
        index = jnp.where(jnp.isfinite(x), index, n + 1)
        # One sum for each bin, because a scatter would gather sharded leaves.
        counts += lax.map(lambda b, x=index: jnp.sum(x == b, dtype=jnp.int32), bins)
    exponents = jnp.arange(min_exponent, max_exponent + 1, dtype=jnp.int32)
    return ExponentHistogram(exponents, counts[:n], counts[n], counts[n + 1])


def underflow_fraction(
    tree: PyTree,
    *,
    scale: jax.typing.ArrayLike = 1.0,
    dtype: jax.typing.DTypeLike = jnp.float16,
) -> jax.Array:
    """Returns the share of entries that are flushed to zero in a dtype.

        underflow_fraction = count(x * scale rounds to 0) / count(x)

    where `x` runs over all finite entries other than 0.

    Guide: https://optax-lossscale.github.io/optax_lossscale/do_i_need_this.html

    Args:
      tree: Any pytree, usually gradients in float32.
      scale: `f32[]`, dimensionless, from `2**-126` to `2**126`. Entries are multiplied
        by it before they are rounded.
      dtype: A floating dtype. A result that is subnormal in it does not count as zero.

    Returns:
      `f32[]`, from 0 to 1. It is 0 if every entry is zero or nonfinite.

    Raises:
      TypeError: If `dtype` is not a floating dtype, or `scale` is not a number.
      ValueError: If `scale` is outside its range.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> grads = jnp.array([1e-3, 1e-9, 0.0])
      >>> ols.diagnostics.underflow_fraction(grads)
      Array(0.5, dtype=float32)
      >>> ols.diagnostics.underflow_fraction(grads, scale=2.0**15)
      Array(0., dtype=float32)

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, figures 2 and 3
      (https://arxiv.org/abs/1710.03740).
    """
    smallest = float(jnp.finfo(check_float_dtype("dtype", dtype)).smallest_subnormal)
    factor = _factor(scale)
    flushed = nonzero = jnp.zeros((), jnp.float32)
    for x in _real_arrays(tree):
        is_counted = jnp.isfinite(x) & (x != 0)
        # Half of the smallest number rounds to zero, because ties go to even.
        is_flushed = is_counted & (jnp.abs(x * factor.astype(x.dtype)) <= smallest / 2)
        # Counted in integers, because a sum of ones in float32 stops at 2**24.
        flushed += jnp.sum(is_flushed, dtype=jnp.int32).astype(jnp.float32)
        nonzero += jnp.sum(is_counted, dtype=jnp.int32).astype(jnp.float32)
    return flushed / jnp.maximum(nonzero, 1)


def headroom_bits(
    tree: PyTree,
    *,
    scale: jax.typing.ArrayLike = 1.0,
    dtype: jax.typing.DTypeLike = jnp.float16,
) -> jax.Array:
    """Returns by how many bits the entries can grow before one overflows in a dtype.

        headroom_bits = log2(finfo(dtype).max / (max(abs(tree)) * scale))

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/choosing_a_rule.html

    Args:
      tree: Any pytree, usually unscaled gradients. Under `autocast` the gradients of
        parameters are computed in float32, so look at those of activations, which can
        overflow.
      scale: `f32[]`, dimensionless, from `2**-126` to `2**126`. Entries are multiplied
        by it.
      dtype: A floating dtype.

    Returns:
      `f32[]`, bits. It is negative if an entry overflows, infinite if all entries are
      zero, and minus infinity if an entry is nonfinite.

    Raises:
      TypeError: If `dtype` is not a floating dtype, or `scale` is not a number.
      ValueError: If `scale` is outside its range.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> print(ols.diagnostics.headroom_bits(jnp.array([1.0, -2.0])).round(2))
      15.0
    """
    top = float(jnp.finfo(check_float_dtype("dtype", dtype)).max)
    return math.log2(top) - jnp.log2(max_magnitude(tree)) - jnp.log2(_factor(scale))


def suggest_init_scale(
    tree: PyTree,
    *,
    dtype: jax.typing.DTypeLike = jnp.float16,
    margin_bits: float = 2.0,
) -> jax.Array:
    """Suggests a first loss scale: the largest power of two that leaves a margin.

    Pass it to a rule: `dynamic_loss_scale(float(suggest_init_scale(grads)))`.

        suggest_init_scale = 2**floor(headroom_bits(tree, dtype=dtype) - margin_bits)

    Guide: https://optax-lossscale.github.io/optax_lossscale/guides/choosing_a_rule.html

    Args:
      tree: Unscaled gradients of a typical batch, in float32.
      dtype: The floating dtype of the backward pass.
      margin_bits: Bits left free below overflow, from 0 to 126. Leave some, because the
        gradients of activations may be larger than those of parameters. Under
        `autocast` at O1 they are usually smaller, and 6 to 10 more bits may fit.

    Returns:
      `f32[]`, dimensionless, from `2**-126` to `2**126`. It is `2**15`, the default of
      the rules, if all entries are zero, and NaN, which every rule refuses, if an entry
      is nonfinite. For tiny gradients it is above the `max_scale` of a rule, which is
      `2**24` unless you change it.

    Raises:
      TypeError: If `dtype` is not a floating dtype.
      ValueError: If `margin_bits` is outside its range.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> ols.diagnostics.suggest_init_scale(jnp.array([1e-3, -1e-5])) == 2.0**23
      Array(True, dtype=bool)
    """
    margin_bits = check_number("margin_bits", margin_bits, 0.0, 126.0)
    top = float(jnp.finfo(check_float_dtype("dtype", dtype)).max)
    largest = max_magnitude(tree)
    scale = power_of_quotient(top * 2.0**-margin_bits, largest)
    scale = jnp.clip(scale, 2.0**-126, 2.0**126)
    scale = jnp.where(largest == 0, 2.0**15, scale)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _real_arrays(tree: PyTree) -> list[jax.Array]:
    """The floating leaves in float32 or wider, and both parts of complex ones."""
    leaves = floating_leaves(tree).values()
    return [part for leaf in leaves for part in real_parts(widen(leaf))]


def _factor(scale: jax.typing.ArrayLike) -> jax.Array:
    """A scale as an array; the value of a traced one is not checked."""
    is_traced = isinstance(scale, jax.core.Tracer)
    return jnp.float32(scale if is_traced else check_scale("scale", scale))
