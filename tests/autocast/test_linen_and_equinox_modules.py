"""Modules of docs/guides/flax_and_equinox.md, as functions and as arguments."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import optax_lossscale as ols
from helpers.modules import FRAMEWORKS, ROWS, assert_same_state
from helpers.places import place_of
from helpers.under_autocast import W, X, assert_close, dtypes_of
from optax_lossscale._ground.tree import are_same

pytestmark = pytest.mark.usefixtures("standard_promotion")

# --- Linen modules that are applied -----------------------------------------------


def by_a_product(key, shape, dtype):
    x = jax.random.normal(key, shape, dtype)
    return x @ x / 4


class Plain(nn.Module):
    """A linen module with parameters, statistics, sown values and dropout."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, kernel_init=by_a_product)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        self.sow("intermediates", "normalized", x)
        return nn.Dropout(0.5, deterministic=False)(x)


class Decorated(Plain):
    __call__ = ols.autocast(level="O2")(Plain.__call__)


KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


@functools.cache
def plain_variables():
    return jax.jit(Plain().init)(KEYS, ROWS)


def test_a_decorated_linen_module_makes_the_parameters_that_it_makes_without():
    variables = jax.jit(Decorated().init)(KEYS, ROWS)
    assert_same_state(variables, plain_variables(), rtol=1e-6)


def apply(model, wrap=lambda fun: fun):
    mutable = ["batch_stats", "intermediates"]
    rngs = {"dropout": jax.random.key(2)}
    return wrap(functools.partial(model.apply, mutable=mutable, rngs=rngs))


@pytest.mark.parametrize(
    "cast",
    [
        apply(Decorated()),
        pytest.param(apply(Plain(), ols.autocast), marks=pytest.mark.slow),
    ],
    ids=["in", "around"],
)
def test_what_a_linen_module_changes_comes_out(cast):
    (result, changed), (expected, other) = (
        jax.jit(f)(plain_variables(), ROWS) for f in (cast, apply(Plain()))
    )
    assert np.any(changed["batch_stats"]["BatchNorm_0"]["mean"])
    assert_same_state(changed, other)
    assert_same_state(result, expected)
    assert dtypes_of(cast, plain_variables(), ROWS) == ["float16"]


class Counts(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        self.sow("losses", "square", jnp.mean(x**2))
        calls = self.variable("counts", "calls", lambda: jnp.zeros(()))
        calls.value += 1.0
        return x


class InTurn(nn.Module):
    """One layer, which is called in several ways in turn."""

    ways: tuple

    def setup(self):
        self.layer = Counts()

    def __call__(self, x):
        for way in self.ways:
            x = way(self.layer)(x)
        return x


def plain(fun):
    return fun


@pytest.mark.parametrize("ways", [(ols.autocast, plain), (plain, ols.autocast)])
def test_what_every_call_of_one_linen_layer_changes_comes_out(ways):
    params = {"params": InTurn((plain,)).init(KEYS, ROWS)["params"]}

    def loss(params, ways):
        fun = functools.partial(InTurn(ways).apply, mutable=["losses", "counts"])
        variables = fun(params, ROWS)[1]
        return sum(variables["losses"]["layer"]["square"]), variables

    (grads, changed), (others, expected) = (
        jax.jit(jax.grad(functools.partial(loss, ways=each), has_aux=True))(params)
        for each in (ways, [plain] * 2)
    )
    assert expected["counts"]["layer"]["calls"] == 2
    assert_same_state(changed, expected)
    assert_same_state(grads, others)


# --- Bound Linen modules ----------------------------------------------------------


def bound_norm():
    norm = nn.BatchNorm(use_running_average=False)
    return norm.bind(norm.init(KEYS, ROWS), mutable=["batch_stats"])


def fails(model, x):
    model(x)
    raise RuntimeError("of the user")


def test_a_bound_linen_module_keeps_its_statistics_and_no_tracer():
    cast, norm = bound_norm(), bound_norm()
    with pytest.raises(RuntimeError, match="of the user"):
        ols.autocast(fails)(cast, ROWS)
    assert_same_state(cast.variables, norm.variables)
    for fun in (cast, cast.__call__, functools.partial(lambda m, x: m(x), cast)):
        ols.autocast(fun)(ROWS)
        norm(ROWS)
        assert_same_state(cast.variables, norm.variables)


@pytest.mark.parametrize(
    "look", [ols.autocast_report, ols.diagnostics.trace_operations]
)
@pytest.mark.parametrize("wrap", [plain, ols.autocast])
def test_a_report_leaves_a_bound_linen_module_as_it_was(look, wrap):
    bound = bound_norm()
    before = jax.tree.leaves(bound.variables)
    look(wrap(lambda x, norm: jnp.sum(norm(x))), ROWS, bound)
    assert are_same(jax.tree.leaves(bound.variables), before)


# --- Equinox, and lines and paths in all frameworks -------------------------------


@pytest.mark.slow
def test_methods_of_an_equinox_module_can_be_decorated_or_wrapped():
    class Layer(eqx.Module):
        weight: jax.Array

        def plain(self, x):
            return x @ self.weight

        @ols.autocast(level="O1")
        def __call__(self, x):
            return self.plain(x)

    layer = Layer(W)
    assert_close((layer(X), ols.autocast(layer.plain)(X)), (X @ W, X @ W))
    # Parameters of the bound module are arguments, so they have gradients.
    grads = eqx.filter_grad(lambda layer: jnp.sum(ols.autocast(layer.plain)(X)))(layer)
    assert_close(grads.weight, X.T @ jnp.ones((3, 4)))


def test_the_path_of_a_linen_module_in_high_leaves_its_product_in_float32():
    linen = FRAMEWORKS["linen"]
    cast = ols.autocast(linen.call, high=["LinenNet/Dense_1/"])
    assert dtypes_of(cast, linen.make([W, W]), X) == ["float16", "float32"]


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_the_line_of_a_loop_in_high_leaves_all_its_layers_in_float32(framework):
    net, line = framework.make([W, W]), place_of(framework.net.__call__, "layer")
    cast = ols.autocast(lambda net, x: framework.call(net, x) @ W, high=[line])
    assert dtypes_of(lambda: cast(net, X)) == ["float32", "float32", "float16"]
