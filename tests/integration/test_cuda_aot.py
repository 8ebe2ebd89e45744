"""Programs compiled for an NVIDIA H200. Needs the compiler, `jax[cuda12]`, but no GPU.

pip install -e '.[test]' 'jax[cuda12]'
JAX_PLATFORMS=cpu python -m pytest tests/integration/test_cuda_aot.py

In one program XLA for GPU leaves out a cast to half precision and back to float32. That
no program of ours holds such casts is in `tests/scaling/test_kept_rounding.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import fused_attention
import optax_lossscale as ols
from _lib.compiled_text import bytes_and_kernels, products_of, sent_arrays
from _lib.devices import device_of, devices_of
from helpers.compiled import compiled_step, run_on_cpu
from helpers.inner import lenient
from helpers.steps import apply

pytest.importorskip("jax_cuda12_plugin", reason="jax[cuda12] is not installed")
pytestmark = pytest.mark.cuda_aot

RNG = np.random.default_rng(0)
HALVES = [jnp.float16, jnp.bfloat16]


def compiled(function, *args, gpu="cuda"):
    sharding = SingleDeviceSharding(device_of(gpu))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    return jax.jit(function, keep_unused=True).lower(*shapes).compile()


def on_gpu(function, *args):
    """The results of a function, compiled for the GPU and run on the CPU."""
    structure = jax.tree.structure(jax.eval_shape(function, *args))
    return jax.tree.unflatten(structure, run_on_cpu(compiled(function, *args), *args))


def rounded(x, dtype):
    return np.asarray(x).astype(dtype).astype(np.float32)


def test_xla_for_gpu_leaves_out_a_cast_to_float16_and_back():
    x = np.float32([1.0001])
    twice = on_gpu(lambda x: x.astype(jnp.float16).astype(jnp.float32) * 2, x)
    assert twice == x * 2  # If it fails, the rest of this file is no longer needed.


@pytest.mark.parametrize("dtype", HALVES)
def test_the_parameter_is_the_rounded_master_after_a_step_of_any_size(dtype):
    start = RNG.normal(size=10_000) * 2.0 ** RNG.integers(-14, 14, 10_000)
    target = RNG.normal(size=10_000) * 2.0 ** RNG.integers(-14, 14, 10_000)
    start, target = rounded(start, dtype), rounded(target, dtype)
    # Half of the targets are midway between neighbours, where rounding changes.
    neighbour = np.nextafter(target.astype(dtype), np.array(np.inf, dtype))
    middle = (target + neighbour.astype(np.float32)) / 2
    target = np.where(RNG.random(10_000) < 0.5, middle, target).astype(np.float32)
    tx = ols.master_weights(lenient(optax.sgd(1.0)))
    params = jnp.asarray(start, dtype)

    updates, state = on_gpu(tx.update, start - target, tx.init(params), params)
    masters = rounded(state.master_params, dtype)
    by_hand = start + np.asarray(updates)  # As `apply_updates` adds them.
    np.testing.assert_array_equal(rounded(by_hand, dtype), masters)
    # If nothing shrinks or grows a thousandfold, the float32 sum needs no rounding.
    one, other = np.abs(start), np.abs(masters)
    is_near = (one < 1000 * other) & (other < 1000 * one)
    np.testing.assert_array_equal(by_hand[is_near], masters[is_near])


@pytest.mark.parametrize("dtype", HALVES)
def test_several_steps_in_one_program_see_only_rounded_parameters(dtype):
    tx = ols.master_weights(lenient(optax.sgd(0.3)))
    tx = ols.loss_scaled(tx, ols.static_loss_scale(4.0))

    def three_steps(params, state, x, infinity):
        seen = []
        for factor in (1.0, infinity, 2.0):  # The second step is skipped.
            wide = params.astype(jnp.float32)  # As the next forward pass reads them.
            seen.append(wide)
            grads = (wide * x * factor).astype(dtype)
            updates, state = tx.update(grads, state, params)
            params = apply(params, updates)
        return params, state, seen

    params, x = jnp.asarray(RNG.normal(size=100), dtype), jnp.asarray(RNG.random(100))
    params, state, seen = on_gpu(
        three_steps, params, tx.init(params), x, jnp.float32(jnp.inf)
    )
    masters = state.inner_state.master_params
    np.testing.assert_array_equal(params.astype(jnp.float32), rounded(masters, dtype))
    for wide in seen:
        np.testing.assert_array_equal(wide, rounded(wide, dtype))
    assert not np.array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[1], seen[2])
    assert state.loss_scale_state.total_notfinite == 1


@pytest.mark.parametrize("devices", [1, 8])  # Which decide how it is computed.
@pytest.mark.parametrize("count", [1, 2])
def test_a_float16_infinity_that_was_finite_in_float32_is_found(
    count, devices, monkeypatch
):
    monkeypatch.setattr(jax, "device_count", lambda: devices)

    def check(*grads):
        halves = [grad.astype(jnp.float16) for grad in grads]
        return ols.all_finite(halves), ols.max_magnitude(halves), halves

    grads = [np.float32([1.0, 70_000.0])] * count
    is_finite, magnitude, halves = on_gpu(check, *grads)
    assert np.isinf(halves[0][1])
    assert not is_finite
    assert np.isinf(magnitude)


@pytest.mark.parametrize("model", ["GPT", "ResNet-18", "LSTM"])
def test_in_a_whole_step_on_v100_loss_scaling_reads_gradients_once_more(model):
    (bare, read), (scaled, _) = (
        compiled_step(model, "autocast, O1", scaler, device_of("v100"))
        for scaler in ("none", "loss_scaled")
    )
    moved = [bytes_and_kernels(step.as_text())[0] for step in (bare, scaled)]
    assert moved[1] < 1.01 * (moved[0] + read)


def of_two_layers(params, x):
    return jnp.mean(jax.nn.gelu(x @ params["a"]) @ params["b"]) ** 2


@pytest.mark.parametrize("gpu", ["cuda", "v100"])
def test_all_five_products_of_a_gradient_are_in_float16(gpu):
    args = {"a": jnp.ones((64, 128)), "b": jnp.ones((128, 48))}, jnp.ones((32, 64))
    program = compiled(jax.grad(ols.autocast(of_two_layers)), *args, gpu=gpu)
    assert products_of(program.as_text()) == {"f16": 5}


def test_gpus_gather_each_parameter_once_in_float16_and_sum_gradients_in_float32():
    mesh = Mesh(np.array(devices_of("cuda", 4)), ("d",))
    split = NamedSharding(mesh, P("d"))

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=split)] * 3
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=split)
    gradient = jax.grad(ols.autocast(loss))
    lowered = jax.jit(gradient, out_shardings=[split] * 3).lower(params, x)
    sent = list(sent_arrays(lowered.compile().as_text()))
    large = [x for x in sent if x.elements % 256**2 == 0]
    gathered = sum(x.elements for x in large if x.is_gather)
    assert gathered == 3 * 256**2
    assert {x.dtype for x in large if x.is_gather} == {"f16"}
    assert {x.dtype for x in large if not x.is_gather} == {"f32"}


@jax.numpy_dtype_promotion("standard")  # JAX's attention needs it.
@jax.numpy_rank_promotion("allow")
def test_attention_marked_by_low_precision_is_one_call_of_cudnn_each_way():
    unfused, fused = map(fused_attention.row, ("autocast", "autocast, fused attention"))
    assert (unfused["fused, forward"], unfused["fused, backward"]) == ("0", "0")
    assert (fused["fused, forward"], fused["fused, backward"]) == ("1", "1")
    # Attention weights of 16 MB are stored no more, neither in float16 nor in float32.
    assert float(unfused["temporary MB"]) - float(fused["temporary MB"]) > 16
