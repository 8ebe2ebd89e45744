"""What `trace_operations` refuses, and what it says."""

import jax
import jax.numpy as jnp
import pytest

from optax_lossscale.diagnostics import trace_operations

W, X = jnp.eye(3), jnp.ones((2, 3))


def loss_fn(w, x):
    return jnp.mean(x @ w)


@pytest.mark.parametrize("fun", [None, 3.0, "loss_fn"])
def test_what_is_no_function_is_refused(fun):
    with pytest.raises(TypeError, match="`fun` must be a function, got"):
        trace_operations(fun, W, X)


def test_a_call_inside_jit_is_refused():
    with pytest.raises(TypeError, match=r"`args` must .*Call it outside `jit`"):
        jax.jit(lambda w, x: len(trace_operations(loss_fn, w, x)))(W, X)


def test_arguments_without_values_are_refused():
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    with pytest.raises(TypeError, match="`args` must hold arrays with values"):
        trace_operations(loss_fn, W, shape)


@pytest.mark.parametrize("loss_scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_loss_scale_that_is_not_positive_and_finite_is_refused(loss_scale):
    with pytest.raises(ValueError, match="`loss_scale` must be"):
        trace_operations(loss_fn, W, X, loss_scale=loss_scale)


@pytest.mark.parametrize("loss_scale", ["high", None])
def test_a_loss_scale_of_another_kind_is_refused(loss_scale):
    with pytest.raises(TypeError, match="`loss_scale` must be"):
        trace_operations(loss_fn, W, X, loss_scale=loss_scale)


def test_a_level_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"`level` must be one of .*got 'O4'"):
        trace_operations(loss_fn, W, X, level="O4")


def test_a_dtype_that_is_not_narrower_is_refused():
    with pytest.raises(ValueError, match="`dtype` must be narrower than float32"):
        trace_operations(loss_fn, W, X, dtype=jnp.float32)


def test_errors_of_the_function_are_its_own():
    def fail(w, x):
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        trace_operations(fail, W, X)


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (lambda x: x, r"float32\[2,3\]"),
        (lambda x: {"y": x}, r"float32\[2,3\]"),
        (lambda x: (x, x), r"float32\[2,3\]"),
        (lambda x: None, "None"),
        (lambda x: jnp.int32(3), r"int32\[\]"),
    ],
)
def test_a_function_without_a_scalar_loss_is_refused(result, described):
    with pytest.raises(
        TypeError, match=rf"`fun` must return a floating scalar, .*{described}"
    ):
        trace_operations(lambda w, x: result(x @ w), W, X)


@pytest.mark.parametrize("args", [(), (3,), ("name", None), (jnp.arange(3),)])
def test_a_function_without_floating_arrays_is_refused(args):
    with pytest.raises(TypeError, match="`args` must hold a floating array, got none"):
        trace_operations(lambda *args: 1.0, *args)


def test_what_jax_cannot_differentiate_is_refused_by_jax():
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        trace_operations(lambda rows, x: jnp.sum(x[rows]), jnp.arange(2), X)
