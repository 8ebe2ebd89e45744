"""Look for overflow and underflow in any pytree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._ground.checks import (
    check_concrete,
    check_float_dtype,
    check_number,
)
from optax_lossscale._ground.tree import (
    check_arrays,
    floating_leaves,
    is_floating,
    real_parts,
    widen,
)
from optax_lossscale._ground.types import PyTree
from optax_lossscale.diagnostics._bits import (
    Split,
    exponent_of_quotient,
    largest_of,
    power_of_two,
    split,
    split_number,
)


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

    Args:
      tree: Any pytree, or a report that `nonfinite_report` returned. Its arrays must be
        concrete.
      file: The text file to print to. None means standard output.

    Raises:
      ValueError: If `tree` is a report of several ensemble members, made by `vmap` of
        `nonfinite_report`.
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
    if any(jnp.ndim(of_leaf["nan"]) for of_leaf in report.values()):
        raise ValueError(
            "`tree` must be the report of one member, got a report made by `vmap`. "
            "(Select one member: `jax.tree.map(lambda x: x[0], report)`.)"
        )
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
    for entry in _splits(tree):
        index = jnp.clip(entry.exponent, min_exponent, max_exponent) - min_exponent
        index = jnp.where(entry.is_zero, n, index)
        index = jnp.where(entry.is_finite, index, n + 1)
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

    Args:
      tree: Any pytree, usually gradients in float32.
      scale: `f32[]`, dimensionless, positive. Entries are multiplied by it before they
        are rounded.
      dtype: A floating dtype. A result that is subnormal in it does not count as zero.

    Returns:
      `f32[]`, from 0 to 1. It is 0 if every entry is zero or nonfinite.

    Raises:
      TypeError: If `dtype` is not a floating dtype.
      ValueError: If `scale` is not a positive number.

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
    # Half of the smallest subnormal number rounds to zero (ties go to even), and so
    # does every smaller number.
    smallest = jnp.finfo(check_float_dtype("dtype", dtype)).smallest_subnormal
    half_exponent = split_number(float(smallest)).exponent - 1
    factor = split(_check_positive("scale", scale))
    flushed = nonzero = jnp.zeros((), jnp.float32)
    for entry in _splits(tree):
        mantissa = entry.mantissa * factor.mantissa.astype(entry.mantissa.dtype)
        exponent = entry.exponent + factor.exponent - half_exponent
        # The scaled entry is `mantissa * 2**exponent` times half of the smallest
        # subnormal number. The mantissa is from 1 to 4, so clipping the exponent to
        # [-2, 1] cannot take the product to the other side of 1.
        power = power_of_two(jnp.clip(exponent, -2, 1)).astype(mantissa.dtype)
        is_flushed = mantissa * power <= 1
        is_counted = entry.is_finite & ~entry.is_zero
        # Counted in integers, because a sum of ones in float32 stops at 2**24.
        flushed += jnp.sum(is_counted & is_flushed, dtype=jnp.int32).astype(jnp.float32)
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

    Args:
      tree: Any pytree, usually unscaled gradients. Under `autocast` the gradients of
        parameters are computed in float32, so look at those of activations, which can
        overflow.
      scale: `f32[]`, dimensionless, positive. Entries are multiplied by it.
      dtype: A floating dtype.

    Returns:
      `f32[]`, bits. It is negative if an entry overflows, infinite if all entries are
      zero, and minus infinity if an entry is nonfinite.

    Raises:
      TypeError: If `dtype` is not a floating dtype.
      ValueError: If `scale` is not a positive number.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> print(ols.diagnostics.headroom_bits(jnp.array([1.0, -2.0])).round(2))
      15.0
    """
    top = largest_of(_splits(tree))
    largest = split_number(float(jnp.finfo(check_float_dtype("dtype", dtype)).max))
    factor = split(_check_positive("scale", scale))
    exponent = largest.exponent - top.exponent - factor.exponent
    mantissa = largest.mantissa / (top.mantissa * factor.mantissa)
    bits = exponent.astype(jnp.float32) + jnp.log2(mantissa)
    bits = jnp.where(top.is_zero, jnp.inf, bits)
    return jnp.where(top.is_finite, bits, -jnp.inf)


def suggest_init_scale(
    tree: PyTree,
    *,
    dtype: jax.typing.DTypeLike = jnp.float16,
    margin_bits: float = 2.0,
) -> jax.Array:
    """Suggests a first loss scale: the largest power of two that leaves a margin.

    Pass it to a rule: `dynamic_loss_scale(float(suggest_init_scale(grads)))`.

        suggest_init_scale = 2**floor(headroom_bits(tree, dtype=dtype) - margin_bits)

    Args:
      tree: Unscaled gradients of a typical batch, in float32.
      dtype: The floating dtype of the backward pass.
      margin_bits: Bits left free below overflow, from 0 to 126. Leave some, because the
        gradients of activations may be larger than those of parameters.

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
    top = largest_of(_splits(tree))
    largest = float(jnp.finfo(check_float_dtype("dtype", dtype)).max)
    exponent = exponent_of_quotient(split_number(largest * 2.0**-margin_bits), top)
    scale = power_of_two(jnp.clip(exponent, -126, 126))
    scale = jnp.where(top.is_zero, 2.0**15, scale)
    return jnp.where(top.is_finite, scale, jnp.nan)


def _splits(tree: PyTree) -> Iterator[Split]:
    """Splits every floating leaf; the two parts of a complex leaf are split apart."""
    leaves = jax.tree.leaves(tree)
    check_arrays(leaves)
    for leaf in leaves:
        if is_floating(leaf):
            yield from map(split, real_parts(jnp.asarray(leaf)))


def _check_positive(name: str, scale: jax.typing.ArrayLike) -> jax.Array:
    """Returns one factor as an array; the value of a traced one is not checked."""
    if jnp.shape(scale) != ():
        raise ValueError(f"`{name}` must be one number, got shape {jnp.shape(scale)}.")
    factor = jnp.asarray(scale, jnp.float32)
    if not isinstance(factor, jax.core.Tracer) and not 0 < float(factor) < jnp.inf:
        raise ValueError(
            f"`{name}` must be positive and finite in float32, got {scale}."
        )
    return factor
