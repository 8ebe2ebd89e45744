"""Every notebook runs, and prints the output that is stored in it."""

import copy
import pathlib
import re

import nbclient
import nbformat
import pytest

import optax_lossscale as ols
from helpers.compat import IS_JAX_0_7

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def printed(notebook):
    """What each code cell printed to stdout."""
    return [
        "".join(
            output.text
            for output in cell.outputs
            if output.output_type == "stream" and output.name == "stdout"
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's packages warn.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_the_output_that_is_stored_in_it(path):
    if IS_JAX_0_7 and path.stem == "04_many_devices":
        pytest.skip("JAX 0.7 has no jax.lax.pcast")
    stored = read(path)
    executed = copy.deepcopy(stored)
    nbclient.NotebookClient(executed, timeout=300, kernel_name="python3").execute()
    assert printed(executed) == printed(stored)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_begins_with_its_question(path):
    cells = read(path).cells
    assert len(cells) <= 15
    assert cells[0].cell_type == "markdown"
    assert "?" in cells[0].source


# Every parameter, property and method on the pages of other systems.
PAGES = {
    "Keras 3 and R's keras3": """
        LossScaleOptimizer optimizer_loss_scale inner_optimizer initial_scale
        dynamic_growth_steps name ... **kwargs weight_decay clipnorm clipvalue
        global_clipnorm use_ema ema_momentum ema_overwrite_frequency loss_scale_factor
        gradient_accumulation_steps finalize_variable_values() fit()""",
    "tf.keras": """
        LossScaleOptimizer inner_optimizer dynamic initial_scale dynamic_growth_steps
        .inner_optimizer .dynamic .initial_scale .dynamic_growth_steps .dynamic_counter
        .loss_scale .learning_rate .lr .beta_1 epsilon minimize get_gradients
        apply_gradients get_scaled_loss get_unscaled_gradients ValueError""",
    "Flax, jmp, apex, Megatron-LM, DeepSpeed, fairseq": """
        DynamicScale value_and_grad fin_steps DynamicLossScale StaticLossScale
        NoOpLossScale select_tree amp.initialize amp.scale_loss DynamicGradScaler
        initial_scale_power hysteresis --fp16-init-scale --threshold-loss-scale""",
    "PyTorch": """
        GradScaler init_scale growth_factor backoff_factor growth_interval enabled
        scale(loss) step(optimizer) update() zero_grad() autocast device_type dtype""",
    "MindSpore": """
        FixedLossScaleManager loss_scale drop_overflow_update DynamicLossScaleManager
        init_loss_scale scale_factor scale_window Model amp_level loss_scale_manager
        to_float ops.Cast TrainOneStepCell CustomTrainOneStepCell network optimizer sens
        scale_grad grad_scale grad_reducer HyperMap WithLossCell Momentum
        AdamWeightDecay SoftmaxCrossEntropyWithLogits LossMonitor metrics""",
}


def tables():
    """The tables of 06_coming_from: the rows of each title, as lists of three cells."""
    (path,) = (path for path in NOTEBOOKS if path.stem == "06_coming_from")
    text = "\n\n".join(
        cell.source for cell in read(path).cells if cell.cell_type == "markdown"
    )
    found = {}
    for table in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        title, _, *rows = (
            [cell.strip() for cell in line.strip("| ").split(" | ")]
            for line in table.strip().splitlines()
        )
        found[title[0]] = rows
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_name_on_a_page_of_another_system_has_a_row(page):
    cells = "\n".join(row[0] for row in tables()[page])
    code = "\n".join(re.findall("`(.+?)`", cells))

    def has_row(name):
        return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code)

    assert [name for name in PAGES[page].split() if not has_row(name)] == []


def test_every_name_of_this_package_in_the_tables_exists():
    ours = "\n".join(" ".join(row[1:]) for rows in tables().values() for row in rows)
    names = re.findall(r"\bols\.([\w.]+)", ours)
    assert len(names) > 20
    for name in names:
        value = ols
        for part in name.split("."):
            value = getattr(value, part)
