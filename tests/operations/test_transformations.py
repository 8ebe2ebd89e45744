"""`trace_operations` lists what runs inside other programs, each operation once."""

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
from helpers.operations import select
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
            for name in ("transpose", "second"):
                with jax.named_scope(name):
                    x = layer(w, x)
        return jnp.mean(x)

    operations = trace_operations(fun, W, X)
    scopes = {f"checkpoint_block/{name}" for name in ("transpose", "second")}
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


def test_a_loop_has_one_entry_an_operation_with_the_worst_numbers():
    def body(carry):
        return carry * jnp.float16(2)  # product

    def fun(x):
        half = lax.stop_gradient(x).astype(jnp.float16)
        loops = [
            loop(body, half, length)
            for loop in (by_scan, by_while)
            for length in (8, 12)
        ]
        return jnp.sum(x), loops

    found = select(trace_operations(fun, jnp.float32([-64.0, 1.0])), "mul")
    assert {x.where for x in found} == {place_of(body, "product")}
    # After ten steps, number 9, the first entry is 65536.
    numbers = [(x.iteration, x.nonfinite, x.made_nonfinite, x.largest) for x in found]
    assert numbers == 2 * [(None, 0, 0, 64.0 * 2**8), (9, 1, 1, math.inf)]


def test_the_first_operation_of_a_loop_is_found_by_its_iteration():
    """The inner product overflows in iteration 1, in its run 7, the outer one in 3."""

    def body(_, carry):
        a, b = carry
        return a * 1e10, lax.fori_loop(0, 4, lambda _, b: b * 1e5, b)

    def fun(x):
        return sum(map(jnp.sum, lax.fori_loop(0, 8, body, (x, x))))

    first = first_nonfinite(trace_operations(fun, jnp.ones(2)))
    assert (first.primitive, first.iteration) == ("mul", 7)


def test_the_backward_pass_of_a_loop_is_named_by_the_line_of_its_body():
    def fun(x):
        def body(x):
            return 64 * x  # product

        return jnp.mean(by_scan(body, x.astype(jnp.float16), 4).astype(jnp.float32))

    first = first_nonfinite(trace_operations(fun, jnp.full(4, 2.0**-12)))
    assert (first.primitive, first.is_backward) == ("mul", True)
    assert first.where == place_of(fun, "product")
    # The cotangent is 1/4, times 64 in each step: in step 2 it becomes 65536.
    assert first.iteration == 2


def test_settings_that_look_for_nan_or_compile_nothing_do_no_harm():
    with jax.debug_nans(True), jax.debug_infs(True), jax.disable_jit(True):
        first = first_nonfinite(trace_operations(lambda x: jnp.sum(x / x), 0 * X))
    assert (first.primitive, first.cause) == ("div", "An operand was zero.")


def test_branches_that_ran_are_listed_with_their_worst_numbers():
    def fun(x, flags):
        def body(x, flag):
            branches = [jnp.sin, jnp.exp, jnp.tanh]
            return lax.switch(flag, branches, x), None  # branches

        return jnp.sum(lax.scan(body, x, flags)[0])

    operations = trace_operations(fun, jnp.full(3, 2.0), jnp.array([1, 2, 1]))
    assert not select(operations, "sin")
    # The exponential runs twice, the second time of a number below 1.
    for name, largest in (("exp", math.exp(2)), ("tanh", math.tanh(math.exp(2)))):
        (operation,) = select(operations, name)
        np.testing.assert_allclose(operation.largest, largest, rtol=1e-5)
        assert operation.where == place_of(fun, "branches")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_scan", "policy"),
    [(True, None), (False, jax.checkpoint_policies.everything_saveable)],
)
def test_no_operation_stands_twice_under_checkpoint(in_scan, policy):
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

    assert keys(jax.checkpoint(block, policy=policy)) == keys(block)


@jax.custom_vjp
def own_cotangent(w, x):
    return x @ w


own_cotangent.defvjp(
    lambda w, x: (x @ w, (w, x)),
    lambda saved, ct: ((1e9 * saved[1].T) @ ct, ct @ saved[0].T),
)


@jax.custom_jvp
def own_tangent(w, x):
    return x @ w


own_tangent.defjvp(lambda p, t: (p[1] @ p[0], (p[1] @ t[0]) * 1e30 / 1e-30))


@pytest.mark.parametrize(
    ("rule", "detail"), [(own_cotangent, " for float16: 9"), (own_tangent, ": up to")]
)
def test_own_derivative_rules_are_named_by_the_line_that_calls_them(rule, detail):
    def loss_fn(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(rule(w, x))  # call

    operations = trace_operations(loss_fn, W, X)
    first = first_nonfinite(operations)
    (product,) = select(operations, "dot_general")
    assert first.is_backward
    assert first.where == product.where == place_of(loss_fn, "call")
    assert first.scope == product.scope == "layer"
    assert first.cause.startswith("An operand was too large" + detail)


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


def test_callbacks_references_named_constants_and_sorts_by_integers_are_traced():
    def loss_fn(x, key):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        fixed = lax.stop_gradient(x)
        ref = jax.new_ref(fixed)
        ref[...] = ref[...] * 3
        results = [
            jax.pure_callback(lambda x: 2 * np.asarray(x), shape, fixed),
            ref[...] + 1,
            checkpoint_name(jnp.float32(3), "three"),
            jax.random.permutation(key, fixed),
        ]
        return jnp.sum(x), results

    operations = trace_operations(loss_fn, jnp.full(3, 2.0), jax.random.key(0))
    largest = {"pure_callback": 4, "add": 7, "name": 3, "sort": 2}
    assert {name: select(operations, name)[0].largest for name in largest} == largest
    assert select(operations, "sort")[0].dtype == jnp.float32


def over_shard_map(fun, mesh):
    return jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))


def over_sharded_jit(fun, mesh):
    split = NamedSharding(mesh, P("i"))
    return lambda w, x: fun(w, lax.with_sharding_constraint(x, split))


def over_pmap(fun, mesh):
    mapped = jax.pmap(fun, in_axes=(None, 0), devices=list(mesh.devices.flat))
    return lambda w, x: mapped(w, x.reshape(2, 2, 4)).reshape(4, 2)


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.filterwarnings("ignore:The function jit")  # With pmap, in JAX 0.7.
@pytest.mark.parametrize("shard", [over_shard_map, over_sharded_jit, over_pmap])
def test_the_worst_device_is_reported(shard):
    """Each device has two of four rows; only the second one's entries overflow."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    rows = np.stack([X[0], X[1], 4e5 * X[2], X[0]])

    def forward(w, x):
        with jax.named_scope("device"):
            x, _ = lax.scan(lambda x, _: (jnp.tanh(x), None), 1e-3 * x, length=2)
            return (1e5 * x) @ w[:, :2]  # product

    def fun(w, x):
        return jnp.mean(jnp.tanh(shard(forward, mesh)(w, x)))

    operations = trace_operations(fun, W, rows)
    first = first_nonfinite(operations)
    assert (first.where, first.scope) == (place_of(forward, "product"), "device")
    assert 65504 < first.float32_largest < 4e5  # 1e5 * tanh(1), or a sum of four.
    assert len(select(operations, "dot_general")) == 1
    assert select(operations, "dot_general", is_backward=True)


@pytest.mark.several_devices
def test_a_nan_that_several_devices_received_was_not_made_by_them():
    """XLA's maximum may drop it: across devices, and among 4096 entries on a CPU."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    x = np.ones((8, 8192), np.float32)
    x[3, 5] = np.nan

    def fun(w, x):
        return jnp.sum(over_sharded_jit(jnp.multiply, mesh)(w, x))

    operations = trace_operations(fun, np.float32([[1]]), x, argnums=1)
    assert select(operations, "mul")[0].largest == math.inf
    assert first_nonfinite(operations) is None


@pytest.mark.parametrize(("argnums", "count"), [((0, 1), 2), (-2, 1)])
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

    low = jax.jit(ols.autocast(fun, jnp.bfloat16))
    exact = ols.autocast(fun, high=["layer/"])
    for cast, dtype in ((lambda w, x: low(w, x), jnp.bfloat16), (exact, jnp.float32)):
        (product,) = select(trace_operations(cast, W, X), "dot_general")
        assert product.dtype == dtype


def test_every_operation_has_a_line_of_the_users_file():
    def fun(x):
        return jnp.linalg.norm(jax.nn.gelu(x))  # both

    operations = trace_operations(fun, X, loss_scale=8.0)
    file = inspect.getsourcefile(test_every_operation_has_a_line_of_the_users_file)
    assert {x.where.partition(":")[0] for x in operations} == {file.rpartition("/")[2]}
    assert select(operations, "tanh")[0].where == place_of(fun, "both")
