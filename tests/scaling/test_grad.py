"""`scaled_value_and_grad`: the true loss and scaled gradients, of any kind of model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.compare import assert_same_bits, assert_within_ulp
from helpers.inner import standard_promotion
from helpers.steps import eager_and_jitted

SCALE = 2.0**10
STATE = ols.static_loss_scale(SCALE).init()
X = jnp.arange(8.0).reshape(4, 2) / 4


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2)


PARAMS = {"w": jnp.asarray([[0.5, -1.0], [2.0, 0.25]]), "b": jnp.asarray([0.1, -0.2])}


def scaled(grads):
    return jax.tree.map(lambda g: g * SCALE, grads)


@eager_and_jitted
def test_the_loss_is_true_and_the_gradients_are_scaled(run):
    value, grads = run(ols.scaled_value_and_grad(loss_fn, STATE))(PARAMS, X)
    expected = run(jax.value_and_grad(loss_fn))(PARAMS, X)
    assert_same_bits((value, grads), (expected[0], scaled(expected[1])))
    by_name = run(ols.scaled_grad(loss_fn, STATE))(PARAMS, x=X)
    assert_same_bits(by_name, grads)


def test_auxiliary_data_is_returned_where_jax_returns_it():
    def fun(params, x):
        return loss_fn(params, x), {"x": x, "name": 3}

    (value, aux), grads = ols.scaled_value_and_grad(fun, STATE, has_aux=True)(PARAMS, X)
    assert value == loss_fn(PARAMS, X)
    assert_same_bits(aux, {"x": X, "name": 3})
    again, same = ols.scaled_grad(fun, STATE, has_aux=True)(PARAMS, X)
    assert_same_bits((again, same), (grads, aux))
    assert_same_bits(grads, scaled(jax.grad(loss_fn)(PARAMS, X)))


def test_a_float16_loss_keeps_its_dtype_and_cannot_overflow():
    # 3 * 2**15 is infinite in float16.
    state = ols.static_loss_scale(2.0**15).init()
    value, grad = ols.scaled_value_and_grad(lambda x: x * x, state)(jnp.float16(1.5))
    assert (value.dtype, float(value)) == (jnp.float16, 2.25)
    assert grad == np.inf  # The gradient itself is 3 * 2**15 in float16.
    value, grad = ols.scaled_value_and_grad(lambda x: x / 4, state)(jnp.float16(16.0))
    assert (float(value), float(grad)) == (4.0, 2.0**13)


def test_a_float16_loss_needs_a_scale_of_at_most_two_to_the_15():
    x = jnp.float16(16.0)
    for scale, is_finite in ((2.0**15, True), (2.0**16, False)):
        state = ols.static_loss_scale(scale).init()
        grad = ols.scaled_grad(lambda x: x / 4, state)(x)
        assert jnp.isfinite(grad) == is_finite


def test_small_gradients_survive_in_float16():
    def loss(w, x):
        return jnp.sum((w.astype(jnp.float16) * x).astype(jnp.float32))

    w, x = jnp.float32(1.0), jnp.float16(2.0**-14)
    tiny = jnp.float32(2.0**-14)
    fun = lambda w: loss(w, x) * tiny  # noqa: E731
    assert jax.grad(fun)(w) == 0.0  # 2**-28 is zero in float16.
    state = ols.static_loss_scale(2.0**15).init()
    assert ols.unscale(ols.scaled_grad(fun, state)(w), state) == 2.0**-28


@pytest.mark.parametrize("argnums", [1, -1, (0, 2), [1]])
def test_argnums_name_the_arguments_as_in_jax(argnums):
    def fun(a, b, c):
        return a * b + b * c**2

    args = jnp.float32(2.0), jnp.float32(3.0), jnp.float32(5.0)
    named = tuple(argnums) if isinstance(argnums, list) else argnums
    expected = jax.grad(fun, named)(*args)
    assert_same_bits(ols.scaled_grad(fun, STATE, argnums)(*args), scaled(expected))


def test_what_is_no_floating_array_is_held_fixed():
    params = {
        "w": jnp.float32(3.0), "steps": jnp.arange(2), "flag": True, "n": 2,
        "key": jax.random.key(0), "name": "net", "none": None, "rate": 0.5,
    }  # fmt: skip
    grads = ols.scaled_grad(lambda p: p["w"] * p["n"] * p["rate"], STATE)(params)
    # Python floats in a dict are parameters, as in JAX.
    assert {name: float(g) for name, g in grads.items() if g is not None} == {
        "w": SCALE, "rate": 6 * SCALE,
    }  # fmt: skip
    tx = ols.loss_scaled(optax.sgd(0.5), ols.static_loss_scale(SCALE))
    numbers = {name: params[name] for name in ("w", "steps", "none")}
    grads = {name: grads[name] for name in numbers}
    updates, _ = tx.update(grads, tx.init(numbers), numbers)
    moved = optax.apply_updates(numbers, updates)
    assert moved["w"] == 2.5
    assert_same_bits(moved["steps"], params["steps"])


def test_second_derivatives_of_the_reported_loss_are_true():
    value = lambda x: ols.scaled_value_and_grad(lambda x: x**3, STATE)(x)[0]  # noqa: E731
    assert jax.grad(jax.grad(value))(jnp.float32(2.0)) == 12.0


@pytest.mark.parametrize(
    ("fun", "settings", "message"),
    [
        (lambda x: x, {}, "Gradient only defined for scalar-output"),
        (lambda x: (x.sum(), x), {}, "pass `has_aux=True`"),
        (lambda x: x.sum(), {"has_aux": True}, "two-element tuple"),
    ],
)
def test_a_loss_of_the_wrong_kind_is_refused(fun, settings, message):
    with pytest.raises(TypeError, match=message):
        ols.scaled_grad(fun, STATE, **settings)(jnp.ones(2))


def test_a_loss_in_place_of_its_function_is_refused():
    with pytest.raises(TypeError, match="`fun` must be a function, got"):
        ols.scaled_value_and_grad(jnp.float32(1.0), STATE)
    with pytest.raises(ValueError, match="must hold a LossScaleState, got none"):
        ols.scaled_value_and_grad(loss_fn, optax.sgd(0.1).init(PARAMS))


# --- Modules of NNX ------------------------------------------------------------------


class Net(nnx.Module):
    """Each call moves the mean and the variance, and counts the dropout masks."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.lora = nnx.LoRAParam(jnp.ones(2))

    def __call__(self, x):
        with standard_promotion():
            return self.dropout(self.norm(self.linear(x))) * self.lora[...][None]


def net_loss(model, x):
    return jnp.mean(model(x) ** 2)


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree) if x.dtype == jnp.float32]


def test_a_module_is_differentiated_and_changed_as_by_nnx():
    def fun(model, x):
        return net_loss(model, x), {"out": x}

    ours, theirs = Net(), Net()
    grad_fn = ols.scaled_value_and_grad(fun, STATE, has_aux=True)
    (value, aux), grads = nnx.jit(grad_fn)(ours, X)
    assert_same_bits(aux["out"], X)
    expected_value, expected = nnx.jit(nnx.value_and_grad(net_loss))(theirs, X)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for one, other in zip(arrays(grads), arrays(expected), strict=True):
        np.testing.assert_allclose(one, other * SCALE, rtol=1e-4, atol=1e-3)
    # Its batch statistics and its dropout count were moved in place.
    assert (ours.norm.mean[...] != 0).all()
    for one, other in zip(
        arrays(nnx.state(ours)), arrays(nnx.state(theirs)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert ours.dropout.rngs.count[...] == theirs.dropout.rngs.count[...] == 1


def test_an_optimizer_names_the_variables_that_are_differentiated():
    model = Net()
    tx = ols.loss_scaled(optax.sgd(0.1), ols.static_loss_scale(SCALE))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    kernel, lora = model.linear.kernel[...], model.lora[...]

    @nnx.jit
    def step(model, optimizer):
        grads = ols.scaled_grad(net_loss, optimizer)(model, X)
        optimizer.update(model, grads)
        return grads

    with standard_promotion():
        grads = step(model, optimizer)
    assert [*nnx.to_flat_state(grads).paths] == [("lora",)]
    assert_same_bits(model.linear.kernel[...], kernel)
    assert (model.lora[...] != lora).any()


# --- Modules of Equinox --------------------------------------------------------------


class EqxNet(eqx.Module):
    linear: eqx.nn.Linear
    steps: jax.Array
    rate: float
    activation: callable = eqx.field(static=True)

    def __call__(self, x):
        return self.activation(self.rate * self.linear(x))


def test_an_equinox_module_is_differentiated_and_trained_as_by_equinox():
    model = EqxNet(
        eqx.nn.Linear(2, 1, key=jax.random.key(0)), jnp.arange(2), 0.5, jnp.tanh
    )

    def fun(model, x):
        with standard_promotion():
            return jnp.mean(jax.vmap(model)(x) ** 2)

    grads = eqx.filter_jit(ols.scaled_grad(fun, STATE))(model, X)
    expected = eqx.filter_jit(eqx.filter_grad(fun))(model, X)
    assert_within_ulp(grads.linear, scaled(expected.linear))
    assert grads.steps is None
    assert grads.rate is None  # A Python float in a module is a setting.
    tx = ols.loss_scaled(optax.sgd(0.5), ols.static_loss_scale(SCALE))
    updates, _ = eqx.filter_jit(tx.update)(grads, tx.init(model), model)
    moved = eqx.apply_updates(model, updates)
    assert moved.rate == 0.5
    assert_same_bits(moved.steps, model.steps)
    right = model.linear.bias - 0.5 * expected.linear.bias
    assert_within_ulp(moved.linear.bias, right)
