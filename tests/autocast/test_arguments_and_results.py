"""Arguments and results of functions under autocast."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.under_autocast import W, X, assert_close


def test_numpy_scalars_are_static_and_numpy_arrays_are_arrays():
    cast = ols.autocast(lambda x, rows: x.reshape(rows, -1))
    assert cast(np.ones(6), np.int64(2)).shape == (2, 3)
    assert cast(np.ones(6), np.int64(2)).dtype == jnp.float32


def test_results_keep_their_dtypes_and_can_be_of_any_type():
    def fun(w, x, name):
        half = (x @ w).astype(jnp.float16)
        return {"y": x @ w, "half": half, "name": name, "none": None, "n": 3, "w": w}

    result = ols.autocast(fun)(W, X, name="layer")
    assert (result["name"], result["none"], result["n"]) == ("layer", None, 3)
    assert (result["y"].dtype, result["half"].dtype) == (jnp.float32, jnp.float16)
    assert result["w"] is not None
    np.testing.assert_array_equal(result["w"], W)
    assert ols.autocast(lambda x: None)(X) is None
    assert ols.autocast(lambda: ())() == ()


def test_arguments_that_are_not_arrays_are_static():
    def fun(w, x, *, power, act):
        return jnp.sum(act(x @ w) ** power)

    cast = ols.autocast(fun)(W, X, power=2, act=jnp.tanh)
    assert_close(cast, fun(W, X, power=2, act=jnp.tanh))


def test_an_argument_that_is_changed_in_place_raises_an_error():
    def fun(params, x):
        params["w"] = params["w"] + 1
        return x @ params["w"]

    with pytest.raises(ValueError, match="`fun` must not change its arguments"):
        ols.autocast(fun)({"w": W}, X)


@jax.tree_util.register_pytree_node_class
class Doubled:
    """A node that makes new leaves, or a new structure, each time it is flattened."""

    def __init__(self, half, name="x", settings=None):
        self.half, self.name, self.settings = half, name, settings

    def tree_flatten(self):
        return (self.half * 2, np.arange(3)), (self.name, self.settings)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(children[0] / 2, *static)

    @functools.cached_property
    def square(self):
        return self.half @ self.half


def test_nodes_that_make_their_leaves_when_flattened_are_unchanged():
    node = Doubled(W, settings=np.ones(3))
    fun = lambda tree, x: x @ tree["node"].half + x @ tree["node"].square  # noqa: E731
    cast = ols.autocast(fun)({"node": node, "none": None, "x": [X]}, X)
    assert_close(cast, fun({"node": node}, X))


def add_one(node):
    node.half = node.half + 1


def rename(node):
    node.name = "y"


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: add_one(tree["node"]),
        lambda tree: rename(tree["node"]),
        lambda tree: tree.update(x=tree["x"] + 1),
        lambda tree: tree.update(y=tree.pop("x")),
        lambda tree: tree["list"].append(tree["x"]),
        lambda tree: tree["list"].append(None),
        lambda tree: tree["list"].reverse(),
        lambda tree: tree.update(step=tree["step"] + 1),
    ],
)
def test_a_change_beside_or_in_a_node_that_makes_its_leaves_raises_an_error(change):
    def fun(tree):
        change(tree)
        return tree["node"].half

    tree = {"node": Doubled(W), "x": X, "list": [X, W], "step": 1}
    with pytest.raises(ValueError, match="`fun` must not change its arguments"):
        ols.autocast(fun)(tree)


NOT_OF_JAX = [
    np.array(["a", "b"]),
    np.array([b"a"]),
    np.array([object(), None]),
    np.array(["2024-01-01"], "datetime64[D]"),
    np.array([1], "timedelta64[s]"),
    np.zeros(2, [("x", "f4"), ("y", "i4")]),
    np.zeros(2, "V4"),
    np.zeros(2, jax.dtypes.float0),
]


@pytest.mark.parametrize("array", NOT_OF_JAX, ids=lambda array: str(array.dtype))
def test_numpy_arrays_of_other_than_numbers_are_static(array):
    def fun(w, batch):
        assert batch["labels"][0] is array
        return batch["x"] @ w, batch["labels"], array

    batch = {"x": X, "labels": [array]}
    y, (label,), closed_over = ols.autocast(fun)(W, batch)
    assert label is array
    assert closed_over is array
    assert_close(y, X @ W)
    grads = jax.grad(lambda w: jnp.sum(ols.autocast(fun)(w, batch)[0]))(W)
    assert_close(grads, jax.grad(lambda w: jnp.sum(X @ w))(W))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "float64", ml_dtypes.bfloat16, ml_dtypes.int4]
)
def test_numpy_arrays_of_numbers_are_traced(dtype):
    def fun(array):
        assert isinstance(array, jax.core.Tracer)
        return array

    array = np.ones(2, dtype)
    assert ols.autocast(fun)(array).dtype == jnp.asarray(array).dtype


def test_an_array_that_was_deleted_raises_the_error_of_jax():
    x = X + 1
    x.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        ols.autocast(jnp.dot)(x, W)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_gradients_of_integers_are_float0_inside_and_outside(wrap):
    def fun(params):
        return jnp.mean((X @ params["w"]) ** 2)

    params = {"w": W, "steps": jnp.arange(3)}
    grad = functools.partial(jax.grad, allow_int=True)
    expected = grad(fun)(params)
    assert expected["steps"].dtype == jax.dtypes.float0
    for grads in (
        ols.autocast(wrap(grad(fun)))(params),
        wrap(grad(ols.autocast(fun)))(params),
        ols.autocast(grad(wrap(fun)))(params),
    ):
        assert grads["steps"].dtype == jax.dtypes.float0
        assert_close(grads["w"], expected["w"])


def test_float0_arrays_pass_through_programs():
    def fun(w, ct):
        inner = jax.jit(lambda w, ct: (jnp.tanh(X @ w), ct))
        (y, ct), _ = jax.lax.scan(lambda c, _: (c, None), inner(w, ct), length=2)
        return y, ct

    ct = np.zeros(3, jax.dtypes.float0)
    y, result = jax.jit(ols.autocast(fun))(W, ct)
    assert (result.dtype, result.shape) == (ct.dtype, ct.shape)
    assert_close(y, jnp.tanh(X @ W))


@pytest.mark.parametrize("fun", [None, 3, "loss"])
def test_only_a_function_can_be_in_full_precision(fun):
    with pytest.raises(TypeError, match="`fun` must be a function, got"):
        ols.full_precision(fun)
