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
from helpers.cases import slow_except
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


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_what_a_function_returns_untouched_is_what_it_was_given(level):
    tree = {"w": W, "half": W.astype(jnp.float16), "count": jnp.int32(3)}
    tree |= {"key": jax.random.key(0), "name": "layer", "act": jnp.tanh, "rate": 0.5}

    @ols.autocast(level=level)
    def fun(tree):
        return tree["w"] @ tree["w"], tree

    assert are_same(jax.tree.leaves(fun(tree)[1]), jax.tree.leaves(tree))


def test_what_is_returned_untouched_is_not_rounded_under_transformations():
    cast = ols.autocast(lambda x: x, level="O2")
    third = jnp.float32(1 / 3)
    assert jax.jit(cast)(third) == third == jax.value_and_grad(cast)(third)[0]
    assert jax.vmap(cast)(third[None])[0] == third


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
ways = pytest.mark.parametrize("way", slow_except({"eager", "jit of gradient"}, WAYS))


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
def test_arrays_of_numpy_are_not_touched_on_their_way(way, level):
    seen = []

    @ols.autocast(level=level)
    def fun(w, given, *, tree):
        seen.append([given, tree["arrays"], ARRAYS])
        return jnp.sum(w @ w), seen[-1]

    def of_w(w):
        loss, results = fun(w, ARRAYS, tree={"arrays": ARRAYS})
        seen.append(results)
        return loss, loss

    WAYS[way](of_w)
    assert len(seen) == 2
    assert all(are_same(arrays, ARRAYS) for each in seen for arrays in each)


@levels
@pytest.mark.parametrize("make", [jnp.array, np.array])
def test_integers_and_bools_are_static_and_can_bound_differentiated_loops(make, level):
    def fun(w, rounds, flag):
        x = w if flag else 2 * w
        return jnp.sum(lax.fori_loop(0, rounds, lambda i, x: jnp.tanh(x @ w), x))

    sizes = make(2), make(False)
    actual, expected = (
        jax.jit(jax.grad(lambda w, f=f: f(w, *sizes)))(W)
        for f in (ols.autocast(fun, level=level), fun)
    )
    assert_close(actual, expected, 3e-2)


@levels
def test_products_of_float32_data_run_low(level):
    loss = ols.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w)), level=level)
    assert dtypes_of(jax.grad(loss), W, np.asarray(X)) == ["float16"] * 2
    np.testing.assert_array_equal(loss(W, np.asarray(X)), loss(W, X))


@ways
def test_constants_that_a_function_returns_are_arrays_of_jax(way):
    def constants():
        return jnp.array([1, 2, 3]), jnp.asarray(np.ones(2)), jnp.float32(2)

    fun = ols.autocast(lambda w: (jnp.sum(w @ w), constants()), level="O2")

    def of_w(w):
        loss, results = fun(w)
        return loss, [x.at[...].add(0) for x in results]

    for actual, expected in zip(WAYS[way](of_w), constants(), strict=True):
        assert isinstance(actual, jax.Array)
        np.testing.assert_array_equal(actual, expected)


def at_the_largest(w, x):
    return jnp.sum(x[jnp.arange(len(x)), jnp.argmax(x @ w, axis=1)])


def test_an_index_into_an_array_of_numpy_is_explained():
    error = jax.errors.TracerArrayConversionError
    with pytest.raises(error, match="ndarray") as info:
        ols.autocast(at_the_largest)(W, np.asarray(X))
    (note,) = (note for note in info.value.__notes__ if "jnp.asarray" in note)
    assert "NumPy" in note


@pytest.mark.parametrize(
    "tool", [ols.diagnostics.trace_operations, ols.diagnostics.gradient_errors]
)
def test_diagnostics_take_an_array_of_numpy_as_one_of_jax(tool):
    shown, expected = (str(tool(at_the_largest, W, x)) for x in (np.asarray(X), X))
    assert shown == expected


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

    actual, expected = (
        WAYS[way](draw(wrap)) for wrap in (ols.autocast, lambda fun: fun)
    )
    assert_close(actual, expected)


@pytest.mark.parametrize("wrap", [lambda fun: fun, ols.autocast])
@pytest.mark.parametrize("end", [lambda x: x, lambda x: x.of_the_user])
def test_a_report_or_a_failed_call_draws_no_keys(wrap, end):
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
    assert any("pass modules as arguments" in note for note in info.value.__notes__)
