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


# By the file of tests/scaling that should see them.
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
        Edit(
            FINITE,
            "by_type.setdefault(jax.typeof(array), []).append(array)",
            "by_type[jax.typeof(array)] = [array]",
        )
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
    "infinity_missed": [Edit(FINITE, "map(lax.is_finite, g)", "(x == x for x in g)")],
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
        name: (edits, f"tests/scaling/{file}")
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
