"""`split`: one optimizer with one rule for the matrices of a model, and another for all other parameters."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module

from arrayopt.rules.base import Rule
from arrayopt.torch.base import Optimizer
from arrayopt.torch.make import optimizer
from arrayopt.torch.settings import OPTIONS


def split(
    model: Module,
    *,
    matrices: Rule,
    rest: Rule,
    exclude: Sequence[str] = (),
    **options: Any,
) -> Optimizer:
    """An optimizer with two groups: the matrices of a model under one rule, and the rest under another.

    Parameters
    ----------
    model : torch.nn.Module
        The model. All its parameters that require gradients are optimized. Shard or wrap the model before.
    matrices : Rule
        The rule for tensors with two axes or more, such as ``Muon(lr=0.02)``.
    rest : Rule
        The rule for vectors, embeddings (the weights of `torch.nn.Embedding` and `torch.nn.EmbeddingBag`) and excluded
        parameters, such as ``AdamW(lr=3e-4)``.
    exclude : sequence of str, default ()
        Patterns (with ``*`` and ``?``) of parameters that do not count as matrices, such as output layers. A pattern
        matches a whole name, or one part of it between dots.
    **options
        Options of the optimizer, such as ``clip_norm=1.0``, ``stats=True`` or ``release=True``; see
        `arrayopt.torch.optimizer`.

    Returns
    -------
    Optimizer
        An optimizer of the class of `rest`. Its first group has the matrices.

    Raises
    ------
    TypeError
        If an argument has the wrong type, or is not an option.
    ValueError
        If a pattern matches no parameter, or a group would be empty.

    Examples
    --------
    >>> import torch, arrayopt as ao
    >>> from arrayopt.torch import split
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    >>> opt = split(model, matrices=ao.Muon(lr=0.02), rest=ao.AdamW(lr=3e-4), exclude=["1"])
    >>> [group["param_names"] for group in opt.param_groups]
    [['0.weight'], ['0.bias', '1.weight', '1.bias']]
    """
    if not isinstance(model, Module):
        raise TypeError(f"split: `model` must be a torch.nn.Module; got {type(model).__name__}")
    for name, rule in (("matrices", matrices), ("rest", rest)):
        if not isinstance(rule, Rule):
            raise TypeError(f"split: `{name}` must be a rule, such as Muon(lr=0.02); got {rule!r}")
    if isinstance(exclude, str):
        raise TypeError(f"split: `exclude` must be a sequence of patterns, such as [{exclude!r}]; got {exclude!r}")
    if strange := [name for name in options if name not in OPTIONS]:
        raise TypeError(
            f"split: options must be of {', '.join(OPTIONS)}; got {strange[0]!r}; set fields in `matrices` and `rest`"
        )
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unused = [pattern for pattern in exclude if not any(_fits(name, pattern) for name, _ in named)]
    if unused:
        raise ValueError(
            f"split: each pattern of `exclude` must match a parameter; {unused} match none of"
            f" {[name for name, _ in named]}"
        )
    tables = {module.weight for module in model.modules() if isinstance(module, Embedding | EmbeddingBag)}
    of_matrices, remaining = list[tuple[str, Tensor]](), list[tuple[str, Tensor]]()
    for name, p in named:
        is_matrix = p.ndim >= 2 and p not in tables and not any(_fits(name, x) for x in exclude)
        (of_matrices if is_matrix else remaining).append((name, p))
    if not of_matrices or not remaining:
        what = "no matrix" if not of_matrices else "nothing but matrices"
        raise ValueError(f"split: there is {what} among {[name for name, _ in named]}; one rule is enough for these")
    groups = [{"params": of_matrices, "rule": matrices}, {"params": remaining, "rule": rest}]
    return optimizer(type(rest))(groups, **options)


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern matches a parameter's name, or a part of it between dots."""
    return any(fnmatchcase(part, pattern) for part in (name, *name.split(".")))
