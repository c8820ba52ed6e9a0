"""``arrayopt explain``: show how a rule would run on tensors of some shapes."""

import argparse
import sys
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

import arrayopt as ao
from arrayopt.arrays import WORKING
from arrayopt.cli.arguments import assignment, listed, make_rule, rule_class, shape
from arrayopt.engines.bucketing import bucketed, explain_buckets
from arrayopt.engines.registry import ENGINES
from arrayopt.libraries import UnavailableError, numpy_dtype
from arrayopt.params.groups import Group
from arrayopt.state.run import Run
from arrayopt.state.tensors import Tensor

SHAPES = ((768, 3072), (3072,))
"""The default shapes."""


def add(commands: Any) -> None:
    """Add the parser of the command."""
    explain = commands.add_parser(
        "explain",
        help="show how a rule is run: passes over memory, bytes, generated code",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print what Optimizer.explain() says of NumPy arrays of some shapes. Nothing of\n"
        "their size is allocated.",
        epilog="examples:\n  arrayopt explain LAMB --shapes 768x3072,3072\n"
        "  arrayopt explain CAME --dtype bfloat16 --set weight_decay=0.1 --source\n"
        "  arrayopt explain mymodule:MyRule --engine array_api",
    )
    explain.add_argument("rule", type=rule_class, metavar="RULE", help="LAMB, AdamW, ..., or yours as module:Class")
    explain.add_argument(
        "--shapes",
        type=listed(shape),
        metavar="SHAPE,...",
        help="such as 768x3072,3072,scalar (default: 768x3072,3072, as far as the rule takes them)",
    )
    explain.add_argument(
        "--dtype", choices=WORKING, default="float32", metavar="DTYPE", help="of parameters (default: %(default)s)"
    )
    explain.add_argument(
        "--engine", choices=("auto", *ENGINES), default="auto", metavar="ENGINE", help="default: what is chosen"
    )
    explain.add_argument(
        "--set",
        type=assignment,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="hyper-parameters and switches of the rule; a number without default is 0.1",
    )
    explain.add_argument("--source", action="store_true", help="print the generated code as well")
    explain.set_defaults(run=run, parser=explain)


def run(given: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    try:
        rule = make_rule(given.rule, dict(given.set))
        given.shapes = given.shapes or [x for x in SHAPES if not rule.refuses(np, np.broadcast_to(0.0, x))]
        one = np.zeros((), numpy_dtype(given.dtype))  # arrays of all shapes are views of it, so they need no memory
        arrays = [as_strided(one, x, (0,) * len(x)) for x in given.shapes]
        tensors = [Tensor(str(i), x) for i, x in enumerate(arrays)]
        for tensor in tensors:
            if reason := rule.refuses(np, tensor.array):
                raise ValueError(f"{type(rule).__name__}: a tensor of shape {tensor.shape} {reason}")
        buckets = bucketed([Group("all", rule, {}, tensors)], Run())
        text = explain_buckets(buckets, given.engine)
        if given.source:
            ranks = sorted({len(x) for x in given.shapes})
            chosen = {} if given.engine == "auto" else {"engine": given.engine}
            text = "\n\n".join([text, *(ao.source(rule, dtype=given.dtype, rank=rank, **chosen) for rank in ranks)])
    except (TypeError, ValueError, UnavailableError) as error:
        given.parser.error(" ".join(str(error).split()))
    sys.stdout.write(f"{text.rstrip()}\n")
    return 0
