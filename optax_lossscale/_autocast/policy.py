"""The policy of `autocast`: three lists of operations, and levels that select them.

| list | computes in | holds at O1 |
|---|---|---|
| low | the low dtype | `LOW`: matrix products and convolutions |
| full | float32 | `SENSITIVE`: exponentials, logarithms, powers; and `SUMS` |
| widest | its widest operand's dtype | `WIDEST`: other elementwise operations, moves |
| | as it was written | all others, such as decompositions, FFTs and kernels |

At O2 and O3 the full list holds only `SUMS` and `POWERS`, whose results overflow early.

Names are those of JAX primitives. Losses, norms and softmax consist of listed
operations, so they need no entries of their own.
"""

import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from optax_lossscale._jaxprs import scope_of


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


LOW = words("conv_general_dilated dot_general ragged_dot_general")
SENSITIVE = words(
    "acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt cosh digamma erf_inv "
    "exp exp2 expm1 igamma igammac integer_pow lgamma log log1p polygamma pow "
    "regularized_incomplete_beta rsqrt sinh square tan zeta"
)
SUMS = words(
    "cumlogsumexp cumprod cumsum reduce_prod reduce_sum reduce_window_sum scatter-add "
    "scatter-mul select_and_scatter_add"
)
POWERS = words("integer_pow pow square")
# Operations that move values without changing them.
MOVES = words(
    "all_gather all_to_all broadcast_in_dim concatenate copy dynamic_slice "
    "dynamic_update_slice gather name optimization_barrier pad ppermute pvary reshape "
    "reshard rev select_n sharding_constraint slice split squeeze stack stop_gradient "
    "tile transpose unstack"
)
# Operations that commute with rounding: rounding their operands or their results gives
# the same.
COMMUTES = MOVES | words(
    "abs clamp cummax cummin max min neg reduce_max reduce_min reduce_window_max "
    "reduce_window_min"
)
WIDEST = COMMUTES | words(
    "add add_any argmax argmin atan2 ceil cos div eq erf erfc floor ge gt is_finite le "
    "logistic lt mul ne rem round scatter scatter-max scatter-min "
    "select_and_gather_add sign sin sort sqrt sub tanh top_k"
)
LISTED = LOW | SENSITIVE | SUMS | WIDEST
LEVELS = ("O0", "O1", "O2", "O3")

# Operations of other libraries or of `jax.numpy`, and a primitive that they consist of.
MADE_OF = {
    "bmm": "dot_general",
    "conv": "conv_general_dilated",
    "einsum": "dot_general",
    "linear": "dot_general",
    "matmul": "dot_general",
    "mean": "reduce_sum",
    "norm": "reduce_sum",
    "ragged_dot": "ragged_dot_general",
    "softmax": "exp",
    "sum": "reduce_sum",
}


class UnknownScopeError(ValueError):
    """A scope in which a function has no operation."""


class Policy(NamedTuple):
    """The lists at one level.

    Attributes:
      dtype: The low dtype.
      level: `"O0"` to `"O3"`.
      low: Names of operations that compute in the low dtype.
      full: Names of operations that compute in float32.
      widest: Names of operations that compute in their widest operand's dtype.
      scopes: Scopes whose operations stay in float32, each as the names in its path.
      has_float8: Whether products of parameters take float8 operands.
      keep: Says of a scope whether its products do not; None if they all do.
      path: The names of the scope of an operation, for `keep`.
    """

    dtype: Any
    level: str
    low: frozenset[str]
    full: frozenset[str]
    widest: frozenset[str]
    scopes: tuple[tuple[str, ...], ...] = ()
    has_float8: bool = False
    keep: Callable[[str], bool] | None = None
    path: tuple[str, ...] = ()

    @property
    def lowers_everything(self) -> bool:
        """Whether arguments and elementwise operations are in the low dtype too."""
        return self.level in ("O2", "O3")

    def products_only(self) -> "Policy":
        """The policy under which only the low list is low; the rest is float32."""
        return self._replace(widest=frozenset())

    def is_in_scope(self, equation: Any) -> bool:
        """Whether an operation is in a scope that stays in float32."""
        if not self.scopes:
            return False
        path = scope_of(equation)
        return any(path[: len(scope)] == scope for scope in self.scopes)

    @property
    def scope(self) -> str:
        """The scope of an operation, such as `"Net/Dense_0"`, for `keep`."""
        return "/".join(self.path)

    @property
    def keeps_products(self) -> bool:
        """Whether `keep` holds the products of this scope back from float8."""
        answer = False if self.keep is None else self.keep(self.scope)
        if not isinstance(answer, bool | np.bool_):
            raise TypeError(f"`keep` must return True or False, got {answer!r}.")
        return bool(answer)

    @property
    def reads_scopes(self) -> bool:
        """Whether it matters in which scope an operation is."""
        return bool(self.scopes) or self.keep is not None

    def check_scopes(self, paths: Iterable[tuple[str, ...]]) -> None:
        """Refuses a scope that no operation of a program is in."""
        known = set(paths)
        for scope in self.scopes:
            if not any(path[: len(scope)] == scope for path in known):
                names = {
                    "/".join(path[:size]) + "/"
                    for path in known
                    for size in range(1, len(path) + 1)
                }
                name = "/".join(scope) + "/"
                outermost = sorted({name.split("/")[0] + "/" for name in names})
                raise UnknownScopeError(
                    f"`high` must hold scopes of the function, got {name!r}, in which "
                    f"it has no operation.{_did_you_mean(name, names)} Its outermost "
                    f"scopes are {', '.join(outermost) or 'none'}."
                )

    def inside(self, equation: Any) -> "Policy":
        """The policy for an operation, and for programs that it holds."""
        if not self.reads_scopes:
            return self
        path = scope_of(equation)
        scopes = (scope for scope in self.scopes if scope[: len(path)] == path)
        return self._replace(
            scopes=tuple(scope[len(path) :] for scope in scopes),
            path=(*self.path, *path) if self.keep else (),
        )


def make_policy(
    dtype: Any,
    level: str,
    low: Sequence[str],
    high: Sequence[str],
    also: Any,
    keep: Callable[[str], bool] | None,
    nested: frozenset[str],
) -> Policy:
    """The lists at a level, with the caller's names moved to the low or the full list.

    Operations whose names are in `nested` hold programs and cannot be cast themselves.
    """
    if level not in LEVELS:
        raise ValueError(
            f"`level` must be one of {', '.join(LEVELS)}, got {level!r}."
            f"{_did_you_mean(str(level).upper().replace('0', 'O', 1), LEVELS)}"
        )
    to_low = _check_names("low", low, nested)
    names = _check_sequence("high", high)
    scopes = [name for name in names if str(name).endswith("/")]
    to_high = _check_names("high", [x for x in names if x not in scopes], nested)
    if to_low & to_high:
        raise ValueError(
            f"`low` and `high` must not share names, got {sorted(to_low & to_high)}."
        )
    dtype, has_float8 = _check_dtypes(dtype, also)
    if keep is not None and not callable(keep):
        raise TypeError(f"`keep` must be a function of a scope, got {keep!r}.")
    if keep is not None and not has_float8:
        raise ValueError(f"`keep` goes with float8 only, got it with {dtype}.")
    full = SUMS | (SENSITIVE if level == "O1" else POWERS)
    return Policy(
        dtype=dtype,
        level=level,
        low=(LOW | to_low) - to_high,
        full=(full | to_high) - to_low,
        widest=(WIDEST | (SENSITIVE - full)) - to_low - to_high,
        scopes=tuple(tuple(scope[:-1].split("/")) for scope in scopes),
        has_float8=has_float8,
        keep=keep and functools.partial(keep),  # Which can be hashed in any case.
    )


def _check_dtypes(dtype: Any, also: Any) -> tuple[Any, bool]:
    """The low dtype, and whether products of parameters take float8 operands."""
    dtype = _check_floating("dtype", dtype)
    has_float8 = dtype == jnp.float8_e4m3fn
    if dtype.itemsize == 1 and not has_float8:
        raise ValueError(
            f"`dtype` must be float8_e4m3fn, float16 or bfloat16, got {dtype}. (Values "
            "are in float8_e4m3fn; cotangents then are in float8_e5m2.)"
        )
    if also is not None and not has_float8:
        raise ValueError(
            f"`also` goes with float8 only, got {also!r} with {dtype}. (It is the "
            "dtype of what is not computed in float8.)"
        )
    if has_float8:
        dtype = _check_floating("also", jnp.bfloat16 if also is None else also)
        if dtype not in (jnp.bfloat16, jnp.float16):
            raise ValueError(f"`also` must be bfloat16 or float16, got {dtype}.")
    return _check_low_dtype(dtype), has_float8


def _check_floating(setting: str, dtype: Any) -> Any:
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`{setting}` must be a floating dtype, got {dtype!r}.")
    return jnp.dtype(dtype)


def _check_low_dtype(dtype: Any) -> Any:
    if dtype.itemsize != 2:
        raise ValueError(
            f"`dtype` must be narrower than float32, got {dtype}. (Did you mean "
            "float16?)"
        )
    return dtype


def _check_names(
    setting: str, names: Sequence[str], nested: frozenset[str]
) -> frozenset[str]:
    names = _check_sequence(setting, names)
    known = {
        primitive.name
        for primitive in vars(core.primitives).values()
        if isinstance(primitive, core.Primitive)
    }
    known = (known | LISTED) - nested
    for name in names:
        if name not in known:
            hint = _did_you_mean(name, known)
            if setting == "high" and "/" in str(name):
                hint = f" (Did you mean the scope '{name}/'?)"
            raise ValueError(
                f"`{setting}` must hold names of JAX primitives, got {name!r}.{hint}"
            )
    return frozenset(names)


def _check_sequence(setting: str, names: Sequence[str]) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"`{setting}` must be a sequence of names, got {names!r}.")
    return list(names)


def _did_you_mean(name: str, known: Sequence[str] | set[str]) -> str:
    near = [MADE_OF[name]] if name in MADE_OF else []
    near = near or difflib.get_close_matches(str(name), sorted(known), 1, 0.76)
    return f" (Did you mean {near[0]!r}?)" if near else ""
