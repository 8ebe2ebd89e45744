"""The dtype of each operation, which depends on its list and its operands."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compat import enable_x64
from helpers.programs import dtypes_of
from helpers.under_autocast import (
    HALF,
    W,
    X,
    assert_autocast,
    assert_close,
    computed_in,
    dot_loss,
)


def test_each_operation_computes_in_the_dtype_of_its_list(capsys):
    def fun(w, x):
        return jnp.sum(jnp.exp(jnp.tanh(x @ w) * 2.0))

    assert computed_in(capsys, fun, W, X) == {
        "dot_general": "float16",
        "tanh": "float16",
        "mul": "float16",
        "exp": "float32",
        "reduce_sum": "float32",
    }


def test_a_bias_takes_the_dtype_of_its_product(capsys):
    def fun(w, x, b):
        return jnp.max(jnp.tanh(x @ w + b[None]) + x)

    found = computed_in(capsys, fun, W, X, jnp.ones(4))
    assert (found["tanh"], found["reduce_max"]) == ("float16", "float32")


def test_a_sum_with_a_full_array_widens_and_with_a_bias_does_not():
    def of_product(other):
        def fun(w, x):
            return jnp.tanh(x @ w + jnp.expand_dims(other, range(2 - jnp.ndim(other))))

        (dtype,) = dtypes_of(ols.autocast(fun), W, X, name="tanh")
        return dtype[0]

    assert of_product(jnp.ones(4)) == "float16"
    assert of_product(jnp.ones((1, 4))) == "float16"
    assert of_product(jnp.ones((3, 4))) == "float32"
    assert of_product(2.0) == "float16"


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(2.0, "float16"), (1e-9, "float32"), (1e6, "float32"), (-np.inf, "float16")],
)
def test_a_number_widens_a_product_only_if_float16_cannot_hold_it(number, dtype):
    def fun(w, x):
        return jnp.maximum(x @ w, number)

    (found,) = dtypes_of(ols.autocast(fun), W, X, name="max")
    assert found[0] == dtype


def test_squares_and_reciprocals_are_in_float32():
    big = jnp.full((1, 4), 300.0)

    def fun(w, x):
        product = x @ w  # 1200, whose square exceeds float16.
        return jnp.sum(product**2), jnp.max(1e-3 / (product * 1e-7))

    squares, reciprocal = ols.autocast(fun)(jnp.ones((4, 4)), big)
    assert squares == 4 * 1200.0**2
    np.testing.assert_allclose(reciprocal, 1e-3 / 1200e-7, rtol=1e-3)


def test_low_and_high_add_to_the_lists(capsys):
    def fun(w, x):
        return jnp.sum(jnp.cumsum(jnp.tanh(x @ w), axis=0))

    lists = {"low": ["cumsum"], "high": ["tanh"]}
    assert computed_in(capsys, fun, W, X)["cumsum"] == "float32"
    found = computed_in(capsys, fun, W, X, **lists)
    assert (found["cumsum"], found["tanh"]) == ("float16", "float32")
    assert_close(ols.autocast(fun, **lists)(W, X), fun(W, X))


def test_operations_that_the_backend_lacks_in_float16_stay_in_float32(capsys):
    matrix = 9 * jnp.eye(4) + X.T @ X

    def fun(a):
        return jnp.linalg.cholesky(a)

    cast = ols.autocast(fun, low=("cholesky",))
    np.testing.assert_allclose(cast(matrix), fun(matrix))
    ols.autocast_report(cast, matrix)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "cholesky" in x]
    assert "float32" in line
    assert "no float16 on cpu" in line


def test_full_precision_functions_run_as_written():
    def fun(w, x):
        return ols.full_precision(jax.jit(jnp.matmul))(x, w) + x @ w

    found = dtypes_of(ols.autocast(fun), W, X)
    assert sorted(found) == [HALF, ("float32", "float32")]
    backward = dtypes_of(jax.grad(lambda w: jnp.sum(ols.autocast(fun)(w, X))), W)
    assert backward.count(("float32", "float32")) == 2


def test_products_with_an_explicit_algorithm_or_precision_are_cast():
    for precision in ("highest", jax.lax.DotAlgorithmPreset.F32_F32_F32):

        def fun(w, x, precision=precision):
            return jnp.matmul(x, w, precision=precision)

        assert_close(ols.autocast(fun)(W, X), fun(W, X))
        assert dtypes_of(ols.autocast(fun), W, X) == [HALF]


def test_a_product_of_half_precision_operands_is_left_as_it_is():
    def fun(w, x):
        w, x = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
        return jax.lax.dot(x, w, preferred_element_type=jnp.float32)

    cast = ols.autocast(fun)
    np.testing.assert_array_equal(cast(W, X), fun(W, X))


def test_sums_accumulate_in_float32_at_every_level():
    ones = jnp.ones((1, 70_000), jnp.float32)
    for level in ("O1", "O2", "O3"):
        total = ols.autocast(lambda x: jnp.sum(x), level=level)(ones)
        assert total == 70_000  # In float16, infinite.


def test_products_with_other_dtypes_and_complex_numbers_are_left_as_they_are():
    def fun(x):
        with jax.numpy_dtype_promotion("standard"):
            y = (x + 0j) @ (x * 1j) / 2
        half = jnp.matmul(x, x, preferred_element_type=jnp.bfloat16)
        return jnp.abs(y), half, jnp.fft.fft(x).imag / 8

    chex.assert_trees_all_equal(ols.autocast(fun)(1e3 * W), fun(1e3 * W))
    with enable_x64(True):
        big = jnp.full((4, 4), 1e6, jnp.float64)
        product = ols.autocast(jnp.matmul)(W.astype(jnp.float64), big)
        assert product.dtype == jnp.float64
        assert jnp.isfinite(product).all()


def test_other_dtypes_pass_through():
    def fun(tree):
        return {**tree, "c": tree["c"] @ tree["c"], "i": tree["i"] @ tree["i"]}

    tree = {
        "c": jnp.ones((2, 2), jnp.complex64),
        "i": jnp.full((2, 2), 70_000),
        "b": jnp.ones(2, bool),
        "k": jax.random.key(0),
        "h": jnp.ones(2, jnp.bfloat16),
        "e": jnp.zeros((0, 3)),
    }
    chex.assert_trees_all_equal(ols.autocast(fun)(tree), fun(tree))


def test_float64_passes_through():
    with enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2)))
        assert x.dtype == jnp.float64

        def fun(x):
            return jnp.sum(jnp.exp(x @ x))

        np.testing.assert_array_equal(ols.autocast(fun)(x), fun(x))
        assert_autocast(dot_loss, W, X)


def test_an_outer_product_is_not_treated_as_a_product():
    def fun(positions, frequencies):
        return jnp.sin(jnp.einsum("i,j->ij", positions, frequencies))

    args = jnp.arange(4096.0), jnp.asarray([1.0, 0.1])
    chex.assert_trees_all_close(ols.autocast(fun)(*args), fun(*args), atol=1e-6)


@pytest.mark.slow
def test_random_numbers_are_the_same_as_without_autocast():
    def fun(key):
        return jax.random.normal(key, (100, 100)), jax.random.gumbel(key, (100, 100))

    key = jax.random.key(0)
    expected = jax.jit(fun)(key)
    dtypes = (jnp.float16, jnp.bfloat16)
    for level, dtype in itertools.product(("O1", "O2", "O3"), dtypes):
        cast = ols.autocast(fun, dtype, level=level)
        chex.assert_trees_all_close(jax.jit(cast)(key), expected, rtol=1e-5)


def test_with_bfloat16_products_are_in_bfloat16():
    cast = ols.autocast(dot_loss, jnp.bfloat16)
    assert_close(cast(W, X), dot_loss(W, X), 5e-2)
    assert set(dtypes_of(jax.grad(cast), W, X)) == {("bfloat16", "bfloat16")}


@pytest.mark.fast_every(8)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    "low",
    [-1e9, pytest.param(float(np.finfo(np.float32).min), marks=pytest.mark.slow)],
)
def test_a_softmax_of_fully_masked_entries_is_uniform_at_every_level(level, dtype, low):
    mask = jnp.arange(4)[:, None] < jnp.asarray([[4], [4], [4], [0]])[:, 0][None]

    def attend(scores):
        return jax.nn.softmax(scores, axis=0)

    def by_where(w, x):
        return attend(jnp.where(mask, w @ x.T @ x, low))

    def by_sum(w, x):
        return attend(w @ x.T @ x + jnp.where(mask, 0.0, low))

    for fun in (by_where, by_sum):
        cast = ols.autocast(fun, dtype, level=level)
        np.testing.assert_allclose(cast(W, X)[:, 3], 0.25)
        assert np.isfinite(jax.grad(lambda w, f=cast: jnp.sum(f(w, X)[0]))(W)).all()

    def all_masked(w, x):
        return jax.nn.softmax(jnp.where(jnp.zeros((3, 4), bool), x @ w, low))

    cast = ols.autocast(all_masked, dtype, level=level)
    np.testing.assert_array_equal(cast(W, X), 0.25)


def test_a_mask_that_is_an_argument_is_not_treated_as_a_bias():
    mask = jnp.where(jnp.arange(4)[:, None] < 3, 0.0, -1e9) * jnp.ones((4, 4))

    def fun(w, x, mask):
        return jax.nn.softmax(w @ x.T @ x + mask)

    np.testing.assert_allclose(ols.autocast(fun)(W, X, mask)[3], 0.25)


def test_the_cube_of_a_product_is_in_float32():
    sevens = jnp.full((1, 1), 7.0)
    assert ols.autocast(lambda x, w: (x @ w) ** 3)(sevens, sevens) == 49.0**3
