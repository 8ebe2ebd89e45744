"""What a call of `autocast` asks for, and the arguments that O2 and O3 cast.

| level | meaning |
|---|---|
| O0 | the function itself |
| O1 | products run low |
| O2 | O1, traced with low arguments; running statistics and norms stay as they are |
| O3 | O1, traced with low arguments; running statistics stay as they are |
"""

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.typing import DTypeLike

from optax_lossscale._autocast.jax_internals import KERNELS
from optax_lossscale._autocast.markers import reason_of_marker
from optax_lossscale._autocast.programs import line_in_code, scope_of
from optax_lossscale._ground.checks import check_float_dtype
from optax_lossscale._ground.nnx import flax_nnx
from optax_lossscale._ground.normalization import in_normalization
from optax_lossscale._ground.tree import path_name
from optax_lossscale._ground.types import PyTree

_HIGH = "`high`"  # The reason why a product stays as written.
LEVELS = ("O0", "O1", "O2", "O3")
_LINE = re.compile(r":\d+ \(.*\)$")  # As in "model.py:12 (loss_fn)".


class Settings(NamedTuple):
    """How `autocast` rewrites a program.

    `scope` and `reason` change on the way into a program, by `inside`; all others are
    what the caller gave.

    Attributes:
      dtype: The dtype to which the operands of products are rounded.
      level: `"O0"` to `"O3"`.
      high: Scopes and lines whose products stay as written; a scope ends with a slash.
      recompute: Whether loops compute cheap operations again in their backward pass.
      scope: The names of the scopes around the program, if `high` holds any.
      reason: Why all products stay as written, as in `full_precision`, or None.
    """

    dtype: jnp.dtype
    level: str
    high: tuple[str, ...]
    recompute: bool
    scope: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def traced_dtype(self) -> jnp.dtype | None:
        """The dtype of functions in `low_precision` in derivative rules, or None."""
        return self.dtype if self.reason in (None, _HIGH) else None

    @property
    def casts_arguments(self) -> bool:
        """Whether the function is traced with low arguments."""
        return self.level in ("O2", "O3")

    def inside(self, equation: core.JaxprEqn) -> "Settings":
        """The settings for an equation, and for the programs that it holds."""
        if self.reason is not None:
            return self
        scope = (*self.scope, *scope_of(equation)) if self.high else ()
        inside, reason = self._replace(scope=scope), reason_of_marker(equation)
        if reason is None and equation.primitive.name in KERNELS:
            reason = "in a kernel"
        if reason is None and inside._is_high(equation):
            reason = _HIGH
        return inside._replace(reason=reason)

    def _is_high(self, equation: core.JaxprEqn) -> bool:
        """Whether an equation is in one of the scopes or lines of `high`."""
        path = "/".join(self.scope) + "/"
        is_in_scope = any(map(path.startswith, self.high))
        return is_in_scope or (self._has_lines and line_in_code(equation) in self.high)

    @property
    def _has_lines(self) -> bool:
        """Whether `high` names a line. To find that of an equation takes long."""
        return not all(name.endswith("/") for name in self.high)

    def check_high(
        self, scopes: set[tuple[str, ...]], equations: Iterable[core.JaxprEqn]
    ) -> None:
        """Refuses a name without products.

        Args:
          scopes: Those of all products.
          equations: All products, and the equations that hold them.
        """
        paths = {path[: i + 1] for path in scopes for i in range(len(path))}
        names = {"/".join(path) + "/" for path in paths}
        lines = {*map(line_in_code, equations)} if self._has_lines else set()
        known = ", ".join(sorted(names)) or "none"
        for name in self.high:
            if name not in names | lines:
                raise ValueError(
                    "`high` must hold scopes or lines of matrix products or "
                    "convolutions, because nothing else runs low, got "
                    f"{name.strip('/')!r}.{_did_you_mean(name, names)} The scopes with "
                    f"products are: {known}. (`autocast_report` prints all products "
                    "with their lines.)"
                )


def make_settings(
    dtype: DTypeLike, level: str, high: Sequence[str], recompute: bool
) -> Settings:
    """Checks the arguments of `autocast`."""
    if level not in LEVELS:
        raise ValueError(
            f"`level` must be one of {', '.join(LEVELS)}, got {level!r}."
            f"{_did_you_mean(str(level).upper().replace('0', 'O', 1), LEVELS)}"
        )
    if str(dtype) in LEVELS:
        raise TypeError(
            f"`dtype` must be a floating dtype, got {dtype!r}. (Did you mean "
            f"`level={dtype!r}`?)"
        )
    dtype = jnp.dtype(check_float_dtype("dtype", dtype))
    if dtype not in (jnp.float16, jnp.bfloat16):
        hint = " (Did you mean float16?)" if dtype == jnp.float32 else ""
        raise ValueError(f"`dtype` must be float16 or bfloat16, got {dtype}.{hint}")
    return Settings(dtype, level, _names_from(high), bool(recompute))


def _names_from(high: Sequence[str]) -> tuple[str, ...]:
    if isinstance(high, str) or not isinstance(high, Iterable):
        hint = f" (Did you mean `high=[{high!r}]`?)" if isinstance(high, str) else ""
        raise TypeError(f"`high` must be a sequence of scopes, got {high!r}.{hint}")
    high = tuple(high)
    for name in high:
        if not isinstance(name, str) or not name.strip("/"):
            raise ValueError(
                f"`high` must hold scopes such as 'Net/Dense_0/', got {name!r}."
            )
    return tuple(x if _LINE.search(x) else x.strip("/") + "/" for x in high)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    # A scope is known by its whole path; its last names may have been given alone.
    near = sorted(path for path in known if path.endswith("/" + name))[:3]
    near = near or difflib.get_close_matches(name, sorted(known))
    return f" (Did you mean {' or '.join(map(repr, near))}?)" if near else ""


def are_kept(tree: PyTree, settings: Settings) -> list[bool]:
    """For each leaf of the arguments, whether O2 or O3 leaves it as it is.

    These are running statistics, and at O2 the leaves of normalization layers.
    """
    flags = _are_statistics(tree)
    if settings.level == "O2":
        flags = [a or b for a, b in zip(flags, in_normalization(tree), strict=True)]
    return flags


def _are_statistics(tree: PyTree) -> list[bool]:
    """For each leaf, whether it belongs to the running statistics of a model."""
    nnx, equinox = flax_nnx(), sys.modules.get("equinox")
    kinds: tuple[type, ...] = () if nnx is None else (nnx.BatchStat,)
    kinds += () if equinox is None else (equinox.nn.State,)

    def is_state(node: object) -> bool:
        return isinstance(node, kinds)

    flags = []
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_state)[0]:
        in_collection = "batch_stats" in path_name(path).split("/")
        flags += [is_state(node) or in_collection] * len(jax.tree.leaves(node))
    return flags
