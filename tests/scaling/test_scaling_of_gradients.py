"""`update` warns, while it is traced, of gradients that are not scaled as they must be.

The question is always the same: to which power of the scale that `update` is given are
the gradients proportional?
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training import dynamic_scale as flax_dynamic_scale
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from optax_lossscale.compat.flax import DynamicScale

pytestmark = pytest.mark.usefixtures("standard_promotion")
PARAMS = {"w": jnp.ones((3, 1)), "b": jnp.ones(1)}
X = jnp.ones((8, 3))
TX = ols.loss_scaled(optax.adam(1e-3))
STATE = TX.init(PARAMS)


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def scaled(params, state, x, fun=loss_fn):
    return ols.scaled_grad(fun, state)(params, x)


def step_of(grad_fn, **settings):
    """A step from a function of parameters, state and batch to gradients."""

    def step(params, state, x):
        return TX.update(grad_fn(params, state, x), state, params, **settings)

    return step


def in_a_scan(step):
    def scanned(params, state, x):
        def body(carry, x):
            params, state = carry
            updates, state = step(params, state, x)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, state), jnp.stack([x, x]))[0]

    return scanned


# Never scaled, or by something else.


def of_an_inner_jit(params, state, x):
    """The form of nanoGPT in JAX: the whole state goes into a jitted loss."""

    @jax.jit
    def forward(params, state, x):
        return loss_fn(params, x)

    return jax.grad(forward)(params, state, x)


def of_branches_and_loops(params, state, x):
    def loss(params):
        scale = ols.get_loss_scale(state)  # Goes in, but is not used.
        y, _ = jax.lax.scan(
            lambda c, x: ((c[0] + loss_fn(params, x[None]), c[1]), None),
            (jnp.float32(0), scale),
            x,
        )
        y = jax.lax.cond(y[0] > 0, lambda y, _: 2 * y, lambda y, _: y, y[0], scale)
        return jax.checkpoint(lambda y, _: y**2)(y, scale)

    return jax.grad(loss)(params)


def of_a_custom_rule(params, state, x):
    @jax.custom_vjp
    def double(y, s):
        return 2 * y

    double.defvjp(lambda y, s: (2 * y, s), lambda s, g: (2 * g, jnp.zeros_like(s)))
    scale = ols.get_loss_scale(state)
    return jax.grad(lambda p: double(loss_fn(p, x), scale))(params)


def by_dynamic_scale(dynamic_scale, params, state, x):
    dynamic_scale, _, _, grads = dynamic_scale.value_and_grad(loss_fn)(params, x)
    return dynamic_scale, TX.update(grads, state, params)


def over_pmap(step):
    """A step over one device, whose arguments get the axis that `pmap` wants."""

    def run(*args):
        return jax.pmap(step)(*jax.tree.map(lambda x: jnp.asarray(x)[None], args))

    return run


def in_a_train_state(params, state, x):
    @jax.jit
    def step(state, x):
        grads = jax.grad(lambda p: state.apply_fn(p, x))(state.params)
        return state.apply_gradients(grads=grads)

    return step(TrainState(0, loss_fn, params, TX, state), x)


def in_nnx_jit(params, state, x):
    del params, state
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x)
        optimizer.update(model, grads)

    step(model, optimizer, x)


def made_before_a_scan(params, state, x):
    @jax.jit
    def train(params, state, x):
        grad_fn = ols.scaled_grad(loss_fn, state)
        return in_a_scan(step_of(lambda params, _, x: grad_fn(params, x)))(
            params, state, x
        )

    return train(params, state, x)


NEVER_SCALED = {
    "of an inner jit": jax.jit(step_of(of_an_inner_jit)),
    "of branches and loops": jax.jit(step_of(of_branches_and_loops)),
    "of a custom rule": jax.jit(step_of(of_a_custom_rule)),
    "in a scan": in_a_scan(step_of(lambda p, s, x: jax.grad(loss_fn)(p, x))),
    "in a TrainState": in_a_train_state,
    "in nnx.jit": in_nnx_jit,
    "made before a scan": made_before_a_scan,
    "vmapped": jax.jit(
        lambda p, s, x: jax.vmap(
            step_of(lambda p, s, x: jax.grad(loss_fn)(p, x)), (None, None, 0)
        )(p, s, x[None])
    ),
}


@pytest.mark.parametrize("name", NEVER_SCALED)
def test_gradients_without_the_scale_of_the_state_are_warned_of(name):
    with pytest.warns(UserWarning, match=r"computed without it.*in the same step"):
        NEVER_SCALED[name](PARAMS, STATE, X)


TRANSFORMS = [jax.jit, over_pmap]


@pytest.mark.parametrize("kind", [DynamicScale, flax_dynamic_scale.DynamicScale])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_second_loss_scaling_is_warned_of(kind, transform):
    with pytest.warns(UserWarning, match="scaled and unscaled by another one"):
        transform(by_dynamic_scale)(kind(), PARAMS, STATE, X)


def test_gradients_without_the_scale_are_warned_of_under_pmap():
    step = over_pmap(step_of(lambda p, s, x: jax.grad(loss_fn)(p, x)))
    with pytest.warns(UserWarning, match="computed without it"):
        step(PARAMS, STATE, X)


def clipped(grads):
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


UNSCALED = {
    "unscaled": lambda p, s, x: ols.unscale(scaled(p, s, x), s),
    "unscaled and clipped": lambda p, s, x: clipped(ols.unscale(scaled(p, s, x), s)),
    "unscaled by hand": lambda p, s, x: jax.tree.map(
        lambda g: g / ols.get_loss_scale(s), scaled(p, s, x)
    ),
    "divided by their norm": lambda p, s, x: jax.tree.map(
        lambda g: g / optax.tree.norm(scaled(p, s, x)), scaled(p, s, x)
    ),
    "signs": lambda p, s, x: jax.tree.map(jnp.sign, scaled(p, s, x)),
}


@pytest.mark.parametrize("name", UNSCALED)
def test_unscaled_gradients_without_grads_unscaled_are_warned_of(name):
    with pytest.warns(UserWarning, match=r"unscaled already.*grads_unscaled=True"):
        jax.jit(step_of(UNSCALED[name]))(PARAMS, STATE, X)


def scaled_inside_scaled(params, state, x):
    return scaled(params, state, x, lambda p, x: ols.scale(loss_fn(p, x), state))


def test_gradients_that_were_scaled_twice_are_warned_of():
    with pytest.warns(UserWarning, match="multiplied by it twice"):
        jax.jit(step_of(scaled_inside_scaled))(PARAMS, STATE, X)


def test_scaled_gradients_with_grads_unscaled_are_warned_of():
    with pytest.warns(UserWarning, match=r"stay too large.*Call `unscale` first"):
        jax.jit(step_of(scaled, grads_unscaled=True))(PARAMS, STATE, X)


def test_the_warning_names_the_line_that_calls_update():
    with pytest.warns(UserWarning, match="computed without it") as seen:
        jax.jit(step_of(of_an_inner_jit))(PARAMS, STATE, X)
    assert [warning.filename for warning in seen] == [__file__]


# Made once, outside the step.


def jitted_once(params, state, x):
    return jax.jit(ols.scaled_value_and_grad(loss_fn, state))(params, x)


def jitted_once_for_a_scan(params, state, x):
    grad_fn = ols.scaled_grad(loss_fn, state)
    return jax.jit(lambda p, xs: jax.lax.map(lambda x: grad_fn(p, x), xs))(params, x)


def closed_over(params, state, x):
    return jax.jit(lambda p, x: scaled(p, state, x))(params, x)


def scale_closed_over(params, state, x):
    return jax.jit(lambda p, x: ols.scale(loss_fn(p, x), state))(params, x)


def nnx_jitted_once(params, state, x):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    grad_fn = ols.scaled_grad(lambda model, x: jnp.mean(model(x) ** 2), optimizer)
    return nnx.jit(grad_fn)(model, x)


@pytest.mark.parametrize(
    "step",
    [
        jitted_once,
        jitted_once_for_a_scan,
        closed_over,
        scale_closed_over,
        nnx_jitted_once,
    ],
)
def test_a_scale_that_a_jitted_function_holds_as_a_constant_is_warned_of(step):
    with pytest.warns(UserWarning, match="a constant of this jitted function"):
        step(PARAMS, STATE, X)


# Right, however strange.


def from_several_jits(params, state, x):
    grad_fn = jax.jit(lambda p, s, x: scaled(p, s, x))
    return jax.tree.map(jnp.add, grad_fn(params, state, x), grad_fn(params, state, x))


def projected(params, state, x):
    """PCGrad: from each gradient the part against another one is taken away."""
    one, two = scaled(params, state, x), scaled(params, state, 2 * x)
    dot, square = optax.tree.vdot(one, two), optax.tree.norm(two, squared=True)
    factor = jnp.minimum(dot / square, 0.0)
    return jax.tree.map(lambda a, b: a - factor * b + b, one, two)


def clipped_by_the_scaled_norm(params, state, x):
    grads, scale = scaled(params, state, x), ols.get_loss_scale(state)
    factor = jnp.minimum(1.0, scale / optax.tree.norm(grads))
    return jax.tree.map(lambda g: g * factor, grads)


def accumulated(params, state, x):
    def add(total, x):
        return jax.tree.map(jnp.add, total, scaled(params, state, x[None])), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x)[0]


def of_a_checkpoint_and_a_branch(params, state, x):
    def fun(params, x):
        loss = jax.checkpoint(loss_fn)
        return jax.lax.cond(x[0, 0] > 0, loss, lambda p, x: 2 * loss(p, x), params, x)

    return scaled(params, state, x, fun)


def of_a_while_loop(params, state, x):
    def loss(params, x):
        return jax.lax.fori_loop(0, 3, lambda _, y: y * loss_fn(params, x), 1.0)

    return scaled(params, state, x, loss)


def per_example(params, state, x):
    grads = jax.vmap(scaled, (None, None, 0))(params, state, x[:, None])
    return jax.tree.map(lambda g: g.mean(0), grads)


def masked_by_hand(params, state, x):
    grads = scaled(params, state, x)
    finite = ols.all_finite(grads)
    return jax.tree.map(lambda g: jnp.where(finite, g, 0.0), grads)


def of_a_penalty(params, state, x):
    """A gradient of a gradient, of which the inner one is scaled and unscaled."""

    def loss(params, x):
        inner = ols.unscale(scaled(params, state, x), state)
        return loss_fn(params, x) + optax.tree.norm(inner, squared=True)

    return scaled(params, state, x, loss)


def scaled_by_a_power_from_bits(params, state, x):
    exponent = jnp.log2(ols.get_loss_scale(state)).astype(jnp.int32)
    return jax.grad(lambda p: jnp.ldexp(loss_fn(p, x), exponent))(params)


def of_autocast(params, state, x):
    return scaled(params, state, x, ols.autocast(loss_fn, level="O2"))


def over_devices(params, state, x):
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("i")), out_specs=P()
    )
    def grad_fn(params, state, x):
        return jax.lax.pmean(scaled(params, state, x), "i")

    return grad_fn(params, state, x)


RIGHT = [
    scaled,
    from_several_jits,
    projected,
    clipped_by_the_scaled_norm,
    accumulated,
    of_a_checkpoint_and_a_branch,
    of_a_while_loop,
    per_example,
    masked_by_hand,
    of_a_penalty,
    scaled_by_a_power_from_bits,
    of_autocast,
    over_devices,
]


def without_warning(fun, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fun(*args)


@pytest.mark.parametrize("grad_fn", RIGHT)
def test_scaled_gradients_are_not_warned_of(grad_fn):
    without_warning(jax.jit(step_of(grad_fn)), PARAMS, STATE, X)


@pytest.mark.parametrize("grad_fn", [scaled, accumulated, of_a_penalty, per_example])
def test_scaled_gradients_are_not_warned_of_in_a_scan(grad_fn):
    without_warning(jax.jit(in_a_scan(step_of(grad_fn))), PARAMS, STATE, X)


@pytest.mark.parametrize("name", UNSCALED)
def test_unscaled_gradients_with_grads_unscaled_are_not_warned_of(name):
    step = step_of(UNSCALED[name], grads_unscaled=True)
    without_warning(jax.jit(step), PARAMS, STATE, X)


# A number that is an argument of the step, such as a temperature.
LOSSES_WITH_A_NUMBER = {
    "in the target": lambda p, x, t: jnp.mean((x @ p["w"] - t * x[:, :1]) ** 2),
    "in a penalty": lambda p, x, t: loss_fn(p, x) + t * jnp.sum(p["w"] ** 2),
    "its exponential": lambda p, x, t: jnp.mean((x @ p["w"] - jnp.exp(t)) ** 2),
    "as a threshold": lambda p, x, t: jnp.mean(jnp.minimum(x @ p["w"], t)),
}


@pytest.mark.parametrize("name", LOSSES_WITH_A_NUMBER)
def test_a_number_in_the_loss_does_not_hide_a_mistake(name):
    def step(params, state, x, t, grad_fn):
        loss = functools.partial(LOSSES_WITH_A_NUMBER[name], x=x, t=t)
        return TX.update(grad_fn(loss, state)(params), state, params)

    def run(grad_fn):
        jitted = jax.jit(functools.partial(step, grad_fn=grad_fn))
        return jitted(PARAMS, STATE, X, jnp.float32(0.5))

    without_warning(run, ols.scaled_grad)
    with pytest.warns(UserWarning, match="computed without it"):
        run(lambda loss, state: jax.grad(loss))


def with_the_scale_as_an_argument(power, params, state, x, number):
    """The number may be the scale, or its exponent: nobody can know."""
    grads = jax.grad(lambda p: power(number) * loss_fn(p, x))(params)
    return TX.update(grads, state, params)


@pytest.mark.parametrize("power", [lambda t: t, lambda t: 3 * t, jnp.exp2])
def test_gradients_that_may_be_proportional_to_an_argument_are_not_warned_of(power):
    step = functools.partial(with_the_scale_as_an_argument, power)
    without_warning(jax.jit(step), PARAMS, STATE, X, jnp.float32(2.0))


def with_the_scale_of_another_state(params, state, x, other):
    return TX.update(scaled(params, other, x), state, params)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_scaled_by_another_state_are_not_warned_of(transform):
    """It may hold the same scale, as the states of an actor and of its critic do."""
    step = transform(with_the_scale_of_another_state)
    without_warning(step, PARAMS, STATE, X, STATE)


def test_scaled_gradients_are_not_warned_of_under_pmap():
    without_warning(over_pmap(step_of(scaled)), PARAMS, STATE, X)


def test_a_link_of_a_chain_and_a_masked_leaf_are_not_warned_of():
    link = optax.chain(ols.loss_scaled(), optax.clip_by_global_norm(1.0))
    masked = ols.loss_scaled(optax.sgd(0.1), unscale_mask={"w": True, "b": False})

    @jax.jit
    def step(params, state, x):
        grads = scaled(params, state, x)
        link.update(grads, link.init(params)[:0] + state_of_link)
        true = {**grads, "b": jax.grad(loss_fn)(params, x)["b"]}
        return masked.update(true, state_of_mask, params)

    state_of_link = link.init(PARAMS)
    state_of_mask = masked.init(PARAMS)
    without_warning(step, PARAMS, STATE, X)


@pytest.mark.parametrize("number", [2.0**10, jnp.float32(2.0**10)])
def test_a_rule_that_keeps_the_scale_allows_a_number_in_the_loss(number):
    static = ols.static_loss_scale(2.0**10)
    own = ols.LossScale(
        static.init,
        lambda state, finite: static.adjust(state, finite)._replace(
            loss_scale=state.loss_scale
        ),
    )

    def counting(state, finite):
        return static.adjust(state, finite)._replace(rule_state=state.rule_state + 1)

    with_state = static.init()._replace(rule_state=jnp.int32(0))
    for rule in (static, own, ols.LossScale(lambda: with_state, counting)):
        tx = ols.loss_scaled(optax.sgd(0.1), rule)

        @jax.jit
        def step(params, state, x, tx=tx):
            grads = jax.grad(lambda p: number * loss_fn(p, x))(params)
            return tx.update(grads, state, params)

        without_warning(step, PARAMS, tx.init(PARAMS), X)


def test_the_state_of_a_rule_may_be_one_array():
    static = ols.static_loss_scale(8.0)
    own = static._replace(init=lambda: static.init()._replace(rule_state=jnp.int32(0)))
    state = ols.loss_scaled(optax.sgd(0.1), own).init(PARAMS)
    without_warning(jax.jit(lambda p, s: scaled(p, s, X)), PARAMS, state)


@pytest.mark.slow
def test_an_eager_loop_may_close_over_the_state():
    without_warning(lambda: accumulated(PARAMS, STATE, X))
    without_warning(lambda: per_example(PARAMS, STATE, X))
    without_warning(lambda: jax.checkpoint(scaled)(PARAMS, STATE, X))


def test_a_constant_scale_under_jit_is_not_warned_of_if_it_never_changes():
    static = ols.static_loss_scale(8.0)
    own = static._replace(init=lambda: static.init()._replace(rule_state={}))
    for rule in (static, own, ols.no_loss_scale()):
        state = ols.loss_scaled(optax.sgd(0.1), rule).init(PARAMS)
        without_warning(jax.jit(lambda p, s=state: scaled(p, s, X)), PARAMS)


def test_the_warning_of_a_constant_names_the_line_that_scales():
    with pytest.warns(UserWarning, match="a constant of this jitted") as seen:
        jax.jit(lambda loss: ols.scale(loss, STATE))(jnp.float32(1.0))
    assert [warning.filename for warning in seen] == [__file__]


def always_doubling():
    static = ols.static_loss_scale(8.0)

    def adjust(state, finite):
        state = static.adjust(state, finite)
        return state._replace(loss_scale=2 * state.loss_scale)

    return static._replace(adjust=adjust)


def typed_adjust(state, finite, grads_max):
    """Of a rule of one's own, which is promised arrays."""
    assert (finite.dtype, grads_max.dtype) == (jnp.bool_, jnp.float32)
    grown = state.loss_scale * (1 + finite.astype(jnp.float32))
    return state._replace(loss_scale=jnp.minimum(grown, grads_max.astype(jnp.float32)))


@pytest.mark.parametrize(
    "rule",
    [
        ols.headroom_loss_scale(),
        ols.dynamic_loss_scale(),
        ols.presets.torch(),
        always_doubling(),
        ols.LossScale(
            ols.static_loss_scale(8.0).init, typed_adjust, needs_grads_max=True
        ),
    ],
)
def test_gradients_without_the_scale_are_warned_of_under_every_rule(rule):
    tx = ols.loss_scaled(optax.sgd(0.1), rule)
    step = jax.jit(lambda p, s: tx.update(jax.grad(loss_fn)(p, X), s, p))
    with pytest.warns(UserWarning, match="computed without it"):
        step(PARAMS, tx.init(PARAMS))


def test_a_scaled_leaf_outside_the_mask_does_not_hide_the_others():
    tx = ols.loss_scaled(optax.sgd(0.1), unscale_mask={"w": True, "b": False})

    @jax.jit
    def step(params, state, x):
        grads = jax.grad(loss_fn)(params, x)
        grads["b"] = scaled(params, state, x)["b"]
        return tx.update(grads, state, params)

    with pytest.warns(UserWarning, match="computed without it"):
        step(PARAMS, tx.init(PARAMS), X)


def test_a_mask_needs_no_parameters_under_jit():
    tx = ols.loss_scaled(optax.sgd(0.1), unscale_mask={"w": True, "b": False})

    @jax.jit
    def step(params, state, x):
        grads = scaled(params, state, x)
        return tx.update({**grads, "b": grads["b"] * 0}, state)

    without_warning(step, PARAMS, tx.init(PARAMS), X)


def test_a_scalar_parameter_in_half_precision_is_not_taken_for_a_scale():
    def loss(params):
        return jnp.mean((params["gain"] * X).astype(jnp.float32)) ** 2

    step = jax.jit(lambda p, s: TX.update(jax.grad(loss)(p), s, p))
    params = {"gain": jnp.ones((), jnp.float16)}
    with pytest.warns(UserWarning, match="computed without it"):
        step(params, TX.init(params))


def test_a_rule_that_keeps_the_scale_allows_a_temperature_that_cancels():
    tx = ols.loss_scaled(optax.sgd(0.1), ols.static_loss_scale(2.0**10))

    @jax.jit
    def step(params, state, x, temperature):
        def loss(params):
            low = jax.tree.map(lambda p: p / temperature, params)
            return 2.0**10 * temperature * jnp.mean(x @ low["w"])

        return tx.update(jax.grad(loss)(params), state, params)

    without_warning(step, PARAMS, tx.init(PARAMS), X, 2.0)


def test_a_rule_that_keeps_the_scale_allows_no_other_mistake():
    tx = ols.loss_scaled(optax.sgd(0.1), ols.static_loss_scale(8.0))

    @jax.jit
    def step(params, state, x):
        grads = ols.unscale(scaled(params, state, x), state)
        return tx.update(grads, state, params)

    with pytest.warns(UserWarning, match="unscaled already"):
        step(PARAMS, tx.init(PARAMS), X)
