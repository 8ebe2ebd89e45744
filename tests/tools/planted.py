# ruff: noqa: E501  # The texts stand as they do in the package.
"""Plants faults that users would meet, one at a time, and says which tests see them.

    python tests/tools/planted.py                          # Names of the faults.
    python tests/tools/planted.py --all                    # Every fault.
    python tests/tools/planted.py --all tests/scaling      # Those not seen so, once more.
    python tests/tools/planted.py --only floor_ignored

Each fault is one or more replacements of text in a copy of the package. A fault is seen
if pytest, run on the copy, fails: first on the file of its subject in `tests/scaling`,
then, if that passes, on the tests that are named. The tests must pass without a fault.
One whose text does not stand in the package exactly once does not apply, and has to be
written anew.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "optax_lossscale"
RULES, FINITE, SCALE = "_scaling/rules.py", "_scaling/finite.py", "_scaling/scale.py"
HEADROOM = "_scaling/headroom.py"
MASKING, EARLY = "_scaling/masking.py", "_scaling/early_masks.py"
UPDATE, STATE = "_scaling/wrapper.py", "_scaling/state.py"
GRAD, BACKWARD = "_scaling/grad.py", "_scaling/backward.py"
METRICS, MISTAKES = "_scaling/metrics.py", "_scaling/mistakes.py"
DEPENDENCE, MASTERS = "_scaling/dependence.py", "_masters/master_weights.py"
TREE, PARAMETERS, NNX = "_ground/tree.py", "_ground/parameters.py", "_ground/nnx.py"
HALVES = "(jnp.float16, jnp.bfloat16)"


class Edit(NamedTuple):
    """A replacement in a file of the package, where the text stands exactly once."""

    path: str
    old: str
    new: str


def kept(condition: str) -> Edit:
    """An array of the inner state that a skipped step moves."""
    text = "        return lax.select_n(applied, old, new)"
    return Edit(
        MASKING, text, f"        if {condition}:\n            return new\n{text}"
    )


def cast_late(call: str, factor: str) -> Edit:
    """Half-precision leaves that are cast only after they were multiplied."""
    return Edit(
        SCALE,
        f"    return {call}",
        f"    results = {call}\n"
        "    return [\n"
        f"        widen(x * {factor}.astype(x.dtype)) if x.dtype in {HALVES} else y\n"
        "        for x, y in zip(map(jnp.asarray, leaves), results)\n"
        "    ]",
    )


# By the file of tests/scaling, or of another folder, that should see them.
FAULTS: dict[str, dict[str, list[Edit]]] = {}

FAULTS["test_rules.py"] = {
    "growth_one_step_late": [Edit(RULES, "(n >= interval)", "(n > interval)")],
    "growth_does_not_reset_the_count": [
        Edit(RULES, "n = jnp.where(grows, 0, n)", "pass")
    ],
    "backoff_at_the_wrong_count": [
        Edit(RULES, "~finite & (h == 0)", "~finite & (h <= 1)")
    ],
    "hysteresis_refilled_wrongly": [
        Edit(RULES, "finite if refill_on_finite else grows", "finite")
    ],
    "overflow_does_not_halve": [
        Edit(RULES, "jnp.maximum(s * backoff, floor)", "jnp.maximum(s, floor)")
    ],
    "floor_ignored": [Edit(RULES, "jnp.maximum(s * backoff, floor)", "s * backoff")],
    "cap_ignored": [Edit(RULES, "jnp.minimum(s * growth, cap)", "s * growth")],
    "static_scale_always_skips": [
        Edit(
            RULES,
            'skips = check_flag("skip_nonfinite", skip_nonfinite)',
            "skips = True",
        )
    ],
    "notfinite_count_not_reset": [
        Edit(
            RULES,
            "jnp.where(finite, 0, in_a_row)",
            "jnp.where(finite, state.notfinite_count, in_a_row)",
        )
    ],
    "total_not_counted": [
        Edit(
            RULES,
            "jnp.where(finite, state.total_notfinite, total)",
            "state.total_notfinite",
        )
    ],
    "state_changes_its_dtype": [
        Edit(
            RULES,
            "        last_finite=finite,",
            "        last_finite=finite.astype(jnp.int32),",
        )
    ],
    "second_step_compiles_again": [
        Edit(
            RULES,
            "loss_scale=jnp.asarray(init_scale, jnp.float32)",
            "loss_scale=jnp.full((), init_scale)",
        )
    ],
}

FAULTS["test_headroom.py"] = {
    "repeated_overflow_costs_no_more_headroom": [
        Edit(HEADROOM, "jnp.where(is_repeated, 2.0**-_BITS_PER_REPEAT, 1.0)", "1.0")
    ],
    "repeated_overflow_raises_the_peak": [
        Edit(HEADROOM, "jnp.where(is_repeated, 1.0, 2.0)", "2.0")
    ],
    "peaks_never_fade": [
        Edit(HEADROOM, "2.0 ** (-_BITS_FADED / history)", "1.0"),
    ],
    "steps_of_zeros_keep_the_scale": [
        Edit(HEADROOM, "jnp.where(is_quiet, 2.0**_BITS_PER_QUIET_STEP, 1.0)", "1.0")
    ],
}

FAULTS["test_finite.py"] = {
    "nan_in_last_leaf_missed": [
        Edit(
            FINITE,
            "_of_one_shape(_real_arrays(tree))",
            "_of_one_shape(_real_arrays(tree)[:-1] or _real_arrays(tree))",
        )
    ],
    "nan_at_the_end_of_a_group_missed": [
        Edit(
            FINITE,
            "same[start : start + _LARGEST_GROUP]",
            "same[start : start + _LARGEST_GROUP - 1]",
        )
    ],
    "leaves_beyond_the_first_group_missed": [
        Edit(FINITE, "range(0, len(same), _LARGEST_GROUP)", "[0]")
    ],
    "grouping_keeps_one_leaf_of_each_shape": [
        Edit(FINITE, "same[start : start + _LARGEST_GROUP]", "same[start : start + 1]"),
    ],
    "nan_beside_integers_missed": [  # A tree that also holds integers counts as finite.
        Edit(
            FINITE,
            "    leaves = [widen(leaf) for leaf in jax.tree.leaves(tree) if is_floating(leaf)]",
            "    leaves = jax.tree.leaves(tree)\n"
            "    first = next((i for i, x in enumerate(leaves) if not is_floating(x)), None)\n"
            "    leaves = [widen(x) for x in leaves[:first]]",
        )
    ],
    "infinity_missed": [
        Edit(
            FINITE,
            "_combined(lax.bitwise_and, lax.is_finite, g)",
            "_combined(lax.bitwise_and, lambda x: x == x, g)",
        )
    ],
    "bfloat16_leaf_unchecked": [
        Edit(
            FINITE,
            "jax.tree.leaves(tree) if is_floating(leaf)]",
            "jax.tree.leaves(tree) if is_floating(leaf)\n"
            "              and getattr(leaf, 'dtype', None) != jnp.bfloat16]",
        )
    ],
    "imaginary_part_unchecked": [
        Edit(FINITE, "in real_parts(leaf)]", "in real_parts(leaf)[:1]]")
    ],
    "nan_lost_in_the_maximum": [
        Edit(
            FINITE,
            "jnp.where(lax.is_finite(array), magnitude, jnp.inf)",
            "lax.abs(array)",
        )
    ],
    "maximum_over_devices_in_place_of_minimum": [
        Edit(FINITE, "_over_axes(lax.pmin, flag", "_over_axes(lax.pmax, flag")
    ],
}

FAULTS["test_scale.py"] = {
    "unscale_multiplies": [
        Edit(
            SCALE,
            "cache(lambda dtype: 1 / loss_scale.astype(dtype))",
            "loss_scale.astype",
        )
    ],
    "cast_after_dividing": [
        cast_late(
            "[_product(widen(leaf), reciprocal_in) for leaf in leaves]",
            "(1 / loss_scale)",
        )
    ],
    "float16_loss_multiplied_in_float16": [
        cast_late(
            "[_product(widen(leaf), loss_scale.astype) for leaf in leaves]",
            "loss_scale",
        )
    ],
    "infinity_spreads_to_the_imaginary_part": [
        Edit(
            SCALE,
            "    parts = [lax.mul(part",
            "    if array.dtype.kind == 'c':\n"
            "        return array * factor(array.dtype)\n"
            "    parts = [lax.mul(part",
        )
    ],
}

FAULTS["test_step.py"] = {
    "skipped_step_moves_one_moment": [
        Edit(
            MASKING,
            "    return jax.tree.map(select, new, old)",
            "    leaves, structure = jax.tree.flatten(jax.tree.map(select, new, old))\n"
            "    return structure.unflatten([*leaves[:-1], *jax.tree.leaves(new)[-1:]])",
        )
    ],
    "skipped_step_moves_a_negative_zero": [
        Edit(MASKING, "complex(-0.0, -0.0) if jnp.iscomplexobj(update) else -0.0", "0")
    ],
    "updates_not_zeroed": [
        Edit(
            MASKING,
            "return zero_unless(applied, updates), keep_old_unless(applied, new, old)",
            "return updates, keep_old_unless(applied, new, old)",
        ),
        Edit(
            EARLY,
            "return zero_unless(is_applied, updates), keep_old_unless(is_applied, new, old)",
            "return updates, keep_old_unless(is_applied, new, old)",
        ),
    ],
    "last_finite_wrong": [
        Edit(
            UPDATE,
            "count_step(old, applied, loss_scale, rule_state)",
            "count_step(old, applied, loss_scale, rule_state)._replace(last_finite=finite)",
        )
    ],
    "accept_changes_the_scale": [Edit(UPDATE, "accepted | ~finite", "accepted | True")],
    "grads_finite_ignored": [
        Edit(
            UPDATE,
            'check_verdict("grads_finite", grads_finite, "jnp.isfinite(loss)")',
            "jnp.asarray(True)",
        )
    ],
    "steps_counted_twice": [
        Edit(UPDATE, "counted = count_step(old,", "counted = count_step(new,")
    ],
}

FAULTS["test_wrapper.py"] = {
    "inner_optimizer_sees_half_precision_parameters": [
        Edit(
            UPDATE,
            "MasterWeightsState)):\n            inner_params = jax.tree.map(widen, inner_params)",
            "MasterWeightsState)):\n            pass",
        )
    ],
    "check_updates_ignored": [Edit(UPDATE, "if checks_updates:", "if False")],
    "skipped_step_moves_the_count": [
        kept("new.ndim == 0 and jnp.issubdtype(new.dtype, jnp.integer)")
    ],
    "skipped_step_moves_what_multisteps_adds_up": [
        Edit(
            MASKING,
            "    return jax.tree.map(select, new, old)",
            "    def by_path(path, new, old):\n"
            "        is_sum = 'acc_grads' in jax.tree_util.keystr(path)\n"
            "        return new if is_sum else select(new, old)\n"
            "    return jax.tree_util.tree_map_with_path(by_path, new, old)",
        )
    ],
    "inner_optimizer_sees_nan": [
        Edit(UPDATE, "grads = jax.jit(zero_unless)(applied, grads)", "pass")
    ],
    "unscale_mask_inverted": [
        Edit(
            UPDATE,
            "scaled_mask = False if is_bare else flags_of(unscale_mask, updates)",
            "scaled_mask = False if is_bare else flags_of(unscale_mask, updates)\n"
            "        if unscale_mask is not None:\n"
            "            scaled_mask = jax.tree.map(lambda flag: not flag, scaled_mask)",
        )
    ],
    "excluded_gradients_are_checked": [
        Edit(
            UPDATE,
            "checked = keep_marked(scaled_mask, grads)",
            "checked = None if is_bare else grads",
        )
    ],
    "excluded_updates_are_checked": [
        Edit(UPDATE, "keep_marked(scaled_mask, new_updates)", "new_updates")
    ],
    "grads_unscaled_divides_again": [
        Edit(
            UPDATE,
            "divisor = jnp.float32(1) if grads_unscaled else old.loss_scale",
            "divisor = old.loss_scale",
        )
    ],
    "no_loss_scale_is_not_bare": [
        Edit(
            UPDATE,
            "is_bare = isinstance(expected.rule_state, NoLossScaleRuleState)",
            "is_bare = False",
        )
    ],
    "integers_get_no_update": [
        Edit(UPDATE, "with_zeros(new_updates, params)", "new_updates")
    ],
    "largest_gradient_is_not_unscaled": [
        Edit(
            UPDATE,
            "largest_magnitude(checked, axis_name, told_finite)",
            "largest_magnitude(gradients_of(updates), axis_name, told_finite)",
        )
    ],
}

FAULTS["test_wrapper.py"] |= {
    "axis_name_ignored_for_the_verdict": [
        Edit(
            UPDATE,
            "is_finite(checked, axis_name, told_finite)",
            "is_finite(checked, None, told_finite)",
        ),
        Edit(
            UPDATE,
            "largest_magnitude(checked, axis_name, told_finite)",
            "largest_magnitude(checked, None, told_finite)",
        ),
    ],
    "axis_name_ignored_for_accept": [
        Edit(
            UPDATE,
            "on_all_devices(accepted, axis_name)",
            "on_all_devices(accepted, None)",
        )
    ],
    "axis_name_ignored_for_updates": [
        Edit(
            UPDATE,
            "is_finite(keep_marked(scaled_mask, new_updates), axis_name)",
            "is_finite(keep_marked(scaled_mask, new_updates), None)",
        )
    ],
}

FAULTS["test_optimizers.py"] = {
    "moments_in_half_precision": [
        Edit(
            UPDATE,
            "if not is_bare:\n            inner_params = jax.tree.map(widen, inner_params)",
            "if not is_bare:\n            pass",
        )
    ],
    "weakly_typed_state_compiles_again": [
        Edit(
            UPDATE,
            "jax.tree.map(strengthen, optimizer.init(inner_params))",
            "optimizer.init(inner_params)",
        )
    ],
}

FAULTS["test_early_masks.py"] = {
    "early_masks_mask_nothing": [
        Edit(EARLY, "return arrays(new), arrays(updates)", "return set(), set()")
    ],
    "early_masks_are_not_the_plain_form": [
        Edit(
            EARLY,
            "ordered.append(masks[variable])",
            "ordered.append(masks[variable].replace(invars=[*masks[variable].invars[:-1], masks[variable].invars[1]]))",
        )
    ],
    "update_prints_twice": [
        Edit(EARLY, "if not closed.effects:", "if run() and not closed.effects:")
    ],
}

FAULTS["test_where_applied.py"] = {
    "where_applied_returns_new": [
        Edit(
            MASKING,
            "return keep_old_unless(applied, new, old) if is_numeric(new) else new",
            "return new",
        )
    ],
    "where_applied_does_not_cast": [
        Edit(
            MASKING,
            "old = old if old.dtype == new.dtype else old.astype(new.dtype)",
            "pass",
        )
    ],
    "where_applied_of_nnx_not_in_place": [
        Edit(
            NNX,
            "        flax_nnx().update(node, state)\n        return node",
            "        graph, _ = flax_nnx().split(node)\n"
            "        return flax_nnx().merge(graph, state)",
        )
    ],
    "where_applied_takes_the_loss_scale": [
        Edit(MASKING, "if find_by_type(new, LossScaleState):", "if False:")
    ],
}

FAULTS["test_state.py"] = {
    "set_loss_scale_does_nothing": [
        Edit(
            STATE,
            "lambda old: jnp.full_like(old, jnp.where(in_range, value, old)),",
            "lambda old: old,",
        )
    ],
    "set_loss_scale_sets_every_scale": [
        Edit(STATE, "if keys != place:", "if not isinstance(node, LossScaleState):")
    ],
    "unusable_scale_set_under_jit": [
        Edit(STATE, "jnp.where(in_range, value, old)", "value")
    ],
    "find_takes_the_first_of_two": [
        Edit(
            TREE, "if len(found) == 1 or not everywhere:", "if found or not everywhere:"
        )
    ],
    "adopt_inner_state_resets_moments": [
        Edit(
            UPDATE,
            "return LossScaledState(check_rule(loss_scale).init(), inner_state)",
            "return LossScaledState(check_rule(loss_scale).init(), "
            "jax.tree.map(jnp.zeros_like, inner_state))",
        )
    ],
    "adopt_ignores_the_rule": [
        Edit(
            UPDATE,
            "LossScaledState(check_rule(loss_scale).init(), inner_state)",
            "LossScaledState(check_rule(None).init(), inner_state)",
        )
    ],
}

FAULTS["test_metrics.py"] = {
    "skip_rate_over_applied_steps": [
        Edit(METRICS, "jnp.maximum(steps, 1.0)", "jnp.maximum(steps - skipped, 1.0)")
    ],
    "norm_of_scaled_gradients": [
        Edit(
            METRICS, "jax.tree.leaves(unscale(grads, state))", "jax.tree.leaves(grads)"
        )
    ],
    "stall_one_step_late": [
        Edit(
            METRICS,
            "if consecutive >= max_consecutive",
            "if consecutive > max_consecutive",
        )
    ],
    "stall_of_one_member_missed": [
        Edit(
            METRICS,
            "int(np.max(state.notfinite_count))",
            "int(np.min(state.notfinite_count))",
        )
    ],
    "scale_at_the_floor_not_warned_of": [
        Edit(METRICS, "if loss_scale <= 2.0**-24 and", "if False and")
    ],
}

FAULTS["test_grad.py"] = {
    "loss_returned_scaled": [
        Edit(
            GRAD,
            "return multiply(result, state), result",
            "return multiply(result, state), multiply(result, state)",
        )
    ],
    "auxiliary_data_lost": [
        Edit(
            GRAD,
            "multiply(result[0], state), tuple(result)",
            "multiply(result[0], state), (result[0], None)",
        )
    ],
    "batch_statistics_of_nnx_lost": [
        Edit(
            GRAD,
            "return of_modules(*args, **kwargs)",
            "import flax.nnx as nnx\n"
            "        args = jax.tree.map(\n"
            "            lambda x: nnx.clone(x) if isinstance(x, nnx.Module) else x,\n"
            "            args, is_leaf=lambda x: isinstance(x, nnx.Module))\n"
            "        return of_modules(*args, **kwargs)",
        )
    ],
    "integers_differentiated": [
        Edit(PARAMETERS, "return node if is_floating(node) else None", "return node")
    ],
    "integers_of_modules_differentiated": [
        Edit(PARAMETERS, "x if is_floating_array(x) else None", "x")
    ],
    "variables_of_the_optimizer_ignored": [
        Edit(
            NNX,
            "if not isinstance(state, nnx.Optimizer) or isinstance(argnum, nnx.DiffState):",
            "if True:",
        )
    ],
}

FAULTS["test_backward.py"] = {
    "backward_without_unscaling": [
        Edit(BACKWARD, '_with_cotangents(leaf, s, "unscale"), given', "leaf, given")
    ],
    "batch_statistics_lost_in_backward": [
        Edit(
            BACKWARD,
            'nnx.update(module, _with_cotangents(changed, s, "scale"))',
            "pass",
        )
    ],
    "batch_statistics_in_backward_have_unscaled_gradients": [
        Edit(BACKWARD, '_with_cotangents(changed, s, "scale")', "changed")
    ],
    "second_derivative_not_refused": [
        Edit(
            BACKWARD,
            "_first_derivative(changed.astype(dtype))",
            "changed.astype(dtype)",
        )
    ],
    "forward_mode_not_refused": [
        Edit(
            BACKWARD,
            "backward_p.def_impl(_refuse)",
            "backward_p.def_impl(lambda tangent, loss_scale, *, change: tangent)",
        ),
        Edit(
            BACKWARD,
            "mlir.register_lowering(backward_p, _refuse)",
            "mlir.register_lowering(\n"
            "    backward_p, mlir.lower_fun(\n"
            "        lambda tangent, s, *, change: tangent, multiple_results=False))",
        ),
    ],
    "narrow_parameters_not_refused": [
        Edit(
            BACKWARD,
            'if change == "unscale" and jnp.finfo(dtype).bits < 32:',
            "if False:",
        )
    ],
    "scales_of_a_batch_are_mixed_up": [
        Edit(BACKWARD, "for _ in range(loss_scale.ndim):", "for _ in range(0):")
    ],
}

FAULTS["test_mistakes.py"] = {
    "never_scaled_not_warned_of": [
        Edit(
            DEPENDENCE,
            'return "never scaled" if not factors and _has_derivative(equations) else None',
            "return None",
        )
    ],
    "never_scaled_before_a_branch_not_warned_of": [
        Edit(
            DEPENDENCE,
            'return "never scaled" if _is_never_scaled_around(own) else None',
            "return None",
        )
    ],
    "scaled_before_a_branch_warned_of": [
        Edit(DEPENDENCE, "if _is_never_scaled_around(own) else None", "")
    ],
    "made_before_a_scan_not_warned_of": [
        Edit(
            DEPENDENCE,
            "is_fixed = traced_for in _LOOPS and trace_of(origin) is not trace_of(own)",
            "is_fixed = False",
        )
    ],
    "made_before_a_fori_loop_not_warned_of": [
        Edit(
            DEPENDENCE, '("fori_loop", "scan", "while_body")', '("scan", "while_body")'
        )
    ],
    "made_before_a_while_loop_not_warned_of": [
        Edit(DEPENDENCE, '("fori_loop", "scan", "while_body")', '("fori_loop", "scan")')
    ],
    "never_scaled_before_a_switch_not_warned_of": [
        Edit(DEPENDENCE, '("cond", "switch")', '("cond",)')
    ],
    "scalar_parameter_taken_for_a_scale": [
        Edit(DEPENDENCE, "{id(origin_of(param)): _DATA for param in params}", "{}")
    ],
    "constant_in_a_loop_outside_jit_warned_of": [
        Edit(
            DEPENDENCE,
            'return "jit" in traces_around(jnp.negative(scale))',
            "return bool(traces_around(jnp.negative(scale)))",
        )
    ],
    "constant_of_no_loss_scale_warned_of": [
        Edit(MISTAKES, " and kind is not NoLossScaleRuleState", "")
    ],
    "unscaled_already_not_warned_of": [
        Edit(DEPENDENCE, 'return "unscaled" if is_unscaled else None', "return None")
    ],
    "divided_by_another_scaler_not_warned_of": [
        Edit(DEPENDENCE, 'return None if is_of_branch else "unscaled"', "return None")
    ],
    "right_scaling_warned_of": [
        Edit(
            MISTAKES,
            "scaling = scaling_of(*leaves, state.loss_scale)",
            'scaling = scaling_of(*leaves, state.loss_scale) or "never scaled"',
        )
    ],
    "scale_as_another_argument_warned_of": [
        Edit(DEPENDENCE, "if is_fixed or not _may_be_scale(origin, own):", "if True:")
    ],
    "rule_that_keeps_its_scale_warned_of": [
        Edit(MISTAKES, 'kind.__module__ == "optax_lossscale" and kind', "kind")
    ],
    "gradient_function_made_outside_not_warned_of": [
        Edit(
            MISTAKES,
            "if is_constant_under_jit(loss_scale_state.loss_scale):",
            "if False:",
        )
    ],
    "multisteps_outside_not_warned_of": [
        Edit(
            MISTAKES,
            "(*_WRONG_OUTSIDE, LossScaledState)",
            "(optax.ApplyIfFiniteState, LossScaledState)",
        )
    ],
    "apply_if_finite_outside_not_warned_of": [
        Edit(
            MISTAKES,
            "(*_WRONG_OUTSIDE, LossScaledState)",
            "(optax.MultiStepsState, LossScaledState)",
        )
    ],
    "multisteps_inside_warned_of": [
        Edit(MISTAKES, "(*_WRONG_OUTSIDE, LossScaledState)", "tuple(_WRONG_OUTSIDE)"),
        Edit(
            MISTAKES,
            "if not isinstance(outer, LossScaledState) and _is_scaled(outer):",
            "if find_by_type(state, LossScaledState):",
        ),
    ],
    "clip_before_not_warned_of": [
        Edit(MISTAKES, "if _is_behind_clip(state):", "if False:")
    ],
    "clip_after_warned_of": [
        Edit(
            MISTAKES, "for link in chain:", "for link in sorted(chain, key=_is_scaled):"
        ),
    ],
    "float16_without_masters_not_warned_of": [
        Edit(MISTAKES, "if jnp.dtype(jnp.float16) in dtypes and", "if False and")
    ],
    "float16_with_masters_warned_of": [
        Edit(
            MISTAKES,
            " in dtypes and not has_masters:",
            " in dtypes:",
        )
    ],
    "bfloat16_without_masters_warned_of": [
        Edit(
            MISTAKES,
            "if jnp.dtype(jnp.float16) in dtypes and",
            "if any(jnp.finfo(dtype).bits < 32 for dtype in dtypes) and",
        )
    ],
}

FAULTS["test_messages.py"] = {
    "misspelt_argument_not_refused": [
        Edit(MISTAKES, "        if meant:", "        if False:")
    ],
    "pair_of_loss_and_gradients_not_refused": [
        Edit(MISTAKES, "if len(set(structures)) == 1:", "if False:")
    ],
    "float8_parameters_not_refused": [
        Edit(
            MISTAKES,
            "if any(jnp.finfo(dtype_of(leaf)).bits < 16 for leaf in leaves):",
            "if False:",
        )
    ],
    "state_of_another_rule_not_refused": [
        Edit(MISTAKES, "if structures[0] != structures[1]:", "if False:")
    ],
    "loss_scaled_twice_not_refused": [
        Edit(
            MISTAKES,
            "    if find_by_type(inner_state, LossScaleState):",
            "    if False:",
        )
    ],
}

FAULTS["test_masters.py"] = {
    "master_rounded": [
        Edit(
            MASTERS,
            "return with_zeros(updates, params), MasterWeightsState(masters, inner_state)",
            "masters = jax.tree.map(\n"
            "            lambda m, p: widen(m.astype(p.dtype)), masters, params)\n"
            "        return with_zeros(updates, params), MasterWeightsState(masters, inner_state)",
        )
    ],
    "masters_do_not_follow_full_parameters": [
        Edit(MASTERS, "return master if _is_half(param) else param", "return master")
    ],
    "masters_move_a_negative_zero": [
        Edit(
            MASTERS,
            "jnp.where(rounded == param, -0.0, rounded - param)",
            "rounded - param",
        )
    ],
    "masters_see_gradients_in_half_precision": [
        Edit(
            MASTERS,
            "jax.tree.map(widen, gradients_of(updates))",
            "gradients_of(updates)",
        )
    ],
    "masters_shared_with_the_inner_state": [
        Edit(MASTERS, "jax.tree.map(copy_wide, params)", "jax.tree.map(widen, params)")
    ],
    "normalization_cast": [
        Edit(
            "_masters/cast_params.py",
            "kept = in_normalization(params)",
            "kept = [False] * len(paths_and_leaves)",
        )
    ],
}


FAULTS["autocast/test_which_products.py"] = {
    "a_product_with_few_terms_stays_high": [
        Edit("_autocast/rewrite.py", "in (0, 1):", "in (0, 1, 2, 3, 4):")
    ],
    "a_product_with_sums_of_one_term_runs_low": [
        Edit("_autocast/rewrite.py", "in (0, 1):", "in (0,):")
    ],
    "precision_highest_is_ignored": [
        Edit(
            "_autocast/rewrite.py", "if one not in _DEFAULT_PRECISIONS:", "if one == 0:"
        )
    ],
    "an_inner_product_runs_low": [
        Edit(
            "_autocast/rewrite.py",
            'return "inner product" if _is_inner(equation) else None',
            "return None",
        )
    ],
    "a_product_with_one_own_axis_counts_as_inner": [
        Edit(
            "_autocast/rewrite.py",
            "ndim == len(batch_axes)",
            "ndim <= 1 + len(batch_axes)",
        )
    ],
    "a_product_with_a_low_factor_stays": [
        Edit("_autocast/rewrite.py", "factors - {FLOAT32, low}", "factors - {FLOAT32}")
    ],
}

FAULTS["autocast/test_gradients.py"] = {
    "the_gradient_of_a_parameter_is_summed_low": [
        Edit(
            "_autocast/derivatives.py",
            "out = product.low if product.factors[place].is_activation else factor.dtype",
            "out = product.low",
        )
    ],
    "the_gradient_of_an_activation_is_not_rounded": [
        Edit(
            "_autocast/derivatives.py",
            "out = product.low if product.factors[place].is_activation else factor.dtype",
            "out = factor.dtype",
        )
    ],
    "stop_gradient_is_not_seen": [
        Edit(
            "_autocast/between.py",
            "equation.primitive is not stop_gradient_p\n            and any(",
            "any(",
        )
    ],
    "derivatives_of_all_dtypes_share_rules": [
        Edit(
            "_autocast/derivatives.py",
            "own = product._replace(out=out, factors=(Factor(), Factor()))",
            "own = product._replace(out=out, low=jnp.dtype(jnp.float16), factors=(Factor(), Factor()))",
        )
    ],
    "convolutions_on_a_gpu_have_float32_results": [
        Edit(
            "_autocast/products.py",
            'if platform in ("cuda", "rocm") and',
            'if platform == "none" and',
        )
    ],
    "a_value_past_a_branch_is_no_activation": [
        Edit(
            "_autocast/between.py",
            "one.is_activation or other.is_activation",
            "one.is_activation and other.is_activation",
        )
    ],
}

FAULTS["autocast/test_loops.py"] = {
    "a_scan_saves_what_jax_saves": [
        Edit(
            "_autocast/loops.py",
            "if is_decided or _saves_less(equation, recomputed, body):",
            "if False:",
        )
    ],
    "a_scan_always_computes_again": [
        Edit(
            "_autocast/loops.py",
            "if is_decided or _saves_less(equation, recomputed, body):",
            "if True:",
        )
    ],
    "effects_in_a_loop_happen_twice": [
        Edit(
            "_autocast/loops.py",
            "is_closed = not (body.effects or consts_of(body))",
            "is_closed = True",
        )
    ],
    "a_low_copy_of_a_weight_is_made_in_each_iteration": [
        Edit(
            "_autocast/derivatives.py",
            'return name_p.bind(copy, name="low copy") if factor.is_fixed else copy',
            "return copy",
        )
    ],
    "what_is_saved_of_a_factor_is_float32": [
        Edit(
            "_autocast/derivatives.py", "    copy = to_low(x, low)\n", "    copy = x\n"
        )
    ],
    "save_products_saves_nothing": [
        Edit(
            "_autocast/loops.py",
            "return primitive in PRODUCTS and all(x.dtype.itemsize < 4 for x in avals[:2])",
            "return False",
        )
    ],
    "policies_do_not_see_low_products": [
        Edit(
            "_autocast/derivatives.py",
            "if saveable(product.primitive, *low, **product.written) is False:",
            "if True:",
        )
    ],
}

FAULTS["autocast/test_scopes_and_report.py"] = {
    "a_scope_in_high_is_ignored": [
        Edit("_autocast/levels.py", "return is_in_scope or (", "return (")
    ],
    "a_scope_around_a_loop_in_high_is_ignored": [
        Edit(
            "_autocast/levels.py",
            "(*self.scope, *scope_of(equation)) if self.high",
            "scope_of(equation) if self.high",
        )
    ],
    "the_report_names_the_line_in_the_library": [
        Edit(
            "_autocast/report.py",
            "lines = itertools.chain(map(user_line, around), map(where_written, around))",
            "lines = map(where_written, around)",
        )
    ],
    "the_report_names_the_outermost_call": [
        Edit(
            "_autocast/report.py",
            "around = [equation, *reversed(found.calls)]",
            "around = [*found.calls, equation]",
        )
    ],
    "the_report_shows_the_dtype_as_written": [
        Edit("_autocast/report.py", "if found.reason else [settings.dtype]", "")
    ],
    "the_report_is_of_the_outer_autocast": [
        Edit(
            "_autocast/report.py",
            "list(calls) or [(traced.program.jaxpr, settings)]",
            "[(traced.program.jaxpr, settings)]",
        )
    ],
    "bfloat16_becomes_float16": [
        Edit(
            "_autocast/levels.py",
            "return Settings(dtype, level,",
            "return Settings(jnp.dtype(jnp.float16), level,",
        )
    ],
}

FAULTS["autocast/test_linen_and_equinox_modules.py"] = {
    "a_line_in_high_is_ignored": [
        Edit(
            "_autocast/levels.py",
            "return is_in_scope or (self._has_lines and line_in_code(equation) in self.high)",
            "return is_in_scope",
        )
    ],
    "statistics_of_linen_are_lost": [
        Edit("_autocast/modules.py", "_write(scopes, variables)", "pass")
    ],
    "a_bound_linen_module_keeps_tracers_after_an_error": [
        Edit(
            "_autocast/modules.py",
            "    finally:\n        _write(scopes, old)",
            "    finally:\n        pass",
        )
    ],
    "initial_parameters_of_linen_are_rounded": [
        Edit(
            "_autocast/modules.py",
            'return any(scope.get_flag("initializing", False) for scope in scopes)',
            "return False",
        )
    ],
}

FAULTS["autocast/test_markers.py"] = {
    "full_precision_is_ignored_in_derivative_rules": [
        Edit(
            "_autocast/rewrite.py",
            "if name == BACKWARD_RULE:",
            "if name == BACKWARD_RULE:\n        settings = settings._replace(reason=None)",
        )
    ],
    "full_precision_is_ignored_in_a_rule_for_tangents": [
        Edit(
            "_autocast/rewrite.py",
            "if name in TRACED_RULES:\n",
            "if name in TRACED_RULES:\n        settings = settings._replace(reason=None)\n",
        )
    ],
    "full_precision_is_ignored_in_gradients": [
        Edit(
            "_autocast/programs.py",
            "return [element.name for element in equation.source_info.name_stack.stack]",
            'names = [element.name for element in equation.source_info.name_stack.stack]\n    return [] if "transpose" in names else names',
        )
    ],
    "results_of_low_precision_are_not_cast_back": [
        Edit(
            "_autocast/markers.py",
            "return cast_arrays(results, dtype, jnp.float32)",
            "return results",
        )
    ],
    "inputs_of_low_precision_are_not_cast": [
        Edit(
            "_autocast/markers.py",
            "args, kwargs = cast_arrays(inputs, jnp.float32, dtype)",
            "args, kwargs = inputs",
        )
    ],
    "the_result_of_a_backward_rule_is_traced_for_no_dtype": [
        Edit(
            "_autocast/rewrite.py",
            "        with traced_for(settings.traced_dtype):\n            if settings.reason",
            "        with traced_for(None):\n            if settings.reason",
        )
    ],
}

FAULTS["autocast/test_levels.py"] = {
    "o2_casts_running_statistics": [
        Edit(
            "_autocast/levels.py",
            "flags = _are_statistics(tree)",
            "flags = [False] * len(jax.tree.leaves(tree))",
        )
    ],
    "o3_leaves_normalization_layers": [
        Edit("_autocast/levels.py", 'if settings.level == "O2":', "if True:")
    ],
    "o3_is_o1": [
        Edit(
            "_autocast/levels.py",
            'return self.level in ("O2", "O3")',
            'return self.level == "O2"',
        )
    ],
    "what_o2_returns_untouched_is_rounded": [
        Edit(
            "_autocast/transform.py",
            "given[id(x)] if id(x) in given else cast(x)",
            "cast(x)",
        )
    ],
    "o2_casts_normalization_layers": [
        Edit("_autocast/levels.py", 'if settings.level == "O2":', "if False:")
    ],
}

FAULTS["autocast/test_derivative_rules.py"] = {
    "a_backward_rule_is_left_high": [
        Edit(
            "_autocast/rewrite.py",
            "if name == BACKWARD_RULE:",
            "if False:",
        )
    ],
    "a_rule_for_tangents_is_left_high": [
        Edit("_autocast/rewrite.py", "if name in TRACED_RULES:\n", "if False:\n")
    ],
}

FAULTS["autocast/test_nnx_modules.py"] = {
    "an_update_of_an_nnx_variable_is_lost": [
        Edit("_autocast/modules.py", "flax_nnx().update(modules, changes)", "pass")
    ],
    "an_attribute_that_a_call_sets_is_lost": [
        Edit("_autocast/modules.py", "    if new_graph != graph:\n", "    if False:\n")
    ],
    "a_module_in_a_closure_is_changed_without_an_error": [
        Edit(
            "_autocast/modules.py",
            "    except refused as error:\n",
            "    except refused as error:\n        return\n",
        )
    ],
}

FAULTS["autocast/test_nothing_else_changes.py"] = {
    "weak_types_of_results_change": [
        Edit(
            "_autocast/programs.py",
            '"weak_type": aval.weak_type, "sharding"',
            '"weak_type": False, "sharding"',
        )
    ],
    "weak_types_of_second_derivatives_change": [
        Edit(
            "_autocast/derivatives.py",
            "    if jax.typeof(x).weak_type:\n        return x\n",
            "",
        )
    ],
    "results_of_products_are_not_rounded": [
        Edit(
            "_autocast/rewrite.py",
            "tuple(equation.params.items()), low, low)\n    result = core.Var(aval_of(equation.outvars[0]).update(dtype=low, weak_type=False))",
            "tuple(equation.params.items()), low, FLOAT32)\n    result = core.Var(aval_of(equation.outvars[0]).update(weak_type=False))",
        )
    ],
    "float16_and_bfloat16_share_programs": [
        Edit(
            "_autocast/rewrite.py",
            "changed_once(program, settings, change)",
            "changed_once(program, settings._replace(dtype=None), change)",
        )
    ],
    "a_kernel_is_rewritten": [
        Edit(
            "_autocast/rewrite.py",
            "    if equation.primitive.name in KERNELS:\n        return [equation]\n",
            "",
        )
    ],
    "a_function_is_traced_at_each_call_inside_jit": [
        Edit(
            "_autocast/programs.py",
            "return program if of_program[key] is None else of_program[key]",
            "return change()",
        )
    ],
}

FAULTS["autocast/test_arguments_and_results.py"] = {
    "numpy_integer_arrays_are_traced": [
        Edit(
            "_autocast/modules.py",
            "return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)",
            "return hasattr(leaf, 'dtype')",
        )
    ],
    "integer_arrays_of_jax_are_traced": [
        Edit(
            "_autocast/modules.py",
            "return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)",
            "return isinstance(leaf, jax.Array)",
        )
    ],
}

FAULTS["autocast/test_calls.py"] = {
    "the_context_of_a_thread_leaks_into_others": [
        Edit(
            "_autocast/context.py",
            "context = jax.make_user_context(Context())",
            "class _Shared:\n    value = Context()\n\n    @contextlib.contextmanager\n    def __call__(self, new):\n        old, _Shared.value = self.value, new\n        try:\n            yield\n        finally:\n            _Shared.value = old\n\n\ncontext = _Shared()",
        )
    ],
}

FAULTS["autocast/test_lookups.py"] = {
    "lookups_at_o2_add_up_in_float16": [
        Edit(
            "_autocast/lookups.py",
            "if low not in (jnp.float16, jnp.bfloat16):",
            "if True:",
        )
    ],
    "sums_into_indices_at_o2_add_up_in_float16": [
        Edit("_autocast/lookups.py", '"scatter-add": lax.add,', "")
    ],
}

FAULTS["autocast/test_closed_calls.py"] = {
    "rules_that_are_not_looked_into_are_not_warned_of": [
        Edit("_autocast/rewrite.py", "warnings.warn(", "str(")
    ],
}


class DoesNotApplyError(Exception):
    """The text of a fault does not stand in the package exactly once."""


def planted(edits: list[Edit], folder: pathlib.Path) -> None:
    """Copies the package into a folder, with a fault."""
    shutil.copytree(
        ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("*.pyc")
    )
    for path, old, new in edits:
        file = folder / PACKAGE / path
        text = file.read_text() if file.exists() else ""
        if text.count(old) != 1:
            raise DoesNotApplyError(f"{text.count(old)} times in {path}: {old}")
        file.write_text(text.replace(old, new))


def judge(name: str, edits: list[Edit], runs: list[list[str]], timeout: float) -> dict:
    """Whether pytest fails on a copy with this fault, in one of several runs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            planted(edits, pathlib.Path(folder))
        except DoesNotApplyError as error:
            return {"fault": name, "seen": "does not apply", "by": [str(error)]}
        result: dict = {}
        for arguments in runs:
            result = {"fault": name} | run_tests(arguments, folder, timeout)
            if result["seen"] != "no":
                break
        return result


def run_tests(arguments: list[str], folder: str, timeout: float) -> dict:
    """Whether pytest fails with the package of a folder, and by which test."""
    command = [str(pathlib.Path(sys.executable).with_name("pytest")), "-q", "-x"]
    command += ["-p", "no:cacheprovider", "--durations=0", "--tb=line", *arguments]
    started = time.monotonic()
    try:
        run = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout,
            env=os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        code, output = run.returncode, run.stdout + run.stderr
    except subprocess.TimeoutExpired:
        code, output = 124, ""
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    return {
        "seen": {0: "no", 1: "yes", 2: "yes" if failed else "broken"}.get(
            code, f"code {code}"
        ),
        "by": failed[:1],
        "seconds": round(time.monotonic() - started),
        "tail": "" if failed else output[-300:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("tests", nargs="*")
    options, more = parser.parse_known_args()
    faults = {
        name: (edits, f"tests/{file}" if "/" in file else f"tests/scaling/{file}")
        for file, faults_of_file in FAULTS.items()
        for name, edits in faults_of_file.items()
    }
    names = options.only or list(faults)
    if not (options.only or options.all):
        print(*names, sep="\n")
        return
    results = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = []
        for name in names:
            edits, file = faults[name]
            tests = [[file, *more]] + ([options.tests + more] if options.tests else [])
            runs.append(pool.submit(judge, name, edits, tests, options.timeout))
        for run in concurrent.futures.as_completed(runs):
            result = run.result()
            results.append(result)
            seconds = f"{result.get('seconds', 0)} s"
            print(
                f"{result['fault']}:",
                result["seen"],
                *result["by"],
                seconds,
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    counts = collections.Counter(result["seen"] for result in results)
    applied = len(results) - counts["does not apply"]
    print(f"{counts['yes']} of {applied} faults are seen.")
    if applied < len(results):
        print(f"{len(results) - applied} do not apply: their text is not found.")


if __name__ == "__main__":
    main()
