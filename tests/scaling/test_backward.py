"""`scaled_backward`: scaled on the way, for whoever differentiates the function."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits, assert_within_ulp
from helpers.inner import standard_promotion

SCALE = 2.0**12
PARAMS = {"w": jnp.asarray([[0.5, -1.0], [2.0, 0.25]]), "b": jnp.asarray([0.1, -0.2])}
X = jnp.arange(8.0).reshape(4, 2) / 4


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2)


INSIDE = ols.scaled_backward(loss_fn, SCALE)


def test_value_and_gradients_are_the_true_ones_to_the_bit():
    expected = jax.value_and_grad(loss_fn)(PARAMS, X)
    assert_same_bits(jax.value_and_grad(INSIDE)(PARAMS, X), expected)
    assert_same_bits(INSIDE(PARAMS, X), expected[0])
    assert inspect.signature(INSIDE) == inspect.signature(loss_fn)


def test_a_parameter_and_a_cotangent_may_be_numbers_of_python():
    fun = ols.scaled_backward(lambda x: x**2, 2.0**10)
    assert jax.vjp(fun, 3.0)[1](1.0) == (6.0,)


def test_operations_inside_the_function_see_scaled_cotangents():
    seen = []

    @jax.custom_vjp
    def look(x):
        return x

    look.defvjp(lambda x: (x, None), lambda _, c: (seen.append(float(c)) or c,))
    fun = ols.scaled_backward(lambda x: look(x * 3.0), SCALE)
    assert jax.grad(lambda x: 2.0 * fun(x))(jnp.float32(1.0)) == 6.0
    assert seen == [2.0 * SCALE]


def test_where_float16_overflows_the_gradient_is_infinite_and_the_step_skipped():
    def fun(w):
        return jnp.sum((w.astype(jnp.float16) * 64).astype(jnp.float32))

    tx = ols.loss_scaled(optax.sgd(0.1), ols.static_loss_scale(1.0))
    w = jnp.ones(2)
    grads = jax.grad(ols.scaled_backward(fun, SCALE))(w)
    assert jnp.isinf(grads).all()
    updates, state = tx.update(grads, tx.init(w), w)
    assert not updates.any()
    assert state.loss_scale_state.total_notfinite == 1


def test_the_scale_may_be_a_traced_number_or_in_a_state():
    @jax.jit
    def grads(state):
        scales = state, {"opt": state}, ols.get_loss_scale(state)
        inside = [ols.scaled_backward(loss_fn, scale) for scale in scales]
        return [jax.grad(fun)(PARAMS, X) for fun in (*inside, loss_fn)]

    *actual, expected = grads(ols.loss_scaled(optax.sgd(0.1)).init(PARAMS))
    for each in actual:
        assert_within_ulp(each, expected)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_each_member_of_an_ensemble_may_have_a_scale_of_its_own(axis):
    def loss(scale, x):
        return ols.scaled_backward(lambda x: jnp.sum(x**2), scale)(x)

    def total(x):
        return jax.vmap(loss, (0, axis))(jnp.asarray([2.0**4, 2.0**8]), x).sum()

    x = jnp.asarray([[1.0, 2.0], [8.0, 16.0]])
    if axis is None:  # Both members have the same array.
        assert jax.grad(total)(x[0]).tolist() == [4.0, 8.0]
    else:
        assert jax.grad(total)(x).tolist() == [[2.0, 4.0], [16.0, 32.0]]


def test_every_argument_and_every_result_is_treated_alike():
    def fun(params, x):
        return {"loss": loss_fn(params, x), "aux": (x * 2.0, jnp.arange(2), "text")}

    def loss(fun):
        def of(params, x):
            result = fun(params, x)
            return result["loss"] + jnp.sum(result["aux"][0] ** 2)

        return of

    inside = ols.scaled_backward(fun, SCALE)
    for argnums in (0, 1, (0, 1)):
        expected = jax.grad(loss(fun), argnums)(PARAMS, X)
        assert_same_bits(jax.grad(loss(inside), argnums)(PARAMS, X), expected)
    assert inside(PARAMS, X)["aux"][2] == "text"
    by_name = jax.grad(lambda params: inside(params=params, x=X)["loss"])
    assert_same_bits(by_name(PARAMS), jax.grad(loss_fn)(PARAMS, X))


def test_operations_after_the_function_see_true_cotangents():
    # With the largest scale it would overflow.
    inside = ols.scaled_backward(lambda x: 2.0**-100 * x, 2.0**126)
    fun = lambda x: inside(x) + inside(x) + 8.0 * x  # noqa: E731
    assert jax.grad(fun)(jnp.float32(1.0)) == 8.0


def by_shard_map(fun):
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("i")), "out_specs": P()}
    grad = lambda p, x: jax.lax.pmean(jax.grad(fun)(p, x), "i")  # noqa: E731
    return jax.shard_map(grad, mesh=mesh, **specs)(PARAMS, X)


def by_scan(fun):
    def step(params, x):
        grads = jax.grad(fun)(params, x[None])
        return jax.tree.map(lambda p, g: p - g, params, grads), None

    return jax.lax.scan(step, PARAMS, X)[0]


TRANSFORMATIONS = {
    "jit": lambda fun: jax.grad(jax.jit(fun))(PARAMS, X),
    "checkpoint": lambda fun: jax.grad(jax.checkpoint(fun))(PARAMS, X),
    "vmap": lambda fun: jax.vmap(jax.grad(fun), (None, 0))(PARAMS, X[:, None]),
    "gradient of vmap": lambda fun: jax.grad(
        lambda p: jax.vmap(fun, (None, 0))(p, X[:, None]).sum()
    )(PARAMS),
    "scan": by_scan,
    "shard_map": by_shard_map,
    "autocast": lambda fun: jax.grad(ols.autocast(fun))(PARAMS, X),
}


def test_the_gradient_is_the_true_one_under_every_transformation():
    @jax.jit
    def gradients():
        return {
            name: (run(INSIDE), run(loss_fn)) for name, run in TRANSFORMATIONS.items()
        }

    for name, (actual, expected) in gradients().items():
        assert_close(actual, expected, name)


# --- Modules of NNX ------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        with standard_promotion():
            return self.norm(self.linear(x))


def net_loss(model, x):
    return jnp.mean(model(x) ** 2 * jnp.arange(3.0)[None])


NET_INSIDE = ols.scaled_backward(net_loss, SCALE)


def assert_close(actual, expected, name=""):
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_module_of_nnx_is_differentiated_and_changed_as_without():
    def run(fun):
        model = Net()
        kernel = model.linear.kernel
        result = nnx.jit(nnx.value_and_grad(fun))(model, X)
        assert model.linear.kernel is kernel
        assert (model.norm.mean[...] != 0).all()
        return result, nnx.state(model)

    assert_close(run(NET_INSIDE), run(net_loss))


def test_a_mode_that_the_function_sets_is_refused():
    def fun(model):
        model.eval()
        return jnp.mean(model(X))

    with pytest.raises(ValueError, match=r"would be lost: 'norm.use_running_average'"):
        ols.scaled_backward(fun, 2.0**10)(Net())


class Weight(nnx.Module):
    def __init__(self, value=3.0):
        self.w = nnx.Param(jnp.float32(value))
        self.seen = nnx.BatchStat(jnp.float32(1.0))

    def __call__(self, x):
        self.seen[...] = self.seen[...] * self.w[...]
        return self.w[...] ** 2 * x


class Halved(Weight):
    """It sets its own parameter, as `nnx.SpectralNorm` does."""

    def __call__(self, x):
        self.w[...] = self.w[...] / 2
        return self.w[...] * x


TWO, ONE = jnp.float32(2.0), jnp.float32(1.0)


def test_a_parameter_that_the_function_itself_sets_reaches_the_module():
    model = Halved()
    assert ols.scaled_backward(lambda model: model(TWO), SCALE)(model) == 3.0
    assert model.w[...] == 1.5


def through_two_calls(fun):
    def loss(model):
        return fun(model, ONE) + fun(model, TWO) + model.w[...]

    return nnx.grad(loss)(Weight())["w"][...]  # 6 w + 1.


def through_what_it_changes(fun):
    def loss(model):
        fun(model, ONE)
        return model.seen[...]

    return nnx.grad(loss)(Weight())["w"][...]  # 1.


def through_a_tree_of_two(fun):
    def loss(models):
        return fun({"a": models[0]}["a"], ONE) * fun(models[1], ONE)

    return nnx.grad(loss)([Weight(), Weight(1.0)])[1]["w"][...]  # 2 w of 9 w**2.


def through_a_name(fun):
    return nnx.grad(lambda m: fun(x=ONE, model=m))(Weight())["w"][...]  # 2 w.


def through_vmap(fun):
    def loss(model):
        return nnx.vmap(fun, in_axes=(None, 0))(model, jnp.arange(3.0)).sum()

    return nnx.grad(loss)(Weight())["w"][...]  # 3 * 2 w.


THROUGH = {
    through_two_calls: 19.0,
    through_what_it_changes: 1.0,
    through_a_tree_of_two: 18.0,
    through_a_name: 6.0,
    through_vmap: 18.0,
}


@pytest.mark.parametrize("gradient", THROUGH)
def test_every_gradient_of_a_module_is_the_true_one(gradient):
    def fun(model, x):
        # A module whose variables change is not broadcast.
        return model.w[...] ** 2 * x if gradient is through_vmap else model(x)

    assert gradient(fun) == THROUGH[gradient]
    assert gradient(ols.scaled_backward(fun, SCALE)) == THROUGH[gradient]


def test_a_module_that_is_not_differentiated_keeps_what_the_function_changes():
    model = Weight()
    inside = ols.scaled_backward(lambda x, model: model(x), SCALE)
    assert nnx.grad(inside)(ONE, model) == 9.0
    assert model.seen[...] == 3.0
    assert inside(ONE, model) == 9.0
    assert model.seen[...] == 9.0


def test_lora_trains_beside_half_precision_weights_that_are_held_fixed():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    model = nnx.LoRA(2, 2, 3, base_module=layer, rngs=nnx.Rngs(1))
    with standard_promotion():
        grads = [
            nnx.jit(nnx.grad(fun, argnums=nnx.DiffState(0, nnx.LoRAParam)))(model, X)
            for fun in (NET_INSIDE, net_loss)
        ]
    assert_close(*grads)


# --- What it cannot give -------------------------------------------------------------


W = jnp.ones(2)
REFUSED = {
    "jvp": lambda fun: jax.jvp(fun, (W, W), (W, W)),
    "a gradient through a gradient": lambda fun: jax.grad(
        lambda w: jnp.sum(jax.grad(fun, 1)(w, W))
    )(W),
    "a hessian": lambda fun: jax.hessian(fun)(W, W),
}


@pytest.mark.parametrize("jit", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_second_derivative_and_forward_mode_are_refused(name, jit):
    # They would be too small by the scale.
    inside = ols.scaled_backward(lambda w, x: jnp.sum(w**2 * x), SCALE)
    with pytest.raises(TypeError, match="differentiated last"):
        REFUSED[name](jit(inside))


def test_around_the_whole_loss_a_gradient_penalty_is_right():
    def loss(params, x):
        return loss_fn(params, x) + jnp.sum(jax.grad(loss_fn, 1)(params, x) ** 2)

    expected = jax.grad(loss)(PARAMS, X)
    assert_close(jax.grad(ols.scaled_backward(loss, SCALE))(PARAMS, X), expected)


def test_parameters_below_float32_are_refused_when_they_are_differentiated():
    # Their gradients would be flushed when the scale is divided out.
    def fun(w, x):
        return jnp.sum(w.astype(jnp.float32) * x.astype(jnp.float32))

    inside, x = ols.scaled_backward(fun, SCALE), jnp.float16([1.0, 3.0])
    for dtype in (jnp.float16, jnp.bfloat16):
        w = jnp.ones(2, dtype)
        assert inside(w, x) == 4.0
        with pytest.raises(TypeError, match="float32"):
            jax.grad(inside)(w, x)
    # Data may have any dtype.
    assert jax.grad(inside)(jnp.ones(2), x).tolist() == [1.0, 3.0]


# --- In a trainer --------------------------------------------------------------------


def test_a_trainer_logs_true_numbers_and_the_scale_follows_its_gradients():
    tx = ols.loss_scaled(
        optax.sgd(0.5), ols.dynamic_loss_scale(SCALE), grads_unscaled=True
    )

    @jax.jit
    def step(params, state, x):
        fun = ols.scaled_backward(loss_fn, state)
        loss, grads = jax.value_and_grad(fun)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state, loss = step(PARAMS, tx.init(PARAMS), X)
    np.testing.assert_allclose(loss, loss_fn(PARAMS, X), rtol=1e-6)
    expected = jax.grad(loss_fn)(PARAMS, X)["b"]
    np.testing.assert_allclose(params["b"], PARAMS["b"] - 0.5 * expected, rtol=1e-6)
    after, state, _ = step(params, state, X * jnp.nan)
    assert_same_bits(after, params)
    assert ols.get_loss_scale(state) == SCALE / 2


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="`fun` must be a function"):
        ols.scaled_backward(jnp.float32(1.0), 2.0)
    with pytest.raises(ValueError, match="`loss_scale` must be positive"):
        ols.scaled_backward(loss_fn, 0.0)


def test_a_gradient_passes_through_one_scaled_network_into_another():
    # That of an actor, through its critic.
    critic = ols.scaled_backward(lambda w, action: w * action**2, SCALE)
    actor = ols.scaled_backward(lambda v, x: v * x, SCALE)
    w, x = jnp.float32(2.0), jnp.float32(3.0)
    assert jax.grad(lambda v: critic(w, actor(v, x)))(jnp.float32(1.0)) == 36.0
