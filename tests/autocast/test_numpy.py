"""Arrays of NumPy reach a function as they are; what it computes are arrays of JAX.

What a function returns untouched is the very object that it was given.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax

import optax_lossscale as ols
from helpers.compat import IS_JAX_0_7
from helpers.under_autocast import W, X, assert_close, dtypes_of

levels = pytest.mark.parametrize("level", ["O1", "O2"])
# How a function is run that returns a loss and other results, which are returned.
WAYS = {
    "eager": lambda fun: fun(W)[1],
    "jit": lambda fun: jax.jit(fun)(W)[1],
    "gradient": lambda fun: jax.grad(fun, has_aux=True)(W)[1],
    "jit of gradient": lambda fun: jax.jit(jax.grad(fun, has_aux=True))(W)[1],
    "vmap": lambda fun: jax.tree.map(lambda x: x[0], jax.vmap(fun)(W[None])[1]),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)

# --- What reaches the function, and what comes back -------------------------------

ARRAYS = [
    np.arange(3, dtype=np.int32),
    np.array([2**40 + 5, 7]),
    np.array([1.7e9, 1.7e9 + 1]),
    np.array([True, False]),
    np.array(["a"]),
    np.array([None]),
    np.array(["2026-11-26"], "datetime64[D]"),
    np.zeros(2, jax.dtypes.float0),
    np.ones(3, np.float16),
]


@levels
@ways
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_an_array_of_numpy_is_not_touched_on_its_way(array, way, level):
    seen = []

    @ols.autocast(level=level)
    def fun(w, array, *, tree):
        seen.extend([array, tree["array"], closed_over])
        return jnp.sum(w @ w), (array, tree, closed_over)

    def of_w(w):
        loss, results = fun(w, array, tree={"array": array})
        seen.extend(jax.tree.leaves(results))
        return loss, loss

    closed_over = array
    way(of_w)
    assert len(seen) == 6
    assert all(x is array for x in seen)


def test_float32_arrays_of_numpy_are_cast_at_o2_as_all_others():
    def dtypes_seen(level):
        seen = []
        fun = ols.autocast(
            lambda *args: seen.extend(x.dtype for x in args), level=level
        )
        fun(np.ones(3, np.float32), jnp.ones(3), np.ones(3))
        return [str(dtype) for dtype in seen]

    assert dtypes_seen("O1") == ["float32", "float32", "float64"]
    assert dtypes_seen("O2") == ["float16", "float16", "float64"]


@levels
@ways
def test_what_numpy_computes_inside_has_64_bits(way, level):
    """A hash of features, and time since the first of some stamps."""
    ids, seconds = np.array([12345, 67890, 424242]), np.array([1.7e9, 1.7e9 + 1])
    table = jnp.arange(97, dtype=jnp.float32)

    @ols.autocast(level=level)
    def fun(w, ids, seconds):
        rows = table[(ids * 7919 * 104729) % 97]
        phase = jnp.float32(seconds - seconds[0])
        return jnp.sum(w @ w), (rows, phase)

    rows, phase = way(lambda w: fun(w, ids, seconds))
    np.testing.assert_array_equal(rows, [80, 14, 31])
    np.testing.assert_array_equal(phase, [0, 1])


@pytest.mark.slow
@levels
def test_an_array_of_integers_is_static_in_every_transformation(level):
    def fun(w, sizes):
        x = lax.fori_loop(0, sizes[0], lambda i, x: jnp.tanh(x @ w), w)
        return jnp.sum(sum(x for _ in range(int(sizes[1]))))

    sizes = np.array([2, 3])
    expected = jax.grad(fun)(W, sizes)
    grad = jax.grad(lambda w: ols.autocast(fun, level=level)(w, sizes))
    for actual in (grad(W), jax.jit(grad)(W), jax.vmap(grad)(W[None])[0]):
        assert_close(actual, expected, 3e-2)


@levels
def test_products_of_float32_data_run_low(level):
    x = np.asarray(X)
    given = ols.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w)), level=level)
    closed_over = ols.autocast(lambda w: given(w, x), level=level)
    for fun in (lambda w: given(w, x), closed_over):
        assert dtypes_of(jax.grad(fun), W) == ["float16"] * 2
        actual, expected = (jax.grad(f)(W) for f in (fun, lambda w: given(w, X)))
        assert_close(actual, expected)


# --- What the function computes ---------------------------------------------------


def constants():
    return jnp.array([1, 2, 3]), jnp.asarray(np.ones(2)), jnp.float32(2), jnp.zeros(3)


def assert_arrays_of_jax(tree):
    for leaf, expected in zip(jax.tree.leaves(tree), constants(), strict=True):
        assert isinstance(leaf, jax.Array)
        np.testing.assert_array_equal(leaf.at[...].add(0), expected)


@levels
@ways
def test_constants_that_a_function_returns_are_arrays_of_jax(way, level):
    fun = ols.autocast(lambda w: (jnp.sum(w @ w), constants()), level=level)

    def of_w(w):
        loss, results = fun(w)
        assert all(isinstance(x, jax.Array) for x in results)
        return loss, [x.at[...].add(0) for x in results]

    assert_arrays_of_jax(way(of_w))


class NnxModule(nnx.Module):
    def __init__(self):
        self.state = nnx.List(nnx.Variable(jnp.zeros_like(x)) for x in constants())

    def __call__(self, x):
        self.state = nnx.List(map(nnx.Variable, constants()))
        return x @ x.T


@levels
def test_constants_in_variables_of_nnx_are_arrays_of_jax(level):
    module = NnxModule()
    ols.autocast(module, level=level)(X)
    assert_arrays_of_jax(nnx.state(module))


class LinenModule(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i, value in enumerate(constants()):
            self.variable("state", f"{i}", jnp.zeros_like, value).value = value
        return x @ x.T


@levels
def test_constants_in_variables_of_linen_are_arrays_of_jax(level):
    module = LinenModule()
    bound = module.bind(module.init(jax.random.key(0), X), mutable=["state"])
    ols.autocast(bound, level=level)(X)
    assert_arrays_of_jax(bound.variables)


def at_the_largest(w, x):
    return jnp.sum(x[jnp.arange(len(x)), jnp.argmax(x @ w, axis=1)])


def mapped_into_a_rule(w, x):
    return jnp.sum(jax.vmap(lambda x: jax.nn.relu(x) @ w)(x))


REFUSED = [(at_the_largest, jax.errors.TracerArrayConversionError)]
if not IS_JAX_0_7:
    REFUSED += [(mapped_into_a_rule, AssertionError)]


@pytest.mark.parametrize(("fun", "kind"), REFUSED)
def test_an_array_of_numpy_that_jax_refuses_is_explained(fun, kind):
    with pytest.raises(kind, match="ndarray") as error:
        ols.autocast(fun)(W, np.asarray(X))
    notes = [note for note in error.value.__notes__ if "jnp.asarray" in note]
    assert len(notes) == 1


@pytest.mark.parametrize(
    "tool", [ols.diagnostics.trace_operations, ols.diagnostics.gradient_errors]
)
@pytest.mark.parametrize("fun", [at_the_largest, mapped_into_a_rule])
def test_diagnostics_take_an_array_of_numpy_as_one_of_jax(fun, tool):
    assert str(tool(fun, W, np.asarray(X))) == str(tool(fun, W, X))
