"""`loss_scale_optimizer`: Keras's options together, masks, averages and refusals.

Promised in docs/migration/keras.md. That each option computes what Keras computes is in
`test_recorded_trajectories.py`.
"""

import re

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lossscale as ols
from helpers.compare import assert_same_bits, types

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.array([0.25, -1.0])}
ALL = {
    "clipnorm": 1.0,
    "weight_decay": 0.1,
    "learning_rate": lambda step: 0.1 / (1 + step),
    "use_ema": True,
    "ema_overwrite_frequency": 2,
    "gradient_accumulation_steps": 2,
}


def trained(tx, grads, params=PARAMS):
    """Parameters and state after each step; `grads` have one entry for each step."""

    def step(carry, grads):
        params, opt_state = carry
        scaled = ols.scale(grads, opt_state)
        updates, opt_state = tx.update(scaled, opt_state, params)
        carry = optax.apply_updates(params, updates), opt_state
        return carry, carry

    train = jax.jit(lambda carry: jax.lax.scan(step, carry, grads)[1])
    return train((params, tx.init(params)))


def random_grads(steps, bad=()):
    rng = np.random.default_rng(0)
    grads = {
        key: np.float32(rng.normal(size=(steps, *value.shape)))
        for key, value in PARAMS.items()
    }
    grads["b"][list(bad), 0] = rng.choice([np.nan, np.inf, -np.inf], len(bad))
    return grads


# Options together.


def test_accumulated_updates_are_those_of_the_means_of_good_micro_batches():
    options = {"clipvalue": 0.4, "weight_decay": 0.2, "learning_rate": 0.1}
    options |= {"use_ema": True, "ema_momentum": 0.6, "ema_overwrite_frequency": 2}

    def make(**more):
        return ols.loss_scale_optimizer(optax.sgd(0.1), 64.0, **options, **more)

    bad = (1, 4, 6, 12)
    grads = random_grads(13, bad)
    good = jax.tree.map(lambda grad: np.delete(grad, bad, axis=0), grads)
    means = jax.tree.map(lambda grad: grad.reshape(3, 3, *grad.shape[1:]).mean(1), good)
    every_third = np.delete(np.arange(13), bad)[2::3]
    accumulated = trained(make(gradient_accumulation_steps=3), grads)
    params, opt_state = jax.tree.map(lambda leaf: leaf[every_third], accumulated)
    expected_params, expected_state = trained(make(), means)
    chex.assert_trees_all_close(params, expected_params, rtol=1e-5, atol=1e-6)
    averages = ols.ema_params(opt_state), ols.ema_params(expected_state)
    chex.assert_trees_all_close(*averages, rtol=1e-5, atol=1e-6)


def test_nothing_advances_on_a_skipped_step():
    # In the middle of an accumulation, and after it. tf.keras would count an iteration.
    inner = optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9)
    tx = ols.loss_scale_optimizer(inner, **ALL)
    params, opt_state = trained(tx, random_grads(4, bad=[1, 3]))
    changing = params, opt_state.inner_state
    skipped = jax.tree.map(lambda x: x[1::2], changing)
    assert_same_bits(skipped, jax.tree.map(lambda x: x[::2], changing))


def test_state_and_parameters_keep_their_types_under_scan_and_donation():
    tx = ols.loss_scale_optimizer(optax.sgd(ALL["learning_rate"]), **ALL)
    params = {"w": jnp.ones((2, 2), jnp.bfloat16), "none": None}
    opt_state = tx.init(params)
    before = types((params, opt_state))

    def step(carry, _):
        params, opt_state = carry
        grads = jax.tree.map(jnp.ones_like, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    loop = jax.jit(lambda carry: jax.lax.scan(step, carry, length=4), donate_argnums=0)
    carry, _ = loop((params, opt_state))
    assert types(carry) == before
    assert ols.ema_params(carry[1])["w"].dtype == jnp.float32
    assert ols.finalize_params(*carry)["w"].dtype == jnp.bfloat16


def test_accumulation_keeps_the_imaginary_part():
    # optax.MultiSteps accumulates in float32 unless it is told another dtype.
    tx = ols.loss_scale_optimizer(optax.sgd(1.0), gradient_accumulation_steps=2)
    grads = jnp.asarray([[1.0 + 2.0j], [3.0 + 4.0j]], jnp.complex64)
    params, _ = trained(tx, grads, jnp.zeros(1, jnp.complex64))
    assert params[-1] == -2.0 - 3.0j


def test_a_fixed_scale_is_unscaled_and_never_skips():
    for options in ({"dynamic": False, "initial_scale": 8}, {"loss_scale_factor": 8}):
        tx = ols.loss_scale_optimizer(optax.sgd(1.0), **options)
        grads = jnp.asarray([8.0, jnp.nan])
        updates, opt_state = tx.update(grads, tx.init(grads), grads)
        assert ols.get_loss_scale(opt_state) == 8.0
        np.testing.assert_array_equal(updates, [-1.0, np.nan])


def test_the_nulls_of_the_r_page_are_the_defaults():
    names = "weight_decay clipnorm clipvalue global_clipnorm use_ema ema_momentum"
    names += " ema_overwrite_frequency loss_scale_factor gradient_accumulation_steps"
    nulls = dict.fromkeys(names.split(), None)
    ours = ols.loss_scale_optimizer(optax.sgd(0.1), 32768, 2000, **nulls)
    grads = random_grads(3, bad=[1])
    plain = ols.loss_scale_optimizer(optax.sgd(0.1))
    assert_same_bits(trained(ours, grads), trained(plain, grads))


def test_with_an_axis_name_all_devices_skip_together():
    tx = ols.loss_scale_optimizer(optax.sgd(1.0), axis_name="data", clipnorm=1.0)
    params = jnp.ones((8, 1))
    opt_state = jax.vmap(tx.init)(params)
    grads = jnp.ones((8, 1)).at[3].set(jnp.nan)
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    updates, opt_state = update(grads, opt_state, params)
    assert not updates.any()
    assert not ols.find_loss_scale_state(opt_state).last_finite.any()


# Refusals.

REFUSED = [
    ({"clipnorm": 1.0, "clipvalue": 1.0}, "at most one .*`clipnorm` and `clipvalue`"),
    ({"clipnorm": 0.0}, "`clipnorm` must be finite, at least"),
    ({"weight_decay": 0.1}, "`learning_rate` must be given with `weight_decay`"),
    ({"weight_decay_mask": True}, "`weight_decay_mask` must be None without"),
    ({"dynamic": False}, "`dynamic=False`, `initial_scale` must be given"),
    ({"loss_scale_factor": 2.0, "initial_scale": 4.0}, "must be None with `loss_scale"),
    ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at"),
    ({"ema_momentum": 1.01}, "`ema_momentum` must be .* at most 1, got 1.01"),
    # The order of `loss_scaled`.
    ({"initial_scale": ols.presets.keras()}, r"`initial_scale` .*`loss_scaled\(inner_"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_a_setting_that_makes_no_sense_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ols.loss_scale_optimizer(optax.sgd(0.1), **options)


@pytest.mark.parametrize("name", ["use_ema", "weight_decay"])
def test_missing_params_and_masters_inside_are_named(name):
    options = {"use_ema": {"use_ema": True}, "weight_decay": {"weight_decay": 0.1}}
    options = options[name] | {"learning_rate": 0.1}
    tx = ols.loss_scale_optimizer(optax.sgd(0.1), **options)
    with pytest.raises(ValueError, match=f"`params` must be given.*`{name}`"):
        tx.update(jnp.ones(1), tx.init(jnp.ones(1)))
    tx = ols.loss_scale_optimizer(ols.master_weights(optax.sgd(0.1)), **options)
    with pytest.raises(ValueError, match=f"`{name}` must be inside `master_weights`"):
        tx.init(jnp.ones(1, jnp.float16))


# Averages.


def test_one_of_several_averages_is_picked_by_its_path():
    averaging = ols.loss_scale_optimizer(
        optax.sgd(1.0), 1.0, use_ema=True, ema_momentum=0.5
    )
    plain = ols.loss_scale_optimizer(optax.sgd(1.0), 1.0)
    parts = {"generator": averaging, "critic": averaging, "encoder": plain}
    tx = optax.partition(parts, {name: name for name in parts})
    params = {name: jnp.ones(1) for name in parts}
    opt_state = tx.init(params)
    for _ in range(2):  # Each goes from 1 to 0 to 0, and is averaged from 0 on.
        updates, opt_state = tx.update(params, opt_state, params)
        params = optax.apply_updates(params, updates)
    with pytest.raises(ValueError, match=r"got 2, at \['inner_states/critic/") as error:
        ols.ema_params(opt_state)
    (path,) = re.findall("path='(.*)'", str(error.value))
    assert jax.tree.leaves(ols.ema_params(opt_state, path=path)) == [0.0]

    params = start = jax.tree.map(lambda p: p + 7.0, params)
    for name in params:
        params = ols.finalize_params(params, opt_state, path=f"inner_states/{name}")
    assert params == {"generator": 0.0, "critic": 0.0, "encoder": start["encoder"]}


def test_before_the_first_update_the_average_equals_the_initial_parameters():
    opt_state = ols.loss_scale_optimizer(optax.sgd(0.1), use_ema=True).init(PARAMS)
    assert_same_bits(ols.ema_params(opt_state), PARAMS)
    assert_same_bits(ols.finalize_params(PARAMS, opt_state), PARAMS)


def test_without_an_average_there_is_none_and_the_parameters_are_final():
    opt_state = ols.loss_scale_optimizer(optax.sgd(0.1)).init(PARAMS)
    assert ols.finalize_params(PARAMS, opt_state) is PARAMS
    with pytest.raises(ValueError, match=r"got 0.*use_ema=True"):
        ols.ema_params(opt_state)


# Learning rates.

SCHEDULED = {
    "inject_hyperparams": optax.inject_hyperparams(optax.sgd),
    "chain": lambda rate: optax.chain(optax.identity(), optax.sgd(rate)),
    "partition": lambda rate: optax.partition({"all": optax.sgd(rate)}, "all"),
    "master_weights": lambda rate: ols.master_weights(optax.sgd(rate)),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_with_three_steps_the_updates_read_a_schedule_at_2_5_and_8(name):
    # Keras's pages: "Learning rate schedules will look at 'real' iterations value
    # (optimizer steps)".
    inner = SCHEDULED[name](lambda step: jnp.asarray(step, jnp.float32))
    tx = ols.loss_scale_optimizer(inner, 1.0, gradient_accumulation_steps=3)
    params, _ = trained(tx, np.ones((9, 1), np.float32), jnp.zeros(1))
    # The learning rate of each update is minus the update itself.
    assert np.ravel(params)[2::3].tolist() == [-2.0, -7.0, -15.0]


def test_an_injected_learning_rate_reaches_the_weight_decay_under_jit():
    def make_optimizer(learning_rate):
        return ols.loss_scale_optimizer(
            optax.sgd(learning_rate), weight_decay=0.5, learning_rate=learning_rate
        )

    tx = optax.inject_hyperparams(make_optimizer)(learning_rate=1.0)
    params, update = jnp.ones(1), jax.jit(tx.update)
    updates, opt_state = update(jnp.zeros(1), tx.init(params), params)
    assert updates == -0.5
    opt_state = optax.tree.set(opt_state, learning_rate=jnp.asarray(0.5))
    assert update(jnp.zeros(1), opt_state, params)[0] == -0.25


# `weight_decay_mask`, Keras's `exclude_from_weight_decay`, and frozen parameters.

LAYERS = {
    "layer": {"kernel": jnp.asarray([1.0, -2.0]), "bias": jnp.asarray([3.0])},
    "norm": jnp.asarray([4.0]),
}


def exclude_by_name(params):
    """Keras's `exclude_from_weight_decay(var_names=["bias", "norm"])`."""

    def is_decayed(path, _):
        return not any(word in jax.tree_util.keystr(path) for word in ("bias", "norm"))

    return jax.tree.map_with_path(is_decayed, params)


def halved(mask, inner=None, **options):
    """An optimizer that halves the parameters that the mask marks."""
    inner = optax.sgd(1.0) if inner is None else inner
    settings = {"weight_decay": 0.5, "learning_rate": 1.0, "weight_decay_mask": mask}
    return ols.loss_scale_optimizer(inner, 8.0, **settings, **options)


def test_only_parameters_that_the_mask_marks_decay():
    tree = exclude_by_name(LAYERS)
    for mask in (exclude_by_name, tree, {"layer": tree["layer"], "norm": False}):
        tx, zeros = halved(mask), jax.tree.map(jnp.zeros_like, LAYERS)
        updates, _ = tx.update(zeros, tx.init(LAYERS), LAYERS)
        assert updates["layer"]["kernel"].tolist() == [-0.5, 1.0]
        assert (updates["layer"]["bias"], updates["norm"]) == (0.0, 0.0)


def test_the_inner_optimizer_sees_decayed_parameters():
    tx = halved(exclude_by_name, optax.stateless(lambda updates, params: params))
    updates, _ = tx.update(LAYERS, tx.init(LAYERS), LAYERS)
    # The decayed parameter minus the decay, and the parameter itself.
    assert updates["layer"]["kernel"].tolist() == [0.5 - 0.5, -1.0 + 1.0]
    assert updates["norm"] == 4.0


def test_a_mask_and_an_average_work_in_an_nnx_optimizer():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.bias[...] = jnp.ones(2)
    kernel, zeros = model.kernel[...], nnx.state(model, nnx.Param)
    zeros = jax.tree.map(jnp.zeros_like, zeros)
    tx = halved(exclude_by_name, use_ema=True, ema_momentum=0.5)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(2):  # The kernel is halved twice.
        optimizer.update(model, zeros)
    np.testing.assert_array_equal(model.kernel[...], kernel / 4)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, ols.finalize_params(params, optimizer))
    np.testing.assert_array_equal(model.kernel[...], kernel * 3 / 8)
    np.testing.assert_array_equal(model.bias[...], 1.0)


def test_a_mask_works_with_an_equinox_module():
    # A module of bools is callable, as the module that it was made from.
    model = eqx.nn.MLP(2, 2, 4, depth=0, key=jax.random.key(0))
    tx = halved(exclude_by_name(model), use_ema=True)
    grads = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    updates, opt_state = tx.update(grads, tx.init(model), model)
    new = eqx.apply_updates(model, updates)
    finalized = ols.finalize_params(new, opt_state)
    (old,) = model.layers
    for layer in (*new.layers, *finalized.layers):
        np.testing.assert_array_equal(layer.weight, old.weight / 2)
        np.testing.assert_array_equal(layer.bias, old.bias)
    assert finalized.activation is model.activation


def test_the_list_of_words_of_keras_is_refused_as_a_mask():
    with pytest.raises(ValueError, match="list"):
        halved(["bias", "norm"]).init(LAYERS)


def test_frozen_parameters_keep_every_bit():
    # The advice of the docstring: `optax.partition` inside, and a mask.
    labels = {"layer": {"kernel": "train", "bias": "freeze"}, "norm": "freeze"}
    inner = {"train": optax.adam(0.1), "freeze": optax.set_to_zero()}
    mask = jax.tree.map(lambda label: label == "train", labels)
    options = {"global_clipnorm": 1.0, "gradient_accumulation_steps": 2}
    options |= {"use_ema": True, "ema_overwrite_frequency": 2}
    tx = halved(mask, optax.partition(inner, labels), **options)
    # 0.99 times it plus 0.01 times it is not exactly 0.7 in float32.
    start = jax.tree.map(lambda p: p * jnp.float32(0.7), LAYERS)
    grads = jax.tree.map(lambda p: jnp.broadcast_to(p, (8, *p.shape)), start)
    last = jax.tree.map(lambda leaf: leaf[-1], trained(tx, grads, start))
    for tree in (last[0], ols.finalize_params(*last)):
        assert_same_bits(tree["layer"]["bias"], start["layer"]["bias"])
        assert_same_bits(tree["norm"], start["norm"])
        assert not np.array_equal(tree["layer"]["kernel"], start["layer"]["kernel"])


def test_the_formula_of_the_docstring_serves_an_optimizer_with_its_own_count():
    def update(updates, count, params=None):
        return -(3.0 * count + 2.0) * updates, count + 1  # Of the step itself.

    inner = optax.GradientTransformation(lambda params: jnp.asarray(0), update)
    tx = ols.loss_scale_optimizer(inner, 1.0, gradient_accumulation_steps=3)
    params, _ = trained(tx, np.ones((9, 1), np.float32), jnp.zeros(1))
    assert np.ravel(params)[2::3].tolist() == [-2.0, -7.0, -15.0]
