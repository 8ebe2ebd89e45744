"""Keras 3 on JAX: the programs of docs/migration/keras.md and of docs/frameworks.md."""

import contextlib
import functools
import io
import os
import re

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras
import matplotlib.pyplot as plt
import numpy as np
import optax

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.files import ROOT
from helpers.pages import run_section
from helpers.steps import assert_nothing_but_the_scale_changed
from helpers.under_autocast import dtypes_of


@functools.cache
def run(page, heading):
    """What the programs of a section define and print."""
    policy = keras.config.dtype_policy()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        names = run_section(page, heading)
    keras.config.set_dtype_policy(policy)
    plt.close("all")
    return names, output.getvalue()


def migration():
    return run("docs/migration/keras.md", "A Keras 3 model")


def test_the_model_of_the_page_learns_and_has_the_scales_of_keras_in_every_step():
    names, output = migration()
    scales = names["scales"]
    assert scales == names["read_scale"].scales
    assert "equal in every step: True" in output
    assert set(np.diff(np.log2(scales))) == {-1.0, 0.0, 1.0}
    before, after = re.findall(r"Keras (0\.\d+), here (0\.\d+)", output)
    assert min(map(float, before)) > 0.85
    # A NaN spoils only the model of Keras.
    assert float(after[0]) < 0.2
    assert after[1] == before[1]
    assert names["keras_optimizer"].dynamic_scale == scales[-1] / 2
    # Layers compute in the precision of their policies.
    model = names["new_model"]()
    variables = model.trainable_variables, model.non_trainable_variables
    args = *map(names["values"], variables), *names["train"]
    assert dtypes_of(names["loss_fn"], *args) == ["float16", "float32"]


def test_a_nan_batch_changes_no_variable_of_the_page_except_the_seed():
    names, _ = migration()
    model, opt_state, counts = (names[key] for key in ("model", "opt_state", "counts"))
    trainable = names["values"](model.trainable_variables)
    non_trainable = names["values"](model.non_trainable_variables)
    new_trainable, new_non_trainable, new_state, new_counts, loss = names["step"](
        trainable, non_trainable, opt_state, counts, names["bad_x"], names["y"]
    )
    assert np.isnan(loss)
    (*averages, seed), (*new_averages, new_seed) = non_trainable, new_non_trainable
    new = [new_trainable, new_averages, new_counts]
    old = [trainable, averages, counts]
    assert_nothing_but_the_scale_changed((new, new_state), (old, opt_state))
    np.testing.assert_array_equal(new_seed, seed + np.array([0, 1], seed.dtype))


def test_the_block_learns_with_float16_products_and_assigns_its_values_to_the_model():
    names, _ = run("docs/frameworks.md", "Keras 3")
    assert names["loss"] < 0.1
    trainable, non_trainable, _ = names["state"]
    args = trainable, non_trainable, names["images"], names["labels"]
    assert dtypes_of(names["loss_fn"], *args) == ["float16", "float16"]
    model = names["model"]
    assert_same_bits([v.value for v in model.trainable_variables], trainable)
    assert_same_bits([v.value for v in model.non_trainable_variables], non_trainable)


def test_the_loop_that_answers_keras_19244_learns_the_parameters_of_ours():
    heading = "keras #19244: `LossScaleOptimizer` in a loop of your own"
    names, _ = run("docs/for_maintainers.md", heading)
    assert names["loss"] < 0.05 * jnp.mean(names["y"] ** 2)
    tx = ols.loss_scale_optimizer(optax.sgd(0.1))
    trainable, opt_state = names["start"], tx.init(names["start"])

    @jax.jit
    def step(trainable, opt_state):
        grad_fn = ols.scaled_value_and_grad(names["mean_squared_error"], opt_state)
        updates, opt_state = tx.update(grad_fn(trainable)[1], opt_state, trainable)
        return optax.apply_updates(trainable, updates), opt_state

    for _ in range(20):
        trainable, opt_state = step(trainable, opt_state)
    for ours, theirs in zip(trainable, names["variables"][0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_nan_batch_changes_no_variable_of_the_block():
    names, _ = run("docs/frameworks.md", "Keras 3")
    *old, opt_state = names["state"]
    bad = names["images"].at[0, 0].set(jnp.nan)
    *new, new_state, _ = names["step"](*names["state"], bad, names["labels"])
    assert_nothing_but_the_scale_changed((new, new_state), (old, opt_state))


def fitted():
    return run("docs/frameworks.md", "Keras 3 with `fit`")[0]


def new_model(kind):
    """The model of the page from new weights: in float32, low, or scaled inside."""
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
