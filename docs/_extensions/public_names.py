"""Which names are public: those of the API reference, its links and its tests."""

import importlib

MODULES = [
    "optax_lossscale",
    "optax_lossscale.presets",
    "optax_lossscale.diagnostics",
    "optax_lossscale.plotting",
    "optax_lossscale.compat.flax",
]


def public_paths() -> list[str]:
    """Every public name with its module, such as `optax_lossscale.loss_scaled`."""
    return [
        f"{module}.{name}"
        for module in MODULES
        for name in importlib.import_module(module).__all__
    ]
