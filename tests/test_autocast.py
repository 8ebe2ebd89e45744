"""autocast: what computes in what, under and over every transformation."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compat import IS_JAX_0_7, enable_x64, set_mesh
from flax import linen as nn
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from programs import dtypes_of, equations_of

import optax_lossscale as ols

HALF = ("float16", "float16")
RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32)
X = jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32)


def dot_loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def assert_close(actual, expected, rtol=1e-2):
    """Within the rounding of float16; dtypes as without autocast."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = float(np.max(np.abs(e), initial=0.0)) or 1.0
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * scale)


def assert_autocast(fun, *args, grad=True):
    """Every product is in float16, forward and backward, and the values are right."""
    cast = ols.autocast(fun)
    assert_close(cast(*args), fun(*args))
    assert_close(jax.jit(cast)(*args), fun(*args))
    assert set(dtypes_of(cast, *args)) == {HALF}
    if grad:
        scaled = jax.grad(lambda *args: cast(*args) * 2.0**8)
        grads = jax.tree.map(lambda g: g / 2.0**8, jax.jit(scaled)(*args))
        assert_close(grads, jax.grad(fun)(*args))
        assert set(dtypes_of(scaled, *args)) == {HALF}


# Transformations, under autocast and over it.


def with_jit(w, x):
    return jnp.mean(jax.jit(lambda w, x: x @ w)(w, x) ** 2)


def with_vmap(w, x):
    return jnp.mean(jax.vmap(lambda row: row @ w)(x) ** 2)


def with_jvp(w, x):
    value, tangent = jax.jvp(lambda w: dot_loss(w, x), (w,), (w,))
    return value + tangent


def with_grad(w, x):
    return jnp.sum(jax.grad(dot_loss)(w, x) ** 2)


def with_linearize(w, x):
    value, push = jax.linearize(lambda w: dot_loss(w, x), w)
    return value + push(w)


def with_scan(w, x):
    def body(carry, row):
        carry = jnp.tanh(row @ w + carry @ w)
        return carry, jnp.sum(carry)

    carry, sums = jax.lax.scan(body, jnp.zeros(4), x)
    return jnp.mean(carry**2) + jnp.mean(sums)


def with_cond(w, x):
    return jax.lax.cond(x[0, 0] > 9, lambda: 0.0, lambda: jnp.mean((x @ w) ** 2))


def with_switch(w, x):
    branches = [lambda w: jnp.sum(w), lambda w: jnp.mean((x @ w) ** 2)]
    return jax.lax.switch(jnp.int32(1), branches, w)


def with_remat(w, x):
    return jnp.mean(jax.checkpoint(lambda w: jnp.tanh(x @ w) @ w)(w) ** 2)


def with_names(w, x):
    with jax.named_scope("layer"):
        return jnp.mean((x @ w) ** 2)


def with_associative_scan(w, x):
    return jnp.mean(jax.lax.associative_scan(jnp.matmul, jnp.stack([w, w, w])) ** 2)


@jax.custom_vjp
def own_layer(w, x):
    return x @ w


def own_layer_fwd(w, x):
    return own_layer(w, x), (w, x)


def own_layer_bwd(residuals, cotangent):
    w, x = residuals
    return x.T @ cotangent, cotangent @ w.T


own_layer.defvjp(own_layer_fwd, own_layer_bwd)


def with_custom_vjp(w, x):
    return jnp.mean(own_layer(w, x) ** 2)


@jax.custom_jvp
def own_product(w, x):
    return x @ w


@own_product.defjvp
def own_product_jvp(primals, tangents):
    (w, x), (w_dot, x_dot) = primals, tangents
    return own_product(w, x), x @ w_dot + x_dot @ w


def with_custom_jvp(w, x):
    return jnp.mean(own_product(w, x) ** 2)


PROGRAMS = {
    name.removeprefix("with_"): value
    for name, value in globals().items()
    if name.startswith("with_")
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_product_inside_is_in_float16_and_the_gradients_are_right(name):
    assert_autocast(PROGRAMS[name], W, X)


def test_a_while_loop_runs_and_keeps_its_dtypes():
    def fun(w, x):
        def body(carry):
            i, x = carry
            return i + 1, jnp.tanh(x @ w)

        return jax.lax.while_loop(lambda c: c[0] < 3, body, (jnp.int32(0), x))

    assert_autocast(fun, W, X, grad=False)


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.grad,
        lambda f: jax.vmap(f, in_axes=(None, 0)),
        lambda f: lambda w, x: jax.jvp(functools.partial(f, x=x), (w,), (w,)),
        lambda f: lambda w, x: jax.linearize(functools.partial(f, x=x), w)[1](w),
        lambda f: lambda w, x: jax.lax.map(lambda row: f(w, row), x),
        lambda f: lambda w, x: jax.lax.scan(lambda c, r: (c, f(w, r)), 0.0, x)[1],
        jax.checkpoint,
        lambda f: jax.grad(jax.checkpoint(f)),
        jax.jacrev,
        jax.hessian,
    ],
)
def test_it_works_under_every_transformation(transform):
    w = W[:2]
    x = X[:, :2]
    assert_close(
        transform(ols.autocast(dot_loss))(w, x), transform(dot_loss)(w, x), 3e-2
    )


def test_under_pmap_shard_map_and_sharded_jit():
    cast = ols.autocast(dot_loss)
    x = jnp.stack([X] * 4)
    expected = dot_loss(W, X)
    mapped = jax.pmap(cast, in_axes=(None, 0), devices=jax.devices()[:4])(W, x)
    assert_close(mapped, jnp.stack([expected] * 4))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), auto, devices=jax.devices()[:4])

    def mean_loss(w, x):
        return jax.lax.pmean(dot_loss(w, x[0]), "data")

    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P()}
    over = jax.shard_map(ols.autocast(mean_loss), **specs)
    under = jax.shard_map(mean_loss, **specs)
    assert_close(over(W, x), expected)
    assert_close(ols.autocast(under)(W, x), expected)
    assert set(dtypes_of(ols.autocast(under), W, x)) == {HALF}
    grads = jax.grad(lambda w: ols.autocast(under)(w, x) * 2.0**8)(W) / 2.0**8
    assert_close(grads, jax.grad(dot_loss)(W, X))
    sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    assert_close(jax.jit(jax.vmap(cast, (None, 0)))(W, sharded), mapped)


# What computes in what.


def computed_in(capsys, fun, *args, **settings):
    """The dtype in which each operation computes, as the report has it."""
    ols.autocast_report(ols.autocast(fun, **settings), *args)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    return {row[1]: row[2] for row in rows}


def test_the_lists_say_what_computes_in_what(capsys):
    def fun(w, x):
        return jnp.sum(jnp.exp(jnp.tanh(x @ w) * 2.0))

    assert computed_in(capsys, fun, W, X) == {
        "dot_general": "float16",
        "tanh": "float16",
        "mul": "float16",
        "exp": "float32",
        "reduce_sum": "float32",
    }


def test_a_bias_takes_the_dtype_of_its_product(capsys):
    def fun(w, x, b):
        return jnp.max(jnp.tanh(x @ w + b[None]) + x)

    found = computed_in(capsys, fun, W, X, jnp.ones(4))
    assert (found["tanh"], found["reduce_max"]) == ("float16", "float32")


def test_what_is_no_bias_widens():
    def of_product(other):
        def fun(w, x):
            return jnp.tanh(x @ w + jnp.expand_dims(other, range(2 - jnp.ndim(other))))

        (dtype,) = dtypes_of(ols.autocast(fun), W, X, name="tanh")
        return dtype[0]

    assert of_product(jnp.ones(4)) == "float16"
    assert of_product(jnp.ones((1, 4))) == "float16"
    assert of_product(jnp.ones((3, 4))) == "float32"
    assert of_product(2.0) == "float16"


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(2.0, "float16"), (1e-9, "float32"), (1e6, "float32"), (-np.inf, "float16")],
)
def test_a_number_widens_only_if_the_dtype_cannot_hold_it(number, dtype):
    def fun(w, x):
        return jnp.maximum(x @ w, number)

    (found,) = dtypes_of(ols.autocast(fun), W, X, name="max")
    assert found[0] == dtype


def test_a_mask_of_minus_1e9_leaves_a_row_without_entries_uniform():
    def fun(w, x):
        return jax.nn.softmax(jnp.where(jnp.zeros((3, 4), bool), x @ w, -1e9))

    np.testing.assert_array_equal(ols.autocast(fun)(W, X), 0.25)


def test_squares_and_reciprocals_are_in_float32():
    big = jnp.full((1, 4), 300.0)

    def fun(w, x):
        product = x @ w  # 1200, whose square is no float16.
        return jnp.sum(product**2), jnp.max(1e-3 / (product * 1e-7))

    squares, reciprocal = ols.autocast(fun)(jnp.ones((4, 4)), big)
    assert squares == 4 * 1200.0**2
    np.testing.assert_allclose(reciprocal, 1e-3 / 1200e-7, rtol=1e-3)


def test_low_and_high_add_to_the_lists(capsys):
    def fun(w, x):
        return jnp.sum(jnp.cumsum(jnp.tanh(x @ w), axis=0))

    lists = {"low": ["cumsum"], "high": ["tanh"]}
    assert computed_in(capsys, fun, W, X)["cumsum"] == "float32"
    found = computed_in(capsys, fun, W, X, **lists)
    assert (found["cumsum"], found["tanh"]) == ("float16", "float32")
    assert_close(ols.autocast(fun, **lists)(W, X), fun(W, X))


def test_what_the_backend_cannot_do_in_float16_stays_in_float32(capsys):
    matrix = 9 * jnp.eye(4) + X.T @ X

    def fun(a):
        return jnp.linalg.cholesky(a)

    cast = ols.autocast(fun, low=("cholesky",))
    np.testing.assert_allclose(cast(matrix), fun(matrix))
    ols.autocast_report(cast, matrix)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "cholesky" in x]
    assert "float32" in line
    assert "no float16 on cpu" in line


def test_full_precision_is_left_alone():
    def fun(w, x):
        return ols.full_precision(jax.jit(jnp.matmul))(x, w) + x @ w

    found = dtypes_of(ols.autocast(fun), W, X)
    assert sorted(found) == [HALF, ("float32", "float32")]
    backward = dtypes_of(jax.grad(lambda w: jnp.sum(ols.autocast(fun)(w, X))), W)
    assert backward.count(("float32", "float32")) == 2


def test_an_explicit_algorithm_or_precision_does_not_stop_it():
    for precision in ("highest", jax.lax.DotAlgorithmPreset.F32_F32_F32):

        def fun(w, x, precision=precision):
            return jnp.matmul(x, w, precision=precision)

        assert_close(ols.autocast(fun)(W, X), fun(W, X))
        assert dtypes_of(ols.autocast(fun), W, X) == [HALF]


def test_a_product_of_half_precision_operands_is_left_as_it_is():
    def fun(w, x):
        w, x = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
        return jax.lax.dot(x, w, preferred_element_type=jnp.float32)

    cast = ols.autocast(fun)
    np.testing.assert_array_equal(cast(W, X), fun(W, X))


def test_a_sum_is_added_up_in_float32_at_every_level():
    ones = jnp.ones((1, 70_000), jnp.float32)
    for level in ("O1", "O2", "O3"):
        total = ols.autocast(lambda x: jnp.sum(x), level=level)(ones)
        assert total == 70_000  # In float16, infinite.


# Rules of derivatives.


def test_the_gradient_of_relu_at_zero_is_zero():
    def fun(w, x):
        return jnp.sum(jax.nn.relu(x @ w))

    grads = jax.grad(ols.autocast(fun))(jnp.zeros((4, 4)), X)
    np.testing.assert_array_equal(grads, 0)


@pytest.mark.parametrize(
    "function",
    [
        jax.nn.softmax,
        jax.nn.log_softmax,
        jax.nn.logsumexp,
        jax.nn.softplus,
        jax.nn.gelu,
        jax.nn.silu,
        jax.nn.log_sigmoid,
        jax.nn.relu6,
        jax.nn.elu,
        jnp.linalg.norm,
    ],
)
def test_stable_functions_stay_stable(function):
    def fun(w, x):
        y = x @ w
        return jnp.mean(function(y) * y)

    x = jnp.concatenate([X, 40 * X, jnp.zeros((1, 4)) + 1e-3])
    assert_close(ols.autocast(fun)(W, x), fun(W, x))
    assert_close(jax.grad(ols.autocast(fun))(W, x), jax.grad(fun)(W, x), 2e-2)


def test_a_rule_that_reads_its_own_result_reads_the_rounded_one():
    @jax.custom_jvp
    def own_exp(x):
        return jnp.exp(x)

    @own_exp.defjvp
    def own_exp_jvp(primals, tangents):
        result = own_exp(*primals)
        return result, result * tangents[0]

    def fun(w, x):
        return jnp.mean(own_exp(x @ w) @ w)

    assert_autocast(fun, W, X)
    (_, residuals) = jax.vjp(lambda w: ols.autocast(fun)(w, X), W)
    kept = [leaf.dtype for leaf in jax.tree.leaves(residuals)]
    assert jnp.float16 in kept


def test_rules_that_close_over_arrays_and_ask_what_is_differentiated():
    scale = jnp.arange(1.0, 5.0)
    asked = []

    @jax.custom_vjp
    def scaled(x, y):
        return x * scale[None] + y

    def forward(x, y):
        asked.append((x.perturbed, y.perturbed))
        return scaled(x.value, y.value), None

    def backward(_, cotangent):
        return cotangent * scale[None], cotangent

    scaled.defvjp(forward, backward, symbolic_zeros=True)

    def fun(w, x):
        return jnp.mean(scaled(x @ w, x) ** 2)

    assert_autocast(fun, W, X, grad=False)
    asked.clear()
    assert_close(jax.grad(ols.autocast(fun))(W, X), jax.grad(fun)(W, X))
    assert set(asked) == {(True, False)}
    filtered = eqx.filter_custom_vjp(lambda x: x @ x)
    filtered.def_fwd(lambda perturbed, x: (x @ x, x))
    filtered.def_bwd(lambda x, ct, perturbed, _: ct @ x.T + x.T @ ct)

    def of_filtered(x):
        return jnp.mean(filtered(x) ** 2)

    grads = jax.grad(ols.autocast(of_filtered))(W)
    assert_close(grads, jax.grad(of_filtered)(W))


def test_it_leaks_no_tracer():
    def fun(w, x):
        return jnp.mean(jax.nn.relu(own_layer(w, x)))

    with jax.checking_leaks():
        grads = jax.jit(jax.grad(ols.autocast(fun)))(W, X)
    assert_close(grads, jax.grad(fun)(W, X))


def test_functions_with_rules_and_integer_results_run_as_written():
    @jax.custom_vjp
    def route(x):
        return jax.lax.top_k(x, 1)

    route.defvjp(lambda x: (route(x), x), lambda x, cotangents: (jnp.zeros_like(x),))

    def fun(w, x):
        values, places = route(x @ w)
        return jnp.sum(values * places.astype(jnp.float32))

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    np.testing.assert_array_equal(jax.grad(ols.autocast(fun))(W, X), 0)


# What passes through, and what comes out.


def test_other_dtypes_pass_through():
    def fun(tree):
        return {**tree, "c": tree["c"] @ tree["c"], "i": tree["i"] @ tree["i"]}

    tree = {
        "c": jnp.ones((2, 2), jnp.complex64),
        "i": jnp.full((2, 2), 70_000),
        "b": jnp.ones(2, bool),
        "k": jax.random.key(0),
        "h": jnp.ones(2, jnp.bfloat16),
        "e": jnp.zeros((0, 3)),
    }
    chex.assert_trees_all_equal(ols.autocast(fun)(tree), fun(tree))


def test_products_with_other_dtypes_and_complex_numbers_are_left_as_they_are():
    def fun(x):
        with jax.numpy_dtype_promotion("standard"):
            y = (x + 0j) @ (x * 1j) / 2
        half = jnp.matmul(x, x, preferred_element_type=jnp.bfloat16)
        return jnp.abs(y), half, jnp.fft.fft(x).imag / 8

    chex.assert_trees_all_equal(ols.autocast(fun)(1e3 * W), fun(1e3 * W))
    with enable_x64(True):
        big = jnp.full((4, 4), 1e6, jnp.float64)
        product = ols.autocast(jnp.matmul)(W.astype(jnp.float64), big)
        assert product.dtype == jnp.float64
        assert jnp.isfinite(product).all()


def test_an_outer_product_is_none():
    def fun(positions, frequencies):
        return jnp.sin(jnp.einsum("i,j->ij", positions, frequencies))

    args = jnp.arange(4096.0), jnp.asarray([1.0, 0.1])
    chex.assert_trees_all_close(ols.autocast(fun)(*args), fun(*args), atol=1e-6)


@pytest.mark.parametrize("name", ["max", "min", "set", "add", "multiply", "apply"])
def test_scatters_of_every_kind_run(name):
    def fun(w, x):
        at = (x @ w).at[jnp.array([0, 2])]
        return at.apply(jnp.sin) if name == "apply" else getattr(at, name)(x[:2])

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    places = jnp.array([0, 0, 1])
    of_segments = ols.autocast(lambda w, x: jax.ops.segment_max(x @ w, places, 2))
    assert_close(of_segments(W, X), jax.ops.segment_max(X @ W, places, 2))


def test_numpy_scalars_are_static_and_numpy_arrays_are_arrays():
    cast = ols.autocast(lambda x, rows: x.reshape(rows, -1))
    assert cast(np.ones(6), np.int64(2)).shape == (2, 3)
    assert cast(np.ones(6), np.int64(2)).dtype == jnp.float32


def test_float64_passes_through():
    with enable_x64(True):
        x = jnp.asarray(RNG.normal(size=(2, 2)))
        assert x.dtype == jnp.float64

        def fun(x):
            return jnp.sum(jnp.exp(x @ x))

        np.testing.assert_array_equal(ols.autocast(fun)(x), fun(x))
        assert_autocast(dot_loss, W, X)


def test_results_keep_their_dtypes_and_may_be_anything():
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


def test_arguments_that_are_no_arrays_are_static():
    def fun(w, x, *, power, act):
        return jnp.sum(act(x @ w) ** power)

    cast = ols.autocast(fun)(W, X, power=2, act=jnp.tanh)
    assert_close(cast, fun(W, X, power=2, act=jnp.tanh))


def test_a_change_in_place_is_refused_not_lost():
    def fun(params, x):
        params["w"] = params["w"] + 1
        return x @ params["w"]

    with pytest.raises(ValueError, match="`fun` must not change its arguments"):
        ols.autocast(fun)({"w": W}, X)


def test_kernels_callbacks_and_references_run_as_written(capsys):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def fun(w, x):
        y = x @ w
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        y = pl.pallas_call(kernel, shape, interpret=True)(y)
        y = jax.pure_callback(lambda y: np.asarray(y) + 1, shape, y)
        jax.debug.print("sum {}", jnp.sum(y))
        return jnp.mean(y)

    assert_close(ols.autocast(fun)(W, X), fun(W, X))
    assert capsys.readouterr().out.count("sum") == 2


@pytest.mark.skipif(IS_JAX_0_7, reason="it has no jax.new_ref")
def test_references_are_written_in_their_own_dtype():
    def fun(w, x):
        ref = jax.new_ref(jnp.zeros((3, 4)))
        ref[...] = x @ w
        jax.lax.fori_loop(0, 2, lambda i, _: ref.__setitem__(..., ref[...] * 2), None)
        return ref[...]

    assert_close(ols.autocast(fun)(W, X), fun(W, X))


def test_remat_keeps_its_policy():
    policy = jax.checkpoint_policies.dots_saveable

    def fun(w, x):
        return jnp.mean(jax.checkpoint(lambda w: jnp.sin(x @ w), policy=policy)(w))

    program = jax.make_jaxpr(ols.autocast(fun))(W, X)
    (found,) = [e for e in equations_of(program) if e.primitive.name == "remat2"]
    assert found.params["policy"] is policy
    assert_autocast(fun, W, X)


def test_what_a_remat_loop_does_once_is_entered():
    def loss(w, x):
        def run(w):
            step = lambda h, _: (jnp.tanh(h @ w), jnp.sin(w @ w).sum())  # noqa: E731
            h, sums = jax.lax.scan(step, x, None, length=3)
            return jnp.mean(h**2) + sums.sum()

        return jax.checkpoint(run)(w)

    fun = jax.grad(loss)
    names = {e.primitive.name for e in equations_of(jax.make_jaxpr(fun)(W, X))}
    assert names & {"closed_call", "eval_jaxpr"}
    assert set(dtypes_of(ols.autocast(fun), W, X)) == {HALF}
    assert_close(ols.autocast(fun)(W, X), fun(W, X), rtol=2e-2)


def test_inputs_of_products_are_cast_before_a_loop_and_weights_in_it():
    program = jax.make_jaxpr(ols.autocast(with_scan))(W, X)
    (scan,) = [e for e in equations_of(program) if e.primitive.name == "scan"]
    halves = [v for v in scan.invars if v.aval.dtype == jnp.float16]
    assert [variable.aval.shape for variable in halves] == [X.shape]


def relative_error(fun, *args, scale=1.0, **settings):
    """Of the gradient by the first argument, against that without autocast."""
    exact = jax.jit(jax.grad(fun))(*args)
    cast = ols.autocast(fun, **settings)
    grads = jax.jit(jax.grad(lambda *args: cast(*args) * scale))(*args)
    return jnp.linalg.norm((grads / scale - exact).ravel()) / jnp.linalg.norm(
        exact.ravel()
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_gradient_of_a_weight_is_summed_over_a_loop_in_float32(dtype):
    w = 0.2 * jax.random.normal(jax.random.key(0), (16, 16))
    xs = jax.random.normal(jax.random.key(1), (4096, 2, 16))

    def fun(w, xs):
        def body(h, x):
            return jnp.tanh(h @ w + x), h

        return jnp.mean(jax.lax.scan(body, jnp.zeros((2, 16)), xs)[1] ** 2)

    # Summed in bfloat16 it is off by a quarter.
    scale, limit = (2.0**14, 5e-3) if dtype == jnp.float16 else (1.0, 3e-2)
    assert relative_error(fun, w, xs, dtype=dtype, scale=scale) < limit


def test_the_gradient_of_a_weight_that_is_used_often_is_summed_in_float32():
    def fun(w, x):
        return sum(jnp.mean((x * 1.01**i) @ w) for i in range(200))

    # A thousand terms of one size: in bfloat16 the sum would stop at 256 of them.
    assert relative_error(fun, W, X, dtype=jnp.bfloat16) < 1e-2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gradient_of_a_gather_is_summed_in_float32(level):
    table = jax.random.normal(jax.random.key(0), (10, 4))
    places = jnp.zeros(10_000, int)

    def of_table(table, w):
        return jnp.mean(jnp.tanh(table[places] @ w))

    def of_product(table, w):
        return jnp.mean(jnp.tanh((table @ w)[places]))

    for fun in (of_table, of_product):
        assert relative_error(fun, table, W, level=level, scale=2.0**12) < 1e-2


@pytest.mark.parametrize("size", [1e-4, 300.0])
@pytest.mark.parametrize("divide", [jnp.divide, jnp.atan2])
def test_the_derivative_of_a_quotient_neither_overflows_nor_vanishes(divide, size):
    eye = jnp.eye(2)

    def fun(b, a):
        return jnp.sum(divide(a @ eye, b @ eye))

    a, b = jnp.full((2, 2), size), jnp.full((2, 2), 1.5 * size)
    for level in ("O1", "O2", "O3"):
        assert relative_error(fun, b, a, level=level) < 1e-2
    assert dtypes_of(ols.autocast(fun), b, a) == [HALF] * 2


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_random_numbers_are_those_without_it(level, dtype):
    def fun(key):
        return jax.random.normal(key, (100, 100)), jax.random.gumbel(key, (100, 100))

    key = jax.random.key(0)
    cast = ols.autocast(fun, dtype, level=level)
    chex.assert_trees_all_close(jax.jit(cast)(key), jax.jit(fun)(key), rtol=1e-5)


# Levels.


def test_level_o0_is_the_function_itself():
    assert ols.autocast(dot_loss, level="O0")(W, X) == dot_loss(W, X)
    assert dtypes_of(ols.autocast(dot_loss, level="O0"), W, X) != [HALF]


def test_levels_o2_and_o3_compute_all_but_sums_in_float16(capsys):
    def fun(w, x):
        return jnp.sum(jnp.exp(x @ w) + x, axis=0) / 3

    for level in ("O2", "O3"):
        found = computed_in(capsys, fun, W, X, level=level)
        assert (found["exp"], found["add"]) == ("float16", "float16")
        assert found["reduce_sum"] == "float32"
        assert_close(ols.autocast(fun, level=level)(W, X), fun(W, X))


def layer_norm(x, scale):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * scale


class LinenNorm:
    @staticmethod
    def make():
        layer = nn.LayerNorm()
        params = layer.init(jax.random.key(0), X)
        return layer.apply, params


class NnxNorm:
    @staticmethod
    def make():
        layer = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
        return (lambda layer, x: layer(x)), layer


class EquinoxNorm:
    @staticmethod
    def make():
        return (lambda layer, x: jax.vmap(layer)(x)), eqx.nn.LayerNorm(4)


class OwnNorm:
    @staticmethod
    def make():
        return (lambda params, x: layer_norm(x, params["norm"])), {"norm": jnp.ones(4)}


@pytest.mark.parametrize("kind", [LinenNorm, NnxNorm, EquinoxNorm, OwnNorm])
def test_level_o2_leaves_normalization_layers_in_float32(kind):
    apply, layer = kind.make()

    def fun(layer, w, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return apply(layer, 100 * (x @ w)) @ w

    def dtypes(level):
        program = jax.make_jaxpr(ols.autocast(fun, level=level))(layer, W, X)
        found = [e for e in equations_of(program) if e.primitive.name == "rsqrt"]
        assert len(found) == 1
        return found[0].invars[0].aval.dtype

    assert dtypes("O1") == jnp.float32
    assert dtypes("O2") == jnp.float32
    assert_close(ols.autocast(fun, level="O2")(layer, W, X), fun(layer, W, X))


def test_level_o2_does_not_leave_products_in_float32_for_a_name():
    class PreNorm(nn.Module):
        fun: nn.Module

        @nn.compact
        def __call__(self, x):
            with jax.named_scope("layer_norm"):
                return x + self.fun(nn.LayerNorm()(x))

    model = PreNorm(nn.Dense(4))
    with jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), X)
        assert dtypes_of(ols.autocast(model.apply, level="O2"), params, X) == [HALF]


# Frameworks.


def test_a_module_of_nnx_keeps_what_a_call_changes():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(jax.nn.relu(self.norm(self.linear(x))))

    def loss_fn(net, x):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return jnp.mean(net(x) ** 2)

    one, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    loss, grads = nnx.value_and_grad(loss_fn)(one, X)
    cast_loss, cast_grads = nnx.value_and_grad(ols.autocast(loss_fn))(other, X)
    assert_close(cast_loss, loss)
    difference = jax.tree.map(jnp.subtract, cast_grads, grads)
    assert optax.tree.norm(difference) < 1e-2 * optax.tree.norm(grads)
    assert jnp.any(one.norm.mean[...] != 0)
    assert_close(other.norm.mean[...], one.norm.mean[...])
    assert other.dropout.rngs.count[...] == 1


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_other_objects_of_nnx_and_new_variables_are_kept_too():
    class Sower(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "hidden", x)
            return jnp.sum(x)

    sower = Sower()
    ols.autocast(lambda m, x: m(x))(sower, X)
    (hidden,) = jax.tree.leaves(sower)
    np.testing.assert_array_equal(hidden, X)

    rngs = nnx.Rngs(0)
    ols.autocast(lambda rngs, x: x * jax.random.normal(rngs(), x.shape))(rngs, X)
    assert rngs.default.count[...] == 1

    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    ols.autocast(lambda m, x: m.update(loss=jnp.sum(x)))(metrics, X)
    with jax.numpy_dtype_promotion("standard"):
        assert_close(metrics.compute()["loss"], jnp.sum(X))


def test_the_functional_interface_of_nnx_returns_what_is_new():
    graph, state = nnx.split(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))

    def fun(state, x):
        with jax.numpy_rank_promotion("allow"):
            module = nnx.merge(graph, state)
            return jnp.sum(module(x)), nnx.state(module)

    _, new = jax.jit(ols.autocast(fun))(state, X)
    _, expected = jax.jit(fun)(state, X)
    assert_close(jax.tree.leaves(new), jax.tree.leaves(expected))


def test_a_module_of_equinox_is_differentiated_as_without():
    model = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))

    def loss_fn(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    grads = eqx.filter_grad(loss_fn)(model, X)
    cast_grads = eqx.filter_jit(eqx.filter_grad(ols.autocast(loss_fn)))(model, X)
    assert_close(jax.tree.leaves(cast_grads), jax.tree.leaves(grads), 2e-2)
    arrays, rest = eqx.partition(model, eqx.is_array)
    found = dtypes_of(
        lambda arrays: ols.autocast(loss_fn)(eqx.combine(arrays, rest), X), arrays
    )
    assert found == [HALF] * 3


@pytest.mark.skipif(IS_JAX_0_7, reason="it has no jax.set_mesh")
def test_on_an_explicit_mesh():
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("data",), explicit, devices=jax.devices()[:4])
    with set_mesh(mesh):
        x = jax.device_put(jnp.concatenate([X, X[:1]]), P("data"))
        w = jax.device_put(W, P())
        grads = jax.jit(jax.grad(ols.autocast(dot_loss)))(w, x)
        assert_close(grads, jax.grad(dot_loss)(w, x))


# The whole step, and what is refused.


def test_a_train_step_with_it_skips_what_overflows():
    tx = ols.loss_scaled(optax.sgd(0.1), ols.dynamic_loss_scale(2.0**24))
    params = {"w": W}
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state):
        loss_fn = ols.autocast(lambda p: dot_loss(p["w"], X))
        loss, grads = ols.scaled_value_and_grad(loss_fn, opt_state)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(30):
        params, opt_state, loss = step(params, opt_state)
    metrics = ols.loss_scale_metrics(opt_state)
    assert 0 < metrics["total_notfinite"] < 20
    assert loss < dot_loss(W, X)


def test_bfloat16_works_too():
    cast = ols.autocast(dot_loss, jnp.bfloat16)
    assert_close(cast(W, X), dot_loss(W, X), 5e-2)
    assert set(dtypes_of(jax.grad(cast), W, X)) == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"level": "O4"}, ValueError, r"`level` must be one of O0, O1, O2, O3"),
        ({"level": "02"}, ValueError, r"Did you mean 'O2'\?"),
        ({"level": "o1"}, ValueError, r"Did you mean 'O1'\?"),
        ({"dtype": jnp.int8}, TypeError, "`dtype` must be a floating dtype"),
        ({"dtype": jnp.complex64}, TypeError, "`dtype` must be a floating dtype"),
        ({"dtype": jnp.float32}, ValueError, "must be narrower than float32"),
        ({"dtype": "float64"}, ValueError, "must be narrower than float32"),
        ({"dtype": jnp.float8_e4m3fn}, ValueError, "Fp8DirectDotGeneralOp"),
        ({"dtype": jnp.float8_e5m2}, ValueError, "needs its own scale"),
        ({"low": ["expp"]}, ValueError, r"Did you mean 'exp'\?"),
        ({"low": ["matmul"]}, ValueError, r"Did you mean 'dot_general'\?"),
        ({"high": ["nothing_like_it"]}, ValueError, "got 'nothing_like_it'"),
        ({"low": "exp"}, TypeError, "must be a sequence of names"),
        ({"low": None}, TypeError, "must be a sequence of names"),
        ({"low": ["scan"]}, ValueError, "names of JAX primitives, got 'scan'"),
        ({"dtype": None}, TypeError, "`dtype` must be a floating dtype"),
        ({"low": [3]}, ValueError, "must hold names of JAX primitives, got 3"),
        ({"low": ["exp"], "high": ["exp"]}, ValueError, "must not share names"),
    ],
)
def test_bad_settings_are_refused_at_once(settings, error, text):
    with pytest.raises(error, match=text):
        ols.autocast(dot_loss, **settings)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="`fun` must be a function"):
        ols.autocast(X)


def test_the_report_takes_abstract_arguments_and_jitted_functions(capsys):
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
    assert "test_autocast.py" in products[0][6]
    ols.autocast_report(lambda x: x + 1.0 + 1.0, X)
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[:3] == ["2", "add", "float32"]


def test_the_report_gives_the_computed_and_the_result_dtype_of_a_bias(capsys):
    ols.autocast_report(lambda w, x, b: x @ w + b, W, X, jnp.ones((1, W.shape[1])))
    lines = capsys.readouterr().out.splitlines()
    (add,) = [line.split() for line in lines if "add" in line]
    assert add[:4] == ["1", "add", "float32", "float16"]


def test_the_report_is_of_what_runs(capsys):
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


# What a second reader found.


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_a_layer_with_a_rule_is_used_twice_with_other_things_differentiated(wrap):
    data = jax.random.normal(jax.random.key(1), (8, 4))
    layer = wrap(ols.autocast(lambda x, w: own_layer(w, x)))

    def fun(first, second, layer=layer):
        return jnp.mean(layer(layer(data, first), second) ** 2)

    def plain(first, second):
        return fun(first, second, lambda x, w: x @ w)

    weights = W, W.T
    grads = jax.grad(fun, (0, 1))(*weights)
    assert_close(grads, jax.grad(plain, (0, 1))(*weights), 2e-2)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("low", [-1e9, float(np.finfo(np.float32).min)])
def test_a_row_that_is_masked_altogether_is_uniform(level, dtype, low):
    mask = jnp.arange(4)[:, None] < jnp.asarray([[4], [4], [4], [0]])[:, 0][None]

    def attend(scores):
        return jax.nn.softmax(scores, axis=0)

    def by_where(w, x):
        return attend(jnp.where(mask, w @ x.T @ x, low))

    def by_sum(w, x):
        return attend(w @ x.T @ x + jnp.where(mask, 0.0, low))

    for fun in (by_where, by_sum):
        cast = ols.autocast(fun, dtype, level=level)
        np.testing.assert_allclose(cast(W, X)[:, 3], 0.25)
        assert np.isfinite(jax.grad(lambda w, f=cast: jnp.sum(f(w, X)[0]))(W)).all()


def test_a_mask_that_is_an_argument_is_no_bias():
    mask = jnp.where(jnp.arange(4)[:, None] < 3, 0.0, -1e9) * jnp.ones((4, 4))

    def fun(w, x, mask):
        return jax.nn.softmax(w @ x.T @ x + mask)

    np.testing.assert_allclose(ols.autocast(fun)(W, X, mask)[3], 0.25)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gradient_of_what_a_loop_reads_is_summed_in_float32(level, dtype):
    xs = jnp.ones((4096, 4))

    def of_computed(w):
        return jax.lax.scan(lambda s, x: (s, jnp.sum(x @ w)), 0.0, xs)[1].sum()

    def of_product(w):
        values = W @ w
        return jax.lax.map(lambda x: jnp.sum(x[None] * values), xs).sum()

    settings = {"dtype": dtype, "level": level, "scale": 2.0**-6}
    w = jnp.full((4, 4), 0.3)
    assert relative_error(lambda w: of_computed(w * 2.0), w, **settings) < 2e-2
    assert relative_error(of_product, w, **settings) < 2e-2


def test_the_gradient_of_a_half_parameter_in_a_loop_is_summed_in_float32():
    xs = jax.random.normal(jax.random.key(0), (4096, 4))

    def fun(w):
        return jax.lax.map(lambda x: jnp.mean(x.astype(w.dtype) @ w), xs).sum() / 4096

    w = jnp.full((4, 4), 0.3)
    exact = jax.grad(fun)(w)
    half = jax.grad(ols.autocast(fun, jnp.bfloat16))(w.astype(jnp.bfloat16))
    error = jnp.linalg.norm(half.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert error < 2e-2


def test_the_cube_of_a_product_is_in_float32():
    sevens = jnp.full((1, 1), 7.0)
    assert ols.autocast(lambda x, w: (x @ w) ** 3)(sevens, sevens) == 49.0**3


def test_gelu_of_large_numbers_has_finite_gradients():
    def fun(w, x):
        return jnp.sum(jax.nn.gelu(x @ w))

    w = 100 * jnp.eye(4)
    assert_close(jax.grad(ols.autocast(fun))(w, X), jax.grad(fun)(w, X))
    assert ("float16",) in dtypes_of(ols.autocast(fun), w, X, name="tanh")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gradient_of_a_slice_under_vmap_is_summed_in_float32(level):
    def row(table, i):
        return jax.lax.dynamic_slice_in_dim(table @ W, i, 1)

    def fun(table, row=row):
        return jnp.mean(jax.vmap(row, (None, 0))(table, jnp.zeros(4096, int)))

    table = jax.random.normal(jax.random.key(0), (3, 4))
    cast = ols.autocast(row, jnp.bfloat16, level=level)
    grads = jax.grad(fun)(table, cast)
    assert_close(grads, jax.grad(fun)(table), 2e-2)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_scalars_stay_in_float32(level):
    cast = ols.autocast(lambda s, t: (s * 2.0, s * t), level=level)
    double, product = cast(jnp.float32(1e5), jnp.float32(1e-9))
    np.testing.assert_allclose([double, product], [2e5, 1e-4], rtol=1e-6)


def test_replicated_weights_are_cast_after_they_vary_so_sums_are_in_float32():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
    grad = jax.grad(ols.autocast(dot_loss, level="O2"))
    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P()}
    program = jax.make_jaxpr(jax.shard_map(grad, **specs))(W, jnp.ones((4, 4)))
    sums = [e for e in equations_of(program) if e.primitive.name.startswith("psum")]
    assert sums
    assert {e.invars[0].aval.dtype.name for e in sums} == {"float32"}
