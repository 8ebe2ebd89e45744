"""What a newcomer gets wrong in the first minute gives an error, or a warning."""

import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import optax_lossscale as ols

PARAMS = {"w": jnp.ones((3, 1))}
X = jnp.ones((8, 3))
TX = ols.loss_scaled(optax.sgd(1e-3))
STATE = TX.init(PARAMS)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def unscaled_step(params, opt_state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return TX.update(grads, opt_state, params), loss


def without_warning(fun, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fun(*args)


def in_a_scan(params, opt_state, x):
    def body(carry, _):
        return carry, unscaled_step(*carry, x)[1]

    return jax.lax.scan(body, (params, opt_state), length=2)


def in_a_train_state(params, opt_state, x):
    state = TrainState(0, loss_fn, params, TX, opt_state)
    grads = jax.grad(state.apply_fn)(state.params, x)
    return state.apply_gradients(grads=grads).opt_state


def after_a_mean_over_devices(params, opt_state, x):
    grads = jax.lax.pmean(jax.grad(loss_fn)(params, x), "i")
    return TX.update(grads, opt_state, params)


def per_device(step):
    def call(params, opt_state, x):
        return jax.pmap(step, "i", in_axes=(None, None, 0))(params, opt_state, x)

    return lambda params, opt_state, x: call(params, opt_state, jnp.stack([x, x]))


@jax.jit
def accumulated_in_a_scan(params, opt_state, x):
    def add(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, x)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x[:, None])
    return TX.update(total, opt_state, params)


UNSCALED = {
    "jit": jax.jit(unscaled_step),
    "accumulated": accumulated_in_a_scan,
    "scan": in_a_scan,
    "TrainState": jax.jit(in_a_train_state),
    "pmap": per_device(after_a_mean_over_devices),
}


@pytest.mark.parametrize("step", UNSCALED.values(), ids=UNSCALED)
def test_update_warns_of_gradients_that_were_never_scaled(step):
    with pytest.warns(UserWarning, match="computed without it"):
        step(PARAMS, STATE, X)


def scaled_by_hand(params, opt_state, x):
    grads = jax.grad(lambda p: ols.scale(loss_fn(p, x), opt_state))(params)
    return TX.update(grads, opt_state, params)


def unscaled_before(params, opt_state, x):
    grads = ols.unscale(ols.scaled_grad(loss_fn, opt_state)(params, x), opt_state)
    return TX.update(grads, opt_state, params, grads_unscaled=True)


def given(params, opt_state, grads):
    return TX.update(jax.tree.map(jnp.negative, grads), opt_state, params)


def summed_in_a_scan(params, opt_state, x):
    def add(total, x):
        grads = ols.scaled_grad(loss_fn, opt_state)(params, x)
        return jax.tree.map(jnp.add, total, grads), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x[:, None])
    return TX.update(total, opt_state, params)


@pytest.mark.parametrize(
    ("step", "argument"),
    [
        (scaled_by_hand, X),
        (unscaled_before, X),
        (summed_in_a_scan, X),
        (given, PARAMS),
    ],
)
def test_update_does_not_warn_of_scaled_gradients(step, argument):
    without_warning(jax.jit(step), PARAMS, STATE, argument)


def test_update_does_not_warn_of_what_is_no_derivative():
    step = jax.jit(lambda p, s: TX.update(jax.tree.map(lambda x: 3 * x, p), s, p))
    without_warning(step, PARAMS, STATE)


def test_update_does_not_warn_of_a_scale_that_another_state_lent():
    @jax.jit
    def step(lender, borrower):
        grads = ols.scaled_grad(loss_fn, lender)(PARAMS, X)
        borrower = ols.set_loss_scale(borrower, ols.get_loss_scale(lender))
        return TX.update(grads, borrower, PARAMS)

    without_warning(step, STATE, STATE)


@pytest.mark.parametrize("skips", [True, False])
def test_update_does_not_warn_of_a_constant_scale_in_the_loss(skips):
    rule = ols.static_loss_scale(2.0**10, skip_nonfinite=skips)
    tx = ols.loss_scaled(optax.sgd(1e-3), rule)

    @jax.jit
    def step(params, opt_state):
        grads = jax.grad(lambda p: 2.0**10 * loss_fn(p, X))(params)
        return tx.update(grads, opt_state, params)

    without_warning(step, PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("transform", [jax.jit, ols.autocast, jax.checkpoint])
def test_update_does_not_warn_of_a_scale_from_another_argument(transform):
    # As where a trainer hands the state to its loss function apart from its own copy.
    @jax.jit
    def step(params, opt_state, of_the_loss):
        loss = transform(lambda p, state: ols.scale(loss_fn(p, X), state))
        return TX.update(jax.grad(loss)(params, of_the_loss), opt_state, params)

    without_warning(step, PARAMS, STATE, STATE)


def test_update_in_a_branch_does_not_warn_of_gradients_that_were_scaled_outside():
    @jax.jit
    def step(params, opt_state):
        grads = ols.scaled_grad(loss_fn, opt_state)(params, X)

        def apply(opt_state):
            return TX.update(grads, opt_state, params)

        def leave(opt_state):
            return grads, opt_state

        return jax.lax.cond(optax.tree.norm(grads) > 0, apply, leave, opt_state)

    without_warning(step, PARAMS, STATE)


def test_update_does_not_warn_if_the_state_is_made_inside_jit():
    @jax.jit
    def train(params):
        opt_state = TX.init(params)
        for _ in range(2):
            grads = ols.scaled_grad(loss_fn, opt_state)(params, X)
            _, opt_state = TX.update(grads, opt_state, params)
        return opt_state

    without_warning(train, PARAMS)


def test_a_scope_named_transpose_is_no_derivative():
    @jax.jit
    def step(params, opt_state):
        with jax.named_scope("transpose"):
            grads = jax.tree.map(lambda x: 3 * x, params)
        return TX.update(grads, opt_state, params)

    without_warning(step, PARAMS, STATE)


@pytest.mark.parametrize("name", ["acept", "grad_finite", "grads_unscale"])
def test_update_refuses_a_misspelt_argument(name):
    with pytest.raises(TypeError, match=rf"no argument `{name}`. \(Did you mean"):
        TX.update(PARAMS, STATE, PARAMS, **{name: True})


def test_update_passes_other_arguments_on():
    updates, _ = TX.update(PARAMS, STATE, PARAMS, value=1.0, grad=PARAMS)
    assert updates.keys() == PARAMS.keys()


OUTSIDE = {
    "optax.MultiSteps": optax.MultiSteps(TX, 2),
    "optax.apply_if_finite": optax.apply_if_finite(TX, 5),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_scaling_warns_of_a_wrapper_that_belongs_inside(name):
    state = OUTSIDE[name].init(PARAMS)
    with pytest.warns(UserWarning, match=re.escape(f"Write `loss_scaled({name}(")):
        ols.scaled_value_and_grad(loss_fn, state)(PARAMS, X)


@pytest.mark.parametrize(
    "tx",
    [
        ols.loss_scaled(optax.MultiSteps(optax.sgd(1e-3), 2)),
        optax.MultiSteps(ols.loss_scaled(optax.sgd(1e-3), ols.no_loss_scale()), 2),
    ],
    ids=["inside", "without a scale"],
)
def test_scaling_does_not_warn_of_a_wrapper_that_does_no_harm(tx):
    state = tx.init(PARAMS)
    without_warning(ols.scaled_value_and_grad(loss_fn, state), PARAMS, X)


def test_scaling_refuses_the_scales_of_several_devices():
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), STATE)
    with pytest.raises(ValueError, match=r"shape \(2,\).*inside `pmap`"):
        ols.scaled_value_and_grad(loss_fn, several)(PARAMS, X)


def test_differentiating_names_the_optimizer_that_was_given_for_its_state():
    with pytest.raises(ValueError, match="the state that its `init` returns"):
        ols.scaled_value_and_grad(loss_fn, TX)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(1)(x))


def test_new_batch_statistics_without_has_aux_are_an_error_that_says_so():
    variables = Net().init(jax.random.key(0), X)

    def loss_fn(params):
        variables_now = {**variables, "params": params}
        y, new = Net().apply(variables_now, X, mutable=["batch_stats"])
        return jnp.mean(y**2), new

    state = TX.init(variables["params"])
    with pytest.raises(TypeError, match="pass `has_aux=True`"):
        ols.scaled_value_and_grad(loss_fn, state)(variables["params"])


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (TX, "For an optimizer: `loss_scaled`"),
        (PARAMS, "Decorate the function itself"),
        (PARAMS["w"], r"`autocast\(loss_fn\)\(params, batch\)`"),
        (Net(), r"`autocast\(model.apply\)`"),
        (Net, "Decorate a method of the class"),
    ],
    ids=["optimizer", "parameters", "loss", "linen module", "class"],
)
def test_autocast_says_what_to_decorate_instead(value, hint):
    with pytest.raises(TypeError, match=hint) as error:
        ols.autocast(value)
    assert len(str(error.value)) < 200


def test_autocast_of_a_linen_submodule_needs_no_apply():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return ols.autocast(nn.Dense(2))(x)

    variables = Outer().init(jax.random.key(0), X)
    assert Outer().apply(variables, X).shape == (8, 2)


def test_autocast_of_a_jitted_function_is_autocast_of_the_function():
    jitted = ols.autocast(jax.jit(loss_fn))(PARAMS, X / 7)
    assert jitted == ols.autocast(loss_fn)(PARAMS, X / 7)
    assert jitted != loss_fn(PARAMS, X / 7)


def test_a_loss_scale_inside_another_is_an_error_that_says_how_to_wrap():
    with pytest.raises(ValueError, match="once, around the whole optimizer"):
        ols.loss_scaled(TX).init(PARAMS)
