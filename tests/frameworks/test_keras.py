"""Keras 3 on JAX: programs in examples/frameworks, and Keras's own loss scaling."""

import functools
import os
import re

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import numpy as np

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.files import ROOT
from helpers.pages import run_program
from helpers.steps import assert_nothing_but_the_scale_changed
from helpers.under_autocast import dtypes_of

run = functools.cache(run_program)


def test_a_step_that_keras_skips_changes_averages_and_metrics():
    # docs/migration/keras.md, "A Keras 3 model".
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model.compile(optimizer, "mse", metrics=["mae"])
    metrics = model.train_on_batch(np.full((4, 3), np.nan), np.zeros((4, 3)))
    assert optimizer.dynamic_scale == 2.0**14
    assert np.isnan(metrics).all()
    assert np.isnan(model.non_trainable_variables[0].numpy()).all()
    assert np.isfinite(model.trainable_variables[0].numpy()).all()


def test_a_jitted_loop_with_the_scale_loss_of_keras_unscales_by_another_scale():
    # docs/migration/keras.md, "What behaves differently"; keras #19244.
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    params = jnp.ones(2)
    optimizer.build([keras.Variable(params)])

    @jax.jit
    def step(params, state, factor):
        def loss_fn(params):
            return optimizer.scale_loss(factor * jnp.sum(params))

        grads = [jax.grad(loss_fn)(params)]
        (params,), state = optimizer.stateless_apply(state, grads, [params])
        return params, state

    state = [variable.value for variable in optimizer.variables]
    for factor, change in [(1.0, 1.0), (jnp.inf, 0.0), (jnp.inf, 0.0), (1.0, 4.0)]:
        new, state = step(params, state, factor)
        np.testing.assert_array_equal(params - new, [change, change])
        params = new


def test_the_loop_learns_with_float16_products_and_assigns_its_values_to_the_model():
    names = run("keras_loop")
    assert names["loss"] < 0.1
    trainable, non_trainable, _ = names["state"]
    args = trainable, non_trainable, names["images"], names["labels"]
    assert dtypes_of(names["loss_fn"], *args) == ["float16", "float16"]
    model = names["model"]
    assert_same_bits([v.value for v in model.trainable_variables], trainable)
    assert_same_bits([v.value for v in model.non_trainable_variables], non_trainable)


def test_a_nan_batch_changes_no_variable_of_the_loop():
    names = run("keras_loop")
    *old, opt_state = names["state"]
    bad = names["images"].at[0, 0].set(jnp.nan)
    *new, new_state, _ = names["step"](*names["state"], bad, names["labels"])
    assert_nothing_but_the_scale_changed((new, new_state), (old, opt_state))


def fitted():
    return run("keras_fit")


def new_model(kind):
    """The model of the program from new weights: in float32, low, or scaled inside."""
    keras.utils.set_random_seed(0)
    model = keras.models.clone_model(fitted()["model"])
    optimizer = keras.optimizers.Adam(1e-2)
    if kind == "low":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    if kind != "float32":
        model.stateless_call = ols.autocast(model.stateless_call)
    if kind == "scaled inside":
        scaled = ols.scaled_backward(model.compute_loss_and_updates, 2.0**12)
        model.compute_loss_and_updates = scaled
    model.compile(optimizer, fitted()["loss"])
    return model


def with_nan(images):
    """A batch whose seventh image is NaN."""
    return np.where(np.arange(len(images))[:, None, None, None] == 7, np.nan, images)


def test_fit_learns_as_in_float32_with_products_in_float16():
    names = fitted()
    fit = functools.partial(
        keras.Model.fit,
        x=names["images"],
        y=names["labels"],
        batch_size=32,
        epochs=len(names["losses"]),
        verbose=0,
    )
    float32, inside = (
        fit(new_model(kind)).history["loss"] for kind in ("float32", "scaled inside")
    )
    assert float32 != names["losses"]
    np.testing.assert_allclose(names["losses"], float32, rtol=5e-3)
    np.testing.assert_allclose(inside, names["losses"], rtol=1e-3)


def test_a_guard_keeps_nan_out_of_the_moving_averages_of_fit():
    model = new_model("float32")
    page = (ROOT / "docs/frameworks.md").read_text()
    guard = re.search(
        r"^low_call = .*?^model\.stateless_call = .*?$", page, re.M | re.S
    )
    exec(guard[0], {"ols": ols, "jnp": jnp, "model": model})
    images, labels = fitted()["images"][:32], fitted()["labels"][:32]
    for batch in (images, with_nan(images)):
        old = [np.asarray(v.value) for v in model.non_trainable_variables]
        model.fit(batch, labels, verbose=0)
    assert_same_bits([np.asarray(v.value) for v in model.non_trainable_variables], old)
    assert not np.array_equal(old[0], np.zeros_like(old[0]))


def test_a_nan_batch_of_fit_changes_no_trainable_variable():
    names, model = fitted(), new_model("low")
    images, labels = names["images"][:32], names["labels"][:32]
    model.fit(images, labels, verbose=0)  # It makes Adam's moments.
    kept = [*model.trainable_variables, *model.optimizer.inner_optimizer.variables]
    old, scale = [np.asarray(v.value) for v in kept], model.optimizer.dynamic_scale
    scale = float(scale)
    model.fit(with_nan(images), labels, verbose=0)
    assert_same_bits([np.asarray(v.value) for v in kept], old)
    assert float(model.optimizer.dynamic_scale) == scale / 2
