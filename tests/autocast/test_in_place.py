"""Equations are replaced in place: lines, names, contexts and effects are JAX's own.

Each program that an equation holds is rewritten once, so that JAX compiles it once.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core

import optax_lossscale as ols
from helpers.places import place_of
from helpers.under_autocast import W, X, dtypes_of, own_layer, products_of
from optax_lossscale._autocast.programs import scope_of, user_line


def model(w, x):
    with jax.named_scope("Net"):
        with jax.named_scope("Dense_0"):
            x = x @ w  # the first product
        x = jax.jit(jax.nn.relu)(x)
        with jax.named_scope("Dense_1"):
            return jnp.sum(lax.scan(lambda x, _: (x @ w, None), x, length=2)[0])


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint])
def test_products_keep_their_lines_and_scopes(wrap):
    plain, low = (
        products_of(fun, W, X)
        for fun in (wrap(model), ols.autocast(wrap(model), recompute=False))
    )
    assert [user_line(e) for e in low] == [user_line(e) for e in plain]
    assert user_line(low[0]) == place_of(model, "the first product")
    assert [scope_of(e) for e in low] == [scope_of(e) for e in plain]
    assert scope_of(low[0]) == ("Net", "Dense_0")


def test_scopes_of_gradients_are_those_of_jax():
    plain = [scope_of(e) for e in products_of(jax.grad(model), W, X)]
    cast = ols.autocast(model, recompute=False)
    assert [scope_of(e) for e in products_of(jax.grad(cast), W, X)] == plain


def test_names_in_the_compiled_program_are_those_of_the_scopes():
    text = jax.jit(ols.autocast(model)).lower(W, X).as_text(debug_info=True)
    assert "Net/Dense_0/dot_general" in text


def test_products_keep_the_context_that_they_were_traced_in():
    def fun(x):
        with set_xla_metadata(part="first"):
            y = x @ W
        return y @ W

    plain, low = (products_of(f, X) for f in (fun, ols.autocast(fun)))
    assert [e.ctx.xla_metadata for e in low] == [e.ctx.xla_metadata for e in plain]
    assert low[0].ctx.xla_metadata != low[1].ctx.xla_metadata


# --- Programs that are shared -----------------------------------------------------


def programs_in(fun, *args):
    """The programs of the calls in a traced function."""
    program = jax.make_jaxpr(fun)(*args)
    return [e.params["jaxpr"] for e in program.eqns if "jaxpr" in e.params]


@jax.jit
def block(w, x):
    return jax.nn.relu(own_layer(w, jnp.tanh(x @ w)))


def deep(w, x):
    for _ in range(60):
        x = block(w, x)
    return jnp.sum(x)


def test_a_function_that_is_called_often_is_one_program_behind_the_first_product():
    first, *programs = programs_in(ols.autocast(deep), W, X)
    assert len(programs) == 59
    assert len({id(program) for program in programs}) == 1
    assert first is not programs[0]
    assert set(dtypes_of(ols.autocast(deep), W, X)) == {"float16"}

    # It is compiled as one function, forward and backward.
    def blocks(fun):
        text = jax.jit(fun).lower(W, X).as_text()
        return text.count("func.func private @block")

    assert blocks(ols.autocast(deep)) == 2
    assert blocks(jax.grad(ols.autocast(deep))) == blocks(jax.grad(deep))


def test_outside_jit_a_jitted_function_inside_is_traced_and_compiled_once():
    traced = []

    @jax.jit
    def inner(x):
        traced.append(x.dtype)
        return x @ W

    cast = ols.autocast(lambda x: inner(x) + inner(2 * x))
    for _ in range(3):
        cast(X)
    assert len(traced) == 1


def test_a_function_runs_in_the_dtype_of_each_autocast_around_it():
    inner = jax.jit(lambda x: x @ W)
    for dtype in ("float16", "bfloat16", "float16"):
        assert dtypes_of(ols.autocast(lambda x: inner(x), dtype), X) == [dtype]
    assert dtypes_of(inner, X) == ["float32"]
    both = ols.autocast(lambda x: ols.autocast(inner, "bfloat16")(inner(x)))
    assert dtypes_of(both, X) == ["float16", "bfloat16"]


@pytest.mark.slow
def test_programs_are_forgotten_with_the_functions_that_they_belong_to():
    class Data:
        pass

    def call():
        data = Data()
        ols.autocast(jax.jit(lambda x, data=data: x @ W))(X)
        return weakref.ref(data)

    reference = call()
    jax.clear_caches()
    gc.collect()
    assert reference() is None


def test_programs_beside_other_settings_of_a_primitive_are_its_own():
    """Equinox, Lineax and Optimistix compare them with copies that they keep."""
    program = jax.make_jaxpr(lambda x: x @ W)(X)
    primitive = core.Primitive("solve")
    primitive.def_impl(lambda x, settings: core.jaxpr_as_fun(settings[0])(x)[0])
    primitive.def_abstract_eval(lambda x, settings: program.out_avals[0])
    fun = ols.autocast(lambda x: primitive.bind(x, settings=(program, "name")))
    (equation,) = jax.make_jaxpr(fun)(X).eqns
    assert equation.params["settings"][0] is program
    np.testing.assert_array_equal(fun(X), X @ W)
