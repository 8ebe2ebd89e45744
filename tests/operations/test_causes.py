"""What is said of the first operation that made NaN or infinity."""

import jax
import jax.numpy as jnp
import pytest

from helpers.places import place_of
from optax_lossscale.diagnostics import (
    first_nonfinite,
    print_operation_report,
    trace_operations,
)

X = jnp.float32([[0.0, 1.0, 2.0]])


def half_product(x):
    x = (500 * x).astype(jnp.float16)
    return (x * x).astype(jnp.float32)  # fault


ZERO = "An operand was zero."
FINITE = "It is not defined for its operands, which were finite."
INFINITE = "An operand was infinite, and the result is NaN."
CAUSES = [
    (jnp.log, "log", ZERO),
    (lambda x: jnp.log1p(-x[:, :2]), "log1p", FINITE),
    (lambda x: jnp.arctanh(x[:, :2]), "atanh", FINITE),
    (jax.scipy.special.gammaln, "lgamma", FINITE),
    (lambda x: x / x, "div", ZERO),
    (lambda x: 1 / x, "div", ZERO),
    (lambda x: x**-2, "integer_pow", ZERO),
    (lambda x: x**-0.5, "pow", ZERO),
    (lambda x: (1e30 * x) ** 1.5, "pow", "An operand was too large: up to 2e+30."),
    (lambda x: jnp.sqrt(x - 1), "sqrt", FINITE),
    (lambda x: jnp.exp(100 + x), "exp", "An operand was too large: up to 102."),
    (
        lambda x: (x * 1e30) ** 2,
        ("square", "integer_pow"),
        "An operand was too large: up to 2e+30.",
    ),
    # Infinite at one, and NaN beyond.
    (lambda x: jax.scipy.special.erfinv(x[:, 1:]), "erf_inv", FINITE),
    (
        lambda x: jnp.linalg.inv(jnp.ones((2, 2)) + 0 * x[0, 0]),
        "triangular_solve",
        "The matrix was singular, or nearly so.",
    ),
    (lambda x: jnp.where(x < 5, -jnp.inf, x) - jnp.float32(-jnp.inf), "sub", INFINITE),
    (
        lambda x: (300 * x) @ jnp.full((3, 2), 200.0),
        "dot_general",
        "In float32 its largest entry is 1.8e+05, beyond 65504, ",  # 200 * (300 + 600)
    ),
    (
        lambda x: (1e5 * x) @ jnp.full((3, 2), 1e-3),
        "convert_element_type",
        "In float32 its largest entry is 2e+05, beyond ",
    ),
    (
        half_product,
        "mul",
        "In float32 its largest entry is 1e+06, beyond 65504, the largest ",
    ),
]


def test_an_operation_may_have_a_result_that_is_no_float_before_one_that_is():
    def loss_fn(x, key):
        return jnp.sum(x - jax.random.permutation(key, jnp.log(X[0])))

    operations = trace_operations(loss_fn, X[0], jax.random.key(0))
    assert first_nonfinite(operations).primitive == "log"
    (sort,) = [x for x in operations if x.primitive == "sort"]
    assert (sort.dtype, sort.shape, sort.nonfinite) == (jnp.float32, (3,), 1)


@pytest.mark.parametrize(("fun", "primitive", "cause"), CAUSES)
def test_the_first_operation_and_what_its_operands_were_are_named(
    fun, primitive, cause, capsys
):
    operations = trace_operations(lambda x: jnp.sum(fun(x)), X)
    first = first_nonfinite(operations)
    assert first.primitive in primitive
    assert first.where.startswith("test_causes.py:")
    assert not first.is_backward
    assert first.cause.startswith(cause)
    print_operation_report(operations, limit=1)
    assert f"{first.where}, forward pass: " in capsys.readouterr().out


def test_an_operand_of_a_product_that_is_not_differentiated_is_too_large():
    """Its operands are rounded in the product itself, not by casts before it."""

    def loss_fn(w, x):
        return jnp.sum(w) + jnp.sum(jax.lax.stop_gradient(x @ x.T))  # fault

    first = first_nonfinite(trace_operations(loss_fn, jnp.ones(2), 1e5 * X))
    assert first.where == place_of(loss_fn, "fault")
    assert first.cause == "An operand was too large for float16: 2e+05, beyond 65504."


def test_a_slope_at_zero_is_found_in_the_backward_pass():
    """The slope of a root is not finite at zero."""
    first = first_nonfinite(trace_operations(lambda x: jnp.sum(jnp.sqrt(x)), X))
    assert (first.primitive, first.cause) == ("div", "An operand was zero.")


@pytest.mark.parametrize(
    ("fun", "x"),
    [
        (jnp.log, X.at[0, 0].set(jnp.inf)),
        (lambda x: jax.nn.softmax(jnp.where(x > 0.7, x, -jnp.inf)), X),
        (lambda x: jnp.exp(x - jnp.inf), X),
    ],
)
def test_infinities_of_arguments_and_those_that_a_program_writes_are_not_made(fun, x):
    operations = trace_operations(lambda x: jnp.sum(fun(x)), x)
    assert any(operation.nonfinite for operation in operations)
    assert first_nonfinite(operations) is None
