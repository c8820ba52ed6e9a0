"""Contestants alone in a process: their first steps, with empty and filled caches, and steps with other settings.

python -m benchmarks.alone LAMB resnet-50 "arrayopt cpp"      # one contestant; prints seconds as JSON
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from benchmarks import apart, ours, peers_jax, peers_torch
from benchmarks.contest import Contestant, race
from benchmarks.problems import PROBLEMS, Problem
from benchmarks.results import Sheet, reasons

__all__ = ["first_steps", "main", "settings"]

TINY = Problem("tiny", "one tensor", ((2, 2),))
ONE_CORE = "one core"


def entered(rule: str, problem: Problem) -> list[Contestant]:
    """Who can take part."""
    made = [*ours.contestants(rule, problem), *peers_torch.contestants(rule, problem)]
    return [c for c in [*made, *peers_jax.contestants(rule, problem)] if not c.left_out]


def first_steps(rules: Sequence[str], problem: Problem, say: Callable[[str], object]) -> Sheet:
    """Construction and the first step, in seconds: with an empty cache, and again with what that has left there. The
    latter is the median of three processes.
    """
    lines, left_out = [], {}
    for rule in rules:
        say(f"first steps of {rule}")
        for contestant in entered(rule, problem):
            with tempfile.TemporaryDirectory() as folder:
                env = {"ARRAYOPT_CACHE_DIR": folder, "ARRAYOPT_QUIET": "1", "JAX_COMPILATION_CACHE_DIR": folder}
                env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
                env |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
                try:
                    cold, *warm = (_told(rule, problem, contestant.name, 0, env)["first"] for _ in range(4))
                except RuntimeError as error:
                    left_out[f"{rule} of {contestant.name}"] = str(error)
                    continue
            lines.append((rule, contestant.name, f"{cold:.2f}", f"{statistics.median(warm):.2f}"))
    title = f"First steps: {problem.title}"
    columns = ("rule", "contestant", "s, empty cache", "s, filled cache")
    return Sheet(title, columns, lines, names=2, notes=reasons(left_out))


def settings(rule: str, problems: Sequence[Problem], say: Callable[[str], object], turns: int = 3) -> Sheet:
    """Steps of contestants that are alone in a process, in turns, for settings that a process has from its start."""
    lines, left_out = [], {}
    for problem in problems:
        say(f"{rule} over {problem.title}, each alone")
        names = {c.name for c in entered(rule, problem)}
        tried = [(ours.REFERENCE, "", {})]
        tried += [("torch fused", f"waiting threads {x}", {"OMP_WAIT_POLICY": x}) for x in ("passive", "active")]
        tried += [("optax", "all cores", {}), ("optax", ONE_CORE, {})]
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for _ in range(turns):
            for name, setting, env in tried:
                if name not in names:
                    continue
                try:
                    told = _told(rule, problem, name, 20, env, one_core=setting == ONE_CORE)
                except RuntimeError as error:
                    left_out[f"{name} over {problem.title}"] = str(error)
                    names.remove(name)
                    continue
                found.setdefault((name, setting), []).append(told)
        first = next(iter(found.values()), [])
        for (name, setting), each in found.items():
            ratios = [told["step"] / beside["step"] for told, beside in zip(each, first, strict=False)]
            middle = sorted(each, key=lambda told: told["step"])[len(each) // 2]
            shown = ", ".join(x for x in (name, setting, middle["setting"]) if x)
            lines.append((problem.title, shown, f"{1e3 * middle['step']:.2f}", f"{statistics.median(ratios):.2f}"))
    columns = ("shapes", "contestant", "ms", "ratio")
    return Sheet(f"Each alone in a process: {rule}", columns, lines, names=2, notes=reasons(left_out))


def _told(rule: str, problem: Problem, name: str, rounds: int, env: dict[str, str], *, one_core: bool = False) -> Any:
    """What a process says of one contestant."""
    arguments = ["benchmarks.alone", rule, problem.name, name, f"--rounds={rounds}"]
    return json.loads("".join(apart.run([*arguments, *(["--one-core"] if one_core else [])], env)))


def one(rule: str, problem: Problem, name: str, rounds: int) -> dict[str, Any]:
    """Seconds of a contestant's first step, or of later ones at its best setting."""
    problem.grads  # noqa: B018  made before anything is timed
    (contestant,) = (c for c in entered(rule, problem) if c.name == name)
    if rounds:
        times = race([contestant], rounds=rounds, warmup=2, seconds=4.0)
        return {"step": statistics.median(x[name] for x in times.rounds), "setting": times.settings.get(name, "")}
    if not name.startswith("arrayopt"):  # the imports of others are not part of their steps
        (other,) = (c for c in entered(rule, TINY) if c.name == name)
        other.build().step()

    began = time.perf_counter()
    contestant.build().step()
    return {"first": time.perf_counter() - began}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what one contestant takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rule", choices=[*ours.RULES, *ours.MORE])
    parser.add_argument("problem", choices=list(PROBLEMS))
    parser.add_argument("name")
    parser.add_argument("--rounds", type=int, default=0, help="time so many later steps instead of the first")
    parser.add_argument("--one-core", action="store_true", help="leave the process one core")
    given = parser.parse_args(arguments)
    if given.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.stdout.write(json.dumps(one(given.rule, PROBLEMS[given.problem], given.name, given.rounds)) + "\n")


if __name__ == "__main__":
    main()
