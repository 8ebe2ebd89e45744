"""What `_autocast/jax_internals.py` needs of JAX and Flax is there.

Run this file first with a new JAX. The docstring of a test that fails says what to do,
and what is lost if nothing is done. The package is imported only where it has to be, so
that these tests fail before an ImportError.
"""

import functools
import importlib
import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend import linear_util

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


@pytest.mark.parametrize(
    ("module", "name", "fun"),
    [
        ("jax._src.ad_checkpoint", "remat_p", jax.checkpoint(jnp.sin)),
        ("jax._src.lax.lax", "split_p", lambda x: lax.split(x, (1, 1))),
        (
            "jax._src.lax.lax",
            "ragged_dot_general_p",
            lambda x: lax.ragged_dot(x, x[None], jnp.array([2])),
        ),
    ],
)
def test_a_primitive_is_where_it_is_imported_from_and_still_in_use(module, name, fun):
    """Else import what `make_jaxpr` prints from where JAX makes it.

    If JAX has dropped it, drop it from `_CHEAP` or `PRODUCTS` as well.
    """
    primitive = getattr(importlib.import_module(module), name, None)
    assert jax.make_jaxpr(fun)(X).eqns[-1].primitive is primitive


def test_shard_map_marks_arrays_that_vary_by_a_primitive_that_is_known():
    """Else add the new one to `_CHEAP`, or every loop saves what it marks."""
    from optax_lossscale._autocast.jax_internals import pvary_p

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("i",), auto, devices=jax.devices()[:1])
    whole, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("i")
    over = {"mesh": mesh, "in_specs": (whole, split), "out_specs": split}
    fun = jax.shard_map(lambda x, y: x * y, **over)
    program = first_equation(fun, X, X).params["jaxpr"]
    names = {equation.primitive.name for equation in program.eqns}
    assert names <= {pvary_p.name, "mul"}


def test_kernels_have_the_names_that_are_known():
    """Else add the name to KERNELS: programs inside must not be rewritten."""
    from optax_lossscale._autocast.jax_internals import KERNELS

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    found = first_equation(pl.pallas_call(kernel, X, interpret=True), X)
    assert found.primitive.name in KERNELS


@pytest.mark.parametrize(
    ("fun", "names"),
    [(by_vjp, {"fwd_jaxpr_thunk", "bwd"}), (by_jvp, {"jvp_jaxpr_fun"})],
)
def test_derivative_rules_are_parameters_with_the_names_that_are_known(fun, names):
    """Else correct TRACED_RULES and BACKWARD_RULE.

    Without them products of these rules stay in float32. If rules are no longer
    `linear_util.WrappedFun`, change `with_changed_rule` as well.
    """
    from optax_lossscale._autocast import jax_internals as internals

    params = first_equation(fun, X).params.items()
    found = {name for name, value in params if hasattr(value, "call_wrapped")}
    assert found == names <= {*internals.TRACED_RULES, internals.BACKWARD_RULE}


def test_a_rule_can_be_replaced_by_another_of_its_kind():
    """Else see how `jax.custom_vjp` makes its `bwd`, and do so where this fails."""
    from optax_lossscale._autocast.jax_internals import with_changed_rule

    rule = first_equation(by_vjp, X).params["bwd"]
    assert hasattr(rule, "call_wrapped")
    assert "debug_info" in inspect.signature(linear_util.wrap_init).parameters
    doubled = linear_util.wrap_init(lambda x: 2 * x, debug_info=rule.debug_info)
    changed = with_changed_rule(doubled, lambda old: lambda x: old(x) + 1)
    assert type(changed) is type(rule)
    assert changed.call_wrapped(3) == 7


def test_scopes_can_be_told_from_transformations():
    """Else correct `is_scope`; without it `high=` and the reports know no scopes."""
    from optax_lossscale._autocast.jax_internals import is_scope

    def fun(x):
        with jax.named_scope("scope"):
            return jax.vmap(jnp.sin)(x)

    stack = first_equation(fun, X).source_info.name_stack.stack
    found = [(element.name, is_scope(element)) for element in stack]
    assert found == [("scope", True), ("vmap", False)]


def test_an_equation_has_the_lines_that_it_was_traced_in():
    """Else correct `frames_of` and `line_of`; without them reports say no lines."""
    from optax_lossscale._autocast.jax_internals import frames_of, line_of

    def fun(x):
        return lax.sin(x)

    equation = first_equation(fun, X)
    frames = dict(frames_of(equation))
    line = line_of(equation, fun.__code__, frames[fun.__code__])
    assert line == fun.__code__.co_firstlineno + 1


def test_a_traced_array_knows_the_equation_that_made_it():
    """Else correct `equation_of`: look into the class of an array for its equation.

    Without it `update` does not warn of unscaled gradients.
    """
    from optax_lossscale._autocast.jax_internals import equation_of
    from optax_lossscale._autocast.programs import is_transposed

    @jax.make_jaxpr
    def trace(x):
        grads = jax.grad(lambda x: 2.0 * jnp.sum(x @ x))(x)
        assert is_transposed(equation_of(grads))
        halves = jnp.split(x, 2)
        made_by = [equation_of(half) for half in halves]
        assert made_by[0] is made_by[1]
        assert [half.val for half in halves] == made_by[0].outvars
        assert equation_of(x) is None
        return grads

    trace(X)


def test_a_branch_knows_the_program_around_it():
    """Else correct `program_around`: look into a trace for its equations and inputs.

    Without it `update` in a branch does not warn of unscaled gradients.
    """
    from optax_lossscale._autocast.jax_internals import program_around

    def branch(y):
        equations, inputs = program_around(y)
        assert [str(equation.primitive) for equation in equations] == ["sin"]
        assert [variable.aval.shape for variable in inputs] == [X.shape]
        return y

    @jax.jit
    def fun(x):
        return jax.lax.cond(True, branch, lambda y: y, jnp.sin(x))

    fun(X)


def test_a_traced_array_that_is_closed_over_or_in_a_batch_has_an_origin():
    """Else correct `origin_of`, and `traces_around`. Numbers are in `constant_of`."""
    from optax_lossscale._autocast.jax_internals import (
        constant_of,
        equation_of,
        origin_of,
        traces_around,
    )

    def origins(array):
        return [*map(origin_of, equation_of(origin_of(array)).in_tracers)]

    @jax.jit
    def fun(x):
        def body(carry, y):
            total = x + carry
            assert any(origin is x for origin in origins(total))
            assert traces_around(total) == ["scan", "jit", None]
            return carry, y

        def row(x, y):
            assert origin_of(y) is not y
            product = x * 2.0
            assert constant_of(origins(product)[1]) == 2.0
            return origin_of(y).shape == X.shape

        jax.lax.scan(body, x, x)
        return jax.vmap(row, (None, 0))(x, x)

    assert fun(X).all()


def test_arrays_in_a_shard_map_know_over_which_axes_they_vary():
    """Else change `axes_varying`, for Flax."""
    from optax_lossscale._ground.axes import axes_varying

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("i",), auto, devices=jax.devices()[:1])
    split, seen = jax.sharding.PartitionSpec("i"), []

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=split, out_specs=split)
    def fun(x):
        seen.append(axes_varying(x))
        return x

    fun(X)
    assert seen == [{"i"}]


def test_a_jitted_call_holds_its_program():
    """Else change `_run_masked_early` of `_scaling/early_masks.py`."""
    assert first_equation(jax.jit(jnp.sin), X).params["jaxpr"].jaxpr.eqns
