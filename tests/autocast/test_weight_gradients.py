"""The gradient of a float32 weight is a float32 product of low operands.

All numbers are small integers, which float16 holds exactly, and so does float32 their
sums of products. float16 does not hold these sums. So a gradient equals that of plain
float32 JAX to the bit if it was never in float16, and differs if it was.
"""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import checkify
from jax.experimental.jet import jet
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compat import set_mesh
from helpers.programs import equations_of
from helpers.under_autocast import HALF

LEVELS = ["O1", "O2", "O3"]
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def integers(*shape, largest=60):
    numbers = np.random.default_rng(shape).integers(-largest, largest + 1, shape)
    return jnp.asarray(numbers, jnp.float32)


def cotangent_of(fun, *args):
    return integers(*jax.eval_shape(fun, *args).shape)


def gradients(fun, *args, cotangent):
    return jax.vjp(fun, *args)[1](cotangent)


def assert_exact(fun, *args, wrap=ols.autocast, run=gradients):
    """All gradients are those of float32, which the low dtype could not hold."""
    with jax.numpy_dtype_promotion("standard"):
        cotangent = cotangent_of(fun, *args)
        expected = run(fun, *args, cotangent=cotangent)
        actual = run(wrap(fun), *args, cotangent=cotangent)
    actual, expected = (jax.tree.map(np.asarray, x) for x in (actual, expected))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_equal(actual, expected)
    with np.errstate(over="ignore"):
        rounded = jax.tree.map(lambda e: e.astype(np.float16).astype(e.dtype), expected)
    assert not all(map(np.array_equal, *map(jax.tree.leaves, (rounded, expected))))


def einsum(subscripts):
    return lambda w, x: jnp.einsum(subscripts, w, x)


def convolution(dims="NHWC", kernel="HWIO", strides=(1, 1), padding="SAME", **settings):
    return lambda w, x: lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=(dims, kernel, dims), **settings
    )


SIZES = jnp.array([40, 0, 24])
IMAGE, KERNEL = (8, 6, 6, 4), (3, 3, 4, 6)
OPERATIONS = {
    "matrix": (lambda w, x: x @ w, (8, 5), (64, 8)),
    "matrix from the left": (lambda w, x: w @ x, (5, 64), (64, 9)),
    "transposed": (lambda w, x: x @ w.T, (5, 8), (64, 8)),
    "vector": (lambda w, x: x @ w, (8,), (64, 8)),
    "batch of rows": (einsum("io,bti->bto"), (8, 5), (4, 16, 8)),
    "heads": (einsum("ihd,bti->bthd"), (8, 2, 3), (4, 16, 8)),
    "two contracted axes": (einsum("hdo,bthd->bto"), (2, 3, 5), (4, 16, 2, 3)),
    "one weight for each group": (einsum("gio,gbi->gbo"), (2, 8, 5), (2, 64, 8)),
    "batch axes inside": (einsum("igo,bgi->bog"), (8, 2, 5), (64, 2, 8)),
    "slice": (lambda w, x: x @ w[1], (2, 8, 5), (64, 8)),
    "concatenated": (
        lambda w, x: x @ jnp.concatenate([w, w[:, :2]], 1),
        (8, 5),
        (64, 8),
    ),
    "reshaped": (lambda w, x: x @ w.reshape(8, 6), (8, 2, 3), (64, 8)),
    "convolution": (convolution(), KERNEL, IMAGE),
    "strided": (convolution(strides=(2, 1), padding="VALID"), KERNEL, IMAGE),
    "dilated": (convolution(rhs_dilation=(2, 2)), KERNEL, IMAGE),
    "transposed convolution": (
        lambda w, x: lax.conv_transpose(x, w, (2, 2), "SAME"),
        KERNEL,
        IMAGE,
    ),
    "grouped convolution": (
        convolution(feature_group_count=2),
        (3, 3, 2, 6),
        IMAGE,
    ),
    "depthwise convolution": (convolution(feature_group_count=4), (3, 3, 1, 8), IMAGE),
    "batch groups": (convolution(batch_group_count=2), (3, 3, 4, 6), IMAGE),
    "one axis": (convolution("NWC", "WIO", (1,)), (3, 4, 6), (8, 20, 4)),
    "three axes": (
        convolution("NDHWC", "DHWIO", (1, 1, 1)),
        (2, 2, 2, 3, 4),
        (4, 4, 4, 4, 3),
    ),
    "channels first": (convolution("NCHW", "OIHW"), (6, 4, 3, 3), (8, 4, 6, 6)),
    "experts": (lambda w, x: lax.ragged_dot(x, w, SIZES), (3, 8, 5), (64, 8)),
}


@pytest.mark.fast_every(10)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_gradients_of_the_arguments_of_a_product_are_exact(level, name):
    fun, *shapes = OPERATIONS[name]
    cast = functools.partial(ols.autocast, level=level)
    assert_exact(fun, *(integers(*shape) for shape in shapes), wrap=cast)


W, X = integers(8, 5), integers(64, 8)


def with_scan_over_time(w, x):
    return lax.scan(lambda _, row: (_, row @ w), 0, x.reshape(8, 8, 8))[1]


def with_scan_over_layers(w, x):
    total = lax.scan(lambda y, v: (y + x @ v, None), jnp.zeros((64, 4)), w)
    return total[0]


def with_fori_loop(w, x):
    return lax.fori_loop(0, 2, lambda i, y: y + x @ w[i], jnp.zeros((64, 4)))


def with_cond(w, x):
    return lax.cond(jnp.sum(x) < 1e9, lambda w: x @ w, lambda w: x @ -w, w)


@jax.custom_vjp
def own_rule(w, x):
    return x @ w


own_rule.defvjp(
    lambda w, x: (x @ w, (w, x)),
    lambda saved, ct: (jnp.einsum("bi,bo->io", saved[1], ct), ct @ saved[0].T),
)


@jax.custom_vjp
def rule_by_vjp(w, x):
    return x @ w


rule_by_vjp.defvjp(
    lambda w, x: (x @ w, (w, x)),
    lambda saved, ct: jax.vjp(lambda w, x: x @ w, *saved)[1](ct),
)


@jax.custom_jvp
def own_tangent(w, x):
    return x @ w


own_tangent.defjvp(lambda p, t: (p[1] @ p[0], t[1] @ p[0] + p[1] @ t[0]))

PROGRAMS = {
    "jit": (jax.jit(lambda w, x: x @ w), (8, 5)),
    "checkpoint": (jax.checkpoint(lambda w, x: x @ w), (8, 5)),
    "a scan that reads the weight at each step": (with_scan_over_time, (8, 5)),
    "a scan over layers": (with_scan_over_layers, (3, 8, 4)),
    "a loop": (with_fori_loop, (2, 8, 4)),
    "a branch": (with_cond, (8, 5)),
    "a derivative rule": (own_rule, (8, 5)),
    "a derivative rule by vjp": (rule_by_vjp, (8, 5)),
    "a rule for tangents": (own_tangent, (8, 5)),
    "vmap over data": (jax.vmap(lambda w, x: x @ w, (None, 0)), (8, 5)),
    "vmap over weights": (jax.vmap(lambda w, x: x @ w, (0, None)), (2, 8, 5)),
    "a weight that is read twice": (lambda w, x: x @ w + 2.0 * (x @ w), (8, 5)),
}


@pytest.mark.fast_every(6)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gradient_of_a_weight_is_exact_inside(name, level):
    fun, shape = PROGRAMS[name]
    cast = functools.partial(ols.autocast, level=level)
    assert_exact(fun, integers(*shape), X, wrap=cast)


def with_noise(w, x):
    return x @ (w + jax.random.bernoulli(jax.random.key(0), 0.5, w.shape))


COMPUTED = [
    lambda w, x: x @ (w * 2.0 + w),
    lambda w, x: x @ jnp.where(w > 0, w, 0.0),
    lambda w, x: x @ jax.nn.relu(w),
    lambda w, x: x @ jnp.tril(w),
    with_noise,
    lambda w, x: x @ jnp.tile(w, (1, 2)),
    lambda w, x: x @ jnp.stack([w, w])[1],
    lambda w, x: x @ next(iter(w.reshape(2, 4, 5))).repeat(2, 0),
]


@pytest.mark.parametrize("fun", COMPUTED)
def test_the_gradient_of_a_weight_that_is_computed_from_arguments_is_exact(fun):
    assert_exact(fun, W, X)


RULES = {
    "a branch": lambda x, ct: lax.cond(True, lambda: x.T @ ct, lambda: x.T @ ct),
    "a sum of a map": lambda x, ct: lax.map(
        lambda pair: pair[0].T @ pair[1],
        (x.reshape(4, 16, 8), ct.reshape(4, 16, 5)),
    ).sum(0),
    "a mean": lambda x, ct: 2.0 * jnp.stack([x.T @ ct, x.T @ -ct * 3.0]).mean(0),
    "a clip": lambda x, ct: jnp.clip(x.T @ ct, -1e9, 1e9),
    "a changed entry": lambda x, ct: (x.T @ ct).at[0, 1].set(1.0),
    "a loop": lambda x, ct: lax.while_loop(
        lambda state: state[0] < 1,
        lambda state: (state[0] + 1, state[1] + x.T @ ct),
        (0, jnp.zeros((8, 5))),
    )[1],
}


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("name", RULES)
def test_a_weight_gradient_is_exact_in_a_derivative_rule_with(name):
    @jax.custom_vjp
    def fun(w, x):
        return x @ w

    fun.defvjp(
        lambda w, x: (x @ w, (w, x)),
        lambda saved, ct: (RULES[name](saved[1], ct), ct @ saved[0].T),
    )
    assert_exact(fun, W, X)
    if name == "a clip":  # JAX sums over the batch after the rule.
        assert_exact(jax.vmap(fun, (None, 0)), W, X.reshape(4, 16, 8))


def test_a_tied_table_that_is_looked_up_and_multiplied_has_an_exact_gradient():
    def fun(table, ids):
        return table[ids] @ jnp.ones((8, 3)), X @ table.T

    table, ids = integers(5, 8), jnp.array([0, 1, 1, 4])
    cotangents = integers(4, 3), integers(64, 5)
    expected = jax.vjp(fun, table, ids)[1](cotangents)[0]
    actual = jax.vjp(ols.autocast(fun), table, ids)[1](cotangents)[0]
    np.testing.assert_array_equal(actual, expected)


def test_arguments_with_a_weak_dtype_have_exact_gradients():
    w, x = jnp.full((8, 5), 7.0), jnp.full((64, 8), 9.0)
    assert w.weak_type
    assert_exact(lambda w, x: jnp.maximum(x @ w, 0.0), w, x)


def test_products_of_activations_keep_float16_results():
    def fun(w, x):
        h = jnp.tanh(x @ w)
        return jnp.sum(jnp.tanh(h @ h.T))

    program = jax.make_jaxpr(jax.grad(ols.autocast(fun)))(W, X)
    products = [e for e in equations_of(program) if e.primitive.name in PRODUCTS]
    kinds = {tuple(v.aval.shape for v in e.invars): e.outvars[0] for e in products}
    results = {shape: v.aval.dtype for shape, v in kinds.items()}
    wide = [shapes for shapes, dtype in results.items() if dtype == jnp.float32]
    assert wide == [((64, 5), (64, 8))]  # The gradient of the weight.
    assert len(products) == 5  # One by one forward, and for each operand backward.


def by_linearize(fun, *args, cotangent):
    return jax.linear_transpose(jax.linearize(fun, *args)[1], *args)(cotangent)


def by_jacrev(fun, *args, cotangent):
    return jax.jacrev(lambda *a: jnp.sum(fun(*a) * cotangent), (0, 1))(*args)


def by_compilation(fun, *args, cotangent):
    return jax.jit(functools.partial(gradients, fun))(*args, cotangent=cotangent)


def by_checkpoint(fun, *args, cotangent):
    return gradients(jax.checkpoint(fun), *args, cotangent=cotangent)


def by_vmap_over_data(fun, w, x, cotangent):
    def grad_of(x, ct):
        return jax.vjp(fun, w, x)[1](ct)[0]

    x, cotangent = jnp.stack([x, -x, 2 * x]), jnp.stack([cotangent] * 3)
    return jax.vmap(grad_of)(x, cotangent)


def by_vmap_over_weights(fun, w, x, cotangent):
    def grad_of(w):
        return jax.vjp(fun, w, x)[1](cotangent)

    return jax.vmap(grad_of, spmd_axis_name=None)(jnp.stack([w, -w]))


def by_vmap_over_both(fun, w, x, cotangent):
    def mapped(w, x):
        return jax.vmap(fun, (0, 1), 1)(w, x)

    w, x = jnp.stack([w, -w]), jnp.stack([x, 2 * x], 1)
    return jax.vjp(mapped, w, x)[1](jnp.stack([cotangent] * 2, 1))


def by_grad_of_grad(fun, w, x, cotangent):
    """The gradient, for the weight, of the gradient for the data."""

    def grad_of_data(w):
        return jax.vjp(lambda x: fun(w, x), x)[1](cotangent)[0]

    return jax.vjp(grad_of_data, w)[1](integers_like(x))


def integers_like(x):
    return jnp.asarray(np.arange(x.size).reshape(x.shape) % 97 - 48.0, jnp.float32)


def by_forward_over_reverse(fun, w, x, cotangent):
    """The tangent of the gradient of the weight, along data."""

    def grad_of_weight(x):
        return jax.vjp(fun, w, x)[1](cotangent)[0]

    return jax.jvp(grad_of_weight, (x,), (integers_like(x),))[1]


RUNS = [
    gradients,
    by_compilation,
    by_linearize,
    by_jacrev,
    by_checkpoint,
    by_vmap_over_data,
    by_vmap_over_weights,
    by_vmap_over_both,
    by_grad_of_grad,
    by_forward_over_reverse,
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "name",
    [
        "matrix",
        pytest.param("batch axes inside", marks=pytest.mark.slow),
        pytest.param("one axis", marks=pytest.mark.slow),
        pytest.param("grouped convolution", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_exact_under_every_transformation(name, run):
    fun, *shapes = OPERATIONS[name]
    assert_exact(fun, *(integers(*shape) for shape in shapes), run=run)


def test_the_hessian_is_that_of_float32():
    def fun(w, x):
        return jnp.sum(jnp.square(x @ w))

    # The loss is a square, so its Hessian is twice the sum of the outer products.
    w, x = integers(4, 1, largest=3), integers(256, 4, largest=20)
    actual = jax.hessian(ols.autocast(fun))(w, x)
    np.testing.assert_array_equal(actual[:, 0, :, 0], 2 * x.T @ x)


def test_a_sum_beyond_the_range_of_float16_is_finite():
    w, x = jnp.ones((1, 1)), jnp.full((64, 1), 2000.0)
    scaled = jax.grad(ols.autocast(lambda w, x: jnp.sum(jnp.tile(x, (1, 2)) @ w)))
    assert float(scaled(jnp.zeros((2, 1)), x)[0, 0]) == 64 * 2000.0 == 128000.0
    del w


@pytest.mark.parametrize(
    "policy", ["dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable"]
)
def test_policies_of_checkpoint_see_products(policy):
    policy = getattr(jax.checkpoint_policies, policy)

    def count(wrap, fun):
        fun = jax.checkpoint(wrap(fun), policy=policy)
        program = jax.make_jaxpr(jax.grad(fun))(W[:, :1], X)
        return sum(e.primitive.name == "dot_general" for e in equations_of(program))

    def fun(w, x):
        return jnp.sum(jnp.sin(jnp.tanh(x @ w)))

    def outside(fun):
        return fun

    assert count(ols.autocast, fun) == count(outside, fun)
    inside = jax.checkpoint(fun, policy=policy)
    program = jax.make_jaxpr(jax.grad(ols.autocast(inside)))(W[:, :1], X)
    names = [e.primitive.name for e in equations_of(program)]
    assert names.count("dot_general") == count(outside, fun)


def test_a_policy_can_offload_products_to_the_host():
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    )
    fun = jax.checkpoint(
        ols.autocast(lambda w, x: jnp.sum(jnp.sin(x @ w))), policy=policy
    )
    program = jax.make_jaxpr(jax.grad(fun))(W, X)
    names = [equation.primitive.name for equation in equations_of(program)]
    assert names.count("device_put") == 2  # To the host and back.


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_exported_gradients_are_products_of_float16_with_float32_results(platform):
    grad = jax.jit(jax.grad(ols.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w)))))
    exported = export.export(grad, platforms=[platform])(W, X)
    text = exported.mlir_module()
    assert "(tensor<64x5xf16>, tensor<64x8xf16>) -> tensor<5x8xf32>" in text
    if platform == "cpu":
        np.testing.assert_array_equal(exported.call(W, X), grad(W, X))


@pytest.mark.parametrize(("platform", "dtype"), [("tpu", "f32"), ("cuda", "f16")])
def test_the_result_of_a_convolution_is_in_float32_where_hardware_can(platform, dtype):
    """With a float32 result XLA for GPUs would multiply float32 copies."""
    fun, *shapes = OPERATIONS["convolution"]
    args = [integers(*shape) for shape in shapes]
    grad = jax.jit(jax.grad(ols.autocast(lambda w, x: jnp.sum(jnp.tanh(fun(w, x))))))
    text = export.export(grad, platforms=[platform])(*args).mlir_module()
    lines = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    types = [re.findall(r"tensor<[\dx]*(f\d+)>", line) for line in lines]
    assert types == [["f16", "f16", "f16"], ["f16", "f16", dtype]]


def test_taylor_series_of_products_are_right():
    fun = ols.autocast(lambda x: jnp.tanh(x @ jnp.eye(3)))
    x = jnp.float32([[0.5, 0.25, -1.0]])
    series = ((jnp.ones((1, 3)), jnp.zeros((1, 3))),)
    actual = jet(fun, (x,), series)
    expected = jet(lambda x: jnp.tanh(x @ jnp.eye(3)), (x,), series)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-2, atol=1e-2)


def test_gradients_in_shard_map_are_exact():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def mapped(wrap):
        def grad(w, x):
            return jax.grad(lambda w: jnp.sum(wrap(lambda w, x: x @ w)(w, x)))(w)

        specs = (P(), P("data"))
        return jax.shard_map(grad, mesh=mesh, in_specs=specs, out_specs=P())(W, X)

    np.testing.assert_array_equal(mapped(ols.autocast), mapped(lambda fun: fun))


def test_gradients_on_an_explicit_mesh_are_exact_and_sharded_as_the_weight():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with set_mesh(mesh):
        w = jax.device_put(integers(8, 4), NamedSharding(mesh, P(None, "model")))
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))

        def grad(wrap):
            fun = wrap(lambda w, x: x @ w)
            return jax.jit(jax.grad(lambda w: jnp.sum(fun(w, x))))(w)

        actual, expected = grad(ols.autocast), grad(lambda fun: fun)
    np.testing.assert_array_equal(actual, expected)
    assert actual.sharding == expected.sharding


def test_resharded_values_keep_their_dtypes_and_exact_gradients():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def fun(w, x):
        h = jax.sharding.reshard(x @ jax.sharding.reshard(w, P()), P())
        return jnp.sum(h @ jnp.ones((5, 2)))

    with set_mesh(mesh):
        w = jax.device_put(W, NamedSharding(mesh, P("data")))
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        program = jax.make_jaxpr(ols.autocast(fun))(w, x)
        actual = jax.jit(jax.grad(ols.autocast(fun)))(w, x)
        expected = jax.jit(jax.grad(fun))(w, x)
    names = {
        str(e.invars[0].aval.dtype)
        for e in equations_of(program)
        if e.primitive.name == "reshard"
    }
    assert names == {"float32", "float16"}  # The weight, and the activation.
    np.testing.assert_array_equal(actual, expected)


def test_results_of_full_precision_functions_are_rounded_for_products():
    """They may hold products, so they are no parameters, and are stored in half."""

    @jax.custom_jvp
    def layer(w, x):
        return jnp.tanh(x @ w)

    layer.defjvp(lambda p, t: (layer(*p), p[1] @ t[0] + t[1] @ p[0]))

    def fun(w, x):
        return ols.full_precision(layer)(w, x) @ w.T

    program = jax.make_jaxpr(ols.autocast(fun))(W, X)
    found = equations_of(program)
    (last,) = [e for e in found if e.primitive.name == "low_product"]
    assert [str(v.aval.dtype) for v in last.invars[:2]] == ["float16", "float32"]


def test_checkify_finds_a_nan_that_a_product_makes():
    def fun(w, x):
        return x @ w

    w, x = W.at[0, 0].set(0.0), X.at[0, 0].set(jnp.inf)
    checked = checkify.checkify(jax.jit(ols.autocast(fun)), checkify.nan_checks)
    assert "nan generated" in checked(w, x)[0].get()


def test_the_precision_of_a_backward_product_is_that_of_its_own_context():
    def precisions(setting):
        def grad(w, x, cotangent):
            pull_back = jax.vjp(ols.autocast(lambda w, x: x @ w), w, x)[1]
            with jax.default_matmul_precision(setting):
                return pull_back(cotangent)

        args = integers(7, 5), integers(11, 7), integers(11, 5)
        return str(jax.make_jaxpr(grad)(*args)).count("HIGHEST")

    assert precisions("highest") > 0
    assert precisions("default") == 0


def test_an_autocast_function_inside_another_keeps_its_dtype():
    inner = ols.autocast(lambda w, x: x @ w, jnp.bfloat16)
    program = jax.make_jaxpr(jax.grad(ols.autocast(lambda w: jnp.sum(inner(w, X)))))(W)
    products = [e for e in equations_of(program) if e.primitive.name in PRODUCTS]
    dtypes = {tuple(str(v.aval.dtype) for v in e.invars) for e in products}
    assert dtypes == {("bfloat16", "bfloat16")} != {HALF}


def test_bfloat16_gradients_of_every_shape_run_on_a_cpu():
    cast = functools.partial(ols.autocast, dtype=jnp.bfloat16)
    for shape in ((64, 8), (8, 8, 8), (2, 4, 8, 8)):
        assert_exact(lambda w, x: x @ w, W, integers(*shape), wrap=cast)
