"""What the package needs of JAX and Flax that they do not promise to keep.

Names that are private or differ between versions stand here with the reason, and
`tests/autocast/test_jax_internals.py` says what to do when one is gone. Some parameters
of primitives are read where they are used: of a jitted call in
`_scaling/early_masks.py`, of products in `_autocast/`. The scopes of `flax.linen` are
changed in `_autocast/modules.py`.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import checkify
from jax.extend import core, linear_util
from jax.extend.core import primitives
from jax.extend.core.primitives import dot_general_p


def _private(module: str, name: str) -> Any:
    """What a module of JAX may lose in any version."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "`autocast` and `diagnostics` of optax_lossscale need "
            f"`{module}.{name}`, which JAX {jax.__version__} does not have. (JAX 0.7.2 "
            "to 0.12 have it. Loss scaling does not need it.)"
        ) from error


# `jax.extend.core.primitives` has none of these, or not in JAX 0.7.
remat_p = _private("jax._src.ad_checkpoint", "remat_p")
pvary_p = _private("jax._src.core", "pvary_p")
ragged_dot_general_p = _private("jax._src.lax.lax", "ragged_dot_general_p")
split_p = _private("jax._src.lax.lax", "split_p")
jet = _private("jax.experimental.jet", "jet")
jet_rules = _private("jax.experimental.jet", "jet_rules")

# Elementwise operations that only JAX 0.12 and later have:
NEWER_ELEMENTWISE = [
    getattr(primitives, name)
    for name in ("log2_p", "one_minus_square_p", "polynomial_p")
    if hasattr(primitives, name)
]

# These hold programs that the compilers of Pallas read, which know no primitives but
# JAX's; importing Pallas for its primitives would take long.
KERNELS = ("pallas_call", "core_map", "mpmd_map")

# `custom_jvp_call` and `custom_vjp_call` hold functions that trace their rules. The
# first two return a jaxpr and more; the last is the backward rule itself.
TRACED_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk")
BACKWARD_RULE = "bwd"


def with_changed_result(
    rule: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Any:
    """A rule that computes what `change(rule)` does, of the same internal class."""
    changed = functools.wraps(rule.call_wrapped)(change(rule.call_wrapped))
    return linear_util.wrap_init(changed, debug_info=rule.debug_info)


def register_nan_check(primitive: core.Primitive) -> None:
    """Has `checkify` look for NaN in the results of a primitive, as in a product's.

    Its table of primitives is not public. Without it, the error names a later line.
    """
    checks = checkify.checkify.__globals__.get("error_checks", {})
    check = checks.get(dot_general_p)
    if isinstance(check, functools.partial):
        checks[primitive] = functools.partial(check.func, primitive)


def is_scope(element: Any) -> bool:
    """Whether an element of a name stack is a scope, not a transformation.

    The classes of elements are not public.
    """
    return type(element).__name__ == "Scope"


def inputs_of(arrays: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
    """Traced arrays and all that they were computed from, by identity.

    Each is a pair of the array and its equation, which the arguments of the trace lack.
    Numbers that the program holds are left out. No public function knows an equation
    before the program is complete.
    """
    found, rest = dict[int, tuple[Any, Any]](), list(arrays)
    while rest:
        array = rest.pop()
        is_number = isinstance(getattr(array, "val", None), core.Literal)
        if id(array) not in found and not is_number:
            found[id(array)] = array, getattr(array, "parent", None)
            rest.extend(getattr(found[id(array)][1], "in_tracers", ()))
    return found


def frames_of(equation: core.JaxprEqn) -> list[tuple[types.CodeType, int]]:
    """The functions that an equation was traced in, from the innermost outwards.

    Beside each stands the place in it from which the next one was called. JAX has no
    public way from an equation to its lines.
    """
    traceback: Any = equation.source_info.traceback
    return list(zip(*traceback.raw_frames(), strict=True)) if traceback else []


def line_of(equation: core.JaxprEqn, code: types.CodeType, place: int) -> int:
    """The line of a place in the code of a function."""
    traceback: Any = equation.source_info.traceback
    line: int = traceback.code_addr2location(code, place)[0]
    return line


def linen_modules_around() -> Sequence[Any]:
    """The innermost `flax.linen` module whose method is running, in a list.

    Linen has no public name for it.
    """
    linen = sys.modules.get("flax.linen")
    modules: Sequence[Any]
    modules = () if linen is None else linen.module._context.module_stack[-1:]
    return modules
