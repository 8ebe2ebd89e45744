"""Programs of strangers that an earlier state of the tracer failed on."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import optax_lossscale as ols
from helpers.places import place_of
from optax_lossscale.diagnostics import (
    first_nonfinite,
    suggest_full_precision,
    trace_operations,
    watch,
)

W = jnp.eye(3) * 0.37 + 0.1
X = jnp.ones((2, 3))


def test_a_bias_that_is_added_in_a_scan_is_traced():
    def fun(bias, x):
        def advance(carry, _):
            return jnp.tanh(carry @ W + bias[None]), None

        return jnp.sum(lax.scan(advance, x, None, length=2)[0])

    operations = trace_operations(fun, jnp.ones(3), X)
    assert {"dot_general", "add", "tanh"} <= {x.primitive for x in operations}
    assert any(x.is_backward and x.primitive == "dot_general" for x in operations)


@pytest.mark.parametrize("in_jit", [False, True])
def test_what_is_only_printed_is_printed_once(in_jit, capfd):
    def fun(w, x):
        product = x @ w
        jax.debug.print("mean {}", product.mean())
        return jnp.sum(w)

    fun = jax.jit(fun) if in_jit else fun
    trace_operations(fun, W, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean") == 1
    jax.jit(watch(fun))(W, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean") == 1


def test_a_callback_that_computes_is_called_once():
    calls = []

    def double(x):
        calls.append(1)
        return np.asarray(2 * x)

    def fun(x):
        low = x.astype(jnp.float16)
        shape = jax.ShapeDtypeStruct(low.shape, low.dtype)
        return {"y": jax.pure_callback(double, shape, low)}

    (cast, callback) = trace_operations(fun, X)
    assert (cast.primitive, callback.primitive) == (
        "convert_element_type",
        "pure_callback",
    )
    assert callback.largest == callback.float32_largest == 2
    assert len(calls) == 1


def test_a_jitted_function_with_a_result_that_nobody_reads_is_traced():
    two = jax.jit(lambda w, y: (jnp.sum(w), jnp.sin(y)))
    operations = trace_operations(lambda w, x: two(w, x * 2)[0], W, X)
    assert "sin" not in {x.primitive for x in operations}
    grads, _ = jax.jit(watch(jax.grad(lambda w, x: jnp.mean(two(w, x @ w)[0]))))(W, X)
    np.testing.assert_array_equal(grads, jnp.ones((3, 3)))


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_the_gradient_of_a_look_up_in_float16_has_a_float32_twin(level):
    """Four times 30000 is 120000, which float16 does not hold."""

    def fun(table):
        rows = table[jnp.zeros(4, jnp.int32)]
        return 30000.0 * jnp.sum(rows.astype(jnp.float32))

    table = jnp.ones((3, 2), jnp.float16)
    first = first_nonfinite(trace_operations(fun, table, level=level))
    assert first.primitive == "scatter-add"
    assert first.is_backward
    assert first.float32_largest == 120_000
    assert first.headroom_bits < 0


def test_a_scatter_in_a_loop_has_a_float32_twin():
    def fun(x):
        def advance(carry, _):
            zeros = jnp.zeros((4, 3), carry.dtype)
            return carry, zeros.at[jnp.array([0, 0])].add(40000 * carry)

        return {"y": lax.scan(advance, x, None, length=2)[1]}

    first = first_nonfinite(trace_operations(fun, X.astype(jnp.float16), level="O0"))
    assert first.primitive == "scatter-add"
    assert first.float32_largest == 80_000


def test_names_that_autocast_refuses_are_not_suggested():
    """JAX moves casts out of a loop, and forgets the scopes around the loop."""

    def fun(w, x):
        with jax.named_scope("net"):

            def advance(carry, _):
                with jax.named_scope("block"):
                    return jnp.tanh(carry @ w), None

            carry, _ = lax.scan(advance, x, None, length=2)
        return jnp.sum(carry)

    names = suggest_full_precision(trace_operations(fun, W, X), 1e-5)
    assert names
    ols.autocast(fun, high=names)(W, X)


def test_threads_leave_the_classes_of_modules_as_they_were():
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    call = nnx.Linear.__call__

    def work():
        with jax.numpy_dtype_promotion("standard"):
            for _ in range(3):
                watch(lambda layer, x: jnp.mean(layer(x)))(layer, X)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert nnx.Linear.__call__ is call


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="JAX 0.7 has no references")
def test_a_reference_in_the_function_is_no_array():
    def fun(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return {"y": ref[...] + 1}

    operations = trace_operations(fun, X)
    assert operations[-1].primitive == "add"
    assert operations[-1].largest == 3


def test_a_softmax_over_a_row_that_is_masked_throughout_is_named():
    def fun(w, x):
        scores = jnp.where(jnp.array([[True], [False]]), x @ w, -jnp.inf)
        return jnp.mean(jax.nn.softmax(scores) * x)  # softmax

    first = first_nonfinite(trace_operations(fun, W, X))
    assert first.where == place_of(fun, "softmax")
    assert first.primitive == "sub"  # Minus infinity minus minus infinity.
    assert first.headroom_bits == -jnp.inf  # In float32 too.


def test_the_first_operation_of_the_forward_pass_counts_before_derivatives():
    """The factor of the derivative is computed before the quotient itself."""

    def fun(x):
        low = x.astype(jnp.float16)
        return jnp.mean(low / (low * 1e-9))  # fault

    operations = trace_operations(fun, X, level="O0")
    assert any(x.is_backward and x.made_nonfinite for x in operations)
    first = first_nonfinite(operations)
    assert not first.is_backward
    assert first.where == place_of(fun, "fault")
