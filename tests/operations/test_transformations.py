"""Programs inside programs: each operation is named once, with its worst numbers."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.modules import ROWS, Net, arrays_of, mean_square
from helpers.places import place_of
from optax_lossscale.diagnostics import first_nonfinite, trace_operations

RNG = np.random.default_rng(0)
X = RNG.uniform(0.5, 1.0, size=(3, 4)).astype(np.float32)
W = RNG.uniform(0.5, 1.0, size=(4, 4)).astype(np.float32)


def select(operations, name, *, is_backward=False):
    return [
        x for x in operations if (x.primitive, x.is_backward) == (name, is_backward)
    ]


def only(operations, name, *, is_backward=False):
    (operation,) = select(operations, name, is_backward=is_backward)
    return operation


def half(x):
    """An array rounded to float16."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float16)


def relative_error(x, reference):
    x, reference = (np.asarray(a).astype(np.float64) for a in (x, reference))
    return np.linalg.norm(x - reference) / np.linalg.norm(reference)


def assert_numbers(operation, result, reference):
    """The numbers of a result, by their definitions, up to the rounding of a sum."""
    finite = np.isfinite(result)
    largest = np.max(np.abs(result).astype(np.float32)) if finite.all() else math.inf
    np.testing.assert_allclose(operation.largest, largest, rtol=2e-3)
    np.testing.assert_allclose(
        operation.float32_largest, np.max(np.abs(reference)), rtol=1e-5
    )
    assert operation.nonfinite == np.sum(~finite)
    flushed = np.sum((result == 0) & (reference != 0))
    share = flushed / np.count_nonzero(reference)
    np.testing.assert_allclose(operation.underflow, share, rtol=1e-6)
    if finite.all():
        error = relative_error(result, reference)
        np.testing.assert_allclose(operation.error, error, rtol=2e-2)
    else:
        assert operation.error == math.inf


def of_halves(function, *args):
    """A product of float16 arrays, summed in float32 as XLA does, and the exact one."""
    rounded = [half(x).astype(np.float32) for x in args]
    return half(function(*rounded)), function(*args)


def test_a_jitted_function_is_traced_like_the_function_itself():
    def fun(w, x):
        return jnp.mean(jnp.tanh(x @ w))

    plain, jitted = (trace_operations(f, W, X) for f in (fun, jax.jit(fun)))
    assert list(plain) == list(jitted)


def test_a_jitted_function_is_named_by_its_own_lines():
    @jax.jit
    def layer(w, x):
        return x @ w  # layer

    operations = trace_operations(lambda w, x: jnp.mean(layer(w, layer(w, x))), W, X)
    products = select(operations, "dot_general")
    assert len(products) == 2
    assert {x.where for x in products} == {place_of(layer, "layer")}
    result, reference = of_halves(lambda w, x: x @ w, W, X)
    assert_numbers(products[0], result, reference)
    result = half(result.astype(np.float32) @ half(W).astype(np.float32))
    assert_numbers(products[1], result, reference @ W)


def test_a_loss_of_equal_lines_is_in_order_of_execution():
    operations = trace_operations(lambda w, x: jnp.sum(jnp.tanh(jnp.exp(x @ w))), W, X)
    forward = [x.primitive for x in operations if not x.is_backward]
    kept = [x for x in forward if x in ("dot_general", "exp", "tanh", "reduce_sum")]
    assert kept == ["dot_general", "exp", "tanh", "reduce_sum"]
    flags = [x.is_backward for x in operations if x.primitive == "dot_general"]
    assert flags == [False, True]


def test_named_scopes_are_the_path():
    def fun(w, x):
        with jax.named_scope("block"):
            for i in range(2):
                with jax.named_scope(f"layer{i}"):
                    x = x @ w
        return jnp.mean(x)

    operations = trace_operations(fun, W, X)
    products = select(operations, "dot_general")
    assert [x.scope for x in products] == ["block/layer0", "block/layer1"]
    backward = select(operations, "dot_general", is_backward=True)
    scopes = [x.scope for x in backward]
    assert sorted(scopes) == ["block/layer0", "block/layer1", "block/layer1"]
    assert scopes[0] == "block/layer1"


def growing(length=12):
    """A loop whose carry doubles from 64, and overflows when it becomes 65536."""

    def fun(x):
        def body(carry, _):
            carry = carry * 2  # product
            return carry, jnp.max(carry)

        carry, maxima = lax.scan(body, x.astype(jnp.float16), length=length)
        return carry, maxima

    return fun


def test_a_scan_has_one_entry_an_operation_with_the_worst_numbers():
    fun = growing()
    operation = only(trace_operations(fun, jnp.full(3, 64.0)), "mul")
    assert operation.where == place_of(fun, "product")
    assert operation.loop == 0
    # After ten steps, number 9, the carry is 65536.
    assert operation.iteration == 9
    assert operation.nonfinite == operation.made_nonfinite == 3
    assert operation.largest == math.inf
    assert operation.float32_largest == 64.0 * 2**12
    assert operation.headroom_bits == math.log2(65504) - 18


def test_a_scan_without_overflow_has_no_iteration():
    fun = growing(8)
    operation = only(trace_operations(fun, jnp.full(3, 64.0)), "mul")
    assert operation.iteration is None
    assert operation.largest == operation.float32_largest == 64.0 * 2**8
    assert operation.error == 0


def test_an_overflow_of_the_first_iteration_is_in_iteration_0():
    operation = only(trace_operations(growing(), jnp.full(3, 6e4)), "mul")
    assert operation.iteration == 0


def test_a_scan_over_layers_is_the_worst_of_its_layers():
    """Weights, inputs and the carry are those that NumPy has."""
    ws = np.stack([W * factor for factor in (1.0, 1e-4, 1e3)])

    def fun(ws, x):
        x, _ = lax.scan(lambda x, w: (x @ w, None), x, ws)
        return jnp.mean(x)

    operation = only(trace_operations(fun, ws, X), "dot_general")
    x, exact, results = X, X, []
    for w in ws:
        x = half(half(x).astype(np.float32) @ half(w).astype(np.float32))
        exact = exact @ w
        results.append((np.max(x), np.max(exact), relative_error(x, exact)))
    largest, reference, error = np.max(np.asarray(results, np.float64), axis=0)
    np.testing.assert_allclose(operation.largest, largest, rtol=2e-3)
    np.testing.assert_allclose(operation.float32_largest, reference, rtol=1e-5)
    np.testing.assert_allclose(operation.error, error, rtol=5e-2)
    assert operation.nonfinite == 0


def test_a_reversed_scan_counts_iterations_in_order_of_execution():
    """The last entry is the first to be read, and the only one that overflows."""

    def fun(xs):
        def body(carry, x):
            return carry, (x * 2).astype(jnp.float16)  # cast

        return lax.scan(body, 0.0, xs, reverse=True)[1]

    xs = jnp.float32([1.0, 2.0, 3.0, 4e4, 5.0])
    operation = only(trace_operations(fun, xs), "convert_element_type")
    assert operation.iteration == 1
    assert operation.where == place_of(fun, "cast")


def test_the_backward_pass_of_a_scan_is_named_by_the_line_of_its_body():
    def fun(x):
        def body(carry, _):
            return 64 * carry, None  # product

        return jnp.mean(lax.scan(body, x.astype(jnp.float16), length=4)[0])

    operations = trace_operations(fun, jnp.full(4, 2.0**-12))
    assert not any(x.nonfinite for x in operations if not x.is_backward)
    first = first_nonfinite(operations)
    # The cotangent is 1/4, times 64 in each step: in step 2 it becomes 65536.
    assert (first.primitive, first.is_backward) == ("mul", True)
    assert first.where == place_of(fun, "product")
    assert first.iteration == 2
    assert first.float32_largest == 2.0**22
    forward = only(operations, "mul")
    assert forward.loop < first.loop


def test_iterations_of_nested_scans_are_counted_over_all_loops_inside():
    """Each outer step has three inner ones; the second inner one of the third fails."""

    def fun(xs):
        def inner(carry, x):
            return carry, x.astype(jnp.float16)

        def outer(carry, row):
            return lax.scan(inner, carry, row)

        return lax.scan(outer, 0.0, xs)[1]

    xs = jnp.ones((4, 3)).at[2, 1].set(1e6)
    operation = only(trace_operations(fun, xs), "convert_element_type")
    assert operation.loop == 0
    assert operation.nonfinite == 1
    # Two outer steps of 1 + 3 iterations each, one inner one: those are 2 * 4 + 1.
    # The first place of the third outer step has its number, and so has the failure.
    assert operation.iteration in range(2 * 3 + 1, 2 * 4 + 2)


def test_the_first_operation_of_two_in_a_loop_is_the_one_of_the_earlier_iteration():
    """The second line overflows in iteration 3, the first one only in iteration 5."""

    def fun(x):
        def body(carry, _):
            one, other = carry
            one = one * 2  # later
            other = other * 4  # earlier
            return (one, other), None

        x = x.astype(jnp.float16)
        return lax.scan(body, (x, x), length=8)[0]

    # 1024 * 4**3 and 1024 * 2**6 are the first beyond 65504.
    operations = trace_operations(fun, jnp.full(3, 1024.0))
    iterations = [x.iteration for x in select(operations, "mul")]
    assert sorted(iterations) == [2, 5]
    assert first_nonfinite(operations).where == place_of(fun, "earlier")


def test_loops_are_numbered_in_order_of_execution():
    def fun(x):
        x = x.astype(jnp.float16)
        x = lax.scan(lambda x, _: (x * 2, None), x, length=4)[0]
        return lax.scan(lambda x, _: (x * 4, None), x, length=4)[0]

    operations = select(trace_operations(fun, jnp.full(3, 64.0)), "mul")
    assert [x.loop for x in operations] == [0, 1]
    # 64 * 2**4 is 1024, and 1024 * 4**3 is 65536: iterations begin anew.
    assert [x.iteration for x in operations] == [None, 2]


def test_a_while_loop_has_the_worst_numbers_and_the_first_iteration():
    def fun(x):
        def body(carry):
            steps, x = carry
            return steps + 1, x * 2  # product

        return lax.while_loop(lambda c: c[0] < 12, body, (0, x.astype(jnp.float16)))

    operation = only(trace_operations(fun, jnp.full(3, 64.0)), "mul")
    assert operation.where == place_of(fun, "product")
    assert (operation.loop, operation.iteration) == (0, 9)
    assert operation.nonfinite == operation.made_nonfinite == 3
    assert operation.float32_largest == 64.0 * 2**12


def test_a_loop_that_makes_no_step_has_no_entries():
    def fun(x):
        x = lax.while_loop(lambda x: x[0] < 0, lambda x: x * 2, x)
        return lax.fori_loop(0, 0, lambda _, x: jnp.tanh(x), x) + 1

    operations = trace_operations(fun, jnp.ones(3))
    assert {x.primitive for x in operations} <= {"add"}


def test_both_copies_make_the_same_number_of_steps():
    """In float32 the loop would end later: there, 2049 is beyond 2048."""

    def fun(x):
        x = x.astype(jnp.float16)
        return lax.while_loop(lambda x: x[0] < 2060, lambda x: x * 1.5, x)

    operation = only(trace_operations(fun, jnp.full(3, 1.1)), "mul")
    x, exact = np.float16(1.1), np.float32(1.1)
    while x < np.float16(2060):
        x, exact = x * np.float16(1.5), exact * np.float32(1.5)
    assert operation.largest == x
    np.testing.assert_allclose(operation.float32_largest, exact, rtol=1e-5)


def two_branches(x, flag):
    return lax.cond(
        flag,
        lambda x: jnp.exp(x),  # taken
        lambda x: jnp.tanh(x),  # other
        x,
    )


@pytest.mark.parametrize(("flag", "name"), [(True, "exp"), (False, "tanh")])
def test_of_a_branch_only_what_runs_is_recorded(flag, name):
    x = jnp.ones(3)
    operations = trace_operations(two_branches, x, flag)
    assert [x.primitive for x in operations] == [name]
    comment = "taken" if flag else "other"
    assert operations[0].where.startswith(
        place_of(two_branches, comment).rpartition(" ")[0]
    )
    assert operations[0].loop is None


@pytest.mark.parametrize("flags", [(1, 0, 1), (1, 1, 1), (0, 0, 0)])
def test_in_a_loop_each_branch_that_is_ever_taken_is_recorded(flags):
    def fun(x, flags):
        return lax.scan(lambda x, flag: (two_branches(x, flag), None), x, flags)[0]

    operations = trace_operations(fun, jnp.full(3, 0.5), jnp.asarray(flags, bool))
    taken = {"exp" if flag else "tanh" for flag in flags}
    assert {x.primitive for x in operations} == taken
    x, largest = 0.5, {}
    for flag in flags:
        x = math.exp(x) if flag else math.tanh(x)
        name = "exp" if flag else "tanh"
        largest[name] = max(largest.get(name, 0), x)
    for operation in operations:
        expected = largest[operation.primitive]
        np.testing.assert_allclose(operation.largest, expected, rtol=1e-5)


def test_the_iteration_of_a_branch_is_that_of_the_loop_around_it():
    def fun(x, flags):
        def body(x, flag):
            x = lax.cond(flag, lambda x: x * 2**10, lambda x: x, x)
            return x, None

        return lax.scan(body, x.astype(jnp.float16), flags)[0]

    flags = jnp.asarray([0, 1, 0, 1, 1], bool)
    operation = only(trace_operations(fun, jnp.ones(3), flags), "mul")
    assert operation.iteration == 3


def test_the_branch_of_the_rounded_program_is_taken():
    """In float32, 1e-9 is positive; in float16 it is zero."""

    def fun(x):
        x = x.astype(jnp.float16)
        return lax.cond(x[0] > 0, jnp.exp, jnp.tanh, x)

    operations = trace_operations(fun, jnp.full(3, 1e-9))
    assert "tanh" in {x.primitive for x in operations}
    assert "exp" not in {x.primitive for x in operations}


def test_switch_records_the_branch_with_its_index():
    def fun(x, index):
        return lax.switch(index, [jnp.exp, jnp.tanh, jnp.sin], x)

    for index, name in [(0, "exp"), (1, "tanh"), (2, "sin"), (9, "sin"), (-1, "exp")]:
        operations = trace_operations(fun, jnp.ones(3), jnp.int32(index))
        assert [x.primitive for x in operations] == [name]


@pytest.mark.parametrize("policy", [None, "dots_saveable", "everything_saveable"])
def test_no_operation_stands_twice_under_checkpoint(policy):
    def block(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def fun(w, x):
        return jnp.mean(run(w, x))

    policy = policy and getattr(jax.checkpoint_policies, policy)
    run = block
    plain = trace_operations(fun, W, X)
    run = jax.checkpoint(block, policy=policy)
    recomputed = trace_operations(fun, W, X)

    def keys(operations):
        return sorted(
            (x.primitive, x.where, x.is_backward, x.shape, x.largest)
            for x in operations
            if x.primitive in ("dot_general", "tanh")
        )

    assert keys(recomputed) == keys(plain)


def test_no_operation_stands_twice_under_checkpoint_in_a_scan():
    def fun(ws, x):
        def body(x, w):
            return jnp.tanh(x @ w), None

        return jnp.mean(lax.scan(jax.checkpoint(body), x, ws)[0])

    operations = trace_operations(fun, np.stack([W, W]), X, level="O0")
    assert len(select(operations, "dot_general")) == 1
    assert len(select(operations, "tanh")) == 1
    # The gradients of the weight and of the carry.
    assert len(select(operations, "dot_general", is_backward=True)) == 2
    assert not select(operations, "tanh", is_backward=True)


def test_scopes_around_a_checkpoint_in_a_scan_are_named_once():
    def fun(ws, x):
        def body(x, w):
            with jax.named_scope("body"):
                return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x), None

        return jnp.mean(lax.scan(body, x, ws)[0])

    operations = trace_operations(fun, np.stack([W, W]), X, level="O0")
    products = [x for x in operations if x.primitive == "dot_general"]
    assert {x.is_backward for x in products} == {False, True}
    assert {x.scope for x in products} == {"body"}


def test_a_fault_under_checkpoint_is_in_the_forward_pass():
    @jax.checkpoint
    def block(x):
        x = x.astype(jnp.float16)
        return (x * x).astype(jnp.float32)  # square

    operations = trace_operations(lambda x: jnp.mean(jnp.tanh(block(x))), 300 * X)
    first = first_nonfinite(operations)
    assert first.where == place_of(block, "square")
    assert not first.is_backward
    rounded = half(300 * X).astype(np.float32)
    assert first.nonfinite == np.sum(np.isinf(half(rounded**2)))


@jax.custom_jvp
def steep(x):
    return 300 * x  # forward


@steep.defjvp
def steep_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    return steep(x), 400 * (300 * tangent)  # rule


def steep_loss(x):
    return jnp.sum(steep(x.astype(jnp.float16)))


def test_a_fault_in_the_rule_of_a_custom_jvp_is_found():
    first = first_nonfinite(trace_operations(steep_loss, jnp.full(4, 1e-2)))
    assert (first.primitive, first.is_backward) == ("mul", True)
    assert first.float32_largest == 300 * 400
    assert first.nonfinite == first.made_nonfinite == 4


def test_a_custom_jvp_is_named_by_its_own_lines():
    operations = trace_operations(steep_loss, jnp.full(4, 1e-2))
    assert only(operations, "mul").where == place_of(steep.fun, "forward")
    assert first_nonfinite(operations).where == place_of(steep_jvp, "rule")


@jax.custom_vjp
def layer(w, x):
    return x @ w  # forward


def layer_fwd(w, x):
    return x @ w, (w, x)  # forward


def layer_bwd(residuals, cotangent):
    w, x = residuals
    cotangent = cotangent.astype(jnp.float16) * 300 * 300  # fault
    return x.T @ cotangent.astype(x.dtype), cotangent.astype(w.dtype) @ w.T


layer.defvjp(layer_fwd, layer_bwd)


def own_loss(w, x):
    with jax.named_scope("layer"):
        return jnp.sum(layer(w, x))  # call


def test_a_fault_in_the_backward_rule_of_a_custom_vjp_is_named_by_the_call():
    first = first_nonfinite(trace_operations(own_loss, W, X))
    assert (first.primitive, first.is_backward) == ("mul", True)
    assert first.where == place_of(own_loss, "call")
    assert first.scope == "layer"
    assert first.float32_largest == 90_000


def test_the_forward_pass_of_a_custom_vjp_is_named_by_its_own_line():
    product = only(trace_operations(own_loss, W, X), "dot_general")
    assert_numbers(product, *of_halves(lambda w, x: x @ w, W, X))
    assert product.where == place_of(layer_fwd, "forward")


def test_a_custom_rule_is_not_run_for_a_function_without_gradient():
    operations = trace_operations(lambda w, x: layer(w, x), W, X)
    assert not any(x.is_backward for x in operations)
    assert not select(operations, "mul")
    product = only(operations, "dot_general")
    assert product.where == place_of(layer.__wrapped__, "forward")


def test_a_function_of_integers_without_a_loss_is_traced():
    operations = trace_operations(
        lambda rows: {"y": jnp.asarray(X)[rows] * 2}, jnp.arange(2)
    )
    assert [x.primitive for x in operations][-1:] == ["mul"]


def test_vmap_keeps_line_and_scope():
    def row_loss(w, x):
        with jax.named_scope("row"):
            return jnp.sum(jnp.tanh(x @ w))  # product

    def fun(w, x):
        return jnp.mean(jax.vmap(row_loss, (None, 0))(w, x))

    operations = trace_operations(fun, W, X)
    product = only(operations, "dot_general")
    assert product.where == place_of(row_loss, "product")
    assert product.scope == "row"
    assert_numbers(product, *of_halves(lambda w, x: x @ w, W, X))


def test_a_gradient_that_the_function_takes_itself_is_traced():
    """A penalty on a gradient, as in adversarial training."""

    def loss_fn(w, x):
        slope = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)  # gradient
        return jnp.sum(slope)

    operations = trace_operations(loss_fn, W, X)
    products = select(operations, "dot_general")
    assert len(products) == 2
    assert {x.where.partition(" ")[0] for x in products} == {
        place_of(loss_fn, "gradient").partition(" ")[0]
    }
    assert select(operations, "dot_general", is_backward=True)
    plain = trace_operations(jax.grad(loss_fn), W, X)
    assert not any(x.is_backward for x in plain)
    assert len(select(plain, "dot_general")) >= 4


def test_a_function_without_a_loss_has_no_backward_pass():
    operations = trace_operations(lambda w, x: {"y": x @ w}, W, X)
    assert [x.primitive for x in operations if x.primitive == "dot_general"]
    assert not any(x.is_backward for x in operations)


def test_a_loss_with_other_results_is_differentiated():
    def fun(w, x):
        y = x @ w
        return jnp.mean(y), {"y": y, "count": jnp.int32(3)}

    operations = trace_operations(fun, W, X)
    assert len(select(operations, "dot_general")) == 1
    assert len(select(operations, "dot_general", is_backward=True)) == 1


def test_the_gradient_is_by_the_arguments_of_argnums():
    def fun(w, x, scale):
        return jnp.mean((x @ w) * scale)

    def count(argnums):
        operations = trace_operations(fun, W, X, 2.0, argnums=argnums)
        return len(select(operations, "dot_general", is_backward=True))

    assert count(0) == count(1) == count(-2) == 1
    assert count((0, 1)) == 2
    assert count(2) == 0


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices, as on CPU")
@pytest.mark.parametrize("check_vma", [True, False])
def test_of_the_devices_of_a_shard_map_the_worst_counts(check_vma):
    """Each device has two of four rows; the second one's entries overflow."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = np.stack([X[0], X[1], 400 * X[2], X[0]])
    factor = 500.0

    def fun(w, x):
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=check_vma,
        )
        def forward(w, x):
            with jax.named_scope("device"):
                return (x @ w) * factor  # product

        return jnp.mean(jnp.tanh(forward(w, x)))

    operations = trace_operations(fun, W, rows)
    product = only(operations, "dot_general")
    assert product.where == place_of(fun, "product")
    assert product.scope == "device"
    result, reference = of_halves(lambda w, x: x @ w, W, rows)
    np.testing.assert_allclose(product.largest, np.max(result), rtol=2e-3)
    np.testing.assert_allclose(product.float32_largest, np.max(reference), rtol=1e-5)
    assert product.shape == (2, 4)
    first = first_nonfinite(operations)
    assert first.primitive == "mul"
    assert first.where == place_of(fun, "product")
    scaled = half(result.astype(np.float32) * factor)
    assert first.nonfinite == np.sum(np.isinf(scaled))
    assert len(select(operations, "dot_general", is_backward=True)) == 1


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices, as on CPU")
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_sum_over_devices_is_traced(check_vma):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def fun(x):
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
            check_vma=check_vma,
        )
        def total(x):
            return lax.psum(x.astype(jnp.float16), "data")

        return total(x)

    operations = trace_operations(fun, jnp.full((2, 3), 5e4))
    first = first_nonfinite(operations)
    assert first.primitive.startswith("psum")
    assert first.nonfinite == 3
    assert first.float32_largest == 1e5


class Dropped(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4)(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        return linen.Dropout(0.5, deterministic=False)(x)


@pytest.mark.slow
def test_linen_modules_take_dropout_keys_and_return_batch_statistics():
    model = Dropped()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        variables = jax.jit(model.init)(keys, X)

        def loss_fn(params, rest, x, key):
            y, updates = model.apply(
                {"params": params, **rest},
                x,
                rngs={"dropout": key},
                mutable="batch_stats",
            )
            return jnp.mean(y**2), updates

        rest = {"batch_stats": variables["batch_stats"]}
        args = variables["params"], rest, X, jax.random.key(2)
        operations = trace_operations(loss_fn, *args)
    scopes = {x.scope for x in operations}
    assert {"Dropped/Dense_0", "Dropped/BatchNorm_0", "Dropped/Dropout_0"} <= scopes
    assert any(x.is_backward for x in operations)
    # Batch statistics are results of the forward pass.
    moving = [x for x in operations if x.scope == "Dropped/BatchNorm_0"]
    assert any(x.shape == (4,) and not x.is_backward for x in moving)


def test_the_state_of_an_nnx_module_is_unchanged_bit_for_bit():
    net = Net()
    before = arrays_of(net)
    variables = {path: id(x) for path, x in nnx.to_flat_state(nnx.state(net))}
    operations = trace_operations(mean_square, net, ROWS)
    assert_same_bits(arrays_of(net), before)
    assert {"Net/linear", "Net/norm", "Net/dropout"} <= {x.scope for x in operations}
    assert variables.keys() == dict(nnx.to_flat_state(nnx.state(net))).keys()


@pytest.mark.slow
def test_the_same_dropout_keys_give_the_same_numbers():
    net = Net()
    one, other = (trace_operations(mean_square, net, ROWS) for _ in range(2))
    assert list(one) == list(other)


def test_the_state_of_a_module_that_is_the_function_is_unchanged():
    net = Net()
    before = arrays_of(net)
    operations = trace_operations(net, ROWS)
    assert_same_bits(arrays_of(net), before)
    assert only(operations, "dot_general").scope == "Net/linear"
    assert not any(x.is_backward for x in operations)


def test_a_module_that_a_function_reads_is_named_and_unchanged():
    net = Net()
    before = arrays_of(net)
    net.eval()
    operations = trace_operations(lambda x: mean_square(net, x), ROWS)
    assert_same_bits(arrays_of(net), before)
    assert only(operations, "dot_general").scope == "Net/linear"


def test_a_method_of_a_module_can_be_traced():
    net = Net()
    before = arrays_of(net)
    operations = trace_operations(net.encode, ROWS)
    assert_same_bits(arrays_of(net), before)
    assert only(operations, "dot_general").scope.endswith("linear")


def test_modules_keep_their_own_call_after_a_trace():
    net = Net()
    before = Net.__call__
    trace_operations(mean_square, net, ROWS)
    assert Net.__call__ is before


def test_modules_keep_their_own_call_after_a_trace_that_fails():
    def fail(model, x):
        model(x)
        raise RuntimeError("on purpose")

    before = Net.__call__
    with pytest.raises(RuntimeError, match="on purpose"):
        trace_operations(fail, Net(), ROWS)
    assert Net.__call__ is before


def test_a_function_under_autocast_is_traced_as_it_is():
    def fun(w, x):
        return jnp.mean(jnp.tanh(x @ w))

    operations = trace_operations(ols.autocast(fun, jnp.bfloat16), W, X)
    assert only(operations, "dot_general").dtype == jnp.bfloat16
    inside = trace_operations(lambda w, x: ols.autocast(fun, jnp.bfloat16)(w, x), W, X)
    assert only(inside, "dot_general").dtype == jnp.bfloat16
    held = trace_operations(ols.autocast(fun, high=["dot_general"]), W, X)
    assert only(held, "dot_general").dtype == jnp.float32


def test_full_precision_is_kept():
    def fun(w, x):
        return jnp.mean(jnp.tanh(ols.full_precision(lambda: x @ w)()))

    operations = trace_operations(fun, W, X)
    assert only(operations, "dot_general").dtype == jnp.float32
    assert only(operations, "dot_general").error < 1e-6


def test_a_partial_function_is_traced():
    def fun(scale, w, x):
        return jnp.mean((x @ w) * scale)

    operations = trace_operations(functools.partial(fun, 2.0), W, X)
    assert len(select(operations, "dot_general", is_backward=True)) == 1


def test_masks_that_a_program_writes_are_not_made():
    def fun(x):
        return jnp.sum(jax.nn.softmax(jnp.where(x > 0.7, x, -jnp.inf), axis=-1))

    assert (X > 0.7).any(axis=-1).all()
    assert not (X > 0.7).all()
    operations = trace_operations(fun, X)
    assert any(x.nonfinite for x in operations)
    assert first_nonfinite(operations) is None


def test_operations_of_numpy_functions_are_named_by_the_line_that_calls_them():
    def fun(x):
        return {"norm": jnp.linalg.norm(jax.nn.gelu(x))}  # both

    line = place_of(fun, "both")
    assert {x.where for x in trace_operations(fun, X)} == {line}


def test_the_multiplication_by_the_loss_scale_has_the_line_of_the_function():
    def fun(x):  # first
        return jnp.sum(x)

    operations = trace_operations(fun, X, loss_scale=8.0)
    scaling = only(operations, "mul", is_backward=True)
    assert scaling.where == place_of(fun, "first").replace("<module>", fun.__qualname__)
    assert (scaling.largest, scaling.shape) == (8.0, ())


def test_every_operation_of_a_file_has_a_line_of_this_file():
    file = inspect.getsourcefile(test_every_operation_of_a_file_has_a_line_of_this_file)
    operations = trace_operations(mean_square, Net(), ROWS)
    assert all(x.where for x in operations)
    names = {x.where.partition(":")[0] for x in operations}
    assert names <= {"modules.py", file.rpartition("/")[2]}
