"""Calls of an autocast function outside `jit`: compiled once, and never out of date."""

import gc
import math
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import optax_lossscale as ols

X, W = jnp.full((4, 8), 0.5), jnp.eye(8)


def layer(x, w=W):
    return jax.nn.gelu(jnp.where(x > 0, x @ w, 0.0), approximate=False)


def loop(x):
    return lax.scan(lambda carry, _: (layer(carry), None), x, length=3)[0]


def count_compilations(call):
    """Number of programs that XLA compiles during a call."""
    compilations = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(call())
    finally:
        jax.monitoring.clear_event_listeners()
    return len(compilations)


FACTORS = [1.0]


def reads_a_list(x):
    return layer(x) * FACTORS[0]


def with_arguments(x, count, *, w):
    return layer(x, w) * count


CALLS = {
    "a jitted function inside": lambda: ols.autocast(layer)(X),
    "a lambda written anew": lambda: ols.autocast(lambda x: layer(x))(X),
    "a loop": lambda: ols.autocast(loop)(X),
    "level O2": lambda: ols.autocast(layer, level="O2")(X),
    "bfloat16": lambda: ols.autocast(layer, jnp.bfloat16)(X),
    "keyword and static arguments": lambda: ols.autocast(with_arguments)(X, 3, w=W),
    "a function of a library": lambda: ols.autocast(jax.nn.softmax)(X),
    "a gradient": lambda: jax.grad(lambda w: ols.autocast(layer)(X, w).sum())(W),
    "a function that reads a list": lambda: ols.autocast(reads_a_list)(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_eager_call_compiles_nothing(name):
    assert count_compilations(CALLS[name]) > 0
    assert count_compilations(CALLS[name]) == 0


def scaled_by(factor):
    return lambda x: x * factor


class Settings:
    factor = 1.0


def test_an_eager_call_sees_everything_that_changed_since_the_last():
    settings, items, factor, helper = Settings(), [1.0], 1.0, scaled_by(1.0)
    module = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    module.kernel[...] = jnp.eye(8)
    array, numpy_array = jnp.ones(()), np.ones(())

    def product(x):
        return module(x) * items[0] * settings.factor * factor * array * numpy_array

    def with_helper(x):
        return helper(product(x))

    fun = ols.autocast(with_helper)
    expected = np.full((4, 8), 0.5)
    np.testing.assert_array_equal(fun(X), expected)
    changes = [
        lambda: items.__setitem__(0, 2.0),
        lambda: setattr(settings, "factor", 2.0),
        lambda: numpy_array.__setitem__((), 2.0),
        lambda: module.kernel.set_value(2 * jnp.eye(8)),
    ]
    for change in changes:
        change()
        expected = 2 * expected
        np.testing.assert_array_equal(fun(X), expected)
    factor, array, helper = 2.0, 2.0 * array, scaled_by(2.0)
    np.testing.assert_array_equal(fun(X), 8 * expected)


@pytest.mark.parametrize("change", ["variable", "array", "helper", "swapped helpers"])
def test_an_immutable_object_in_a_closure_can_be_replaced(change):
    count, array, one, two = 1.0, jnp.ones(()), scaled_by(1.0), scaled_by(2.0)
    first, second = one, two

    def product(x):
        return first(x * count * array) + 10 * second(x) + 100 * one(x) + 1000 * two(x)

    fun = ols.autocast(product)
    assert float(fun(jnp.ones(()))) == 2121.0
    assert float(fun(jnp.ones(()))) == 2121.0
    if change == "variable":
        count = 3.0
        expected = 2123.0
    elif change == "array":
        array = jnp.float32(3.0)
        expected = 2123.0
    elif change == "helper":
        first = scaled_by(3.0)
        expected = 2123.0
    else:
        first, second = two, one
        expected = 2112.0
    assert float(fun(jnp.ones(()))) == expected
    assert float(fun(jnp.ones(()))) == expected


@pytest.mark.parametrize(
    "numbers", [(1, True), (1, 1.0), (0.0, -0.0), (2, np.float32(2.0))]
)
def test_static_arguments_that_are_equal_but_not_alike_are_told_apart(numbers):
    def describe(x, number):
        sign = math.copysign(1.0, number)
        return x * sign, f"{type(number).__name__} {sign}"

    fun = ols.autocast(describe)
    for number in [*numbers, *numbers]:
        expected = describe(X, number)
        result = fun(X, number)
        assert result[1] == expected[1]
        np.testing.assert_array_equal(result[0], expected[0])


def test_a_function_that_counts_prints_or_reads_an_iterator_runs_at_each_call(capsys):
    calls, numbers = [], iter([1.0, 2.0])

    def counts(x):
        calls.append(1)
        print("called")
        return x * next(numbers)

    fun = ols.autocast(counts)
    assert [float(fun(jnp.ones(()))) for _ in range(2)] == [1.0, 2.0]
    assert (len(calls), capsys.readouterr().out) == (2, "called\n" * 2)


def test_a_linen_model_whose_parameters_change_gives_new_results():
    model = nn.Dense(8, use_bias=False)
    fun = ols.autocast(model.apply)
    for factor in (1.0, 2.0):
        out = fun({"params": {"kernel": factor * W}}, X)
        np.testing.assert_array_equal(out, factor * X)


def test_functions_of_the_same_code_do_not_share_what_they_closed_over():
    for factor in (1.0, 2.0, 1.0, 3.0):
        result = ols.autocast(scaled_by(factor))(X)
        np.testing.assert_array_equal(result, factor * X)


def test_nothing_keeps_a_function_or_its_arrays_alive_after_a_call():
    def call_once():
        array = jnp.full((8, 8), 2.0)
        fun = lambda x: x @ array  # noqa: E731
        ols.autocast(fun)(X)
        ols.autocast(fun)(X)
        return weakref.ref(array), weakref.ref(fun)

    references = call_once()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
