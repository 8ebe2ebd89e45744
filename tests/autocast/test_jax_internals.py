"""What `_jax_internals.py` needs of JAX and Flax is there; else, what to do.

Run this file first with a new JAX. It imports the package only where it has to, so that
these messages come before an ImportError.
"""

import functools
import importlib
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify
from jax.experimental import pallas as pl
from jax.extend import core, linear_util
from jax.extend.core import primitives

X = jnp.ones((2, 2))


@jax.custom_vjp
def by_vjp(x):
    return x @ x


by_vjp.defvjp(lambda x: (x @ x, x), lambda x, ct: (ct @ x.T + x.T @ ct,))


@jax.custom_jvp
def by_jvp(x):
    return x @ x


by_jvp.defjvp(lambda p, t: (p[0] @ p[0], p[0] @ t[0] + t[0] @ p[0]))


def first_equation(fun, *args):
    return jax.make_jaxpr(fun)(*args).eqns[0]


def split(x):
    return lax.split(x, (1, 1))


IMPORTED = {
    ("jax._src.ad_checkpoint", "remat_p"): jax.checkpoint(jnp.sin),
    ("jax._src.lax.lax", "split_p"): split,
    ("jax._src.lax.lax", "ragged_dot_general_p"): lambda x: lax.ragged_dot(
        x, x[None], jnp.array([2])
    ),
    ("jax._src.core", "pvary_p"): None,  # Only in `shard_map`; see below.
}


@pytest.mark.parametrize(("module", "name"), IMPORTED)
def test_a_primitive_is_where_it_is_imported_from(module, name):
    primitive = getattr(importlib.import_module(module), name, None)
    assert isinstance(primitive, core.Primitive), (
        f"{module} has no {name}. Print `jax.make_jaxpr(fun)(x).eqns[-1].primitive` "
        "for a function that uses it, search JAX for where this is made, and import it "
        "from there in `_jax_internals.py`. If JAX has dropped it, drop it from there "
        "and from `_CHEAP` or `PRODUCTS`."
    )
    fun = IMPORTED[module, name]
    if fun is not None:
        found = jax.make_jaxpr(fun)(X).eqns[-1].primitive
        assert found is primitive, (
            f"JAX traces {found} where it traced {name}. Import that one, too, or "
            "instead, in `_jax_internals.py`."
        )


def test_shard_map_marks_arrays_that_vary_by_a_primitive_that_is_known():
    from optax_lossscale._jax_internals import pvary_p

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("i",), auto, devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec

    def body(x, y):
        return x * y

    with jax.numpy_rank_promotion("allow"):
        fun = jax.shard_map(
            body, mesh=mesh, in_specs=(spec(), spec("i")), out_specs=spec("i")
        )
        program = jax.make_jaxpr(fun)(X, X).eqns[0].params["jaxpr"]
    names = {equation.primitive.name for equation in program.eqns}
    known = {pvary_p.name, "mul"}
    assert names <= known, (
        f"`shard_map` adds {sorted(names - known)}. If this is how it marks arrays "
        "that vary, add the primitive to `_CHEAP` in `_autocast/loops.py`, or else it "
        "is saved in every loop."
    )


def test_kernels_have_the_names_that_are_known():
    from optax_lossscale._jax_internals import KERNELS

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    found = first_equation(pl.pallas_call(kernel, X, interpret=True), X)
    assert found.primitive.name in KERNELS, (
        f"`pallas_call` is traced as {found.primitive.name}. Add this name to KERNELS: "
        "the programs in it are not for JAX, and must not be rewritten."
    )


RULES = {
    by_vjp: ("fwd_jaxpr_thunk", "bwd"),
    by_jvp: ("jvp_jaxpr_fun",),
}


@pytest.mark.parametrize("fun", RULES, ids=["custom_vjp", "custom_jvp"])
def test_derivative_rules_are_parameters_with_the_names_that_are_known(fun):
    from optax_lossscale import _jax_internals as internals

    known = {*internals.TRACED_RULES, internals.BACKWARD_RULE}
    params = first_equation(fun, X).params
    functions = {
        name for name, value in params.items() if hasattr(value, "call_wrapped")
    }
    assert functions == set(RULES[fun]) <= known, (
        f"Rules are in the parameters {sorted(functions)}. Correct TRACED_RULES and "
        "BACKWARD_RULE; without them products of these rules stay in float32. If they "
        "are no longer `linear_util.WrappedFun`, change `with_changed_result` as well."
    )


def test_a_rule_can_be_replaced_by_another_of_its_kind():
    from optax_lossscale._jax_internals import with_changed_result

    rule = first_equation(by_vjp, X).params["bwd"]
    message = (
        "A rule has no `call_wrapped` and `debug_info`, or `linear_util.wrap_init` has "
        "no such parameter. See how `jax.custom_vjp` makes its `bwd`, and do the same "
        "in `with_changed_result`."
    )
    assert hasattr(rule, "call_wrapped"), message
    assert hasattr(rule, "debug_info"), message
    assert "debug_info" in inspect.signature(linear_util.wrap_init).parameters, message
    doubled = linear_util.wrap_init(lambda x: 2 * x, debug_info=rule.debug_info)
    changed = with_changed_result(doubled, lambda old: lambda x: old(x) + 1)
    assert type(changed) is type(rule), message
    assert changed.call_wrapped(3) == 7, message


def test_checkify_has_a_table_of_checks_with_one_for_products():
    checks = checkify.checkify.__globals__.get("error_checks", {})
    check = checks.get(primitives.dot_general_p)
    assert isinstance(check, functools.partial), (
        "`checkify` keeps its checks elsewhere. Find where it looks up that of "
        "`dot_general`, and register the same for `low_product` in "
        "`register_nan_check`. Without it errors of `nan_checks` name a later line."
    )
    assert check.args == (primitives.dot_general_p,), (
        "The check for NaN takes other arguments. Correct `register_nan_check`."
    )


def test_scopes_can_be_told_from_transformations():
    from optax_lossscale._jax_internals import is_scope

    def fun(x):
        with jax.named_scope("scope"):
            return jax.vmap(jnp.sin)(x)

    stack = first_equation(fun, X).source_info.name_stack.stack
    found = [(element.name, is_scope(element)) for element in stack]
    assert found == [("scope", True), ("vmap", False)], (
        f"The classes in a name stack are {[type(x).__name__ for x in stack]}. Correct "
        "`is_scope`; without it `high=` and the reports know no scopes."
    )


def test_an_equation_has_the_lines_that_it_was_traced_in():
    from optax_lossscale._jax_internals import frames_of, line_of

    def fun(x):
        return lax.sin(x)

    equation = first_equation(fun, X)
    lines = {
        line_of(equation, code, place)
        for code, place in frames_of(equation)
        if code is fun.__code__
    }
    assert lines == {fun.__code__.co_firstlineno + 1}, (
        "`source_info.traceback` has no `raw_frames` and `code_addr2location`, or they "
        "mean something else. Correct `frames_of` and `line_of`; without them the "
        "reports say no lines."
    )


def test_linen_knows_the_module_whose_method_is_running():
    from optax_lossscale._jax_internals import linen_modules_around

    found = []

    class Module(nn.Module):
        def __call__(self, x):
            found.extend(linen_modules_around())
            return x

    module = Module()
    module.apply({}, X)
    assert [type(x) for x in found] == [Module], (
        "`flax.linen.module._context.module_stack` is gone. Find how Linen knows the "
        "module around a `@compact` method, and correct `linen_modules_around`; "
        "without it a closure in a Linen module loses its statistics."
    )
    assert not any(linen_modules_around())


def test_a_function_is_traced_again_under_another_value_of_a_context():
    from optax_lossscale._jax_internals import UserContext

    context, seen = UserContext("of_a_test"), []

    @jax.jit
    def fun(x):
        seen.append(context.value)
        return x

    for value in (None, "a", "b", "a", None):
        with context.set(value):
            fun(X)
    assert context.value is None
    assert seen == [None, "a", "b"], (
        "JAX reuses what it traced under another value of `jax.make_user_context`, or "
        "traces again under the same one. Correct `UserContext`; without it "
        "`low_precision` is not safe with JAX's caches."
    )


def test_a_traced_array_knows_the_equation_that_made_it():
    from optax_lossscale._jax_internals import inputs_of
    from optax_lossscale._jaxprs import is_transposed

    @jax.make_jaxpr
    def trace(x):
        grads = jax.grad(lambda x: 2.0 * jnp.sum(x @ x))(x)
        inputs = inputs_of([grads])
        scalars = [array for array, equation in inputs.values() if equation is None]
        hint = (
            "`inputs_of` in `_jax_internals.py` reads `parent` and `in_tracers` of "
            "JAX's traced arrays. Without them `update` does not warn of unscaled "
            "gradients. Look into the class of `x` for the equation that made it."
        )
        assert id(x) in inputs, hint
        assert any(is_transposed(e) for _, e in inputs.values() if e), hint
        assert len(scalars) == 1, "Numbers such as 2.0 are not left out: see `Literal`."
        return grads

    trace(X)
