"""Settings of `autocast` and the markers, ways to decorate, and threads."""

import functools
import inspect
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.under_autocast import W, X, assert_close, dtypes_of

# --- Settings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"dtype": "O2"}, TypeError, r"Did you mean `level='O2'`\?"),
        ({"high": "Net/"}, TypeError, r"Did you mean `high=\['Net/'\]`\?"),
        ({"level": "02"}, ValueError, r"one of O0, O1, O2, O3.*Did you mean 'O2'\?"),
        ({"level": "o1"}, ValueError, r"Did you mean 'O1'\?"),
        ({"dtype": "fp16"}, TypeError, r"got 'fp16'\. \(Did you mean float16\?\)"),
        ({"dtype": jnp.float32}, ValueError, r"32. \(Did you mean float16\?\)$"),
        ({"dtype": jnp.float8_e5m2}, ValueError, "must be float16 or bfloat16, got"),
        ({"high": None}, TypeError, "`high` must be a sequence of scopes, got None"),
        ({"high": ["/"]}, ValueError, "must hold scopes such as .*, got '/'"),
    ],
)
def test_bad_settings_are_refused_before_the_first_call(settings, error, text):
    with pytest.raises(error, match=text):
        ols.autocast(**settings)


@pytest.mark.parametrize(
    ("take", "fun"),
    [
        (ols.autocast(level="O2"), nnx.Linear),
        (ols.full_precision, nnx.Linear),
        (ols.low_precision, X),
        (ols.autocast_report, X),
        (ols.diagnostics.trace_operations, None),
    ],
)
def test_what_is_not_a_function_is_refused(take, fun):
    with pytest.raises(TypeError, match=r"^`fun` must be a function, got "):
        take(fun)


@pytest.mark.parametrize("fun", [jnp.bfloat16, "fp16", "O2"])
def test_a_setting_in_the_place_of_the_function_is_refused_with_the_fix(fun):
    with pytest.raises(TypeError, match=r"`autocast\((dtype=jnp|level=')"):
        ols.autocast(fun)


def test_a_with_statement_is_refused():
    """As PyTorch's `with torch.autocast(...)`."""
    with pytest.raises(TypeError, match="is a decorator"), ols.autocast():
        pass


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
    def layer(w: jax.Array, *, scale: float = 1.0) -> jax.Array:
        """Scales."""
        return w * scale

    cast = ols.autocast(level="O2")(layer)
    assert (cast.__name__, cast.__doc__) == ("layer", "Scales.")
    assert inspect.signature(cast) == inspect.signature(layer)


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

    product, partial = Product(W), functools.partial(jnp.matmul, b=W)
    # Python keeps a partial function inside another where the inner one has a name.
    named = functools.partial(functools.update_wrapper(partial, jnp.matmul), X)
    np.testing.assert_array_equal(ols.autocast(named)(), ols.autocast(partial)(X))
    for fun in (partial, product, product.__call__):
        assert_close(ols.autocast(fun)(X), X @ W)
        assert dtypes_of(ols.autocast(fun), X) == ["float16"]
    assert dtypes_of(product.decorated, X) == ["float16"]


# --- When it is imported and called -----------------------------------------------

PROGRAM = """
import jax, jax.numpy as jnp, optax
import optax_lossscale as ols

tx = ols.loss_scaled(optax.sgd(0.1))
params, x = jnp.ones((4, 1)), jnp.full((2, 4), 0.1)

def loss_fn(params, x):
    return jnp.mean((x @ params) ** 2)

@jax.jit
def step(params, state, x):
    loss, grads = ols.scaled_value_and_grad(ols.autocast(loss_fn), state)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

state = tx.init(params)
for _ in range(3):
    params, state, loss = step(params, state, x)
print(step._cache_size())
"""


def test_autocast_that_is_first_named_inside_a_jitted_step_compiles_it_once():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["1"]


# --- Threads ----------------------------------------------------------------------


def test_threads_that_trace_at_the_same_time_have_settings_of_their_own():
    barrier = threading.Barrier(2, timeout=100)  # In case that one of them fails.

    @jax.jit
    def layer(x):
        return ols.low_precision(jnp.tanh)(x @ W)

    def run(dtype, wait):
        def fun(x):
            wait()
            y = layer(x)
            wait()
            return y

        return str(jax.make_jaxpr(ols.autocast(fun, dtype))(X))

    dtypes = ["float16", "bfloat16"]
    with ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(run, dtype, barrier.wait) for dtype in dtypes]
    alone = [run(dtype, lambda: None) for dtype in dtypes]
    assert [thread.result() for thread in threads] == alone
    assert ["bf16" in program for program in alone] == [False, True]
