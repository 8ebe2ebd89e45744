"""scale and unscale, leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compat import enable_x64

STATE = ols.static_loss_scale(2.0**10).init()
NARROW = [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2]


@pytest.mark.parametrize("function", [ols.scale, ols.unscale])
@pytest.mark.parametrize("dtype", [*NARROW, jnp.float32])
def test_scale_and_unscale_return_float32_for_float32_and_narrower_dtypes(
    function, dtype
):
    assert function(jnp.ones(2, dtype), STATE).dtype == jnp.float32


@pytest.mark.parametrize("function", [ols.scale, ols.unscale])
def test_scale_and_unscale_keep_float64_and_complex(function):
    with enable_x64(True):
        for dtype in (jnp.float64, jnp.complex64, jnp.complex128):
            assert function(jnp.ones(2, dtype), STATE).dtype == dtype


def test_scale_multiplies():
    assert ols.scale(jnp.asarray([1.0, -3.0]), STATE).tolist() == [1024.0, -3072.0]


def test_unscale_divides():
    assert ols.unscale(jnp.asarray([1.0, -3.0]), STATE).tolist() == [
        2.0**-10,
        -3 * 2.0**-10,
    ]


def test_unscale_multiplies_by_the_reciprocal_of_the_scale():
    # XLA on CPU is slower with a division. With a scale of 3 the two differ.
    grads = np.asarray([5.0, 7.0, 10.0, 14.0], np.float32)
    product = grads * (np.float32(1) / np.float32(3))
    assert np.all(product != grads / np.float32(3))
    state = ols.static_loss_scale(3.0).init()
    unscale = lambda x: ols.unscale(x, state)  # noqa: E731
    for function in (unscale, jax.jit(unscale)):
        np.testing.assert_array_equal(function(jnp.asarray(grads)), product)


def test_scale_accepts_a_callable_pytree_and_refuses_a_function():
    state = ols.static_loss_scale(8.0).init()
    doubled = jax.tree_util.Partial(lambda x: 2 * x, jnp.ones(2))
    assert ols.scale(doubled, state).args[0].tolist() == [8.0, 8.0]
    with pytest.raises(TypeError, match="`tree` must hold arrays, got the function"):
        ols.scale(lambda x: x, state)


def test_scale_accepts_a_python_number():
    assert ols.scale(3.0, STATE) == 3072.0


def test_scale_does_not_overflow_a_float16_loss():
    # A bug of mpx and Keras: a loss of 3 times 2**15 is infinite in float16.
    state = ols.static_loss_scale(2.0**15).init()
    assert ols.scale(jnp.float16(3), state) == 98304.0
    for scale in (2.0**15, 2.0**16, 2.0**24):
        state = ols.static_loss_scale(scale).init()
        assert ols.scale(jnp.float16(3.0), state) == 3 * scale
    scaled = ols.scale(jnp.ones(1, jnp.float16), state)
    assert (scaled.dtype, scaled.tolist()) == (jnp.float32, [2.0**24])


def test_unscale_does_not_underflow_in_float16():
    # A bug of jmp: 1e-3 / 2**15 is zero in float16.
    state = ols.static_loss_scale(2.0**15).init()
    for scaled, expected in ((2.0**-10, 2.0**-25), (2.0**-12, 2.0**-27)):
        assert ols.unscale(jnp.float16(scaled), state) == expected


def test_unscale_at_the_largest_scale_does_not_flush_to_zero():
    # At 2**127 the reciprocal would be subnormal and every gradient zero.
    state = ols.static_loss_scale(2.0**126).init()
    assert ols.unscale(jnp.float32(2.0**100), state) == 2.0**-26


def test_scale_keeps_an_infinite_real_part_out_of_the_imaginary_part():
    value = jax.lax.complex(jnp.float32(jnp.inf), jnp.float32(-1.0))
    scaled = ols.scale(value, STATE)
    assert (scaled.real, scaled.imag) == (jnp.inf, -1024.0)


@pytest.mark.parametrize("function", [ols.scale, ols.unscale])
def test_leaves_that_are_not_floating_pass_through(function):
    tree = {
        "int": jnp.arange(3),
        "bool": jnp.asarray([True]),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
        "none": None,
        "masked": optax.MaskedNode(),
        "number": 3,
    }
    out = function(tree, STATE)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert all(
        a is b for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True)
    )


def test_unscale_does_not_touch_leaves_that_the_mask_excludes():
    tree = {"w": {"a": jnp.ones(2), "b": jnp.ones(2)}, "fp8": jnp.ones(2, jnp.float16)}
    for mask in ({"w": True, "fp8": False}, lambda tree: {k: k == "w" for k in tree}):
        out = ols.unscale(tree, STATE, mask=mask)
        assert out["fp8"] is tree["fp8"]
        assert out["w"]["a"].tolist() == [2.0**-10] * 2


def test_unscale_refuses_a_mask_of_another_tree_structure():
    with pytest.raises(ValueError, match="dict"):
        ols.unscale({"a": jnp.ones(2)}, STATE, mask={"b": True})


def twice(grads):
    return ols.unscale(ols.unscale(grads, STATE), STATE)


def updated(grads):
    tx = ols.loss_scaled(optax.sgd(0.1))
    opt_state = tx.init(grads)
    return tx.update(ols.unscale(grads, opt_state), opt_state)[0]


@pytest.mark.parametrize("step", [twice, updated])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_gradients_that_unscale_returned_are_not_unscaled_again(step, jit):
    message = r"got an array that `unscale` has returned.*grads_unscaled=True"
    with pytest.raises(ValueError, match=message):
        jit(step)({"w": jnp.ones(2), "b": jnp.ones(1)})


def test_the_same_scaled_gradients_may_be_unscaled_several_times():
    grads = jnp.ones(2)
    for _ in range(2):
        assert ols.unscale(grads, STATE)[0] == 2.0**-10


def test_leaves_that_are_left_alone_are_not_taken_for_unscaled_ones():
    grads = {"w": jnp.ones(2), "seen": jnp.ones(2), "count": jnp.arange(2)}
    mask = {"w": True, "seen": False, "count": True}
    first = ols.unscale(grads, STATE, mask=mask)
    rest = {name: first[name] for name in ("seen", "count")}
    assert ols.unscale(rest, STATE)["seen"][0] == 2.0**-10


def test_what_was_computed_from_unscaled_gradients_may_be_scaled_and_unscaled():
    unscaled = ols.unscale(jnp.ones(2), STATE)
    again = ols.unscale(ols.scale(unscaled, STATE), STATE)
    np.testing.assert_array_equal(again, unscaled)


def test_gradients_may_be_unscaled_for_two_scales_one_after_the_other():
    other = ols.static_loss_scale(2.0**4).init()
    twice_scaled = ols.scale(ols.scale(jnp.ones(2), STATE), other)
    grads = ols.unscale(ols.unscale(twice_scaled, STATE), other)
    np.testing.assert_array_equal(grads, [1.0, 1.0])


def test_without_a_loss_scale_there_is_nothing_to_unscale_twice():
    state = ols.no_loss_scale().init()
    grads = ols.unscale(ols.unscale(jnp.ones(2), state), state)
    np.testing.assert_array_equal(grads, [1.0, 1.0])
