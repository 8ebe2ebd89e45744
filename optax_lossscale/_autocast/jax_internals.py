"""What the package needs of JAX that it does not promise to keep.

Names that are private or differ between versions stand here with the reason, and
`tests/autocast/test_jax_internals.py` says what to do when one is gone. Some parameters
of primitives are read where they are used: of a jitted call in
`_scaling/early_masks.py`, of products in `_autocast/`. The scopes of `flax.linen` are
changed in `_autocast/modules.py`.
"""

import copy
import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core, linear_util
from jax.extend.core import primitives


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
name_p = _private("jax._src.ad_checkpoint", "name_p")
pvary_p = _private("jax._src.core", "pvary_p")
ragged_dot_general_p = _private("jax._src.lax.lax", "ragged_dot_general_p")
split_p = _private("jax._src.lax.lax", "split_p")

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


def with_changed_rule(
    rule: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Any:
    """A rule that computes what `change(rule)` does, of the same internal class."""
    changed = functools.wraps(rule.call_wrapped)(change(rule.call_wrapped))
    return linear_util.wrap_init(changed, debug_info=rule.debug_info)


def is_closed_call(parameter: Any) -> bool:
    """Whether a parameter of an equation is a call that JAX keeps closed.

    JAX 0.7 has none. Later versions have them for what they will change in future, and
    JAX 0.12 for `jax.lax.custom_root`.
    """
    return hasattr(type(parameter), "expand") and hasattr(parameter, "in_avals_flat")


def name_of_rules(equation: core.JaxprEqn) -> str | None:
    """The name of a call whose rules are functions that JAX calls later, or None."""
    for call in filter(is_closed_call, equation.params.values()):
        return type(call).__name__
    name: str = equation.primitive.name
    return name if name in ("custom_vmap_call", "linear_call") else None


def with_expansion(call: Any, expand: Callable[..., Any]) -> Any:
    """A copy of a closed call that runs another function; its rules stay."""
    changed = copy.copy(call)
    # JAX compares the parameters of two calls.
    changed.params = {**call.params, "expand": expand}
    changed.expand = expand
    return changed


def is_scope(element: Any) -> bool:
    """Whether an element of a name stack is a scope, not a transformation.

    The classes of elements are not public.
    """
    return type(element).__name__ == "Scope"


def origin_of(array: Any) -> Any:
    """The traced array that an array stands for: in a batch, or closed over.

    A trace gives an array that is closed over a name of its own. No public function
    knows which.
    """
    while isinstance(array, jax.core.Tracer):
        if not hasattr(array, "parent"):  # Of `vmap` or of a derivative.
            inner = getattr(array, "primal", getattr(array, "val", None))
        elif array.parent is None and isinstance(array.val, core.Var):
            frame = getattr(array._trace, "frame", None)
            inner = getattr(frame, "constvar_to_val", {}).get(array.val)
            inner = getattr(inner, "canonical", inner)  # In JAX 0.7.
        else:
            return array
        if inner is None:
            return array
        array = inner
    return array


def equation_of(origin: Any) -> Any:
    """The equation that made a traced array; None for an input.

    No public function knows it before the program is complete. The variable `val` of
    the array is one of the results of the equation.
    """
    return getattr(origin, "parent", None)


def constant_of(origin: Any) -> Any:
    """The number that a traced array stands for, or None."""
    value = getattr(origin, "val", None)
    return value.val if isinstance(value, core.Literal) else None


def trace_of(origin: Any) -> Any:
    """The trace that a traced array belongs to, or None."""
    return getattr(origin, "_trace", None)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many inputs of a scan are the same in each iteration, and how many carried.

    JAX 0.12 has trees in place of numbers.
    """
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return params["num_consts"], params["num_carry"]


def traces_around(array: Any) -> list[str | None]:
    """For what an array was traced, such as "jit" or "scan", from the innermost trace.

    Empty for an array that is not traced.
    """
    names, trace = list[str | None](), trace_of(array)
    while trace is not None:
        debug_info = getattr(getattr(trace, "frame", None), "debug_info", None)
        names.append(getattr(debug_info, "traced_for", None))
        trace = getattr(trace, "parent_trace", None)
    return names


def program_around(array: Any) -> tuple[list[Any], list[core.Var]]:
    """The equations so far, and the inputs, of the trace around that of an array."""
    frame: Any = trace_of(array).parent_trace.frame
    # References to equations, which may be weak, or the equations themselves.
    equations = [e if hasattr(e, "outvars") else e() for e in frame.tracing_eqns]
    return [each for each in equations if each is not None], frame.invars


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
