"""A planted fault is named by its line and scope, in plain JAX and in frameworks."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.modules import FRAMEWORKS, ROWS, Net, arrays_of, mean_square
from helpers.operations import rounded as as_float16
from helpers.places import place_of
from helpers.under_autocast import dtypes_of
from optax_lossscale.diagnostics import (
    first_nonfinite,
    print_operation_report,
    trace_operations,
)

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.uniform(0.5, 1.0, size=(3, 4)), jnp.float32)
HALF_MAX = 65504.0
ONES = [jnp.eye(4)] * 2
SECOND_OVERFLOWS = [300 * jnp.eye(4)] * 2


def loss_with(head):
    """Layers, and a head that is given."""

    def loss_fn(kernels, x):
        for i, kernel in enumerate(kernels):
            with jax.named_scope(f"layer{i}"):
                x = x @ kernel  # layer
        with jax.named_scope("head"):
            return head(x)

    return loss_fn


def trace(loss_fn, params=ONES, **settings):
    return trace_operations(loss_fn, params, X, **settings)


def flushed(x):
    """The cotangent of the last layer is 1e-8 / 12, which is zero in float16."""
    return jnp.mean(1e-4 * (1e-4 * x))


def rounded(x):
    """Between 512 and 1024, float16 has steps of 1/2; only differences remain."""
    differences = jnp.float32([[1, 0], [-1, 1], [0, -1], [0, 0]])
    return jnp.mean(((500 + x) @ differences) ** 2)  # fault


def assert_named(operation, primitives, where, scope, is_backward=False):
    assert operation.primitive in primitives
    assert operation.is_backward == is_backward
    assert (operation.where, operation.scope) == (where, scope)


def assert_beyond_float16(operation, largest, count):
    """Its result in float32 is of this size, and so many entries are infinite."""
    assert operation.dtype == jnp.float16
    assert sorted(operation.shape) == [3, 4]  # Equinox's is transposed.
    assert operation.nonfinite == operation.made_nonfinite == count
    assert operation.largest == operation.error == math.inf
    np.testing.assert_allclose(operation.float32_largest, largest, rtol=3e-2)
    bits = math.log2(HALF_MAX) - math.log2(operation.float32_largest)
    np.testing.assert_allclose(operation.headroom_bits, bits)
    assert not operation.overflows_only_scaled


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_faults_in_layers_of_a_framework_are_named_forward_and_backward(framework):
    def loss_fn(params, x):
        return jnp.mean(framework.call(params, x))

    line = place_of(framework.net.__call__, "layer")
    first = first_nonfinite(trace(loss_fn, framework.make(SECOND_OVERFLOWS)))
    assert_named(first, ["dot_general"], line, framework.scope)
    count = int(jnp.sum(X * 9e4 > HALF_MAX))
    assert_beyond_float16(first, 9e4 * jnp.max(X), count)
    first = first_nonfinite(trace(loss_fn, framework.make(ONES), loss_scale=2.0**20))
    kinds = ["convert_element_type"]
    assert_named(first, kinds, line, framework.scope, is_backward=True)


@pytest.mark.slow
def test_the_product_whose_gradient_is_flushed_is_named():
    loss_fn = loss_with(flushed)
    worst = max(trace(loss_fn), key=lambda x: x.underflow)
    line = place_of(loss_fn, "layer")
    assert_named(worst, ["convert_element_type"], line, "layer1", is_backward=True)
    assert worst.underflow == worst.error == 1.0
    np.testing.assert_allclose(worst.float32_largest, 1e-8 / 12, rtol=1e-3)
    # A loss scale brings the gradient back.
    assert not any(x.underflow for x in trace(loss_fn, loss_scale=2.0**15))


@pytest.mark.slow
def test_the_product_with_the_largest_error_is_named():
    operations = trace(loss_with(rounded), loss_scale=2.0**15)
    worst = max(operations, key=lambda x: x.error)
    assert_named(worst, ["dot_general"], place_of(rounded, "fault"), "head")
    exact, cast = (np.diff(x[:, :3]) for x in (500 + X, as_float16(500 + X)))
    error = np.linalg.norm(cast - exact) / np.linalg.norm(exact)
    np.testing.assert_allclose(worst.error, error, rtol=1e-2)


def test_an_overflow_that_only_the_loss_scale_causes_is_told_apart():
    """The cotangent of the mean is the scale / 12, and is cast for the product."""
    loss_fn, scale = loss_with(jnp.mean), 2.0**20
    first = first_nonfinite(trace(loss_fn, loss_scale=scale))
    assert first.overflows_only_scaled
    np.testing.assert_allclose(first.float32_largest, scale / 12, rtol=1e-6)
    bits = math.log2(HALF_MAX) - math.log2(scale / 12)
    np.testing.assert_allclose(first.headroom_bits, bits, rtol=1e-3)
    np.testing.assert_allclose(first.unscaled_headroom_bits, bits + 20, rtol=1e-3)
    assert first_nonfinite(trace(loss_fn, loss_scale=scale / 2)) is None


@pytest.mark.slow
def test_with_the_lines_of_the_report_in_high_no_operation_loses_much(capsys):
    def loss_fn(kernels, x):
        exact, large, small = kernels
        x = x @ exact
        x = x @ large  # beyond the range
        x = x @ small  # subnormal
        return jnp.mean(x)

    kernels = [factor * jnp.eye(4) for factor in (1.0, 1e5, 1e-7)]
    print_operation_report(trace(loss_fn, kernels, loss_scale=2.0**10))
    lines = set(re.findall(r"\S+:\d+ \(\S+?\)", capsys.readouterr().out))
    assert lines == {
        place_of(loss_fn, name) for name in ("beyond the range", "subnormal")
    }
    mended = ols.autocast(loss_fn, high=sorted(lines))
    print_operation_report(trace(mended, kernels, loss_scale=2.0**10))
    assert "No operation loses more than a few roundings do." in capsys.readouterr().out
    assert dtypes_of(mended, kernels, X) == ["float16", "float32", "float32"]


@pytest.mark.slow
def test_the_state_of_an_nnx_module_is_unchanged_and_its_products_have_its_lines():
    net = Net()
    before = arrays_of(net)
    trace_operations(lambda net, x: jnp.mean(net.encode(x)), net, ROWS)
    assert_same_bits(arrays_of(net), before)
    net.eval()
    operations = trace_operations(lambda x: mean_square(net, x), ROWS)
    products = [x for x in operations if x.primitive == "dot_general"]
    assert {x.where for x in products} == {place_of(Net.__call__, "layers")}
