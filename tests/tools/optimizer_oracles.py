"""Compares the formulas of the optimizers with the systems themselves.

    python tests/tools/optimizer_oracles.py

It imports what is installed of Keras (on JAX), tf_keras, PyTorch and MindSpore, and
lets their optimizers take the steps of `tests/other_systems/test_optimizer_rows.py`. It
prints how far their parameters are from those of the formulas, by the largest change of
a parameter. If one is too far, or if none of the systems is installed, the exit code is
1.
"""

import importlib.util
import os
import pathlib
import sys
from functools import partial

os.environ["KERAS_BACKEND"] = "jax"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["TF_USE_LEGACY_KERAS"] = "1"
ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402

from helpers.optimizer_formulas import (  # noqa: E402
    FORMULAS,
    STEPS,
    distance,
    first_weights,
    ftrl,
    gradients,
    run_formula,
    sgd,
    textbook_adam,
    uncorrected_adam,
)

# MindSpore computes in float32, in which 1 - 0.999 is off by 1e-5. The others compute
# in float64, with a learning rate in float32.
TOLERANCE = 2e-5
failures = []

OF_KERAS = FORMULAS["keras"] | {
    "SGD(momentum=0.9, nesterov=True)": partial(sgd, momentum=0.9, nesterov=True),
    "Ftrl(l1_regularization_strength=0.3, l2_regularization_strength=2.0)": partial(
        ftrl, l1=0.3, l2=2.0
    ),
}
OF_TORCH = {
    "SGD(lr=1e-3)": FORMULAS["pytorch"]["optim.SGD"],
    "SGD(lr=0.01, momentum=0.9, nesterov=True)": partial(
        sgd, momentum=0.9, nesterov=True
    ),
    "Adam()": textbook_adam,
    "AdamW(weight_decay=0.01)": partial(textbook_adam, decay=0.01),
}
OF_MINDSPORE = {
    "Momentum(learning_rate=0.01, momentum=0.9)": FORMULAS["mindspore"]["nn.Momentum"],
    "AdamWeightDecay(learning_rate=0.01)": FORMULAS["mindspore"]["nn.AdamWeightDecay"],
    "AdamWeightDecay(learning_rate=0.01, weight_decay=0.1)": partial(
        uncorrected_adam, rate=0.01, decay=0.1
    ),
}


def compare(system, version, formulas, start):
    """Compares one optimizer after the other.

    Args:
      system: What to call it.
      version: Its version.
      formulas: For each call that makes an optimizer, its formula.
      start: Takes such a call. Returns a function that takes a step with some
        gradients, and returns the parameters.
    """
    weights = first_weights()
    for call, formula in formulas.items():
        step = start(call if "(" in call else f"{call}()", weights)
        theirs = [step(grads) for grads in gradients(weights)]
        ours = list(run_formula(formula, weights))
        apart = [distance(theirs[i - 1], ours[i - 1], weights) for i in STEPS]
        shown = " ".join(f"{difference:8.1e}" for difference in apart)
        print(f"{system:9} {version:8} {shown}  {call}")
        if not max(apart) < TOLERANCE:
            failures.append(f"{system} {call}")


def named(values, weights):
    """Copies of the parameters, by their names, as torch changes them in place."""
    copies = [np.array(value, np.float64) for value in values]
    return dict(zip(weights, copies, strict=True))


def run_keras():
    import jax

    jax.config.update("jax_enable_x64", True)
    import keras

    def start(call, weights):
        variables = [keras.Variable(w, dtype="float64") for w in weights.values()]
        optimizer = eval(f"keras.optimizers.{call}", {"keras": keras})

        def step(grads):
            grads = [jax.numpy.float64(grads[name]) for name in weights]
            optimizer.apply(grads, variables)
            return named([variable.numpy() for variable in variables], weights)

        return step

    compare("Keras", keras.__version__, OF_KERAS, start)


def run_tf_keras():
    import tensorflow as tf
    import tf_keras

    def start(call, weights):
        variables = [tf.Variable(np.float64(w)) for w in weights.values()]
        optimizer = eval(f"tf_keras.optimizers.{call}", {"tf_keras": tf_keras})

        def step(grads):
            grads = [tf.constant(np.float64(grads[name])) for name in weights]
            optimizer.apply_gradients(zip(grads, variables, strict=True))
            return named([variable.numpy() for variable in variables], weights)

        return step

    has = {  # Its Lion has another learning rate than Keras 3's.
        call.replace("Lion", "Lion(learning_rate=1e-3)"): formula
        for call, formula in OF_KERAS.items()
        if hasattr(tf_keras.optimizers, call.partition("(")[0])
    }
    compare("tf_keras", tf_keras.__version__, has, start)


def make_with(module, call, params):
    """Calls an optimizer of a module with its parameters in first place."""
    kind, _, arguments = call.partition("(")
    names = {"make": getattr(module, kind), "params": params}
    return eval(f"make(params, {arguments}", names)


def run_torch():
    import torch

    def start(call, weights):
        params = [torch.tensor(np.float64(w)) for w in weights.values()]
        optimizer = make_with(torch.optim, call, params)

        def step(grads):
            for param, name in zip(params, weights, strict=True):
                param.grad = torch.tensor(np.float64(grads[name]))
            optimizer.step()
            return named([param.numpy() for param in params], weights)

        return step

    compare("torch", torch.__version__, OF_TORCH, start)


def run_mindspore():
    import mindspore as ms

    def start(call, weights):
        params = [ms.Parameter(ms.Tensor(w), name=name) for name, w in weights.items()]
        optimizer = make_with(ms.nn, call, params)

        def step(grads):
            optimizer(tuple(ms.Tensor(grads[name]) for name in weights))
            return named([param.asnumpy() for param in params], weights)

        return step

    compare("MindSpore", ms.__version__, OF_MINDSPORE, start)


# What each of them needs, and what it runs.
RUNS = {
    "Keras": (["keras", "jax"], run_keras),
    "tf_keras": (["tf_keras", "tensorflow"], run_tf_keras),
    "torch": (["torch"], run_torch),
    "MindSpore": (["mindspore"], run_mindspore),
}

if __name__ == "__main__":
    print(f"{'system':9} {'version':8} {'5 steps':>8} {'30 steps':>8}  optimizer")
    absent = []
    for name, (modules, run) in RUNS.items():
        if all(map(importlib.util.find_spec, modules)):
            run()
        else:
            absent.append(name)
    print("not installed:", ", ".join(absent) or "none")
    print("differs:", ", ".join(failures) or "nothing")
    sys.exit(bool(failures) or len(absent) == len(RUNS))
