"""`emit`: from a plan to the CUDA source of `prepare` and `run`, which `table.py` compiles.

The source has the headers of ``kernels/``, a struct `PassK` with the work of each pass, `piece`,
which runs a stage, and `scalars_of`, which computes the scalars of a step. Passes that differ only
in their scratch arrays, such as those between products of matrices, share a struct.
"""

from collections.abc import Mapping

from arrayopt.codecs import STORED
from arrayopt.engines.cplusplus import header
from arrayopt.engines.cuda.columns import WINDOW_COLUMNS, given_names, hyper_names, key_names
from arrayopt.engines.cuda.emit_pass import PassPrinter
from arrayopt.engines.cuda.emit_rings import RingsPrinter
from arrayopt.engines.cuda.pieces import OUTPUTS, SMALL_COLUMNS, SMALL_MATRIX, SQUARE, SUMS
from arrayopt.engines.cuda.printer import CudaPrinter
from arrayopt.fusion.graph import CLIP, COUNT, UPDATES
from arrayopt.fusion.layout import device_layout
from arrayopt.fusion.lower_stages import in_stages, turns_of
from arrayopt.fusion.plan import Plan
from arrayopt.fusion.program import Body, Stage

LEAN = True
"""The argument `lean` of `trace`: a thread has few registers, 80 with three blocks."""

AHEAD, AHEAD_OF_CODES = 32 << 10, 24 << 10
"""The wanted bytes in flight of a multiprocessor, and those with 8-bit slots: ``docs/cuda.md``."""

WIDE, COMPLEX, WIDEST = 18, 10, 20
"""The most 32-bit words per element, real and complex, for which 80 registers are enough (up to 16
bytes are spilled, 72 for Adan on 12.0); and the words from which 128 registers are too few."""


def emit(
    plan: Plan,
    dtype: str,
    grad_dtype: str | None = None,
    *,
    about: str = ".",
    windows: bool = False,
) -> str:
    """Return the CUDA source that runs a plan, for parameters and gradients of these dtypes.

    With `windows`, it runs parts of matrices that the user divided (`arrayopt.fusion.windows`).
    `about` ends the comment in the first line.
    """
    text = RingsPrinter(plan, dtype, grad_dtype or dtype, windows=windows)
    stages, blocks = in_stages(plan).stages, _resident(plan, dtype, text.real, windows=windows)
    text.comment(f"Fused kernels{about}")
    _constants(text, blocks)
    for name in _headers(plan):
        text.put(0, f"// ---- {name}.cuh", "")
        text.put_text(header(f"{name}.cuh"))
        text.put(0, "")
    text.put(0, "// ---- the plan", "")
    numbers: dict[str, list[int]] = {}  # by the name of a function, the stages that share it
    for number, stage in enumerate(stages):
        same = numbers.setdefault(stage.function.name, [])
        same.append(number)
        if stage.kind == "between":
            text.between(stage)
        elif stage.kind == "pass":
            text.put(0, f"// {plan.line(sum(x.kind != 'between' for x in stages[:number]))}")
            if turns_of(stage):
                text.rings(number, stage.function)
            elif len(same) == 1:
                struct = PassPrinter(text, stage.function)
                struct.write(_ahead(plan, struct.body, text.storage, blocks))
    for same in numbers.values():
        if stages[same[0]].kind == "pass" and not turns_of(stages[same[0]]):
            _pass(text, same, [stages[number] for number in same])
    text.put(0, "__device__ void piece(const Step& step, int stage) {", "    switch (stage) {")
    for number, stage in enumerate(stages):
        if stage.kind != "product":
            first, *others = numbers[stage.function.name]
            more = ", stage" if others else ""
            text.put(2, f"case {number}: stage{first}(step{more}); break;")
    text.put(1, "}")
    text.put(0, "}", "")
    _scalars(text)
    return text.text()


def _resident(plan: Plan, dtype: str, real: str, *, windows: bool = False) -> int:
    """The number of blocks of a multiprocessor: three leave a thread 80 registers, two 128."""
    if plan.multiplies:  # many passes in one kernel, and products take the time
        return 1
    if device_layout(plan).leaves or any(map(turns_of, in_stages(plan).stages)):
        return 2 if real == "float32" else 1  # for waves, and for loops over members of rings
    passes, words = plan.passes, 2 if real == "float64" else 1
    held = []
    for p in passes:
        moved = [*p.loads.values(), *p.stores.values()]
        held.append(words * sum(2 if n.kind == "complex" else 1 for n in moved))
    if max(held, default=0) >= WIDEST:
        return 1
    most = max((x + len(p.reductions) for x, p in zip(held, passes, strict=True)), default=0)
    most += 5 * (STORED[dtype].itemsize == 2)  # for rounding
    if plan.draws or plan.quantized or windows:  # registers for random bits, scales, positions
        return 2
    wide = COMPLEX if dtype.startswith("complex") else WIDE
    return 3 if real == "float32" and most <= wide else 2


def _ahead(plan: Plan, body: Body, storage: Mapping[str, str], blocks: int) -> int:
    """The number of vectors of each array that a thread reads before it uses the first."""
    if plan.multiplies:  # many passes share the registers, and products take the time
        return 1
    loop = body.elements
    sizes = [STORED[storage[loop.storage[x]]].itemsize for x in loop.loads if x in loop.storage]
    each = blocks * 256 * 4 * sum(sizes)
    if plan.element != "C":
        return next((n for n in (1, 2, 4) if n * each >= AHEAD), 8) if each else 1
    least = 2 if len(plan.passes) == 2 and {*sizes} == {4} else 1  # as measured on an H200
    # a piece has four vectors a thread; with codes, 128 registers are too few for four
    most = 2 if plan.quantized and 2 * each >= AHEAD_OF_CODES else 4
    return next((n for n in (1, 2) if n >= least and n * each >= AHEAD), most)


def _constants(text: CudaPrinter, blocks: int) -> None:
    """Print the constants and types that the headers and the generated code use."""
    plan = text.plan
    text.put(0, f"typedef {STORED[text.real].cplusplus} W;  // the dtype of arithmetic", "")
    columns = ", ".join(text.columns)
    text.put(0, f"enum {{ {columns}, kColumns }};  // what the table has of a tensor")
    values = {"kHypers": len(hyper_names(plan)), "kScalars": len(text.layout.scalars)}
    values |= {"kValues": text.layout.values, "kBlocks": blocks}
    values["kStages"] = len(in_stages(plan).stages)
    values["kMostSums"] = max([1, *(len(p.sums) for p in plan.passes)])
    if plan.element != "C":
        most = max((len(p.reducing("column")) for p in plan.passes), default=0)
        # 0 if tensors are whole
        values["kWindow"] = text.columns.index(WINDOW_COLUMNS[0]) if text.windows else 0
        values |= {"kSmallMatrix": SMALL_MATRIX, "kSmallColumns": SMALL_COLUMNS}
        values["kColumnRoom"] = max(1, most) * 256 * SMALL_COLUMNS
        values |= {"kOutputs": OUTPUTS, "kResults": SUMS}
    text.put(0, *(f"constexpr int {name} = {x};" for name, x in values.items()), "")
    if plan.multiplies:
        text.put(0, f"constexpr int kChunk = {SQUARE};", "")


def _headers(plan: Plan) -> list[str]:
    """The headers that a plan needs, in the order in which they are included."""
    names = ["storage", "packs", "arithmetic"]
    names += ["quantized", "codes"] if plan.quantized else []
    names += ["random"] if plan.draws else []
    names += ["sums", "prepare", "queue"]
    if plan.element == "C":
        turns = any(map(turns_of, in_stages(plan).stages))
        return [*names, "flat", *(("between", "turns") if turns else ())]
    return [*names, "matrix", "between", *(("flat", "square") if plan.multiplies else ())]


def _scratch(numbers: list[int], stages: list[Stage]) -> str:
    """The arguments of a pass's constructor with the columns of its scratch arrays, by stage."""
    *others, last = zip(numbers, stages, strict=True)
    arguments = ""
    for i, name in enumerate(last[1].scratch):
        choice = ""
        for number, stage in others:
            if stage.scratch[i] != name:
                choice += f"stage == {number} ? AT_{stage.scratch[i]} : "
        arguments += f", {choice}AT_{name}"
    return arguments


def _pass(text: CudaPrinter, numbers: list[int], same: list[Stage]) -> None:
    """Print the function that runs a piece of a pass, for all stages that share its struct."""
    stage, function = same[0], same[0].function
    text.open(f"stage{numbers[0]}", *(["stage"] if same[1:] else []))
    text.put(1, f"{function.name} pass(step, tensor{_scratch(numbers, same)});")
    if function.shared == "squares":
        text.put(1, f"square_piece(pass, {stage.axes[-1].upper()}, piece);")
    elif text.plan.element == "C":
        text.put(1, "flat_piece(pass, t[IN_SIZE], t[IN_TC], t[IN_ALIGNED] != 0, piece);")
    else:
        text.put(1, "matrix_piece(pass, tile_of(t), t[IN_ALIGNED] != 0, piece);")
    text.put(0, "}", "")


def _scalars(text: CudaPrinter) -> None:
    """Print `scalars_of`: scalars of a step from hyper-parameters, update count and extents."""
    text.type, plan = "double", text.plan
    head = "const long long* t, const double* hyper, double count, double factor,"
    text.put(0, f"__device__ void scalars_of({head}")
    text.put(0, "                           double* scalar, W* working) {")
    text.put(1, "(void)t, (void)hyper, (void)count, (void)factor, (void)scalar, (void)working;")
    table = {UPDATES: "count", CLIP: "factor"}
    table |= {name: f"hyper[{i}]" for i, name in enumerate(hyper_names(plan))}
    table |= {name: f"(double)t[KEY{i}]" for i, name in enumerate(key_names(plan))}
    for number, name in enumerate(given_names(plan)):
        table[name] = f"*reinterpret_cast<const double*>(t[GIVEN{number}])"

    def leaf(name: str) -> str:
        if not name.startswith(COUNT):
            return table[name]
        extents = [f"(double)t[IN_{x}]" for x in name.removeprefix(COUNT)]
        return " * ".join(extents) or "1.0"

    known = text.straight(list(plan.scalars), leaf)
    for node, number in text.layout.scalars.items():
        text.put(1, f"working[{number}] = (W)(scalar[{number}] = {known[node]});")
    text.put(0, "}")
    text.type = "W"
