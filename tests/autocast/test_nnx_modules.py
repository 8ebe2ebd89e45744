"""Modules of `flax.nnx`: what a call changes in them reaches them, or is refused.

The expected values are those of the same program in float32, run by Flax alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.inner import standard_promotion
from helpers.modules import ROWS, Net, arrays_of, assert_same_state, mean_square
from optax_lossscale._ground.tree import are_same


def unchanged(fun):
    """Stands for `autocast` where Flax runs alone."""
    return fun


def assert_agrees(program, make=Net, rtol=2e-2):
    """`program(module, wrap)` gives the same results, and leaves the same module."""
    plain, cast = make(), make()
    expected = program(plain, unchanged)
    assert_same_state(program(cast, ols.autocast), expected, rtol)
    assert_same_state(cast, plain, rtol)


WAYS = {
    "the module": lambda model, wrap: wrap(model)(ROWS),
    "a method": lambda model, wrap: wrap(model.encode)(ROWS),
    "partial": lambda model, wrap: wrap(functools.partial(mean_square, model))(ROWS),
    "partial of a method": lambda m, wrap: wrap(functools.partial(m.encode, x=ROWS))(),
    "an argument": lambda model, wrap: wrap(mean_square)(model, ROWS),
    "a keyword argument": lambda model, wrap: wrap(mean_square)(x=ROWS, model=model),
}
AROUND = {
    "jit of gradient": lambda way: nnx.jit(
        nnx.value_and_grad(lambda model: way(model) + way(model))
    ),
    "remat": lambda way: lambda model: nnx.remat(way)(model),
    "cond": lambda way: lambda model: nnx.cond(True, way, way, model),
}


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
def test_what_a_call_changes_reaches_the_module_through(around):
    def program(model, wrap):
        return AROUND[around](lambda m: wrap(mean_square)(m, ROWS))(model)

    assert_agrees(program, rtol=4e-2)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_a_call_changes_reaches_a_module_given_as(way):
    assert_agrees(lambda model, wrap: [WAYS[way](model, wrap) for _ in range(2)])


class Shared(nnx.Module):
    """One normalization layer by two names, and one kernel in two layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.BatchNorm(4, rngs=rngs)
        self.last = self.first
        self.up, self.down = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))
        self.down.kernel = self.up.kernel

    def __call__(self, x):
        with standard_promotion():
            return self.last(self.down(self.up(self.first(x))))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["the module", "an argument"])
def test_layers_and_parameters_that_are_shared_stay_shared(way):
    def program(model, wrap):
        result = WAYS[way](model, wrap)
        assert model.first is model.last
        assert model.up.kernel is model.down.kernel
        return result

    assert_agrees(program, Shared)


class Several(nnx.Module):
    """Changes an attribute, an array, a variable, a submodule; makes a variable."""

    def __init__(self):
        self.calls = 0
        self.array = jnp.ones(4)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        self.calls += 1
        self.array = self.array + jnp.sum(x, axis=0)
        self.count[...] = self.count[...] + 1
        self.made = nnx.Variable(jnp.sum(x))
        self.norm.eval()
        return x * self.calls


def test_everything_that_a_call_changes_in_a_module_is_kept():
    model, cast = Several(), Several()
    for _ in range(2):
        result = ols.autocast(cast)(ROWS)
        np.testing.assert_array_equal(result, model(ROWS))
    assert cast.calls == 2
    assert cast.norm.use_running_average
    assert_same_state(cast, model)


@pytest.mark.slow
def test_a_module_that_is_returned_is_the_same_module():
    model = Net()
    result, same, norm = ols.autocast(lambda m, x: (m(x), m, m.norm))(model, ROWS)
    assert same is model
    assert norm is model.norm
    assert_same_state(result, Net()(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_what_a_call_does_not_change_in_a_module_stays_the_same_array(level):
    model = Net()
    before = jax.tree.leaves(nnx.state(model, nnx.Param))
    with standard_promotion():
        ols.autocast(model, level=level)(ROWS)
    assert are_same(jax.tree.leaves(nnx.state(model, nnx.Param)), before)
    assert np.any(model.norm.mean[...])


REFUSED = {
    "lambda": lambda model: ols.autocast(lambda x: model(x)),
    "nnx.jit": lambda model: nnx.jit(ols.autocast(model)),
    "vmap": lambda model: jax.vmap(lambda x: ols.autocast(model)(x[None])),
    "gradient": lambda model: jax.grad(lambda x: jnp.sum(ols.autocast(model)(x))),
    "train and eval": lambda model: ols.autocast(lambda x: (model.eval(), model(x))[1]),
}


class Counting(Net):
    """Changes an attribute, too, before anything else."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return Net.__call__(self, x)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("make", [Net, Counting])
def test_a_change_that_would_be_lost_is_refused_with_the_fix_through(name, make):
    model = make()
    before = arrays_of(model)
    with pytest.raises(ValueError, match=r"Pass the module as an argument: `ols\."):
        REFUSED[name](model)(ROWS)
    assert_same_bits(arrays_of(model), before)


@pytest.mark.slow
def test_an_error_inside_leaves_the_module_as_it_was():
    model = Net()
    before = arrays_of(model)

    def fails(model, x):
        model(x)
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        ols.autocast(fails)(model, ROWS)
    assert_same_bits(arrays_of(model), before)
    assert_same_state(ols.autocast(model)(ROWS), Net()(ROWS))


REPORTED = {
    "the module": lambda model: (model, ROWS),
    "an argument": lambda model: (mean_square, model, ROWS),
    "nnx.jit": lambda model: (nnx.jit(ols.autocast(mean_square)), model, ROWS),
}


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_leaves_a_module_as_it_was_given_as(name, capsys):
    model = Net()
    before = arrays_of(model)
    ols.autocast_report(*REPORTED[name](model))
    assert capsys.readouterr().out.count("dot_general") == 1
    assert_same_bits(arrays_of(model), before)


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


class WithRef(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((ROWS.shape[-1], 2)))
        self.calls = nnx.Variable(jnp.zeros(()), ref=True)

    def __call__(self, x):
        self.calls[...] += 1
        return x @ self.w[...]


@pytest.mark.parametrize("jit", [unchanged, nnx.jit])
def test_a_variable_that_is_a_ref_keeps_what_a_call_writes(jit):
    model, plain = WithRef(), WithRef()
    cast = jit(ols.autocast(mean_square))
    for _ in range(2):
        assert_same_state(cast(model, ROWS), mean_square(plain, ROWS))
    assert model.calls[...] == plain.calls[...] == 2
