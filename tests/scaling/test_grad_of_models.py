"""`scaled_value_and_grad` of NNX modules and states, and of Equinox modules."""

import collections
import functools
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

import optax_lossscale as ols
from helpers import modules
from helpers.compare import assert_same_bits

# Flax's and Equinox's layers need it.
pytestmark = pytest.mark.usefixtures("standard_promotion")
X = jnp.arange(8.0).reshape(4, 2) / 4
Y = jnp.ones((4, 2))
SCALE = 2.0**10
STATE = ols.static_loss_scale(SCALE).init()
Net = functools.partial(modules.Net, width=2)


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def assert_scaled(grads, expected):
    """Checks that gradients are `SCALE` times those of NNX, of the same variables."""
    paths = jax.tree_util.tree_leaves_with_path(expected)
    pairs = jax.tree_util.tree_leaves_with_path(grads)
    for (path, one), (expected_path, other) in zip(pairs, paths, strict=True):
        assert path == expected_path
        np.testing.assert_allclose(one, other * SCALE, rtol=1e-5, atol=1e-2)


@pytest.mark.slow
def test_a_module_is_differentiated_and_changed_as_by_nnx():
    ours, theirs = Net(), Net()
    run = nnx.jit(lambda *args: ols.scaled_value_and_grad(loss_fn, STATE)(*args))
    expected_run = nnx.jit(nnx.value_and_grad(loss_fn))
    for _ in range(2):
        loss, grads = run(ours, X, Y)
        expected_loss, expected = expected_run(theirs, X, Y)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        assert_scaled(grads, expected)
    assert int(ours.dropout.rngs.count[...]) == 2
    modules.assert_same_state(nnx.state(ours), nnx.state(theirs), rtol=1e-6)


class Deep(nnx.Module):
    def __init__(self):
        self.layers = nnx.vmap(lambda key: nnx.Linear(2, 2, rngs=nnx.Rngs(key)))(
            jax.random.split(jax.random.key(0), 3)
        )

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return nnx.tanh(layer(x))

        return forward(x, self.layers)


def of_two(one, other, x):
    return jnp.mean(one(x) * other(x))


def with_keyword(model, x, *, y, train):
    return loss_fn(model, x, y) * (2.0 if train else 1.0)


def with_aux(model, x):
    out = model(x)
    return jnp.mean(out), {"out": out}


KERNELS = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("kernel")))
PARTIAL = functools.partial(with_keyword, y=Y, train=True)
# A loss function, settings, and how to make its arguments.
LOSSES = {
    "several modules": (of_two, {"argnums": (0, 1)}, lambda: (Net(0), Net(1), X)),
    "the second one": (of_two, {"argnums": 1}, lambda: (Net(0), Net(1), X)),
    "some variables": (loss_fn, {"argnums": KERNELS}, lambda: (Net(), X, Y)),
    "some, and all": (of_two, {"argnums": (KERNELS, 1)}, lambda: (Net(0), Net(1), X)),
    "a partial": (PARTIAL, {}, lambda: (Net(), X)),
    "mapped and scanned layers": (loss_fn, {}, lambda: (Deep(), X, Y)),
    "auxiliary output": (with_aux, {"has_aux": True}, lambda: (Net(), X)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_every_way_of_passing_modules_is_differentiated_as_by_nnx(name):
    fun, settings, arguments = LOSSES[name]
    grads = ols.scaled_grad(fun, STATE, **settings)(*arguments())
    expected = nnx.grad(fun, **settings)(*arguments())
    if settings.get("has_aux"):
        (grads, aux), (expected, expected_aux) = grads, expected
        np.testing.assert_allclose(aux["out"], expected_aux["out"], rtol=1e-6)
    assert_scaled(grads, expected)


def test_keyword_arguments_of_nnx_pass_through():
    class Quantized(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2, jnp.int8))
            self.gain = nnx.Param(jnp.float32(2.0))

    fun = lambda m: jnp.sum(m.w[...].astype(jnp.float32)) * m.gain[...]  # noqa: E731
    grads = ols.scaled_grad(fun, STATE, allow_int=True)(Quantized())
    assert grads["gain"][...] == 2 * ols.get_loss_scale(STATE)


def test_data_may_be_passed_by_keyword_beside_a_module():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    state = ols.static_loss_scale(8.0).init()
    fun = lambda model, x: jnp.sum(model(x) ** 2)  # noqa: E731
    x = jnp.ones((4, 3))
    actual = ols.scaled_grad(fun, state)(model, x=x)
    assert_same_bits(actual, ols.scaled_grad(fun, state)(model, x))


@pytest.mark.slow
def test_a_module_may_be_passed_by_keyword():
    grads = ols.scaled_grad(loss_fn, STATE)(model=Net(), x=X, y=Y)
    assert_scaled(grads, nnx.grad(loss_fn)(Net(), X, Y))


class Adapted(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.base = nnx.Linear(2, 2, rngs=rngs)
        self.lora = nnx.LoRA(2, 1, 2, rngs=rngs)

    def __call__(self, x):
        return self.base(x) + self.lora(x)


@pytest.mark.slow
@pytest.mark.parametrize("wrt", [nnx.LoRAParam, [nnx.LoRAParam]])
def test_the_variables_of_an_nnx_optimizer_are_differentiated(wrt):
    model = Adapted()
    tx = ols.loss_scaled(optax.sgd(0.1), ols.static_loss_scale(SCALE))
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    graph, state = nnx.split(model)
    before = jnp.copy(model.base.kernel[...])
    grads = ols.scaled_grad(loss_fn, optimizer)(model, X, Y)
    wanted = nnx.DiffState(0, nnx.LoRAParam)
    assert_scaled(grads, nnx.grad(loss_fn, argnums=wanted)(model, X, Y))
    assert list(grads) == ["lora"]
    of_state = ols.scaled_grad(lambda s: loss_fn(nnx.merge(graph, s), X, Y), optimizer)
    assert_scaled(of_state(state), jax.tree.map(lambda x: x / SCALE, grads))
    optimizer.update(model, grads)
    assert_same_bits(model.base.kernel[...], before)


def test_a_module_beside_arrays_and_other_things_is_differentiated_with_them():
    def fun(tree):
        assert tree["name"] == "x"
        return jnp.mean(tree["model"](X) * tree["w"])

    tree = {"model": Net(), "w": jnp.ones(2), "n": 3, "name": "x"}
    grads = ols.scaled_grad(fun, STATE)(tree)
    expected = nnx.grad(lambda model: jnp.mean(model(X)))(Net())
    assert_scaled(grads["model"], expected)
    assert grads["w"].shape == (2,)
    assert (grads["n"], grads["name"]) == (None, None)


def test_the_scale_of_each_call_is_that_of_the_optimizer_at_the_call():
    model = Net()
    tx = ols.loss_scaled(optax.sgd(0.1), ols.dynamic_loss_scale(SCALE))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    run = ols.scaled_grad(lambda model: jnp.sum(model.linear.bias[...]), optimizer)
    np.testing.assert_array_equal(run(model)["linear"]["bias"][...], [SCALE, SCALE])
    optimizer.update(model, jax.tree.map(lambda x: x * jnp.inf, run(model)))
    np.testing.assert_array_equal(run(model)["linear"]["bias"][...], [SCALE / 2] * 2)


@pytest.mark.slow
def test_a_training_step_runs_in_nnx_scan():
    tx = ols.loss_scaled(optax.sgd(0.1), ols.static_loss_scale(SCALE))

    def train(model, optimizer, x, y):
        loss, grads = ols.scaled_value_and_grad(loss_fn, optimizer)(model, x, y)
        optimizer.update(model, grads)
        return loss

    looped, scanned = Net(), Net()
    optimizer = nnx.Optimizer(looped, tx, wrt=nnx.Param)
    expected = [train(looped, optimizer, X * i, Y) for i in range(3)]
    optimizer = nnx.Optimizer(scanned, tx, wrt=nnx.Param)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(carry, i):
        return carry, train(*carry, X * i, Y)

    _, losses = body((scanned, optimizer), jnp.arange(3.0))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    modules.assert_same_state(nnx.state(scanned), nnx.state(looped), rtol=1e-4)


def test_of_states_the_parameters_are_differentiated_and_all_else_is_held_fixed():
    graph, state = nnx.split(Net())

    def of_states(*states):
        return loss_fn(nnx.merge(graph, *states), X, Y)

    expected = nnx.grad(loss_fn)(Net(), X, Y)
    assert_scaled(ols.scaled_grad(of_states, STATE)(state), expected)
    parts = nnx.split_state(state, nnx.Param, ...)
    grads = ols.scaled_grad(lambda states: of_states(*states), STATE)(parts)
    assert_scaled(grads[0], expected)
    assert grads[1] is None


class EqxNet(eqx.Module):
    """An Equinox model with functions, flags, numbers and integers among its leaves."""

    layer: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    table: jax.Array
    temperature: float

    def __init__(self):
        self.layer = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
        self.dropout = eqx.nn.Dropout(0.5)
        self.table = jnp.arange(2)
        self.temperature = 2.0

    def __call__(self, x, key):
        return self.dropout(self.layer(x), key=key) / self.temperature


def eqx_loss(model, x, key):
    return jnp.mean(jax.vmap(model, (0, None))(x, key) ** 2)


@pytest.mark.slow
def test_an_equinox_module_is_differentiated_as_by_equinox():
    model, key = EqxNet(), jax.random.key(1)
    run = eqx.filter_jit(ols.scaled_value_and_grad(eqx_loss, STATE))
    loss, grads = run(model, X, key)
    expected_run = eqx.filter_jit(eqx.filter_value_and_grad(eqx_loss))
    expected_loss, expected = expected_run(model, X, key)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b * SCALE, rtol=1e-5),
        grads,
        expected,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", [ols.static_loss_scale(SCALE), ols.no_loss_scale()])
def test_init_and_update_take_an_equinox_module_whole_or_filtered(rule):
    model = EqxNet()
    tx = ols.loss_scaled(optax.adamw(0.1), rule)
    params = eqx.filter(model, eqx.is_inexact_array)
    opt_state = tx.init(params)
    assert_same_bits(tx.init(model), opt_state)
    grads = ols.scaled_grad(eqx_loss, opt_state)(model, X, jax.random.key(1))
    of_params, of_model = (
        tx.update(grads, opt_state, each)[0] for each in (params, model)
    )
    trained = eqx.apply_updates(model, of_model)
    assert_same_bits(eqx.filter(of_model, eqx.is_inexact_array), of_params)
    bare = optax.adamw(0.1)
    grads = ols.unscale(grads, opt_state)
    updates, _ = bare.update(grads, bare.init(params), params)
    expected = eqx.apply_updates(params, updates)
    assert_same_bits(eqx.filter(trained, eqx.is_inexact_array), expected)


def test_leaves_that_are_no_floating_arrays_are_held_fixed_and_get_none():
    params = {"w": jnp.ones(2), "steps": jnp.arange(2), "name": "x", "count": 3}

    def fun(params):
        assert params["name"] == "x"
        assert params["count"] == 3
        return jnp.sum(params["w"] / 2)

    grads = ols.scaled_grad(fun, STATE)(params)
    np.testing.assert_array_equal(grads.pop("w"), [SCALE / 2] * 2)
    assert grads == {"steps": None, "name": None, "count": None}


@pytest.mark.slow
def test_a_python_float_is_trained_in_a_dict_and_is_a_setting_in_a_module():
    dropout = eqx.nn.Dropout(0.5)
    params = {"w": jnp.ones(2), "temperature": 0.5, "layers": [dropout]}

    def fun(params):
        return jnp.sum(params["w"] * params["temperature"] * params["layers"][0].p)

    tx = ols.loss_scaled(optax.sgd(0.25), ols.static_loss_scale(SCALE))
    state = tx.init(params)
    grads = ols.scaled_grad(fun, state)(params)
    assert (grads["temperature"], grads["layers"][0].p) == (SCALE, None)
    updates, _ = tx.update(grads, state, params)
    assert (updates["temperature"], updates["layers"][0].p) == (-0.25, None)


HELD = {
    "int8": jnp.ones(3, jnp.int8),
    "bool": jnp.array([True, False]),
    "number": 3,
    "flag": True,
    "numpy": np.arange(2),
}


WAYS = {
    "scaled": (ols.loss_scaled(optax.adam(0.25), ols.static_loss_scale(SCALE)), {}),
    "bare": (ols.loss_scaled(optax.adam(0.25), ols.no_loss_scale()), {}),
    "accepted": (
        ols.loss_scaled(optax.adam(0.25), ols.no_loss_scale()),
        {"accept": True},
    ),
    "link": (
        optax.chain(
            ols.loss_scaled(loss_scale=ols.static_loss_scale(SCALE)), optax.adam(0.25)
        ),
        {},
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [dict, collections.namedtuple("Params", ["w", *HELD])])
def test_numbers_that_are_held_fixed_keep_value_and_dtype_over_a_step(make, way):
    params = make(w=jnp.ones(3), **HELD)
    tx, verdicts = WAYS[way]
    state = tx.init(params)
    leaf = operator.itemgetter if make is dict else operator.attrgetter
    grads = ols.scaled_grad(lambda p: leaf("w")(p).sum(), state)(params)
    updates, state = tx.update(grads, state, params, **verdicts)
    new = optax.apply_updates(params, updates)
    np.testing.assert_allclose(leaf("w")(new), [0.75] * 3, rtol=1e-5)
    for name, held in HELD.items():
        assert leaf(name)(grads) is None
        np.testing.assert_array_equal(leaf(name)(new), held)
        assert leaf(name)(new).dtype == jnp.asarray(held).dtype


@struct.dataclass
class Registered:
    w: object
    int8: object
    bool: object


@pytest.mark.parametrize("optimizer", [ols.loss_scaled, ols.master_weights])
def test_optax_applies_the_updates_of_integer_arrays_in_a_node_of_your_own(optimizer):
    params = Registered(jnp.ones(3), HELD["int8"], HELD["bool"])
    tx = optimizer(optax.adam(0.25))
    grads = Registered(jnp.ones(3), None, None)
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    np.testing.assert_allclose(new.w, [0.75] * 3, rtol=1e-3)
    assert_same_bits((new.int8, new.bool), (params.int8, params.bool))


def test_each_of_several_arguments_may_hold_integers():
    params = {"w": jnp.ones(2), "n": jnp.arange(2)}
    grad = ols.scaled_grad(lambda a, b: jnp.sum(a["w"] * b["w"]), STATE, argnums=(0, 1))
    expected = {"w": jnp.full(2, SCALE), "n": None}
    assert_same_bits(grad(params, params), (expected, expected))


def test_a_setting_of_numpy_in_a_module_stays_what_it_is():
    layer = eqx.nn.Lambda(np.arange(2))
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=jax.random.key(0)), layer])
    tx = ols.loss_scaled(optax.sgd(0.1))
    grads = jax.tree.map(lambda x: x if eqx.is_inexact_array(x) else None, model)
    updates, _ = tx.update(grads, tx.init(model), model)
    assert eqx.apply_updates(model, updates).layers[1].fn is layer.fn


@pytest.mark.slow
def test_a_python_float_in_a_variable_of_nnx_is_trained_as_by_nnx():
    class Model(nnx.Module):
        def __init__(self):
            self.w, self.gain = nnx.Param(jnp.ones(3)), nnx.Param(2.0)

    def loss(model):
        return model.gain * model.w[...].sum()

    ours, bare = Model(), Model()
    optimizer = nnx.Optimizer(ours, ols.loss_scaled(optax.adam(0.1)), wrt=nnx.Param)
    optimizer.update(ours, ols.scaled_grad(loss, optimizer)(ours))
    optimizer = nnx.Optimizer(bare, optax.adam(0.1), wrt=nnx.Param)
    optimizer.update(bare, nnx.grad(loss)(bare))
    assert_same_bits(nnx.state(ours), nnx.state(bare))


@pytest.mark.parametrize(
    ("of_held", "with_params"),
    [(jnp.zeros(3), True), (jnp.zeros(3, int), True), (jnp.zeros(3, int), False)],
)
def test_a_gradient_of_what_is_held_fixed_is_dropped(of_held, with_params):
    params = {"w": jnp.ones(3), "n": jnp.arange(3)}
    tx = ols.loss_scaled(optax.sgd(0.1, momentum=0.9), ols.static_loss_scale(1.0))
    grads = {"w": jnp.ones(3), "n": of_held}
    given = (params,) if with_params else ()
    updates, _ = tx.update(grads, tx.init(params), *given)
    np.testing.assert_allclose(updates["w"], [-0.1] * 3, rtol=1e-6)
    assert updates["n"] is None or updates["n"].tolist() == [0, 0, 0]


def test_keys_strings_and_functions_are_held_fixed_over_a_step():
    params = {"w": jnp.ones(2), "key": jax.random.key(0), "name": "x", "act": jnp.tanh}
    tx = ols.loss_scaled(optax.adam(0.25))
    state = tx.init(params)
    grads = ols.scaled_grad(lambda p: p["act"](p["w"]).sum(), state)(params)
    updates, state = tx.update(grads, state, params)
    new = eqx.apply_updates(params, updates)  # Optax's adds a number to each leaf.
    assert [new[name] is params[name] for name in ("key", "name", "act")] == [True] * 3
    np.testing.assert_allclose(new["w"], [0.75] * 2, rtol=1e-5)


def test_python_numbers_alone_are_differentiated_as_by_jax():
    grads = ols.scaled_grad(lambda p: p["a"] * p["b"], STATE)({"a": 2.0, "b": 3.0})
    assert grads == {"a": 3 * SCALE, "b": 2 * SCALE}


def test_an_argument_without_anything_to_differentiate_raises_the_error_of_jax():
    with pytest.raises(
        TypeError, match="grad requires real- or complex-valued inputs"
    ) as error:
        ols.scaled_grad(lambda tokens: jnp.sum(tokens), STATE)(jnp.arange(3))
    assert any("let `argnums` name" in note for note in error.value.__notes__)


def test_a_variable_or_module_that_an_argument_holds_twice_stays_one():
    weight, layer = nnx.Param(jnp.ones(2)), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    tree = {"layer": layer, "tied": layer.kernel, "twice": [weight, weight]}

    def fun(tree):
        one, other = tree["twice"]
        of_weights = jnp.sum(one[...] * 3.0) + jnp.sum(other[...] ** 2)
        return jnp.sum(tree["layer"](X)) + jnp.sum(tree["tied"][...] * 3.0) + of_weights

    assert_scaled(ols.scaled_grad(fun, STATE)(tree), nnx.grad(fun)(tree))


class Count(nnx.Variable):
    """A variable of a user's own."""


@pytest.mark.parametrize("beside", ["a module", "a variable", "nothing"])
@pytest.mark.parametrize("how", ["in a tree", "by position", "by keyword"])
def test_what_a_call_changes_in_a_variable_reaches_it(beside, how):
    count = Count(jnp.asarray(0.0))

    def fun(tree, count=None):
        count = tree["count"] if count is None else count
        count[...] += 1.0
        return jnp.sum(tree["w"][...])

    weight = nnx.Param(jnp.ones(2)) if beside != "nothing" else jnp.ones(2)
    tree = {"w": weight, "m": Net() if beside == "a module" else None}
    grad_fn = ols.scaled_grad(fun, STATE)
    if how == "in a tree":
        grad_fn({**tree, "count": count})
    elif how == "by position":
        grad_fn(tree, count)
    else:
        grad_fn(tree, count=count)
    assert count[...] == 1.0


@pytest.mark.skipif(
    not hasattr(nnx, "set_graph_mode"), reason="this Flax's optimizer does not select"
)
@pytest.mark.parametrize("graph_mode", [True, False])
@pytest.mark.parametrize(
    "wrt", [nnx.PathContains("head"), lambda path, _: path[0] == "head", nnx.Param]
)
def test_an_optimizer_of_several_modules_may_select_by_their_paths(wrt, graph_mode):
    with nnx.set_graph_mode(graph_mode):
        models = {name: nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for name in ("body", "head")}
        tx = ols.loss_scaled(optax.sgd(1.0), ols.static_loss_scale(SCALE))
        optimizer = nnx.Optimizer(models, tx, wrt=wrt)

        def fun(models):
            return jnp.sum(models["head"](models["body"](X)))

        before = jnp.copy(models["body"].bias[...])
        optimizer.update(models, ols.scaled_grad(fun, optimizer)(models))
        np.testing.assert_array_equal(models["head"].bias[...], [-4.0, -4.0])
        is_frozen = bool(jnp.all(models["body"].bias[...] == before))
        assert is_frozen == (wrt is not nnx.Param)


def test_a_model_may_have_variables_that_are_refs():
    class Counts(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.float32(3.0))
            self.calls = nnx.Variable(jnp.zeros(()), ref=True)

    @nnx.jit
    def gradient(model):
        grads = ols.scaled_grad(lambda model: model.w[...] ** 2, STATE)(model)
        return grads["w"][...]

    assert gradient(Counts()) == 6 * ols.get_loss_scale(STATE)
