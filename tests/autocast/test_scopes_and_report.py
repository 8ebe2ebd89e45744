"""`high` and `autocast_report` by scopes and lines, as in docs/guides/autocast.md."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax

import optax_lossscale as ols
from helpers.inner import standard_promotion
from helpers.places import place_of
from helpers.under_autocast import W, X, dot_loss, dtypes_of, own_layer, reports

# --- `high` -----------------------------------------------------------------------


def two_layers(w, x):
    with jax.named_scope("Net"):
        for i in (1, 10):
            with jax.named_scope(f"Dense_{i}"):
                x = jax.nn.relu(x @ w)  # a layer
    return jnp.sum(x)


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint])
def test_products_in_the_scopes_of_high_stay_as_they_are_written(wrap):
    for high, expected in [
        ("Net/Dense_1/", ["float32", "float16"]),
        ("Net/Dense_10", ["float16", "float32"]),
        ("Net/", ["float32", "float32"]),
    ]:
        cast = ols.autocast(wrap(two_layers), high=[high])
        assert dtypes_of(cast, W, X) == expected
        # The gradient of a layer has a product for its weight, and one for its input.
        of_gradient = [expected[0]] * 2 + [expected[1]] * 3
        of_gradient += expected if wrap is jax.checkpoint else []  # Computed again.
        assert sorted(dtypes_of(jax.grad(cast), W, X)) == sorted(of_gradient)


def in_net(fun):
    def loss(w, x):
        with jax.named_scope("Net"):
            return jnp.sum(fun(w, x))

    return loss


def product(w, x):
    return x @ w


def loop(w, x):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=2)[0]


@pytest.mark.parametrize("run", [lambda f: f, lambda f: jax.vmap(f, (None, 0))])
@pytest.mark.parametrize(
    ("fun", "high"),
    [
        (in_net(product), "Net/"),
        (in_net(jax.checkpoint(product)), "Net/"),
        (in_net(loop), "Net/"),
        (in_net(in_net(product)), "Net/Net/"),
    ],
)
def test_a_scope_in_high_holds_in_a_backward_pass_inside_autocast(fun, high, run):
    cast = ols.autocast(run(jax.grad(fun, (0, 1))), high=[high])
    assert set(dtypes_of(cast, W, X[None])) == {"float32"}


def test_a_scope_around_a_loop_or_a_jitted_function_holds_what_is_inside():
    @jax.jit
    def inner(x):
        with jax.named_scope("Inner"):
            return x @ W

    def fun(x):
        with jax.named_scope("Outer"):
            x = lax.scan(lambda x, _: (inner(x), None), x, length=2)[0]
        return inner(x)

    def dtypes(*high):
        return dtypes_of(ols.autocast(fun, high=high), X)

    assert dtypes("Outer/Inner/") == dtypes("Outer") == ["float32", "float16"]
    assert dtypes("Inner/") == ["float16", "float32"]


@pytest.mark.parametrize(
    ("fun", "name", "message"),
    [
        (two_layers, "Net/Dense_2/", r"Did you mean 'Net/Dense_1/' or 'Net/Dense_"),
        (two_layers, "Dense_1/", r"got 'Dense_1'\. \(Did you mean 'Net/Dense_1/'"),
        (two_layers, "dot_general", "Net/, Net/Dense_1/, Net/Dense_10/"),
        (product, "Net", r"nothing else runs low, got 'Net'\."),
    ],
)
def test_a_name_in_high_that_has_no_products_is_refused(fun, name, message):
    with pytest.raises(ValueError, match=f"^`high` must hold .*{message}"):
        ols.autocast(fun, high=[name])(W, X[:1])


# --- The report -------------------------------------------------------------------


def in_a_loop(fun):
    return lambda w, x: lax.map(lambda _: fun(w, x), jnp.zeros(2))


@pytest.mark.parametrize("wrap", [in_a_loop, jax.jit, jax.checkpoint, lambda fun: fun])
def test_the_report_has_a_row_for_each_kind_of_product(wrap, capsys):
    cast = ols.autocast(wrap(two_layers), jnp.bfloat16, high=iter(["Net/Dense_10"]))
    rows = reports(capsys, cast, W, X)
    same = {"times": "1", "product": "dot_general", "shapes": "3x4 * 4x4"}
    same["where"] = place_of(two_layers, "a layer")
    assert rows == [
        {**same, "dtype": "bfloat16", "scope": "Net/Dense_1", "why": ""},
        {**same, "dtype": "float32", "scope": "Net/Dense_10", "why": "`high`"},
    ]


def test_products_that_are_alike_share_a_row_and_bodies_and_branches_count_once(capsys):
    def fun(w, x):
        x = (x @ w) @ w + (x @ w) @ w
        x = lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]
        x = lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: -x)
        return lax.while_loop(lambda x: x[0, 0] > 9, lambda x: x @ w, x)

    rows = reports(capsys, fun, W, X)
    assert [row["times"] for row in rows] == ["4", "1", "1", "1"]


def products(rows):
    return [row["dtype"] for row in rows for _ in range(int(row["times"]))]


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (jax.jit(ols.autocast(dot_loss, jnp.bfloat16)), ["bfloat16"]),
        (jax.grad(ols.autocast(dot_loss, jnp.bfloat16)), ["bfloat16"]),
        (lambda w, x: ols.autocast(dot_loss)(w, x) + jnp.sum(x @ w), ["float16"]),
        (ols.autocast(dot_loss, level="O0"), []),
        (ols.autocast(ols.autocast(dot_loss, jnp.bfloat16)), ["bfloat16"]),
        (own_layer, ["float16"]),
    ],
)
def test_the_report_is_that_of_the_autocast_inside(capsys, fun, expected):
    assert products(reports(capsys, fun, W, X)) == expected


def test_the_report_traces_what_jax_has_traced_before(capsys):
    cast = jax.jit(ols.autocast(lambda x: x @ W, jnp.bfloat16))
    cast(X)
    for fun in (cast, lambda x: cast(x) + 1.0, jax.vmap(cast), cast):
        assert products(reports(capsys, fun, X)) == ["bfloat16"]


def test_the_report_runs_nothing_and_takes_abstract_arguments(capsys):
    def fun(x):
        jax.debug.callback(lambda: pytest.fail("The function was run."))
        return x @ W

    assert products(reports(capsys, fun, jax.eval_shape(lambda: X))) == ["float16"]


def test_products_of_a_library_stand_where_it_is_called(capsys):
    def caller(x):
        x = jnp.linalg.multi_dot([x, x.T, x])  # of JAX
        return nn.Dense(4).apply({"params": {"kernel": W, "bias": W[0]}}, x)  # of Flax

    with standard_promotion():
        rows = reports(capsys, jax.jit(caller), X)
    places = {place_of(caller, comment) for comment in ("of JAX", "of Flax")}
    assert {row["where"] for row in rows} == places


def test_names_in_the_compiled_program_are_those_of_the_scopes():
    text = jax.jit(ols.autocast(two_layers)).lower(W, X).as_text(debug_info=True)
    assert "Net/Dense_1/dot_general" in text
