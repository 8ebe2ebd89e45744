"""`autocast_report` shows the dtype of each operation that runs."""

import functools
import importlib
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import optax_lossscale as ols
from helpers.under_autocast import (
    W,
    X,
    dot_loss,
    own_layer,
    with_scan,
)


def test_the_report_accepts_abstract_arguments_and_jitted_functions(capsys):
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, X)]
    ols.autocast_report(jax.jit(ols.autocast(dot_loss, jnp.bfloat16)), *args)
    assert "bfloat16  low list" in capsys.readouterr().out


def test_a_function_without_autocast_is_reported_as_autocast_would_run_it(capsys):
    ols.autocast_report(with_scan, W, X)
    lines = capsys.readouterr().out.splitlines()
    titles = ["times", "operation", "computed", "result", "why", "where"]
    assert lines[0].split() == titles
    products = [line.split() for line in lines if "dot_general" in line]
    assert [row[:6] for row in products] == [
        ["1", "dot_general", "float16", "float16", "low", "list"]
    ] * 2
    assert "under_autocast.py" in products[0][6]  # The source file.


def test_equal_operations_on_one_line_share_a_row_that_counts_them(capsys):
    ols.autocast_report(lambda x: x + 1.0 + 1.0, X)
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[:3] == ["2", "add", "float32"]


def test_the_report_shows_that_a_bias_is_added_in_float32_and_rounded(capsys):
    ols.autocast_report(lambda w, x, b: x @ w + b, W, X, jnp.ones((1, W.shape[1])))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:4] for line in lines]
    assert ["1", "add", "float32", "float16"] in rows


def dtypes_of_products(capsys, fun, *args):
    """The dtype in which each matrix product computes, according to the report."""
    ols.autocast_report(fun, *args)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    products = [row for row in rows if row[1] == "dot_general"]
    return [row[2] for row in products for _ in range(int(row[0]))]


def test_the_report_of_a_callable_object_heeds_full_precision(capsys):
    class Agent:
        policy = "mlp"

        def __call__(self, x):
            return x @ W

    exact = ols.autocast(ols.full_precision(Agent()))
    assert dtypes_of_products(capsys, exact, X) == ["float32"]
    assert dtypes_of_products(capsys, Agent(), X) == ["float16"]


def test_the_report_of_a_partial_function_heeds_the_settings_of_autocast(capsys):
    partial = functools.partial(ols.autocast(dot_loss, high=["dot_general"]), W)
    assert dtypes_of_products(capsys, partial, X) == ["float32"]


def test_the_report_shows_the_products_of_gradients_and_of_vmap(capsys):
    gradient = ols.autocast(jax.grad(dot_loss))
    assert dtypes_of_products(capsys, gradient, W, X) == ["float16"] * 2
    rows = ols.autocast(jax.vmap(lambda v: W @ v))
    assert dtypes_of_products(capsys, rows, X) == ["float16"]


def test_the_report_names_the_level_that_casts_nothing(capsys):
    ols.autocast_report(jax.jit(ols.autocast(dot_loss, level="O0")), W, X)
    assert "level O0" in capsys.readouterr().out


def rows_of(capsys, fun, *args, **kwargs):
    """The rows of the report: times, operation, computed, result, and the rest."""
    ols.autocast_report(fun, *args, **kwargs)
    lines = capsys.readouterr().out.splitlines()[1:]
    return [
        (int(row[0]), *row[1:4], " ".join(row[4:])) for row in map(str.split, lines)
    ]


def times_of(rows, operation):
    return sum(row[0] for row in rows if row[1] == operation)


def key_of_old_kind(seed):
    return jax.random.PRNGKey(seed)


@pytest.mark.parametrize("make_key", [jax.random.key, key_of_old_kind])
def test_random_keys_are_shown_by_their_dtypes(capsys, make_key):
    def fun(x, key):
        first, second = jax.random.split(jax.random.fold_in(key, 1))
        noise = jax.random.normal(first, x.shape)
        return jnp.where(jax.random.bernoulli(second, 0.5, x.shape), x * noise, 0.0)

    key = make_key(0)
    for argument in (key, jax.eval_shape(lambda: key)):
        rows = rows_of(capsys, fun, X, argument)
        (split,) = [row for row in rows if row[1] == "random_split"]
        assert split[2:4] == ("key<fry>", "key<fry>")
        assert {row[2:4] for row in rows if row[1] == "random_bits"} == {
            ("key<fry>", "uint32")
        }


class LinenDropout(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(x)


class NnxDropout(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(self.linear(x))


def test_the_dropout_of_every_framework_is_shown(capsys):
    key, model = jax.random.key(0), NnxDropout()
    linen, equinox = LinenDropout(), eqx.nn.Dropout(0.5)
    calls = [
        (lambda x: linen.apply({}, x, rngs={"dropout": key}), X),
        (lambda x, key: equinox(x, key=key), X, key),
        (lambda model, x: model(x), model, X),
        (model, X),
        (nnx.jit(ols.autocast(lambda model, x: model(x))), model, X),
    ]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for call in calls:
            assert times_of(rows_of(capsys, *call), "random_bits") == 1
    assert model.dropout.rngs.count[...] == 0  # A report runs nothing.


def test_operations_without_results_are_shown(capsys):
    def fun(x):
        jax.debug.print("{}", 3)
        jax.debug.callback(lambda x: None, x)
        return jnp.where(x > 0, 1, 2)

    rows = rows_of(capsys, fun, X)
    (printed,) = [row for row in rows if row[1] in ("debug_print", "debug_callback")][
        :1
    ]
    assert printed[2:4] == ("int32", "-")
    (compared,) = [row for row in rows if row[1] == "gt"]
    assert compared[2:4] == ("float32", "bool")
    assert [row[2:4] for row in rows if row[1] == "select_n"] == [("int32", "int32")]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.named_scope("scope")])
def test_a_helper_is_counted_at_each_call_with_the_dtypes_of_that_call(capsys, wrap):
    helper = wrap(lambda x: jnp.tanh(x))

    def fun(x):
        return helper(helper(x @ W)) + helper(x)

    rows = rows_of(capsys, fun, X)
    found = sorted(row[:4] for row in rows if row[1] == "tanh")
    assert found == [
        (1, "tanh", "float32", "float32"),
        (2, "tanh", "float16", "float16"),
    ]


def test_each_body_and_branch_is_counted_once(capsys):
    def fun(x):
        x = jax.lax.scan(lambda c, _: (jnp.tanh(c @ W), None), x, length=5)[0]
        x = jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
        return jax.lax.while_loop(lambda x: x[0, 0] > 9, jnp.exp, x)

    rows = rows_of(capsys, fun, X)
    names = ["tanh", "dot_general", "sin", "cos", "exp"]
    assert [times_of(rows, name) for name in names] == [1] * 5


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit])
def test_a_forward_rule_is_counted_instead_of_its_function(capsys, wrap):
    layer = wrap(own_layer)
    cast = ols.autocast(lambda w, x: jnp.sum(jnp.tanh(layer(w, layer(w, x)))))
    assert times_of(rows_of(capsys, cast, W, X), "dot_general") == 2
    # Each of the two calls has one product forward and two backward.
    rows = rows_of(capsys, jax.grad(cast, argnums=(0, 1)), W, X)
    assert times_of(rows, "dot_general") == 6
    assert times_of(rows, "tanh") == 1


def test_autocast_inside_autocast_is_counted_once(capsys):
    inner = ols.autocast(lambda x: jnp.exp(x @ W), jnp.bfloat16)
    rows = rows_of(capsys, ols.autocast(lambda x: inner(x)), X)
    assert (times_of(rows, "dot_general"), times_of(rows, "exp")) == (1, 1)
    (product,) = [row for row in rows if row[1] == "dot_general"]
    assert product[2:4] == ("bfloat16", "bfloat16")


def test_a_function_that_jax_has_already_traced_is_reported_in_full(capsys):
    cast = jax.jit(ols.autocast(lambda x: jnp.tanh(x @ W), jnp.bfloat16))
    cast(X)
    for fun in (cast, lambda x: cast(x) + 1.0, jax.vmap(cast), cast):
        rows = rows_of(capsys, fun, X)
        assert [row[2] for row in rows if row[1] == "tanh"] == ["bfloat16"]


def test_operations_in_library_functions_are_shown_where_these_are_called(capsys):
    def caller(x):
        x = jnp.where(x > 0, x, 0.0) + jax.nn.gelu(jnp.take(x, jnp.arange(3), axis=0))
        return jnp.linalg.norm(jax.nn.softmax(x))

    rows = rows_of(capsys, jax.jit(caller), X)
    places = {row[4].split(" test_report.py:")[-1] for row in rows}
    first = caller.__code__.co_firstlineno
    lines = {int(place.split(":")[0]) for place in places}
    assert lines == {first + 1, first + 2}
    assert all(place.endswith("caller)") for place in places)


def test_a_library_function_itself_is_shown_where_the_report_is_made(capsys):
    (row,) = rows_of(capsys, jnp.sin, X)
    assert "test_report.py" in row[4]


def why(rows, operation):
    return [row[4].split(" test_report.py")[0] for row in rows if row[1] == operation]


def test_each_product_in_float32_is_shown_with_its_own_reason(capsys):
    def outer(x):
        return jnp.einsum("i,j->ij", x[0], x[1])

    def mixed(x):
        dimensions = (((1,), (0,)), ((), ()))
        return jax.lax.dot_general(
            x, W.astype(jnp.bfloat16), dimensions, preferred_element_type=jnp.float32
        )

    assert why(rows_of(capsys, outer, X), "dot_general") == ["an outer product"]
    reason = "written for several dtypes"
    assert why(rows_of(capsys, mixed, X), "dot_general") == [reason]
    cast = ols.autocast(mixed, low=["dot_general", "cumsum"])
    assert why(rows_of(capsys, cast, X), "dot_general") == [reason]


def test_operations_that_full_precision_leaves_alone_are_shown_one_by_one(capsys):
    exact = ols.full_precision(jax.jit(lambda x: jnp.tanh(x @ W)))
    rows = rows_of(capsys, lambda x: exact(x) @ W.T, X)
    assert sorted(why(rows, "dot_general")) == ["full_precision", "low list"]
    assert why(rows, "tanh") == ["full_precision"]


@pytest.mark.parametrize("fun", [3, None, X])
def test_the_report_refuses_what_is_not_a_function(fun):
    with pytest.raises(TypeError, match="`fun` must be a function, got "):
        ols.autocast_report(fun, X)


def test_a_function_without_operations_has_a_report_without_rows(capsys):
    assert rows_of(capsys, lambda x: x, X) == []
    assert rows_of(capsys, lambda: None) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:SelfAttention:DeprecationWarning")
def test_every_model_of_the_benchmarks_has_a_report(capsys, monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "benchmarks")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for make in importlib.import_module("_lib.models").MODELS.values():
            loss_fn, params, batch = make()
            for fun in (loss_fn, jax.grad(ols.autocast(loss_fn, level="O2"))):
                rows = rows_of(capsys, fun, params, *batch)
                kinds = {row[1] for row in rows}
                assert kinds & {"dot_general", "conv_general_dilated"}
                assert all(".py:" in row[4] for row in rows)
