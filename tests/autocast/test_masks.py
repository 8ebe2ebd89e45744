"""Numbers that the low dtype cannot hold: masks, small epsilons, large polynomials."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_lossscale as ols
from helpers.programs import dtypes_of
from helpers.under_autocast import HALF, W, X, assert_close

LEVELS = [("float16", "O1"), ("float16", "O2"), ("float16", "O3"), ("bfloat16", "O1")]
FLOAT32_MIN = float(np.finfo(np.float32).min)
LEGAL = jnp.arange(4) < 2


def mask_of(low):
    return jnp.where(LEGAL, 0.0, low)


def entropy(logits):
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def in_loop(w, x, mask):
    return lax.scan(lambda carry, row: (carry, row @ w + mask), 0.0, x)[1]


def masked(w, x, mask):
    return x @ w + mask[None]


MASKED = {
    "added": masked,
    "added first": lambda w, x, mask: mask[None] + x @ w,
    "a full array": lambda w, x, mask: x @ w + jnp.stack([mask] * 3),
    "subtracted": lambda w, x, mask: x @ w - (-mask)[None],
    "vmap": lambda w, x, mask: jax.vmap(lambda row: row @ w + mask)(x),
    "jit": lambda w, x, mask: jax.jit(jnp.add)(x @ w, mask[None]),
    "checkpoint": lambda w, x, mask: jax.checkpoint(jnp.add)(x @ w, mask[None]),
    "scan": in_loop,
    "a temperature": lambda *args: masked(*args) / 0.1,
    "a factor": lambda *args: 8.0 * masked(*args),
    "a value of each row": lambda w, x, mask: masked(w, x, mask) + (x @ w)[:, :1],
    "a part": lambda *args: masked(*args)[:, 1:],
    "sorted": lambda *args: lax.top_k(masked(*args), 3)[0],
    "beside others": lambda w, x, mask: jnp.concatenate(
        [masked(w, x, mask), x @ w], axis=1
    ),
    "where": lambda w, x, mask: jnp.where(LEGAL[None], x @ w, mask[3]),
    "maximum": lambda w, x, mask: jnp.maximum(masked(w, x, mask), mask[None]),
}


@pytest.mark.fast_every(16)
@pytest.mark.parametrize("name", MASKED)
def test_the_entropy_of_masked_logits_is_that_of_float32(name):
    mask = mask_of(-1e9)
    expected = entropy(MASKED[name](W, X, mask))
    for dtype, level in LEVELS:
        cast = ols.autocast(
            lambda *args: entropy(MASKED[name](*args)), dtype, level=level
        )
        np.testing.assert_allclose(cast(W, X, mask), expected, atol=5e-2)


@pytest.mark.parametrize("low", [-70_000.0, -1e30, FLOAT32_MIN])
def test_a_mask_may_be_any_number_and_may_be_closed_over(low):
    mask = mask_of(low)
    expected = entropy(masked(W, X, mask))
    for dtype in ("float16", "bfloat16"):
        cast = ols.autocast(lambda w, x: entropy(masked(w, x, mask)), dtype)
        np.testing.assert_allclose(cast(W, X), expected, atol=5e-2)


def test_a_mask_of_infinities_stays_one():
    cast = ols.autocast(lambda w, x, mask: jax.nn.softmax(masked(w, x, mask)))
    mask = mask_of(-jnp.inf)
    assert_close(cast(W, X, mask), jax.nn.softmax(masked(W, X, mask)))


@pytest.mark.fast_every(6)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_gradient_past_a_mask_of_one_axis_is_right(dtype, level):
    def loss(w, x, mask):
        return jnp.sum(entropy(masked(w, x, mask)))

    for low in (-1e9, FLOAT32_MIN):
        cast = ols.autocast(loss, dtype, level=level)
        grads = jax.grad(cast, argnums=(0, 2))(W, X, mask_of(low))
        assert_close(grads, jax.grad(loss, argnums=(0, 2))(W, X, mask_of(low)), 5e-2)


def test_a_sum_with_a_bias_ends_at_the_largest_number_unless_it_is_infinite():
    cast = ols.autocast(lambda w, x, b: jnp.max(x @ w + b[None], axis=0))
    bias = jnp.float32([-1e9, 1e9, -jnp.inf, jnp.nan])
    np.testing.assert_array_equal(
        cast(jnp.eye(4), jnp.ones((1, 4)), bias), [-65504, 65504, -jnp.inf, jnp.nan]
    )


def test_a_saturated_sum_saves_nothing_more_for_the_backward_pass():
    x, w, b = jnp.ones((64, 4)), jnp.ones((4, 64)), jnp.ones(64)

    def saved(fun):
        cast = ols.autocast(lambda w: jnp.sum(jnp.tanh(fun(x @ w))))
        leaves = jax.tree.leaves(jax.vjp(cast, w)[1])
        return [leaf.dtype.name for leaf in leaves if leaf.size == 64 * 64]

    assert saved(lambda y: y + b[None]) == saved(lambda y: y)


def test_a_product_that_stays_in_float32_is_not_rounded_with_its_bias():
    x, bias = 1e3 * X, jnp.float32([1e5, 2e5, 3e5, 4e5])
    kept = ols.autocast(lambda w, x, b: ols.full_precision(jnp.dot)(x, w) + b[None])
    high = ols.autocast(lambda w, x, b: x @ w + b[None], high=["dot_general"])
    outer = ols.autocast(lambda w, x, b: jnp.outer(x[:, 0], w[0]) + b[None])
    np.testing.assert_allclose(kept(W, x, bias), x @ W + bias[None], rtol=1e-6)
    np.testing.assert_allclose(high(W, x, bias), x @ W + bias[None], rtol=1e-6)
    np.testing.assert_allclose(
        outer(W, x, bias), jnp.outer(x[:, 0], W[0]) + bias[None], rtol=1e-6
    )


@pytest.mark.fast_every(6)
@pytest.mark.parametrize("name", ["add", "maximum", "clip", "where", "jit", "quotient"])
@pytest.mark.parametrize("small", [1e-6, 1e-8, 1e-12])
def test_a_small_epsilon_keeps_a_logarithm_finite_at_every_level(name, small):
    def raised(p):
        return {
            "add": lambda: p + small,
            "maximum": lambda: jnp.maximum(p, small),
            "clip": lambda: jnp.clip(p, small, 1.0),
            "where": lambda: jnp.where(p > 1e-6, p, small),
            "jit": lambda: jax.jit(jnp.add)(p, small),
            "quotient": lambda: 1 / (1 / (p + small)),
        }[name]()

    def fun(w, x):
        return -jnp.log(raised(jax.nn.softmax(40 * (x @ w))))

    for dtype, level in LEVELS:
        cast = ols.autocast(fun, dtype, level=level)
        np.testing.assert_allclose(cast(W, X), fun(W, X), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_vector_of_zeros_divided_by_its_norm_is_zero(level):
    def fun(w, x):
        y = x @ w
        norm = jnp.sqrt(jnp.sum(y * y, axis=-1, keepdims=True))
        return y / jnp.maximum(norm, 1e-12), y / (jnp.abs(y) + 1e-9)

    for result in ols.autocast(fun, level=level)(W, 0 * X):
        np.testing.assert_array_equal(result, jnp.zeros((3, 4)))


def test_targets_beyond_the_range_are_subtracted_in_float32_at_every_level():
    def loss(w, x, target):
        return jnp.mean((x @ w - target) ** 2)

    target = jnp.full((3, 4), 1e6)
    for level in ("O1", "O2", "O3"):
        result = ols.autocast(loss, level=level)(W, X, target)
        np.testing.assert_allclose(result, 1e12, rtol=1e-3)


def polynomial(y, c):
    return y + c * y**3


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda fun: fun])
def test_a_polynomial_with_a_coefficient_through_jit_or_checkpoint_is_right(wrap):
    def fun(w, x):
        return wrap(polynomial)(x @ w, 0.01)

    for x in (X, 100 * X):
        assert_close(ols.autocast(fun)(W, x), fun(W, x))


def test_a_polynomial_with_a_coefficient_through_cond_is_right():
    def fun(w, x):
        return lax.cond(x[0, 0] > -9, polynomial, lambda y, c: y, x @ w, 0.01)

    assert_close(ols.autocast(fun)(W, X), fun(W, X))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_gelu_of_a_large_product_and_its_gradient_are_finite_and_half_precise(level):
    def fun(w, x):
        return jnp.sum(jax.nn.gelu(x @ w))

    for x in (X, 500 * X):
        cast = ols.autocast(fun, level=level)
        assert_close(jax.grad(cast)(W, x), jax.grad(fun)(W, x), 3e-2)
        assert dtypes_of(cast, W, x, name="tanh") == [("float16",)]


def test_gelu_runs_in_shard_map_with_checked_replication():
    spec = jax.sharding.PartitionSpec("i")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("i",), axis_types=auto)
    fun = ols.autocast(lambda x: jax.nn.gelu(x @ W + jnp.ones((1, 4))))
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec)
    assert_close(mapped(X), jax.nn.gelu(X @ W + 1))


def test_a_contraction_of_size_one_sums_nothing_and_stays_in_float32():
    def fun(positions, frequencies):
        return jnp.sin(positions[:, None] @ frequencies[None])

    args = jnp.arange(4096.0), jnp.float32([1.0, 0.1])
    for level in ("O1", "O2", "O3"):
        cast = ols.autocast(fun, level=level)
        np.testing.assert_allclose(cast(*args), fun(*args), atol=1e-5)


def test_a_cast_to_float32_inside_full_precision_runs():
    def fun(w, x):
        return ols.full_precision(lambda y: lax.convert_element_type(y, jnp.float32))(
            lax.reduce_precision(x @ w, 8, 23)
        )

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    assert dtypes_of(ols.autocast(fun), W, X) == [HALF]
