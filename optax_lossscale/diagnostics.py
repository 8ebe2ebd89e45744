"""What overflowed, what underflowed, and how much room there is: looks at any pytree.

All but the printing runs under `jit`. Every floating leaf is read, of any shape; both
parts of a complex number count as entries of their own; other leaves are passed over.
Exponents are read from the bits, so that subnormal numbers count for what they are.

    >>> import jax.numpy as jnp, optax_lossscale as ols
    >>> print(ols.diagnostics.headroom_bits(jnp.array([1.0, 255.875])))
    8.0
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
from jax import lax

from optax_lossscale._bits import (
    Split,
    exponent_of_quotient,
    largest_of,
    power_of_two,
    split,
    split_number,
)
from optax_lossscale._checks import (
    check_float_dtype,
    check_number,
    check_positive,
)
from optax_lossscale._tree import floating_leaves, is_floating, real_parts, widen
from optax_lossscale._types import PyTree


class ExponentHistogram(NamedTuple):
    """How many entries have which exponent, `floor(log2(abs(x)))`.

    Attributes:
      exponents: `i32[n]`, in order. The first and the last stand for all beyond.
      counts: `i32[n]`, entries.
      zero_count: `i32[]`, entries that are zero.
      nonfinite_count: `i32[]`, entries that are NaN or infinite.
    """

    exponents: jax.Array
    counts: jax.Array
    zero_count: jax.Array
    nonfinite_count: jax.Array


def nonfinite_report(tree: PyTree) -> dict[str, dict[str, Any]]:
    """Counts NaN and infinities in every floating leaf.

    Of the gradients of a batch that was skipped, or of a model's intermediate values.

    Args:
      tree: Any pytree.

    Returns:
      A dict from the path of each floating leaf, such as `"layer/kernel"`, to a dict of
      `nan` `i32[]`, `inf` `i32[]` and `size` (an `int`), all in entries. An entry
      of a complex leaf is a NaN if one of its parts is.

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
    """Prints a line for every leaf that holds a NaN or an infinity, worst first.

    Args:
      tree: Any pytree, or what `nonfinite_report` returned. Concrete arrays: it is not
        for use inside `jit`.
      file: Where to; None is standard output.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> tree = {"w": jnp.array([1.0, jnp.inf, jnp.nan]), "b": jnp.ones(2)}
      >>> ols.diagnostics.print_nonfinite_report(tree)
      1 of 2 floating leaves hold nonfinite entries
      w: 1 nan, 1 inf of 3
    """
    is_report = isinstance(tree, dict) and all(
        isinstance(of_leaf, dict) and set(of_leaf) == {"nan", "inf", "size"}
        for of_leaf in tree.values()
    )
    report = jax.device_get(tree if is_report and tree else nonfinite_report(tree))
    if any(jnp.ndim(of_leaf["nan"]) for of_leaf in report.values()):
        raise ValueError("`tree` must be the report of one member, got one by `vmap`.")
    shares = {p: (r["nan"] + r["inf"]) / max(r["size"], 1) for p, r in report.items()}
    bad = sorted((p for p in report if shares[p]), key=lambda p: -shares[p])
    lines = [f"{len(bad)} of {len(report)} floating leaves hold nonfinite entries"]
    for path in bad:
        nan, inf, size = (report[path][kind] for kind in ("nan", "inf", "size"))
        lines.append(f"{path or 'the array'}: {nan} nan, {inf} inf of {size}")
    print("\n".join(lines), file=sys.stdout if file is None else file)


def exponent_histogram(
    tree: PyTree, *, min_exponent: int = -40, max_exponent: int = 20
) -> ExponentHistogram:
    """How many entries have `floor(log2(abs(x))) == e`, for each `e`.

    Args:
      tree: Any pytree.
      min_exponent: The lowest exponent; it also counts what lies below.
      max_exponent: The highest; it also counts what lies above.

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
    bins = jnp.arange(n + 2, dtype=jnp.int32)  # The last two: zero, nonfinite.
    counts = jnp.zeros_like(bins)
    for entry in _splits(tree):
        bin_of = jnp.clip(entry.exponent, min_exponent, max_exponent) - min_exponent
        bin_of = jnp.where(entry.is_zero, n, bin_of)
        bin_of = jnp.where(entry.is_finite, bin_of, n + 1)
        # A read for each bin: a scatter would gather what is sharded.
        counts += lax.map(lambda b, x=bin_of: jnp.sum(x == b, dtype=jnp.int32), bins)
    exponents = jnp.arange(min_exponent, max_exponent + 1, dtype=jnp.int32)
    return ExponentHistogram(exponents, counts[:n], counts[n], counts[n + 1])


def underflow_fraction(
    tree: PyTree,
    *,
    scale: jax.typing.ArrayLike = 1.0,
    dtype: jax.typing.DTypeLike = jnp.float16,
) -> jax.Array:
    """The share of entries that are flushed to zero in a dtype.

        underflow_fraction = count(x * scale rounds to 0) / count(x is finite and not 0)

    Args:
      tree: Any pytree, usually gradients in float32.
      scale: `f32[]`, positive. What entries are multiplied by before they are rounded.
      dtype: A floating dtype. Its subnormal numbers are not zero.

    Returns:
      `f32[]`, from 0 to 1; 0 where no entry counts.

    Raises:
      TypeError: If `dtype` is not a floating dtype.
      ValueError: If `scale` is no positive number.

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
    # Half of the smallest number, and everything below it, rounds to zero (to even).
    smallest = jnp.finfo(check_float_dtype("dtype", dtype)).smallest_subnormal
    half = split_number(float(smallest)).exponent - 1
    factor = split(check_positive("scale", scale))
    flushed = nonzero = jnp.zeros((), jnp.float32)
    for entry in _splits(tree):
        mantissa = entry.mantissa * factor.mantissa.astype(entry.mantissa.dtype)
        exponent = entry.exponent + factor.exponent - half
        # The product is `mantissa * 2**exponent` halves. Its mantissa is from 1 to 4,
        # so no exponent beyond -2 and 1 changes which side of one half it is on.
        is_flushed = jnp.ldexp(mantissa, jnp.clip(exponent, -2, 1)) <= 1
        counts = entry.is_finite & ~entry.is_zero
        # Counted in integers, because a sum of ones in float32 stops at 2**24.
        flushed += jnp.sum(counts & is_flushed, dtype=jnp.int32).astype(jnp.float32)
        nonzero += jnp.sum(counts, dtype=jnp.int32).astype(jnp.float32)
    return flushed / jnp.maximum(nonzero, 1)


def headroom_bits(
    tree: PyTree,
    *,
    scale: jax.typing.ArrayLike = 1.0,
    dtype: jax.typing.DTypeLike = jnp.float16,
) -> jax.Array:
    """How many bits the entries could grow before one overflows in a dtype.

        headroom_bits = log2(finfo(dtype).max / (max(abs(tree)) * scale))

    Args:
      tree: Any pytree, usually unscaled gradients.
      scale: `f32[]`, positive. What entries are multiplied by.
      dtype: A floating dtype.

    Returns:
      `f32[]`, bits; negative where something would overflow, infinite where all is
      zero, minus infinity where something is nonfinite.

    Raises:
      TypeError: If `dtype` is not a floating dtype.
      ValueError: If `scale` is no positive number.

    Example:
      >>> import jax.numpy as jnp, optax_lossscale as ols
      >>> print(ols.diagnostics.headroom_bits(jnp.array([1.0, -2.0])).round(2))
      15.0
    """
    top = largest_of(_splits(tree))
    room = split_number(float(jnp.finfo(check_float_dtype("dtype", dtype)).max))
    factor = split(check_positive("scale", scale))
    whole = room.exponent - top.exponent - factor.exponent
    mantissa = room.mantissa / (top.mantissa * factor.mantissa)
    bits = whole.astype(jnp.float32) + jnp.log2(mantissa)
    bits = jnp.where(top.is_zero, jnp.inf, bits)
    return jnp.where(top.is_finite, bits, -jnp.inf)


def suggest_init_scale(
    tree: PyTree,
    *,
    dtype: jax.typing.DTypeLike = jnp.float16,
    margin_bits: float = 2.0,
) -> jax.Array:
    """The largest power of two that leaves a margin before overflow.

        suggest_init_scale = 2**floor(headroom_bits(tree, dtype=dtype) - margin_bits)

    Args:
      tree: Unscaled gradients of a typical batch, in float32.
      dtype: The floating dtype of the backward pass.
      margin_bits: Bits left free, from 0 to 126. Gradients of activations may be larger
        than those of parameters.

    Returns:
      `f32[]`, dimensionless, from `2**-126` to `2**126`; `2**15`, the default of the
      rules, where all is zero; NaN, which every rule refuses, where something is
      nonfinite.

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
    """Every floating leaf, split; both parts of a complex one."""
    for leaf in jax.tree.leaves(tree):
        if is_floating(leaf):
            yield from map(split, real_parts(jnp.asarray(leaf)))
