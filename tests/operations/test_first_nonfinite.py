"""docs/guides/debugging_a_skipped_step.md: a fault is named, with line and cause."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.cases import slow_except
from helpers.modules import FRAMEWORKS
from helpers.places import place_of
from optax_lossscale.diagnostics import (
    first_nonfinite,
    gradient_errors,
    trace_operations,
)

X = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1, size=(3, 4)), jnp.float32)
NUMBERS = jnp.float32([[0.0, 1.0, 2.0]])


def half(x):
    return jnp.asarray(x, jnp.float16)


def beyond(largest):
    return (
        f"In float32 its largest entry is {largest}, beyond 65504, the largest number"
    )


ZERO = "An operand was zero."
FINITE = "It is not defined for its operands, which were finite."
INFINITE = "An operand was infinite, and the result is NaN."
TOO_LARGE = "An operand was too large: up to"
TOO_LOW = "An operand was too large for float16: 2e+05, beyond 65504."
REORDERED = "In float32 its largest entry is 180, so the compiler has changed the order"
CAUSES = [
    (jnp.log, "log", ZERO),
    (lambda x: x / x, "div", ZERO),
    (lambda x: 1 / x, "div", ZERO),
    (lambda x: x**-0.5, "pow", ZERO),
    (lambda x: jnp.sqrt(x - 1), "sqrt", FINITE),
    # Infinite at minus one or one, and NaN beyond.
    (lambda x: jnp.log1p(-x[:, :2]), "log1p", FINITE),
    (lambda x: jax.scipy.special.erfinv(x[:, 1:]), "erf_inv", FINITE),
    (lambda x: jnp.exp(100 + x), "exp", f"{TOO_LARGE} 102."),
    (lambda x: 1e38 * x + 2e38, "add", f"{TOO_LARGE} 2e+38."),
    (lambda x: jnp.linalg.inv(x.T * x), "triangular_solve", "The matrix was singular"),
    (lambda x: jnp.where(x < 5, -jnp.inf, x) - jnp.float32(-jnp.inf), "sub", INFINITE),
    # The largest entry is 200 * (300 + 600).
    (lambda x: 300 * x @ jnp.full((3, 2), 200.0), "dot_general", beyond("1.8e+05")),
    # Operands that are not differentiated are rounded in the product itself.
    (lambda x: 1e5 * x @ jnp.full((3, 2), 1e-3), "dot_general", TOO_LOW),
    (lambda x: half(1e5 * x), "convert_element_type", beyond("2e+05")),
    (lambda x: half(500 * x) * half(500 * x), "mul", beyond("1e+06")),
]


def test_the_causes_are_those_of_the_table_in_the_guide():
    def loss_fn(x):
        results = [fun(jax.lax.stop_gradient(x)) for fun, *_ in CAUSES]
        return jnp.sum(x), results

    made = [x for x in trace_operations(loss_fn, NUMBERS) if x.made_nonfinite]
    for operation, (_, primitive, cause) in zip(made, CAUSES, strict=True):
        assert operation.primitive == primitive
        assert operation.cause.startswith(cause)
    assert first_nonfinite(made) is made[0]
    assert not any(x.is_backward for x in made)
    assert all(x.where.startswith("test_first_nonfinite.py:") for x in made)


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="XLA keeps the order")
def test_an_overflow_that_is_due_to_the_compilers_order_is_named():
    def loss_fn(x):  # XLA multiplies 300 by 300 first.
        return jnp.sum(x), half(1e-3 * x) * half(300.0) * half(300.0)

    first = first_nonfinite(trace_operations(loss_fn, NUMBERS))
    assert first.primitive == "mul"
    assert first.cause.startswith(REORDERED)


def test_a_slope_that_is_infinite_at_zero_is_named():
    first = first_nonfinite(trace_operations(lambda x: jnp.sum(jnp.sqrt(x)), NUMBERS))
    assert (first.primitive, first.cause) == ("div", ZERO)


@pytest.mark.parametrize("number", [jnp.nan, jnp.inf])
def test_what_arguments_hold_and_a_program_writes_as_a_mask_is_not_made(number):
    def loss_fn(x):
        masked = jnp.where(NUMBERS > 0.7, NUMBERS, -jnp.inf)
        return jnp.sum(jnp.log(x)) + jnp.sum(x * jax.nn.softmax(masked))

    operations = trace_operations(loss_fn, NUMBERS.at[0, 1].set(number) + 1)
    assert any(operation.nonfinite for operation in operations)
    assert first_nonfinite(operations) is None


def assert_named(operation, primitive, where, scope, is_backward=False):
    assert (operation.primitive, operation.is_backward) == (primitive, is_backward)
    assert (operation.where, operation.scope) == (where, scope)
    assert operation.dtype == jnp.float16
    assert operation.largest == operation.error == math.inf


@pytest.mark.parametrize("name", slow_except({"nnx"}, FRAMEWORKS))
def test_overflows_in_a_layer_of_a_framework_are_named_in_both_passes(name):
    framework = FRAMEWORKS[name]

    def trace(factor, loss_scale=1.0):
        params = framework.make([factor * jnp.eye(4)] * 2)
        return trace_operations(loss_fn, params, X, loss_scale=loss_scale)

    def loss_fn(params, x):
        return jnp.mean(framework.call(params, x))

    line = place_of(framework.net.__call__, "layer")
    first = first_nonfinite(trace(300, loss_scale=2.0**15))
    assert_named(first, "dot_general", line, framework.scope)
    assert first.nonfinite == first.made_nonfinite == jnp.sum(X * 9e4 > 65504)
    np.testing.assert_allclose(first.float32_largest, 9e4 * jnp.max(X), rtol=1e-3)
    bits = math.log2(65504) - math.log2(first.float32_largest)
    np.testing.assert_allclose(first.headroom_bits, bits)
    assert not first.overflows_only_scaled
    # The cotangent of the mean is the loss scale / 12.
    first = first_nonfinite(trace(1, loss_scale=2.0**20))
    cast = "convert_element_type"
    assert_named(first, cast, line, framework.scope, is_backward=True)
    np.testing.assert_allclose(first.float32_largest, 2.0**20 / 12, rtol=1e-6)
    np.testing.assert_allclose(first.unscaled_headroom_bits, 16 + math.log2(12), 1e-3)
    assert first.overflows_only_scaled
    assert first_nonfinite(trace(1, loss_scale=2.0**19)) is None


@pytest.mark.slow
def test_the_line_whose_gradient_is_flushed_is_named():
    def loss_fn(w, x):
        with jax.named_scope("layer"):
            x = x @ w  # layer
        return jnp.mean(1e-4 * (1e-4 * x))

    worst = max(trace_operations(loss_fn, jnp.eye(4), X), key=lambda x: x.underflow)
    assert (worst.primitive, worst.is_backward) == ("convert_element_type", True)
    assert (worst.where, worst.scope) == (place_of(loss_fn, "layer"), "layer")
    assert worst.underflow == worst.error == 1.0
    np.testing.assert_allclose(worst.float32_largest, 1e-8 / 12, rtol=1e-3)
    scaled = trace_operations(loss_fn, jnp.eye(4), X, loss_scale=2.0**15)
    assert not any(x.underflow for x in scaled)


@pytest.mark.parametrize("look", [trace_operations, gradient_errors])
def test_a_call_without_values_or_without_a_loss_is_refused(look):
    with pytest.raises(TypeError, match=r"`args` must .*Call it outside `jit`"):
        jax.jit(lambda x: look(jnp.sum, x) and 0)(X)
    with pytest.raises(TypeError, match="`args` must hold arrays with values"):
        look(jnp.sum, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    with pytest.raises(TypeError, match="`args` must hold a floating array, got none"):
        look(jnp.sum, jnp.arange(3))
    for result, described in ((X, r"float32\[3,4\]"), (None, "None")):
        with pytest.raises(
            TypeError, match=rf"return a floating scalar, .*{described}"
        ):
            look(lambda x, result=result: result, X)
    with pytest.raises(ValueError, match="`loss_scale` must be"):
        look(jnp.sum, X, loss_scale=0.0)
