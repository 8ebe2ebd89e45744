"""What a newcomer gets wrong in the first minute gives an error, or a warning."""

import re
import warnings
from typing import NamedTuple

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


def summed(grad_fn, params, x):
    """The sum of the gradients of each row."""

    def add(total, x):
        return jax.tree.map(jnp.add, total, grad_fn(params, x)), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x[:, None])[0]


def accumulated(params, opt_state, x):
    return TX.update(summed(jax.grad(loss_fn), params, x), opt_state, params)


def in_a_train_state(params, opt_state, x):
    state = TrainState(0, loss_fn, params, TX, opt_state)
    grads = jax.grad(state.apply_fn)(state.params, x)
    return state.apply_gradients(grads=grads).opt_state


def after_a_mean_over_devices(params, opt_state, x):
    def step(params, opt_state, x):
        grads = jax.lax.pmean(jax.grad(loss_fn)(params, x), "i")
        return TX.update(grads, opt_state, params)

    batch = jnp.stack([x, x])
    return jax.pmap(step, "i", in_axes=(None, None, 0))(params, opt_state, batch)


UNSCALED = [
    jax.jit(unscaled_step),
    jax.jit(accumulated),
    in_a_scan,
    jax.jit(in_a_train_state),
    pytest.param(after_a_mean_over_devices, marks=pytest.mark.several_devices),
]


@pytest.mark.parametrize("step", UNSCALED)
def test_update_warns_of_gradients_that_were_never_scaled(step):
    with pytest.warns(UserWarning, match="computed without it"):
        step(PARAMS, STATE, X)


def scaled_by_hand(params, opt_state, x):
    grads = jax.grad(lambda p: ols.scale(loss_fn(p, x), opt_state))(params)
    return TX.update(grads, opt_state, params)


def unscaled_before(params, opt_state, x):
    grads = ols.unscale(ols.scaled_grad(loss_fn, opt_state)(params, x), opt_state)
    return TX.update(grads, opt_state, params, grads_unscaled=True)


def scaled_and_summed(params, opt_state, x):
    grads = summed(ols.scaled_grad(loss_fn, opt_state), params, x)
    return TX.update(grads, opt_state, params)


def updated_in_a_branch(params, opt_state, x):
    grads = ols.scaled_grad(loss_fn, opt_state)(params, x)

    def apply(opt_state):
        return TX.update(grads, opt_state, params)

    def leave(opt_state):
        return grads, opt_state

    return jax.lax.cond(optax.tree.norm(grads) > 0, apply, leave, opt_state)


def with_a_state_made_inside(params, opt_state, x):
    opt_state = TX.init(params)
    for _ in range(2):
        grads = ols.scaled_grad(loss_fn, opt_state)(params, x)
        _, opt_state = TX.update(grads, opt_state, params)
    return opt_state


def of_no_derivative(params, opt_state, x):
    with jax.named_scope("transpose"):  # The name that derivatives have.
        grads = jax.tree.map(lambda p: 3 * p, params)
    return TX.update(grads, opt_state, params)


def scaled_by_a_constant(params, opt_state, x):
    for skips in (True, False):
        rule = ols.static_loss_scale(2.0**10, skip_nonfinite=skips)
        tx = ols.loss_scaled(optax.sgd(1e-3), rule)
        grads = jax.grad(lambda p: 2.0**10 * loss_fn(p, x))(params)
        updates, _ = tx.update(grads, tx.init(params), params)
    return updates


SCALED = [
    scaled_by_hand,
    unscaled_before,
    scaled_and_summed,
    updated_in_a_branch,
    with_a_state_made_inside,
    of_no_derivative,
    scaled_by_a_constant,
]


@pytest.mark.parametrize("step", SCALED)
def test_update_does_not_warn_of_scaled_gradients(step):
    without_warning(jax.jit(step), PARAMS, STATE, X)


@pytest.mark.parametrize("transform", [jax.jit, ols.autocast, jax.checkpoint])
def test_update_does_not_warn_of_a_scale_from_another_argument(transform):
    # As where a trainer hands the state to its loss function apart from its own copy.
    @jax.jit
    def step(params, opt_state, lender):
        loss = transform(lambda p, state: ols.scale(loss_fn(p, X), state))
        grads = jax.grad(loss)(params, lender)
        borrower = ols.set_loss_scale(opt_state, ols.get_loss_scale(lender))
        return TX.update(grads, opt_state, params), TX.update(grads, borrower, params)

    without_warning(step, PARAMS, STATE, STATE)


def test_update_does_not_warn_of_true_gradients_whose_scale_came_from_elsewhere():
    @jax.jit
    def step(params, opt_state, lender):
        grads = jax.grad(ols.scaled_backward(loss_fn, lender))(params, X)
        return TX.update(grads, opt_state, params, grads_unscaled=True)

    without_warning(step, PARAMS, STATE, STATE)


def test_update_passes_on_a_name_that_is_only_similar():
    inner = optax.GradientTransformationExtraArgs(
        optax.sgd(0.1).init, lambda grads, state, params, *, grad_fn: (grads, state)
    )
    tx = ols.loss_scaled(inner)
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, grad_fn=loss_fn)


@pytest.mark.parametrize("name", ["acept", "grad_finite", "grads_unscale"])
def test_update_refuses_a_misspelt_argument(name):
    with pytest.raises(TypeError, match=rf"no argument `{name}`. \(Did you mean"):
        TX.update(PARAMS, STATE, PARAMS, **{name: jnp.asarray(True)})


STATIC_TX = ols.loss_scaled(optax.sgd(1e-3), ols.static_loss_scale(2.0**10))
OUTSIDE = {
    "optax.MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "optax.apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
}


@pytest.mark.parametrize("tx", [TX, STATIC_TX])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_wrapper_that_belongs_inside_is_warned_of_where_the_state_is_seen(name, tx):
    state = OUTSIDE[name](tx).init(PARAMS)
    for see in (
        lambda: ols.scaled_value_and_grad(loss_fn, state),
        lambda: ols.scaled_grad(loss_fn, state),
        lambda: ols.scale(jnp.float32(1.0), state),
        lambda: ols.scaled_backward(loss_fn, state),
        lambda: ols.loss_scale_metrics(state),
        lambda: ols.raise_if_stalled(state),
    ):
        message = re.escape(f"`{name}` must not be outside `loss_scaled`: ")
        with pytest.warns(UserWarning, match=message) as warnings:
            see()
        (warning,) = warnings
        line = see.__code__.co_firstlineno
        assert (warning.filename, warning.lineno) == (__file__, line)


CLIP = optax.clip_by_global_norm(1.0)
OWN = optax.GradientTransformation(lambda params: {}, lambda g, s, p=None: (g, s))


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(CLIP, TX),
        optax.chain(optax.chain(CLIP, TX), optax.scale(0.5)),
        optax.chain(CLIP, optax.chain(TX, optax.scale(0.5))),
        optax.chain(optax.zero_nans(), ols.loss_scaled(), optax.adam(1e-3)),
        optax.chain(OWN, CLIP, TX),
        optax.chain(CLIP, OWN, TX),
        optax.chain(CLIP, STATIC_TX),
    ],
)
def test_scaling_warns_of_what_is_before_loss_scaled_in_a_chain(tx):
    train_state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    for state in (train_state, train_state.opt_state):
        for see in (
            lambda state: ols.scaled_grad(loss_fn, state),
            lambda state: ols.scaled_value_and_grad(loss_fn, state),
            lambda state: ols.scale(jnp.float32(1.0), state),
        ):
            message = r"before `loss_scaled`.*\(Write"
            with pytest.warns(UserWarning, match=message) as warnings:
                see(state)
            (warning,) = warnings
            line = see.__code__.co_firstlineno
            assert (warning.filename, warning.lineno) == (__file__, line)


@pytest.mark.parametrize(
    "tx",
    [
        ols.loss_scaled(optax.chain(CLIP, optax.adam(1e-3))),
        optax.chain(ols.loss_scaled(), CLIP, optax.adam(1e-3)),
        optax.chain(optax.masked(TX, True), CLIP),
        optax.chain(CLIP, ols.loss_scaled(optax.adam(1e-3), ols.no_loss_scale())),
    ],
)
def test_scaling_does_not_warn_of_a_right_chain(tx):
    state = tx.init(PARAMS)
    without_warning(ols.scaled_grad(loss_fn, (optax.EmptyState, state)), PARAMS, X)


class Run(NamedTuple):
    critic: optax.OptState
    opt_state: optax.OptState


@pytest.mark.parametrize("run", [Run, lambda *run: run, lambda *run: (PARAMS, *run)])
@pytest.mark.parametrize(
    "critic",
    [
        optax.ema(0.9),
        optax.sgd(0.1),
        optax.adam(0.1),
        optax.inject_hyperparams(optax.sgd)(0.1),
        optax.MultiSteps(optax.sgd(0.1), 2),
    ],
)
def test_a_tuple_of_two_states_is_no_chain(critic, run):
    states = run(critic.init(PARAMS), STATE)
    without_warning(ols.scaled_grad(loss_fn, states), PARAMS, X)


def test_a_chain_may_clip_the_true_gradients_before_loss_scaled():
    tx = optax.chain(CLIP, ols.loss_scaled(optax.sgd(1e-3), grads_unscaled=True))

    @jax.jit
    def step(params, state):
        grads = jax.grad(ols.scaled_backward(loss_fn, state))(params, X)
        return tx.update(grads, state, params)

    _, state = without_warning(step, PARAMS, tx.init(PARAMS))
    without_warning(ols.loss_scale_metrics, state)


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


def test_scaling_does_not_warn_of_the_wrapper_of_another_optimizer():
    other = optax.MultiSteps(optax.sgd(1e-3), 2).init(PARAMS)
    without_warning(lambda: ols.scaled_value_and_grad(loss_fn, [other, STATE]))


def test_scaling_refuses_the_scales_of_several_devices():
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), STATE)
    with pytest.raises(ValueError, match=r"shape \(2,\).*inside `pmap`"):
        ols.scaled_value_and_grad(loss_fn, several)(PARAMS, X)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(1)(x))


@pytest.mark.slow
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


@pytest.mark.slow
def test_autocast_of_a_linen_submodule_needs_no_apply():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return ols.autocast(nn.Dense(2))(x)

    variables = Outer().init(jax.random.key(0), X)
    assert Outer().apply(variables, X).shape == (8, 2)


@pytest.mark.slow
def test_autocast_of_a_jitted_function_is_autocast_of_the_function():
    jitted = ols.autocast(jax.jit(loss_fn))(PARAMS, X / 7)
    assert jitted == ols.autocast(loss_fn)(PARAMS, X / 7)
    assert jitted != loss_fn(PARAMS, X / 7)
