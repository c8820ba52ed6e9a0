"""The benchmark on a GPU: ``python benchmarks/gpu.py --help``. It needs CuPy; PyTorch and apex take part if installed.

In float32 apex's form of AdamW and LAMB takes part without apex: `benchmarks.apex_form`. Results are written as they
come.

All contestants of a rule take turns, and a copy within the device's memory with them, on one stream. The device's time
is between two events; the host's is until it has handed its work over.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this folder

import tests.support.bundled  # noqa: E402, F401

# isort: split
import arrayopt as ao  # noqa: E402
from arrayopt.fusion.plans import plan_for  # noqa: E402
from arrayopt.params.headers import cupy_words  # noqa: E402
from benchmarks.gpu_contestants import RULES, Step, captured, copying, eager, on, peers, pytorch  # noqa: E402
from benchmarks.problems import LARGE, PROBLEMS, Problem, equal  # noqa: E402

COPY, EAGER, CAPTURED, REPLAYED = "copy", "arrayopt eager", "arrayopt captured", "arrayopt, the graph alone"
STEPS, LEAST, MOST = 5, 3, 30
"""Steps between two events; how many rounds there are at least and at most."""

HELD = 130.0
"""Bytes for each parameter that all contestants of a rule hold together, about."""


def _llama(layers: int = 16, d: int = 2048, inner: int = 5632, words: int = 32000) -> tuple[tuple[int, ...], ...]:
    layer = ((d, d), (d // 4, d), (d // 4, d), (d, d), (inner, d), (inner, d), (d, inner), (d,), (d,))
    return ((words, d), *layer * layers, (d,), (words, d))


CASES = {
    "many": equal(10_000, (64,)),
    "bert-base": PROBLEMS["bert-base"],
    "bert-large": LARGE[0],
    "llama": Problem("llama", "Llama-like, 0.8 B", _llama()),
    "tiny": Problem("tiny", "tiny", ((30, 70), (70,), (5, 4, 3, 3))),
}


def chosen(free: float) -> list[str]:
    """The cases for a device with so many bytes free: many small tensors, and the two largest models that fit."""
    fit = [name for name in ("bert-base", "bert-large", "llama") if CASES[name].elements * HELD <= free]
    return ["many", *fit[-2:]]


def bytes_per_parameter(rule: str, case: Problem, dtype: str) -> float:
    """What the plans move, weighted by size."""
    moved = sum(math.prod(s) * plan_for(RULES[rule], len(s), dtype).bytes_per_parameter() for s in case.shapes)
    return moved / case.elements


def race(rule: str, case: Problem, dtype: str, seconds: float) -> dict[str, Any]:
    """One rule over one case: all contestants in turns for about so many seconds."""
    import cupy

    stream, until = cupy.cuda.Stream(), time.perf_counter() + seconds
    left_out: dict[str, str] = {}
    with on(stream):
        copy, copied = copying(case)
        running = {COPY: copy}
        builds: dict[str, Callable[[], Step]] = {
            EAGER: lambda: eager(rule, case, dtype),
            CAPTURED: lambda: captured(rule, case, dtype, stream),
            REPLAYED: lambda: captured(rule, case, dtype, stream, alone=True),
        }
        for name, build in (builds | peers(rule, case, dtype)).items():
            module = name.split()[0]
            try:
                if module in ("torch", "apex") and find_spec(module) is None:
                    raise ModuleNotFoundError(f"{module} is not installed")
                step = build()
                step()
                stream.synchronize()
                running[name] = step
            except Exception as error:  # what cannot be built, or makes no step, is left out, whatever it says
                left_out[name] = _said(error)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in running}
        for turn in range(MOST):
            if turn >= LEAST and time.perf_counter() > until:
                break
            for name, step in running.items():
                times[name].append(_timed(step, stream))
    found = {
        name: {
            "ms": median(x for x, _ in each),
            "least_ms": min(x for x, _ in each),
            "most_ms": max(x for x, _ in each),
            "host_ms": median(x for _, x in each),
        }
        for name, each in times.items()
    }
    return {
        "rule": rule,
        "case": case.title,
        "dtype": dtype,
        "parameters": case.elements,
        "rounds": len(times[COPY]),
        "plan_bytes_per_parameter": bytes_per_parameter(rule, case, dtype),
        "copy_bytes": copied,
        "times": found,
        "left_out": left_out,
    }


def _said(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _timed(step: Step, stream: Any) -> tuple[float, float]:
    """Milliseconds of a step on the device, and on the host."""
    import cupy

    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    stream.synchronize()
    began = time.perf_counter()
    first.record(stream)
    for _ in range(STEPS):
        step()
    last.record(stream)
    handed = time.perf_counter() - began
    last.synchronize()
    return cupy.cuda.get_elapsed_time(first, last) / STEPS, handed * 1e3 / STEPS


def table(result: dict[str, Any]) -> list[str]:
    """One result in Markdown."""
    n, times = result["parameters"], result["times"]
    speed = result["copy_bytes"] / max(times[COPY]["ms"], 1e-9) * 1e3
    lines = [f"### {result['rule']}, {result['case']}, {result['dtype']} ({n / 1e6:.1f} M parameters)", ""]
    lines += [
        "| contestant | ms | least to most | host ms | ratio | B/param at copy speed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, t in times.items():
        if name != COPY:
            cells = f"{t['ms']:.3f} | {t['least_ms']:.3f} to {t['most_ms']:.3f} | {t['host_ms']:.3f}"
            ratio = t["ms"] / max(times[EAGER]["ms"], 1e-9) if EAGER in times else math.nan
            lines.append(f"| {name} | {cells} | {ratio:.2f} | {t['ms'] / 1e3 * speed / n:.1f} |")
    plan = result["plan_bytes_per_parameter"]
    lines += ["", f"Copy: {speed / 1e9:.0f} GB/s read and written. The plan moves {plan:.1f} bytes per parameter."]
    return [*lines, *(f"Left out: {name} ({why})." for name, why in result["left_out"].items()), ""]


def calls(rounds: int = 200) -> dict[str, float]:
    """Microseconds of the host for each kind of call that a step consists of, while the device is idle."""
    import cupy

    from arrayopt.engines.cuda.upload import Upload

    module = cupy.RawModule(code='extern "C" __global__ void nothing(const float* x) {}', options=("-std=c++17",))
    kernel, x = module.get_function("nothing"), cupy.zeros(64, np.float32)
    stream, event = cupy.cuda.Stream(), cupy.cuda.Event()
    upload = Upload((64,), np.float64)
    values = np.zeros(64)
    with stream:
        kernel((1,), (32,), (x,))
        stream.begin_capture()
        kernel((1,), (32,), (x,))
        graph = stream.end_capture()
        tried: dict[str, Callable[[], object]] = {
            "the current stream": cupy.cuda.get_current_stream,
            "whether it is captured": stream.is_capturing,
            "to record an event": partial(event.record, stream),
            "whether an event is done": lambda: event.done,
            "to send a table": lambda: upload.send(values),
            "to launch a kernel": lambda: kernel((1,), (32,), (x,)),
            "to launch a graph of one kernel": lambda: graph.launch(stream),
        }
        found = {}
        for name, call in tried.items():
            times = []
            for _ in range(rounds):
                stream.synchronize()
                began = time.perf_counter()
                call()
                times.append((time.perf_counter() - began) * 1e6)
            found[name] = median(times)
    return found


def about() -> dict[str, Any]:
    """What a run was made on."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return {
        "device": properties["name"].decode(),
        "cupy": cupy.__version__,
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "torch": pytorch().__version__ if find_spec("torch") else None,
        "headers": cupy_words(cupy.ndarray) is not None,
        "arrayopt": ao.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "steps": STEPS,
    }


def write(folder: Path, made: dict[str, Any], lines: list[str]) -> str:
    """Write what there is, and return it as text."""
    head = [f"# On {made['device']}", "", f"CuPy {made['cupy']}, PyTorch {made['torch']}, {made['date']}; medians.", ""]
    text = "\n".join([*head, *lines, *made["left_out"]]) + "\n"
    (folder / "gpu.json").write_text(json.dumps(made, indent=1) + "\n", "utf-8")
    (folder / "gpu.md").write_text(text, "utf-8")
    return text


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit status is 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", default="LAMB,AdamW,LANS,CAME,SGD,LAMB int8,AdamW int8,CAME int8")
    parser.add_argument("--cases", help=f"of {', '.join(CASES)}; those that fit into the device's memory, if not given")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--seconds", type=float, default=200.0, help="for all together (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("gpu"), help="folder of gpu.json and gpu.md")
    parser.add_argument("--standin", action="store_true", help="try it out without a GPU; its figures mean nothing")
    given = parser.parse_args(arguments)
    if given.standin:
        from tests.cudacpu import standin

        standin.install()
        given.rules, given.cases, given.dtypes, given.seconds = "LAMB,AdamW", "tiny", "float32", 0.0
    try:
        import cupy
    except ImportError:
        sys.stderr.write("benchmarks/gpu.py: CuPy is not installed\n")
        return 2
    if not cupy.cuda.is_available():
        sys.stderr.write("benchmarks/gpu.py: CuPy finds no CUDA device\n")
        return 2
    names = given.cases.split(",") if given.cases else chosen(0.8 * cupy.cuda.Device().mem_info[0])
    runs = [(r, c, d) for d in given.dtypes.split(",") for r in given.rules.split(",") for c in names]
    made, lines = about() | {"results": [], "left_out": []}, []
    try:
        made["calls"] = calls()
        lines += [
            "Microseconds of the host for " + "; ".join(f"{name}: {x:.1f}" for name, x in made["calls"].items()) + ".",
            "",
        ]
    except Exception as error:
        made["left_out"].append(f"the times of calls: {_said(error)}")
    given.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for i, (rule, name, dtype) in enumerate(runs):
        if time.perf_counter() - began > 2 * given.seconds and not given.standin:
            made["left_out"].append(f"{rule}, {CASES[name].title}, {dtype}: time was over")
            continue
        if dtype != "float32" and find_spec("torch") is None:
            made["left_out"].append(f"{rule}, {CASES[name].title}, {dtype}: PyTorch is not installed")
            continue
        sys.stderr.write(f"{i + 1}/{len(runs)} {rule}, {CASES[name].title}, {dtype}\n")
        try:
            made["results"].append(race(rule, CASES[name], dtype, given.seconds / len(runs)))
            lines += table(made["results"][-1])
        except Exception as error:  # the next may go, and what there is stays
            made["left_out"].append(f"{rule}, {CASES[name].title}, {dtype}: {_said(error)}")
        write(given.output, made, lines)
        cupy.get_default_memory_pool().free_all_blocks()
        if find_spec("torch"):
            pytorch().cuda.empty_cache()
    sys.stdout.write(write(given.output, made, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
