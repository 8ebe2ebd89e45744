"""What reaches a function under autocast as it is, and what comes back as it is.

Arrays of NumPy stay arrays of NumPy, and what is returned untouched is the very object
that was given.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_lossscale as ols
from helpers.under_autocast import W, X, assert_close, dtypes_of
from optax_lossscale._ground.tree import are_same

# --- Any object -------------------------------------------------------------------


def test_arguments_and_results_can_be_of_any_type():
    def fun(w, x, rows, *, power, act, name):
        y = act(x @ w).reshape(rows, -1) ** power
        return {"y": y, "half": y.astype(jnp.float16), "name": name, "none": None}

    settings = {"rows": np.int64(2), "power": 2, "act": jnp.tanh, "name": "layer"}
    result, expected = (f(W, X, **settings) for f in (ols.autocast(fun), fun))
    assert (result.pop("name"), result.pop("none")) == ("layer", None)
    assert_close(result, {"y": expected["y"], "half": expected["half"]})
    assert ols.autocast(lambda x: None)(X) is None
    assert ols.autocast(lambda: ())() == ()


def test_integers_and_bools_can_be_indices_and_choose_in_python():
    def fun(w, sizes, flag):
        y = X @ w if flag else X
        return jnp.sum(y) + jnp.float32(sizes[jnp.argmin(sizes)])

    for flag in (True, False):
        args = W, jnp.array([3, 1, 2]), jnp.array(flag)
        assert_close(ols.autocast(fun)(*args), fun(*args))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_what_a_function_returns_untouched_is_what_it_was_given(level):
    tree = {"w": W, "half": W.astype(jnp.float16), "count": jnp.int32(3)}
    tree |= {"key": jax.random.key(0), "name": "layer", "act": jnp.tanh, "rate": 0.5}

    @ols.autocast(level=level)
    def fun(tree):
        return tree["w"] @ tree["w"], tree

    assert are_same(jax.tree.leaves(fun(tree)[1]), jax.tree.leaves(tree))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("transform", [jax.jit, jax.value_and_grad, jax.vmap])
def test_what_is_returned_untouched_is_not_rounded_under(transform, level):
    given = jnp.full((1,) if transform is jax.vmap else (), 1 / 3)
    result = transform(ols.autocast(lambda x: x, level=level))(given)
    assert jax.tree.leaves(result)[0] == given


# --- Arrays of NumPy --------------------------------------------------------------

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
@pytest.mark.parametrize("make", [np.array, jnp.array])
def test_integers_are_static_and_can_bound_a_loop_that_is_differentiated(make, level):
    def fun(w, rounds, copies):
        x = lax.fori_loop(0, rounds, lambda i, x: jnp.tanh(x @ w), w)
        return jnp.sum(sum(x for _ in range(int(copies))))

    sizes = make(2), make(3)
    expected = jax.grad(fun)(W, *sizes)
    grad = jax.grad(lambda w: ols.autocast(fun, level=level)(w, *sizes))
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


@levels
@ways
def test_constants_that_a_function_returns_are_arrays_of_jax(way, level):
    def constants():
        return jnp.array([1, 2, 3]), jnp.asarray(np.ones(2)), jnp.float32(2)

    fun = ols.autocast(lambda w: (jnp.sum(w @ w), constants()), level=level)

    def of_w(w):
        loss, results = fun(w)
        return loss, [x.at[...].add(0) for x in results]

    for actual, expected in zip(way(of_w), constants(), strict=True):
        assert isinstance(actual, jax.Array)
        np.testing.assert_array_equal(actual, expected)


def at_the_largest(w, x):
    return jnp.sum(x[jnp.arange(len(x)), jnp.argmax(x @ w, axis=1)])


def mapped_into_a_rule(w, x):
    return jnp.sum(jax.vmap(lambda x: jax.nn.relu(x) @ w)(x))


def test_an_index_into_an_array_of_numpy_is_explained():
    error = jax.errors.TracerArrayConversionError
    with pytest.raises(error, match="ndarray") as info:
        ols.autocast(at_the_largest)(W, np.asarray(X))
    (note,) = (note for note in info.value.__notes__ if "jnp.asarray" in note)
    assert "NumPy" in note


@pytest.mark.parametrize(
    "tool", [ols.diagnostics.trace_operations, ols.diagnostics.gradient_errors]
)
@pytest.mark.parametrize("fun", [at_the_largest, mapped_into_a_rule])
def test_diagnostics_take_an_array_of_numpy_as_one_of_jax(fun, tool):
    assert str(tool(fun, W, np.asarray(X))) == str(tool(fun, W, X))


# --- What a function leaves in objects --------------------------------------------


class Keys:
    """Draws keys one after the other."""

    def __init__(self, key):
        self.key, self.drawn = key, 0

    def next(self):
        self.drawn += 1
        self.key, key = jax.random.split(self.key)
        return key


@ways
def test_keys_that_a_function_draws_from_an_object_are_drawn_for_good(way):
    def draw(wrap):
        def of_w(w):
            keys, box = Keys(jax.random.key(0)), {}

            def fun(w):
                keep = jax.random.bernoulli(keys.next(), 0.5, X.shape).astype(w.dtype)
                box["kept"] = jnp.mean(keep)
                return jnp.sum(keep @ w)

            fun = wrap(fun)
            losses = [fun(w), fun(w)]
            drawn, key = jnp.int32(keys.drawn), jax.random.key_data(keys.next())
            return losses[0], (losses[1], box["kept"], drawn, key)

        return of_w

    actual, expected = (way(draw(wrap)) for wrap in (ols.autocast, lambda fun: fun))
    assert_close(actual, expected)


@pytest.mark.parametrize("wrap", [lambda fun: fun, ols.autocast])
@pytest.mark.parametrize("end", [lambda x: x, lambda x: x.of_the_user])
def test_who_only_looks_or_fails_draws_no_keys(wrap, end):
    keys = Keys(jax.random.key(0))

    def fun(w):
        return end(jnp.sum(jax.random.uniform(keys.next(), w.shape) @ w.T))

    before = keys.key
    with contextlib.suppress(AttributeError):
        ols.autocast_report(wrap(fun), W)
    assert keys.key is before


def test_what_is_lost_in_an_object_out_of_reach_is_explained():
    kept = [[X]]

    def fun(w):
        kept[0][0] = kept[0][0] @ w
        return jnp.sum(kept[0][0])

    square = jnp.eye(W.shape[0])
    ols.autocast(fun)(square)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="escape") as info:
        ols.autocast(fun)(square)
    assert any(
        "Pass the object as an argument" in note for note in info.value.__notes__
    )
