"""Which operation computes in what: the three lists of `autocast`, and its levels.

| list | computes in | holds |
|---|---|---|
| `LOW` | the low dtype | products of matrices, convolutions |
| `FULL` | float32 | `SENSITIVE`: exponentials, logarithms, powers; `SUMS` |
| `WIDEST` | the widest of its operands | other elementwise operations, comparisons |
| | as it was written | all others, such as decompositions, FFTs and kernels |

Losses, norms and softmax are made of these, and so need no entries of their own.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOW = _words("conv_general_dilated dot_general ragged_dot ragged_dot_general")
SENSITIVE = _words(
    "acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt cosh digamma erf_inv "
    "exp exp2 expm1 igamma igammac integer_pow lgamma log log1p polygamma pow "
    "regularized_incomplete_beta rsqrt sinh square tan zeta"
)
SUMS = _words(
    "cumlogsumexp cumprod cumsum reduce_prod reduce_sum reduce_window_sum scatter-add "
    "scatter-mul select_and_scatter_add"
)
POWERS = _words("integer_pow square")
# What moves values, and does not change them.
MOVES = _words(
    "all_gather all_to_all broadcast_in_dim concatenate copy copy_p dynamic_slice "
    "dynamic_update_slice expand_dims gather name optimization_barrier pad pcast "
    "ppermute pvary reshape rev select_n sharding_constraint slice split squeeze "
    "stop_gradient transpose"
)
# What commutes with rounding: rounded before or after, the result is the same.
COMMUTES = MOVES | _words(
    "abs clamp cummax cummin max min neg reduce_max reduce_min reduce_window_max "
    "reduce_window_min"
)
WIDEST = COMMUTES | _words(
    "add add_any argmax argmin atan2 ceil cos div eq erf erfc floor ge gt is_finite le "
    "logistic lt mul ne rem round scatter scatter-max scatter-min "
    "select_and_gather_add sign sin sort sqrt sub tanh top_k"
)
# Programs are not cast; what they are made of is.
HOLD_PROGRAMS = _words(
    "call checkpoint closed_call cond custom_jvp_call custom_vjp_call eval_jaxpr jit "
    "pjit remat2 scan shard_map while"
)
LEVELS = ("O0", "O1", "O2", "O3")

# Some that have no primitive of their own, and what they are made of.
MADE_OF = {
    "bmm": "dot_general",
    "conv": "conv_general_dilated",
    "einsum": "dot_general",
    "linear": "dot_general",
    "matmul": "dot_general",
    "mean": "reduce_sum",
    "norm": "reduce_sum",
    "softmax": "exp",
    "sum": "reduce_sum",
}


class Policy(NamedTuple):
    """What `autocast` was asked for."""

    dtype: Any
    level: str
    low: frozenset[str]
    full: frozenset[str]
    widest: frozenset[str]

    @property
    def is_half(self) -> bool:
        """Whether parameters, and what is no product, are in the low dtype too."""
        return self.level in ("O2", "O3")

    def without_narrowing(self) -> "Policy":
        """The same, for what stays in float32, but for products."""
        return self._replace(widest=frozenset())


def make_policy(
    dtype: Any, level: str, low: Sequence[str], high: Sequence[str]
) -> Policy:
    """The lists at a level, with the caller's own names in the place they asked for."""
    if level not in LEVELS:
        raise ValueError(
            f"`level` must be one of {', '.join(LEVELS)}, got {level!r}."
            f"{_did_you_mean(str(level).upper().replace('0', 'O', 1), LEVELS)}"
        )
    to_low, to_high = _names("low", low), _names("high", high)
    if to_low & to_high:
        raise ValueError(
            f"`low` and `high` must not share names, got {sorted(to_low & to_high)}."
        )
    full = SUMS | (SENSITIVE if level == "O1" else POWERS)
    return Policy(
        dtype=_low_dtype(dtype),
        level=level,
        low=(LOW | to_low) - to_high,
        full=(full | to_high) - to_low,
        widest=(WIDEST | (SENSITIVE - full)) - to_low - to_high,
    )


def _low_dtype(dtype: Any) -> Any:
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`dtype` must be a floating dtype, got {dtype!r}.")
    dtype = jnp.dtype(dtype)
    if dtype.itemsize == 1:
        raise ValueError(
            f"`dtype` must be float16 or bfloat16, got {dtype}: in 8 bits each operand "
            "needs its own scale. (Autocast to float16, and give the layers that "
            "shall be float8 Flax's `nn.Fp8DirectDotGeneralOp`.)"
        )
    if dtype.itemsize != 2:
        raise ValueError(
            f"`dtype` must be narrower than float32, got {dtype}. (Did you mean "
            "float16?)"
        )
    return dtype


def _names(setting: str, names: Sequence[str]) -> frozenset[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"`{setting}` must be a sequence of names, got {names!r}.")
    known = {
        primitive.name
        for primitive in vars(core.primitives).values()
        if isinstance(primitive, core.Primitive)
    }
    known = (known | LOW | SENSITIVE | SUMS | WIDEST) - HOLD_PROGRAMS
    for name in names:
        if name not in known:
            raise ValueError(
                f"`{setting}` must hold names of JAX primitives, got {name!r}."
                f"{_did_you_mean(name, known)}"
            )
    return frozenset(names)


def _did_you_mean(name: str, known: Sequence[str] | set[str]) -> str:
    near = [MADE_OF[name]] if name in MADE_OF else []
    near = near or difflib.get_close_matches(str(name), sorted(known), 1, 0.76)
    return f" (Did you mean {near[0]!r}?)" if near else ""
