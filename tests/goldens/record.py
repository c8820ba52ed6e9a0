"""Records golden trajectories of published optimizers: `python tests/goldens/record.py` writes the files of `CASES`.

It needs optax, timm, schedulefree and pytorch_optimizer, which no test does; nothing here is of `arrayopt`. Files that
were recorded from other systems are not made by it.
"""

import importlib
import json
import sys
import types
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import optax
import pytorch_optimizer
import schedulefree
import torch

FOLDER = Path(__file__).parent
STEPS = 10
SHAPES = {
    "dense.bias": (7,),
    "scalar.w": (),
    "dense.weight": (6, 5),
    "zeros.weight": (3, 4),
    "zerograd.weight": (4, 3),
    "lategrad.weight": (4, 3),
    "tiny.weight": (4, 4),
    "huge.weight": (4, 4),
}
SIZES = {"tiny.weight": 1e-8, "huge.weight": 1e6, "zeros.weight": 0.0}


def problem(seed):
    """First parameters and gradients by name, of values that float32 holds too."""
    rng = np.random.default_rng(seed)

    def drawn(name, size):
        return np.asarray(rng.standard_normal(SHAPES[name]) * size, "float32").astype("float64")

    p0 = {name: drawn(name, SIZES.get(name, 1.0)) for name in SHAPES}
    silent = {"zerograd.weight": STEPS, "lategrad.weight": 3}
    grads = [
        {name: drawn(name, (SIZES.get(name) or 1.0) * (step >= silent.get(name, 0))) for name in SHAPES}
        for step in range(STEPS)
    ]
    return p0, grads


def by_torch(make):
    """What a `torch.optim.Optimizer` makes of a problem; with the points to evaluate at, where there are others."""

    def run(p0, grads):
        params = {name: torch.tensor(p, requires_grad=True) for name, p in p0.items()}
        opt = make(list(params.values()))
        modes = hasattr(opt, "train") and hasattr(opt, "eval")
        if modes:
            opt.train()
        made = []
        for now in grads:
            for name, p in params.items():
                p.grad = torch.tensor(now[name])
            opt.step()
            made.append({name: p.detach().numpy().copy() for name, p in params.items()})
        if not modes:
            return made, None
        opt.eval()
        return made, {name: p.detach().numpy().copy() for name, p in params.items()}

    return run


def by_optax(made, evaluated=None):
    """The same of a `GradientTransformation`; `evaluated` takes its state and the parameters."""

    def run(p0, grads):
        params = {name: jax.numpy.asarray(p) for name, p in p0.items()}
        state, history = made.init(params), []
        for now in grads:
            updates, state = made.update({name: jax.numpy.asarray(g) for name, g in now.items()}, state, params)
            params = optax.apply_updates(params, updates)
            history.append({name: np.asarray(params[name]) for name in p0})
        x = evaluated(state, params) if evaluated else None
        return history, x and {name: np.asarray(x[name]) for name in p0}

    return run


def timms(module):
    """A module of timm.optim, without the package, which wants torchvision."""
    package = types.ModuleType("timm_optim")
    package.__path__ = [str(Path(find_spec("timm").origin).parent / "optim")]
    sys.modules["timm_optim"] = package
    return importlib.import_module(f"timm_optim.{module}")


def alpha_warm(step):
    return 2.0 * jax.numpy.minimum((step + 1) / 4, 1.0)


TORCH = {
    "timm_lion/default": (lambda: timms("lion").Lion, {"lr": 0.01, "weight_decay": 0.1}),
    "po_lion/l2": (
        lambda: pytorch_optimizer.Lion,
        {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "weight_decouple": False},
    ),
    "timm_rmsproptf/default": (lambda: timms("rmsprop_tf").RMSpropTF, {"lr": 0.001, "momentum": 0.9}),
    "timm_rmsproptf/decoupled": (
        lambda: timms("rmsprop_tf").RMSpropTF,
        {"lr": 0.001, "alpha": 0.8, "centered": True, "decoupled_decay": True, "weight_decay": 0.1},
    ),
    "po_radam/standing": (
        lambda: pytorch_optimizer.RAdam,
        {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.1, "weight_decouple": True, "degenerated_to_sgd": False},
    ),
    "timm_adan/default": (lambda: timms("adan").Adan, {"lr": 0.01, "weight_decay": 0.1}),
    "timm_adan/no_prox": (lambda: timms("adan").Adan, {"lr": 0.01, "weight_decay": 0.1, "no_prox": True}),
    "po_adan/default": (lambda: pytorch_optimizer.Adan, {"lr": 0.01, "betas": (0.9, 0.8, 0.95), "weight_decay": 0.1}),
    "po_ademamix/warmup": (
        lambda: pytorch_optimizer.AdEMAMix,
        {"lr": 0.01, "betas": (0.9, 0.99, 0.999), "t_alpha_beta3": 8, "weight_decay": 0.1, "weight_decouple": True},
    ),
    "schedulefree_adamw/default": (lambda: schedulefree.AdamWScheduleFree, {"lr": 0.01}),
    "schedulefree_adamw/warmup": (
        lambda: schedulefree.AdamWScheduleFree,
        {"lr": 0.01, "warmup_steps": 4, "r": 1.0, "weight_lr_power": 1.5, "weight_decay": 0.1, "betas": (0.8, 0.99)},
    ),
    "po_schedulefree/default": (
        lambda: pytorch_optimizer.ScheduleFreeAdamW,
        {"lr": 0.01, "warmup_steps": 4, "weight_decay": 0.1},
    ),
}
OPTAX = {
    "optax_lion/default": ("lion", {"learning_rate": 0.01}),
    "optax_rmsprop/default": ("rmsprop", {"learning_rate": 0.01}),
    "optax_rmsprop/centered": (
        "rmsprop",
        {"learning_rate": 0.01, "centered": True, "momentum": 0.9, "nesterov": True, "initial_scale": 1.0},
    ),
    "optax_rmsprop/corrected": (
        "rmsprop",
        {"learning_rate": 0.01, "eps_in_sqrt": False, "bias_correction": True, "momentum": 0.5},
    ),
    "optax_radam/default": ("radam", {"learning_rate": 0.01}),
    "optax_radam/nesterov": ("radam", {"learning_rate": 0.01, "b2": 0.98, "nesterov": True}),
    "optax_adan/default": ("adan", {"learning_rate": 0.01, "weight_decay": 0.1}),
    "optax_ademamix/default": ("contrib.ademamix", {"learning_rate": 0.01, "weight_decay": 0.1}),
    "optax_ademamix/warmup": ("contrib.ademamix", {"learning_rate": 0.01, "alpha": alpha_warm, "eps_root": 1e-4}),
    "optax_schedulefree/default": ("contrib.schedule_free_adamw", {"learning_rate": 0.01, "weight_decay": 0.1}),
    "optax_schedulefree/warmup": (
        "contrib.schedule_free_adamw",
        {"learning_rate": 0.01, "warmup_steps": 4, "weight_decay": 0.1},
    ),
}
OFTEN = {"lr": 0.01, "betas": (0.9, 0.8), "precondition_frequency": 2, "weight_decay": 0.1}
SOAP = {
    "po_soap/default": ({"lr": 0.01}, True),
    "po_soap/often": (OFTEN | {"shampoo_beta": 0.7}, True),
    "po_soap/one_side": (OFTEN | {"max_precondition_dim": 4, "correct_bias": False}, True),
    "po_soap/float32_qr": (OFTEN, False),
}
"""The options, and whether its QR, which it casts to float32, was asked for float64."""


class Float64:
    """PyTorch, where float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def by_soap(options, wide):
    """As `by_torch`, of pytorch_optimizer's SOAP."""

    def run(p0, grads):
        home = importlib.import_module("pytorch_optimizer.optimizer.soap")
        home.torch = Float64() if wide else torch
        return by_torch(lambda p: pytorch_optimizer.SOAP(p, **options))(p0, grads)

    return run


def runs():
    """Each case: its name, what is run, the options, and the version of what is run."""
    packages = {"timm": "timm", "po": "pytorch_optimizer", "schedulefree": "schedulefree"}
    for case, (kind, options) in TORCH.items():
        said = packages[case.partition("_")[0]]
        yield (
            case,
            by_torch(lambda p, kind=kind, options=options: kind()(p, **options)),
            options,
            f"{said} {version(said)}",
        )
    for case, (path, options) in OPTAX.items():
        make = optax
        for part in path.split("."):
            make = getattr(make, part)
        evaluated = optax.contrib.schedule_free_eval_params if "schedule_free" in path else None
        yield case, by_optax(make(**options), evaluated), options, f"optax {version('optax')}"
    for case, (options, wide) in SOAP.items():
        yield case, by_soap(options, wide), options, f"pytorch_optimizer {version('pytorch_optimizer')}"


def main():
    jax.config.update("jax_enable_x64", True)
    for seed, (case, run, options, said) in enumerate(runs(), 2001):
        p0, grads = problem(seed)
        history, x = run(p0, grads)
        system, _, name = case.partition("/")
        library = "jax" if said.startswith("optax") else "torch"
        meta = {
            "case": name,
            "dtype": "float64",
            "names": list(SHAPES),
            "options": options,
            "oracle": "real",
            "seed": seed,
            "shapes": [list(shape) for shape in SHAPES.values()],
            "steps": STEPS,
            "system": system,
            "version": f"{said}, {library} {version(library)}",
        }

        def flat(tensors):
            return np.concatenate([np.ravel(x) for x in tensors.values()])

        arrays = {"p0": flat(p0), "g": np.stack([*map(flat, grads)]), "p": np.stack([*map(flat, history)])}
        arrays |= {} if x is None else {"x": flat(x)}
        assert all(a.dtype == "float64" for a in arrays.values())
        (FOLDER / system).mkdir(exist_ok=True)
        np.savez_compressed(FOLDER / f"{case}.npz", meta=json.dumps(meta, default=lambda f: f.__name__), **arrays)
        print(case, f"{np.abs(arrays['p'][-1]).max():.3g}")


if __name__ == "__main__":
    main()
