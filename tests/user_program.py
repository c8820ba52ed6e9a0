"""A user's program over all doors, for type checkers: `tests/test_typing.py` gives it to mypy and pyright."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
import torch

import arrayopt as ao
import arrayopt.optax as aox
import arrayopt.torch as aot
from arrayopt.schedules import Cosine, Join, Warmup

Floats = npt.NDArray[np.float64]


def arrays() -> float:
    """The optimizer, its groups, statistics and files."""
    params = {"weight": np.ones((3, 2)), "bias": np.zeros(2)}
    lr = Join([Warmup(0.1, 10), Cosine(0.1, 90)], [10])
    rule = ao.LAMB(lr=lr, weight_decay=0.1, state_dtype="int8")
    opt = ao.Optimizer(params, rule, groups={"bias": {"weight_decay": 0.0}}, clip_norm=1.0, stats=True)
    monitor = ao.Monitor(opt, every=2)
    for _ in range(10):
        params = opt.step({name: p - 3.0 for name, p in params.items()})
    opt.lr = 0.01
    opt.groups[0].lr = 0.02
    opt.save("run.safetensors")
    ratio: float = opt.stats.read()["weight"]["trust_ratio"]
    rows = monitor.read()
    text: str = opt.explain()
    return ratio + len(rows) + len(text) + opt.step_count


def minimized() -> Floats:
    """The solver."""

    def f(x: Floats) -> tuple[float, Floats]:
        return float((x**2).sum()), 2 * x

    found = ao.minimize(f, np.ones(3), project=ao.projections.box(0, 1), progress=True)
    assert found.converged
    best: Floats = found.params
    return best


def functional() -> int:
    """The pure form."""
    rule = ao.AdamW(lr=0.1)
    params = {"w": np.ones(3)}
    state = ao.init(rule, params)
    params, state = ao.update(rule, params, {"w": np.ones(3)}, state)
    return int(state["step"])


def in_torch() -> torch.Tensor:
    """The door to PyTorch, as a torch.optim.Optimizer."""
    model = torch.nn.Linear(3, 2)
    opt: torch.optim.Optimizer = aot.LAMB(model.parameters(), lr=0.1, betas=(0.9, 0.99))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)
    loss = model(torch.ones(4, 3)).square().mean()
    loss.backward()
    opt.step()
    scheduler.step()
    split = aot.split(model, matrices=ao.Muon(lr=0.02), rest=ao.AdamW(lr=1e-3))
    split.zero_grad()
    state = ao.to_torch(ao.Optimizer([torch.ones(3)], ao.AdamW()))
    assert "state" in state
    return torch.as_tensor(loss)


def in_optax() -> dict[str, jax.Array]:
    """The door to optax."""
    params = {"w": jnp.ones((3, 2))}
    tx = optax.chain(aox.lamb(0.1, weight_decay=0.01), aox.transformation(ao.CAME(lr=0.1)))
    updates, _ = tx.update(params, tx.init(params), params)
    return {"w": optax.tree.add(params, updates)["w"]}
