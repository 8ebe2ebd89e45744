"""`compat.flax.DynamicScale` in place of Flax's own, by one changed import.

Scripts run with both classes and must give the same bits. Where Flax is wrong, the
expected values are derived by hand.
"""

import dataclasses
import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import jax_utils, linen, nnx, serialization
from flax.training import dynamic_scale as flax_own
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.compat import IS_JAX_0_7, enable_x64
from optax_lossscale.compat import flax as compat

BOTH = pytest.mark.parametrize("module", [flax_own, compat], ids=["flax", "ours"])


pytestmark = pytest.mark.usefixtures("standard_promotion")


# A training step as in Flax's example for ImageNet, on two devices.


class Network(linen.Module):
    @linen.compact
    def __call__(self, images):
        x = linen.Dense(4, dtype=jnp.float16)(images)
        x = linen.BatchNorm(use_running_average=False, dtype=jnp.float16)(x)
        return linen.Dense(4, dtype=jnp.float16)(linen.relu(x)).astype(jnp.float32)


class State(TrainState):
    batch_stats: Any
    dynamic_scale: Any


def train_step(state, batch):
    def loss_fn(params):
        logits, new_model_state = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses), (new_model_state, logits)

    dynamic_scale = state.dynamic_scale
    grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True, axis_name="batch")
    dynamic_scale, is_fin, aux, grads = grad_fn(state.params)
    loss, (new_model_state, _) = aux
    new_state = state.apply_gradients(
        grads=grads, batch_stats=new_model_state["batch_stats"]
    )
    select = functools.partial(jnp.where, is_fin)
    new_state = new_state.replace(
        opt_state=jax.tree.map(select, new_state.opt_state, state.opt_state),
        params=jax.tree.map(select, new_state.params, state.params),
        dynamic_scale=dynamic_scale,
    )
    return new_state, (lax.pmean(loss, axis_name="batch"), dynamic_scale.scale)


def train(module, steps=9, **settings):
    """Trains on two devices; one batch holds an infinite pixel on one of them."""
    devices = jax.local_devices()[:2]
    network = Network()
    variables = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, 6)))
    state = State.create(
        apply_fn=network.apply,
        params=variables["params"],
        tx=optax.sgd(optax.cosine_decay_schedule(0.1, 20), momentum=0.9, nesterov=True),
        batch_stats=variables["batch_stats"],
        dynamic_scale=module.DynamicScale(**settings),
    )
    state = jax_utils.replicate(state, devices)
    step = jax.pmap(train_step, axis_name="batch", devices=devices)
    metrics = []
    for i in range(steps):
        rng = np.random.default_rng(i)
        image = rng.normal(size=(2, 4, 6)).astype(np.float32)
        image[1, 0, 0] = np.inf if i == 5 else image[1, 0, 0]
        batch = {"image": image, "label": rng.integers(4, size=(2, 4))}
        state, of_step = step(state, batch)
        metrics.append(of_step)
    leaves = jax.tree.leaves(state.dynamic_scale)
    trees = state.params, state.opt_state, state.step, leaves
    return jax.device_get((trees, metrics))


def test_a_published_training_step_gives_the_same_numbers_with_either_import():
    settings = {"scale": 2.0**14, "growth_interval": 2}
    _, metrics = actual = train(compat, **settings)
    assert_same_bits(actual, train(flax_own, **settings))
    scales = [float(scale[0]) for _, scale in metrics]
    assert scales[:5] == [2.0**14] * 2 + [2.0**15] * 3
    assert scales[5] == 2.0**14  # Instead of the growth that was due.


# The class by itself.


def loss_fn(params, x):
    """Overflows in float16 where `x` is large."""
    hidden = x.astype(jnp.float16) * params["w"].astype(jnp.float16)
    return jnp.sum(hidden.astype(jnp.float32) ** 2) + params["b"]


PARAMS = {"w": jnp.array([0.5, -2.0, 1.5]), "b": jnp.float32(0.25)}
SETTINGS = [
    {},
    {"growth_interval": 1},
    {"growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25},
    {"growth_interval": 2, "growth_factor": 3.0, "backoff_factor": 0.3, "scale": 1e3},
    {"growth_interval": 2, "minimum_scale": 512.0, "scale": 1024.0},
    {"growth_interval": 4, "minimum_scale": None, "fin_steps": 2},
]


def run(module, settings, steps=60):
    """Losses and all else of a jitted loop over batches, of which some overflow."""
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(steps, 3)).astype(np.float32)
    xs *= np.where(rng.random((steps, 1)) < 0.2, 1e6, 1.0).astype(np.float32)

    @jax.jit
    def step(dynamic_scale, params, x):
        grad_fn = dynamic_scale.value_and_grad(loss_fn)
        dynamic_scale, finite, loss, grad = grad_fn(params, x)
        new = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grad)
        params = jax.tree.map(functools.partial(jnp.where, finite), new, params)
        return dynamic_scale, params, finite, loss, grad

    dynamic_scale, params = module.DynamicScale(**settings), PARAMS
    losses, seen = [], []
    for x in xs:
        dynamic_scale, params, finite, loss, grad = step(dynamic_scale, params, x)
        losses.append(loss)
        seen.append((finite, grad, dynamic_scale.scale, dynamic_scale.fin_steps))
    return np.asarray(losses), seen


@pytest.mark.fast_every(2)
@pytest.mark.parametrize("settings", SETTINGS)
def test_scales_verdicts_losses_and_gradients_are_those_of_flax(settings):
    losses, seen = run(compat, settings)
    expected_losses, expected = run(flax_own, settings)
    assert {bool(finite) for finite, *_ in seen} == {True, False}
    assert_same_bits(seen, expected)
    # Flax multiplies the loss by the scale and divides it again.
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)


def test_the_fields_the_defaults_and_the_signature_are_those_of_flax():
    own, others = (
        [(f.name, f.default, f.metadata) for f in dataclasses.fields(m.DynamicScale)]
        for m in (compat, flax_own)
    )
    assert own == others
    assert compat.DynamicScaleResult._fields == flax_own.DynamicScaleResult._fields


@BOTH
def test_it_is_a_node_with_two_leaves_and_static_settings(module):
    dynamic_scale = module.DynamicScale(growth_interval=7)
    assert jax.tree.leaves(dynamic_scale) == [0, 65536.0]
    assert dynamic_scale == module.DynamicScale(growth_interval=7)
    replaced = dynamic_scale.replace(scale=8.0)
    assert (replaced.scale, replaced.growth_interval) == (8.0, 7)
    doubled = jax.tree.map(lambda x: 2 * x, replaced)
    assert (doubled.scale, doubled.growth_interval) == (16.0, 7)
    with pytest.raises(dataclasses.FrozenInstanceError, match="scale"):
        dynamic_scale.scale = 8.0


def by_flax(saved, target, _):
    return serialization.from_bytes(target, serialization.to_bytes(saved))


def by_orbax(saved, target, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", saved)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path / "state", target)


@pytest.mark.parametrize("through", [by_flax, by_orbax])
@pytest.mark.parametrize(
    ("writer", "reader"), [(flax_own, compat), (compat, flax_own)], ids=["in", "out"]
)
def test_checkpoints_of_flax_are_restored_and_written(
    writer, reader, through, tmp_path
):
    saved = writer.DynamicScale(scale=jnp.float32(2.0**9), fin_steps=jnp.int32(3))
    target = jax.tree.map(jnp.asarray, reader.DynamicScale())
    restored = through({"scale": saved}, {"scale": target}, tmp_path)["scale"]
    assert isinstance(restored, reader.DynamicScale)
    assert (restored.scale, restored.fin_steps) == (2.0**9, 3)


def test_it_is_carried_by_scan_and_mapped_by_vmap():
    xs = jnp.array([[1.0, 2.0, 3.0], [1e6, 0.0, 0.0], [1.0, 1.0, 1.0]])

    def step(dynamic_scale, x):
        dynamic_scale, finite, loss, _ = dynamic_scale.value_and_grad(loss_fn)(
            PARAMS, x
        )
        return dynamic_scale, (finite, loss)

    start = compat.DynamicScale(scale=1024.0)
    last, (finite, _) = jax.lax.scan(step, start, xs)
    assert (last.scale, last.fin_steps) == (512.0, 1)
    assert finite.tolist() == [True, False, True]

    each, (finite, _) = jax.jit(jax.vmap(step, in_axes=(None, 0)))(start, xs)
    assert each.scale.tolist() == [1024.0, 512.0, 1024.0]
    assert each.fin_steps.tolist() == [1, 0, 1]
    assert finite.tolist() == [True, False, True]


def test_after_its_first_step_a_jitted_step_is_not_compiled_again():
    step = jax.jit(lambda d, x: d.value_and_grad(loss_fn)(PARAMS, x).dynamic_scale)
    dynamic_scale = compat.DynamicScale()
    for _ in range(4):
        dynamic_scale = step(dynamic_scale, jnp.ones(3))
    assert step._cache_size() == 2  # As with Flax: first from Python numbers.


W = jnp.array([1.0, 2.0])
CALLS = {
    "several arguments": (
        lambda a, b: jnp.sum(a * b**2),
        (W, 3 * W),
        {"argnums": (0, 1)},
    ),
    "more than two results": (lambda w: (w[0], "aux", "more"), (W,), {"has_aux": True}),
    "a module of nnx": (
        lambda model, x: jnp.sum(model(x)),
        (nnx.Linear(2, 1, rngs=nnx.Rngs(0)), W[None]),
        {},
    ),
    "Python floats beside arrays": (
        lambda p: jnp.sum(p["w"] ** 2) + p["b"] ** 2,
        ({"w": W, "b": 0.5},),
        {},
    ),
    # As where a part of the loss is switched off.
    "a constant integer as the loss": (lambda w: 0, (W,), {}),
    "an argument that is no pytree": pytest.param(
        lambda w, c: w * c[2],
        (jnp.float32(1.0), {"a": 1, 2: 3}),
        {},
        marks=pytest.mark.skipif(IS_JAX_0_7, reason="JAX 0.7 refuses such arguments"),
    ),
}


@pytest.mark.parametrize(("fun", "args", "settings"), CALLS.values(), ids=CALLS)
def test_what_flax_differentiates_is_differentiated(fun, args, settings):
    actual, expected = (
        module.DynamicScale().value_and_grad(fun, **settings)(*args)
        for module in (compat, flax_own)
    )
    assert actual.finite
    assert actual.dynamic_scale.fin_steps == 1
    assert jax.tree.structure(actual[2:]) == jax.tree.structure(expected[2:])
    jax.tree.map(np.testing.assert_array_equal, actual[2:], expected[2:])


@BOTH
def test_integers_are_no_parameters(module):
    value_and_grad = module.DynamicScale().value_and_grad(lambda p: p["w"] * 2.0)
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        value_and_grad({"w": jnp.float32(1.0), "n": 3})


CONFIG_FILES = [
    ({"growth_interval": 2e3}, 1.0),
    ({"growth_interval": np.array(1)}, 2.0),
    ({"growth_interval": jnp.int32(1)}, 2.0),
    ({"growth_interval": np.inf}, 1.0),
    ({"growth_interval": 2**31 - 1}, 1.0),
    ({"growth_interval": 1, "growth_factor": jnp.float32(4.0)}, 4.0),
    ({"minimum_scale": jnp.float32(1.0)}, 1.0),
    ({"minimum_scale": np.finfo(np.float64).tiny}, 1.0),
    ({"minimum_scale": 0}, 1.0),
]


@BOTH
@pytest.mark.parametrize(("settings", "factor"), CONFIG_FILES)
def test_settings_may_be_of_any_kind_of_number(module, settings, factor):
    def two_steps():
        dynamic_scale = module.DynamicScale(scale=8.0, **settings)
        for _ in range(2):
            value_and_grad = dynamic_scale.value_and_grad(lambda w: w**2)
            dynamic_scale = value_and_grad(jnp.float32(1.0)).dynamic_scale
        return dynamic_scale.scale

    assert two_steps() == 8.0 * factor
    assert jax.jit(two_steps)() == 8.0 * factor


@BOTH
def test_loops_under_64_bit_numbers_carry_what_a_step_made(module):
    def step(dynamic_scale, _=None):
        value_and_grad = dynamic_scale.value_and_grad(lambda w: jnp.sum(w**2))
        return value_and_grad(jnp.ones(2, jnp.float32)).dynamic_scale, None

    with enable_x64(True):
        dynamic_scale = module.DynamicScale(fin_steps=jnp.int64(0))
        for _ in range(2):
            dynamic_scale, _ = jax.jit(step)(dynamic_scale)
        assert dynamic_scale.fin_steps.dtype == jnp.int64
        dynamic_scale, _ = jax.lax.scan(step, dynamic_scale, length=3)
        assert dynamic_scale.fin_steps == 5


# Where Flax is wrong.

X = jnp.arange(8.0) + 1  # The mean over devices is 4.5.


REPLICATED = P()


def grads_of_shard_map(
    loss_fn, check_vma, x=X, spec=REPLICATED, scale=64.0, module=compat, axes=("data",)
):
    """Verdict, gradient and scale of every device, on a mesh with one axis or two."""
    shape = (8,) if len(axes) == 1 else (4, 2)
    mesh = jax.make_mesh(shape, axes, (jax.sharding.AxisType.Auto,) * len(axes))
    scale_spec = P(axes) if jnp.ndim(scale) else REPLICATED

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(scale_spec, spec, P(axes[0])),
        out_specs=P(axes),
        check_vma=check_vma,
    )
    def step(scale, params, x):
        dynamic_scale = module.DynamicScale(scale=jnp.reshape(scale, ()))
        grad_fn = dynamic_scale.value_and_grad(loss_fn, axis_name=axes)
        dynamic_scale, finite, _, grad = grad_fn(params, x)
        return jnp.stack([finite, grad[0], dynamic_scale.scale])[None]

    params = jnp.full(1 if spec == REPLICATED else 8, 2.0)
    results = jax.jit(step)(scale, params, x)
    finite, grads, scales = np.transpose(results).tolist()
    return finite, grads, scales


def local_loss(params, x):
    return jnp.sum(params * x)


def half_loss(params, x):
    """Each gradient is 40 * 1024, of which two are infinite in float16."""
    loss = jnp.sum(params.astype(jnp.float16) * x.astype(jnp.float16))
    return loss.astype(jnp.float32)


MEANS = {
    "parameters that do not vary": (local_loss, {}, 4.5),
    "parameters that vary": (local_loss, {"spec": P("data")}, 4.5),
    "a scale on each device": (local_loss, {"scale": 1024.0 + 64 * X}, 4.5),
    "float16": (half_loss, {"x": jnp.full(8, 40.0), "scale": 1024.0}, 40.0),
    # Every part of `x` is on two devices.
    "two axes": (local_loss, {"x": jnp.arange(4.0), "axes": ("a", "b")}, 1.5),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("loss", "settings", "mean"), MEANS.values(), ids=MEANS)
def test_gradients_are_averaged_in_shard_map(loss, settings, mean, check_vma):
    finite, grads, _ = grads_of_shard_map(loss, check_vma, **settings)
    assert (finite, grads) == ([True] * 8, [mean] * 8)


@pytest.mark.parametrize("check_vma", [True, False])
def test_flax_adds_gradients_where_jax_tracks_what_varies(check_vma):
    _, grads, _ = grads_of_shard_map(local_loss, check_vma, module=flax_own)
    assert grads == [36.0 if check_vma else 4.5] * 8


@pytest.mark.parametrize("scale", [64.0, jnp.full(8, 64.0)], ids=["one", "on each"])
def test_gradients_of_a_loss_that_is_averaged_already_are_not_averaged_again(scale):
    def mean_loss(params, x):
        return lax.pmean(jnp.sum(params * x), "data")

    _, grads, _ = grads_of_shard_map(mean_loss, check_vma=True, scale=scale)
    assert grads == [4.5] * 8


@pytest.mark.parametrize(("bad", "check_vma"), [(jnp.nan, True), (jnp.inf, False)])
def test_all_devices_skip_if_one_has_a_nonfinite_gradient(bad, check_vma):
    finite, _, scale = grads_of_shard_map(local_loss, check_vma, X.at[5].set(bad))
    assert (finite, scale) == ([False] * 8, [32.0] * 8)


def test_an_axis_that_does_not_exist_gets_a_hint():
    grad_fn = compat.DynamicScale().value_and_grad(lambda p: p**2, axis_name="b")
    with pytest.raises(NameError) as error:  # noqa: PT011
        grad_fn(jnp.float32(1.0))
    notes = " ".join(error.value.__notes__)
    assert "`axis_name` must name axes of the `pmap`" in notes


def test_a_float16_loss_does_not_overflow_when_it_is_scaled():
    def loss_fn(p):
        return jnp.float16(3.0) * p

    p = jnp.float16(1.0)
    scale = {"scale": 2.0**15}
    _, finite, loss, grad = compat.DynamicScale(**scale).value_and_grad(loss_fn)(p)
    assert (finite, loss, loss.dtype) == (False, 3.0, jnp.float32)
    assert jnp.isinf(grad)  # 3 * 2**15 is infinite in float16.
    assert flax_own.DynamicScale(**scale).value_and_grad(loss_fn)(p).aux == jnp.inf


@jax.jit
def square_step(dynamic_scale):
    return dynamic_scale.value_and_grad(lambda p: p**2)(jnp.float32(3.0))


@pytest.mark.parametrize("scale", [jnp.inf, jnp.nan, 0.0, 2.0**127, -8.0])
def test_an_unusable_scale_skips_one_step_and_restarts(scale):
    dynamic_scale, finite, loss, _ = square_step(compat.DynamicScale(scale=scale))
    assert (finite, loss, dynamic_scale.scale) == (False, 9.0, 32768.0)
    dynamic_scale, finite, loss, grad = square_step(dynamic_scale)
    assert (finite, loss, grad, dynamic_scale.fin_steps) == (True, 9.0, 6.0, 1)


def test_complex_gradients_keep_their_imaginary_parts():
    grad_fn = compat.DynamicScale().value_and_grad(lambda z: jnp.abs(z) ** 2)
    grad = grad_fn(jnp.complex64(1 + 2j)).grad
    np.testing.assert_allclose(grad, 2 - 4j, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "xs", "last"),
    [
        # The scale stays with an endless interval and itself as the floor.
        (
            {"scale": 64.0, "minimum_scale": 64.0, "growth_interval": jnp.inf},
            [1.0, jnp.inf, 1.0],
            64.0,
        ),
        # It does not fall to zero without a floor.
        ({"scale": 2.0**-120, "minimum_scale": None}, [jnp.inf] * 10, 2.0**-126),
        # It may be an integer at first.
        ({"scale": 1}, [jnp.inf], 0.5),
    ],
    ids=["constant", "no floor", "integer"],
)
def test_the_scale_after_some_steps(settings, xs, last):
    step = jax.jit(lambda d, x: d.value_and_grad(lambda p: p * x)(jnp.float32(1.0))[0])
    dynamic_scale = compat.DynamicScale(**settings)
    for x in xs:
        dynamic_scale = step(dynamic_scale, x)
    assert (dynamic_scale.scale, dynamic_scale.scale.dtype) == (last, jnp.float32)


def test_float64_gradients_stay_float64():
    with enable_x64(True):
        params = jnp.asarray(1.0 + 2.0**-40, jnp.float64)
        _, finite, loss, grad = compat.DynamicScale().value_and_grad(
            lambda p: 1e300 * p
        )(params)
        assert finite
        assert (grad, grad.dtype, loss.dtype) == (1e300, jnp.float64, jnp.float64)


def test_a_setting_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="`growth_factor` must be strictly"):
        compat.DynamicScale(growth_factor=1.0).value_and_grad(loss_fn)


# The way on.


def test_a_run_is_carried_over_to_loss_scaled_and_back_bit_for_bit():
    xs = jnp.ones((30, 3)) * jnp.where(jnp.arange(30) % 7 == 5, 1e6, 1.0)[:, None]
    settings = {"growth_interval": 3}
    # Its products are exact, however XLA combines them with sums.
    inner = optax.sgd(2.0**-3, momentum=0.5)
    rule = ols.presets.flax(**settings)
    tx = ols.loss_scaled(inner, rule)

    @jax.jit
    def as_it_was(dynamic_scale, params, opt_state, x):
        grad_fn = dynamic_scale.value_and_grad(loss_fn)
        dynamic_scale, finite, _, grads = grad_fn(params, x)
        updates, new = inner.update(grads, opt_state, params)
        stepped, kept = (optax.apply_updates(params, updates), new), (params, opt_state)
        return dynamic_scale, *optax.tree.where(finite, stepped, kept)

    @jax.jit
    def in_our_form(params, opt_state, x):
        grads = ols.scaled_grad(loss_fn, opt_state)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    carry = compat.DynamicScale(scale=2.0**12, **settings), PARAMS, inner.init(PARAMS)
    for x in xs[:12]:
        carry = as_it_was(*carry, x)
    dynamic_scale, params, opt_state = carry
    opt_state = ols.adopt_inner_state(opt_state, rule)
    opt_state = opt_state._replace(loss_scale_state=dynamic_scale.to_state())
    for x in xs[12:22]:
        carry = as_it_was(*carry, x)
        params, opt_state = in_our_form(params, opt_state, x)
        assert_same_bits((params, opt_state.inner_state), carry[1:])
        assert ols.get_loss_scale(opt_state) == carry[0].scale

    back = compat.DynamicScale.from_state(opt_state, **settings)
    returned = back, params, opt_state.inner_state
    for x in xs[22:]:
        carry, returned = as_it_was(*carry, x), as_it_was(*returned, x)
        assert_same_bits(returned, carry)


def test_states_have_buffers_of_their_own():
    fields = {"scale": jnp.float32(8.0), "fin_steps": jnp.int32(1)}
    dynamic_scale = compat.DynamicScale(**fields)
    state = dynamic_scale.to_state()
    back = compat.DynamicScale.from_state(state)
    donate = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), donate_argnums=0)
    donate(state)
    donate(dynamic_scale)
    assert (back.scale, back.fin_steps) == (8.0, 1)


def test_the_rule_has_the_settings_of_the_object():
    settings = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 5}
    rule = compat.DynamicScale(minimum_scale=2.0, **settings).to_rule()
    assert rule.settings == {"scale": 65536.0, "minimum_scale": 2.0, **settings}


def test_replicated_fields_become_a_replicated_state():
    replicated = compat.DynamicScale(scale=jnp.full(8, 4.0), fin_steps=jnp.arange(8))
    state = replicated.to_state()
    assert {leaf.shape for leaf in jax.tree.leaves(state)} == {(8,)}
    assert_same_bits(
        compat.DynamicScale.from_state(state), jax.tree.map(jnp.asarray, replicated)
    )


def test_a_state_of_another_kind_of_rule_is_refused():
    with pytest.raises(ValueError, match="`tree` must hold the state of a rule that"):
        compat.DynamicScale.from_state(ols.static_loss_scale(8.0).init())
    with pytest.raises(ValueError, match="the tree must hold a LossScaleState"):
        compat.DynamicScale.from_state({})


def test_without_flax_the_import_says_what_to_install():
    code = (
        "import sys; sys.modules['flax'] = None\n"
        "try: import optax_lossscale.compat.flax\n"
        "except ImportError as error: print(error)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "`optax_lossscale.compat.flax` needs Flax" in printed
    assert "pip install flax" in printed
