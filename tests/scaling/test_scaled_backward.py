"""`scaled_backward`: scaled on the way, for whoever differentiates the function."""

import inspect
import itertools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.compat import IS_JAX_0_7, enable_x64

pytestmark = pytest.mark.usefixtures("standard_promotion")
RNG = np.random.default_rng(0)
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(3, 2)), jnp.float32),
    "b": jnp.ones(2),
}
X = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)
SCALE = 2.0**12


def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


INSIDE = ols.scaled_backward(loss_fn, SCALE)


def sizes_seen(fun):
    """A function that returns its gradient, and the largest cotangent on the way."""
    seen = []

    @jax.custom_vjp
    def look(x):
        return x

    look.defvjp(lambda x: (x, None), lambda _, c: (seen.append(c) or c,))
    grads = jax.grad(fun(look))
    return lambda *args: (grads(*args), float(jnp.max(jnp.abs(seen.pop()))))


def test_what_lies_between_is_scaled_and_the_rest_is_not():
    def loss(look):
        return lambda w: jnp.sum(look(w * 3.0)) + 0.0

    plain, size = sizes_seen(loss)(jnp.ones(2))
    inside, scaled = sizes_seen(lambda look: ols.scaled_backward(loss(look), SCALE))(
        jnp.ones(2)
    )
    np.testing.assert_array_equal(inside, plain)
    assert (size, scaled) == (1.0, SCALE)


@pytest.mark.parametrize("scale", [SCALE, 3.0, 2.0**-3])
@pytest.mark.parametrize("autocast", [lambda fun: fun, ols.autocast])
def test_value_and_gradients_are_those_of_scale_and_unscale_to_the_bit(scale, autocast):
    fun, state = autocast(loss_fn), ols.static_loss_scale(scale).init()
    inside = ols.scaled_backward(fun, scale)
    actual = jax.value_and_grad(inside)(PARAMS, X)
    value, grads = ols.scaled_value_and_grad(fun, state)(PARAMS, X)
    assert_same_bits(actual, (value, ols.unscale(grads, state)))
    assert_same_bits(inside(PARAMS, X), fun(PARAMS, X))


def test_a_float16_loss_has_the_cotangent_that_scale_gives_it():
    def loss(params, x):
        return loss_fn(params, x).astype(jnp.float16)

    for scale in (2.0**15, 2.0**16):  # float16(2**16) is infinite.
        state = ols.static_loss_scale(scale).init()
        expected = ols.unscale(ols.scaled_grad(loss, state)(PARAMS, X), state)
        actual = jax.grad(ols.scaled_backward(loss, scale))(PARAMS, X)
        assert_same_bits(actual, expected)


@jax.jit
def of_the_state(state, params, x):
    return jax.grad(ols.scaled_backward(loss_fn, state))(params, x)


def test_the_scale_may_be_a_traced_number_or_state():
    expected = jax.jit(jax.grad(loss_fn))(PARAMS, X)
    tx = ols.loss_scaled(optax.sgd(0.1))
    for scale in (jnp.float32(8.0), tx.init(PARAMS), {"opt": tx.init(PARAMS)}):
        assert_same_bits(of_the_state(scale, PARAMS, X), expected)


STACKED = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), PARAMS)


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
    "jit": lambda fun: jax.jit(jax.grad(jax.jit(fun)))(PARAMS, X),
    "checkpoint": lambda fun: jax.grad(jax.checkpoint(fun))(PARAMS, X),
    "jvp": lambda fun: jax.jvp(lambda p: fun(p, X), (PARAMS,), (PARAMS,)),
    "hessian": lambda fun: jax.hessian(fun)(PARAMS, X),
    "reverse over reverse": lambda fun: jax.jacrev(jax.jacrev(fun))(PARAMS, X),
    "reverse over forward": lambda fun: jax.jacrev(jax.jacfwd(fun))(PARAMS, X),
    "vmap": lambda fun: jax.vmap(jax.grad(fun), (None, 0))(PARAMS, X[:, None]),
    "vmap over parameters": lambda fun: jax.vmap(jax.grad(fun), (0, None))(STACKED, X),
    "gradient of vmap": lambda fun: jax.grad(
        lambda p: jax.vmap(fun, (None, 0))(p, X[:, None]).sum()
    )(PARAMS),
    "scan": by_scan,
    "by name": lambda fun: jax.grad(lambda p: fun(x=X, params=p))(PARAMS),
    "shard_map": by_shard_map,
}


@pytest.mark.several_devices
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_derivative_is_the_true_one(name):
    actual, expected = (TRANSFORMATIONS[name](fun) for fun in (INSIDE, loss_fn))
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-7),
        actual,
        expected,
    )


@pytest.mark.slow
def test_each_member_of_an_ensemble_may_have_its_own_scale():
    def grads(scale, x, seen):
        def fun(params):
            return loss_fn({**params, "w": params["w"] * seen}, x)

        return jax.grad(ols.scaled_backward(fun, scale))(PARAMS)

    scales, rows = jnp.float32([2.0, 2.0**10]), jnp.stack([X, -X, 2 * X])
    each = jax.vmap(jax.vmap(grads, (None, 0, None)), (0, None, None))
    other = jax.vmap(jax.vmap(grads, (0, None, None)), (None, 0, None))
    expected = jax.vmap(jax.grad(loss_fn), (None, 0))(PARAMS, rows)
    for actual in (
        each(scales, rows, 1.0),
        jax.tree.map(lambda g: g.swapaxes(0, 1), other(scales, rows, 1.0)),
    ):
        # A CPU may add up products of other shapes in another order, so the bits are
        # those of the same program with scales of 1.
        assert_same_bits(actual, each(jnp.ones(2), rows, 1.0))
        for name, member in itertools.product(PARAMS, range(2)):
            close = np.testing.assert_allclose
            close(actual[name][member], expected[name], rtol=1e-5, atol=1e-7)


def test_the_state_of_several_members_is_refused_outside_vmap():
    state = ols.static_loss_scale(SCALE).init()
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    inside = ols.scaled_backward(loss_fn, several)
    with pytest.raises(ValueError, match="must be a scalar, got shape"):
        inside(PARAMS, X)


def test_auxiliary_data_and_leaves_that_are_held_fixed_pass():
    def loss(params, x):
        return loss_fn(params, x) * params["n"], {"x": x, "name": "loss"}

    inside = ols.scaled_backward(loss, SCALE, has_aux=True)
    grad_fn = jax.value_and_grad(inside, has_aux=True, allow_int=True)
    (value, aux), grads = grad_fn({**PARAMS, "n": 3}, X)
    assert aux["name"] == "loss"
    np.testing.assert_array_equal(value, 3 * loss_fn(PARAMS, X))
    expected = jax.grad(lambda p: 3 * loss_fn(p, X))(PARAMS)
    assert_same_bits({name: grads[name] for name in PARAMS}, expected)


def test_a_trainer_may_add_auxiliary_data_to_the_loss():
    def loss(params, x):
        return loss_fn(params, x), {"penalty": jnp.sum(params["w"] ** 2), "n": 3}

    def total(fun):
        def loss(params):
            value, aux = fun(params, X)
            return value + 0.1 * aux["penalty"]

        return jax.grad(loss)(PARAMS)

    inside = ols.scaled_backward(loss, SCALE, has_aux=True)
    assert_same_bits(total(inside), total(loss))


def test_a_list_of_a_loss_and_auxiliary_data_is_taken_for_a_pair():
    for pair in (list, LossAndAux._make):
        fun = lambda x, pair=pair: pair([x**2, "aux"])  # noqa: E731
        loss, aux = ols.scaled_backward(fun, SCALE, has_aux=True)(jnp.float32(3.0))
        assert (loss, aux) == (9.0, "aux")


class LossAndAux(NamedTuple):
    loss: jax.Array
    aux: str


class Trainer:
    def loss(self, params, x):
        return loss_fn(params, x)

    @ols.autocast
    def lowered_loss(self, params, x):
        return loss_fn(params, x)


@pytest.mark.parametrize(
    "fun",
    [
        lambda *, params, x: loss_fn(params, x),
        jax.jit(loss_fn),
        ols.autocast(loss_fn),
        Trainer().loss,
        Trainer().lowered_loss,
    ],
    ids=["keywords only", "jit", "autocast", "method", "decorated method"],
)
def test_parameters_may_be_passed_by_name(fun):
    by_name = lambda fun: jax.grad(lambda p: fun(params=p, x=X))(PARAMS)  # noqa: E731
    for argnums in (0, -2):
        inside = ols.scaled_backward(fun, SCALE, argnums)
        assert_same_bits(by_name(inside), by_name(fun))


@pytest.mark.parametrize("scale", [np.float32(SCALE), np.asarray(SCALE), int(SCALE)])
def test_the_scale_may_be_a_number_of_any_kind(scale):
    inside = ols.scaled_backward(loss_fn, scale)
    assert_same_bits(jax.grad(inside)(PARAMS, X), jax.grad(INSIDE)(PARAMS, X))


def test_complex_and_float64_parameters_have_true_gradients():
    with enable_x64(True):
        for dtype in (jnp.complex64, jnp.float64, jnp.complex128):
            params = jnp.ones(2, dtype)
            loss = lambda p: jnp.sum(jnp.abs(p) ** 2)  # noqa: E731
            actual = jax.grad(ols.scaled_backward(loss, SCALE))(params)
            assert_same_bits(actual, jax.grad(loss)(params))


@pytest.mark.parametrize("autocast", [lambda fun: fun, ols.autocast])
def test_a_network_may_be_given_where_the_loss_cannot(autocast):
    def network(params, x):
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        return {"mean": hidden[:, 0], "others": (hidden, jnp.arange(3), "text", None)}

    def loss_of(network):
        def loss_fn(params):
            outputs = network(params, X)
            assert outputs["others"][2:] == ("text", None)
            return jnp.mean(outputs["mean"] ** 2) + jnp.sum(outputs["others"][0])

        return loss_fn

    low = autocast(network)
    inside = loss_of(ols.scaled_backward(low, SCALE))
    around = ols.scaled_backward(loss_of(low), SCALE)
    assert_same_bits(*(jax.value_and_grad(loss)(PARAMS) for loss in (inside, around)))


def test_several_arguments():
    def loss(w, x, b):
        return loss_fn({"w": w, "b": b}, x)

    inside = ols.scaled_backward(loss, SCALE, argnums=(0, -1))
    args = PARAMS["w"], X, PARAMS["b"]
    expected = jax.grad(loss, (0, 2))(*args)
    assert_same_bits(jax.grad(inside, (0, 2))(*args), expected)


@pytest.mark.parametrize(
    "argnums", [1, -1, (1,), [-1], iter([1]), np.asarray([1]), (0, 1), np.int64(1)]
)
def test_argnums_name_the_parameters(argnums):
    def loss(x, params):
        return loss_fn(params, x)

    inside = ols.scaled_backward(loss, SCALE, argnums)
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    for _ in range(2):
        with pytest.raises(TypeError, match="float32 or wider, got bfloat16"):
            jax.grad(inside, 1)(X, half)


def test_the_first_argument_may_be_counted_from_behind():
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    with pytest.raises(TypeError, match="float32 or wider, got bfloat16"):
        jax.grad(ols.scaled_backward(loss_fn, SCALE, -2))(half, X)


def test_data_may_be_passed_by_place_and_parameters_by_name():
    def loss(x, y, params):
        return loss_fn(params, x) + y

    def gradient(fun):
        return jax.grad(lambda p: fun(X, y=1.0, params=p))(PARAMS)

    assert_same_bits(gradient(ols.scaled_backward(loss, SCALE, 2)), gradient(loss))


def test_the_scale_of_an_optimizer_that_changes_in_place_is_read_at_each_call():
    model = Weight()
    tx = ols.loss_scaled(optax.sgd(0.1), ols.static_loss_scale(8.0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    seen = sizes_seen(
        lambda look: ols.scaled_backward(lambda x: look(x) * 1.0, optimizer)
    )
    assert seen(jnp.float32(3.0)) == (1.0, 8.0)
    optimizer.opt_state = ols.set_loss_scale(optimizer.opt_state, 2.0)
    assert seen(jnp.float32(3.0)) == (1.0, 2.0)


def test_a_cotangent_may_be_a_number_of_python():
    inside = ols.scaled_backward(lambda x: x**2, SCALE)
    _, backward = jax.vjp(inside, jnp.float32(3.0))
    assert backward(1.0) == (6.0,)


def test_the_function_keeps_its_name_and_signature():
    assert INSIDE.__name__ == "loss_fn"
    assert inspect.signature(INSIDE) == inspect.signature(loss_fn)


def test_a_state_that_is_constant_under_jit_is_warned_of():
    state = ols.dynamic_loss_scale().init()
    inside = ols.scaled_backward(loss_fn, state)
    with pytest.warns(UserWarning, match="is a constant of this jitted function"):
        jax.jit(inside)(PARAMS, X)


@pytest.mark.slow
def test_the_gradient_of_an_argument_that_was_not_named_is_the_true_one():
    for x in (X, X.astype(jnp.float16)):
        expected = jax.grad(loss_fn, (0, 1))(PARAMS, x)
        assert_same_bits(jax.grad(INSIDE, (0, 1))(PARAMS, x), expected)
    of_tree = lambda params, batch: loss_fn(params, batch["x"])  # noqa: E731
    inside, batch = ols.scaled_backward(of_tree, SCALE), {"x": X}
    expected = jax.grad(of_tree, 1)(PARAMS, batch)
    assert_same_bits(jax.grad(inside, 1)(PARAMS, batch), expected)
    by_name = jax.grad(lambda x: INSIDE(PARAMS, x=x))(X)
    assert_same_bits(by_name, jax.grad(loss_fn, 1)(PARAMS, X))


@pytest.mark.slow
def test_two_networks_behind_each_other_are_each_scaled_once():
    """As an actor and its critic, which is differentiated by the action."""
    actor, critic = (
        ols.scaled_backward(fun, scale)
        for fun, scale in ((lambda p, x: jnp.tanh(x @ p["w"]), SCALE), (loss_fn, 8.0))
    )
    critic_params = {"w": jnp.ones((2, 1)), "b": jnp.zeros(1)}

    def through(actor, critic):
        return lambda params: critic(critic_params, actor(params, X))

    plain = through(lambda p, x: jnp.tanh(x @ p["w"]), loss_fn)
    assert_same_bits(jax.grad(through(actor, critic))(PARAMS), jax.grad(plain)(PARAMS))


# --- Models -----------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def net_loss(model, x):
    return jnp.mean(model(x) ** 2)


def plain_numbers(tree):
    leaves = jax.tree.leaves(tree)
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]


@pytest.mark.slow
@pytest.mark.parametrize("jit", [lambda fun: fun, nnx.jit])
def test_modules_of_nnx_are_changed_as_without(jit):
    def run(fun):
        model = Net(nnx.Rngs(0))
        kernel = model.linear.kernel
        result = jit(nnx.value_and_grad(fun))(model, X)
        assert model.linear.kernel is kernel
        return plain_numbers((result, nnx.state(model)))

    assert_same_bits(run(ols.scaled_backward(net_loss, SCALE)), run(net_loss))


def test_a_module_may_be_passed_by_name():
    def gradients(fun):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        return plain_numbers(nnx.grad(lambda m: fun(x=X, model=m))(model))

    inside = ols.scaled_backward(net_loss, SCALE)
    assert_same_bits(gradients(inside), gradients(net_loss))


def test_a_module_may_be_used_again_in_the_same_loss():
    """What follows the function must not have the scale divided out a second time."""

    def gradients(fun):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        decay = 0.1

        def loss(model):
            losses = fun(model, X), fun(model, 2 * X)
            return sum(losses) + decay * jnp.sum(model.kernel[...] ** 2)

        return plain_numbers(nnx.grad(loss)(model))

    assert_same_bits(
        gradients(ols.scaled_backward(net_loss, SCALE)), gradients(net_loss)
    )


@pytest.mark.slow
def test_a_module_that_is_not_differentiated_keeps_what_the_function_changes():
    def statistics(fun):
        model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        grads = nnx.grad(fun)(jnp.ones(3), model)
        return grads, plain_numbers(nnx.state(model, nnx.BatchStat))

    def loss(scale, model):
        return jnp.sum(model(scale * X) * X)

    inside = ols.scaled_backward(loss, SCALE)
    assert_same_bits(statistics(inside), statistics(loss))


class Weight(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(3.0))
        self.seen = nnx.BatchStat(jnp.float32(1.0))


class Wrapper(nnx.Module):
    def __init__(self, model):
        self.model = model
        self.new = nnx.Cache(model.w[...] * 2)


def merged(model):
    return nnx.merge(*nnx.split(model))


# What a function may return beside its loss, and what a trainer adds of it.
RETURNED = {
    "the module": (lambda m: m, lambda m: m.w[...]),
    "its state": (nnx.state, lambda s: s["w"][...]),
    "some of its state": (lambda m: nnx.state(m, nnx.BatchStat), lambda s: s["seen"]),
    "a dict of arrays": (lambda m: nnx.to_pure_dict(nnx.state(m)), lambda s: s["w"]),
    "its variable": (lambda m: m.w, lambda w: w[...]),
    "both": (lambda m: (m, nnx.state(m)), lambda pair: pair[1]["w"][...]),
    "and a copied state": (
        lambda m: (m, nnx.state(nnx.clone(m))),
        lambda pair: pair[1]["w"][...],
    ),
    "a copy": (nnx.clone, lambda m: m.w[...]),
    "a merged module": (merged, lambda m: m.w[...]),
    "a new variable": (lambda m: nnx.Cache(2 * m.w[...]), lambda v: v[...]),
    "a module with both": (lambda m: Wrapper(m), lambda w: w.new[...] + w.model.w[...]),
}


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("name", RETURNED)
def test_a_gradient_through_what_a_function_of_modules_returns_is_true(name, by_name):
    returned, read = RETURNED[name]

    def fun(model):
        model.seen[...] = model.w[...] ** 3
        return 2 * model.w[...], returned(model)

    def gradient(fun):
        def loss(model):
            value, other = fun(model=model) if by_name else fun(model)
            return value + jnp.asarray(read(other)) ** 2 + model.seen[...]

        return plain_numbers(nnx.grad(loss)(Weight()))

    for has_aux in (True, False):
        inside = ols.scaled_backward(fun, SCALE, has_aux=has_aux)
        assert_same_bits(gradient(inside), gradient(fun))


def test_what_follows_the_function_is_not_scaled_on_its_way():
    """With the largest scale it would overflow."""
    inside = ols.scaled_backward(lambda m: 1e-30 * m.w[...], 2.0**126)
    grads = nnx.grad(lambda m: inside(m) + 8 * m.w[...])(Weight())
    assert grads["w"][...] == 8.0


def test_a_module_inside_one_that_is_returned_is_changed_back():
    def gradient(fun):
        def loss(model):
            value, _ = fun(model)
            return value + 0.1 * model.w[...] ** 2

        return plain_numbers(nnx.grad(loss)(Weight()))

    fun = lambda m: (m.w[...] ** 2, Wrapper(m))  # noqa: E731
    inside = ols.scaled_backward(fun, SCALE, has_aux=True)
    assert_same_bits(gradient(inside), gradient(fun))


def test_a_gradient_through_a_state_that_is_returned_beside_a_module_is_true():
    def fun(model, state):
        return model.w[...] * state["w"][...], (model, state)

    def gradient(fun):
        return jax.grad(lambda s: fun(Weight(), s)[1][1]["w"][...] ** 2)

    inside = ols.scaled_backward(fun, SCALE, argnums=1, has_aux=True)
    state = nnx.state(Weight())
    assert_same_bits(gradient(inside)(state), gradient(fun)(state))


def test_a_module_that_is_only_read_may_be_returned_under_vmap():
    model = Weight()
    fun = lambda x, model: (model.w[...] * x, model)  # noqa: E731
    inside = ols.scaled_backward(fun, SCALE, has_aux=True)
    grads = jax.vmap(jax.grad(lambda x: inside(x, model)[0]))(jnp.ones(2))
    assert grads.tolist() == [3.0, 3.0]


def test_a_module_that_is_returned_stays_the_same_object():
    own, other = Weight(), Weight()
    fun = lambda own, other: (own.w[...], {"own": own, "other": other})  # noqa: E731
    _, returned = ols.scaled_backward(fun, SCALE, has_aux=True)(own, other)
    assert returned["own"] is own
    assert returned["other"] is other


# Arguments that share a variable, and a function of them.
SHARED = {
    "one module": ((0, 1), lambda m: (m, m), lambda a, b: a.w[...] * b.w[...]),
    "its variable": ((0, 1), lambda m: (m, m.w), lambda m, w: m.w[...] * w[...]),
    "its state": (0, lambda m: (m, nnx.state(m)), lambda m, s: m.w[...] * s["w"][...]),
    "a state": (1, lambda m: (nnx.state(m), m), lambda s, m: m.w[...] * s["w"][...]),
    "a list": (0, lambda m: ([m, m],), lambda ms: ms[0].w[...] * ms[1].w[...]),
}


@pytest.mark.parametrize("name", SHARED)
def test_arguments_may_share_a_variable(name):
    argnums, share, fun = SHARED[name]

    def gradient(fun):
        return plain_numbers(nnx.grad(lambda m: fun(*share(m)) + m.w[...])(Weight()))

    inside = ols.scaled_backward(fun, SCALE, argnums)
    assert_same_bits(gradient(inside), gradient(fun))


def test_a_state_beside_a_module_that_is_not_named_has_true_gradients():
    def fun(x, tree):
        return x * tree["state"]["w"][...] * tree["model"].w[...]

    def gradient(fun):
        model, state = Weight(), nnx.state(Weight())
        loss = lambda s: fun(jnp.ones(()), {"model": model, "state": s})  # noqa: E731
        return plain_numbers(jax.grad(loss)(state))

    assert_same_bits(gradient(ols.scaled_backward(fun, SCALE)), gradient(fun))


def test_of_two_modules_both_are_changed_back():
    def fun(encoder, decoder):
        return encoder.w[...] * decoder.w[...]

    def gradients(fun):
        def loss(encoder, decoder):
            decay = encoder.w[...] ** 2 + decoder.w[...] ** 2
            return fun(encoder, decoder) + fun(encoder, decoder) + decay

        return plain_numbers(nnx.grad(loss, argnums=(0, 1))(Weight(), Weight()))

    inside = ols.scaled_backward(fun, SCALE, argnums=(0, 1))
    assert_same_bits(gradients(inside), gradients(fun))


def test_after_an_error_a_module_is_changed_back():
    def broken(model):
        raise ValueError("of its own")

    def loss(model):
        with pytest.raises(ValueError, match="of its own"):
            ols.scaled_backward(broken, SCALE)(model)
        return model.w[...] ** 2

    assert nnx.grad(loss)(Weight())["w"][...] == 6.0


def test_a_module_that_is_no_argument_of_a_transformation_is_an_error_with_a_cure():
    inside = ols.scaled_backward(lambda model, x: model.w[...] * x, SCALE)
    model, x = Weight(), jnp.arange(3.0)
    if not IS_JAX_0_7:  # Its Flax allows it.
        with pytest.raises(ValueError, match="Pass the module as an argument"):
            jax.vmap(lambda x: inside(model, x))(x)
    assert jax.vmap(inside, (None, 0))(model, x).tolist() == [0.0, 3.0, 6.0]


@pytest.mark.parametrize("argnums", [0, 1])
def test_arrays_beside_a_module_have_true_gradients(argnums):
    def loss(tree, x):
        return net_loss(tree["model"], x) + jnp.sum(tree["w"] ** 2)

    def gradient(fun):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        return jax.grad(lambda w: fun({"model": model, "w": w}, X))(jnp.ones(2))

    def gradients(fun):
        tree = {"model": nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "w": jnp.ones(2)}
        return plain_numbers(nnx.grad(fun)(tree, X))

    inside = ols.scaled_backward(loss, SCALE, argnums)
    if argnums == 0:
        assert_same_bits(gradients(inside), gradients(loss))
    else:  # A trainer may differentiate an argument that was not named.
        assert_same_bits(gradient(inside), gradient(loss))


def test_half_precision_data_beside_a_module_have_true_gradients():
    def loss(params, batch):
        x = batch["x"].astype(jnp.float32)
        return loss_fn(params, x) + net_loss(batch["teacher"], x)

    def gradient(fun):
        teacher = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        to_x = jax.grad(lambda x: fun(PARAMS, {"teacher": teacher, "x": x}))
        return to_x(X.astype(jnp.float16))

    assert_same_bits(gradient(ols.scaled_backward(loss, SCALE)), gradient(loss))


def test_a_gradient_goes_through_what_a_module_remembers_from_call_to_call():
    class Cell(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            self.hidden = nnx.Cache(jnp.zeros((4, 3)))

        def __call__(self, x):
            self.hidden[...] = jnp.tanh(self.linear(x + self.hidden[...]))
            return self.hidden[...]

    def gradients(fun):
        def loss(cell):
            fun(cell, X)
            return fun(cell, X)

        return plain_numbers(nnx.grad(loss)(Cell()))

    inside = ols.scaled_backward(net_loss, SCALE)
    assert_same_bits(gradients(inside), gradients(net_loss))


def test_a_module_may_gain_variables_in_the_call():
    class Remembering(nnx.Linear):
        def __call__(self, x):
            y = super().__call__(x)
            self.a_first_one = nnx.Intermediate(y)
            return y

    def run(fun):
        model = Remembering(3, 2, rngs=nnx.Rngs(0))
        return plain_numbers((nnx.value_and_grad(fun)(model, X), nnx.state(model)))

    assert_same_bits(run(ols.scaled_backward(net_loss, SCALE)), run(net_loss))


@pytest.mark.slow
def test_outside_a_derivative_a_module_keeps_its_arrays():
    model = Net(nnx.Rngs(0))
    array = model.linear.kernel[...]
    ols.scaled_backward(net_loss, SCALE)(model, X)
    assert model.linear.kernel[...] is array


@pytest.mark.slow
def test_lora_trains_beside_half_precision_weights():
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    model = nnx.LoRA(3, 2, 4, base_module=layer, rngs=nnx.Rngs(1))
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    inside = ols.scaled_backward(net_loss, SCALE)
    actual, expected = (
        nnx.grad(fun, argnums=wrt)(model, X) for fun in (inside, net_loss)
    )
    assert_same_bits(plain_numbers(actual), plain_numbers(expected))


@pytest.mark.slow
def test_equinox_and_linen():
    mlp = eqx.nn.Sequential(
        [eqx.nn.Linear(3, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.5)]
    )

    def eqx_loss(model, x):
        keys = jax.random.split(jax.random.key(1), len(x))
        return jnp.mean(jax.vmap(lambda x, key: model(x, key=key))(x, keys) ** 2)

    inside = ols.scaled_backward(eqx_loss, SCALE)
    assert_same_bits(eqx.filter_grad(inside)(mlp, X), eqx.filter_grad(eqx_loss)(mlp, X))

    dense = nn.Dense(2)
    variables = dense.init(jax.random.key(0), X)

    def linen_loss(variables, x):
        return jnp.mean(dense.apply(variables, x) ** 2)

    inside = ols.scaled_backward(linen_loss, SCALE)
    assert_same_bits(jax.grad(inside)(variables, X), jax.grad(linen_loss)(variables, X))


# --- With an optimizer ------------------------------------------------------------


def run_trainer(loss, tx, batches):
    """What trainers do: they differentiate, log the norm, and update."""
    optimizer = nnx.Optimizer(Net(nnx.Rngs(0)), tx, wrt=nnx.Param)
    model, norms = Net(nnx.Rngs(0)), []

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss(optimizer))(model, x)
        optimizer.update(model, grads)
        return value, optax.tree.norm(grads)

    for x in batches:
        norms.append(step(model, optimizer, x))
    return norms, nnx.state(model, nnx.Param), optimizer


@pytest.mark.slow
def test_a_trainer_logs_true_numbers_and_a_bad_batch_is_skipped():
    bad = X.at[0, 0].set(jnp.inf)
    rule = ols.dynamic_loss_scale()
    plain = run_trainer(lambda _: net_loss, optax.sgd(0.1), [X, X])
    for loss, tx, scale in (
        (
            lambda _: ols.scaled_backward(net_loss, SCALE),
            ols.loss_scaled(optax.sgd(0.1), ols.static_loss_scale(1.0)),
            1.0,
        ),
        (
            lambda optimizer: ols.scaled_backward(net_loss, optimizer),
            ols.loss_scaled(optax.sgd(0.1), rule, grads_unscaled=True),
            2.0**14,
        ),
    ):
        logged, params, optimizer = run_trainer(loss, tx, [X, X])
        np.testing.assert_allclose(logged, plain[0], rtol=1e-5)
        jax.tree.map(
            lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5), params, plain[1]
        )
        _, params, optimizer = run_trainer(loss, tx, [X, bad])
        _, expected, _ = run_trainer(loss, tx, [X])
        assert_same_bits(jax.tree.leaves(params), jax.tree.leaves(expected))
        metrics = ols.loss_scale_metrics(optimizer)
        assert metrics["total_notfinite"] == 1
        assert metrics["loss_scale"] == scale


def test_an_argument_of_update_goes_before_that_of_the_optimizer():
    tx = ols.loss_scaled(
        optax.sgd(1.0), ols.static_loss_scale(8.0), grads_unscaled=True
    )
    params, grads = jnp.ones(2), jnp.full(2, 16.0)
    for settings, expected in (({}, -16.0), ({"grads_unscaled": False}, -2.0)):
        updates, _ = tx.update(grads, tx.init(params), params, **settings)
        np.testing.assert_array_equal(updates, expected)
    with pytest.raises(TypeError, match="`grads_unscaled` must be True or False"):
        ols.loss_scaled(optax.sgd(1.0), grads_unscaled="yes")


def test_without_the_setting_the_second_division_is_warned_of():
    tx = ols.loss_scaled(optax.sgd(0.1))

    @jax.jit
    def step(params, state, x):
        grads = jax.grad(ols.scaled_backward(loss_fn, state))(params, x)
        return tx.update(grads, state, params)

    with pytest.warns(UserWarning, match="unscaled already"):
        step(PARAMS, tx.init(PARAMS), X)


# --- Errors -----------------------------------------------------------------------


def test_parameters_below_float32_are_refused_when_they_are_differentiated():
    for dtype in ("bfloat16", "float8_e4m3fn"):
        low = jax.tree.map(lambda p, dtype=dtype: p.astype(dtype), PARAMS)

        def widened(params, x):
            params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            return loss_fn(params, x)

        inside = ols.scaled_backward(widened, SCALE)
        inside(low, X)
        message = rf"float32 or wider, got {dtype}.*cast_params"
        with pytest.raises(TypeError, match=message):
            jax.grad(inside)(low, X)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ols.scaled_backward(loss_fn, 0.0), ValueError, "must be positive"),
        (
            lambda: ols.scaled_backward(loss_fn, jnp.float32(2.0**127)),
            ValueError,
            "must be positive",
        ),
        (lambda: ols.scaled_backward(1.0, 2.0), TypeError, "must be a function"),
        (lambda: ols.scaled_backward(loss_fn, "8"), TypeError, "must be a number"),
        (
            lambda: ols.scaled_backward(loss_fn, {"w": jnp.ones(2)}),
            ValueError,
            "must hold a LossScaleState",
        ),
        (lambda: INSIDE(x=X), TypeError, "its argument 0, which is differentiated"),
        (
            lambda: ols.scaled_backward(lambda p: p, 2.0, has_aux=True)(1.0),
            TypeError,
            "must return a pair",
        ),
        (
            lambda: ols.scaled_backward(lambda p: (p, 1, 2), 2.0, has_aux=True)(1.0),
            TypeError,
            "must return a pair",
        ),
        (
            lambda: ols.scaled_backward(lambda p: p, 2.0, argnums=1)(1.0),
            TypeError,
            "its argument 1, which is differentiated",
        ),
        (
            lambda: ols.scaled_backward(lambda p: p, 2.0, argnums=2)(1.0),
            TypeError,
            "its argument 2, which is differentiated",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
