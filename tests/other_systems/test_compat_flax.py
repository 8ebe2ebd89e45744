"""`compat.flax.DynamicScale` in place of Flax's own, by one changed import.

Scripts run with both classes and must give the same bits. Where Flax is wrong, the
expected values are derived by hand.
"""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training import dynamic_scale as flax_own
from jax import lax
from jax.sharding import PartitionSpec as P

from helpers.compare import assert_same_bits
from helpers.compat import IS_JAX_0_7, enable_x64
from optax_lossscale.compat import flax as compat

BOTH = pytest.mark.parametrize("module", [flax_own, compat], ids=["flax", "ours"])


pytestmark = pytest.mark.usefixtures("standard_promotion")


def loss_fn(params, x):
    """Overflows in float16 where `x` is large."""
    hidden = x.astype(jnp.float16) * params["w"].astype(jnp.float16)
    return jnp.sum(hidden.astype(jnp.float32) ** 2) + params["b"], hidden


PARAMS = {"w": jnp.array([0.5, -2.0, 1.5]), "b": jnp.float32(0.25)}
SETTINGS = [
    {},
    {"growth_interval": 1},
    {"growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25},
    {"growth_interval": 2, "growth_factor": 3.0, "backoff_factor": 0.3, "scale": 1e3},
    {"growth_interval": 2, "minimum_scale": 512.0, "scale": 1024.0},
    {"growth_interval": 4, "minimum_scale": None, "fin_steps": 2},
]
STEPS = 60
RNG = np.random.default_rng(0)
BATCHES = RNG.normal(size=(STEPS, 2, 3)).astype(np.float32)
BATCHES *= np.where(RNG.random((STEPS, 2, 1)) < 0.2, 1e6, 1.0).astype(np.float32)


def run(module, settings, axis_name=None):
    """Losses and all else of a loop over batches, of which some overflow.

    With a name of an axis there are two devices, of which each has its own batches.
    """

    def step(dynamic_scale, params, x):
        options = {"has_aux": True, "axis_name": axis_name}
        grad_fn = dynamic_scale.value_and_grad(loss_fn, **options)
        dynamic_scale, finite, (loss, aux), grad = grad_fn(params, x)
        new = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grad)
        params = jax.tree.map(functools.partial(jnp.where, finite), new, params)
        return dynamic_scale, params, loss, (finite, aux, grad)

    carry, batches = (module.DynamicScale(**settings), PARAMS), BATCHES[:, 0]
    if axis_name is None:
        step = jax.jit(step)
    else:
        step = jax.pmap(step, axis_name)
        carry = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), carry)
        batches = BATCHES
    losses, seen = [], []
    for x in batches:
        *carry, loss, others = step(*carry, x)
        losses.append(loss)
        seen.append((carry, others))
    return np.asarray(losses), [jax.tree.leaves(each) for each in seen]


@pytest.mark.parametrize(
    ("settings", "axis_name"),
    [
        *((settings, None) for settings in SETTINGS),
        pytest.param({}, "a", marks=pytest.mark.several_devices),
    ],
)
def test_scales_verdicts_losses_and_gradients_are_those_of_flax(settings, axis_name):
    losses, seen = run(compat, settings, axis_name)
    expected_losses, expected = run(flax_own, settings, axis_name)
    assert_same_bits(seen, expected)
    # Flax multiplies the loss by the scale and divides it again.
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)


def test_the_public_fields_and_their_defaults_are_those_of_flax():
    own, others = (
        [
            (f.name, f.default, f.metadata)
            for f in dataclasses.fields(m.DynamicScale)
            if not f.name.startswith("_")
        ]
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


def test_no_program_that_was_compiled_for_flax_runs_for_this_class():
    """JAX 0.10 looks for one among the programs whose pytree types are equal."""
    own, others = (jax.tree.structure(m.DynamicScale()) for m in (compat, flax_own))
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


def test_it_is_carried_by_scan_and_mapped_by_vmap():
    xs = jnp.array([[1.0, 2.0, 3.0], [1e6, 0.0, 0.0], [1.0, 1.0, 1.0]])

    def step(dynamic_scale, x):
        grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True)
        dynamic_scale, finite, _, _ = grad_fn(PARAMS, x)
        return dynamic_scale, finite

    start = compat.DynamicScale(scale=1024.0)
    last, finite = jax.lax.scan(step, start, xs)
    assert (last.scale, last.fin_steps) == (512.0, 1)
    assert finite.tolist() == [True, False, True]

    each, finite = jax.jit(jax.vmap(step, in_axes=(None, 0)))(start, xs)
    assert each.scale.tolist() == [1024.0, 512.0, 1024.0]
    assert each.fin_steps.tolist() == [1, 0, 1]
    assert finite.tolist() == [True, False, True]


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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("settings", "fun", "params", "error", "message"),
    [
        ({}, lambda p: p[0] * 2.0, [2.0, 3], TypeError, "grad requires real- or compl"),
        ({"growth_factor": 1.0}, abs, 2.0, ValueError, "`growth_factor` must be stric"),
    ],
    ids=["an integer parameter", "a setting outside its range"],
)
def test_what_has_no_meaning_is_refused(settings, fun, params, error, message):
    with pytest.raises(error, match=message):
        compat.DynamicScale(**settings).value_and_grad(fun)(params)


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


@BOTH
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_scale_that_was_restored_in_half_precision_grows_in_float32(module, dtype):
    dynamic_scale = module.DynamicScale(
        scale=dtype(2.0**15), growth_factor=1.001, growth_interval=1
    )
    for _ in range(4):
        value_and_grad = dynamic_scale.value_and_grad(lambda w: w**2)
        dynamic_scale, finite, *_ = value_and_grad(jnp.float32(1.0))
        assert finite
    assert dynamic_scale.scale.dtype == jnp.float32
    np.testing.assert_allclose(dynamic_scale.scale, 2.0**15 * 1.001**2, rtol=1e-6)


@pytest.mark.slow
def test_float64_gradients_stay_float64():
    with enable_x64(True):
        grad_fn = compat.DynamicScale().value_and_grad(lambda p: 1e300 * p)
        _, finite, loss, grad = grad_fn(jnp.asarray(1.0 + 2.0**-40, jnp.float64))
        assert finite
        assert (grad, grad.dtype, loss.dtype) == (1e300, jnp.float64, jnp.float64)


# Where Flax is wrong.

X = jnp.arange(8.0) + 1  # The mean over devices is 4.5.
WHOLE = P()


def grads_of_shard_map(
    loss_fn, check_vma, x=X, spec=WHOLE, scale=64.0, module=compat, axes=("data",)
):
    """Verdict, gradient and scale of every device, on a mesh with one axis or two."""
    shape = (8,) if len(axes) == 1 else (4, 2)
    mesh = jax.make_mesh(shape, axes, (jax.sharding.AxisType.Auto,) * len(axes))
    specs = P(axes) if jnp.ndim(scale) else P(), spec, P(axes[0])

    def step(scale, params, x):
        dynamic_scale = module.DynamicScale(scale=jnp.reshape(scale, ()))
        grad_fn = dynamic_scale.value_and_grad(loss_fn, axis_name=axes)
        dynamic_scale, finite, _, grad = grad_fn(params, x)
        return jnp.stack([finite, grad[0], dynamic_scale.scale])[None]

    over = {"mesh": mesh, "in_specs": specs, "out_specs": P(axes)}
    step = jax.jit(jax.shard_map(step, check_vma=check_vma, **over))
    results = step(scale, jnp.full(1 if spec == WHOLE else 8, 2.0), x)
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


@pytest.mark.several_devices
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("loss", "settings", "mean"), MEANS.values(), ids=MEANS)
def test_gradients_are_averaged_in_shard_map(loss, settings, mean, check_vma):
    finite, grads, _ = grads_of_shard_map(loss, check_vma, **settings)
    assert (finite, grads) == ([True] * 8, [mean] * 8)


@pytest.mark.several_devices
@pytest.mark.parametrize("check_vma", [True, False])
def test_flax_adds_gradients_where_jax_tracks_what_varies(check_vma):
    _, grads, _ = grads_of_shard_map(local_loss, check_vma, module=flax_own)
    assert grads == [36.0 if check_vma else 4.5] * 8


@pytest.mark.several_devices
@pytest.mark.parametrize("scale", [64.0, jnp.full(8, 64.0)], ids=["one", "on each"])
def test_gradients_of_a_loss_that_is_averaged_already_are_not_averaged_again(scale):
    def mean_loss(params, x):
        return lax.pmean(jnp.sum(params * x), "data")

    _, grads, _ = grads_of_shard_map(mean_loss, check_vma=True, scale=scale)
    assert grads == [4.5] * 8


@pytest.mark.several_devices
@pytest.mark.parametrize(("bad", "check_vma"), [(jnp.nan, True), (jnp.inf, False)])
def test_all_devices_skip_if_one_has_a_nonfinite_gradient(bad, check_vma):
    finite, _, scale = grads_of_shard_map(local_loss, check_vma, X.at[5].set(bad))
    assert (finite, scale) == ([False] * 8, [32.0] * 8)


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
        # It may be an integer at first.
        ({"scale": 1}, [jnp.inf], 0.5),
    ],
    ids=["constant", "integer"],
)
def test_the_scale_after_some_steps(settings, xs, last):
    step = jax.jit(lambda d, x: d.value_and_grad(lambda p: p * x)(jnp.float32(1.0))[0])
    dynamic_scale = compat.DynamicScale(**settings)
    for x in xs:
        dynamic_scale = step(dynamic_scale, x)
    assert (dynamic_scale.scale, dynamic_scale.scale.dtype) == (last, jnp.float32)


@pytest.mark.slow
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
