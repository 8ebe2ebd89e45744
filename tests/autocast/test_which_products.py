"""Which products run low, which stay as they are written, and what is said of them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import optax_lossscale as ols
from helpers.compat import enable_x64
from helpers.under_autocast import W, X, dot_loss, dtypes_of, own_layer

IMAGE, KERNEL = jnp.ones((1, 2, 6, 6)), jnp.ones((4, 2, 3, 3))
conv = functools.partial(lax.conv, window_strides=(1, 1), padding="SAME")


def reports(capsys, fun, *args, **kwargs):
    """The cells of each row of the report, by title."""
    ols.autocast_report(fun, *args, **kwargs)
    titles, *rows, last = capsys.readouterr().out.splitlines()
    assert last == "Everything else runs as it is written."
    names = titles.split()
    # A title begins where its column does; only `times` is aligned to the right.
    places = itertools.pairwise([0, *map(titles.index, names[1:]), None])
    columns = dict(zip(names, places, strict=True))
    return [{k: row[i:j].strip() for k, (i, j) in columns.items()} for row in rows]


def dot(**settings):
    return lambda w, x: jnp.dot(x, w, **settings)


def in_dtype(dtype, other=None):
    def fun(w, x):
        numbers = (((1,), (0,)), ((), ()))
        return lax.dot_general(x.astype(dtype), w.astype(other or dtype), numbers)

    return fun


def patches(w, x):
    return lax.conv_general_dilated_patches(x[None, None], (2, 2), (1, 1), "VALID")


def patches_of_channels(w, x):
    layout, images = ("NHWC", "HWIO", "NHWC"), jnp.stack([x, x], axis=-1)[None]
    return lax.conv_general_dilated_patches(
        images, (2, 3), (1, 1), "VALID", dimension_numbers=layout
    )


def conv_by(make_rows):
    """A convolution by four kernels of 2x2 entries, which the function makes itself."""
    return lambda w, x: conv(x[None, None], make_rows().reshape(4, 1, 2, 2))


LOW = {
    "a matrix product": dot(),
    "a vector product": lambda w, x: jnp.dot(x[0], w[0]),
    "a batch of products": lambda w, x: jnp.einsum("bi,bj,ij->b", x, x, w),
    "a convolution": lambda w, x: conv(IMAGE * x[0, 0], KERNEL),
    "a pointwise convolution": lambda w, x: conv(IMAGE * x[0, 0], KERNEL[..., :1, :1]),
    "a ragged product": lambda w, x: lax.ragged_dot(x, w[None], jnp.array([3])),
    "the default precision": dot(precision="default"),
    "the default algorithm": dot(precision=lax.DotAlgorithmPreset.DEFAULT),
    "a float32 result": dot(preferred_element_type=jnp.float32),
    "one factor that is low": in_dtype("float32", "float16"),
    "kernels of single twos": conv_by(lambda: 2 * jnp.eye(4)),
    "kernels of two ones": conv_by(lambda: jnp.eye(4) + jnp.eye(4)[::-1]),
    "kernels of one to four ones": conv_by(lambda: jnp.tri(4)),
}


@pytest.mark.parametrize("name", LOW)
def test_a_product_of_float32_operands_runs_low(name, capsys):
    assert set(dtypes_of(ols.autocast(LOW[name]), W, X)) == {"float16"}
    assert {row["why"] for row in reports(capsys, LOW[name], W, X)} == {""}


def in_a_scope(w, x):
    with jax.named_scope("Net"), jax.named_scope("Dense_0"):
        return x @ w


ONE_TERM = "sums of at most one term"
AS_WRITTEN = {
    "HIGHEST": (dot(precision="highest"), "precision=HIGHEST"),
    "one factor more precise": (dot(precision=("default", "high")), "precision=HIGH"),
    "an algorithm": (
        dot(precision=lax.DotAlgorithmPreset.F32_F32_F32),
        "precision=F32_F32_F32",
    ),
    "an inverse": (lambda w, x: jnp.linalg.inv(w), "precision=HIGHEST"),
    "float16": (in_dtype("float16"), "written in float16"),
    "one factor in bfloat16": (in_dtype("float32", "bfloat16"), "written in bfloat16"),
    "integers": (in_dtype("int32"), "written in int32"),
    "complex numbers": (in_dtype("complex64"), "written in complex64"),
    "rotary angles": (lambda w, x: jnp.einsum("i,j->ij", x[0], x[1]), ONE_TERM),
    "one input": (lambda w, x: x[:, :1] @ w[:1], ONE_TERM),
    "no input": (lambda w, x: x[:, :0] @ w[:0], ONE_TERM),
    "no input and two": (
        lambda w, x: jnp.einsum(
            "iab,abj->ij", jnp.ones((3, 0, 2)), jnp.ones((0, 2, 4))
        ),
        ONE_TERM,
    ),
    "a scale": (lambda w, x: conv(x[None, None], w[None, None, :1, :1]), ONE_TERM),
    "patches": (patches, "moves entries only"),
    "patches of channels": (patches_of_channels, "moves entries only"),
    "full_precision": (ols.full_precision(dot()), "full_precision"),
    "high": (in_a_scope, "`high`"),
}


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_the_report_says_why_a_product_stays_as_it_is_written(name, capsys):
    fun, reason = AS_WRITTEN[name]
    cast = ols.autocast(fun, high=["Net/"] if name == "high" else ())
    (row,) = reports(capsys, cast, W, X)
    assert row["why"] == reason
    assert set(dtypes_of(cast, W, X)) == {row["dtype"]} == set(dtypes_of(fun, W, X))


def test_what_a_callback_returns_is_not_asked_for_while_a_function_is_traced():
    asked = []

    def ask():
        asked.append(1)
        return np.ones((4, 1, 2, 2), np.float32)

    def fun(x):
        shape = jax.ShapeDtypeStruct((4, 1, 2, 2), jnp.float32)
        kernel = io_callback(ask, shape, ordered=True)
        return conv(x[None, None], kernel.transpose(0, 1, 3, 2))

    jax.make_jaxpr(ols.autocast(fun))(X)
    assert not asked
    ols.autocast(fun)(X)
    assert asked == [1]


def test_a_product_of_float64_arrays_stays_as_it_is_written():
    with enable_x64(True):
        w, x = np.ones((4, 4)), np.ones((3, 4))
        assert dtypes_of(ols.autocast(lambda w, x: x @ w), w, x) == ["float64"]


def test_the_precision_around_a_call_counts_as_if_it_were_written():
    with jax.default_matmul_precision("highest"):
        assert dtypes_of(ols.autocast(dot_loss), W, X) == ["float32"]


# --- Scopes -----------------------------------------------------------------------


def two_layers(w, x):
    with jax.named_scope("Net"):
        for i in range(2):
            with jax.named_scope(f"Dense_{i}"):
                x = jax.nn.relu(x @ w)
    return jnp.sum(x)


@pytest.mark.parametrize(
    ("high", "expected"),
    [
        (["Net/Dense_0/"], ["float32", "float16"]),
        (["Net/Dense_1"], ["float16", "float32"]),
        (["Net/"], ["float32", "float32"]),
    ],
)
@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit, jax.checkpoint])
def test_products_in_the_scopes_of_high_stay_as_they_are_written(wrap, high, expected):
    cast = ols.autocast(wrap(two_layers), high=high)
    assert dtypes_of(cast, W, X) == expected
    # The gradient of a layer has a product for its weight, and one for its input.
    of_gradient = [expected[0]] * 2 + [expected[1]] * 3
    of_gradient += expected if wrap is jax.checkpoint else []  # Computed again.
    assert sorted(dtypes_of(jax.grad(cast), W, X)) == sorted(of_gradient)


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
    ("name", "message"),
    [
        ("Net/Dense_2/", r"Did you mean 'Net/Dense_[01]/' or 'Net/Dense_[01]/'\?"),
        ("net", r"got 'net'\. \(Did you mean 'Net/'\?"),
        ("dot_general", "scopes with products are Net/, Net/Dense_0/, Net/Dense_1/"),
        ("Dense_0/", r"got 'Dense_0'\. \(Did you mean 'Net/Dense_0/'"),
    ],
)
def test_a_scope_without_products_in_high_is_refused_with_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        ols.autocast(two_layers, high=[name])(W, X)


def test_a_name_in_high_is_refused_also_where_no_scope_has_products():
    with pytest.raises(ValueError, match=r"got 'Net'\. The function has no products\."):
        ols.autocast(jnp.sin, high=["Net"])(X)
    message = r"got 'Net'\. Its products are in no scope, so name their lines\."
    with pytest.raises(ValueError, match=message):
        ols.autocast(jnp.dot, high=["Net"])(X, W)


# --- The report -------------------------------------------------------------------


def test_the_report_has_a_row_for_each_kind_of_product(capsys):
    cast = ols.autocast(two_layers, jnp.bfloat16, high=["Net/Dense_1"])
    line = two_layers.__code__.co_firstlineno + 4
    where = f"test_which_products.py:{line} (two_layers)"
    titles = ["times", "product", "dtype", "shapes", "scope", "why", "where"]
    kind = ["1", "dot_general"], ["3x4 * 4x4"]
    rows = [
        [*kind[0], "bfloat16", *kind[1], "Net/Dense_0", "", where],
        [*kind[0], "float32", *kind[1], "Net/Dense_1", "`high`", where],
    ]
    found = reports(capsys, cast, W, X)
    assert [list(row) for row in found] == [titles] * 2
    assert [list(row.values()) for row in found] == rows


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
        (ols.autocast(jax.grad(dot_loss)), ["float16"] * 2),
        (lambda w, x: ols.autocast(dot_loss)(w, x) + jnp.sum(x @ w), ["float16"]),
        (ols.autocast(dot_loss, level="O0"), []),
        (ols.autocast(ols.autocast(dot_loss, jnp.bfloat16)), ["bfloat16"]),
        (lambda w, x: jnp.sum(own_layer(w, x)), ["float16"]),
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

    for x in (X, jax.eval_shape(lambda: X)):
        assert products(reports(capsys, fun, x)) == ["float16"]


def test_products_of_a_library_stand_where_it_is_called(capsys):
    def caller(x):
        return jax.nn.softmax(jnp.linalg.matrix_power(x @ x.T, 2))

    rows = reports(capsys, jax.jit(caller), X)
    line = caller.__code__.co_firstlineno + 1
    assert all(f"test_which_products.py:{line} " in row["where"] for row in rows)
