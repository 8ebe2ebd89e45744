"""`compat.flax.DynamicScale` in place of Flax's own, by one changed import.

Promised in docs/migration/flax_and_jmp.md. Scripts run with both classes and must give
the same numbers. Where Flax is wrong, the expected values are derived by hand.
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
from helpers.cases import slow_except
from helpers.compare import assert_same_bits
from optax_lossscale.compat import flax as compat

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"w": jnp.array([0.5, -2.0, 1.5]), "b": jnp.float32(0.25)}
RNG = np.random.default_rng(0)
BATCHES = RNG.normal(size=(60, 2, 3)).astype(np.float32)
BATCHES *= np.where(RNG.random((60, 2, 1)) < 0.2, 1e6, 1.0).astype(np.float32)


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
    ({"growth_interval": 8, "minimum_scale": 512.0, "scale": 1024.0}, None),
    ({"growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25}, None),
    ({"growth_interval": 4, "minimum_scale": None, "fin_steps": 2}, None),
]
DEVICES = pytest.param({}, "a", marks=pytest.mark.several_devices)


@pytest.mark.parametrize(
    ("settings", "axis_name"),
    [*slow_except(SETTINGS[:1], SETTINGS), DEVICES],
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
def test_checkpoints_of_flax_are_restored_and_written(through, tmp_path):
    for writer, reader in ((flax_own, compat), (compat, flax_own)):
        saved = writer.DynamicScale(scale=jnp.float32(2.0**9), fin_steps=jnp.int32(3))
        target = jax.tree.map(jnp.asarray, reader.DynamicScale())
        path = tmp_path / writer.__name__
        restored = through({"scale": saved}, {"scale": target}, path)["scale"]
        assert isinstance(restored, reader.DynamicScale)
        assert (restored.scale, restored.fin_steps) == (2.0**9, 3)


W = jnp.array([1.0, 2.0])
MODEL = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
CALLS = {
    "a module": (lambda model, x: jnp.sum(model(x)), (MODEL, W[None]), 0),
    "several arguments": (lambda a, b: jnp.sum(a * b**2), (W, 3 * W), (0, 1)),
    "a Python float": (lambda p: jnp.sum(p["w"] * p["b"]), ({"w": W, "b": 0.5},), 0),
}


@pytest.mark.parametrize(("fun", "args", "argnums"), CALLS.values(), ids=CALLS)
def test_what_flax_differentiates_is_differentiated(fun, args, argnums):
    actual, expected = (
        module.DynamicScale().value_and_grad(fun, argnums)(*args)
        for module in (compat, flax_own)
    )
    assert jax.tree.structure(actual[2:]) == jax.tree.structure(expected[2:])
    jax.tree.map(np.testing.assert_array_equal, actual[2:], expected[2:])


# Where Flax is wrong: in `shard_map` it adds gradients instead of averaging them.

X = jnp.arange(8.0) + 1  # The mean over eight devices is 4.5.


def in_shard_map(loss_fn, check_vma, x=X, scale=64.0, axes=("data",)):
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
        dynamic_scale = compat.DynamicScale(scale=scale)
        grad_fn = dynamic_scale.value_and_grad(loss_fn, axis_name=axes)
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


MEANS = [
    (half_loss, {"x": jnp.full(8, 40.0), "scale": 1024.0}, 40.0, True),
    (half_loss, {"x": jnp.full(8, 40.0), "scale": 1024.0}, 40.0, False),
    (local_loss, {}, 4.5, True),
    (mean_loss, {}, 4.5, True),
    # Every part of `x` is on two devices.
    (local_loss, {"x": jnp.arange(4.0), "axes": ("a", "b")}, 1.5, True),
    (local_loss, {"x": jnp.arange(4.0), "axes": ("a", "b")}, 1.5, False),
]


@pytest.mark.several_devices
@pytest.mark.parametrize(("loss", "options", "mean", "check_vma"), MEANS)
def test_gradients_are_averaged_in_shard_map(loss, options, mean, check_vma):
    finite, grads, _ = in_shard_map(loss, check_vma, **options)
    assert (finite, grads) == ([True] * 8, [mean] * 8)


@pytest.mark.several_devices
@pytest.mark.parametrize("check_vma", [True, False])
def test_all_devices_skip_if_one_has_a_nonfinite_gradient(check_vma):
    finite, _, scale = in_shard_map(local_loss, check_vma, X.at[5].set(jnp.nan))
    assert (finite, scale) == ([False] * 8, [32.0] * 8)


def test_a_float16_loss_does_not_overflow_when_it_is_scaled():
    grad_fn = compat.DynamicScale().value_and_grad(lambda p: jnp.float16(3.0) * p)
    result = grad_fn(jnp.float16(1.0))
    assert (result.aux, result.aux.dtype) == (3.0, jnp.float32)
    assert not result.finite  # The gradient, 3 * 2**16, is infinite in float16.


def test_complex_gradients_keep_their_imaginary_parts():
    grad_fn = compat.DynamicScale().value_and_grad(lambda z: jnp.abs(z) ** 2)
    np.testing.assert_allclose(grad_fn(jnp.complex64(1 + 2j)).grad, 2 - 4j, rtol=1e-6)


# To `loss_scaled` and back.


def test_a_run_carried_over_to_loss_scaled_and_back_has_the_same_scales():
    factors = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    start = compat.DynamicScale(scale=2.0**14, **factors)
    tx = ols.loss_scaled(optax.sgd(1e-3), start.to_rule())

    def step(dynamic_scale, x):
        grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True)
        dynamic_scale, *_ = grad_fn(PARAMS, x)
        return dynamic_scale, dynamic_scale

    def own_step(opt_state, x):
        grads, _ = ols.scaled_grad(loss_fn, opt_state, has_aux=True)(PARAMS, x)
        return tx.update(grads, opt_state, PARAMS)[1], None

    xs = BATCHES[:20, 0]
    _, after_each = lax.scan(step, start, xs)
    assert len(set(after_each.scale.tolist())) > 3
    tenth, last = (jax.tree.map(lambda x, i=i: x[i], after_each) for i in (9, 19))
    opt_state = tx.init(PARAMS)._replace(loss_scale_state=tenth.to_state())
    opt_state, _ = lax.scan(own_step, opt_state, xs[10:])
    dynamic_scale = compat.DynamicScale.from_state(opt_state, **factors)
    assert_same_bits(dynamic_scale, last)
    # Each has its own buffers, so that a step may donate one of them.
    leaves = jax.tree.leaves((opt_state.loss_scale_state, dynamic_scale))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_a_state_of_another_rule_is_refused():
    with pytest.raises(ValueError, match="`tree` must hold the state of a rule that"):
        compat.DynamicScale.from_state(ols.headroom_loss_scale().init())
