"""Settings, arguments and results; `autocast` as a decorator."""

import functools
import inspect
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import optax_lossscale as ols
from helpers.under_autocast import W, X, assert_close, dot_loss, dtypes_of
from optax_lossscale import diagnostics
from optax_lossscale._ground.tree import are_same

# --- Settings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda s: ols.autocast(dot_loss, **s), lambda s: ols.autocast(**s)]
)
@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"dtype": "O2"}, TypeError, r"Did you mean `level='O2'`\?"),
        ({"high": "Net/"}, TypeError, r"Did you mean `high=\['Net/'\]`\?"),
        ({"level": "02"}, ValueError, r"one of O0, O1, O2, O3.*Did you mean 'O2'\?"),
        ({"level": "o1"}, ValueError, r"Did you mean 'O1'\?"),
        ({"dtype": jnp.int8}, TypeError, "`dtype` must be a floating dtype"),
        ({"dtype": None}, TypeError, "must be a floating dtype, got None"),
        ({"dtype": 16}, TypeError, "must be a floating dtype, got 16"),
        ({"dtype": "fp16"}, TypeError, r"got 'fp16'\. \(Did you mean float16\?\)"),
        ({"dtype": "bf16"}, TypeError, r"\(Did you mean bfloat16\?\)"),
        ({"dtype": "mixed_float16"}, TypeError, r"\(Did you mean float16\?\)"),
        ({"dtype": jnp.float32}, ValueError, r"32. \(Did you mean float16\?\)$"),
        *(
            ({"dtype": dtype}, ValueError, "`dtype` must be float16 or bfloat16, got")
            for dtype in (jnp.float64, jnp.float8_e4m3fn, jnp.float8_e5m2)
        ),
        ({"high": None}, TypeError, "`high` must be a sequence of scopes, got None"),
        ({"high": [3]}, ValueError, "must hold scopes such as 'Net/Dense_0/', got 3"),
        ({"high": ["/"]}, ValueError, "must hold scopes such as .*, got '/'"),
    ],
)
def test_bad_settings_are_refused_before_the_first_call(make, settings, error, text):
    with pytest.raises(error, match=text):
        make(settings)


@pytest.mark.parametrize(
    ("fun", "text"),
    [
        *((dtype, "dtype=jnp.bfloat16") for dtype in ("bfloat16", jnp.bfloat16)),
        *((dtype, "dtype=jnp.float16") for dtype in (np.float16, np.dtype("float16"))),
        ("fp16", "dtype=jnp.float16"),
        ("bf16", "dtype=jnp.bfloat16"),
        ("O2", "level='O2'"),
        *((kind, "Decorate a method of the class") for kind in (nn.Dense, float)),
        (X, "`fun` must be a function"),
    ],
    ids=repr,
)
def test_what_is_not_a_function_is_refused_with_the_fix(fun, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        ols.autocast(fun)


@pytest.mark.parametrize(
    ("decorate", "text"),
    [
        (ols.autocast(level="O2"), "Decorate a method of the class"),
        (ols.low_precision, "Mark a method of a class, or an object"),
        (ols.full_precision, "Mark a method of a class, or an object"),
    ],
)
@pytest.mark.parametrize("kind", [nnx.Linear, eqx.nn.Linear])
def test_a_class_is_refused_by_every_decorator(kind, decorate, text):
    with pytest.raises(TypeError, match=text):
        decorate(kind)


@pytest.mark.parametrize("fun", [3, None, X])
@pytest.mark.parametrize(
    "take",
    [
        ols.full_precision,
        ols.low_precision,
        ols.autocast_report,
        diagnostics.trace_operations,
    ],
)
def test_every_other_name_refuses_what_is_not_a_function(take, fun):
    with pytest.raises(TypeError, match="`fun` must be a function, got "):
        take(fun)


# --- Decorators -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decorate", "dtype"),
    [
        (ols.autocast, "float16"),
        (ols.autocast(), "float16"),
        (ols.autocast(None, jnp.bfloat16), "bfloat16"),
        (ols.autocast(high=["layer"]), "float32"),
    ],
)
def test_the_settings_of_a_decorator_hold(decorate, dtype):
    @decorate
    def product(w, x):
        with jax.named_scope("layer"):
            return x @ w

    assert dtypes_of(product, W, X) == [dtype]
    assert_close(product(W, X), X @ W, 3e-2)


def test_name_docstring_and_signature_of_a_decorated_function_are_kept():
    @ols.autocast(level="O2")
    def layer(w: jax.Array, *, scale: float = 1.0) -> jax.Array:
        """Scales."""
        return w * scale

    assert (layer.__name__, layer.__doc__) == ("layer", "Scales.")
    signature = inspect.signature(layer)
    assert list(signature.parameters) == ["w", "scale"]
    assert signature.parameters["scale"].default == 1.0
    assert signature.return_annotation is jax.Array


@pytest.mark.parametrize("mark", [ols.autocast, ols.autocast(), ols.low_precision])
def test_static_and_class_methods_stay_what_they_are(mark):
    class Layers:
        @mark
        @staticmethod
        def static(x):
            return x @ W

        @mark
        @classmethod
        def of_class(cls, x):
            assert cls is Layers
            return x @ W

    for owner in (Layers, Layers()):
        assert_close((owner.static(X), owner.of_class(X)), (X @ W, X @ W))


def test_methods_objects_and_partial_functions_can_be_wrapped():
    class Product:
        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return x @ self.w

        @ols.autocast
        def decorated(self, x):
            return x @ self.w

    product = Product(W)
    for fun in (functools.partial(jnp.matmul, b=W), product, product.__call__):
        assert_close(ols.autocast(fun)(X), X @ W)
        assert dtypes_of(ols.autocast(fun), X) == ["float16"]
    assert dtypes_of(product.decorated, X) == ["float16"]


# --- Arguments and results --------------------------------------------------------


def test_results_keep_their_dtypes_and_can_be_of_any_type():
    def fun(w, x, name):
        half = (x @ w).astype(jnp.float16)
        return {"y": x @ w, "half": half, "name": name, "none": None, "n": 3, "w": w}

    result = ols.autocast(fun)(W, X, name="layer")
    assert (result["name"], result["none"], result["n"]) == ("layer", None, 3)
    assert (result["y"].dtype, result["half"].dtype) == (jnp.float32, jnp.float16)
    np.testing.assert_array_equal(result["w"], W)
    assert ols.autocast(lambda x: None)(X) is None
    assert ols.autocast(lambda: ())() == ()


def test_arguments_that_are_not_arrays_are_static():
    def fun(w, x, rows, *, power, act):
        return jnp.sum(act(x @ w).reshape(rows, -1) ** power)

    settings = {"rows": np.int64(2), "power": 2, "act": jnp.tanh}
    assert_close(ols.autocast(fun)(W, X, **settings), fun(W, X, **settings))


@pytest.mark.slow
def test_an_integer_array_can_be_the_bound_of_a_loop_that_is_differentiated():
    def fun(w, n):
        return jnp.sum(lax.fori_loop(0, n, lambda i, x: jnp.tanh(x @ w), X))

    for bound in (jnp.int32(3), np.array(3)):
        grads = jax.grad(ols.autocast(fun))(W, bound)
        assert_close(grads, jax.grad(fun)(W, 3))


def test_a_traced_integer_can_be_the_index_of_an_integer_array():
    def fun(w, sizes):
        return jnp.sum(X @ w) + jnp.float32(sizes[jnp.argmin(sizes)])

    sizes = jnp.array([3, 1, 2])
    assert_close(ols.autocast(fun)(W, sizes), fun(W, sizes))


def test_a_bool_array_can_choose_in_python_outside_of_jit():
    fun = ols.autocast(lambda x, flag: x @ W if flag else x)
    assert_close(fun(X, jnp.array(False)), X)
    assert_close(fun(X, jnp.array(True)), X @ W)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_what_a_function_returns_untouched_is_what_it_was_given(level):
    tree = {"w": W, "half": W.astype(jnp.float16), "count": jnp.int32(3)}
    tree |= {"key": jax.random.key(0), "name": "layer", "act": jnp.tanh, "rate": 0.5}

    @ols.autocast(level=level)
    def fun(tree):
        return tree["w"] @ tree["w"], tree

    assert are_same(jax.tree.leaves(fun(tree)[1]), jax.tree.leaves(tree))
