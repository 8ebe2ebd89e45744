"""How gradients were scaled: what is wrong is warned of, and what is right is not.

See also `test_messages.py`, for arguments that are refused.
"""

import collections
import sys
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training import dynamic_scale as flax_dynamic_scale
from flax.training.train_state import TrainState

import optax_lossscale as ols
from helpers.inner import standard_promotion
from optax_lossscale.compat.flax import DynamicScale

PARAMS = {"w": jnp.ones((3, 1))}
X = jnp.ones((8, 3))
TX = ols.loss_scaled(optax.sgd(1e-3))
STATE = TX.init(PARAMS)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def true(params, state, x):
    return jax.grad(loss_fn)(params, x)


def scaled(params, state, x):
    return ols.scaled_grad(loss_fn, state)(params, x)


def unscaled(params, state, x):
    return ols.unscale(scaled(params, state, x), state)


def step_of(grad_fn, tx=TX, **settings):
    """A step from a function of parameters, state and batch to gradients."""

    def step(params, state, x):
        updates, state = tx.update(grad_fn(params, state, x), state, params, **settings)
        return optax.apply_updates(params, updates), state

    return step


def over_steps(step):
    """Whole steps in a scan, which carries the state."""

    def run(params, state, x):
        def body(carry, x):
            return step(*carry, x), None

        return jax.lax.scan(body, (params, state), jnp.stack([x, x]))[0]

    return run


def over_rows(grad_fn):
    """The sum of the gradients of each row: accumulation, with one state."""

    def summed(params, state, x):
        def add(total, x):
            return jax.tree.map(jnp.add, total, grad_fn(params, state, x[None])), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x)[0]

    return summed


def trace(step, *args):
    """Warnings are given while a step is traced, so it need not be compiled."""
    return jax.jit(step).trace(*args)


def without_warning(fun, *args):
    with warnings.catch_warnings(action="error"):
        return fun(*args)


# --- Computed without the scale ------------------------------------------------------


def of_an_inner_jit(params, state, x):
    """The form of nanoGPT in JAX: the whole state goes into a jitted function."""

    @jax.jit
    def grad_fn(params, state, x):
        return jax.grad(loss_fn)(params, x)

    return grad_fn(params, state, x)


def in_a_train_state(params, opt_state, x):
    state = TrainState(0, loss_fn, params, TX, opt_state)
    grads = jax.grad(state.apply_fn)(state.params, x)
    return state.apply_gradients(grads=grads).opt_state


def made_before(loop):
    """The gradient function is made once, before a loop of steps."""

    def steps(params, state, x):
        step = step_of(lambda params, _, x: scaled(params, state, x))
        return loop(lambda carry: (*step(*carry), carry[2]), (params, state, x))

    return steps


def before_a_branch(params, state, x):
    """The form of EasyDeL: the branch that updates is given the gradients."""

    def apply(given):
        return TX.update(given[0], given[1], given[2])

    given = true(params, state, x), state, params
    return jax.lax.cond(x[0, 0] > 0, apply, lambda given: given[:2], given)


def before_a_switch(params, state, x):
    branches = [lambda g, s, p: (g, s), TX.update, TX.update]
    given = true(params, state, x), state, params
    return jax.lax.switch(x[0, 0].astype(int), branches, *given)


NEVER_SCALED = {
    "plain": step_of(true),
    "accumulated": step_of(over_rows(true)),
    "in a scan of steps": over_steps(step_of(true)),
    "in a TrainState": in_a_train_state,
    "the state goes through an inner jit": step_of(of_an_inner_jit),
    "made before a scan": made_before(
        lambda body, carry: jax.lax.scan(
            lambda carry, _: (body(carry), None), carry, length=2
        )
    ),
    "made before a fori_loop": made_before(
        lambda body, carry: jax.lax.fori_loop(0, 2, lambda _, c: body(c), carry)
    ),
    "made before a while_loop": made_before(
        lambda body, carry: jax.lax.while_loop(lambda c: c[2].sum() > 0, body, carry)
    ),
    "before a branch": before_a_branch,
    "before a switch": before_a_switch,
    "vmapped": lambda p, s, x: jax.vmap(step_of(true), (None, None, 0))(p, s, x[None]),
}


@pytest.mark.parametrize("name", NEVER_SCALED)
def test_gradients_that_were_never_scaled_are_warned_of(name):
    with pytest.warns(UserWarning, match=r"computed without it.*scaled_value_and_grad"):
        trace(NEVER_SCALED[name], PARAMS, STATE, X)


def test_the_gradients_of_a_scalar_parameter_are_warned_of():
    # It may have the type of a scale, but is none.
    def step(w, state):
        return TX.update(jax.grad(jnp.square)(w), state, w)

    w = jnp.float32(2.0)
    with pytest.warns(UserWarning, match="computed without it"):
        trace(step, w, TX.init(w))


def test_gradients_that_were_never_scaled_are_warned_of_under_the_headroom_rule():
    tx = ols.loss_scaled(optax.sgd(1e-3), ols.headroom_loss_scale())
    with pytest.warns(UserWarning, match="computed without it"):
        trace(step_of(true, tx), PARAMS, tx.init(PARAMS), X)


@pytest.mark.parametrize("make", [ols.scaled_grad, ols.scaled_value_and_grad])
def test_the_warning_names_the_line_that_calls_the_gradient_function(make):
    grad_fn = make(loss_fn, STATE)
    with pytest.warns(UserWarning, match="a constant of this") as caught:
        trace(lambda p: grad_fn(p, X), PARAMS)
    assert [warning.filename for warning in caught] == [__file__]


def test_the_warning_names_the_line_that_calls_update():
    with pytest.warns(UserWarning, match="computed without it") as caught:
        trace(lambda p, s: TX.update(true(p, s, X), s, p), PARAMS, STATE)
    assert [warning.filename for warning in caught] == [__file__]


# --- Divided by a scale already ------------------------------------------------------


def clipped(grads):
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


DIVIDED = {
    "unscaled": unscaled,
    "unscaled and clipped": lambda p, s, x: clipped(unscaled(p, s, x)),
    "divided by hand": lambda p, s, x: jax.tree.map(
        lambda g: g / ols.get_loss_scale(s), scaled(p, s, x)
    ),
    "unscaled in an inner jit": jax.jit(unscaled),
    "unscaled and summed": over_rows(unscaled),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_unscaled_gradients_without_grads_unscaled_are_warned_of(name):
    with pytest.warns(UserWarning, match=r"divided by a scale already.*grads_unscaled"):
        trace(step_of(DIVIDED[name]), PARAMS, STATE, X)
    step = step_of(DIVIDED[name], grads_unscaled=True)
    without_warning(trace, step, PARAMS, STATE, X)


@pytest.mark.parametrize("kind", [flax_dynamic_scale.DynamicScale, DynamicScale])
def test_a_dynamic_scale_that_was_kept_beside_the_optimizer_is_warned_of(kind):
    def step(params, state, dynamic_scale, x):
        with standard_promotion():
            grad_fn = dynamic_scale.value_and_grad(loss_fn)
            dynamic_scale, _, _, grads = grad_fn(params, x)
        return TX.update(grads, state, params), dynamic_scale

    with pytest.warns(UserWarning, match="divided by a scale already"):
        trace(step, PARAMS, STATE, kind(), X)


# --- What is right -------------------------------------------------------------------


def differentiated_by_hand(params, state, x):
    return jax.grad(lambda p: ols.scale(loss_fn(p, x), state))(params)


def of_several_jits(params, state, x):
    grad_fn = jax.jit(scaled)
    one, two = grad_fn(params, state, x), grad_fn(params, state, x)
    return jax.tree.map(jnp.add, one, two)


def clipped_by_the_true_norm(params, state, x):
    grads = scaled(params, state, x)
    norm = ols.loss_scale_metrics(state, grads=grads)["grad_norm"]
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1 / norm), grads)


def selected_by_the_true_gradients(params, state, x):
    grads = scaled(params, state, x)
    true = ols.unscale(grads, state)
    return jax.tree.map(lambda g, t: jnp.where(jnp.abs(t) > 1e-3, g, 0.0), grads, true)


def divided_by_a_count_of_tokens(params, state, x):
    grads, count = scaled(params, state, x), jnp.sum(x > 0).astype(jnp.float32)
    return jax.tree.map(lambda g: g / count, grads)


def per_example(params, state, x):
    grads = jax.vmap(scaled, (None, None, 0))(params, state, x[:, None])
    return jax.tree.map(lambda g: g.mean(0), grads)


def projected(params, state, x):
    """PCGrad: from each gradient the part against another one is taken away."""
    one, two = scaled(params, state, x), scaled(params, state, 2 * x)
    dot, square = optax.tree.vdot(one, two), optax.tree.norm(two, squared=True)
    factor = jnp.minimum(dot / square, 0.0)
    return jax.tree.map(lambda a, b: a - factor * b + b, one, two)


def of_a_branch_and_a_loop(params, state, x):
    def loss(params, x):
        twice = lambda p: 2 * loss_fn(p, x)  # noqa: E731
        once = jax.checkpoint(lambda p: loss_fn(p, x))
        y = jax.lax.cond(x[0, 0] > 0, once, twice, params)
        return jax.lax.fori_loop(0, 3, lambda _, z: z * y, 1.0)

    return ols.scaled_grad(loss, state)(params, x)


def of_autocast(params, state, x):
    return ols.scaled_grad(ols.autocast(loss_fn), state)(params, x)


def of_no_derivative(params, state, x):
    return jax.tree.map(lambda p: 3 * p, params)


GRADIENTS = {
    "scaled_grad": scaled,
    "the derivative of `scale`": differentiated_by_hand,
    "of several inner jits": of_several_jits,
    "accumulated": over_rows(scaled),
    "clipped": lambda p, s, x: clipped(scaled(p, s, x)),
    "unscaled, clipped, scaled": lambda p, s, x: ols.scale(
        clipped(unscaled(p, s, x)), s
    ),
    "clipped by the true norm": clipped_by_the_true_norm,
    "selected by the true gradients": selected_by_the_true_gradients,
    "divided by a count of tokens": divided_by_a_count_of_tokens,
    "per example": per_example,
    "projected": projected,
    "of a branch and a loop": of_a_branch_and_a_loop,
    "of autocast": of_autocast,
    "of no derivative": of_no_derivative,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_right_gradients_are_not_warned_of(name):
    step = step_of(GRADIENTS[name])
    without_warning(trace, step, PARAMS, STATE, X)
    without_warning(trace, over_steps(step), PARAMS, STATE, X)


def of_one_state_of_several(params, states, x):
    """A state of each task, stacked; the step takes that of one."""
    state = jax.tree.map(lambda leaf: leaf[1], states)
    again = jax.tree.map(lambda leaf: leaf[1], states)
    updates, new = TX.update(scaled(params, state, x), again, params)
    states = jax.tree.map(lambda old, new: old.at[1].set(new), states, new)
    return optax.apply_updates(params, updates), states


def test_states_that_are_stacked_in_one_tree_are_not_warned_of():
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), STATE)
    _, states = without_warning(jax.jit(of_one_state_of_several), PARAMS, states, X)
    assert states.loss_scale_state.step_count.tolist() == [0, 1, 0]


def test_a_state_that_is_made_inside_the_jitted_function_is_not_warned_of():
    def train(params, x):
        state = TX.init(params)
        for _ in range(2):
            params, state = step_of(scaled)(params, state, x)
        return params, state

    without_warning(trace, train, PARAMS, X)


def test_a_scale_that_is_handed_to_the_loss_as_another_argument_is_not_warned_of():
    # As where a trainer hands a state to its loss function apart from its own copy.
    def step(params, state, x, lender):
        loss = jax.checkpoint(lambda p, scale: scale * loss_fn(p, x))
        of_state = jax.grad(lambda p: ols.scale(loss_fn(p, x), lender))(params)
        of_number = jax.grad(loss)(params, ols.get_loss_scale(lender))
        return TX.update(of_state, state, params), TX.update(of_number, state, params)

    without_warning(trace, step, PARAMS, STATE, X, STATE)


def test_an_update_in_a_branch_is_not_warned_of():
    def apply(given):
        params, state, grads = given
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(params, state, x):
        given = params, state, scaled(params, state, x)
        params, state = jax.lax.cond(x[0, 0] > 0, apply, lambda g: g[:2], given)
        grads = scaled(params, state, x)
        return jax.lax.cond(
            x[0, 0] > 0, lambda s: TX.update(grads, s), lambda s: (grads, s), state
        )

    without_warning(trace, step, PARAMS, STATE, X)


def keeps_its_scale():
    """A rule of one's own, which counts in a state of its own."""
    static = ols.static_loss_scale(2.0**10)

    def adjust(state, finite):
        return static.adjust(state, finite)._replace(rule_state=state.rule_state + 1)

    first = static.init()._replace(rule_state=jnp.int32(0))
    return ols.LossScale(lambda: first, adjust)


@pytest.mark.parametrize(
    "rule", [ols.static_loss_scale(2.0**10), keeps_its_scale()], ids=["static", "own"]
)
def test_a_number_in_the_loss_is_not_warned_of_under_a_rule_that_keeps_its_scale(rule):
    tx = ols.loss_scaled(optax.sgd(1e-3), rule)
    step = step_of(lambda p, s, x: jax.grad(lambda p: 2.0**10 * loss_fn(p, x))(p), tx)
    without_warning(trace, step, PARAMS, tx.init(PARAMS), X)


def bytecodes_run_in(fun, *args):
    """How many bytecodes of this package run in a call."""
    seen, before = collections.Counter(), sys.gettrace()

    def count(frame, event, _):
        if "optax_lossscale" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        seen[event] += 1
        return count

    sys.settrace(count)
    try:
        fun(*args)
    finally:
        sys.settrace(before)
    return seen["opcode"]


def test_tracing_an_update_is_linear_in_the_leaves():
    # One equation, a scan, makes all gradients: who looks at all of its inputs for
    # each of its outputs is quadratic.
    steps = {}
    for count in (2, 20, 40):  # The first call also fills caches.
        params = {str(i): jnp.ones(2) for i in range(count)}

        def grad_fn(params, state, x):
            return jax.tree.map(lambda p: p * ols.scale(x[0, 0], state), params)

        step = step_of(over_rows(grad_fn))
        steps[count] = bytecodes_run_in(trace, step, params, TX.init(params), X)
    assert steps[40] < 2.2 * steps[20]


# --- A gradient function that was made once ------------------------------------------


def test_a_gradient_function_that_was_made_outside_the_jitted_step_is_warned_of():
    value_and_grad = ols.scaled_value_and_grad(loss_fn, STATE)
    inside = ols.scaled_backward(loss_fn, STATE)
    for grad_fn in (value_and_grad, jax.grad(inside)):
        with pytest.warns(UserWarning, match="a constant of this jitted function"):
            trace(grad_fn, PARAMS, X)
        without_warning(grad_fn, PARAMS, X)  # Outside `jit` it is right.


def test_a_gradient_function_of_an_optimizer_outside_nnx_jit_is_warned_of():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    grad_fn = ols.scaled_grad(lambda model, x: jnp.mean(model(x) ** 2), optimizer)
    with (
        standard_promotion(),
        pytest.warns(UserWarning, match="a constant of this jitted function"),
    ):
        nnx.jit(grad_fn)(model, X)


@pytest.mark.parametrize("rule", [ols.static_loss_scale(8.0), ols.no_loss_scale()])
def test_a_constant_scale_that_never_changes_is_not_warned_of(rule):
    tx = ols.loss_scaled(optax.sgd(1e-3), rule)
    grad_fn = ols.scaled_grad(loss_fn, tx.init(PARAMS))
    step = lambda p: tx.update(grad_fn(p, X), tx.init(p), p)  # noqa: E731
    without_warning(trace, step, PARAMS)


def test_a_constant_scale_in_a_loop_outside_jit_is_not_warned_of():
    # It is traced at each call, with the scale that the state has then.
    grad_fn = ols.scaled_grad(loss_fn, STATE)
    run = lambda p: jax.lax.scan(lambda p, x: (grad_fn(p, x), None), p, X[None])  # noqa: E731
    without_warning(run, PARAMS)


# --- Wrappers in the wrong order -----------------------------------------------------

OUTSIDE = {
    "optax.MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "optax.apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_wrapper_that_belongs_inside_is_warned_of_where_the_state_is_seen(name):
    state = OUTSIDE[name](TX).init(PARAMS)
    for see in (
        lambda: ols.scaled_value_and_grad(loss_fn, state),
        lambda: ols.scale(jnp.float32(1.0), state),
        lambda: ols.raise_if_stalled(state),
    ):
        with pytest.warns(UserWarning, match=f"`{name}` must not be outside") as caught:
            see()
        (warning,) = caught
        line = see.__code__.co_firstlineno
        assert (warning.filename, warning.lineno) == (__file__, line)


CLIP = optax.clip_by_global_norm(1.0)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(CLIP, TX),
        optax.chain(optax.chain(CLIP, TX), optax.scale(0.5)),
        optax.chain(optax.zero_nans(), ols.loss_scaled(), optax.adam(1e-3)),
    ],
)
def test_a_clip_before_loss_scaled_in_a_chain_is_warned_of(tx):
    with pytest.warns(UserWarning, match=r"before `loss_scaled`.*\(Write"):
        ols.scaled_grad(loss_fn, tx.init(PARAMS))


@pytest.mark.parametrize(
    "tx",
    [
        ols.loss_scaled(optax.chain(CLIP, optax.adam(1e-3))),
        ols.loss_scaled(optax.MultiSteps(optax.sgd(1e-3), 2)),
        optax.chain(ols.loss_scaled(), CLIP, optax.adam(1e-3)),
        optax.MultiSteps(ols.loss_scaled(optax.sgd(1e-3), ols.no_loss_scale()), 2),
    ],
)
def test_a_right_order_is_not_warned_of(tx):
    without_warning(ols.scaled_grad(loss_fn, tx.init(PARAMS)), PARAMS, X)


def test_true_gradients_may_be_clipped_before_loss_scaled():
    state = optax.chain(CLIP, ols.loss_scaled(grads_unscaled=True)).init(PARAMS)
    without_warning(ols.scaled_backward(loss_fn, state), PARAMS, X)
    without_warning(ols.raise_if_stalled, state)


def test_the_state_of_another_optimizer_beside_it_is_no_chain():
    critic = optax.MultiSteps(optax.sgd(0.1), 2).init(PARAMS)
    without_warning(ols.scaled_grad(loss_fn, (critic, STATE)), PARAMS, X)


# --- float16 parameters without masters ----------------------------------------------


def cast(dtype):
    return {"norm": jnp.ones(3), **ols.cast_params(PARAMS, dtype)}


def test_float16_parameters_without_masters_are_warned_of_once_in_init():
    tx, params = ols.loss_scaled(optax.adam(1e-4)), cast(jnp.float16)
    with pytest.warns(UserWarning, match="master_weights") as caught:
        state = tx.init(params)
    assert [warning.filename for warning in caught] == [__file__]
    with standard_promotion():
        grads = ols.scale(params, state)
        without_warning(trace, tx.update, grads, state, params)


@pytest.mark.parametrize(
    ("tx", "dtype"),
    [
        (ols.loss_scaled(ols.master_weights(optax.adam(1e-4))), jnp.float16),
        (ols.master_weights(ols.loss_scaled(optax.adam(1e-4))), jnp.float16),
        (
            ols.loss_scaled(optax.chain(CLIP, ols.master_weights(optax.sgd(0.1)))),
            jnp.float16,
        ),
        (TX, jnp.bfloat16),
        (TX, jnp.float32),
    ],
    ids=["masters inside", "masters outside", "in a chain", "bfloat16", "float32"],
)
def test_parameters_that_can_be_trained_are_not_warned_of(tx, dtype):
    without_warning(tx.init, cast(dtype))
