"""The tables of the notebook 06_coming_from: complete, and every entry runs."""

import ast
import pathlib
import re

import jax
import nbformat
import numpy as np
import pytest

import optax_lossscale as ols

NOTEBOOK = pathlib.Path(__file__).parents[2] / "notebooks" / "06_coming_from.ipynb"
CELLS = nbformat.read(NOTEBOOK, as_version=4).cells

# Every parameter, property and method on the pages of other systems, and the public
# methods of the classes that these pages are about.
PAGES = {
    "Keras 3 and R's keras3": """
        LossScaleOptimizer optimizer_loss_scale inner_optimizer initial_scale
        dynamic_growth_steps dynamic name ... **kwargs weight_decay clipnorm clipvalue
        global_clipnorm use_ema ema_momentum ema_overwrite_frequency loss_scale_factor
        gradient_accumulation_steps finalize_variable_values fit() compile
        auto_scale_loss scale_loss apply apply_gradients stateless_apply update_step
        build built variables set_weights save_own_variables load_own_variables
        get_config from_config add_variable add_variable_from_reference
        add_optimizer_variables assign assign_add assign_sub iterations learning_rate
        exclude_from_weight_decay dynamic_scale step_counter check_finite Optimizer""",
    "Keras 3 and R's keras3: other optimizers": """
        optimizer_adadelta optimizer_adafactor optimizer_adagrad optimizer_adam
        optimizer_adam_w optimizer_adamax optimizer_ftrl optimizer_lamb optimizer_lion
        optimizer_muon optimizer_nadam optimizer_rmsprop optimizer_sgd
        Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion Muon Nadam RMSprop
        SGD""",
    "tf.keras": """
        LossScaleOptimizer inner_optimizer dynamic initial_scale dynamic_growth_steps
        .inner_optimizer .dynamic .initial_scale .dynamic_growth_steps .dynamic_counter
        .loss_scale .learning_rate .lr .beta_1 epsilon minimize get_gradients
        apply_gradients get_scaled_loss get_unscaled_gradients get_config from_config
        .iterations variables .weights get_weights set_weights get_slot get_slot_names
        clipnorm clipvalue global_clipnorm tf.compat.v1 add_slot add_weight tf.Variable
        tf.GradientTape ValueError""",
    "PyTorch": """
        GradScaler init_scale growth_factor backoff_factor growth_interval enabled
        device torch.cuda.amp .cuda() model.parameters optim.SGD scale(loss) backward
        unscale_(optimizer) clip_grad_norm_ clip_grad_value_ step(optimizer) update()
        update(new_scale) get_scale get_growth_factor get_backoff_factor
        get_growth_interval set_growth_factor set_backoff_factor set_growth_interval
        is_enabled state_dict load_state_dict zero_grad() autocast device_type dtype
        compensation cache_enabled custom_fwd custom_bwd torch.get_autocast_dtype
        nn.Linear nn.MSELoss""",
    "MindSpore": """
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
    "Flax, jmp, apex, Megatron-LM, DeepSpeed, fairseq": """
        DynamicScale value_and_grad fin_steps DynamicLossScale StaticLossScale
        NoOpLossScale select_tree amp.initialize num_losses amp.scale_loss
        DynamicGradScaler initial_scale_power hysteresis --fp16-init-scale
        --threshold-loss-scale""",
}


def tables():
    """The rows of each table, as lists of cells, under its title."""
    text = "\n\n".join(cell.source for cell in CELLS if cell.cell_type == "markdown")
    found = {}
    for table in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        title, _, *rows = (
            [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            for line in table.strip().splitlines()
        )
        found[title[0]] = rows
    return found


ROWS = [(title, row) for title, rows in tables().items() for row in rows]


@pytest.mark.parametrize("page", PAGES)
def test_every_name_on_a_page_of_another_system_has_a_row(page):
    cells = "\n".join(row[0] for row in tables()[page])
    code = "\n".join(re.findall("`(.+?)`", cells))

    def has_row(name):
        return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code)

    assert [name for name in PAGES[page].split() if not has_row(name)] == []


def test_no_table_has_escaped_the_reading_of_tables():
    lines = [line for cell in CELLS for line in cell.source.splitlines()]
    table_lines = [line for line in lines if line.startswith("|")]
    assert set(tables()) == set(PAGES)
    assert len(table_lines) == len(ROWS) + 2 * len(PAGES)


def test_every_row_says_what_to_type_or_that_it_cannot_be_had():
    for _, row in ROWS:
        _, here, _ = row
        assert "`" in here or here.startswith(("Cannot be had: ", "The same."))
        assert all(cell.count("`") % 2 == 0 for cell in row)


def test_the_text_of_the_tables_has_whole_sentences_and_no_accidental_bold():
    for _, row in ROWS:
        difference = row[2]
        assert not difference or difference.endswith("."), difference
        for cell in row:
            assert not re.search(r"__|\*\*", re.sub("`.+?`", "", cell)), cell


@pytest.fixture(scope="module")
def names():
    """The names that the notebook's first cell of code defines for its tables."""
    first = next(cell for cell in CELLS if cell.cell_type == "code")
    names = {}
    # The cell sets how arrays are printed, which the doctests of other files rely on.
    with (
        np.printoptions(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        exec(first.source, names)
    return names


@pytest.mark.fast_every(6)
@pytest.mark.parametrize(
    ("title", "row"), ROWS, ids=[f"{title}: {row[0]}"[:60] for title, row in ROWS]
)
def test_everything_to_type_in_a_row_runs(title, row, names):
    _, here, difference = row
    codes = re.findall("`(.+?)`", here)
    codes += re.findall(r"`((?:ols|optax|tx|rule)\..+?)`", difference)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        values = {code: eval(code, dict(names)) for code in codes}
    for value in values.values():
        arrays = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
        floating = [x for x in arrays if jax.numpy.issubdtype(x.dtype, np.floating)]
        assert all(np.isfinite(x).all() for x in floating)


# What some of the entries give, worked out by hand: at first the scale is 2**15, no
# step has been counted, and the learning rate is 1e-3.
VALUES = {
    "rule != ols.no_loss_scale()": True,
    "rule.skips": True,
    "ols.get_loss_scale(opt_state)": 2.0**15,
    "state.loss_scale": 2.0**15,
    "state.rule_state.growth_count": 0,
    "state.step_count - state.total_notfinite": 0,
    "ols.set_loss_scale(opt_state, 1024.0).loss_scale_state.loss_scale": 1024.0,
    "rule.adjust(state, grads_finite=True).rule_state.growth_count": 1,
    "rule.adjust(state, grads_finite=False).loss_scale": 2.0**14,
    "rule.adjust(state, ols.all_finite(unscaled)).step_count": 1,
    'ols.presets.torch().settings["growth_factor"]': 2.0,
    'repr(ols.presets.torch()).startswith("presets.torch(init_scale=65536.0, ")': True,
    'ols.presets.tf_keras(True, 32768.0, 2000).settings["initial_scale"]': 2.0**15,
    "ols.dynamic_loss_scale(**rule.settings).settings == rule.settings": True,
    'optax.tree.get(opt_state, "learning_rate")': np.float32(1e-3),
    'optax.tree.get(optax.tree.set(opt_state, b1=0.7), "b1")': np.float32(0.7),
    "ols.all_finite(unscaled)": True,
    "ols.scale(loss, opt_state) / loss": 2.0**15,
    "isinstance(tx, optax.GradientTransformationExtraArgs)": True,
}


@pytest.mark.parametrize("code", VALUES)
def test_an_entry_gives_the_value_that_its_name_promises(code, names):
    given = [found for _, row in ROWS for found in re.findall("`(.+?)`", row[1])]
    assert any(found in code for found in given)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert eval(code, dict(names)) == VALUES[code]


def test_a_disabled_scaler_is_found_to_be_disabled(names):
    disabled = {**names, "rule": ols.presets.torch(enabled=False)}
    assert eval("rule != ols.no_loss_scale()", disabled) is False


@pytest.mark.fast_every(4)
@pytest.mark.parametrize(
    "row", tables()["Keras 3 and R's keras3: other optimizers"], ids=lambda row: row[0]
)
def test_an_optimizer_of_optax_in_the_tables_trains_under_loss_scaling(row, names):
    codes = re.findall(r"`(optax\..+?\))`", row[1])
    assert codes
    params = {"kernel": jax.numpy.ones((2, 2)), "bias": jax.numpy.ones(2)}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for code in codes:
            tx = ols.loss_scaled(eval(code, dict(names)))
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


def test_what_to_type_is_an_expression_and_never_a_bare_string():
    # A string, or a number, would run whatever it says.
    codes = [code for _, row in ROWS for code in re.findall("`(.+?)`", row[1])]
    assert len(codes) > 150
    for code in codes:
        assert not isinstance(ast.parse(code, mode="eval").body, ast.Constant)
