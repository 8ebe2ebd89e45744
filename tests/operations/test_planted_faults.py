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
    return jnp.sum(600 * jnp.abs(x)) / 2  # XLA does not multiply 600 by 600.


def flushed(x):
    """The cotangent of the last layer is 1e-8 / 12, which is zero in float16."""
    return jnp.mean(1e-4 * (1e-4 * x))


def rounded(x):
    """Between 512 and 1024, float16 has steps of 1/2; only differences remain."""
    differences = jnp.float32([[1, 0], [-1, 1], [0, -1], [0, 0]])
    return jnp.mean(((500 + x) @ differences) ** 2)  # fault


class Fault(NamedTuple):
    """Where a planted fault is: in the head or in a layer."""

    head: Callable
    primitive: str
    is_backward: bool = False
    layer: int | None = None
    factors: tuple = ONES
    settings: dict = {}  # noqa: RUF012


FAULTS = {
    "product": Fault(mean, "dot_general", layer=4, factors=FIFTH),
    "softmax": Fault(softmax, "exp", settings={"level": "O2"}),
    "square": Fault(square, "square integer_pow"),
    "square, scaled": Fault(
        square, "square integer_pow", settings={"loss_scale": 256.0}
    ),
    "slope": Fault(large_slope, "mul", is_backward=True),
    "slope, scaled": Fault(
        large_slope, "mul", is_backward=True, settings={"loss_scale": 2.0}
    ),
}


def assert_named(operation, model, fault):
    """An operation is the fault that was planted in a model."""
    assert operation.primitive in fault.primitive
    assert operation.is_backward == fault.is_backward
    is_head = fault.layer is None
    line = place_of(fault.head, "fault") if is_head else model.product
    assert operation.where == line
    assert operation.scope == (model.head if is_head else model.layer(fault.layer))


@FRAMEWORKS
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_overflow_is_named(framework, fault):
    model = framework(fault.head, fault.factors)
    first = first_nonfinite(trace(model, **fault.settings))
    assert_named(first, model, fault)
    assert not first.overflows_only_scaled
    assert first.nonfinite == first.made_nonfinite


@FRAMEWORKS
def test_the_product_whose_gradient_is_flushed_is_named(framework):
    model = framework(flushed, ONES)
    worst = max(trace(model), key=lambda x: x.underflow)
    cast = Fault(flushed, "convert_element_type", is_backward=True, layer=5)
    assert_named(worst, model, cast)
    assert worst.underflow == worst.error == 1.0
    np.testing.assert_allclose(worst.float32_largest, 1e-8 / 12, rtol=1e-3)
    # A loss scale brings the gradient back.
    assert not any(x.underflow for x in trace(model, loss_scale=2.0**15))


@FRAMEWORKS
def test_the_product_with_the_largest_error_is_named(framework):
    model = framework(rounded, ONES)
    worst = max(trace(model, loss_scale=2.0**15), key=lambda x: x.error)
    assert_named(worst, model, Fault(rounded, "dot_general"))
    half = np.asarray(500 + X, np.float16).astype(np.float32)
    exact, cast = (np.diff(x[:, :3]) for x in (np.asarray(500 + X), half))
    error = np.linalg.norm(cast - exact) / np.linalg.norm(exact)
    np.testing.assert_allclose(worst.error, error, rtol=1e-2)


@FRAMEWORKS
def test_an_overflow_that_only_the_loss_scale_causes_is_told_apart(framework):
    """The cotangent of the mean is the scale / 12, and is cast for the product."""
    model, scale = framework(mean, ONES), 2.0**20
    first = first_nonfinite(trace(model, loss_scale=scale))
    cast = Fault(mean, "convert_element_type", is_backward=True, layer=5)
    assert_named(first, model, cast)
    assert first.overflows_only_scaled
    bits = math.log2(HALF_MAX) - math.log2(scale / 12)
    np.testing.assert_allclose(first.headroom_bits, bits, rtol=1e-3)
    np.testing.assert_allclose(first.unscaled_headroom_bits, bits + 20, rtol=1e-3)
    assert first_nonfinite(trace(model, loss_scale=2.0**15)) is None


def test_the_numbers_of_an_overflowing_product():
    first = first_nonfinite(trace(plain(mean, FIFTH)))
    assert first.dtype == jnp.float16
    assert first.nonfinite == int(jnp.sum(X * 9e4 > HALF_MAX))
    assert first.shape == (3, 4)
    assert first.largest == first.error == math.inf
    np.testing.assert_allclose(first.float32_largest, 9e4 * jnp.max(X), rtol=2e-2)
    bits = math.log2(HALF_MAX) - math.log2(first.float32_largest)
    np.testing.assert_allclose(first.headroom_bits, bits)


def test_the_numbers_of_operations_that_the_function_casts_itself():
    """An exponential at O2, and a product of halves in the backward pass."""
    first = first_nonfinite(trace(plain(softmax, ONES), level="O2"))
    # All entries of `X` are at least 0.5, so all 12 overflow.
    assert first.nonfinite == 12
    bits = math.log2(HALF_MAX) - 40 * float(jnp.max(X)) * math.log2(math.e)
    np.testing.assert_allclose(first.headroom_bits, bits, rtol=1e-2)
    operations = trace(plain(large_slope, ONES))
    assert not any(x.nonfinite for x in operations if not x.is_backward)
    # The derivative of the loss by `x` is 600 * 600 / 2.
    first = first_nonfinite(operations)
    np.testing.assert_allclose(first.float32_largest, 180_000, rtol=1e-3)
