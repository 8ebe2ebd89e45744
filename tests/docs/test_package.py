"""The package as it is imported: its folders, and what it needs of JAX."""

import ast
import importlib.metadata
import os
import pickle
import re
import subprocess
import sys

import chex
import jax.numpy as jnp
import optax

import optax_lossscale as ols
from helpers.files import ROOT, project_files

PACKAGE = ROOT / "optax_lossscale"
# A file imports only from its folder and from those above it.
FOLDERS = [
    *("_ground", "_autocast", "_scaling", "presets", "_masters"),
    *("diagnostics", "compat", "plotting", "__init__.py", "demo.py"),
]


def folders_imported_by(path):
    """The folders from which a file imports when it is itself imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE.name:
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start, _, module = node.module.partition(".")
            modules = [module] if start == PACKAGE.name else []
        else:
            continue
        for module in modules:
            folder = module.partition(".")[0]
            yield folder if folder in FOLDERS else "__init__.py"


def test_a_file_imports_only_from_its_folder_and_those_above():
    for path in project_files("optax_lossscale/**/*.py"):
        place = FOLDERS.index(path.relative_to(PACKAGE).parts[0])
        assert {*folders_imported_by(path)} <= {*FOLDERS[: place + 1]}, path


def test_only_one_file_takes_private_names_of_jax():
    for path in project_files("optax_lossscale/**/*.py"):
        assert "jax._src" not in path.read_text() or path.name == "jax_internals.py"


def test_the_version_equals_that_of_the_installed_package():
    assert importlib.metadata.version("optax-lossscale") == ols.__version__


def run_anew(program):
    """Runs a program in a new process, with as many devices as JAX finds."""
    env = {name: value for name, value in os.environ.items() if "NUM_CPU" not in name}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)


def test_loss_scaling_needs_no_private_name_and_autocast_says_which_is_gone():
    internals = (PACKAGE / "_autocast/jax_internals.py").read_text()
    module, name = re.search(r'= _private\("([\w.]+)", "(\w+)"\)', internals).groups()
    run_anew(f"""
# JAX's own use of the name is not hidden.
import importlib, jax.experimental.checkify, jax.extend.core
delattr(importlib.import_module("{module}"), "{name}")
import optax, jax.numpy as jnp, optax_lossscale as ols
tx = ols.loss_scaled(optax.sgd(0.5))
@jax.jit
def step(params, state):
    loss, grads = ols.scaled_value_and_grad(lambda x: (x**2).sum(), state)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state
params, state = step(jnp.ones(2), tx.init(jnp.ones(2)))
assert params.tolist() == [0.0, 0.0]
for use in ("autocast", "diagnostics"):
    try:
        getattr(ols, use)
    except ImportError as error:
        assert "need `{module}.{name}`, which JAX" in str(error), error
    else:
        raise AssertionError(use)
""")


def test_importing_the_package_loads_neither_flax_nor_matplotlib_nor_private_names():
    heavy = {"flax", "matplotlib", "sklearn", "tqdm"}
    heavy |= {"optax_lossscale._autocast.jax_internals"}
    run_anew(f"import sys, optax_lossscale; assert not {heavy} & set(sys.modules)")


def test_rules_and_functions_can_be_made_before_jax_starts():
    """As at the top of a module, before `jax.distributed.initialize`."""
    run_anew("""
import jax
import optax
import optax_lossscale as ols
from optax_lossscale import presets

names = [name for name in presets.__all__ if "state_dict" not in name]
rules = [getattr(presets, name)() for name in names if name != "mindspore_fixed"]
rules += [ols.dynamic_loss_scale(), ols.headroom_loss_scale(), ols.no_loss_scale()]
rules += [ols.static_loss_scale(8.0), presets.mindspore_fixed(8.0)]
for rule in rules:
    ols.loss_scaled(optax.adam(1e-3), rule)
ols.scaled_backward(lambda x: x**2, 2.0**10)
jax.config.update("jax_num_cpu_devices", 3)  # An error if JAX has started.
assert jax.device_count() == 3
""")


def test_pickled_states_name_the_package_and_none_of_its_files():
    states = [ols.dynamic_loss_scale().init(), ols.headroom_loss_scale().init()]
    states += [rule().init() for rule in (ols.no_loss_scale, ols.presets.fairseq)]
    keras = {"use_ema": True, "weight_decay": 0.1, "learning_rate": 1.0}
    for tx in (
        ols.loss_scaled(optax.adam(1.0)),
        ols.master_weights(optax.adam(1.0)),
        ols.loss_scale_optimizer(optax.adam(1.0), **keras),
    ):
        states.append(tx.init({"w": jnp.ones(2, jnp.bfloat16)}))
    for state in states:
        pickled = pickle.dumps(state)
        assert not re.search(rb"optax_lossscale\.\w", pickled)
        chex.assert_trees_all_equal(pickle.loads(pickled), state)
