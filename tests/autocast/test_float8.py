"""Products of float8 operands under autocast.

Expected values come from a reference in NumPy: float8 numbers of `ml_dtypes`, products
in float64.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, jet
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from _lib.compiled_text import sent_arrays
from helpers.compat import IS_JAX_0_7, enable_x64
from helpers.inner import lenient
from helpers.programs import equations_of

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
RNG = np.random.default_rng(0)
W = jnp.asarray(0.1 * RNG.normal(size=(32, 48)), jnp.float32)
X = jnp.asarray(RNG.normal(size=(16, 32)), jnp.float32)
to_float8 = functools.partial(ols.autocast, dtype=jnp.float8_e4m3fn)


def quantized(x, dtype):
    """The factor in float8 as float64, and the exponent of its scale."""
    x = np.asarray(x, np.float64)
    largest = np.max(np.abs(x), where=np.isfinite(x), initial=0)
    top = float(ml_dtypes.finfo(dtype).max)
    exponent = int(np.floor(np.log2(top / largest))) if largest else 0
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.where(np.isfinite(x), np.ldexp(x, exponent), np.nan)
        # XLA of JAX 0.7 casts to float16 first.
        first = np.float16 if IS_JAX_0_7 else np.float32
        return scaled.astype(first).astype(dtype).astype(np.float64), exponent


def product(x, y, dtypes=(E4M3, E4M3), result=ml_dtypes.bfloat16):
    (x, i), (y, j) = map(quantized, (x, y), dtypes)
    return np.ldexp(x @ y, -i - j).astype(np.float32).astype(result).astype(np.float32)


def dot(w, x):
    return x @ w


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def in_float8(fun, *args):
    """The float8 dtypes of each product of a program that has them."""
    found = []
    for equation in equations_of(jax.make_jaxpr(fun)(*args)):
        if equation.params.get("float8") is not None:
            found.append(tuple(str(dtype) for dtype in equation.params["float8"]))
    return found


VALUES, WITH_COTANGENT = ("float8_e4m3fn",) * 2, ("float8_e5m2", "float8_e4m3fn")


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun])
@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**100, 1e-30, 1e37])
def test_a_product_is_that_of_the_scaled_and_rounded_factors(jit, size):
    x = X * jnp.float32(size)
    np.testing.assert_array_equal(jit(to_float8(dot))(W, x), product(x, W))


@given(
    st.integers(-50, 50), st.integers(-50, 50), st.sampled_from([1.75, 1.0, 1.7500001])
)
def test_powers_of_two_and_the_ends_of_the_range_are_scaled_exactly(i, j, largest):
    x = jnp.asarray(np.ldexp(np.float32(largest), i - RNG.integers(0, 5, X.shape)))
    w = jnp.asarray(np.ldexp(np.float32(1.75), j - RNG.integers(0, 5, W.shape)))
    x, w = x.at[0, 0].set(np.ldexp(np.float32(largest), i)), w.astype(jnp.float32)
    result = to_float8(dot)(w, x)
    np.testing.assert_array_equal(result, product(x, w))
    assert np.isfinite(result).all()


def test_the_result_is_rounded_to_float16_with_also():
    fun = to_float8(dot, also=jnp.float16)
    np.testing.assert_array_equal(fun(W, X), product(X, W, result=np.float16))
    # Its sum of scaled factors alone would be beyond the range of float16.
    assert jnp.isfinite(fun(W, 100 * jnp.ones_like(X))).all()


def test_gradients_are_products_with_cotangents_in_e5m2():
    cotangent = jnp.asarray(RNG.normal(size=(16, 48)) * 1e-6, jnp.bfloat16)
    _, pullback = jax.vjp(to_float8(dot), W, X)
    for_w, for_x = pullback(cotangent.astype(jnp.float32))
    expected = product(cotangent.T, X, (E5M2, E4M3), np.float32).T
    np.testing.assert_allclose(for_w, expected, rtol=1e-6)
    expected = product(cotangent, W.T, (E5M2, E4M3), np.float32)
    np.testing.assert_allclose(for_x, expected, rtol=1e-6)
    assert for_w.dtype == for_x.dtype == jnp.float32


def test_all_three_products_of_a_layer_are_in_float8_and_a_weight_gradient_in_float32():
    grad = jax.grad(to_float8(lambda w, x: jnp.sum(dot(w, x) @ w.T) ** 2), 0)
    expected = [VALUES, VALUES, *[WITH_COTANGENT] * 3]
    assert in_float8(grad, W, X) == expected
    program = jax.make_jaxpr(grad)(W, X)
    products = [e for e in equations_of(program) if "float8" in e.params]
    dtypes = [str(e.outvars[0].aval.dtype) for e in products]
    assert dtypes[:2] == ["bfloat16"] * 2
    assert sorted(dtypes[2:]) == ["bfloat16", "float32", "float32"]


def test_no_product_of_a_second_derivative_has_two_factors_in_e5m2():
    def fun(w):
        return loss(w, X)

    hessian = jax.hessian(to_float8(lambda d: fun(W + d[:, None])))
    for found in in_float8(hessian, jnp.zeros(32)):
        assert found in (VALUES, WITH_COTANGENT, WITH_COTANGENT[::-1])
    exact = jax.hessian(lambda d: fun(W + d[:, None]))(jnp.zeros(32))
    error = jnp.linalg.norm(hessian(jnp.zeros(32)) - exact) / jnp.linalg.norm(exact)
    assert error < 0.2


def test_no_operation_casts_float8_numbers_up():
    grad = jax.grad(to_float8(loss))
    for equation in equations_of(jax.make_jaxpr(grad)(W, X)):
        dtypes = [str(getattr(x.aval, "dtype", "")) for x in equation.invars]
        is_cast = equation.primitive.name == "convert_element_type"
        assert not (is_cast and dtypes[0].startswith("float8"))


def test_a_product_of_zeros_is_zero():
    zeros = jnp.zeros_like(X)
    np.testing.assert_array_equal(to_float8(dot)(W, zeros), jnp.zeros((16, 48)))
    np.testing.assert_array_equal(to_float8(dot)(0 * W, zeros), jnp.zeros((16, 48)))


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_number_that_is_not_finite_spoils_its_own_row_only(bad):
    x = X.at[3, 5].set(bad)
    result = to_float8(dot)(W, x)
    assert jnp.isnan(result[3]).all()
    expected = product(x.at[3, 5].set(0), W)
    np.testing.assert_array_equal(np.delete(result, 3, 0), np.delete(expected, 3, 0))


def test_a_tensor_of_nan_alone_gives_nan():
    assert jnp.isnan(to_float8(dot)(W, jnp.full_like(X, jnp.nan))).all()


@pytest.mark.parametrize("also", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_loss_scaling_skips_the_step_of_a_batch_that_is_not_finite(bad, also):
    tx = ols.loss_scaled(optax.sgd(0.1))
    fun, state = to_float8(loss, also=also), tx.init(W)
    _, grads = ols.scaled_value_and_grad(fun, state)(W, X.at[0, 0].set(bad))
    updates, state = tx.update(grads, state, W)
    np.testing.assert_array_equal(updates, jnp.zeros_like(W))
    assert ols.loss_scale_metrics(state)["total_notfinite"] == 1


def test_an_outlier_rounds_only_what_is_far_smaller_to_zero():
    for ratio, is_zero in ((2.0**16, False), (2.0**20, True)):
        x = jnp.ones_like(X).at[0, 0].set(ratio)
        result = to_float8(dot)(jnp.ones_like(W), x)
        np.testing.assert_array_equal(result[1:], 0.0 if is_zero else 32.0)
        np.testing.assert_allclose(result[0], ratio, rtol=1e-2)


def test_factors_whose_product_is_below_the_range_give_zero_and_above_it_no_number():
    tiny = to_float8(dot)(1e-30 * W, 1e-30 * X)
    np.testing.assert_array_equal(tiny, jnp.zeros_like(tiny))
    assert not jnp.isfinite(to_float8(dot)(1e30 * W, 1e30 * X)).any()


# --- Which products ---------------------------------------------------------------


def reasons(capsys, fun, *args, **settings):
    """What the report says of each product: dtype, dtype of the result, reason."""
    ols.autocast_report(to_float8(fun, **settings), *args)
    lines = capsys.readouterr().out.splitlines()
    start = lines[0].index("why")
    stop = lines[0].index("where")
    names = ("dot_general", "conv_general_dilated", "ragged_dot_general")
    rows = [line for line in lines[1:] if line.split()[1] in names]
    return [(*line.split()[2:4], line[start:stop].strip()) for line in rows]


def test_the_report_says_which_products_are_in_float8(capsys):
    assert reasons(capsys, dot, W, X) == [("float8_e4m3fn", "bfloat16", "low list")]
    assert reasons(capsys, dot, W, X, also=jnp.float16) == [
        ("float8_e4m3fn", "float16", "low list")
    ]


def test_the_report_says_why_a_product_is_not_in_float8(capsys):
    def why(fun, *args, **settings):
        ((*dtypes, reason),) = reasons(capsys, fun, *args, **settings)
        assert dtypes == ["bfloat16", "bfloat16"]
        return reason.removeprefix("low list; not float8: ")

    def attention(w, x):
        return jnp.tanh(x) @ jnp.tanh(x.T) if w is None else x @ w

    image, kernel = jnp.ones((1, 16, 16, 16)), jnp.ones((3, 3, 16, 16))
    conv = functools.partial(jax.lax.conv, window_strides=(1, 1), padding="SAME")
    experts, groups = jnp.ones((2, 32, 16)), jnp.array([8, 8])
    one = "of 16 x 32 x 30, 30 is not a multiple of 16"
    assert why(dot, W[:, :30], X) == one
    two = "of 1 x 32 x 30, 1 and 30 are not multiples of 16"
    assert why(dot, W[:, :30], X[:1]) == two
    assert why(conv, image.transpose(0, 3, 1, 2), kernel.transpose(2, 3, 0, 1)) == (
        "a convolution"
    )
    assert why(lambda w, x: jax.lax.ragged_dot(x, w, groups), experts, X) == (
        "a ragged product"
    )
    assert why(dot, W, X, keep=lambda scope: True) == "`keep` returns True for ''"
    *_, last = reasons(capsys, lambda w, x: (x @ w) @ (x @ w).T, W, X)
    assert last[2].endswith("no parameter is a factor")


def test_what_is_not_in_float8_is_as_in_bfloat16():
    w = W[:, :30]
    result = jax.jit(jax.value_and_grad(to_float8(loss)))(w, X)
    expected = jax.jit(jax.value_and_grad(ols.autocast(loss, jnp.bfloat16)))(w, X)
    jax.tree.map(np.testing.assert_array_equal, result, expected)


PARAMETERS = {
    "an argument": lambda w, x: jnp.tanh(x) @ w,
    "its transpose": lambda w, x: jnp.tanh(x) @ jnp.transpose(w.T),
    "the left factor": lambda w, x: w.T @ jnp.tanh(x).T,
    "under jit": lambda w, x: jax.jit(jnp.dot)(jnp.tanh(x), w),
    "under checkpoint": lambda w, x: jax.checkpoint(jnp.dot)(jnp.tanh(x), w),
    "of a layer in a loop": lambda w, x: jax.lax.scan(
        lambda h, w: (jnp.tanh(h), jnp.tanh(h) @ w), x, w[None]
    ),
    "in every step of a loop": lambda w, x: jax.lax.map(
        lambda x: jnp.tanh(x) @ w, x[None]
    ),
    "in a branch": lambda w, x: jax.lax.cond(
        x[0, 0] > -9, lambda: jnp.tanh(x) @ w, lambda: jnp.zeros((16, 48), x.dtype)
    ),
    "of several experts": lambda w, x: jnp.einsum(
        "emk,ekn->emn", jnp.tanh(x)[None], w[None]
    ),
    "of several heads": lambda w, x: jnp.einsum(
        "mk,khn->mhn", jnp.tanh(x), w.reshape(32, 3, 16)
    ),
    "under vmap": lambda w, x: jax.vmap(lambda x: jnp.tanh(x) @ w)(x),
}


@pytest.mark.parametrize("fun", PARAMETERS.values(), ids=PARAMETERS)
def test_a_product_with_a_parameter_is_in_float8(fun):
    assert_in_float8(fun, jnp.float32)


@pytest.mark.fast_every(3)
@pytest.mark.parametrize(
    "name", [name for name in PARAMETERS if name != "in every step of a loop"]
)
def test_so_is_one_with_a_parameter_in_bfloat16(name):
    assert_in_float8(PARAMETERS[name], jnp.bfloat16)


def assert_in_float8(fun, dtype):
    def total(w, x):
        results = jax.tree.leaves(fun(w.astype(dtype), x.astype(dtype)))
        return sum(jnp.sum(result.astype(jnp.float32) ** 2) for result in results)

    assert in_float8(to_float8(total), W, X) == [VALUES]
    grad = jax.grad(to_float8(total))
    assert in_float8(grad, W, X).count(WITH_COTANGENT) == 1
    exact = jax.grad(total)(W, X)
    error = jnp.linalg.norm(grad(W, X) - exact) / jnp.linalg.norm(exact)
    assert 1e-3 < error < 0.2


@pytest.mark.parametrize("make", [jnp.linalg.norm, jnp.max])
def test_so_is_one_with_what_is_computed_from_parameters(make):
    fun = to_float8(lambda w, x: jnp.tanh(x) @ (w / make(w)))
    assert in_float8(fun, W, X) == [VALUES]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_every_level_has_float8_products(level):
    assert in_float8(to_float8(loss, level=level), W, X) == [VALUES]


def test_level_o0_and_marked_parts_are_left_alone():
    assert in_float8(to_float8(loss, level="O0"), W, X) == []
    assert in_float8(to_float8(ols.full_precision(loss)), W, X) == []
    assert in_float8(to_float8(loss, high=["dot_general"]), W, X) == []


# --- keep -------------------------------------------------------------------------


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = jnp.tanh(nn.Dense(16)(x))
        return x


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        as_list = getattr(nnx, "List", list)  # Flax 0.11 needs no `nnx.List`.
        self.layers = as_list([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def linen_net():
    model, x = LinenNet(), jnp.ones((16, 16))
    scopes = ["LinenNet/Dense_0", "LinenNet/Dense_1", "LinenNet/Dense_2"]
    return model.apply, (model.init(jax.random.key(0), x), x), scopes


def nnx_net():
    scopes = ["NNXNet/layers/0", "NNXNet/layers/1", "NNXNet/layers/2"]
    return lambda m, x: m(x), (NNXNet(nnx.Rngs(0)), jnp.ones((16, 16))), scopes


def equinox_net():
    model = eqx.nn.MLP(16, 16, 16, 2, key=jax.random.key(0))
    scopes = [f"MLP/eqx.nn.MLP/layers/{i}/eqx.nn.Linear" for i in range(3)]
    return lambda m, x: jax.vmap(m)(x), (model, jnp.ones((16, 16))), scopes


def scopes_net():
    def fun(ws, x):
        for name, w in ws.items():
            with jax.named_scope("net"), jax.named_scope(name):
                x = jax.jit(jax.checkpoint(lambda x, w: jnp.tanh(x @ w)))(x, w)
        return x

    ws = {name: 0.1 * jnp.ones((16, 16)) for name in "abc"}
    return fun, (ws, jnp.ones((16, 16))), ["net/a", "net/b", "net/c"]


@pytest.mark.parametrize("make", [linen_net, nnx_net, equinox_net, scopes_net])
def test_keep_is_asked_once_for_each_product_with_its_scope(make, capsys):
    fun, args, scopes = make()
    seen = []

    def keep(scope):
        seen.append(scope)
        return scope in (scopes[0], scopes[-1])

    with jax.numpy_rank_promotion("allow"):
        found = reasons(capsys, fun, *args, keep=keep)
    assert [scope for scope in dict.fromkeys(seen) if scope in scopes] == scopes
    counts = [0, 0]
    ols.autocast_report(to_float8(fun, keep=keep), *args)
    for line in capsys.readouterr().out.splitlines():
        if "dot_general" in line:
            counts["float8_e4m3fn" in line] += int(line.split()[0])
    assert counts == [2, 1]
    assert any("`keep` returns True" in reason for *_, reason in found)


def test_keep_may_be_an_object_that_cannot_be_hashed():
    class Keep:
        __hash__ = None

        def __call__(self, scope):
            return scope == "a"

    def fun(w, x):
        with jax.named_scope("a"):
            return jax.jit(dot)(w, x)

    assert in_float8(to_float8(fun, keep=Keep()), W, X) == []


def test_keep_must_return_true_or_false():
    with pytest.raises(TypeError, match="`keep` must return True or False, got None"):
        to_float8(dot, keep=lambda scope: None)(W, X)


def test_a_new_keep_function_is_asked_anew():
    for answer in (True, False, True):
        fun = to_float8(dot, keep=lambda scope, answer=answer: answer)
        assert (in_float8(fun, W, X) == []) == answer
        is_equal = np.array_equal(fun(W, X), product(X, W))
        assert is_equal != answer


# --- Transformations --------------------------------------------------------------


def test_under_vmap_the_batch_has_one_scale():
    xs = jnp.stack([X, 100 * X])
    result = jax.vmap(to_float8(dot), (None, 0))(W, xs)
    flat = product(xs.reshape(32, 32), W)
    np.testing.assert_array_equal(result, flat.reshape(2, 16, 48))


@pytest.mark.parametrize("axes", [(0, None), (None, 1), (2, 0)])
def test_vmap_of_gradients_is_near_the_gradients_of_each(axes):
    args = [
        x if axis is None else jnp.stack([x, 1.5 * x, -x], axis)
        for x, axis in zip((W, X), axes, strict=True)
    ]
    found = jax.vmap(jax.grad(to_float8(loss)), axes)(*args)
    exact = jax.vmap(jax.grad(loss), axes)(*args)
    assert found.shape == exact.shape
    assert jnp.linalg.norm(found - exact) < 0.2 * jnp.linalg.norm(exact)


def test_forward_mode_agrees_with_reverse_mode():
    fun = to_float8(loss)
    value, tangent = jax.jvp(lambda w: fun(w, X), (W,), (W,))
    np.testing.assert_allclose(value, fun(W, X), rtol=1e-2)
    reverse = jnp.sum(jax.grad(fun)(W, X) * W)
    np.testing.assert_allclose(tangent, reverse, rtol=0.1)


OFFLOAD = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
    "device", "pinned_host"
)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("h"),
        OFFLOAD,
    ],
)
def test_checkpoint_policies_change_no_bit(policy):
    def fun(w, x):
        return jnp.mean(jnp.tanh(checkpoint_name(x @ w, "h")) ** 2)

    plain = jax.grad(to_float8(fun))(W, X)
    found = jax.grad(to_float8(jax.checkpoint(fun, policy=policy)))(W, X)
    np.testing.assert_allclose(found, plain, rtol=1e-6)


@pytest.mark.parametrize("policy", [None, OFFLOAD])
def test_second_derivatives_pass_through_a_checkpoint(policy):
    def fun(w, x):
        return jnp.mean((jnp.tanh(x @ w) @ w.T) ** 2)

    cast = jax.checkpoint(to_float8(fun), policy=policy)
    found = jax.jvp(jax.grad(cast), (W, X), (W, X))[1]
    exact = jax.jvp(jax.grad(fun), (W, X), (W, X))[1]
    assert jnp.linalg.norm(found - exact) < 0.2 * jnp.linalg.norm(exact)


SAVED = {
    "a weight": dot,
    "a moved weight": lambda w, x: (x @ w) @ w.T,
    "a computed weight": lambda w, x: x @ (w / jnp.linalg.norm(w)),
    "two layers": lambda w, x: jnp.tanh(x @ w) @ jnp.tanh(w.T),
}


@pytest.mark.parametrize("fun", SAVED.values(), ids=SAVED)
def test_no_more_is_saved_for_the_backward_pass_than_in_bfloat16(fun):
    def saved(dtype):
        _, pullback = jax.vjp(ols.autocast(fun, dtype), W, X)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(pullback))

    assert saved(jnp.float8_e4m3fn) <= saved(jnp.bfloat16)


def test_taylor_series_and_checkify_know_the_product():
    fun = to_float8(lambda x: x @ W)
    value, (first,) = jet.jet(fun, (X,), ((X,),))
    np.testing.assert_array_equal(value, product(X, W))
    np.testing.assert_allclose(first, X @ W, atol=0.01)
    checked = checkify.checkify(fun, errors=checkify.nan_checks)
    error, _ = checked(X.at[0, 0].set(jnp.nan))
    assert "nan generated" in str(error.get())


def test_operations_are_traced_and_compared_with_float32():
    operations = ols.diagnostics.trace_operations(to_float8(loss), W, X)
    products = [x for x in operations if x.primitive == "dot_general"]
    assert len(products) == 2
    assert not any(x.nonfinite for x in operations)
    of_bfloat16 = ols.autocast(loss, jnp.bfloat16)
    others = ols.diagnostics.trace_operations(of_bfloat16, W, X)
    assert len(operations) == len(others) - 2  # The casts of both factors.
    assert all(0.001 < x.error < 0.2 for x in products)


def test_a_function_is_compiled_once():
    fun = jax.jit(jax.value_and_grad(to_float8(loss)))
    for _ in range(3):
        fun(W, X)
    assert fun._cache_size() == 1


def test_float8_works_with_x64_with_empty_batches_and_without_jit():
    with enable_x64(True):
        np.testing.assert_array_equal(to_float8(dot)(W, X), product(X, W))
        assert jax.grad(to_float8(loss))(W, X).dtype == jnp.float32
    with jax.disable_jit():
        np.testing.assert_array_equal(to_float8(dot)(W, X), product(X, W))
        assert jax.grad(ols.autocast(loss))(W, X).dtype == jnp.float32
    empty = jax.vmap(to_float8(dot), (None, 0))(W, jnp.ones((0, 16, 32)))
    assert empty.shape == (0, 16, 48)


def test_an_algorithm_for_float32_products_does_not_cast_float8_up():
    with jax.default_matmul_precision("F32_F32_F32"):
        traced = jax.jit(jax.vmap(to_float8(dot))).trace(W[None], X[None])
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in program.splitlines() if "dot_general" in line]
    assert "tensor<1x16x32xf8E4M3FN>, tensor<1x32x48xf8E4M3FN>" in line


@pytest.mark.skipif(IS_JAX_0_7, reason="JAX 0.7 has no jax.set_mesh")
def test_a_result_that_devices_have_yet_to_add_up_is_in_bfloat16():
    axes = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axes, devices=jax.devices()[:4])
    to_add = P("a", None, unreduced={"b"})

    def fun(w, x):
        return jax.sharding.reshard(jnp.dot(x, w, out_sharding=to_add), P("a", None))

    with jax.set_mesh(mesh):
        w = jax.device_put(W, NamedSharding(mesh, P("b", None)))
        x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
        assert in_float8(to_float8(fun), w, x) == []
        np.testing.assert_allclose(jax.jit(to_float8(fun))(w, x), X @ W, atol=0.02)


def test_two_activations_in_a_loop_are_multiplied_in_bfloat16():
    def fun(w, x):
        h = x @ w
        return jax.lax.map(lambda q: jnp.sin(q).T @ h, jnp.sin(jnp.stack([h, h])))

    assert in_float8(to_float8(fun), W, X) == [VALUES]


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_of_a_shard_map_scales_its_own_part(check_vma):
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    fun = jax.shard_map(
        to_float8(dot),
        mesh=mesh,
        in_specs=(P(), P("d")),
        out_specs=P("d"),
        check_vma=check_vma,
    )
    x = jnp.concatenate([X, 1000 * X])
    expected = np.concatenate([product(X, W), product(1000 * X, W)])
    np.testing.assert_array_equal(jax.jit(fun)(W, x), expected)


def test_each_device_of_a_pmap_scales_its_own_part():
    xs = jnp.stack([X, 1000 * X])
    fun = jax.pmap(to_float8(dot), in_axes=(None, 0), devices=jax.devices()[:2])
    expected = np.stack([product(X, W), product(1000 * X, W)])
    np.testing.assert_array_equal(fun(W, xs), expected)


def test_devices_sum_gradients_in_float32():
    mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,), devices=jax.devices()[:4])
    split = NamedSharding(mesh, P("d"))
    w, x = jnp.ones((64, 128)), jnp.ones((64, 64))
    w, x = jax.device_put((w, x), split)
    gradient = jax.jit(jax.grad(to_float8(loss)), out_shardings=split)
    compiled = gradient.lower(w, x).compile()
    sent = list(sent_arrays(compiled.as_text()))
    gradients = [x.dtype for x in sent if not x.is_gather and x.elements == w.size]
    assert gradients == ["f32"]
    np.testing.assert_allclose(gradient(w, x), gradient(*map(np.asarray, (w, x))))


def test_parameters_in_bfloat16_with_masters_train():
    tx = ols.loss_scaled(lenient(ols.master_weights(optax.sgd(0.5))))
    params = ols.cast_params({"w": W}, jnp.bfloat16)
    fun = to_float8(lambda p, x: loss(p["w"], x.astype(jnp.bfloat16)))
    assert in_float8(fun, params, X) == [VALUES]
    state, before = tx.init(params), fun(params, X)
    for _ in range(10):
        grads = ols.scaled_grad(fun, state)(params, X)
        updates, state = tx.update(grads, state, params)
        with jax.numpy_dtype_promotion("standard"):
            params = optax.apply_updates(params, updates)
    assert fun(params, X) < before
