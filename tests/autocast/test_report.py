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
    ols.autocast_report(with_scan, W, X)
    lines = capsys.readouterr().out.splitlines()
    titles = ["times", "operation", "computed", "result", "why", "where"]
    assert lines[0].split() == titles
    products = [line.split() for line in lines if "dot_general" in line]
    assert [row[:6] for row in products] == [
        ["1", "dot_general", "float16", "float16", "low", "list"]
    ] * 2
    assert "under_autocast.py" in products[0][6]
    ols.autocast_report(lambda x: x + 1.0 + 1.0, X)
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[:3] == ["2", "add", "float32"]


def test_the_report_shows_that_a_bias_is_added_in_float32_and_rounded(capsys):
    ols.autocast_report(lambda w, x, b: x @ w + b, W, X, jnp.ones((1, W.shape[1])))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:4] for line in lines]
    assert ["1", "add", "float32", "float16"] in rows


def test_the_report_shows_the_program_that_runs(capsys):
    def report(fun, *args):
        ols.autocast_report(fun, *args)
        rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
        products = [row for row in rows if row[1] == "dot_general"]
        return [row[2] for row in products for _ in range(int(row[0]))]

    class Agent:
        policy = "mlp"

        def __call__(self, x):
            return x @ W

    assert report(ols.autocast(ols.full_precision(Agent())), X) == ["float32"]
    assert report(Agent(), X) == ["float16"]
    assert report(
        functools.partial(ols.autocast(dot_loss, high=["dot_general"]), W), X
    ) == ["float32"]
    assert report(ols.autocast(jax.grad(dot_loss)), W, X) == ["float16"] * 2
    assert report(ols.autocast(jax.vmap(lambda v: W @ v)), X) == ["float16"]
    ols.autocast_report(jax.jit(ols.autocast(dot_loss, level="O0")), W, X)
    assert "level O0" in capsys.readouterr().out
