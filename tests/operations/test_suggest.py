"""With what is suggested, no product overflows or is less exact than the tolerance."""

import functools
import math
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.modules import FRAMEWORKS
from helpers.places import place_of
from helpers.under_autocast import dtypes_of
from optax_lossscale.diagnostics import suggest_full_precision, trace_operations

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.uniform(0.5, 1.0, size=(3, 4)), jnp.float32)
# The operands of `layer1` are too large for float16, and those of `layer2` too small.
KERNELS = [
    jnp.asarray(factor * RNG.uniform(0.5, 1.0, size=(4, 4)), jnp.float32)
    for factor in (1.0, 1e5, 1e-7, 1.0)
]
SCALE = 2.0**10


@jax.jit
def layer(weight, x):
    return x @ weight


def scoped_loss(weights, x):
    for i, weight in enumerate(weights):
        with jax.named_scope(f"layer{i}"):
            x = layer(weight, x)
    return jnp.mean(x)


def error_of(loss_fn, params, **settings):
    """The error of the gradient under autocast, relative to that in float32."""
    cast = ols.autocast(loss_fn, **settings)
    exact, grads = (
        np.concatenate([np.ravel(x) for x in jax.jit(jax.grad(fun))(params)])
        for fun in (
            lambda params: SCALE * loss_fn(params, X),
            lambda params: SCALE * cast(params, X),
        )
    )
    return np.linalg.norm(grads - exact) / np.linalg.norm(exact)


trace = functools.partial(trace_operations, loss_scale=SCALE)


@functools.cache
def scoped_operations():
    return trace(scoped_loss, KERNELS, X)


def test_the_scopes_of_products_that_overflow_or_lose_much_are_suggested():
    assert not error_of(scoped_loss, KERNELS) < 0.01
    names = suggest_full_precision(scoped_operations())
    assert names == ["layer1/", "layer2/"]
    assert error_of(scoped_loss, KERNELS, high=names) < 0.01


def test_a_product_that_overflows_only_because_an_earlier_one_did_is_not_named():
    def loss_fn(weight, x):
        # The weight is beyond the range of float16, and the result is not.
        with jax.named_scope("first"):
            x = jnp.minimum(x @ weight, 6e4)
        with jax.named_scope("second"):
            return jnp.mean(x @ jnp.full((2, 2), 2.0))

    operations = trace(loss_fn, jnp.full((2, 2), 2.0**17), jnp.full((1, 2), 2.0**-12))
    assert suggest_full_precision(operations) == ["first/"]


def test_the_tolerance_is_that_of_each_product():
    """A rounding to float16 has an error of up to 2**-11, and about 3e-4 by norm."""
    operations = trace(scoped_loss, KERNELS[:1], X)
    assert suggest_full_precision(operations, tolerance=1e-3) == []
    assert suggest_full_precision(operations, tolerance=1e-6) == ["layer0/"]


def test_without_scopes_lines_are_suggested():
    def loss_fn(weights, x):
        a, b, c, _ = weights
        x = x @ a
        x = x @ b  # too large
        x = x @ c  # too small
        return jnp.mean(x)

    names = suggest_full_precision(trace(loss_fn, KERNELS, X))
    assert names == [place_of(loss_fn, name) for name in ("too large", "too small")]
    mended = ols.autocast(loss_fn, high=names)
    assert dtypes_of(mended, KERNELS, X) == ["float16", "float32", "float32"]


def test_a_scope_around_a_loop_is_suggested():
    """JAX moves casts out of a loop, and forgets the scopes around it."""

    def loss_fn(weights, x):
        with jax.named_scope("loop"):
            advance = lambda x, _: (jnp.tanh(x @ weights[0]), None)  # noqa: E731
            x = jax.lax.scan(advance, x, None, length=2)[0]
        return jnp.mean(x)

    names = suggest_full_precision(trace(loss_fn, [1e5 * jnp.eye(4)], X))
    assert names == ["loop/"]
    cast = ols.autocast(loss_fn, high=names)
    assert dtypes_of(cast, [1e5 * jnp.eye(4)], X) == ["float32"]


# Each case compiles three programs; test_planted_faults.py names layers of all three.
@pytest.mark.fast_every(3)
@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_modules_are_suggested_by_their_paths(framework):
    def loss_fn(params, x):
        return jnp.mean(framework.call(params, x))

    params = framework.make(KERNELS[:3])
    names = suggest_full_precision(trace(loss_fn, params, X))
    assert names == [framework.scope.format(i) + "/" for i in (1, 2)]
    mended = ols.autocast(loss_fn, high=names)
    dtypes = dtypes_of(lambda: mended(params, X))
    assert dtypes == ["float16", "float32", "float32"]


def test_a_function_under_autocast_is_run_again_with_its_own_settings():
    cast = ols.autocast(scoped_loss, high=["layer0/"])
    weights = [KERNELS[1], KERNELS[2]]
    assert suggest_full_precision(trace(cast, weights, X)) == ["layer1/"]


def test_a_flushed_cotangent_is_a_fault_of_its_product():
    def loss_fn(weights, x):
        return 1e-9 * scoped_loss(weights, x)

    operations = trace_operations(loss_fn, KERNELS[:1], X)
    assert suggest_full_precision(operations) == ["layer0/"]
    operations = trace_operations(loss_fn, KERNELS[:1], X, loss_scale=2.0**30)
    assert suggest_full_precision(operations) == []


def test_a_fault_that_is_no_product_is_named():
    def loss_fn(weights, x):
        return jnp.log(0 * scoped_loss(weights, x))

    operations = trace(loss_fn, KERNELS[:1], X)
    with pytest.raises(ValueError, match=r"got none\. The first: log at test_suggest"):
        suggest_full_precision(operations)


def test_the_product_before_a_decomposition_that_fails_is_suggested():
    """The matrix is [[1, 1], [1, 1.0001]], which in float16 is singular."""

    def loss_fn(features):
        with jax.named_scope("layer"):
            features = features @ jnp.eye(2)
        with jax.named_scope("matrix"):
            matrix = features @ features.T
        return jnp.sum(jnp.linalg.cholesky(matrix))

    features = jnp.array([[1.0, 0.0], [1.0, 0.01]])
    names = suggest_full_precision(trace(loss_fn, features))
    assert names == ["matrix/"]
    assert jnp.isfinite(jax.jit(ols.autocast(loss_fn, high=names))(features))


@pytest.mark.parametrize("module", [mock.MagicMock(), None], ids=["tqdm", "no tqdm"])
def test_runs_are_counted_if_tqdm_is_installed(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", module)
    operations = trace(scoped_loss, KERNELS[1:2], X)
    assert suggest_full_precision(operations) == ["layer0/"]
    if module:
        bar = module.tqdm.return_value.__enter__.return_value
        assert bar.update.call_count == 1


def test_a_mask_that_overflows_on_the_line_of_a_product_is_no_fault():
    def loss_fn(weights, x):
        mask = jnp.tri(3, 4)
        return jnp.mean(jax.nn.softmax(x @ weights[0] + jnp.where(mask, 0.0, -1e9)))

    assert suggest_full_precision(trace(loss_fn, KERNELS[:1], X, level="O2")) == []


def test_nonfinite_arguments_are_no_fault_of_a_product():
    operations = trace(scoped_loss, [KERNELS[0] * jnp.inf], X)
    with pytest.raises(ValueError, match=r"NaN or infinity is in the arguments\."):
        suggest_full_precision(operations)


def test_a_function_that_casts_itself_cannot_be_mended():
    def loss_fn(w, x):
        product = x.astype(jnp.float16) @ w.astype(jnp.float16)
        return jnp.mean(product.astype(jnp.float32) ** 2)

    operations = trace(loss_fn, KERNELS[0], X)
    with pytest.raises(ValueError, match=r"Does the function cast to float16 itself\?"):
        suggest_full_precision(operations, tolerance=1e-6)


@pytest.mark.parametrize("operations", [[], scoped_operations()[:3]])
def test_a_part_of_the_operations_is_refused(operations):
    with pytest.raises(TypeError, match="must be what `trace_operations` returned"):
        suggest_full_precision(operations)


@pytest.mark.parametrize(
    ("tolerance", "error"),
    [(0.0, ValueError), (math.nan, ValueError), ("a", TypeError)],
)
def test_a_tolerance_that_is_no_positive_number_is_refused(tolerance, error):
    with pytest.raises(error, match="`tolerance` must be"):
        suggest_full_precision(scoped_operations(), tolerance=tolerance)
