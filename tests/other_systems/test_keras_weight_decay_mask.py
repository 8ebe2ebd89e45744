"""`weight_decay_mask`, Keras's `exclude_from_weight_decay`, and frozen parameters."""

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types

PARAMS = {
    "layer": {"kernel": jnp.asarray([1.0, -2.0]), "bias": jnp.asarray([3.0])},
    "norm": jnp.asarray([4.0]),
}


pytestmark = pytest.mark.usefixtures("standard_promotion")


def is_decayed(path, _):
    """Keras's `exclude_from_weight_decay(var_names=["bias", "norm"])`."""
    return not any(word in jax.tree_util.keystr(path) for word in ("bias", "norm"))


def exclude_by_name(params):
    return jax.tree.map_with_path(is_decayed, params)


def halved(mask, inner=None, **options):
    """An optimizer that halves the parameters that the mask marks."""
    inner = optax.sgd(1.0) if inner is None else inner
    settings = {"weight_decay": 0.5, "learning_rate": 1.0, "weight_decay_mask": mask}
    return ols.loss_scale_optimizer(inner, 8.0, **settings, **options)


def step(tx, params, grads=None, opt_state=None):
    """Parameters and state after one step, with zero gradients if none are given."""
    opt_state = tx.init(params) if opt_state is None else opt_state
    grads = jax.tree.map(jnp.zeros_like, params) if grads is None else grads
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


EXCLUDED = exclude_by_name(PARAMS)
MASKS = {
    "a function": exclude_by_name,
    "a tree": EXCLUDED,
    "a prefix": {"layer": EXCLUDED["layer"], "norm": False},
    "NumPy's bools": jax.tree.map(np.bool_, EXCLUDED),
    "NumPy's arrays": jax.tree.map(np.asarray, EXCLUDED),
    "JAX's bools": jax.tree.map(jnp.asarray, EXCLUDED),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_only_parameters_that_the_mask_marks_decay(mask):
    params, _ = step(halved(mask), PARAMS)
    assert params["layer"]["kernel"].tolist() == [0.5, -1.0]
    assert (params["layer"]["bias"], params["norm"]) == (3.0, 4.0)


@pytest.mark.parametrize("mask", [None, True, lambda params: True])
def test_without_exceptions_everything_decays(mask):
    expected = jax.tree.map(lambda p: p / 2, PARAMS)
    assert_same_bits(step(halved(mask), PARAMS)[0], expected)


def test_the_inner_optimizer_sees_excluded_parameters_as_they_are():
    inner = optax.stateless(lambda updates, params: params)
    tx = halved(exclude_by_name, inner)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    # The decayed parameter minus the decay, and the parameter itself.
    assert updates["layer"]["kernel"].tolist() == [0.5 - 0.5, -1.0 + 1.0]
    assert updates["norm"] == 4.0


@pytest.mark.slow
def test_a_mask_works_with_half_precision_accumulation_and_an_average():
    options = {"use_ema": True, "gradient_accumulation_steps": 2}
    tx = halved(exclude_by_name, optax.adam(1e-2), **options)
    params = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS)
    opt_state = tx.init(params)
    before = types((params, opt_state))
    for _ in range(2):
        params, opt_state = step(tx, params, opt_state=opt_state)
    assert types((params, opt_state)) == before
    assert params["layer"]["kernel"].tolist() == [0.5, -1.0]
    assert params["layer"]["bias"] == 3.0
    average = ols.ema_params(opt_state)
    assert (average["layer"]["kernel"][0], average["norm"][0]) == (0.5, 4.0)


def variable_mask(model):
    return jax.tree.map_with_path(is_decayed, nnx.state(model, nnx.Param))


@pytest.mark.parametrize("make_mask", [lambda model: exclude_by_name, variable_mask])
def test_a_mask_works_in_an_nnx_optimizer(make_mask):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.bias[...] = jnp.ones(2)
    kernel = model.kernel[...]
    tx = halved(make_mask(model))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))
    np.testing.assert_array_equal(model.kernel[...], kernel / 2)
    np.testing.assert_array_equal(model.bias[...], 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("is_tree", "is_filtered"), [(True, False), (False, True)])
def test_a_mask_works_with_an_equinox_module(is_tree, is_filtered):
    # A module of bools is callable, as the module that it was made from.
    model = eqx.nn.MLP(2, 2, 4, depth=1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_array) if is_filtered else model
    mask = exclude_by_name(params) if is_tree else exclude_by_name
    window = 1 if is_filtered else None
    tx = halved(mask, use_ema=True, gradient_accumulation_steps=window)
    grads = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    updates, opt_state = tx.update(grads, tx.init(params), model)
    new = eqx.apply_updates(model, updates)
    for old_layer, new_layer in zip(model.layers, new.layers, strict=True):
        np.testing.assert_array_equal(new_layer.weight, old_layer.weight / 2)
        np.testing.assert_array_equal(new_layer.bias, old_layer.bias)
    finalized = ols.finalize_params(new, opt_state)
    assert_same_bits(eqx.filter(finalized, eqx.is_array), eqx.filter(new, eqx.is_array))
    assert finalized.activation is model.activation


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ({"layer": True}, ValueError, "must be a prefix"),
        ({"layer": True, "norm": [True]}, ValueError, "must be a prefix"),
        (["bias", "norm"], ValueError, "must be a prefix"),
        (jax.tree.map(lambda _: "decay", PARAMS), TypeError, "must be True or False"),
        (jax.tree.map(lambda _: 1, PARAMS), TypeError, "must be True or False"),
    ],
)
def test_a_mask_that_does_not_fit_the_parameters_is_refused_by_init(
    mask, error, message
):
    with pytest.raises(error, match=f"`weight_decay_mask` {message}"):
        halved(mask).init(PARAMS)


LABELS = {"layer": {"kernel": "train", "bias": "freeze"}, "norm": "freeze"}


def freezing(window=None, **options):
    """The advice of the docstring: `optax.partition` inside, and a mask."""
    inner = {"train": optax.adam(0.1), "freeze": optax.set_to_zero()}
    mask = jax.tree.map(lambda label: label == "train", LABELS)
    return halved(
        mask,
        optax.partition(inner, LABELS),
        gradient_accumulation_steps=window,
        **options,
    )


def frozen(params):
    return params["layer"]["bias"], params["norm"]


FREEZING = {
    "alone": {},
    "average": {"use_ema": True},
    "overwritten": {"use_ema": True, "ema_overwrite_frequency": 2},
    "accumulated": {"window": 2, "use_ema": True, "ema_overwrite_frequency": 1},
    "clipped": {"global_clipnorm": 1.0},
}
# 0.99 times it plus 0.01 times it is not exactly 0.7 in float32.
AWKWARD = jax.tree.map(lambda p: p * jnp.float32(0.7), PARAMS)
AWKWARD["norm"] = AWKWARD["norm"].astype(jnp.float16)


@pytest.mark.parametrize("name", FREEZING)
def test_frozen_parameters_keep_every_bit(name):
    tx = freezing(**FREEZING[name])
    params = start = AWKWARD
    opt_state = tx.init(params)
    update = jax.jit(tx.update)
    for i in range(8):
        grads = jax.tree.map(lambda p, i=i: jnp.full_like(p, i), params)
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_same_bits(frozen(params), frozen(start))
    assert not np.array_equal(params["layer"]["kernel"], start["layer"]["kernel"])
    if "use_ema" in FREEZING[name]:
        finalized = ols.finalize_params(params, opt_state)
        assert_same_bits(frozen(finalized), frozen(start))


@pytest.mark.parametrize("place", ["kernel", "bias"])
def test_a_bad_gradient_anywhere_skips_the_whole_step_of_a_frozen_model(place):
    # Two wrappers under `optax.partition`, as once advised, had two scales, and a bad
    # gradient in one of them left the other one to step.
    tx = freezing(use_ema=True)
    params, opt_state = step(tx, PARAMS, PARAMS)
    layer = PARAMS["layer"] | {place: PARAMS["layer"][place] * jnp.nan}
    after, skipped = step(tx, params, PARAMS | {"layer": layer}, opt_state)
    assert_same_bits(after, params)
    assert_same_bits(skipped.inner_state, opt_state.inner_state)
    assert ols.get_loss_scale(skipped) == ols.get_loss_scale(opt_state) / 2
