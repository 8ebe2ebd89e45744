"""Loops, branches and rematerialization under autocast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import pallas as pl
from jax.experimental.ode import odeint

import optax_lossscale as ols
from helpers.programs import dtypes_of, equations_of
from helpers.under_autocast import HALF, W, X, assert_autocast, assert_close, with_scan


def test_a_while_loop_runs_and_keeps_its_dtypes():
    def fun(w, x):
        def body(carry):
            i, x = carry
            return i + 1, jnp.tanh(x @ w)

        return jax.lax.while_loop(lambda c: c[0] < 3, body, (jnp.int32(0), x))

    assert_autocast(fun, W, X, grad=False)


def test_rematerialization_keeps_its_policy():
    policy = jax.checkpoint_policies.dots_saveable

    def fun(w, x):
        return jnp.mean(jax.checkpoint(lambda w: jnp.sin(x @ w), policy=policy)(w))

    program = jax.make_jaxpr(ols.autocast(fun))(W, X)
    (found,) = [e for e in equations_of(program) if e.primitive.name == "remat2"]
    assert found.params["policy"] is policy
    assert_autocast(fun, W, X)


def test_products_that_a_rematerialized_loop_computes_once_are_in_float16():
    def loss(w, x):
        def run(w):
            step = lambda h, _: (jnp.tanh(h @ w), jnp.sin(w @ w).sum())  # noqa: E731
            h, sums = jax.lax.scan(step, x, None, length=3)
            return jnp.mean(h**2) + sums.sum()

        return jax.checkpoint(run)(w)

    fun = jax.grad(loss)
    names = {e.primitive.name for e in equations_of(jax.make_jaxpr(fun)(W, X))}
    assert names & {"closed_call", "eval_jaxpr"}
    assert set(dtypes_of(ols.autocast(fun), W, X)) == {HALF}
    assert_close(ols.autocast(fun)(W, X), fun(W, X), rtol=2e-2)


def test_computed_loop_inputs_are_cast_before_the_loop_and_arguments_inside():
    def with_computed_input(w, x):
        return with_scan(w, jnp.tanh(x @ w))

    def low_inputs(fun):
        program = jax.make_jaxpr(ols.autocast(fun))(W, X)
        (scan,) = [e for e in equations_of(program) if e.primitive.name == "scan"]
        return [v.aval.shape for v in scan.invars if v.aval.dtype == jnp.float16]

    assert low_inputs(with_scan) == []
    assert low_inputs(with_computed_input) == [X.shape]


def halve_until_small(w, x):
    """The steps until a row is small; each row of a batch has its own number."""

    def body(carry):
        count, x = carry
        return count + 1, jnp.tanh(x @ w) / 2

    return jax.lax.while_loop(
        lambda carry: jnp.linalg.norm(carry[1]) > 0.1, body, (jnp.int32(0), x)
    )


@pytest.mark.fast_every(3)
@pytest.mark.parametrize("batched", [(None, 0), (0, None), (0, 0)])
def test_a_while_loop_can_have_a_condition_for_each_of_a_batch(batched):
    w = W if batched[0] is None else jnp.stack([W, W / 2, W / 4])
    x = X[0] if batched[1] is None else X / jnp.float32([[1], [8], [64]])
    args = w, x
    mapped = jax.vmap(halve_until_small, batched)
    counts, _ = expected = mapped(*args)
    assert len(set(counts.tolist())) > 1
    cast = ols.autocast(mapped)
    assert set(dtypes_of(cast, *args)) == {HALF}
    for fun in (
        cast,
        jax.jit(cast),
        jax.vmap(ols.autocast(halve_until_small), batched),
    ):
        np.testing.assert_array_equal(fun(*args)[0], counts)
        assert_close(fun(*args), expected)


def test_a_while_loop_of_a_batch_has_forward_derivatives_and_can_be_nested():
    def fun(w, x):
        def row_loss(row):
            outer = lambda c: (c[0] + 1, halve_until_small(w, c[1])[1] * 8)  # noqa: E731
            return jax.lax.while_loop(lambda c: c[0] < 2, outer, (0, row))[1].sum()

        return jax.vmap(row_loss)(x).sum()

    cast = ols.autocast(fun)
    assert_close(jax.jvp(cast, (W, X), (W, X)), jax.jvp(fun, (W, X), (W, X)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("poisson", marks=pytest.mark.slow),
        pytest.param("binomial", marks=pytest.mark.slow),
        pytest.param("gamma", marks=pytest.mark.slow),
    ],
)
def test_random_samplers_that_loop_can_be_mapped(name):
    def sample(key, row):
        mean = 1 + jnp.abs(row @ W)
        if name == "binomial":
            return jax.random.binomial(key, 9.0, 1 / (1 + mean))
        return getattr(jax.random, name)(key, mean)

    keys = jax.random.split(jax.random.key(0), len(X))
    mapped = jax.vmap(sample)
    error = jax.jit(ols.autocast(mapped))(keys, X) - jax.jit(mapped)(keys, X)
    # A rounded mean may change a sample, but only few, and not by much.
    assert jnp.mean(jnp.abs(error)) < 0.2


@pytest.mark.slow
def test_an_ordinary_differential_equation_and_its_gradient_can_be_mapped():
    def fun(w, row):
        times = jnp.float32([0, 0.5, 1])
        path = odeint(lambda y, t, w: jnp.tanh(y @ w), row, times, w, rtol=1e-3)
        return jnp.mean(path**2)

    mapped = jax.vmap(jax.value_and_grad(fun), (None, 0))
    with jax.numpy_rank_promotion("allow"):
        cast = jax.jit(ols.autocast(mapped))
        assert_close(cast(W / 2, X), jax.jit(mapped)(W / 2, X))


def test_only_the_branch_of_this_platform_is_lowered():
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def for_tpu(x):  # Cannot be lowered elsewhere.
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def fun(w, x):
        y = jax.lax.platform_dependent(x @ w, tpu=for_tpu, default=lambda y: 2 * y @ w)
        return jnp.mean(y)

    assert_autocast(fun, W, X, grad=False)
    for cast in (jax.vmap(ols.autocast(fun)), ols.autocast(jax.vmap(fun))):
        assert_close(cast(W[None], X[None]), fun(W, X)[None])


def test_a_platform_can_be_chosen_when_the_program_is_exported():
    def fun(w, x):
        return jax.lax.platform_dependent(
            x @ w, tpu=lambda y: y + 1, default=lambda y: y - 1
        )

    cast = export.export(jax.jit(ols.autocast(fun)), platforms=["cpu", "tpu"])(W, X)
    assert_close(cast.call(W, X), X @ W - 1)
