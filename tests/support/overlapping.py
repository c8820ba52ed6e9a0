"""A PyTorch model, trained by one process, and by ranks whose messages overlap with backward and forward passes."""

from typing import Any

import torch

import arrayopt.torch as at
from arrayopt.ranks import Ranks

RULES = {"LAMB": at.LAMB, "AdamW": at.AdamW, "CAME": at.CAME}


class Net(torch.nn.Module):
    """An embedding with a shared weight, layers large enough to be divided, an optional layer, and a layer whose weight
    is used without calling it.
    """

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.embed = torch.nn.Embedding(11, 60)
        self.body = torch.nn.Sequential(torch.nn.Linear(60, 300), torch.nn.Tanh(), torch.nn.Linear(300, 60))
        self.extra = torch.nn.Linear(60, 60)
        self.aside = torch.nn.Linear(60, 60, bias=False)
        for p in self.parameters():
            torch.nn.init.uniform_(p, -0.2, 0.2, generator=made)

    def forward(self, words: torch.Tensor, *, extra: bool = True) -> torch.Tensor:
        x = torch.nn.functional.linear(self.body(self.embed(words)), self.aside.weight)
        return torch.nn.functional.linear(self.extra(x) if extra else x, self.embed.weight)


def groups(net: Net) -> list[dict[str, Any]]:
    named = list(net.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1]},
        {"params": [(n, p) for n, p in named if p.ndim == 1], "lr": 0.02, "weight_decay": 0.0},
    ]


def passes(net: Net, rank: int, step: int, *, extra: bool = True) -> None:
    """Run forward and backward pass on a rank's data of a step."""
    words = torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(100 * step + rank))
    torch.nn.functional.cross_entropy(net(words, extra=extra), words.roll(1)).backward()


def alone(rule: str, ranks: int, steps: int, *, every: int = 1, without: tuple[int, ...] = (), **options: Any) -> Any:
    """Train with one process and the mean gradients of the ranks; return the model and the optimizer."""
    net = Net()
    opt = RULES[rule](groups(net), lr=0.01, **options)
    for step in range(steps):
        found = []
        for rank in range(ranks):
            for k in range(every):
                passes(net, rank, step * every + k, extra=step not in without)
            found.append([p.grad for p in net.parameters()])
            net.zero_grad()
        for p, *grads in zip(net.parameters(), *found, strict=True):
            total = grads[0]
            for g in grads[1:]:
                total = None if total is None else total + g
            p.grad = None if total is None else total / ranks
        opt.step()
        net.zero_grad()
    return net, opt


def together(
    comm: Any,
    rule: str,
    steps: int,
    *,
    every: int = 1,
    without: tuple[int, ...] = (),
    held: bool = False,
    **options: Any,
) -> Any:
    """Train as `alone`, on this rank of several."""
    net, rank = Net(), comm.rank() if callable(comm.rank) else comm.rank  # `rank` is a method of process groups
    opt = RULES[rule](groups(net), lr=0.01, comm=Ranks(comm, grads="mean"), **options)
    for step in range(steps):
        for k in range(every):
            with opt.no_sync() if held and k < every - 1 else torch.enable_grad():
                passes(net, rank, step * every + k, extra=step not in without)
        opt.step()
        if not options.get("overlap") and not options.get("release"):
            opt.zero_grad()
    return net, opt


def unlike(one: Any, other: Any) -> list[str]:
    """The names of parameters and slots that differ."""
    (net, opt), (net_2, opt_2) = one, other
    states = opt.state_dict()["state"], opt_2.state_dict()["state"]
    params = net.state_dict()
    found = [name for name, x in net_2.state_dict().items() if not torch.equal(x, params[name])]
    for key, state in states[0].items():
        found += [f"{key}.{slot}" for slot, x in state.items() if not torch.equal(x, states[1][key][slot])]
    return found


WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "released": {"release": True},
    "at once": {},
    "clipped": {"overlap": True, "clip_norm": 0.05},
    "up": {"overlap": True, "maximize": True},
    "two passes": {"overlap": 2, "every": 2},
    "no_sync": {"overlap": True, "every": 2, "held": True},
    "left out": {"overlap": True, "without": (1, 2)},
}
