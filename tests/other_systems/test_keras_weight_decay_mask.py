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
HALVED = {"weight_decay": 0.5, "learning_rate": 1.0}


@pytest.fixture(autouse=True)
def _standard_promotion():
    """Users have JAX's standard promotion, which Optax needs."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def is_decayed(path, _):
    """Keras's `exclude_from_weight_decay(var_names=["bias", "norm"])`."""
    return not any(word in jax.tree_util.keystr(path) for word in ("bias", "norm"))


def exclude_by_name(params):
    return jax.tree.map_with_path(is_decayed, params)


def make(*args, **options):
    tx = ols.loss_scale_optimizer(*args, **options)
    return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


def step(tx, params, grads=None, opt_state=None):
    """Parameters and state after one step, with zero gradients if none are given."""
    opt_state = tx.init(params) if opt_state is None else opt_state
    grads = jax.tree.map(jnp.zeros_like, params) if grads is None else grads
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


MASKS = {
    "a function": exclude_by_name,
    "a tree": exclude_by_name(PARAMS),
    "a prefix": {"layer": {"kernel": True, "bias": False}, "norm": False},
    "NumPy's bools": jax.tree.map(np.bool_, exclude_by_name(PARAMS)),
    "NumPy's arrays": jax.tree.map(np.asarray, exclude_by_name(PARAMS)),
    "JAX's bools": jax.tree.map(jnp.asarray, exclude_by_name(PARAMS)),
}


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("name", MASKS)
def test_only_parameters_that_the_mask_marks_decay(name):
    tx = make(optax.sgd(1.0), weight_decay_mask=MASKS[name], **HALVED)
    params, _ = step(tx, PARAMS)
    assert params["layer"]["kernel"].tolist() == [0.5, -1.0]
    assert (params["layer"]["bias"], params["norm"]) == (3.0, 4.0)


def test_a_mask_can_be_a_prefix_of_the_parameters():
    tx = make(
        optax.sgd(1.0), weight_decay_mask={"layer": False, "norm": True}, **HALVED
    )
    params, _ = step(tx, PARAMS)
    assert_same_bits(params["layer"], PARAMS["layer"])
    assert params["norm"] == 2.0


@pytest.mark.parametrize("mask", [None, True, lambda params: True])
def test_without_exceptions_everything_decays(mask):
    tx = make(optax.sgd(1.0), weight_decay_mask=mask, **HALVED)
    assert_same_bits(step(tx, PARAMS)[0], jax.tree.map(lambda p: p / 2, PARAMS))


def test_a_mask_gives_what_the_mask_of_adamw_gives():
    # Optax decays after Adam, in one update; here the decay comes first, as in Keras.
    # On the first step Adam's part is the same.
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    ours = make(
        optax.adam(0.1),
        1.0,
        weight_decay=0.2,
        weight_decay_mask=exclude_by_name,
        learning_rate=0.1,
    )
    theirs = optax.adamw(0.1, weight_decay=0.2, mask=exclude_by_name)
    for one, other in zip(
        jax.tree.leaves(step(ours, PARAMS, grads)[0]),
        jax.tree.leaves(step(theirs, PARAMS, grads)[0]),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_inner_optimizer_sees_excluded_parameters_as_they_are():
    inner = optax.stateless(lambda updates, params: params)
    tx = make(inner, weight_decay_mask=exclude_by_name, **HALVED)
    grads = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    # The decayed parameter minus the decay, and the parameter itself.
    assert updates["layer"]["kernel"].tolist() == [0.5 - 0.5, -1.0 + 1.0]
    assert updates["norm"] == 4.0


def test_a_marked_parameter_without_gradient_does_not_decay():
    tx = make(optax.sgd(1.0), weight_decay_mask=True, **HALVED)
    for absent in (None, optax.MaskedNode()):
        grads = {"layer": PARAMS["layer"] | {"kernel": absent}, "norm": absent}
        updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
        assert updates["layer"]["kernel"] == updates["norm"] == absent


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_mask_works_with_half_precision_accumulation_and_an_average(dtype):
    tx = make(
        optax.adam(1e-2),
        weight_decay_mask=exclude_by_name,
        use_ema=True,
        gradient_accumulation_steps=2,
        **HALVED,
    )
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
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
    tx = make(optax.sgd(1.0), weight_decay_mask=make_mask(model), **HALVED)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))
    np.testing.assert_array_equal(model.kernel[...], kernel / 2)
    np.testing.assert_array_equal(model.bias[...], 1.0)


@pytest.mark.fast_every(4)
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("window", [None, 1])
def test_a_mask_works_with_an_equinox_module(is_tree, is_filtered, window):
    # A module of bools is callable, as the module that it was made from.
    model = eqx.nn.MLP(2, 2, 4, depth=1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_array) if is_filtered else model
    tx = ols.loss_scale_optimizer(
        optax.sgd(1.0),
        weight_decay_mask=exclude_by_name(params) if is_tree else exclude_by_name,
        use_ema=True,
        gradient_accumulation_steps=window,
        **HALVED,
    )
    grads = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    update = eqx.filter_jit(tx.update)
    updates, opt_state = update(grads, tx.init(params), model)
    new = eqx.apply_updates(model, updates)
    for old_layer, new_layer in zip(model.layers, new.layers, strict=True):
        np.testing.assert_array_equal(new_layer.weight, old_layer.weight / 2)
        np.testing.assert_array_equal(new_layer.bias, old_layer.bias)
    finalized = ols.finalize_params(new, opt_state)
    assert_same_bits(eqx.filter(finalized, eqx.is_array), eqx.filter(new, eqx.is_array))
    assert finalized.activation is model.activation


def test_a_mask_without_weight_decay_is_refused():
    with pytest.raises(ValueError, match="`weight_decay_mask` must be None without"):
        make(optax.sgd(1.0), weight_decay_mask=True)


@pytest.mark.parametrize(
    "mask", [{"layer": True}, {"layer": True, "norm": [True]}, ["bias", "norm"]]
)
def test_a_mask_that_does_not_fit_the_parameters_is_refused_by_init(mask):
    tx = make(optax.sgd(1.0), weight_decay_mask=mask, **HALVED)
    with pytest.raises(ValueError, match="`weight_decay_mask` must be a prefix"):
        tx.init(PARAMS)


@pytest.mark.parametrize("leaf", ["decay", 1, None.__class__])
def test_labels_and_numbers_are_no_mask(leaf):
    mask = jax.tree.map(lambda _: leaf, PARAMS)
    tx = make(optax.sgd(1.0), weight_decay_mask=lambda _: mask, **HALVED)
    with pytest.raises(TypeError, match="`weight_decay_mask` must be True or False"):
        tx.init(PARAMS)


LABELS = {"layer": {"kernel": "train", "bias": "freeze"}, "norm": "freeze"}


def freezing(window=None, **options):
    """The advice of the docstring: `optax.partition` inside, and a mask."""
    inner = {"train": optax.adam(0.1), "freeze": optax.set_to_zero()}
    return make(
        optax.partition(inner, LABELS),
        8.0,
        weight_decay=0.5,
        weight_decay_mask=jax.tree.map(lambda label: label == "train", LABELS),
        learning_rate=0.1,
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


@pytest.mark.fast_every(3)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("name", FREEZING)
def test_frozen_parameters_keep_every_bit(name, dtype):
    tx = freezing(**FREEZING[name])
    params = start = jax.tree.map(lambda p: p.astype(dtype), AWKWARD)
    opt_state = tx.init(params)
    for i in range(8):
        grads = jax.tree.map(lambda p, i=i: jnp.full_like(p, i), params)
        params, opt_state = step(tx, params, grads, opt_state)
    assert_same_bits(frozen(params), frozen(start))
    assert not np.array_equal(params["layer"]["kernel"], start["layer"]["kernel"])
    if "use_ema" in FREEZING[name]:
        finalized = ols.finalize_params(params, opt_state)
        assert_same_bits(frozen(finalized), frozen(start))


@pytest.mark.parametrize("place", ["kernel", "bias"])
def test_a_bad_gradient_anywhere_skips_the_whole_step_of_a_frozen_model(place):
    tx = freezing(use_ema=True)
    params, opt_state = step(tx, PARAMS, PARAMS)
    grads = {
        "layer": PARAMS["layer"] | {place: jnp.full(1, jnp.nan)},
        "norm": PARAMS["norm"],
    }
    if place == "kernel":
        grads["layer"]["kernel"] = jnp.full(2, jnp.nan)
    after, skipped = step(tx, params, grads, opt_state)
    assert_same_bits(after, params)
    assert_same_bits(skipped.inner_state, opt_state.inner_state)
    assert ols.get_loss_scale(skipped) == ols.get_loss_scale(opt_state) / 2


def test_exempt_parameters_share_the_scale_and_the_skip_of_the_others():
    # Two wrappers under `optax.partition`, as once advised, had two scales, and a bad
    # gradient in one of them left the other one to step.
    tx = make(optax.sgd(1.0), 8.0, weight_decay_mask=exclude_by_name, **HALVED)
    grads = {"layer": PARAMS["layer"], "norm": jnp.full(1, jnp.nan)}
    params, opt_state = step(tx, PARAMS, grads)
    assert_same_bits(params, PARAMS)
    assert ols.get_loss_scale(opt_state) == 4.0
