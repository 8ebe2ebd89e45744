"""Programs inside programs: each operation is named once, with its worst numbers."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compat import IS_JAX_0_7
from helpers.operations import only, rounded, select
from helpers.places import place_of
from optax_lossscale.diagnostics import first_nonfinite, trace_operations

RNG = np.random.default_rng(0)
X = RNG.uniform(0.5, 1.0, size=(4, 4)).astype(np.float32)
W = RNG.uniform(0.5, 1.0, size=(4, 4)).astype(np.float32)


def test_each_call_of_a_jitted_function_is_listed_by_its_line_and_scope():
    @jax.jit
    def layer(w, x):
        return x @ w  # layer

    def fun(w, x):
        with jax.named_scope("checkpoint_block"):  # Begins with a word of JAX.
            for i in range(2):
                with jax.named_scope(f"layer{i}"):
                    x = layer(w, x)
        return jnp.mean(x)

    operations = trace_operations(fun, W, X)
    scopes = {f"checkpoint_block/layer{i}" for i in range(2)}
    for is_backward in (False, True):
        products = select(operations, "dot_general", is_backward=is_backward)
        assert {x.scope for x in products} == scopes
        assert {x.where for x in products} == {place_of(layer, "layer")}
    first, second = select(operations, "dot_general")
    assert first.largest < second.largest


@pytest.mark.parametrize(
    ("length", "iteration", "count", "largest"),
    # After ten steps, number 9, the carry is 65536.
    [(8, None, 0, 64.0 * 2**8), (12, 9, 3, math.inf)],
)
def test_a_scan_has_one_entry_an_operation_with_the_worst_numbers(
    length, iteration, count, largest
):
    def fun(x):
        def body(carry, _):
            carry = carry * 2  # product
            return carry, jnp.max(carry)

        carry, _ = lax.scan(body, x.astype(jnp.float16), length=length)
        return jnp.sum(carry.astype(jnp.float32))

    operation = only(trace_operations(fun, jnp.full(3, 64.0)), "mul")
    assert operation.where == place_of(fun, "product")
    assert (operation.loop, operation.iteration) == (0, iteration)
    assert operation.nonfinite == operation.made_nonfinite == count
    assert operation.largest == largest


def test_a_scan_over_layers_is_the_worst_of_its_layers():
    """The error of each product is that of its own roundings."""
    ws = np.stack([W * factor for factor in (1.0, 1e-6, 1e3)])

    def fun(ws, x):
        x, _ = lax.scan(lambda x, w: (x @ w, None), x, ws)
        return jnp.mean(x)

    operation = only(trace_operations(fun, ws, X), "dot_general")
    x, errors, largest = X, [], []
    for w in ws:
        half, exact = rounded(rounded(x) @ rounded(w)), x @ w
        errors.append(np.linalg.norm(half - exact) / np.linalg.norm(exact))
        largest.append(np.max(half))
        x = half
    np.testing.assert_allclose(operation.largest, max(largest), rtol=1e-2)
    assert 0.5 * max(errors) < operation.error < 1.1 * max(errors)


def with_a_branch(i, carry):
    """The branch runs in iteration 5, and the product overflows in iteration 2."""
    a, b = carry
    return a * 1e13, lax.cond(i == 5, lambda b: jnp.log(b * 0), lambda b: b, b)


def with_an_inner_loop(_, carry):
    """The inner product overflows in iteration 1, in its run 7, the outer one in 3."""
    a, b = carry
    return a * 1e10, lax.fori_loop(0, 4, lambda _, b: b * 1e5, b)


@pytest.mark.parametrize(
    ("body", "iteration"), [(with_a_branch, 2), (with_an_inner_loop, 7)]
)
def test_the_first_operation_of_a_loop_is_found_by_its_iteration(body, iteration):
    def fun(x):
        return sum(map(jnp.sum, lax.fori_loop(0, 8, body, (x, x))))

    first = first_nonfinite(trace_operations(fun, jnp.ones(2)))
    assert (first.primitive, first.iteration) == ("mul", iteration)


@pytest.mark.parametrize("compiles", [True, False])
def test_settings_that_look_for_nan_or_compile_nothing_do_no_harm(compiles):
    with jax.debug_nans(True), jax.debug_infs(True), jax.disable_jit(not compiles):
        first = first_nonfinite(trace_operations(lambda x: jnp.sum(jnp.log(x)), -X))
    assert first.primitive == "log"


def test_the_backward_pass_of_a_loop_is_named_by_the_line_of_its_body():
    def fun(x):
        def body(carry, _):
            return 64 * carry, None  # product

        x = lax.scan(body, x.astype(jnp.float16), length=4)[0]
        return jnp.mean(x.astype(jnp.float32))

    operations = trace_operations(fun, jnp.full(4, 2.0**-12))
    first = first_nonfinite(operations)
    # The cotangent is 1/4, times 64 in each step: in step 2 it becomes 65536.
    assert (first.primitive, first.is_backward) == ("mul", True)
    assert first.where == place_of(fun, "product")
    assert first.iteration == 2
    assert only(operations, "mul").loop < first.loop


def test_a_while_loop_and_its_condition_are_listed():
    def fun(x):
        def body(carry):
            steps, x = carry
            return steps + 1, x * 2  # product

        def condition(carry):
            return jnp.sin(carry[0]) < 2

        x = lax.stop_gradient(x.astype(jnp.float16))
        x = lax.while_loop(lambda c: condition(c) & (c[0] < 12), body, (0.0, x))[1]
        return jnp.sum(x.astype(jnp.float32))

    operations = trace_operations(fun, jnp.full(3, 64.0))
    operation = only(operations, "mul")
    assert operation.where == place_of(fun, "product")
    assert (operation.loop, operation.iteration) == (0, 9)
    assert select(operations, "sin")


def test_a_loop_that_makes_no_step_has_no_entries():
    def fun(x):
        return jnp.sum(lax.scan(lambda x, _: (jnp.tanh(x), None), x, length=0)[0])

    assert not select(trace_operations(fun, jnp.ones(3)), "tanh")


@pytest.mark.parametrize("flags", [(1,), (1, 0, 1)])
def test_of_branches_only_those_that_ran_are_listed(flags):
    def fun(x, flags):
        def body(x, flag):
            return lax.cond(flag, jnp.exp, jnp.tanh, x), None  # branches

        return jnp.sum(lax.scan(body, x, flags)[0])

    operations = trace_operations(fun, jnp.full(3, 0.5), np.asarray(flags, bool))
    x, largest = 0.5, {}
    for flag in flags:
        x = math.exp(x) if flag else math.tanh(x)
        name = "exp" if flag else "tanh"
        largest[name] = max(largest.get(name, 0), x)
    ran = {x.primitive for x in operations if not x.is_backward} & {"exp", "tanh"}
    assert ran == largest.keys()
    for name, expected in largest.items():
        operation = only(operations, name)
        np.testing.assert_allclose(operation.largest, expected, rtol=1e-5)
        assert operation.where == place_of(fun, "branches")


@pytest.mark.slow
@pytest.mark.parametrize("in_scan", [False, True])
def test_no_operation_stands_twice_under_checkpoint(in_scan):
    def block(x, w):
        with jax.named_scope("block"):
            return jnp.tanh(jnp.tanh(x @ w) @ w), None

    def keys(block):
        def fun(ws, x):
            x = lax.scan(block, x, ws)[0] if in_scan else block(x, ws[0])[0]
            return jnp.mean(x)

        return sorted(
            (x.primitive, x.where, x.scope, x.is_backward, x.shape)
            for x in trace_operations(fun, np.stack([W, W]), X)
            if x.primitive in ("dot_general", "tanh")
        )

    expected = keys(block)
    for policy in (None, jax.checkpoint_policies.everything_saveable):
        assert keys(jax.checkpoint(block, policy=policy)) == expected


@jax.custom_vjp
def layer(w, x):
    return x @ w


def layer_bwd(residuals, cotangent):
    w, x = residuals
    cotangent = cotangent.astype(jnp.float16) * 300 / 1e-3
    return x.T @ cotangent.astype(x.dtype), cotangent.astype(w.dtype) @ w.T


layer.defvjp(lambda w, x: (x @ w, (w, x)), layer_bwd)


@jax.custom_jvp
def steep(w, x):
    return x @ w


@steep.defjvp
def steep_jvp(primals, tangents):
    (w, x), (tangent, _) = primals, tangents
    return x @ w, (x @ tangent) * 1e30 / 1e-30


@pytest.mark.parametrize("rule", [layer, steep])
def test_own_derivative_rules_are_named_by_the_line_that_calls_them(rule):
    def loss_fn(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(rule(w, x))  # call

    operations = trace_operations(loss_fn, W, X)
    first = first_nonfinite(operations)
    product = only(operations, "dot_general")
    assert first.is_backward
    assert first.where == product.where == place_of(loss_fn, "call")
    assert first.scope == product.scope == "layer"


def test_a_gradient_that_the_function_takes_itself_is_traced():
    """A penalty on a gradient, as in adversarial training."""

    def loss_fn(w, x):
        slope = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)  # gradient
        return jnp.sum(slope)

    operations = trace_operations(loss_fn, W, X)
    products = [x for x in operations if x.primitive == "dot_general"]
    assert len(products) >= 4
    line = place_of(loss_fn, "gradient").partition(" ")[0]
    assert {x.where.partition(" ")[0] for x in products} == {line}


def test_a_lookup_in_a_table_of_float16_is_traced_and_a_print_runs_once(capfd):
    """Its gradient is a `scatter-add`, which holds a sum of two float16 numbers."""

    def fun(table):
        jax.debug.print("mean {}", jnp.mean(table))
        return jnp.sum(table[jnp.zeros(4, jnp.int32)].astype(jnp.float32)) * 20_000

    table = jnp.ones((3, 2), jnp.float16)
    first = first_nonfinite(trace_operations(fun, table, level="O0"))
    assert (first.primitive, first.is_backward) == ("scatter-add", True)
    assert first.float32_largest == 80_000
    assert capfd.readouterr().out.count("mean") == 1


def test_a_callback_that_computes_is_listed():
    def fun(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        double = jax.pure_callback(lambda x: 2 * np.asarray(x), shape, x)
        return jnp.sum(x) + jnp.sum(lax.stop_gradient(double))

    fun = jax.custom_jvp(fun)
    fun.defjvp(lambda primals, tangents: (fun(*primals), jnp.sum(tangents[0])))
    operation = only(trace_operations(fun, X), "pure_callback")
    assert operation.largest == 2 * np.max(X)


def test_a_reference_in_the_function_is_no_array():
    def fun(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return jnp.sum(ref[...] + 1)

    assert only(trace_operations(fun, jnp.ones(3)), "add").largest == 3


def test_a_constant_that_has_a_name_is_listed():
    def fun(x):
        return jnp.mean(x * checkpoint_name(jnp.float16(3), "three"))

    assert only(trace_operations(fun, jnp.ones(2, jnp.float16)), "name").largest == 3


def over_shard_map(fun, mesh, **settings):
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.shard_map(fun, mesh=mesh, **specs, **settings)


def over_pmap(fun, mesh):
    devices = list(mesh.devices.flat)
    mapped = jax.pmap(fun, in_axes=(None, 0), devices=devices)
    return lambda w, x: mapped(w, x.reshape(2, 2, 4)).reshape(4, 2)


def over_sharded_jit(fun, mesh):
    split = NamedSharding(mesh, P("data"))
    return lambda w, x: fun(w, lax.with_sharding_constraint(x, split))


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.filterwarnings("ignore:The function jit")  # With pmap, in JAX 0.7.
@pytest.mark.parametrize(
    "shard",
    [
        over_shard_map,
        functools.partial(over_shard_map, check_vma=False),
        over_sharded_jit,
        over_pmap,
    ],
)
def test_of_several_devices_the_worst_counts(shard):
    """Each device has two of four rows; only the second one's entries overflow."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = np.stack([X[0], X[1], 4e5 * X[2], X[0]])

    def forward(w, x):
        with jax.named_scope("device"):
            x, _ = lax.scan(lambda x, _: (jnp.tanh(x), None), 1e-3 * x, length=2)
            return (1e5 * x) @ w[:, :2]  # product

    def fun(w, x):
        return jnp.mean(jnp.tanh(shard(forward, mesh)(w, x)))

    operations = trace_operations(fun, W, rows)
    first = first_nonfinite(operations)
    assert first.where == place_of(forward, "product")
    assert first.scope == "device"
    x = 1e5 * np.tanh(np.tanh(1e-3 * rows.astype(np.float64)))
    is_cast = first.primitive == "convert_element_type"  # Of the factor.
    largest = np.max(x if is_cast else x @ W[:, :2])
    np.testing.assert_allclose(first.float32_largest, largest, rtol=1e-3)
    assert len(select(operations, "dot_general")) == 1
    assert select(operations, "dot_general", is_backward=True)


@pytest.mark.several_devices
def test_a_sum_over_devices_is_traced():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
    def total(x):
        return lax.psum(x, "data")

    first = first_nonfinite(
        trace_operations(lambda x: jnp.mean(total(x)), jnp.full((2, 3), 3e38))
    )
    assert first.primitive.startswith("psum")
    assert first.nonfinite == 3


@pytest.mark.parametrize(("argnums", "count"), [(-2, 1), ((0, 1), 2)])
def test_a_loss_with_other_results_is_differentiated_by_argnums(argnums, count):
    def fun(w, x, scale):
        y = (x @ w) * scale
        return jnp.mean(y), {"y": y, "count": jnp.int32(3)}

    operations = trace_operations(fun, W, X, 2.0, argnums=argnums)
    assert len(select(operations, "dot_general", is_backward=True)) == count


@pytest.mark.slow
def test_a_function_under_autocast_is_traced_as_it_is():
    def fun(w, x):
        with jax.named_scope("layer"):
            return jnp.mean(jnp.tanh(x @ w))

    low = ols.autocast(fun, jnp.bfloat16)
    for cast in (low, jax.jit(lambda w, x: low(w, x))):
        product = only(trace_operations(cast, W, X), "dot_general")
        assert product.dtype == jnp.bfloat16
    for cast in (ols.autocast(fun, high=["layer/"]), ols.full_precision(fun)):
        product = only(trace_operations(cast, W, X), "dot_general")
        assert (product.dtype, product.error) == (jnp.float32, 0)


def test_every_operation_has_a_line_of_the_users_file():
    def fun(x):  # first
        return jnp.linalg.norm(jax.nn.gelu(x))  # both

    operations = trace_operations(fun, X, loss_scale=8.0)
    file = inspect.getsourcefile(test_every_operation_has_a_line_of_the_users_file)
    assert {x.where.partition(":")[0] for x in operations} == {file.rpartition("/")[2]}
    assert select(operations, "tanh")[0].where == place_of(fun, "both")
    if not IS_JAX_0_7:  # It names the line of the call.
        scaling = next(x for x in operations if x.shape == () and x.largest == 8.0)
        first = place_of(fun, "first").replace("<module>", fun.__qualname__)
        assert scaling.where == first
