"""Modules of `flax.nnx`: what a call changes in them reaches them, or is refused.

The expected values are those of the same program in float32, run by Flax alone.
"""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.modules import ROWS, Net, arrays_of, assert_same_state, mean_square


def unchanged(fun, **settings):
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
    "its call": lambda model, wrap: wrap(model.__call__)(ROWS),
    "a method": lambda model, wrap: wrap(model.encode)(ROWS),
    "partial": lambda model, wrap: wrap(functools.partial(mean_square, model))(ROWS),
    "partial by keyword": lambda model, wrap: wrap(
        functools.partial(mean_square, model=model)
    )(x=ROWS),
    "partial of a method": lambda model, wrap: wrap(
        functools.partial(functools.partial(model.encode), x=ROWS)
    )(),
    "partial of the module": lambda model, wrap: wrap(functools.partial(model))(ROWS),
    "an argument": lambda model, wrap: wrap(mean_square)(model, ROWS),
    "a keyword argument": lambda model, wrap: wrap(mean_square)(x=ROWS, model=model),
}
AROUND = {
    "eager": lambda way: lambda model: [way(model), way(model)],
    "jit": lambda way: lambda model: nnx.jit(lambda m: [way(m), way(m)])(model),
    "gradient": lambda way: (
        lambda model: nnx.grad(lambda m: jnp.mean((way(m) - 1) ** 2))(model).linear
    ),
    "jit of gradient": lambda way: nnx.jit(
        nnx.value_and_grad(lambda m: jnp.mean((way(m) - 1) ** 2))
    ),
    "remat": lambda way: lambda model: nnx.remat(way)(model),
    "cond": lambda way: lambda model: nnx.cond(True, way, way, model),
}


@pytest.mark.fast_every(8)
@pytest.mark.parametrize("way", ["the module", "an argument"])
@pytest.mark.parametrize("around", AROUND)
def test_what_a_call_changes_reaches_the_module_through(way, around):
    def program(model, wrap):
        return AROUND[around](lambda m: WAYS[way](m, wrap))(model)

    assert_agrees(program, rtol=4e-2)


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_call_changes_reaches_a_module_given_as(way):
    assert_agrees(lambda model, wrap: [WAYS[way](model, wrap) for _ in range(2)])


def test_each_call_draws_another_dropout_mask():
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    fun = ols.autocast(dropout)
    masks = [tuple(np.ravel(fun(jnp.ones((8, 8))))) for _ in range(3)]
    assert len(set(masks)) == 3
    assert dropout.rngs.count[...] == 3


def test_a_whole_step_with_optimizer_and_metrics_can_be_one_function():
    def program(model, wrap):
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        def step(model, optimizer, metrics, x):
            loss, grads = nnx.value_and_grad(mean_square)(model, x)
            optimizer.update(model, grads)
            metrics.update(loss=loss)

        with jax.numpy_dtype_promotion("standard"):
            nnx.jit(wrap(step))(model, optimizer, metrics, ROWS)
            return metrics.compute(), optimizer.step[...]

    assert_agrees(program, rtol=5e-2)


class Shared(nnx.Module):
    """One normalization layer by two names, and one kernel in two layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.BatchNorm(4, rngs=rngs)
        self.last = self.first
        self.up, self.down = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))
        self.down.kernel = self.up.kernel

    def __call__(self, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return self.last(self.down(self.up(self.first(x))))


@pytest.mark.parametrize("way", ["the module", "an argument"])
def test_layers_and_parameters_that_are_shared_stay_shared(way):
    def program(model, wrap):
        result = WAYS[way](model, wrap)
        assert model.first is model.last
        assert model.up.kernel is model.down.kernel
        return result

    assert_agrees(program, Shared)


def test_a_module_that_is_two_arguments_is_one_module():
    def program(model, wrap):
        both = functools.partial(lambda a, b, norm, x: norm(a(x) + b(x)), model)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return wrap(both)(model, model.norm, ROWS)

    assert_agrees(program)


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


def test_train_and_eval_between_calls_are_seen():
    def program(model, wrap):
        fun = wrap(model)
        jitted = nnx.jit(lambda model, x: wrap(model)(x))
        results = []
        for mode in (model.train, model.eval, model.train):
            mode()
            results += [fun(ROWS), jitted(model, ROWS)]
        return results

    assert_agrees(program)


def test_a_parameter_that_was_changed_between_calls_is_seen():
    model = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    fun = ols.autocast(model)
    for factor in (1.0, 2.0):
        model.kernel[...] = factor * jnp.eye(4)
        assert_same_state(fun(ROWS), factor * ROWS)
    model.kernel = nnx.Param(3.0 * jnp.eye(4))
    assert_same_state(fun(ROWS), 3.0 * ROWS)


def test_random_streams_metrics_and_variables_can_be_arguments():
    def program(objects, wrap):
        rngs, metric, variable = objects
        noise = wrap(lambda rngs, x: x + jax.random.normal(rngs.noise(), x.shape))

        def double(variable, x):
            variable[...] = 2 * variable[...]
            return jnp.sum(x) * variable[...]

        with jax.numpy_dtype_promotion("standard"):
            wrap(metric.update)(values=ROWS)
            results = noise(rngs, ROWS), wrap(double)(variable, ROWS)
            return [*results, noise(rngs, ROWS), metric.compute()]

    def make():
        return nnx.Rngs(0, noise=1), nnx.metrics.Average(), nnx.Variable(jnp.ones(()))

    assert_agrees(program, make)


def test_a_module_that_is_returned_is_the_same_module():
    model = Net()
    result, same, norm = ols.autocast(lambda m, x: (m(x), m, m.norm))(model, ROWS)
    assert same is model
    assert norm is model.norm
    assert_same_state(result, Net()(ROWS))


def test_a_module_that_is_made_inside_can_be_returned():
    made = ols.autocast(lambda x: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))(ROWS)
    made.kernel[...] = jnp.eye(4)
    np.testing.assert_array_equal(made(ROWS), ROWS)


@pytest.mark.slow
def test_modules_in_nnx_scan_and_vmap_change_layer_by_layer():
    def make():
        layers = nnx.vmap(lambda key: nnx.BatchNorm(4, rngs=nnx.Rngs(key)))
        return layers(jax.random.split(jax.random.key(0), 3))

    def program(layers, wrap):
        def step(x, layer):
            return wrap(layer)(x)

        carry = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(ROWS, layers)
        return carry, nnx.vmap(step, in_axes=(None, 0))(ROWS, layers)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert_agrees(program, make, rtol=5e-2)


def test_at_o2_a_module_that_is_called_computes_as_one_that_is_an_argument():
    class Scaled(nnx.Module):
        def __init__(self):
            self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
            self.norm.scale[...] = jnp.full(4, 1.0004)  # Not a float16 number.
            self.kernel = nnx.Param(jnp.eye(4))

        def __call__(self, x):
            return (x @ self.kernel[...]) * self.norm.scale[...][None]

    model = Scaled()
    cast = functools.partial(ols.autocast, level="O2")
    as_argument = jax.make_jaxpr(lambda x: cast(lambda m, x: m(x))(model, x))(ROWS)
    for fun in (model, model.__call__, functools.partial(Scaled.__call__, model)):
        program = jax.make_jaxpr(lambda x, fun=fun: cast(fun)(x))(ROWS)
        assert str(program) == str(as_argument)


def module_in_an_attribute(model):
    class Trainer:
        def loss(self, x):
            return mean_square(self.model, x)

    trainer = Trainer()
    trainer.model = model
    return trainer.loss


def with_default(model):
    def loss(x, model=model):
        return mean_square(model, x)

    return loss


REFUSED = {
    "lambda": lambda model: ols.autocast(lambda x: model(x)),
    "default argument": lambda model: ols.autocast(with_default(model)),
    "attribute": lambda model: ols.autocast(module_in_an_attribute(model)),
    "random streams": lambda model: ols.autocast(
        lambda x: x * jax.random.normal(model.dropout.rngs())
    ),
    "jax.jit": lambda model: jax.jit(ols.autocast(model)),
    "nnx.jit": lambda model: nnx.jit(ols.autocast(model)),
    "vmap": lambda model: jax.vmap(lambda x: ols.autocast(model)(x[None])),
    "scan": lambda model: (
        lambda x: jax.lax.scan(
            lambda carry, row: (carry, ols.autocast(model)(row[None])), 0, x
        )
    ),
    "gradient": lambda model: jax.grad(lambda x: jnp.sum(ols.autocast(model)(x))),
    "train and eval": lambda model: ols.autocast(lambda x: (model.eval(), model(x))[1]),
}


@pytest.mark.fast_every(5)
@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_would_be_lost_is_refused_with_the_fix_through(name):
    model = Net()
    before = arrays_of(model)
    with pytest.raises(ValueError, match=r"Pass the module as an argument: `ols\."):
        REFUSED[name](model)(ROWS)
    for array, old in zip(arrays_of(model), before, strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.mark.parametrize("around", [jax.jit, jax.vmap, nnx.jit, jax.checkpoint])
@pytest.mark.parametrize("attribute", ["calls", "array", "made", "norm"])
def test_a_change_of_one_attribute_that_would_be_lost_is_refused(attribute, around):
    class One(Several):
        def __call__(self, x):
            if attribute == "calls":
                self.calls += 1
            elif attribute == "array":
                self.array = 2 * self.array
            elif attribute == "made":
                self.made = nnx.Variable(jnp.sum(x))
            else:
                self.norm.eval()
            return x

    model = One()
    with pytest.raises(ValueError, match="Pass the module as an argument"):
        around(ols.autocast(model))(ROWS)
    assert (model.calls, model.norm.use_running_average) == (0, False)
    assert_same_state(model, One())


def test_a_closed_module_that_a_call_does_not_change_needs_no_argument():
    model = Net()
    model.eval()
    for fun in (lambda x: model(x), model):
        for around in (unchanged, jax.jit, jax.checkpoint, jax.vmap):
            assert_same_state(around(ols.autocast(fun))(ROWS), model(ROWS))


def test_the_gradient_of_a_closed_module_is_not_lost():
    def program(model, wrap):
        model.eval()
        closed = nnx.grad(lambda m: jnp.mean((wrap(lambda x: m(x))(ROWS) - 1) ** 2))
        called = nnx.grad(lambda m: jnp.mean((wrap(m)(ROWS) - 1) ** 2))
        return closed(model), called(model)

    assert_agrees(program)


def test_an_error_inside_leaves_the_module_as_it_was():
    model = Net()
    before = arrays_of(model)

    def fails(model, x):
        model(x)
        raise RuntimeError("of the user")

    for fun in (
        functools.partial(ols.autocast(fails), model),
        ols.autocast(functools.partial(fails, model)),
    ):
        with pytest.raises(RuntimeError, match="of the user"):
            fun(ROWS)
        for array, old in zip(arrays_of(model), before, strict=True):
            np.testing.assert_array_equal(array, old)
    assert_same_state(ols.autocast(model)(ROWS), Net()(ROWS))


def test_other_arguments_beside_a_module_must_not_change_in_place():
    def append(model, items, x):
        items.append(model(x))

    with pytest.raises(ValueError, match="must not change its arguments in place"):
        ols.autocast(append)(Net(), [], ROWS)


def test_nothing_keeps_a_module_alive_after_a_call():
    def call():
        model = Net()
        ols.autocast(model)(ROWS)
        ols.autocast(mean_square)(model, ROWS)
        return weakref.ref(model), weakref.ref(model.norm)

    references = call()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("make", [lambda m: m, lambda m: m.encode, ols.autocast])
def test_a_report_of_a_module_leaves_it_as_it_was(make, capsys):
    model = Net()
    before = arrays_of(model)
    ols.autocast_report(make(model), ROWS)
    assert "dot_general" in capsys.readouterr().out
    for array, old in zip(arrays_of(model), before, strict=True):
        np.testing.assert_array_equal(array, old)
