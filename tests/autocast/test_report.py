"""`autocast_report` shows the dtype of each operation that runs."""

import functools

import jax
import jax.numpy as jnp

import optax_lossscale as ols
from helpers.under_autocast import (
    W,
    X,
    dot_loss,
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
