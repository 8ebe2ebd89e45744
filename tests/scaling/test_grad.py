"""scaled_value_and_grad and scaled_grad against jax.value_and_grad and jax.grad."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits

STATE = ols.static_loss_scale(2.0**10).init()
X = jnp.asarray([1.0, -2.0])


def loss_fn(x, y=1.0):
    return jnp.sum(x**2) * y


def has_note_on_arguments(error):
    return "holds no floating array" in "".join(getattr(error, "__notes__", []))


def test_the_loss_is_true_and_the_gradients_are_scaled():
    loss, grads = ols.scaled_value_and_grad(loss_fn, STATE)(X)
    assert loss == 5.0
    assert grads.tolist() == [2.0 * 1024, -4.0 * 1024]
    assert_same_bits(ols.scaled_grad(loss_fn, STATE)(X), grads)


def test_auxiliary_output_is_returned_where_jax_returns_it():
    def with_aux(x):
        return loss_fn(x), {"n": x.size}

    value, _ = ols.scaled_value_and_grad(with_aux, STATE, has_aux=True)(X)
    assert value == (5.0, {"n": 2})
    grads, aux = ols.scaled_grad(with_aux, STATE, has_aux=True)(X)
    assert (grads.tolist(), aux) == ([2048.0, -4096.0], {"n": 2})


def test_argnums_and_keyword_arguments_pass_through():
    def product(x, y, *, z):
        return x * y * z

    loss, grads = ols.scaled_value_and_grad(product, STATE, (0, 1))(2.0, 3.0, z=4.0)
    assert (loss, *grads) == (24.0, 12.0 * 1024, 8.0 * 1024)
    for argnums in (1, -1):
        assert ols.scaled_grad(product, STATE, argnums)(2.0, 3.0, z=4.0) == 8.0 * 1024
    _, grad = ols.scaled_grad(product, STATE, iter((0, 1)))(2.0, 3.0, z=4.0)
    assert grad == 8.0 * 1024
    swapped = ols.scaled_grad(product, STATE, (1, 0))(2.0, 3.0, z=4.0)
    assert swapped == (8.0 * 1024, 12.0 * 1024)


def test_jax_keyword_arguments_pass_through():
    holomorphic = ols.scaled_grad(lambda z: z**2, STATE, holomorphic=True)
    assert holomorphic(jnp.complex64(1 + 1j)) == 2048 + 2048j
    params = {"w": jnp.ones(2), "steps": jnp.arange(2)}
    grads = ols.scaled_grad(lambda p: p["w"].sum(), STATE, allow_int=True)(params)
    assert grads["steps"].dtype == jax.dtypes.float0
    grads = ols.scaled_grad(lambda p: p["w"].sum(), STATE, allow_int=False)(params)
    assert grads["steps"] is None
    value_and_grad = ols.scaled_value_and_grad(lambda z: z**2, STATE, holomorphic=True)
    assert value_and_grad(jnp.complex64(1 + 1j)) == (2j, 2048 + 2048j)


def test_the_reported_loss_keeps_its_dtype_and_cannot_overflow():
    state = ols.static_loss_scale(2.0**15).init()
    loss, grads = ols.scaled_value_and_grad(lambda x: x * 60000, state)(jnp.float16(1))
    assert (loss.dtype, float(loss)) == (jnp.float16, 60000.0)
    assert jnp.isinf(grads)  # 60000 * 2**15 exceeds float16.


def test_a_float16_loss_allows_a_scale_of_2_to_the_15_and_a_float32_loss_more():
    def grads(exponent, dtype):
        state = ols.static_loss_scale(2.0**exponent).init()
        x = jnp.ones(16, jnp.float16)
        return ols.scaled_grad(lambda x: x.astype(dtype).mean(), state)(x)

    assert grads(15, jnp.float16).tolist() == [2.0**11] * 16
    assert jnp.isinf(grads(16, jnp.float16)).all()
    assert grads(17, jnp.float32).tolist() == [2.0**13] * 16


@pytest.mark.parametrize(
    ("fun", "has_aux"),
    [
        (lambda x: x, False),
        (lambda x: jnp.sum(x).astype(jnp.int32), False),
        (lambda x: x.sum(), True),
        (lambda x: (x.sum(), x, x), True),
        (lambda x: (x, None), True),
    ],
    ids=["vector", "int", "no pair", "triple", "vector with aux"],
)
def test_a_loss_of_the_wrong_kind_raises_the_error_of_jax(fun, has_aux):
    with pytest.raises(TypeError) as theirs:  # noqa: PT011
        jax.value_and_grad(fun, has_aux=has_aux)(X)
    message = str(theirs.value)[:60]  # The values come later, and are scaled.
    with pytest.raises(TypeError, match="^" + re.escape(message)) as ours:
        ols.scaled_value_and_grad(fun, STATE, has_aux=has_aux)(X)
    assert not has_note_on_arguments(ours.value)


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_results_without_has_aux_are_refused_with_a_hint(kind):
    message = rf"scalar loss, got a {kind.__name__} of length 2\. .*`has_aux=True`"
    with pytest.raises(TypeError, match=message):
        ols.scaled_grad(lambda x: kind([loss_fn(x), x]), STATE)(X)


def test_a_loss_in_place_of_its_function_is_refused():
    message = r"`fun` must be a function.*\(loss_fn, state\)"
    with pytest.raises(TypeError, match=message):
        ols.scaled_value_and_grad(jnp.float32(3.0), STATE)
    with pytest.raises(ValueError, match="must hold a LossScaleState"):
        ols.scaled_grad(loss_fn, {"no": "state"})


def test_name_and_docstring_of_the_function_are_kept():
    def half_square(x):
        """Half the sum of the squares."""
        return 0.5 * jnp.sum(x**2)

    for transform in (ols.scaled_grad, ols.scaled_value_and_grad):
        assert transform(half_square, STATE).__name__ == "half_square"
        assert transform(half_square, STATE).__doc__ == "Half the sum of the squares."
    assert ols.scaled_grad(loss_fn, STATE).__name__ == "loss_fn"
    assert ols.scaled_grad(functools.partial(loss_fn, y=2.0), STATE)(X)[0] == 4096.0


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f, jax.vmap])
def test_unscaled_gradients_have_the_bits_of_those_of_jax(transform):
    def loss_fn(x):
        return jnp.sum(jnp.tanh(x) ** 3)

    x = jnp.linspace(-2, 2, 32)
    scaled = transform(lambda x: ols.scaled_grad(loss_fn, STATE)(x))(x)
    assert_same_bits(ols.unscale(scaled, STATE), transform(jax.grad(loss_fn))(x))


def test_second_derivatives_of_the_reported_loss_are_true():
    def reported(x):
        return ols.scaled_value_and_grad(lambda x: x**3, STATE)(x)[0]

    def reported_with_aux(x):
        fun = lambda x: (x**3, x**3)  # noqa: E731
        return sum(ols.scaled_value_and_grad(fun, STATE, has_aux=True)(x)[0])

    assert jax.grad(jax.grad(reported))(2.0) == 12.0
    assert jax.grad(jax.grad(reported_with_aux))(2.0) == 24.0


@pytest.mark.parametrize(
    "argnums", [1, -1, (1,), [-1], iter([1]), range(1, 2), np.asarray([1])]
)
def test_argnums_name_the_parameters_and_other_arguments_stay_what_they_are(argnums):
    other, params = {"x": jnp.ones(2), "n": 3}, {"w": jnp.ones(2), "count": 3}

    def loss(seen, params):
        assert seen is other
        return jnp.sum(params["w"] ** params["count"])

    grad_fn = ols.scaled_grad(loss, STATE, argnums)
    for _ in range(2):
        (grads,) = jax.tree.leaves(grad_fn(other, params))  # A count has none.
        assert grads.tolist() == [3 * 1024.0] * 2


def test_argnums_may_be_counted_from_behind():
    params = {"w": jnp.ones(2), "count": 3}
    grad_fn = ols.scaled_grad(lambda p, x: jnp.sum(p["w"] * x), STATE, argnums=-2)
    (grads,) = jax.tree.leaves(grad_fn(params, 2.0))
    assert grads.tolist() == [2 * 1024.0] * 2


class Result(NamedTuple):
    loss: jax.Array
    aux: int


@pytest.mark.parametrize("pair", [lambda *pair: [*pair], Result])
def test_a_list_of_loss_and_auxiliary_data_is_taken_for_a_pair(pair):
    grad_fn = ols.scaled_value_and_grad(lambda x: pair(loss_fn(x), 2), STATE, 0, True)
    value, grads = grad_fn(X)
    assert value == (5.0, 2)
    assert grads.tolist() == [2048.0, -4096.0]


def test_an_error_of_the_function_has_no_note_on_arguments_and_keeps_its_cause():
    def broken(x):
        raise TypeError("of its own") from KeyError("x")

    with pytest.raises(TypeError, match="of its own") as error:
        ols.scaled_grad(broken, STATE)(X)
    assert not has_note_on_arguments(error.value)
    assert isinstance(error.value.__cause__, KeyError)
