"""Which products run low, and why others do not, as docs/guides/autocast.md says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_lossscale as ols
from helpers.cases import slow_except
from helpers.compat import enable_x64
from helpers.under_autocast import W, X, dot_loss, dtypes_of, reports

IMAGE, KERNEL = jnp.ones((1, 2, 6, 6)), jnp.ones((4, 2, 3, 3))
conv = functools.partial(lax.conv, window_strides=(1, 1), padding="SAME")


def dot(**settings):
    return lambda w, x: jnp.dot(x, w, **settings)


def in_dtype(dtype, other=None):
    def fun(w, x):
        numbers = (((1,), (0,)), ((), ()))
        return lax.dot_general(x.astype(dtype), w.astype(other or dtype), numbers)

    return fun


LOW = {
    "a matrix product": dot(),
    "a matrix and a vector": lambda w, x: x @ w[0],
    "a vector and a matrix": lambda w, x: x[0] @ w,
    "a batch of products": lambda w, x: jnp.einsum("bi,bij->bj", x, jnp.stack([w] * 3)),
    "a batch of one factor": lambda w, x: jax.vmap(jnp.dot, (0, None))(x, w[0]),
    "a convolution": lambda w, x: conv(IMAGE * x[0, 0], KERNEL),
    "a depthwise convolution": lambda w, x: lax.conv_general_dilated(
        IMAGE * x[0, 0], KERNEL[:, :1], (1, 1), "SAME", feature_group_count=2
    ),
    "a pointwise convolution": lambda w, x: conv(IMAGE * x[0, 0], KERNEL[..., :1, :1]),
    "the default precision": dot(precision="default"),
    "the default algorithm": dot(precision=lax.DotAlgorithmPreset.DEFAULT),
    "a float32 result": dot(preferred_element_type=jnp.float32),
    "one factor that is low": in_dtype("float32", "float16"),
    "a ragged product": lambda w, x: lax.ragged_dot(x, w[None], jnp.array([3])),
}


@pytest.mark.parametrize("name", LOW)
def test_a_product_of_float32_operands_runs_low(name, capsys):
    assert set(dtypes_of(ols.autocast(LOW[name]), W, X)) == {"float16"}
    assert {row["why"] for row in reports(capsys, LOW[name], W, X)} == {""}


def in_a_scope(w, x):
    with jax.named_scope("Net"), jax.named_scope("Dense_0"):
        return x @ w


ONE_TERM = "sums of at most one term"
AS_WRITTEN = {
    "HIGHEST": (dot(precision="highest"), "precision=HIGHEST"),
    "one factor more precise": (dot(precision=("default", "high")), "precision=HIGH"),
    "an algorithm": (
        dot(precision=lax.DotAlgorithmPreset.F32_F32_F32),
        "precision=F32_F32_F32",
    ),
    "an inverse": (lambda w, x: jnp.linalg.inv(w), "precision=HIGHEST"),
    "float16": (in_dtype("float16"), "written in float16"),
    "one factor in bfloat16": (in_dtype("float32", "bfloat16"), "written in bfloat16"),
    "rotary angles": (lambda w, x: jnp.einsum("i,j->ij", x[0], x[1]), ONE_TERM),
    "integers": (in_dtype("int32"), "written in int32"),
    "complex numbers": (in_dtype("complex64"), "written in complex64"),
    "one input": (lambda w, x: x[:, :1] @ w[:1], ONE_TERM),
    "no input": (lambda w, x: x[:, :0] @ w[:0], ONE_TERM),
    "a scale": (lambda w, x: conv(x[None, None], w[None, None, :1, :1]), ONE_TERM),
    "low_precision": (ols.low_precision(in_dtype("float32")), "low_precision"),
    "two vectors": (lambda w, x: jnp.vdot(w, w), "inner product"),
    "rows of vectors": (lambda w, x: jnp.einsum("bi,bi->b", x, x), "inner product"),
    "full_precision": (ols.full_precision(dot()), "full_precision"),
    "high": (in_a_scope, "`high`"),
}


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_the_report_says_why_a_product_stays_as_it_is_written(name, capsys):
    fun, reason = AS_WRITTEN[name]
    cast = ols.autocast(fun, high=["Net/"] if name == "high" else ())
    (row,) = reports(capsys, cast, W, X)
    assert row["why"] == reason
    assert set(dtypes_of(cast, W, X)) == {row["dtype"]} == set(dtypes_of(fun, W, X))


def test_a_product_of_float64_arrays_stays_as_it_is_written():
    with enable_x64(True):
        w, x = np.ones((4, 4)), np.ones((3, 4))
        assert dtypes_of(ols.autocast(dot()), w, x) == ["float64"]
        wide = dot(preferred_element_type=jnp.float64)
        assert dtypes_of(ols.autocast(wide), W, X) == ["float32"]


def test_the_precision_around_a_call_counts_as_if_it_were_written():
    with jax.default_matmul_precision("highest"):
        assert dtypes_of(ols.autocast(dot_loss), W, X) == ["float32"]


# --- Inner products ---------------------------------------------------------------
# Neither factor has an axis of its own. Densities, norms and losses are made of such.

COV = jnp.eye(4) + 0.1
ROWS, OTHERS = X / 8, X[::-1] / 9
INNER = {
    "vdot": jnp.vdot,
    "einsum of a batch": lambda x, y: jnp.einsum(
        "bij,bij->b", x.reshape(1, 2, 2), y.reshape(1, 2, 2)
    )[0],
    "norm": lambda x, y: jnp.sqrt(x @ x) + y @ y,
    "density": lambda x, y: jax.scipy.stats.multivariate_normal.logpdf(x, y, COV),
    "sparsemax": lambda x, y: optax.losses.multiclass_sparsemax_loss(
        (x - y)[None], jnp.array([1])
    )[0],
    "cosine": optax.losses.cosine_distance,
}
# `wrap` is put around the function of one pair of rows, or of all of them.
WAYS = {
    "vmap inside": lambda fun, wrap: wrap(jax.vmap(fun)),
    "vmap outside": lambda fun, wrap: jax.vmap(wrap(fun)),
}


@pytest.mark.parametrize("way", slow_except({"vmap inside"}, WAYS))
@pytest.mark.parametrize("name", INNER)
@pytest.mark.usefixtures("standard_promotion")
def test_inner_products_are_in_float32_and_finite_at_a_large_loss_scale(name, way):
    def value_and_grads(wrap):
        fun = WAYS[way](INNER[name], wrap)
        state = ols.static_loss_scale(2.0**24).init()
        grad = ols.scaled_value_and_grad(lambda xy: jnp.mean(fun(*xy)), state)
        assert "float16" not in str(dtypes_of(grad, (ROWS, OTHERS)))
        return jax.jit(grad)((ROWS, OTHERS))

    actual, expected = (value_and_grads(wrap) for wrap in (ols.autocast, lambda f: f))
    assert ols.all_finite(expected)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), actual, expected
    )


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_inner_products_of_float32_arrays_stay_at_every_level(level, capsys):
    def fun(x):
        x = x.astype(jnp.float32)
        return x[0] @ x[0], x @ x[0]

    rows = reports(capsys, ols.autocast(fun, level=level), X)
    found = [(row["dtype"], row["why"]) for row in rows]
    assert found == [("float32", "inner product"), ("float16", "")]


def test_an_axis_that_vmap_adds_outside_is_not_seen():
    for fun, dtype in [
        (jax.vmap(ols.autocast(jnp.dot), (0, None)), "float32"),
        (ols.autocast(jax.vmap(jnp.dot, (0, None))), "float16"),
    ]:
        assert dtypes_of(fun, X, W[0]) == [dtype]
