"""Known bugs of other loss scalers: what happens here instead.

First those of JAX: jmp, Flax's DynamicScale, mpx, optax.apply_if_finite, Haiku's
example. Then those of PyTorch, apex, Keras, TensorFlow, MindSpore, Megatron-LM,
DeepSpeed, fairseq and others. The bugs of each part are numbered from 1.

Each has a test here, or a comment that names its regression test in another file or
says why it is impossible here. Two of JAX's bugs happen here, too: without `axis_name`,
scales drift apart under pmap (31), and a float16 scalar loss limits the scale (34).
"""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lossscale as ols
from helpers.compare import assert_same_bits
from helpers.inner import adam, lenient

PARAMS = {"w": jnp.asarray([1.0, -2.0, 3.0])}
SCALE = 2.0**10
SCALED = {"w": jnp.asarray([0.5, 0.25, -1.0]) * SCALE}
BAD = {"w": jnp.asarray([0.5, jnp.nan, -1.0])}
RULE = ols.dynamic_loss_scale(SCALE)


# JAX.


# 1, a cond whose branches diverge between devices:
# `test_the_update_never_branches_on_the_verdict_of_one_device`.


def test_jax_02_gradients_and_parameters_can_have_different_dtypes():
    dtypes = list(itertools.product([jnp.float16, jnp.float32], repeat=2))
    dtypes += [(jnp.float16, jnp.bfloat16), (jnp.float32, jnp.bfloat16)]
    params = [PARAMS["w"].astype(of_param) for of_param, _ in dtypes]
    tx = ols.loss_scaled(adam(), RULE)
    state = tx.init(params)
    for grads in (SCALED, BAD):
        grads = [grads["w"].astype(of_grad) for _, of_grad in dtypes]
        updates, state = tx.update(grads, state, params)
        with jax.numpy_dtype_promotion("standard"):
            params = optax.apply_updates(params, updates)
        assert [param.dtype for param in params] == [of_param for of_param, _ in dtypes]
    assert state.loss_scale_state.total_notfinite == 1


# In `tests/integration/test_devices.py`:
# 3, gradients averaged for the user: `test_gradients_are_never_reduced_over_devices`;
# 4, the verdict of replicated gradients:
# `test_the_verdict_is_the_same_for_varying_and_invariant_gradients`;
# 5, a sum over devices in float16:
# `test_a_float16_mean_over_devices_can_overflow_and_a_float32_mean_does_not`;
# 6, a NaN on one of several axes:
# `test_in_shard_map_a_nan_on_one_device_makes_all_devices_of_two_axes_skip`;
# 7 and 8, sharded gradients on automatic and explicit meshes:
# `test_under_sharded_jit_all_devices_skip_and_every_type_is_kept`.


# 9, a NaN in a micro-batch that stays in an accumulator:
# `test_accumulation_inside_the_wrapper_never_notices_a_bad_step`;
# 10, clipping that hides an infinity:
# `test_a_clip_between_unscale_and_step_does_not_hide_an_infinity`;
# 11, counts and schedules that advance on a skipped step:
# `test_a_skipped_step_changes_no_bit_of_parameters_or_inner_state`,
# `test_nothing_advances_on_a_skipped_step`.


def test_jax_12_a_nan_is_never_accepted_after_many_skipped_steps():
    tx = ols.loss_scaled(lenient(optax.sgd(1.0)), RULE)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(BAD, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), None, 1000)
    assert_same_bits(params, PARAMS)
    assert state.loss_scale_state.notfinite_count == 1000
    with pytest.raises(ols.LossScaleStalledError, match="1000 of 1000"):
        ols.raise_if_stalled(state)


# In `tests/scaling`:
# 13, a small gradient that unscaling flushes to zero, and 26, gradients cast down
# before they are unscaled:
# `test_unscale_does_not_underflow_in_float16_or_at_the_largest_scale`;
# 14, a float16 loss that scaling makes infinite:
# `test_scale_does_not_overflow_a_float16_loss`;
# 15, weak types that cause a second compilation:
# `test_the_state_of_half_precision_parameters_is_and_stays_float32`,
# `test_a_state_has_strong_types_that_are_the_same_in_x64`.


# 16, a second compilation for the shardings of `init`:
# `test_fully_sharded_parameters_and_moments_equal_one_device`.


# In `tests/scaling`:
# 17, counters whose dtypes x64 changes: `test_types_stay_the_same_in_x64`;
# 18, a scale whose reciprocal is zero:
# `test_unscale_does_not_underflow_in_float16_or_at_the_largest_scale`,
# `test_the_scale_never_exceeds_the_largest_scale_with_a_normal_reciprocal`,
# `test_the_static_rule_refuses_an_unusable_scale`;
# 19, a scale that falls to zero: `test_the_scale_stays_finite_and_inside_its_bounds`,
# and in `test_presets.py` `test_no_preset_reaches_zero_or_infinity`;
# 20, an overflow of float8, and leaves that are overwritten:
# `test_all_finite_sees_nan_and_both_infinities_in_each_dtype`,
# `test_leaves_that_the_mask_excludes_are_neither_unscaled_nor_checked`;
# 21, leaves that are not floating:
# `test_a_tree_without_floating_entries_is_finite_and_its_maximum_is_zero`,
# `test_integers_are_held_fixed_whatever_gradient_jax_gives_them`, and NaN in an
# imaginary part:
# `test_all_finite_sees_nan_and_both_infinities_in_each_dtype`;
# 22, an inner optimizer that sees a NaN:
# `test_on_a_bad_step_the_inner_optimizer_sees_zeros_and_no_nan`;
# 23, a NaN from differentiating through a bad step:
# `test_differentiating_through_a_bad_step_gives_no_nan`;
# 24, a state that cannot be donated, as where two fields share a buffer:
# `test_every_donated_buffer_is_reused`;
# 25, batch statistics of a skipped step:
# `test_new_is_kept_if_the_step_was_applied_and_old_if_it_was_skipped`.


# 27, states that a checkpoint changes:
# `test_a_run_that_is_restored_continues_with_the_same_bits`.


# 28, a parameter called loss_scale:
# `test_find_works_inside_optax_and_beside_a_parameter_called_loss_scale`.


# 29, a train state that passes no extra arguments:
# `test_three_lines_train_and_a_skipped_step_changes_nothing`.


# 30, `init` on abstract shapes: `test_init_accepts_abstract_parameters`.


# 31, scales that drift apart under pmap:
# `test_all_devices_of_pmap_have_the_same_headroom_scale`.
# Without `axis_name` they do, as nothing in a pmapped function can detect it.


# 32, settings in the state, each value of which compiles anew: they are closed over,
# and the state is arrays (`test_the_types_in_a_state_never_change`).


# 33, an ensemble that skips together: `test_in_an_ensemble_only_the_bad_member_skips`.


# 34, a float16 scalar loss that limits the scale:
# `test_a_float16_loss_allows_a_scale_of_2_to_the_15_and_a_float32_loss_more`.


# Others.


# 1, a float16 loss that is scaled in float16, and 1b, a scale that is cast to float16,
# where 65536 is infinite: `test_scale_does_not_overflow_a_float16_loss`.


# 2, gradients that overflow on unscaling:
# `test_gradients_that_overflow_on_unscaling_are_caught`;
# 4, an inner state that a skip changes:
# `test_a_skipped_step_changes_no_bit_of_parameters_or_inner_state`.


# 3, gradients poisoned between the check and the step: both are one call here.


# 5, several optimizers:
# `test_two_optimizers_under_one_scale_follow_torch`;
# 20, a scale for each loss: `test_each_loss_can_have_a_scale_of_its_own`.


# 6, micro-batches that are unscaled by the last scale:
# `test_a_step_on_which_the_scale_grows_unscales_by_the_old_scale`;
# 7, growth that the cap prevents, and a count that goes on:
# `test_any_history_under_scan_equals_the_oracle`.


# 8, a restored count beyond a lowered interval:
# `test_the_scale_grows_when_a_restored_count_exceeds_a_lowered_interval`;
# 9, a scale that is set resets the count: `test_set_changes_only_the_scale`;
# 10, a disabled scaler that changes something:
# `test_no_loss_scale_passes_everything_on_untouched`,
# `test_the_empty_dict_of_a_disabled_scaler_goes_to_torch_and_back`;
# 11, zero or infinity as a scale: `test_set_refuses_an_unusable_value`;
# 12, hysteresis, which spares the scale a bad batch:
# `test_hysteresis_counts_nonfinite_steps_until_it_is_refilled`.


# 13, a tree without gradients:
# `test_a_tree_without_floating_entries_is_finite_and_its_maximum_is_zero`.


# 14, a static scale that does not skip:
# `test_a_static_scale_counts_skipped_steps_only_if_it_skips`;
# 15, bfloat16 gradients, which cannot be scaled: JAX's 2, above;
# 16, large gradients whose sum is infinite:
# `test_numbers_whose_sum_overflows_are_finite_and_each_part_has_its_magnitude`;
# 17, how verdicts are joined: the minimum of bools, or the maximum of magnitudes in
# which NaN has become infinity (`test_the_headroom_rule_sees_a_nan_on_any_shard`).


# 18, a device without gradients of its own:
# `test_the_verdict_is_the_same_for_varying_and_invariant_gradients`.


# 19, counters that are not saved:
# `test_a_run_that_is_restored_continues_with_the_same_bits`;
# 21, a reported loss that is scaled:
# `test_the_loss_is_true_and_the_gradients_are_scaled`;
# 22, a skipped batch that is fed again: the loop decides that, by `last_finite`;
# 23, settings read from the wrong place: presets must follow recorded trajectories.


# 24, weight decay that is scaled or flushed to zero:
# `test_eager_a_good_step_gives_the_bits_of_the_bare_optimizer_and_a_bad_one_none`.


# 25, factors that are not powers of two:
# `test_any_history_under_scan_equals_the_oracle`.
