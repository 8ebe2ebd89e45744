"""The tables of docs/migration: complete, and every entry runs."""

import ast
import contextlib
import functools
import io
import pathlib
import re

import jax
import numpy as np
import pytest

import optax_lossscale as ols

MIGRATION = pathlib.Path(__file__).parents[2] / "docs" / "migration"

# For each page: every parameter, property and method on the pages of that system, and
# the public methods of the classes that these pages are about.
PAGES = {
    "keras": """
        LossScaleOptimizer optimizer_loss_scale inner_optimizer initial_scale
        dynamic_growth_steps dynamic name ... **kwargs weight_decay clipnorm clipvalue
        global_clipnorm use_ema ema_momentum ema_overwrite_frequency loss_scale_factor
        gradient_accumulation_steps finalize_variable_values fit() compile
        auto_scale_loss scale_loss apply apply_gradients stateless_apply update_step
        build built variables set_weights save_own_variables load_own_variables
        get_config from_config add_variable add_variable_from_reference
        add_optimizer_variables assign assign_add assign_sub iterations learning_rate
        exclude_from_weight_decay dynamic_scale step_counter check_finite Optimizer
        optimizer_adadelta optimizer_adafactor optimizer_adagrad optimizer_adam
        optimizer_adam_w optimizer_adamax optimizer_ftrl optimizer_lamb optimizer_lion
        optimizer_muon optimizer_nadam optimizer_rmsprop optimizer_sgd
        Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion Muon Nadam RMSprop
        SGD""",
    "tf_keras": """
        LossScaleOptimizer inner_optimizer dynamic initial_scale dynamic_growth_steps
        .inner_optimizer .dynamic .initial_scale .dynamic_growth_steps .dynamic_counter
        .loss_scale .learning_rate .lr .beta_1 epsilon minimize get_gradients
        apply_gradients get_scaled_loss get_unscaled_gradients get_config from_config
        .iterations variables .weights get_weights set_weights get_slot get_slot_names
        clipnorm clipvalue global_clipnorm tf.compat.v1 add_slot add_weight tf.Variable
        tf.GradientTape ValueError""",
    "pytorch": """
        GradScaler init_scale growth_factor backoff_factor growth_interval enabled
        device torch.cuda.amp .cuda() model.parameters optim.SGD scale(loss) backward
        unscale_(optimizer) clip_grad_norm_ clip_grad_value_ step(optimizer) update()
        update(new_scale) get_scale get_growth_factor get_backoff_factor
        get_growth_interval set_growth_factor set_backoff_factor set_growth_interval
        is_enabled state_dict load_state_dict _growth_tracker zero_grad() autocast
        device_type dtype compensation cache_enabled custom_fwd custom_bwd cast_inputs
        torch.get_autocast_dtype ShardedGradScaler nn.Linear nn.MSELoss""",
    "mindspore": """
        FixedLossScaleManager loss_scale drop_overflow_update DynamicLossScaleManager
        init_loss_scale scale_factor scale_window LossScaleManager get_loss_scale
        get_drop_overflow_update update_loss_scale get_update_cell
        DynamicLossScaleUpdateCell FixedLossScaleUpdateCell loss_scale_value
        DynamicLossScaler StaticLossScaler LossScaler.scale .unscale adjust scale_value
        counter amp.all_finite amp.init_status RuntimeError Model amp_level O0 O1 O2 O3
        auto loss_scale_manager auto_mixed_precision build_train_network to_float
        ops.Cast ops.cast ops.dtype TrainOneStepCell CustomTrainOneStepCell
        TrainOneStepWithLossScaleCell network optimizer sens set_sense_scale
        reciprocal_sense start_overflow_check get_overflow_status process_loss_scale
        construct scale_grad grad_scale gradient_scale grad_reducer HyperMap
        MultitypeFuncGraph ops.partial ops.fill ops.depend WithLossCell reduction
        Momentum trainable_params AdamWeightDecay SoftmaxCrossEntropyWithLogits
        LossMonitor metrics
        Accuracy model.train callbacks nn.Cell Conv2d Dense ReLU MaxPool2d Flatten
        Normal GeneratorDataset batch repeat create_dict_iterator set_context mode
        device_target GRAPH_MODE set_seed Tensor Parameter BatchNorm""",
    "flax_and_jmp": """
        DynamicScale growth_factor backoff_factor growth_interval fin_steps scale
        minimum_scale replace value_and_grad fun argnums has_aux axis_name
        DynamicScaleResult dynamic_scale finite aux grad is_fin TrainState
        jmp DynamicLossScale loss_scale counter period factor min_loss_scale
        StaticLossScale NoOpLossScale LossScale .scale .unscale .adjust grads_finite
        all_finite select_tree Policy param_dtype compute_dtype output_dtype get_policy
        cast_to_param cast_to_compute cast_to_output with_output_dtype cast_to_full
        cast_to_half half_dtype""",
    "apex": """
        amp.initialize models optimizers enabled opt_level O0 O1 O2 O3 cast_model_type
        patch_torch_functions keep_batchnorm_fp32 master_weights loss_scale
        cast_model_outputs num_losses verbosity min_loss_scale max_loss_scale
        amp.scale_loss loss_id model delay_unscale delay_overflow_check optimizer.step
        amp.master_params amp.state_dict amp.load_state_dict unskipped
        amp.half_function amp.float_function amp.promote_function
        amp.register_half_function amp.register_float_function
        amp.register_promote_function amp.disable_casts amp.init FP16_Optimizer
        static_loss_scale dynamic_loss_scale dynamic_loss_args backward
        update_master_grads clip_master_grads network_to_half BN_convert_float
        prep_param_lists""",
    "megatron": """
        DynamicGradScaler initial_scale min_scale growth_factor backoff_factor
        growth_interval hysteresis ConstantGradScaler MegatronGradScaler --fp16 --bf16
        --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window
        --hysteresis scaler.scale inv_scale update(found_inf) state_dict growth_tracker
        hysteresis_tracker load_state_dict scale_loss get_loss_scale optimizer.step
        success grad_norm num_zeros_in_grad --clip-grad
        --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32""",
    "deepspeed": """
        fp16 enabled auto_cast loss_scale initial_scale_power loss_scale_window
        hysteresis consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads
        bf16 DynamicLossScaler init_scale scale_window min_scale delayed_shift
        raise_error_at_min_scale dtype LossScaler LossScalerBase CreateLossScaler
        cur_scale override_loss_scale scale_loss scaler.backward scale_gradient
        has_overflow has_overflow_serial update_scale cur_iter last_overflow_iter
        cur_hysteresis engine.backward engine.step skipped_steps optimizer.overflow
        was_step_applied check_grad_overflow gradient_clipping
        gradient_accumulation_steps""",
    "fairseq": """
        DynamicLossScaler init_scale scale_factor scale_window tolerance threshold
        min_loss_scale --fp16 --fp16-init-scale --fp16-scale-window
        --fp16-scale-tolerance --threshold-loss-scale --min-loss-scale
        --memory-efficient-fp16 --fp16-no-flatten-grads --on-cpu-convert-precision
        --amp --amp-init-scale --amp-scale-window --amp-batch-retries
        scaler.loss_scale scaler.scale scaler.update check_overflow OverflowError
        FloatingPointError FP16Optimizer build_optimizer optimizer.backward
        multiply_grads clip_grad_norm --clip-norm optimizer.step zero_grad state_dict
        load_state_dict --update-freq""",
    "index": """
        GradScaler LossScaleOptimizer optimizer_loss_scale() DynamicScale jmp apex.amp
        DynamicGradScaler fp16 --fp16 amp_level""",
}

# Signatures of R, whose pages show calls: each argument must have a row in `keras`.
R_CALLS = [
    """optimizer_loss_scale(inner_optimizer, initial_scale = 32768,
    dynamic_growth_steps = 2000L, ..., name = NULL, weight_decay = NULL,
    clipnorm = NULL, clipvalue = NULL, global_clipnorm = NULL, use_ema = NULL,
    ema_momentum = NULL, ema_overwrite_frequency = NULL, loss_scale_factor = NULL,
    gradient_accumulation_steps = NULL)""",
    "optimizer_loss_scale(optimizer_adam(1e-3))",
]


def split_table(table):
    """The title and the rows of a Markdown table, each a list of cells."""
    title, _, *rows = (
        [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        for line in table.strip().splitlines()
    )
    return title, rows


@functools.cache
def page(name):
    """A page's text without code, the rows of its tables, and its blocks of code."""
    text = (MIGRATION / f"{name}.md").read_text()
    fence = r"^```(\S*)[^\n]*\n(.*?)^```$"
    blocks = re.findall(fence, text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(fence, "", text, flags=re.MULTILINE | re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n?)+", prose, flags=re.MULTILINE)
    return prose, [split_table(table) for table in tables], blocks


def rows(name):
    return [row for _, rows in page(name)[1] for row in rows]


ROWS = [(name, row) for name in PAGES for row in rows(name)]
IDS = [f"{name}: {row[0]}"[:60] for name, row in ROWS]


def code_in(cell):
    return re.findall("`(.+?)`", cell)


@functools.cache
def names(name):
    """The names that a page's cells above its last table define for its tables."""
    text = (MIGRATION / f"{name}.md").read_text()
    above = text[: text.rindex("\n| ")] if name != "index" else text
    cells = re.findall(r"^```{code-cell}\n(.*?)^```$", above, re.MULTILINE | re.DOTALL)
    defined = {}
    with contextlib.redirect_stdout(io.StringIO()), lenient_promotion():
        for cell in cells:
            exec(cell, defined)
        if "tx" in defined:  # As the run of a page has trained, start again.
            defined["opt_state"] = defined["tx"].init(defined["params"])
            defined["state"] = ols.find_loss_scale_state(defined["opt_state"])
        if name == "index":  # Whose entries are the first changes of the other pages.
            of_torch = names("pytorch")
            defined |= {key: of_torch[key] for key in ("loss_fn", "optimizer")}
    return defined


@contextlib.contextmanager
def lenient_promotion():
    """Users have JAX's standard promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(code, defined):
    """The value of an entry. An import has none."""
    with lenient_promotion():
        if re.match("(from|import) ", code):
            return exec(code, dict(defined))
        return eval(code, dict(defined))


def test_every_page_has_an_entry_here_and_a_row_in_the_index():
    on_disk = {path.stem for path in MIGRATION.glob("*.md")}
    assert set(PAGES) == on_disk
    linked = set(re.findall(r"\((\w+)\.md\)", (MIGRATION / "index.md").read_text()))
    assert linked == on_disk - {"index"}


@pytest.mark.parametrize("name", PAGES)
def test_every_name_on_a_page_of_another_system_has_a_row(name):
    code = "\n".join("\n".join(code_in(row[0])) for row in rows(name))

    def has_row(word):
        return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", code)

    assert [word for word in PAGES[name].split() if not has_row(word)] == []


@pytest.mark.parametrize("call", R_CALLS)
def test_every_function_and_argument_of_an_r_call_has_a_row(call):
    code = "\n".join("\n".join(code_in(row[0])) for row in rows("keras"))
    words = re.findall(r"[a-z]\w+(?= =|\(|,|\))|\.\.\.", call)
    assert len(words) in (2, 15)
    assert [word for word in words if word not in code] == []


def test_no_table_has_escaped_the_reading_of_tables():
    for name in PAGES:
        prose, tables, _ = page(name)
        lines = [line for line in prose.splitlines() if line.startswith("|")]
        assert len(lines) == len(rows(name)) + 2 * len(tables)
        assert all(title[1] == "here" and len(title) == 3 for title, _ in tables)
        assert all(len(row) == 3 for row in rows(name)), name


def test_every_page_shows_the_example_of_its_system_beside_our_own():
    for name in PAGES:
        kinds = [kind for kind, _ in page(name)[2]]
        assert "{code-cell}" in kinds
        # Flax is installed where the pages are built, so its example runs too.
        assert "python" in kinds or name in ("index", "flax_and_jmp")


def test_the_code_that_needs_another_system_is_python():
    for name in PAGES:
        for kind, code in page(name)[2]:
            if kind == "python":
                ast.parse(code)


def test_every_row_says_what_to_type_or_that_it_has_no_equivalent():
    for _, row in ROWS:
        here = row[1]
        assert "`" in here or here.startswith(("No equivalent: ", "The same."))
        assert all(cell.count("`") % 2 == 0 for cell in row)


def test_the_text_of_the_tables_has_whole_sentences_and_no_accidental_bold():
    for name, row in ROWS:
        difference = row[2]
        assert not difference or difference.endswith(".") or name == "index"
        for cell in row:
            assert not re.search(r"__|\*\*", re.sub("`.+?`", "", cell)), cell


@pytest.mark.fast_every(6)
@pytest.mark.parametrize(("name", "row"), ROWS, ids=IDS)
def test_everything_to_type_in_a_row_runs(name, row):
    _, here, difference = row
    codes = code_in(here)
    codes += re.findall(r"`((?:ols|optax|tx|rule)\..+?)`", difference)
    defined = names(name) if codes else {}
    for value in [run(code, defined) for code in codes]:
        arrays = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
        floating = [x for x in arrays if jax.numpy.issubdtype(x.dtype, np.floating)]
        assert all(np.isfinite(x).all() for x in floating)


# What some of the entries give, worked out by hand: no step has been counted, the scale
# is the first of its system, and the learning rate is 1e-3.
VALUES = {
    "pytorch": {
        "rule != ols.no_loss_scale()": True,
        "ols.get_loss_scale(opt_state)": 2.0**16,
        "ols.scale(loss, opt_state) / loss": 2.0**16,
        "ols.set_loss_scale(opt_state, 1024.0).loss_scale_state.loss_scale": 1024.0,
        "state.last_finite": True,
        'rule.settings["growth_factor"]': 2.0,
        'repr(rule).startswith("presets.torch(init_scale=65536.0, ")': True,
        'ols.presets.to_torch_state_dict(opt_state)["_growth_tracker"]': 0,
    },
    "keras": {
        "ols.get_loss_scale(opt_state)": 2.0**15,
        "state.step_count - state.total_notfinite": 0,
        "state.rule_state.growth_count": 0,
        "ols.presets.keras(**rule.settings).settings == rule.settings": True,
        'optax.tree.get(opt_state, "learning_rate")': np.float32(1e-3),
        "ols.all_finite(unscaled)": True,
        "isinstance(tx, optax.GradientTransformationExtraArgs)": True,
    },
    "tf_keras": {
        'rule.settings["dynamic"]': True,
        'rule.settings["initial_scale"]': 2.0**15,
        'rule.settings["dynamic_growth_steps"]': 2000,
        'getattr(state.rule_state, "growth_count", None)': 0,
        "ols.presets.tf_keras(**rule.settings).settings == rule.settings": True,
        'optax.tree.get(optax.tree.set(opt_state, b1=0.7), "b1")': np.float32(0.7),
        "state.step_count": 0,
    },
    "mindspore": {
        "rule.skips": True,
        "state.loss_scale": 2.0**16,
        "rule.adjust(state, grads_finite=True).rule_state.growth_count": 1,
        "rule.adjust(state, grads_finite=False).loss_scale": 2.0**15,
        "rule.adjust(state, ols.all_finite(unscaled)).step_count": 1,
    },
    "flax_and_jmp": {
        "ols.get_loss_scale(opt_state)": 2.0**15,  # That of jmp, which comes last.
        "state.rule_state.growth_count": 0,
        "dynamic_scale.replace(scale=1024.0).scale": 1024.0,
        "loss_scale.min_loss_scale": 1.0,
        "ols.presets.jmp().settings == jmp.DynamicLossScale(8.0).to_rule().settings": (
            True
        ),
    },
    "apex": {
        "state.loss_scale": 2.0**16,
        "state.rule_state.growth_count": 0,
        "ols.static_loss_scale(128.0, skip_nonfinite=False).skips": False,
    },
    "megatron": {
        "state.loss_scale": 2.0**32,
        "state.rule_state.hysteresis_count": 2,
        "1 / ols.get_loss_scale(opt_state)": 2.0**-32,
        "state.last_finite": True,
    },
    "deepspeed": {
        "ols.get_loss_scale(opt_state)": 2.0**16,
        "state.rule_state.hysteresis_count": 2,
        "state.total_notfinite": 0,
        "rule.adjust(state, grads_finite=True).step_count": 1,
    },
    "fairseq": {
        "ols.get_loss_scale(opt_state)": 2.0**7,
        "rule.adjust(state, grads_finite=True).loss_scale": 2.0**7,
    },
}


@pytest.mark.parametrize(
    ("name", "code"), [(name, code) for name in VALUES for code in VALUES[name]]
)
def test_an_entry_gives_the_value_that_its_name_promises(name, code):
    given = [found for row in rows(name) for found in code_in(row[1])]
    assert any(found in code for found in given)
    assert run(code, names(name)) == VALUES[name][code]


def test_a_disabled_scaler_is_found_to_be_disabled():
    disabled = {**names("pytorch"), "rule": ols.presets.torch(enabled=False)}
    assert run("rule != ols.no_loss_scale()", disabled) is False


(_, _), (_, OPTIMIZERS) = page("keras")[1]


@pytest.mark.fast_every(4)
@pytest.mark.parametrize("row", OPTIMIZERS, ids=lambda row: row[0])
def test_an_optimizer_of_optax_in_the_tables_trains_under_loss_scaling(row):
    codes = code_in(row[1])
    assert codes
    params = {"kernel": jax.numpy.ones((2, 2)), "bias": jax.numpy.ones(2)}
    with lenient_promotion():
        for code in codes:
            tx = ols.loss_scaled(run(code, names("keras")))
            opt_state = tx.init(params)
            grads = ols.scale(params, opt_state)
            updates, _ = jax.jit(tx.update)(grads, opt_state, params)
            assert all(np.all(u < 0) for u in jax.tree.leaves(updates))


def test_every_name_of_this_package_in_the_tables_exists():
    ours = "\n".join(" ".join(row[1:]) for _, row in ROWS)
    found = re.findall(r"\bols\.([\w.]+)", ours)
    assert len(found) > 20
    for name in found:
        value = ols
        for part in name.split("."):
            value = getattr(value, part)


def test_what_to_type_is_never_a_bare_string_or_number():
    # A string, or a number, would run whatever it says.
    codes = [code for _, row in ROWS for code in code_in(row[1])]
    assert len(codes) > 300
    for code in codes:
        (statement,) = ast.parse(code).body
        if isinstance(statement, ast.Expr):
            assert not isinstance(statement.value, ast.Constant)
        else:
            assert isinstance(statement, ast.Import | ast.ImportFrom)
