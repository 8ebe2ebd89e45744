"""Modules of `flax.nnx` keep what a call changes (docs/guides/flax_and_equinox.md).

The expected values are those of the same program in float32, run by Flax alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.cases import slow_except
from helpers.compare import assert_same_bits
from helpers.compat import IS_JAX_0_7
from helpers.inner import standard_promotion
from helpers.modules import ROWS, Net, arrays_of, assert_same_state, mean_square
from optax_lossscale._ground.tree import are_same


class Shared(Net):
    """One norm by two names, one kernel in two layers, and what it returns is sown."""

    def __init__(self):
        super().__init__()
        self.last = self.norm
        self.down = nnx.Linear(4, 4, rngs=nnx.Rngs(1))
        self.down.kernel = self.linear.kernel

    def __call__(self, x):
        with standard_promotion():
            y = self.last(self.down(self.norm(self.linear(x))))
        self.sow(nnx.Intermediate, "returned", y)
        return y


class Decorated(Net):
    @ols.autocast(level="O1")
    def __call__(self, x):
        return Net.__call__(self, x)

    @ols.autocast()
    def encode(self, x):
        return self(x)


WAYS = {
    "the module": lambda model, wrap: wrap(model)(ROWS),
    "a method": lambda model, wrap: wrap(model.encode)(ROWS),
    "partial": lambda model, wrap: wrap(functools.partial(mean_square, model))(ROWS),
    "an argument": lambda model, wrap: wrap(mean_square)(model, ROWS),
    "a keyword argument": lambda model, wrap: wrap(mean_square)(x=ROWS, model=model),
    "nnx.jit": lambda model, wrap: nnx.jit(wrap(mean_square))(model, ROWS),
    "a jitted gradient": lambda model, wrap: nnx.jit(
        nnx.value_and_grad(lambda m: wrap(mean_square)(m, ROWS) + m.encode(ROWS).sum())
    )(model),
}


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")  # Since Flax 0.12.
@pytest.mark.parametrize(
    ("way", "make"),
    slow_except(
        [("the module", Net)],
        [
            *((way, Net) for way in WAYS),
            ("an argument", Shared),
            ("a jitted gradient", Shared),
            ("the module", Decorated),
            ("a method", Decorated),
        ],
    ),
)
def test_a_module_computes_and_changes_as_without_autocast(way, make):
    plain, cast = Net() if make is Decorated else make(), make()
    for _ in range(2):
        expected = WAYS[way](plain, lambda fun: fun)
        assert_same_state(WAYS[way](cast, ols.autocast), expected, rtol=4e-2)
    assert_same_state(nnx.state(cast), nnx.state(plain))
    assert np.any(cast.norm.mean[...])
    if make is Shared:
        assert cast.norm is cast.last
        assert cast.linear.kernel is cast.down.kernel


@pytest.mark.parametrize("level", slow_except(["O1"], ["O1", "O2"]))
def test_what_a_call_does_not_change_in_a_module_stays_the_same_array(level):
    model = Net()
    before = jax.tree.leaves(nnx.state(model, nnx.Param))
    with standard_promotion():
        ols.autocast(model, level=level)(ROWS)
    assert are_same(jax.tree.leaves(nnx.state(model, nnx.Param)), before)
    assert np.any(model.norm.mean[...])


# --- What is refused --------------------------------------------------------------

CLOSED_OVER = {
    "lambda": lambda model: ols.autocast(lambda x: model(x)),
    "nnx.jit": lambda model: nnx.jit(ols.autocast(model)),
    "gradient": lambda model: jax.grad(lambda x: jnp.sum(ols.autocast(model)(x))),
}


@pytest.mark.skipif(IS_JAX_0_7, reason="Flax 0.12.0 lets it change")
@pytest.mark.parametrize("name", CLOSED_OVER)
def test_a_changed_module_must_be_an_argument_of_every_transformation(name):
    model = Net()
    before = arrays_of(model)
    with pytest.raises(ValueError, match=r"Pass the module as an argument: `ols\."):
        CLOSED_OVER[name](model)(ROWS)
    assert_same_bits(arrays_of(model), before)


class Counts(Net):
    calls = 0

    def __call__(self, x):
        self.calls += 1
        return Net.__call__(self, x)


def evaluated(model, x):
    model.eval()
    return jnp.mean(model(x))


def remembered(model, x):
    model.last = model(x)
    return jnp.mean(model.last)


@pytest.mark.parametrize(
    ("make", "fun", "attribute"),
    [
        (Net, evaluated, "use_running_average"),
        (Counts, mean_square, "calls"),
        (Net, remembered, "last"),
    ],
)
def test_an_attribute_that_a_call_sets_is_refused_by_its_name(make, fun, attribute):
    model = make()
    before = arrays_of(model)
    with pytest.raises(ValueError, match=attribute):
        ols.autocast(fun)(model, ROWS)
    assert_same_bits(arrays_of(model), before)


def fails(model, x):
    model(x)
    raise RuntimeError("of the user")


def test_an_error_inside_leaves_the_module_as_it_was():
    model = Net()
    before = arrays_of(model)
    with pytest.raises(RuntimeError, match="of the user"):
        ols.autocast(fails)(model, ROWS)
    assert_same_bits(arrays_of(model), before)
    assert_same_state(ols.autocast(model)(ROWS), Net()(ROWS))


REPORTED = {
    "the module": lambda model: (model, ROWS),
    "nnx.jit": lambda model: (nnx.jit(ols.autocast(mean_square)), model, ROWS),
}


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_changes_no_module(name, capsys):
    model = Net()
    before = arrays_of(model)
    ols.autocast_report(*REPORTED[name](model))
    assert capsys.readouterr().out.count("dot_general") == 1
    assert_same_bits(arrays_of(model), before)
