"""scale and unscale, leaf by leaf."""

import concurrent.futures
import functools
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.compat import IS_JAX_0_7, enable_x64
from helpers.nodes import Foreign

STATE = ols.static_loss_scale(2.0**10).init()
NARROW = [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2]
DTYPES = [(dtype, jnp.float32) for dtype in [*NARROW, jnp.float32]]
DTYPES += [(dtype, dtype) for dtype in (jnp.float64, jnp.complex64, jnp.complex128)]


@pytest.mark.parametrize(("dtype", "expected"), DTYPES)
def test_scale_multiplies_and_unscale_divides_in_float32_or_wider(dtype, expected):
    with enable_x64(True):
        numbers = jnp.asarray([1.0, -3.0]).astype(dtype)
        for function, factor in ((ols.scale, 2.0**10), (ols.unscale, 2.0**-10)):
            result = function(numbers, STATE)
            assert result.dtype == expected
            assert result.tolist() == [factor, -3 * factor]


def test_unscale_multiplies_by_the_reciprocal_of_the_scale():
    # XLA on CPU is slower with a division. With a scale of 3 the two differ.
    grads = np.asarray([5.0, 7.0, 10.0, 14.0], np.float32)
    product = grads * (np.float32(1) / np.float32(3))
    assert np.all(product != grads / np.float32(3))
    state = ols.static_loss_scale(3.0).init()
    unscale = lambda x: ols.unscale(x, state)  # noqa: E731
    for function in (unscale, jax.jit(unscale)):
        np.testing.assert_array_equal(function(jnp.asarray(grads)), product)


@pytest.mark.parametrize("function", [ols.scale, ols.unscale])
def test_outside_jit_all_leaves_are_one_dispatch(function):
    tree = {"w": jnp.ones((2, 3)), "b": jnp.ones(3, jnp.float16)}
    program = jax.make_jaxpr(lambda tree: function(tree, STATE))(tree)
    assert len(program.eqns) == 1


def test_a_float64_gradient_is_unscaled_in_float64():
    with enable_x64(True):
        grads = jnp.asarray([5.0, 7.0], jnp.float64)
        result = ols.unscale(grads, ols.static_loss_scale(3.0).init())
    assert result.tolist() == [5 * (1 / 3), 7 * (1 / 3)]


def test_scale_accepts_a_callable_pytree_and_refuses_a_function():
    state = ols.static_loss_scale(8.0).init()
    doubled = jax.tree_util.Partial(lambda x: 2 * x, jnp.ones(2))
    assert ols.scale(doubled, state).args[0].tolist() == [8.0, 8.0]
    linear = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    assert ols.scale(linear, state).weight == 8 * linear.weight
    for function in (abs, lambda x: x, functools.partial(abs), jax.jit(abs)):
        with pytest.raises(TypeError, match="`tree` must hold arrays, got the functio"):
            ols.scale(function, state)


@pytest.mark.parametrize("members", [1, 3])
def test_a_stacked_state_has_no_scale_for_all(members):
    states = jax.vmap(lambda _: ols.dynamic_loss_scale().init())(jnp.arange(members))
    message = rf"must be a scalar, got shape \({members},\).*inside `pmap` or `vmap`"
    with pytest.raises(ValueError, match=message):
        ols.scale(1.0, states)


@pytest.mark.parametrize("scale", [2.0**15, 2.0**24])
def test_scale_does_not_overflow_a_float16_loss(scale):
    # A bug of mpx and Keras: a loss of 3 times 2**15 is infinite in float16.
    state = ols.static_loss_scale(scale).init()
    assert ols.scale(jnp.float16(3.0), state) == 3 * scale


def test_unscale_does_not_underflow_in_float16_or_at_the_largest_scale():
    # A bug of jmp: 1e-3 / 2**15 is zero in float16.
    state = ols.static_loss_scale(2.0**15).init()
    assert ols.unscale(jnp.float16(2.0**-12), state) == 2.0**-27
    # At 2**127 the reciprocal would be subnormal and every gradient zero.
    state = ols.static_loss_scale(2.0**126).init()
    assert ols.unscale(jnp.float32(2.0**100), state) == 2.0**-26


def test_scale_keeps_an_infinite_real_part_out_of_the_imaginary_part():
    value = jax.lax.complex(jnp.float32(jnp.inf), jnp.float32(-1.0))
    scaled = ols.scale(value, STATE)
    assert (scaled.real, scaled.imag) == (jnp.inf, -1024.0)


def test_unscale_does_not_touch_leaves_that_the_mask_excludes():
    tree = {"w": {"a": jnp.ones(2), "b": jnp.ones(2)}, "fp8": jnp.ones(2, jnp.float16)}
    for mask in (
        {"w": True, "fp8": False},
        {"w": np.bool_(True), "fp8": np.bool_(False)},
        lambda tree: {k: k == "w" for k in tree},
    ):
        out = ols.unscale(tree, STATE, mask=mask)
        assert out["fp8"] is tree["fp8"]
        assert out["w"]["a"].tolist() == [2.0**-10] * 2
    with pytest.raises(ValueError, match="Dict key" if IS_JAX_0_7 else "dict"):
        ols.unscale(tree, STATE, mask={"other": True})
    assert ols.unscale(tree, STATE, mask=False) == tree


def test_leaves_that_are_left_alone_are_not_taken_for_unscaled_ones():
    grads = {"w": jnp.ones(2), "seen": jnp.ones(2), "count": jnp.arange(2)}
    mask = {"w": True, "seen": False, "count": True}
    first = ols.unscale(grads, STATE, mask=mask)
    rest = {name: first[name] for name in ("seen", "count")}
    assert ols.unscale(rest, STATE)["seen"][0] == 2.0**-10


def test_gradients_may_be_unscaled_for_two_scales_one_after_the_other():
    other = ols.static_loss_scale(2.0**4).init()
    twice_scaled = ols.scale(ols.scale(jnp.ones(2), STATE), other)
    for _ in range(2):  # The same ones may be unscaled several times.
        grads = ols.unscale(ols.unscale(twice_scaled, STATE), other)
        np.testing.assert_array_equal(grads, [1.0, 1.0])
    again = ols.unscale(ols.scale(grads, STATE), STATE)
    np.testing.assert_array_equal(again, grads)
    without = ols.no_loss_scale().init()
    np.testing.assert_array_equal(ols.unscale(grads, without), grads)


@pytest.mark.slow
def test_threads_that_unscale_at_once_get_what_one_thread_gets():
    barrier = threading.Barrier(8)

    def many_steps(thread):
        tx = ols.loss_scaled(optax.sgd(1.0), ols.static_loss_scale(2.0**thread))
        params = jnp.full(3, float(thread))
        state = tx.init(params)
        barrier.wait()
        for _ in range(20):
            grads = ols.scale(jnp.full(3, 0.5), state)
            clipped = jnp.minimum(ols.unscale(grads, state), 0.25)
            updates, state = tx.update(clipped, state, params, grads_unscaled=True)
            params = optax.apply_updates(params, updates)
        return params.tolist(), int(state.loss_scale_state.step_count)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(many_steps, range(8)))
    assert results == [([thread - 5.0] * 3, 20) for thread in range(8)]


def is_weight(path, _):
    return "bias" not in jax.tree_util.keystr(path)


def test_a_mask_can_be_an_equinox_module_although_it_is_callable():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    mask = jax.tree.map_with_path(is_weight, model)
    assert callable(mask)
    unscaled = ols.unscale(model, STATE, mask=mask)
    np.testing.assert_array_equal(unscaled.weight, model.weight * 2.0**-10)
    np.testing.assert_array_equal(unscaled.bias, model.bias)


def test_a_mask_can_hold_its_bools_in_flax_variables():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    grads = jax.tree.map(lambda p: jnp.full_like(p, 4.0), nnx.state(model, nnx.Param))
    mask = jax.tree.map_with_path(is_weight, grads)
    unscaled = ols.unscale(grads, STATE, mask=mask)
    np.testing.assert_array_equal(unscaled["kernel"][...], np.full((2, 2), 2.0**-8))
    np.testing.assert_array_equal(unscaled["bias"][...], [4.0, 4.0])


def test_an_array_of_another_library_is_refused_unless_it_is_left_alone():
    state, tree = ols.static_loss_scale(8.0).init(), [jnp.ones(2), Foreign()]
    for function in (ols.scale, ols.unscale):
        with pytest.raises(TypeError, match="of JAX or NumPy, got one of type Foreign"):
            function(tree, state)
    assert ols.unscale(tree, state, mask=[True, False])[1] is tree[1]
