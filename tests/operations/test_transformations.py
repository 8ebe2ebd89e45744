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
from helpers.operations import only, select
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


def by_scan(body, x, length):
    return lax.scan(lambda x, _: (body(x), None), x, length=length)[0]


def by_while(body, x, length):
    return lax.while_loop(
        lambda carry: carry[0] < length,
        lambda carry: (carry[0] + 1, body(carry[1])),
        (0, x),
    )[1]


@pytest.mark.parametrize("loop", [by_scan, by_while])
@pytest.mark.parametrize(
    ("length", "iteration", "count", "largest"),
    # After ten steps, number 9, the carry is 65536.
    [(8, None, 0, 64.0 * 2**8), (12, 9, 3, math.inf)],
)
def test_a_loop_has_one_entry_an_operation_with_the_worst_numbers(
    loop, length, iteration, count, largest
):
    def body(carry):
        return carry * 2  # product

    def fun(x):
        carry = loop(body, lax.stop_gradient(x.astype(jnp.float16)), length)
        return jnp.sum(carry.astype(jnp.float32)) + jnp.sum(x)

    operation = only(trace_operations(fun, jnp.full(3, 64.0)), "mul")
    assert operation.where == place_of(body, "product")
    assert operation.iteration == iteration
    assert operation.nonfinite == operation.made_nonfinite == count
    assert operation.largest == largest


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
    def fun(x):
        return jnp.sum(by_scan(lambda x: x / x + jnp.log(x), x, length=2))

    with jax.debug_nans(True), jax.debug_infs(True), jax.disable_jit(not compiles):
        first = first_nonfinite(trace_operations(fun, 0 * X))
    assert (first.primitive, first.cause) == ("div", "An operand was zero.")
    assert first.iteration == 0


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


def test_of_branches_only_those_that_ran_are_listed_with_their_worst_numbers():
    def fun(x, flags):
        def body(x, flag):
            branches = [jnp.sin, jnp.exp, jnp.tanh]
            return lax.switch(flag, branches, x), None  # branches

        return jnp.sum(lax.scan(body, x, flags)[0])

    operations = trace_operations(fun, jnp.full(3, 0.5), jnp.array([1, 2, 1]))
    assert not select(operations, "sin")
    once = math.exp(0.5)
    largest = {"exp": math.exp(math.tanh(once)), "tanh": math.tanh(once)}
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


def from_callback(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: 2 * np.asarray(x), shape, x)


def from_reference(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    return ref[...] + 1


def from_named_constant(x):
    return x * checkpoint_name(jnp.float32(3), "three")


@pytest.mark.parametrize(
    ("fun", "primitive", "largest"),
    [
        (from_callback, "pure_callback", 4),
        (from_reference, "add", 5),
        (from_named_constant, "name", 3),
    ],
)
def test_callbacks_references_and_named_constants_can_be_traced(
    fun, primitive, largest
):
    def loss_fn(x):
        return jnp.sum(x) + jnp.sum(fun(lax.stop_gradient(x)))

    operations = trace_operations(loss_fn, jnp.full(3, 2.0))
    assert select(operations, primitive)[0].largest == largest


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
    assert 65504 < first.float32_largest < 4e5  # 1e5 * tanh(1), or a sum of four.
    assert len(select(operations, "dot_general")) == 1
    assert select(operations, "dot_general", is_backward=True)


@pytest.mark.several_devices
@pytest.mark.parametrize("shard", [over_shard_map, over_sharded_jit])
def test_a_nan_that_several_devices_received_was_not_made_by_them(shard):
    """XLA's maximum may drop it: across devices, and among 4096 entries on a CPU."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = np.ones((8, 8192), np.float32)
    x[3, 5] = np.nan

    def fun(w, x):
        return jnp.sum(shard(jnp.multiply, mesh)(w, x))

    operations = trace_operations(fun, np.float32([[1]]), x, argnums=1)
    assert select(operations, "mul")[0].largest == math.inf
    assert first_nonfinite(operations) is None


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


def test_a_scope_called_transpose_does_not_belong_to_the_backward_pass():
    def loss_fn(w, x):
        with jax.named_scope("transpose"):
            return jnp.mean(x @ w)

    operations = trace_operations(loss_fn, W, X)
    products = [x for x in operations if x.primitive == "dot_general"]
    assert [x.is_backward for x in products] == [False, True]
