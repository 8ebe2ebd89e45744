"""A fault is planted in a model of each framework, and named by its line and module."""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from helpers.modules import LIST
from helpers.places import place_of
from optax_lossscale.diagnostics import first_nonfinite, trace_operations

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.uniform(0.5, 1.0, size=(3, 4)), jnp.float32)
LAYERS = 6
HALF_MAX = 65504.0


class Model(NamedTuple):
    """A model of a framework: six layers without biases, and a head that is given.

    Attributes:
      loss_fn: A function of `params` and `X`.
      params: What `loss_fn` is differentiated with respect to.
      product: The line that calls the layers.
      call: The line that calls the head.
      layer: The scope of a layer, by its number.
      head: The scope of the head.
    """

    loss_fn: Callable
    params: object
    product: str
    call: str
    layer: Callable
    head: str


def plain(head, factors):
    def forward(weights, x):
        for weight in weights:
            x = x @ weight  # layer
        return head(x)  # head

    weights = [jnp.eye(4) * factor for factor in factors]
    places = place_of(forward, "layer"), place_of(forward, "head")
    return Model(forward, weights, *places, lambda i: "", "")


class LinenHead(linen.Module):
    fun: Callable

    def __call__(self, x):
        return self.fun(x)


class LinenNet(linen.Module):
    fun: Callable

    @linen.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            x = linen.Dense(4, use_bias=False)(x)  # layer
        return LinenHead(self.fun, name="head")(x)  # head


def of_linen(head, factors):
    model = LinenNet(head)
    params = {
        f"Dense_{i}": {"kernel": jnp.eye(4) * factor}
        for i, factor in enumerate(factors)
    }

    def loss_fn(params, x):
        return model.apply({"params": params}, x)

    places = (place_of(LinenNet.__call__, name) for name in ("layer", "head"))
    return Model(
        loss_fn, params, *places, lambda i: f"LinenNet/Dense_{i}", "LinenNet/head"
    )


class NnxHead(nnx.Module):
    def __init__(self, fun):
        self.fun = fun

    def __call__(self, x):
        return self.fun(x)


class NnxNet(nnx.Module):
    def __init__(self, fun):
        rngs = nnx.Rngs(0)
        self.layers = LIST(
            [nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(LAYERS)]
        )
        self.head = NnxHead(fun)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)  # layer
        return self.head(x)  # head


def of_nnx(head, factors):
    model = NnxNet(head)
    for layer, factor in zip(model.layers, factors, strict=True):
        layer.kernel[...] = jnp.eye(4) * factor
    places = (place_of(NnxNet.__call__, name) for name in ("layer", "head"))
    return Model(
        lambda model, x: model(x),
        model,
        *places,
        lambda i: f"NnxNet/layers/{i}",
        "NnxNet/head",
    )


class EquinoxHead(eqx.Module):
    fun: Callable = eqx.field(static=True)

    def __call__(self, x):
        return self.fun(x)


class EquinoxNet(eqx.Module):
    layers: list
    head: EquinoxHead

    def __init__(self, fun, factors):
        layer = eqx.nn.Linear(4, 4, use_bias=False, key=jax.random.key(0))
        self.layers = [
            eqx.tree_at(lambda x: x.weight, layer, jnp.eye(4) * factor)
            for factor in factors
        ]
        self.head = EquinoxHead(fun)

    def __call__(self, x):
        for layer in self.layers:
            x = jax.vmap(layer)(x)  # layer
        return self.head(x)  # head


def of_equinox(head, factors):
    places = (place_of(EquinoxNet.__call__, name) for name in ("layer", "head"))
    return Model(
        lambda model, x: model(x),
        EquinoxNet(head, factors),
        *places,
        lambda i: f"EquinoxNet/layers/{i}/eqx.nn.Linear",  # Equinox adds the last.
        "EquinoxNet/head",
    )


FRAMEWORKS = pytest.mark.parametrize(
    "framework", [plain, of_linen, of_nnx, of_equinox], ids=lambda x: x.__name__
)
ONES = (1.0,) * LAYERS
# The fault is in the fifth layer: it has number 4.
FIFTH = (1.0, 1.0, 1.0, 300.0, 300.0, 1e-4)


def trace(model, **settings):
    return trace_operations(model.loss_fn, model.params, X, **settings)


def mean(x):
    return jnp.mean(x)


def softmax(x):
    """At 40, an exponential is beyond the range of float16, but not of float32."""
    powers = jnp.exp(40 * x)  # fault
    return -jnp.mean(jnp.log(powers / jnp.sum(powers, axis=-1, keepdims=True)))


def square(x):
    x = (1000 * x).astype(jnp.float16)
    return jnp.mean(x**2)  # fault


def large_slope(x):
    """The result is small; its derivative by `x` is 600 * 600 / 12."""
    small = 1e-6 * x
    x = (x - jax.lax.stop_gradient(x) + small).astype(jnp.float16)
    x = 600 * x  # fault
    return jnp.sum(600 * x) / 2


def flushed(x):
    """Backward, 1 / 12 times 1e-4 is 8e-6; times 1e-4 once more, it is zero."""
    x = 1e4 * x
    x = 1e-4 * x  # fault
    return jnp.mean(1e-4 * x)


def rounded(x):
    x = 1000 + x
    return jnp.mean(x - 1000)  # fault


@FRAMEWORKS
def test_the_product_of_the_fifth_layer_is_named(framework):
    model = framework(mean, FIFTH)
    first = first_nonfinite(trace(model))
    assert first.primitive == "dot_general"
    assert first.where == model.product
    assert first.scope == model.layer(4)
    assert not first.is_backward
    assert first.dtype == jnp.float16
    assert first.made_nonfinite == int(jnp.sum(X * 9e4 > HALF_MAX))
    assert first.nonfinite == first.made_nonfinite
    assert sorted(first.shape) == [3, 4]  # Equinox maps `W @ x`, so the rows are last.
    assert first.largest == math.inf
    np.testing.assert_allclose(first.float32_largest, 9e4 * jnp.max(X), rtol=2e-2)
    bits = math.log2(HALF_MAX) - math.log2(first.float32_largest)
    np.testing.assert_allclose(first.headroom_bits, bits)
    assert not first.overflows_only_scaled


@FRAMEWORKS
def test_an_exponential_without_its_maximum_is_named(framework):
    model = framework(softmax, ONES)
    first = first_nonfinite(trace(model, level="O2"))
    assert (first.primitive, first.where) == ("exp", place_of(softmax, "fault"))
    assert first.scope == model.head
    assert not first.is_backward
    # All entries of `X` are at least 0.5, so all 12 overflow.
    assert first.nonfinite == first.made_nonfinite == 12
    bits = math.log2(HALF_MAX) - 40 * float(jnp.max(X)) * math.log2(math.e)
    np.testing.assert_allclose(first.headroom_bits, bits, rtol=1e-2)


@FRAMEWORKS
def test_a_square_before_a_mean_is_named(framework):
    model = framework(square, ONES)
    first = first_nonfinite(trace(model))
    assert first.primitive in ("square", "integer_pow")
    assert first.where == place_of(square, "fault")
    assert first.scope == model.head
    assert not first.is_backward
    assert first.made_nonfinite == 12  # 500 squared is beyond 65504.
    np.testing.assert_allclose(
        first.float32_largest, (1000 * float(jnp.max(X))) ** 2, rtol=1e-2
    )


@FRAMEWORKS
def test_an_overflow_of_the_backward_pass_alone_is_named(framework):
    model = framework(large_slope, ONES)
    operations = trace(model)
    assert not any(x.nonfinite for x in operations if not x.is_backward)
    first = first_nonfinite(operations)
    assert (first.primitive, first.where) == ("mul", place_of(large_slope, "fault"))
    assert first.scope == model.head
    assert first.is_backward
    assert first.made_nonfinite == 12
    # The derivative of the loss by `x` is 600 * 600 / 2.
    np.testing.assert_allclose(first.float32_largest, 180_000, rtol=1e-3)
    assert not first.overflows_only_scaled


@FRAMEWORKS
def test_an_overflow_that_only_the_loss_scale_causes_is_told_apart(framework):
    """The cotangent of the mean is the scale divided by 12, and rounded first."""
    model = framework(mean, ONES)
    scale = 2.0**20
    first = first_nonfinite(trace(model, loss_scale=scale))
    assert first.is_backward
    assert first.overflows_only_scaled
    np.testing.assert_allclose(first.float32_largest, scale / 12, rtol=1e-3)
    bits = math.log2(HALF_MAX) - math.log2(scale / 12)
    np.testing.assert_allclose(first.headroom_bits, bits, rtol=1e-3)
    np.testing.assert_allclose(first.unscaled_headroom_bits, bits + 20, rtol=1e-3)
    assert first_nonfinite(trace(model, loss_scale=2.0**15)) is None


@FRAMEWORKS
@pytest.mark.parametrize(("fault", "loss_scale"), [(square, 256.0), (large_slope, 2.0)])
def test_an_overflow_at_any_scale_is_not_blamed_on_the_loss_scale(
    framework, fault, loss_scale
):
    """With a scale of 2, nothing of `large_slope` overflows that does not without."""
    model = framework(fault, ONES)
    first = first_nonfinite(trace(model, loss_scale=loss_scale))
    assert first.where == place_of(fault, "fault")
    assert first.scope == model.head
    assert not first.overflows_only_scaled


@FRAMEWORKS
def test_the_operation_that_flushes_most_of_the_gradient_is_named(framework):
    model = framework(flushed, ONES)
    operations = trace(model)
    worst = max(operations, key=lambda x: x.added_underflow)
    assert worst.is_backward
    assert (worst.primitive, worst.where) == ("mul", place_of(flushed, "fault"))
    assert worst.scope == model.head
    assert worst.underflow == worst.added_underflow == 1.0
    np.testing.assert_allclose(worst.float32_largest, 1e-8 / 12, rtol=1e-3)
    # A loss scale brings the gradient back.
    operations = trace(model, loss_scale=2.0**15)
    assert not any(x.underflow for x in operations)


@FRAMEWORKS
def test_the_operation_with_the_largest_error_is_named(framework):
    model = framework(rounded, ONES)
    operations = [x for x in trace(model) if not x.is_backward]
    worst = max(operations, key=lambda x: x.added_error)
    assert (worst.primitive, worst.where) == ("sub", place_of(rounded, "fault"))
    assert worst.scope == model.head
    # Between 512 and 1024, float16 has steps of 1/2; above, of 1.
    half = np.asarray(X, np.float16)
    result = (np.float16(1000) + half) - np.float16(1000)
    error = np.linalg.norm(result - np.asarray(X)) / np.linalg.norm(X)
    np.testing.assert_allclose(worst.error, error, rtol=1e-2)
    assert worst.error == max(x.error for x in operations)
