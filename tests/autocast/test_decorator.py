"""`autocast` as a decorator, with and without settings, of functions and of methods."""

import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import optax_lossscale as ols
from helpers.modules import ROWS, Net, assert_same_state
from helpers.programs import dtypes_of
from helpers.under_autocast import HALF, W, X, assert_close, dot_loss

BFLOAT = ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("decorate", "dtypes"),
    [
        (ols.autocast, HALF),
        (ols.autocast(), HALF),
        (ols.autocast(level="O2"), HALF),
        (ols.autocast(dtype=jnp.bfloat16), BFLOAT),
        (ols.autocast(None, jnp.bfloat16), BFLOAT),
        (ols.autocast(level="O0"), ("float32", "float32")),
        (ols.autocast(high=["dot_general"]), ("float32", "float32")),
    ],
)
def test_the_settings_of_a_decorator_hold(decorate, dtypes):
    @decorate
    def product(w, x):
        return x @ w

    assert dtypes_of(product, W, X) == [dtypes]
    assert_close(product(W, X), X @ W, 3e-2)


def test_one_decorator_serves_many_functions():
    decorate = ols.autocast(level="O2")
    for factor in (1.0, 2.0):
        fun = decorate(lambda x, factor=factor: x * factor)
        assert float(fun(jnp.ones(()))) == factor


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"level": "02"}, ValueError, r"Did you mean 'O2'\?"),
        ({"dtype": jnp.int8}, TypeError, "`dtype` must be a floating dtype"),
        ({"low": ["expp"]}, ValueError, r"Did you mean 'exp'\?"),
        ({"high": "exp"}, TypeError, "must be a sequence of names"),
    ],
)
def test_bad_settings_are_refused_before_the_function_is_known(settings, error, text):
    with pytest.raises(error, match=text):
        ols.autocast(**settings)


@pytest.mark.parametrize(
    "dtype",
    [
        *(jnp.bfloat16, ml_dtypes.bfloat16, "bfloat16", jnp.dtype("bfloat16")),
        *(jnp.float16, np.float16, "float16", np.dtype("float16")),
    ],
)
def test_a_dtype_in_the_place_of_the_function_is_refused_with_the_fix(dtype):
    name = jnp.dtype(dtype).name
    with pytest.raises(TypeError, match=rf"`autocast\(dtype=jnp\.{name}\)`\?"):
        ols.autocast(dtype)


def test_a_level_in_the_place_of_the_function_is_refused_with_the_fix():
    with pytest.raises(TypeError, match=r"`autocast\(level='O2'\)`\?"):
        ols.autocast("O2")


@pytest.mark.parametrize("kind", [nn.Dense, nnx.Linear, eqx.nn.Linear, float])
def test_a_class_is_refused_with_the_fix(kind):
    with pytest.raises(TypeError, match="Decorate a method of the class"):
        ols.autocast(kind)
    with pytest.raises(TypeError, match="Decorate a method of the class"):
        ols.autocast(level="O2")(kind)


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


def test_a_decorated_function_can_be_decorated_again():
    inner = ols.autocast(level="O2")(dot_loss)
    outer = ols.autocast(dtype=jnp.bfloat16)(inner)
    assert_close(outer(W, X), dot_loss(W, X), 5e-2)


def test_static_and_class_methods_stay_what_they_are():
    class Layers:
        @ols.autocast(level="O2")
        @staticmethod
        def static(x):
            return x @ W

        @ols.autocast
        @classmethod
        def of_class(cls, x):
            assert cls is Layers
            return x @ W

        @staticmethod
        @ols.autocast()
        def outside(x):
            return x @ W

    for owner in (Layers, Layers()):
        for fun in (owner.static, owner.of_class, owner.outside):
            assert_close(fun(X), X @ W)


def test_a_partial_function_and_an_object_can_be_wrapped():
    class Product:
        def __call__(self, x):
            return x @ W

    for fun in (functools.partial(jnp.matmul, b=W), Product(), Product().__call__):
        cast = ols.autocast(level="O2")(fun)
        assert_close(cast(X), X @ W)
        assert dtypes_of(cast, X) == [HALF]


def test_methods_of_an_nnx_module_can_be_decorated():
    class Cast(Net):
        @ols.autocast(level="O1")
        def __call__(self, x):
            return Net.__call__(self, x)

        @ols.autocast()
        def encode(self, x):
            return self(x)

    plain, cast = Net(), Cast()
    for _ in range(2):
        assert_same_state(cast(ROWS), plain(ROWS))
        assert_same_state(cast.encode(ROWS), plain.encode(ROWS))
    assert cast.dropout.rngs.count[...] == 4
    assert_same_state(nnx.state(cast), nnx.state(plain))


def test_methods_of_an_equinox_module_can_be_decorated_or_wrapped():
    class Layer(eqx.Module):
        linear: eqx.nn.Linear

        def plain(self, x):
            return jax.vmap(self.linear)(x)

        @ols.autocast(level="O1")
        def __call__(self, x):
            return self.plain(x)

    layer = Layer(eqx.nn.Linear(4, 4, key=jax.random.key(0)))

    def gradient(fun):
        grads = eqx.filter_grad(lambda layer: jnp.mean(jnp.square(fun(layer))))(layer)
        return grads.linear.weight

    expected = layer.plain(X), gradient(lambda layer: layer.plain(X))
    assert_close((layer(X), gradient(lambda layer: layer(X))), expected, 2e-2)
    wrapped = (
        ols.autocast(layer.plain)(X),
        gradient(lambda layer: ols.autocast(layer.plain)(X)),
    )
    assert_close(wrapped, expected, 2e-2)


class Layers(nn.Module):
    """A linen module with parameters, statistics and dropout."""

    def layers(self, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            kernel_init = nn.initializers.orthogonal()  # Computed by products.
            x = nn.Dense(4, kernel_init=kernel_init, name="dense")(x)
            x = nn.BatchNorm(use_running_average=False, name="norm")(x)
            self.sow("intermediates", "normalized", x)
            return nn.Dropout(0.5, deterministic=False, name="dropout")(x)


class Plain(Layers):
    @nn.compact
    def __call__(self, x):
        return self.layers(x)


class AroundCompact(Layers):
    @ols.autocast(level="O1")
    @nn.compact
    def __call__(self, x):
        return self.layers(x)


class InsideCompact(Layers):
    @nn.compact
    @ols.autocast
    def __call__(self, x):
        return self.layers(x)


class Closure(Layers):
    @nn.compact
    def __call__(self, x):
        return ols.autocast(lambda x: self.layers(x))(x)


class Called(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(4, name="dense")
        norm = nn.BatchNorm(use_running_average=False, name="norm")
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            x = ols.autocast(norm.__call__)(ols.autocast(dense)(x))
            self.sow("intermediates", "normalized", x)
            return nn.Dropout(0.5, deterministic=False, name="dropout")(x)


KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


@pytest.mark.parametrize("kind", [AroundCompact, InsideCompact, Closure])
def test_a_linen_module_makes_the_parameters_that_it_makes_without(kind):
    expected = Plain().init(KEYS, ROWS)
    for level in ("O1", "O3"):
        cast = ols.autocast(level=level)(kind.__call__)
        variables = type("Cast", (kind,), {"__call__": cast})().init(KEYS, ROWS)
        assert_same_state(variables, expected, rtol=1e-6)


@pytest.mark.fast_every(4)
@pytest.mark.parametrize("jit", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", [AroundCompact, InsideCompact, Closure, Called])
def test_what_a_linen_module_changes_comes_out(kind, jit):
    variables = Plain().init(KEYS, ROWS)

    def apply(model):
        mutable = ["batch_stats", "intermediates"]
        rngs = {"dropout": jax.random.key(2)}
        fun = functools.partial(model.apply, mutable=mutable, rngs=rngs)
        return jit(lambda x: fun(variables, x))(ROWS)

    (result, changed), (expected, other) = apply(kind()), apply(Plain())
    assert not np.array_equal(changed["batch_stats"]["norm"]["mean"], jnp.zeros(4))
    assert_same_state(changed, other)
    assert_same_state(result, expected)
    program = jax.make_jaxpr(lambda: apply(kind()))()
    assert "f16" in str(program)


def test_gradients_of_a_decorated_linen_module_are_right():
    variables = Plain().init(KEYS, ROWS)

    def gradient(model):
        def loss(params):
            rngs = {"dropout": jax.random.key(2)}
            both = {**variables, "params": params}
            x, state = model.apply(both, ROWS, mutable=["batch_stats"], rngs=rngs)
            return jnp.mean((x - 1) ** 2), state

        return jax.grad(loss, has_aux=True)(variables["params"])

    assert_same_state(gradient(AroundCompact()), gradient(Plain()), rtol=5e-2)


def test_a_bound_linen_module_keeps_its_statistics_and_no_tracer():
    norm = nn.BatchNorm(use_running_average=False)
    variables = norm.init(KEYS, ROWS)
    cast, plain = (norm.bind(variables, mutable=["batch_stats"]) for _ in range(2))
    for fun in (cast, cast.__call__, lambda x: cast(x)):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            ols.autocast(fun)(ROWS)
            plain(ROWS)
        assert_same_state(cast.variables, plain.variables)


def test_an_error_inside_leaves_no_tracer_in_a_bound_linen_module():
    norm = nn.BatchNorm(use_running_average=False)
    variables = norm.init(KEYS, ROWS)
    bound = norm.bind(variables, mutable=["batch_stats"])

    def fails(model, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            model(x)
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        ols.autocast(fails)(bound, ROWS)
    assert_same_state(bound.variables, variables)
