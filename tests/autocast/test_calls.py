"""Settings of `autocast` and the markers, ways to decorate, and threads."""

import functools
import inspect
import itertools
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
from helpers.under_autocast import W, X, assert_close, dot_loss, dtypes_of
from optax_lossscale import diagnostics

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
        ({"dtype": "fp16"}, TypeError, r"got 'fp16'\. \(Did you mean float16\?\)"),
        ({"dtype": jnp.float32}, ValueError, r"32. \(Did you mean float16\?\)$"),
        ({"dtype": jnp.float8_e5m2}, ValueError, "must be float16 or bfloat16, got"),
        ({"high": None}, TypeError, "`high` must be a sequence of scopes, got None"),
        ({"high": [3]}, ValueError, "must hold scopes such as 'Net/Dense_0/', got 3"),
        ({"high": ["/"]}, ValueError, "must hold scopes such as .*, got '/'"),
    ],
)
def test_bad_settings_are_refused_before_the_first_call(make, settings, error, text):
    with pytest.raises(error, match=text):
        make(settings)


DECORATORS = [ols.autocast(level="O2"), ols.full_precision, ols.low_precision]
LOOKS = [ols.autocast_report, diagnostics.trace_operations]


@pytest.mark.parametrize(
    ("take", "fun"),
    [
        *itertools.product(DECORATORS + LOOKS, [3, None, X]),
        *itertools.product(DECORATORS, [nnx.Linear]),
    ],
)
def test_what_is_not_a_function_is_refused(take, fun):
    with pytest.raises(TypeError, match=r"^`fun` must be a function, got "):
        take(fun)


@pytest.mark.parametrize("fun", [jnp.bfloat16, np.dtype("float16"), "fp16", "O2"])
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

SETTINGS = [
    {"dtype": dtype, "high": high}
    for dtype in ("float16", "bfloat16")
    for high in ((), ("Net/",))
]
ROUNDS = 4


def make_loss():
    """A loss with a jitted layer and a kernel, none of which JAX has traced yet."""
    kernel = ols.low_precision(lambda x: jnp.tanh(x))

    @jax.jit
    def layer(w, x):
        return kernel(x @ w)

    def loss(w, x):
        with jax.named_scope("Net"):
            return jnp.mean(layer(w, x))

    return loss


@pytest.mark.slow
def test_eight_threads_at_once_get_what_each_gets_alone():
    barrier = threading.Barrier(8, timeout=100)  # In case that one of them fails.

    def run(losses, settings, wait):
        seen = []
        for loss in losses:
            wait()
            cast = ols.autocast(loss, **settings)
            seen.append(str(jax.make_jaxpr(jax.value_and_grad(cast))(W, X)))
            seen.append(float(cast(W, X)))
        return seen

    shared = [make_loss() for _ in range(ROUNDS)]
    with ThreadPoolExecutor(8) as pool:
        threads = [pool.submit(run, shared, s, barrier.wait) for s in SETTINGS * 2]
    alone = [
        run([make_loss() for _ in range(ROUNDS)], settings, lambda: None)
        for settings in SETTINGS
    ]
    assert [thread.result() for thread in threads] == alone * 2
    assert len(set(map(str, alone))) == len(SETTINGS)
