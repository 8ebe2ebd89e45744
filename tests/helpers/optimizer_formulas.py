"""The update rules of other systems' optimizers in NumPy, and how to compare with them.

NumPy is all that this file needs, so that it can be imported beside any other system.
"""

import collections
from functools import partial

import numpy as np

STEPS = (5, 30)  # After these many steps the parameters are compared.
SHAPES = {"kernel": (4, 6), "tall": (5, 3), "bias": (6,)}


def first_weights(shapes=SHAPES):
    rng = np.random.default_rng(44)
    return {
        name: np.float32(rng.uniform(-0.1, 0.1, shape))
        for name, shape in shapes.items()
    }


def gradients(weights):
    """Random ones, which change their signs, and their sizes from about 1e-5 to 3."""
    rng = np.random.default_rng(4)
    for _ in range(max(STEPS)):
        yield {
            name: np.float32(
                rng.normal(size=weight.shape) * 10 ** rng.uniform(-3, 0, weight.shape)
            )
            for name, weight in weights.items()
        }


# Each step takes a parameter, its gradient, what it keeps (which starts at zero) and
# the number of the step, from 1 on, and returns the new parameter. Numbers are float64.


def sgd(w, g, kept, t, rate=0.01, momentum=0.0, nesterov=False):
    kept["velocity"] = momentum * kept["velocity"] + g
    step = g + momentum * kept["velocity"] if nesterov else kept["velocity"]
    return w - rate * step


def moments(g, kept, b1, b2):
    kept["m"] = b1 * kept["m"] + (1 - b1) * g
    kept["v"] = b2 * kept["v"] + (1 - b2) * g**2
    return kept["m"], kept["v"]


def keras_adam(w, g, kept, t, rate=1e-3, decay=0.0, amsgrad=False):
    m, v = moments(g, kept, 0.9, 0.999)
    if amsgrad:
        kept["largest"] = v = np.maximum(kept["largest"], v)
    alpha = rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - rate * decay * w - alpha * m / (np.sqrt(v) + 1e-7)


def textbook_adam(w, g, kept, t, rate=1e-3, decay=0.0, eps=1e-8):
    m, v = moments(g, kept, 0.9, 0.999)
    direction = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + eps)
    return w - rate * decay * w - rate * direction


def uncorrected_adam(w, g, kept, t, rate=1e-3, decay=0.0):
    m, v = moments(g, kept, 0.9, 0.999)
    return w - rate * (m / (np.sqrt(v) + 1e-6) + decay * w)


def keras_adamax(w, g, kept, t):
    kept["m"] = 0.9 * kept["m"] + 0.1 * g
    kept["u"] = np.maximum(0.999 * kept["u"], abs(g))
    return w - 1e-3 * kept["m"] / ((1 - 0.9**t) * (kept["u"] + 1e-7))


def keras_nadam(w, g, kept, t):
    now, following = (0.9 * (1 - 0.5 * 0.96**i) for i in (t, t + 1))
    kept["product"] = product = now * (1 if t == 1 else kept["product"])
    m, v = moments(g, kept, 0.9, 0.999)
    ahead = following * m / (1 - product * following) + (1 - now) * g / (1 - product)
    return w - 1e-3 * ahead / (np.sqrt(v / (1 - 0.999**t)) + 1e-7)


def adagrad(w, g, kept, t):
    kept["sum"] = (0.1 if t == 1 else kept["sum"]) + g**2
    return w - 1e-3 * g / np.sqrt(kept["sum"] + 1e-7)


def adadelta(w, g, kept, t):
    kept["grads"] = 0.95 * kept["grads"] + 0.05 * g**2
    step = np.sqrt((kept["steps"] + 1e-7) / (kept["grads"] + 1e-7)) * g
    kept["steps"] = 0.95 * kept["steps"] + 0.05 * step**2
    return w - 1e-3 * step


def rmsprop(w, g, kept, t):
    kept["v"] = 0.9 * kept["v"] + 0.1 * g**2
    return w - 1e-3 * g / np.sqrt(kept["v"] + 1e-7)


def lion(w, g, kept, t):
    sign = np.sign(0.9 * kept["m"] + 0.1 * g)
    kept["m"] = 0.99 * kept["m"] + 0.01 * g
    return w - 1e-3 * sign


def lamb(w, g, kept, t):
    direction = -textbook_adam(0.0, g, kept, t, rate=1.0, eps=1e-7)
    return w - 1e-3 * np.linalg.norm(w) / np.linalg.norm(direction) * direction


def ftrl(w, g, kept, t, l1=0.0, l2=0.0):
    before = 0.1 if t == 1 else kept["sum"]
    kept["sum"] = before + g**2
    root = np.sqrt(kept["sum"]) / 1e-3
    kept["linear"] += g - (root - np.sqrt(before) / 1e-3) * w
    clipped = np.clip(kept["linear"], -l1, l1)
    return (clipped - kept["linear"]) / (root + 2 * l2)


def root_mean_square(x):
    return np.sqrt((x**2).mean())


def adafactor(w, g, kept, t):
    beta, square = 1 - t**-0.8, g**2 + 1e-30
    if w.ndim < 2:
        kept["v"] = v = beta * kept["v"] + (1 - beta) * square
    else:
        kept["r"] = r = beta * kept["r"] + (1 - beta) * square.mean(-1)
        kept["c"] = c = beta * kept["c"] + (1 - beta) * square.mean(-2)
        r = r / r.mean(-1, keepdims=True)
        v = r[..., :, None] * c[..., None, :]
    step = g / np.sqrt(v)
    step = step / max(1, root_mean_square(step))
    rate = min(1e-3, t**-0.5)
    return w - rate * max(1e-3, root_mean_square(w)) * step


def keras_muon(w, g, kept, t):
    if w.ndim != 2:
        return keras_adam(w, g, kept, t, decay=0.004)
    kept["m"] = 0.95 * kept["m"] + g
    is_tall = len(g) > g.shape[1]
    x = g + 0.95 * kept["m"]
    x = x.T if is_tall else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    x = x.T if is_tall else x
    return w - 1e-3 * (0.004 * w + 0.2 * np.sqrt(max(g.shape)) * x)


# By page, and by the first name of a row in the tables there. For Keras these are also
# the calls, with all defaults of version 3.15.
FORMULAS = {
    "keras": {
        "Adadelta": adadelta,
        "Adafactor": adafactor,
        "Adagrad": adagrad,
        "Adam": keras_adam,
        "Adam(amsgrad=True)": partial(keras_adam, amsgrad=True),
        "AdamW": partial(keras_adam, decay=0.004),
        "Adamax": keras_adamax,
        "Ftrl": ftrl,
        "Lamb": lamb,
        "Lion": lion,
        "Muon": keras_muon,
        "Nadam": keras_nadam,
        "RMSprop": rmsprop,
        "SGD": sgd,
        "SGD(momentum=0.9)": partial(sgd, momentum=0.9),
    },
    "mindspore": {
        "nn.Momentum": partial(sgd, momentum=0.9),
        "nn.AdamWeightDecay": partial(uncorrected_adam, rate=0.01),
    },
    "pytorch": {"optim.SGD": partial(sgd, rate=1e-3)},
}


def run_formula(step, weights):
    """Yields the parameters after each step of a formula, in float64."""
    kept = {name: collections.defaultdict(float) for name in weights}
    for t, grads in enumerate(gradients(weights), 1):
        weights = {
            name: step(np.float64(weight), np.float64(grads[name]), kept[name], t)
            for name, weight in weights.items()
        }
        yield weights


def distance(params, expected, start):
    """The largest difference, by the largest change of a parameter."""
    apart, moved = (
        max(np.abs(a[name] - b[name]).max() for name in start)
        for a, b in ((params, expected), (expected, start))
    )
    return apart / moved
