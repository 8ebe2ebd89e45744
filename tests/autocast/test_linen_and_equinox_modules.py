"""Modules of Linen, bound or not, and of Equinox: wrapped, given, decorated, named."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import optax_lossscale as ols
from helpers.inner import standard_promotion
from helpers.modules import FRAMEWORKS, ROWS, assert_same_state
from helpers.places import place_of
from helpers.under_autocast import W, X, assert_close, dtypes_of
from optax_lossscale._ground.tree import are_same


class Layers(nn.Module):
    """A linen module with parameters, statistics and dropout."""

    def layers(self, x):
        with standard_promotion():
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


class Closure(Layers):
    @nn.compact
    def __call__(self, x):
        return ols.autocast(lambda x: self.layers(x))(x)


KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


@functools.cache
def plain_variables():
    return jax.jit(Plain().init)(KEYS, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AroundCompact, Closure])
def test_a_linen_module_makes_the_parameters_that_it_makes_without(kind):
    for level in ("O1", "O3"):
        cast = ols.autocast(level=level)(kind.__call__)
        model = type("Cast", (kind,), {"__call__": cast})()
        variables = jax.jit(model.init)(KEYS, ROWS)
        assert_same_state(variables, plain_variables(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", [AroundCompact, Closure])
def test_what_a_linen_module_changes_comes_out(kind, jit):
    def apply(model):
        mutable = ["batch_stats", "intermediates"]
        rngs = {"dropout": jax.random.key(2)}
        fun = functools.partial(model.apply, mutable=mutable, rngs=rngs)
        return jit(lambda x: fun(plain_variables(), x))(ROWS)

    (result, changed), (expected, other) = apply(kind()), apply(Plain())
    assert not np.array_equal(changed["batch_stats"]["norm"]["mean"], jnp.zeros(4))
    assert_same_state(changed, other)
    assert_same_state(result, expected)
    program = jax.make_jaxpr(lambda: apply(kind()))()
    assert "f16" in str(program)


@pytest.mark.slow
def test_a_bound_linen_module_keeps_its_statistics_and_no_tracer():
    norm = nn.BatchNorm(use_running_average=False)
    variables = norm.init(KEYS, ROWS)
    cast, plain = (norm.bind(variables, mutable=["batch_stats"]) for _ in range(2))

    def fails(model, x):
        model(x)
        raise RuntimeError("of the user")

    with standard_promotion():
        with pytest.raises(RuntimeError, match="of the user"):
            ols.autocast(fails)(cast, ROWS)
        assert_same_state(cast.variables, variables)
        of_a_global = eval("lambda x: cast(x)", {"cast": cast})  # As in a notebook.
        for fun in (cast, cast.__call__, lambda x: cast(x), of_a_global):
            ols.autocast(fun)(ROWS)
            plain(ROWS)
            assert_same_state(cast.variables, plain.variables)


LOOKS = {
    "report": ols.autocast_report,
    "operations": ols.diagnostics.trace_operations,
}
GIVEN = {
    "an argument": lambda norm: (lambda x, norm: jnp.sum(norm(x)), ROWS, norm),
    "a closure": lambda norm: (lambda x: jnp.sum(norm(x)), ROWS),
    "a closure under autocast": lambda norm: (
        ols.autocast(lambda x: jnp.sum(norm(x))),
        ROWS,
    ),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("look", LOOKS)
def test_who_only_looks_at_a_call_leaves_a_bound_linen_module_as_it_was(look, given):
    norm = nn.BatchNorm(use_running_average=False)
    bound = norm.bind(norm.init(KEYS, ROWS), mutable=["batch_stats"])
    before = jax.tree.leaves(bound.variables)
    with standard_promotion():
        LOOKS[look](*GIVEN[given](bound))
    assert are_same(jax.tree.leaves(bound.variables), before)


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
            x = way(lambda x: self.layer(x))(x)
        return x


def plain(fun):
    return fun


def looked_at(fun):
    def look_and_call(x):
        ols.autocast_report(fun, x)
        return fun(x)

    return look_and_call


@pytest.mark.parametrize(
    "ways",
    [
        (ols.autocast, plain),
        (plain, ols.autocast),
        (ols.autocast, ols.autocast),
        (looked_at, ols.autocast),
    ],
)
@pytest.mark.usefixtures("standard_promotion")
def test_what_every_call_of_one_linen_layer_changes_comes_out(ways):
    params = {"params": InTurn((plain,)).init(KEYS, ROWS)["params"]}

    def changed(ways):
        fun = functools.partial(InTurn(ways).apply, mutable=["losses", "counts"])
        return fun(params, ROWS)[1]

    def loss(params, ways):
        model = InTurn(ways)
        _, variables = model.apply(params, ROWS, mutable=["losses", "counts"])
        return sum(variables["losses"]["layer"]["square"])

    expected = changed((plain, plain))
    assert len(expected["losses"]["layer"]["square"]) == 2
    assert_same_state(changed(ways), expected)
    grads, others = (jax.grad(loss)(params, each) for each in (ways, (plain, plain)))
    assert_same_state(grads, others)


@pytest.mark.slow
def test_methods_of_an_equinox_module_can_be_decorated_or_wrapped():
    class Layer(eqx.Module):
        linear: eqx.nn.Linear

        def plain(self, x):
            return jax.vmap(self.linear)(x)

        @ols.autocast(level="O1")
        def __call__(self, x):
            return self.plain(x)

    layer = Layer(eqx.nn.Linear(4, 4, key=jax.random.key(0)))

    expected = layer.plain(X)
    assert_close((layer(X), ols.autocast(layer.plain)(X)), (expected, expected))
    # Parameters of the bound module are arguments, so they have gradients.
    grads = eqx.filter_grad(lambda layer: jnp.sum(ols.autocast(layer.plain)(X)))(layer)
    assert_close(grads.linear.weight, jnp.ones((4, 3)) @ X)


def test_the_path_of_a_linen_module_in_high_leaves_its_product_in_float32():
    linen = FRAMEWORKS["linen"]
    cast = ols.autocast(linen.call, high=["LinenNet/Dense_1/"])
    assert dtypes_of(cast, linen.make([W, W]), X) == ["float16", "float32"]


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_the_line_of_a_loop_in_high_leaves_all_its_layers_in_float32(framework):
    net, line = framework.make([W, W]), place_of(framework.net.__call__, "layer")
    cast = ols.autocast(lambda net, x: framework.call(net, x) @ W, high=[line])
    assert dtypes_of(lambda: cast(net, X)) == ["float32", "float32", "float16"]
