"""`compat.flax.DynamicScale` in place of Flax's own, by one changed import.

Scripts run with both classes and must give the same numbers. Where Flax is wrong, the
expected values are derived by hand.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training import dynamic_scale as flax_own
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from optax_lossscale.compat import flax as compat

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"w": jnp.array([0.5, -2.0, 1.5]), "b": jnp.float32(0.25)}
STEPS = 60
RNG = np.random.default_rng(0)
BATCHES = RNG.normal(size=(STEPS, 2, 3)).astype(np.float32)
BATCHES *= np.where(RNG.random((STEPS, 2, 1)) < 0.2, 1e6, 1.0).astype(np.float32)


def loss_fn(params, x):
    """Overflows in float16 where `x` is large."""
    hidden = x.astype(jnp.float16) * params["w"].astype(jnp.float16)
    return jnp.sum(hidden.astype(jnp.float32) ** 2) + params["b"], hidden


def run(module, settings, axis_name=None):
    """Losses, and everything else, of a script that loops over batches.

    With a name of an axis there are two devices, of which each has its own batches.
    """

    def step(dynamic_scale, params, x):
        grad_fn = dynamic_scale.value_and_grad(
            loss_fn, has_aux=True, axis_name=axis_name
        )
        dynamic_scale, finite, (loss, aux), grad = grad_fn(params, x)
        new = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grad)
        params = jax.tree.map(functools.partial(jnp.where, finite), new, params)
        return (dynamic_scale, params), (loss, finite, aux, grad)

    carry, batches = (module.DynamicScale(**settings), PARAMS), BATCHES[:, 0]
    step = jax.jit(step) if axis_name is None else jax.pmap(step, axis_name)
    if axis_name is not None:
        carry = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), carry)
        batches = BATCHES
    losses, others = [], []
    for x in batches:
        carry, (loss, *seen) = step(*carry, x)
        losses.append(loss)
        others.append(jax.tree.leaves((carry, seen)))
    return np.asarray(losses), others


SETTINGS = [
    {},
    {"growth_interval": 1},
    {"growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25},
    {"growth_interval": 2, "minimum_scale": 512.0, "scale": 1024.0},
    {"growth_interval": 4, "minimum_scale": None, "fin_steps": 2},
]
DEVICES = pytest.param({}, "a", marks=pytest.mark.several_devices)


@pytest.mark.parametrize(
    ("settings", "axis_name"), [*((each, None) for each in SETTINGS), DEVICES]
)
def test_scales_verdicts_losses_and_gradients_are_those_of_flax(settings, axis_name):
    losses, others = run(compat, settings, axis_name)
    expected_losses, expected = run(flax_own, settings, axis_name)
    assert_same_bits(others, expected)
    # Flax multiplies the loss by the scale and divides it again.
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)


def test_the_fields_and_their_defaults_are_those_of_flax():
    own, others = (
        [
            (field.name, field.default, field.metadata)
            for field in dataclasses.fields(module.DynamicScale)
            if not field.name.startswith("_")
        ]
        for module in (compat, flax_own)
    )
    assert own == others
    assert compat.DynamicScaleResult._fields == flax_own.DynamicScaleResult._fields


def test_no_program_that_was_compiled_for_flax_runs_for_this_class():
    # JAX 0.10 looks for one among the programs whose pytree types are equal.
    own, others = (
        jax.tree.structure(module.DynamicScale()) for module in (compat, flax_own)
    )
    assert own != others


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


def test_it_is_carried_by_scan():
    def step(dynamic_scale, x):
        grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True)
        dynamic_scale, finite, _, _ = grad_fn(PARAMS, x)
        return dynamic_scale, finite

    xs = jnp.array([[1.0, 2.0, 3.0], [1e6, 0.0, 0.0], [1.0, 1.0, 1.0]])
    last, finite = lax.scan(step, compat.DynamicScale(scale=1024.0), xs)
    assert (last.scale, last.fin_steps) == (512.0, 1)
    assert finite.tolist() == [True, False, True]


W = jnp.array([1.0, 2.0])
CALLS = {
    "several arguments": (lambda a, b: jnp.sum(a * b**2), (W, 3 * W), (0, 1)),
    "a Python float": (lambda p: jnp.sum(p["w"] * p["b"]), ({"w": W, "b": 0.5},), 0),
    "a module of nnx": (
        lambda model, x: jnp.sum(model(x)),
        (nnx.Linear(2, 1, rngs=nnx.Rngs(0)), W[None]),
        0,
    ),
}


@pytest.mark.parametrize(("fun", "args", "argnums"), CALLS.values(), ids=CALLS)
def test_what_flax_differentiates_is_differentiated(fun, args, argnums):
    actual, expected = (
        module.DynamicScale().value_and_grad(fun, argnums)(*args)
        for module in (compat, flax_own)
    )
    assert jax.tree.structure(actual[2:]) == jax.tree.structure(expected[2:])
    jax.tree.map(np.testing.assert_array_equal, actual[2:], expected[2:])


def test_a_setting_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="`growth_factor` must be strictly"):
        compat.DynamicScale(growth_factor=1.0).value_and_grad(loss_fn)


# Where Flax is wrong.

X = jnp.arange(8.0) + 1  # The mean over eight devices is 4.5.


def grads_of_shard_map(
    loss_fn, check_vma, x=X, scale=64.0, axes=("data",), argnums=0, module=compat
):
    """Verdict, gradient and scale of every device, on a mesh with one axis or two."""
    shape = (8,) if len(axes) == 1 else (4, 2)
    mesh = jax.make_mesh(shape, axes, (jax.sharding.AxisType.Auto,) * len(axes))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(axes[0])),
        out_specs=P(axes),
        check_vma=check_vma,
    )
    def step(params, x):
        dynamic_scale = module.DynamicScale(scale=scale)
        grad_fn = dynamic_scale.value_and_grad(loss_fn, argnums, axis_name=axes)
        dynamic_scale, finite, _, grad = grad_fn(params, x)
        return jnp.stack([finite, grad, dynamic_scale.scale])[None]

    return np.transpose(jax.jit(step)(jnp.float32(2.0), x)).tolist()


def local_loss(param, x):
    return jnp.sum(param * x)


def half_loss(param, x):
    """Each gradient is 40 * 1024, of which two are infinite in float16."""
    loss = jnp.sum(param.astype(jnp.float16) * x.astype(jnp.float16))
    return loss.astype(jnp.float32)


def mean_loss(param, x):
    return lax.pmean(local_loss(param, x), "data")


MEANS = {
    "float32": (local_loss, {}, 4.5),
    "an argument counted from the end": (local_loss, {"argnums": -2}, 4.5),
    "float16": (half_loss, {"x": jnp.full(8, 40.0), "scale": 1024.0}, 40.0),
    # Every part of `x` is on two devices.
    "two axes": (local_loss, {"x": jnp.arange(4.0), "axes": ("a", "b")}, 1.5),
}
CASES = [(*case, check_vma) for case in MEANS.values() for check_vma in (True, False)]
CASES.append((mean_loss, {}, 4.5, True))


@pytest.mark.several_devices
@pytest.mark.parametrize(("loss", "options", "mean", "check_vma"), CASES)
def test_gradients_are_averaged_in_shard_map(loss, options, mean, check_vma):
    finite, grads, _ = grads_of_shard_map(loss, check_vma, **options)
    assert (finite, grads) == ([True] * 8, [mean] * 8)


@pytest.mark.several_devices
def test_flax_adds_gradients_where_jax_tracks_what_varies():
    _, grads, _ = grads_of_shard_map(local_loss, check_vma=True, module=flax_own)
    assert grads == [36.0] * 8


@pytest.mark.several_devices
@pytest.mark.parametrize(("bad", "check_vma"), [(jnp.nan, True), (jnp.inf, False)])
def test_all_devices_skip_if_one_has_a_nonfinite_gradient(bad, check_vma):
    finite, _, scale = grads_of_shard_map(local_loss, check_vma, X.at[5].set(bad))
    assert (finite, scale) == ([False] * 8, [32.0] * 8)


def test_a_float16_loss_does_not_overflow_when_it_is_scaled():
    def loss_fn(p):
        return jnp.float16(3.0) * p

    own, others = (
        module.DynamicScale(scale=2.0**15).value_and_grad(loss_fn)(jnp.float16(1.0))
        for module in (compat, flax_own)
    )
    assert (own.aux, own.aux.dtype) == (3.0, jnp.float32)
    assert not own.finite  # The gradient, 3 * 2**15, is infinite in float16.
    assert others.aux == jnp.inf


def test_complex_gradients_keep_their_imaginary_parts():
    grad_fn = compat.DynamicScale().value_and_grad(lambda z: jnp.abs(z) ** 2)
    np.testing.assert_allclose(grad_fn(jnp.complex64(1 + 2j)).grad, 2 - 4j, rtol=1e-6)


# To `loss_scaled` and back.

FACTORS = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
FACTORS |= {"minimum_scale": 0.25}


def test_a_run_carried_over_to_loss_scaled_and_back_has_the_same_scales():
    start = compat.DynamicScale(scale=2.0**14, **FACTORS)
    tx = ols.loss_scaled(optax.sgd(1e-3), start.to_rule())

    @jax.jit
    def step(dynamic_scale, x):
        return dynamic_scale.value_and_grad(loss_fn, has_aux=True)(PARAMS, x)[0]

    @jax.jit
    def own_step(opt_state, x):
        grads, _ = ols.scaled_grad(loss_fn, opt_state, has_aux=True)(PARAMS, x)
        return tx.update(grads, opt_state, PARAMS)[1]

    xs = BATCHES[:30, 0]
    expected = [start]
    for x in xs:
        expected.append(step(expected[-1], x))
    assert len({float(each.scale) for each in expected}) > 3

    opt_state = tx.init(PARAMS)._replace(loss_scale_state=expected[10].to_state())
    for x in xs[10:20]:
        opt_state = own_step(opt_state, x)
    dynamic_scale = compat.DynamicScale.from_state(opt_state, **FACTORS)
    assert_same_bits(dynamic_scale, expected[20])
    for x, after in zip(xs[20:], expected[21:], strict=True):
        dynamic_scale = step(dynamic_scale, x)
        assert_same_bits(dynamic_scale, after)


def test_a_step_may_donate_a_state_that_was_carried_over():
    dynamic_scale = compat.DynamicScale(scale=jnp.float32(8.0), fin_steps=jnp.int32(2))
    state = dynamic_scale.to_state()
    leaves = jax.tree.leaves(
        (dynamic_scale, state, compat.DynamicScale.from_state(state))
    )
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (ols.headroom_loss_scale().init(), "`tree` must hold the state of a rule that"),
        ({}, "the tree must hold a LossScaleState"),
    ],
)
def test_a_state_of_another_rule_is_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        compat.DynamicScale.from_state(tree)
