"""Calls of an autocast function outside `jit`: compiled once, and never out of date."""

import collections
import functools
import gc
import math
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
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


@pytest.mark.fast_every(3)
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
        lambda: module.kernel.__setitem__(..., 2 * jnp.eye(8)),
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


ONE = jnp.ones(())


@jax.tree_util.register_pytree_node_class
class Scaled:
    """A node whose class, and whose static data, functions can read."""

    factor = 1.0

    def __init__(self, array, data=None):
        self.array, self.data = array, data

    def tree_flatten(self):
        return (self.array,), self.data

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(*children, data)


class Point(collections.namedtuple("Point", "x")):
    """A named tuple with an attribute of its own."""

    factor = 1.0


class Number(int):
    """A number with attributes."""


class Text(str):
    """A text with attributes."""


def read_by(kind):
    """A function, its arguments, and a function that changes what it reads to 2."""
    items, settings, number = [1.0], Settings(), Number(1)
    number.factor = settings.factor = 1.0
    from_list = lambda x: x * items[0]  # noqa: E731
    if kind == "a function in a Partial":
        partial = jax.tree_util.Partial(from_list)
        return lambda f, x: f(x), (partial, ONE), lambda: items.__setitem__(0, 2.0)
    if kind == "a vmapped Partial":
        mapped = jax.vmap(jax.tree_util.Partial(from_list))
        return mapped, (jnp.ones(1),), lambda: items.__setitem__(0, 2.0)
    if kind == "a function that bears the name of one of JAX":
        named = functools.wraps(jnp.sin)(from_list)
        return lambda x: named(x), (ONE,), lambda: items.__setitem__(0, 2.0)
    if kind == "a schedule in an Optax update":
        tx = optax.scale_by_schedule(lambda count: items[0])
        update, state = tx.update, tx.init(ONE)
        return (
            lambda g: update(g, state)[0],
            (ONE,),
            lambda: items.__setitem__(0, 2.0),
        )
    if kind == "a derivative rule of a function of JAX":
        sine = jax.custom_jvp(jnp.sin)
        sine.defjvp(lambda primals, tangents: (primals[0], tangents[0] * items[0]))
        return (
            lambda x: jax.grad(sine)(x),
            (ONE,),
            lambda: items.__setitem__(0, 2.0),
        )
    if kind == "an attribute of a node's class":
        change = functools.partial(setattr, Scaled, "factor")
        change(1.0)
        return lambda n: n.array * n.factor, (Scaled(ONE),), lambda: change(2.0)
    if kind == "an object in a node":
        node = Scaled(ONE, settings)
        change = lambda: setattr(settings, "factor", 2.0)  # noqa: E731
        return lambda n: n.array * n.data.factor, (node,), change
    if kind == "an attribute of a named tuple's class":
        change = functools.partial(setattr, Point, "factor")
        change(1.0)
        return lambda p: p.x * p.factor, (Point(ONE),), lambda: change(2.0)
    if kind == "an attribute of a number":
        change = lambda: setattr(number, "factor", 2.0)  # noqa: E731
        return lambda x, n: x * n.factor, (ONE, number), change
    if kind == "an attribute of a jitted function":
        jitted = jax.jit(lambda x: x)
        jitted.factor = 1.0
        change = lambda: setattr(jitted, "factor", 2.0)  # noqa: E731
        return lambda x: jitted(x) * jitted.factor, (ONE,), change
    assert kind == "an attribute of a text in a closure"
    text = Text()
    text.factor = 1.0
    change = lambda: setattr(text, "factor", 2.0)  # noqa: E731
    return lambda x: x * text.factor, (ONE,), change


@pytest.mark.parametrize(
    "kind",
    [
        "a function in a Partial",
        "a vmapped Partial",
        "a function that bears the name of one of JAX",
        "a schedule in an Optax update",
        "a derivative rule of a function of JAX",
        "an attribute of a node's class",
        "an object in a node",
        "an attribute of a named tuple's class",
        "an attribute of a number",
        "an attribute of a jitted function",
        "an attribute of a text in a closure",
    ],
)
def test_an_eager_call_sees_a_change_behind(kind):
    fun, args, change = read_by(kind)
    cast = ols.autocast(fun)
    before = np.squeeze(cast(*args)), np.squeeze(cast(*args))
    change()
    assert [*before, np.squeeze(cast(*args))] == [1.0, 1.0, 2.0]


def test_an_eager_call_sees_a_function_that_replaced_one_of_a_library(monkeypatch):
    fun = ols.autocast(lambda x: jnp.cos(x) + math.tau)
    fun(ONE)
    monkeypatch.setattr(jnp, "cos", lambda x: 3 * x)
    monkeypatch.setattr(math, "tau", 2.0)
    assert float(fun(ONE)) == 5.0


def test_an_eager_call_sees_a_setting_of_jax_that_the_function_reads():
    fun = ols.autocast(lambda x: x * (2 if jax.config.jax_softmax_custom_jvp else 1))
    old = jax.config.jax_softmax_custom_jvp
    try:
        for value in (True, False):
            jax.config.update("jax_softmax_custom_jvp", value)
            assert float(fun(ONE)) == (2.0 if value else 1.0)
    finally:
        jax.config.update("jax_softmax_custom_jvp", old)


def test_an_eager_call_uses_the_kind_of_random_keys_that_is_set():
    sample = lambda x: x * jax.random.uniform(jax.random.key(0))  # noqa: E731
    fun = ols.autocast(sample)
    for kind in ("threefry2x32", "rbg", "threefry2x32"):
        with jax.default_prng_impl(kind):
            expected = float(jax.random.uniform(jax.random.key(0)))
            assert float(fun(ONE)) == pytest.approx(expected, abs=1e-6)


def test_an_eager_call_looks_for_nan_where_jax_is_asked_to():
    fun = ols.autocast(lambda x: jnp.log(jax.nn.relu(x) - 1))
    fun(ONE)
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError, match="nan"):
            fun(-ONE)
    finally:
        jax.config.update("jax_debug_nans", False)


def test_a_tuple_in_a_closure_is_told_apart_from_its_only_entry():
    first, second = 1, (2,)

    def read(x):
        return x, isinstance(first, tuple), isinstance(second, tuple)

    fun = ols.autocast(read)
    assert fun(ONE)[1:] == (False, True)
    first, second = (1,), 2
    assert fun(ONE)[1:] == (True, False)


def test_keys_and_data_of_nodes_that_are_equal_but_not_alike_are_told_apart():
    of_keys = ols.autocast(lambda d: [x for k in d for x in (d[k], type(k).__name__)])
    of_data = ols.autocast(lambda node: (node.array, type(node.data).__name__))
    for key in (1, True, 1.0):
        assert of_keys({key: ONE})[1] == type(key).__name__
        assert of_data(Scaled(ONE, key))[1] == type(key).__name__


def test_each_eager_call_returns_new_objects():
    fun = ols.autocast(lambda x: (x, {"seen": {0}}, bytearray(1)))
    for _ in range(3):
        _, sets, buffer = fun(ONE)
        assert (sets["seen"], buffer) == ({0}, bytearray(1))
        sets["seen"].add(1)
        buffer[0] = 1


@pytest.mark.parametrize("make", [float, lambda step: math.nan * step])
def test_a_static_argument_that_is_new_at_each_call_is_not_compiled_for_ever(make):
    fun = ols.autocast(lambda x, number: jax.nn.relu(x @ x) * number)
    for step in range(12):
        fun(W, make(step))
    assert count_compilations(lambda: fun(W, make(12))) == 0
