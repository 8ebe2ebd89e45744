"""What `trace_operations` refuses, and what it says."""

import jax
import jax.numpy as jnp
import pytest

from optax_lossscale.diagnostics import trace_operations

W, X = jnp.eye(3), jnp.ones((2, 3))


def loss_fn(w, x):
    return jnp.mean(x @ w)


def test_arguments_without_values_are_refused():
    with pytest.raises(TypeError, match=r"`args` must .*Call it outside `jit`"):
        jax.jit(lambda w, x: len(trace_operations(loss_fn, w, x)))(W, X)
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    with pytest.raises(TypeError, match="`args` must hold arrays with values"):
        trace_operations(loss_fn, W, shape)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"loss_scale": 0.0}, ValueError, "`loss_scale` must be"),
        ({"loss_scale": "high"}, TypeError, "`loss_scale` must be"),
        ({"level": "O4"}, ValueError, r"`level` must be one of .*got 'O4'"),
        ({"dtype": jnp.float32}, ValueError, "`dtype` must be float16 or bfloat16"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, error, text):
    with pytest.raises(error, match=text):
        trace_operations(loss_fn, W, X, **settings)


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (lambda x: x, r"float32\[2,3\]"),
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
