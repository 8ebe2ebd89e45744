"""What is suggested brings the error of the gradients under the tolerance."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import optax_lossscale as ols
from helpers.modules import LIST
from optax_lossscale.diagnostics import suggest_full_precision, trace_operations

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.uniform(0.5, 1.0, size=(3, 4)), jnp.float32)
FACTORS = (1.0, 1.0, 300.0)
# The last layer receives a gradient of 7.5e-7, where float16 has steps of 6e-8. This
# alone makes an error of 3 %; the gradient that it hands on is 300 times as large.
SLOPE = 0.9e-5
KERNELS = [
    jnp.asarray(factor * RNG.normal(size=(4, 4)), jnp.float32) for factor in FACTORS
]
TOLERANCE = 0.01


def plain():
    def loss_fn(weights, x):
        for i, weight in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                x = x @ weight
        return SLOPE * jnp.mean(x)

    return loss_fn, KERNELS


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in FACTORS:
            x = linen.Dense(4, use_bias=False)(x)
        return x


def of_linen():
    params = {f"Dense_{i}": {"kernel": kernel} for i, kernel in enumerate(KERNELS)}

    def loss_fn(params, x):
        return SLOPE * jnp.mean(LinenNet().apply({"params": params}, x))

    return loss_fn, params


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        layers = [nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in FACTORS]
        for layer, kernel in zip(layers, KERNELS, strict=True):
            layer.kernel[...] = kernel
        self.layers = LIST(layers)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def of_nnx():
    return lambda model, x: SLOPE * jnp.mean(model(x)), NnxNet()


class EquinoxNet(eqx.Module):
    layers: list

    def __init__(self):
        layer = eqx.nn.Linear(4, 4, use_bias=False, key=jax.random.key(0))
        self.layers = [
            eqx.tree_at(lambda x: x.weight, layer, kernel.T) for kernel in KERNELS
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def of_equinox():
    return lambda model, x: SLOPE * jnp.mean(jax.vmap(model)(x)), EquinoxNet()


FRAMEWORKS = pytest.mark.parametrize(
    "framework", [plain, of_linen, of_nnx, of_equinox], ids=lambda x: x.__name__
)


def gradient(loss_fn, params):
    """The gradient as one vector."""
    if isinstance(params, nnx.Module):
        grads = nnx.grad(loss_fn)(params, X)
    else:
        grads = eqx.filter_grad(loss_fn)(params, X)
    leaves = [x for x in jax.tree.leaves(grads) if hasattr(x, "shape")]
    return np.concatenate([np.ravel(x) for x in leaves]).astype(np.float64)


def error_of(loss_fn, params, **settings):
    """The error of the gradient under autocast, relative to that in float32."""
    exact = gradient(loss_fn, params)
    cast = gradient(ols.autocast(loss_fn, **settings), params)
    return np.linalg.norm(cast - exact) / np.linalg.norm(exact)


@FRAMEWORKS
def test_with_the_suggested_names_the_gradient_is_exact_enough(framework):
    loss_fn, params = framework()
    assert error_of(loss_fn, params) > TOLERANCE
    operations = trace_operations(loss_fn, params, X)
    names = suggest_full_precision(operations, TOLERANCE)
    assert names
    assert names == sorted(names)
    assert error_of(loss_fn, params, high=names) <= TOLERANCE


@FRAMEWORKS
def test_no_suggested_name_can_be_left_out(framework):
    loss_fn, params = framework()
    operations = trace_operations(loss_fn, params, X)
    names = suggest_full_precision(operations, TOLERANCE)
    for name in names:
        others = [other for other in names if other != name]
        assert not error_of(loss_fn, params, high=others) <= TOLERANCE


@FRAMEWORKS
def test_a_gradient_that_is_exact_enough_needs_nothing(framework):
    loss_fn, params = framework()
    operations = trace_operations(loss_fn, params, X)
    tolerance = 1.01 * error_of(loss_fn, params)
    assert suggest_full_precision(operations, tolerance) == []


def test_badness_is_the_error_of_the_gradient():
    loss_fn, params = plain()
    operations = trace_operations(loss_fn, params, X)
    for high in ([], ["layer2/"], ["dot_general"]):
        badness = operations.badness(high)
        assert badness.nonfinite == badness.nonfinite_operations == 0
        expected = error_of(loss_fn, params, high=high)
        np.testing.assert_allclose(badness.error, expected, rtol=1e-2)


def test_an_overflowing_layer_is_suggested():
    def loss_fn(weights, x):
        for i, weight in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                x = x @ weight
        return jnp.mean(x)

    weights = [jnp.full((4, 4), number) for number in (1.0, 1e5, 1e-5)]
    names = suggest_full_precision(trace_operations(loss_fn, weights, X), TOLERANCE)
    assert "layer1/" in names
    assert "layer0/" not in names
    assert error_of(loss_fn, weights, high=names) <= TOLERANCE


def test_an_elementwise_operation_is_suggested_by_its_scope_or_primitive():
    """At O2 an exponential of 12 is beyond float16."""

    def loss_fn(w, x):
        y = x @ w
        with jax.named_scope("head"):
            return jnp.mean(jnp.log(jnp.exp(12 + y) + 1))

    w = KERNELS[0]
    names = suggest_full_precision(trace_operations(loss_fn, w, X, level="O2"), 0.02)
    assert "dot_general" not in names
    assert set(names) & {"head/", "exp"}
    assert error_of(loss_fn, w, level="O2", high=names) <= 0.02


def test_all_products_are_suggested_only_if_nothing_else_suffices():
    loss_fn, params = plain()
    operations = trace_operations(loss_fn, params, X)
    names = suggest_full_precision(operations, 1e-6)
    assert error_of(loss_fn, params, high=names) <= 1e-6


def test_the_names_are_those_for_the_settings_that_were_traced():
    loss_fn, params = plain()
    operations = trace_operations(loss_fn, params, X, dtype=jnp.bfloat16)
    tolerance = 0.5 * error_of(loss_fn, params, dtype=jnp.bfloat16)
    names = suggest_full_precision(operations, tolerance)
    assert names
    assert error_of(loss_fn, params, dtype=jnp.bfloat16, high=names) <= tolerance


def test_a_decorated_function_is_made_again_with_the_names():
    loss_fn, params = plain()
    operations = trace_operations(ols.autocast(loss_fn), params, X)
    names = suggest_full_precision(operations, TOLERANCE)
    assert error_of(loss_fn, params, high=names) <= TOLERANCE


def test_names_that_are_in_high_already_are_kept():
    loss_fn, params = plain()
    cast = ols.autocast(loss_fn, high=["mul"])
    names = suggest_full_precision(trace_operations(cast, params, X), TOLERANCE)
    assert error_of(loss_fn, params, high=["mul", *names]) <= TOLERANCE


def test_with_a_loss_scale_less_is_suggested():
    def loss_fn(w, x):
        with jax.named_scope("layer"):
            return jnp.mean(1e-4 * (1e-4 * (x @ w)))

    operations = trace_operations(loss_fn, KERNELS[0], X)
    assert suggest_full_precision(operations, TOLERANCE)
    operations = trace_operations(loss_fn, KERNELS[0], X, loss_scale=2.0**15)
    assert suggest_full_precision(operations, TOLERANCE) == []


def test_a_part_of_the_operations_is_refused():
    loss_fn, params = plain()
    operations = trace_operations(loss_fn, params, X)
    with pytest.raises(TypeError, match="must be what `trace_operations` returned"):
        suggest_full_precision(operations[:3], 0.1)
    with pytest.raises(TypeError, match="got list"):
        suggest_full_precision([], 0.1)


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan")])
def test_a_tolerance_that_is_not_positive_is_refused(tolerance):
    loss_fn, params = plain()
    operations = trace_operations(loss_fn, params, X)
    with pytest.raises(ValueError, match="`tolerance` must be"):
        suggest_full_precision(operations, tolerance)


def test_a_tolerance_of_another_kind_is_refused():
    operations = trace_operations(*plain(), X)
    with pytest.raises(TypeError, match="`tolerance` must be"):
        suggest_full_precision(operations, "small")


def test_a_function_that_casts_itself_cannot_be_mended():
    def loss_fn(w, x):
        return jnp.mean((x.astype(jnp.float16) @ w.astype(jnp.float16)) ** 2)

    operations = trace_operations(loss_fn, KERNELS[0], X)
    with pytest.raises(ValueError, match="`tolerance` must be one that can be reached"):
        suggest_full_precision(operations, 1e-6)


def test_a_function_that_calls_one_under_autocast_cannot_be_mended():
    loss_fn, params = plain()
    cast = ols.autocast(loss_fn)
    operations = trace_operations(lambda params, x: cast(params, x), params, X)
    with pytest.raises(ValueError, match=r"without its own `autocast`"):
        suggest_full_precision(operations, TOLERANCE)


def error_of_results(fun, **settings):
    """The error of the results of a function under autocast."""
    cast, exact = (f(KERNELS[0], X) for f in (ols.autocast(fun, **settings), fun))
    difference, exact = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
        for tree in (jax.tree.map(jnp.subtract, cast, exact), exact)
    )
    return np.linalg.norm(difference) / np.linalg.norm(exact)


def test_a_function_without_a_loss_is_judged_by_its_results():
    """The second product has operands of 1e-7, where float16 has steps of 6e-8."""

    def forward(w, x):
        with jax.named_scope("exact"):
            x = x @ w
        with jax.named_scope("rounded"):
            return {"y": x @ (1e-7 * w)}

    assert error_of_results(forward) > TOLERANCE
    operations = trace_operations(forward, KERNELS[0], X)
    names = suggest_full_precision(operations, TOLERANCE)
    assert names == ["rounded/"]
    assert error_of_results(forward, high=names) <= TOLERANCE


def test_an_operation_whose_result_is_rounded_afterwards_is_suggested():
    """At O2 the sum with an argument is computed in float32, and then rounded."""

    def forward(w, x):
        return {"y": (x + 1000) - 1000, "z": x @ w}

    assert error_of_results(forward, level="O2") > TOLERANCE
    assert error_of_results(forward, level="O2", high=["add"]) <= TOLERANCE
    operations = trace_operations(forward, KERNELS[0], X, level="O2")
    names = suggest_full_precision(operations, TOLERANCE)
    assert error_of_results(forward, level="O2", high=names) <= TOLERANCE
