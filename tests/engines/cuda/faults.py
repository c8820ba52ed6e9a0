"""Faults to plant in the kernels, which the tests must find: (description, source text, its replacement).

``python -m tests.engines.cuda.faults LAMB 3`` plants one, and prints how it was found. It runs in a process of its
own, because it may crash.
"""

import sys

import numpy as np

import arrayopt as ao
from tests.cudacpu import standin

FAULTS = [
    ("a barrier dropped: warps' sums read too early", "        if (lane == 0) of_warp[k][warp] = x[k];\n    }\n    __syncthreads();", "        if (lane == 0) of_warp[k][warp] = x[k];\n    }"),
    ("a barrier of a warp for one of the block", "        if (lane == 0) of_warp[k][warp] = x[k];\n    }\n    __syncthreads();", "        if (lane == 0) of_warp[k][warp] = x[k];\n    }\n    __syncwarp();"),
    ("a barrier in a branch", "        if (lane == 0) of_warp[k][warp] = x[k];\n    }\n    __syncthreads();", "        if (lane == 0) of_warp[k][warp] = x[k];\n    }\n    if (threadIdx.x < 128) __syncthreads();"),
    ("stages of a small tensor without a barrier", "break;\n                __syncthreads();\n", "break;\n"),
    ("a ticket that does not wait", "if (kStages > 1 && now().wait > 0) wait_for", "if (false) wait_for"),
    ("a ticket that waits for one piece too few", "(unsigned)now().wait);", "(unsigned)now().wait - 1u);"),
    ("a fence dropped by who writes", "    __threadfence();\n    atomicAdd(done, 1u);", "    atomicAdd(done, 1u);"),
    ("a fence dropped by who reads", "__nanosleep(100);\n        __threadfence();\n    }", "__nanosleep(100);\n    }"),
    ("tickets taken without an atomic", "unsigned next = atomicAdd(taken, 1u);", "unsigned next = (*taken)++;"),
    ("a ticket read before it is there", "            now() = next;\n        }\n        __syncthreads();", "            now() = next;\n        }"),
    ("counters that are not begun anew", "    done[tensor] = 0;\n", ""),
    ("counts that do not go up", "++counts[2 * t[IN_COUNT]]", "counts[2 * t[IN_COUNT]]"),
    ("a shuffle over half a warp", "int distance = 16;", "int distance = 8;"),
    ("a wrong mask of a shuffle", "0xffffffffu, x, distance", "0xffffu, x, distance"),
    ("a warp left out", "for (int w = 1; w < kWarps; ++w) x[k] = Of", "for (int w = 2; w < kWarps; ++w) x[k] = Of"),
    ("a lost tail", "end = all < size ? all : size;", "end = all < size ? all : size / 4 * 4;"),
    ("beyond the end", "end = all < size ? all : size;", "end = all;"),
    ("the first element for its neighbours", "if (j < n) to.value[j] = global(from)[j];", "if (j < n) to.value[j] = global(from)[0];"),
    ("a 16-bit offset", "const long long begin = (long long)piece * chunk", "const short begin = (short)(piece * chunk)"),
    ("words read where they are not aligned", "t[IN_ALIGNED] != 0", "true"),
    ("swapped moments", "at_m(global(reinterpret_cast<float*>(t[AT_m]))), at_v(global(reinterpret_cast<float*>(t[AT_v])))", "at_m(global(reinterpret_cast<float*>(t[AT_v]))), at_v(global(reinterpret_cast<float*>(t[AT_m])))"),
    ("a store forgotten", "write<N, false>(at_v + i, write_at_v, n, aligned);", ""),
    ("a partial sum in the wrong place", "step.work[t[PART1] + i] = sums.whole[1];", "step.work[t[PART0] + i] = sums.whole[1];"),
    ("a stage in between that tells nobody", "now().stop < kStages) waited", "now().stop + 1 < kStages) waited"),
    ("partial sums of one piece left out", "for (long long unit = threadIdx.x; unit < t[IN_UNITS]; unit += kThreads) {", "for (long long unit = threadIdx.x + 1; unit < t[IN_UNITS]; unit += kThreads) {"),
]  # fmt: skip
"""In the source of LAMB in float32."""

MATRIX_FAULTS = [
    ("done before all threads are", "        __syncthreads();\n        unsigned* waited", "        unsigned* waited"),
    ("warps' columns added up too early", "columns[k][j];\n            __syncthreads();", "columns[k][j];"),
    ("columns overwritten while they are added up", "(piece), batch);\n            __syncthreads();\n        }", "(piece), batch);\n        }"),
    ("a row's sum that is not begun anew", "                start<typename Pass::OfRow>(sums.row);\n", ""),
    ("an 8-bit row", "const long long row = batch * t.R + r, at", "const signed char row = (signed char)(batch * t.R + r), at"),
    ("a row of another tile", "rows = t.r1 - r0 < t.TR ? (int)(t.r1 - r0) : t.TR", "rows = t.r1 - r0 < t.TR ? (int)(t.r1 - r0) : t.TR + 1"),
    ("columns beyond the matrix", "const int n = c >= t.c1 ? 0 : t.c1 - c < N ? (int)(t.c1 - c) : N;", "const int n = c >= t.c1 ? 0 : N;"),
    ("columns of small matrices shared by threads", "column_room() + threadIdx.x;", "column_room() + threadIdx.x / 2;"),
    ("a matrix too many for the last threads", "threadIdx.x < t.G && batch < t.a1", "threadIdx.x < t.G"),
    ("long sums by half a warp", "for (long long j = threadIdx.x % 32; j < length; j += 32)", "for (long long j = threadIdx.x % 16; j < length; j += 32)"),
    ("a loop's last values left out", "end = begin + kOutputs < count ? begin + kOutputs : count;", "end = begin + kOutputs < count ? begin + kOutputs : count - 1;"),
]  # fmt: skip
"""In the source of CAME in float32, for tensors of rank 4."""

SQUARE_FAULTS = [
    ("a tail of a square lost", "pieces = (size + kChunk - 1) / kChunk", "pieces = size / kChunk + (size < kChunk)"),
    ("beyond the end of a square", "begin + kChunk < stop ? begin + kChunk : stop", "begin + kChunk"),
    ("words of a square read where they are not aligned", "size % kVector == 0", "true"),
    ("one square for all of a batch", "batch = piece / pieces;", "batch = 0;"),
    ("scratch arrays of another pass that is alike", "stage == 10 ? AT_spill2 : ", ""),
]
"""In the source of Muon in float32, for tensors of rank 3."""

SHAPES = {
    "Muon": [(3, 5, 7), (1, 70, 80), (2, 1, 9)],
    "LAMB": [(37,), (3,), (4095,), (4097,), (40001,)],
    "CAME": [(2, 3, 70, 33), (5, 4, 3, 3), (1, 1, 129, 257), (2, 200, 1, 1), (1, 2, 9, 300), (1, 20, 20, 30)],
}
RULES = {"Muon": ao.Muon(lr=0.1, ns_steps=4, matrix="last"), "LAMB": ao.LAMB(lr=0.1), "CAME": ao.CAME(lr=0.01)}
PLANTED = {"LAMB": FAULTS, "CAME": MATRIX_FAULTS, "Muon": SQUARE_FAULTS}


def steps(cupy, name):
    """The largest error of parameters and state after three steps, relative; one parameter is not aligned."""
    r = np.random.default_rng(0)
    host = [r.standard_normal(shape).astype("f4") for shape in SHAPES[name]]
    there = [cupy.asarray(x) for x in host]
    room = cupy.zeros(host[0].size + 1, "f4")
    there[0] = room[1:].reshape(host[0].shape)
    there[0][...] = cupy.asarray(host[0])
    opts = [ao.Optimizer(p, RULES[name], engine=e) for p, e in ((host, "array_api"), (there, "cupy"))]
    for _ in range(3):
        grads = [r.standard_normal(shape).astype("f4") for shape in SHAPES[name]]
        opts[0].step(grads)
        opts[1].step([cupy.asarray(g) for g in grads])
    slots = [
        (x, opts[1].state[name][slot]) for name, s in opts[0].state.items() for slot, x in s.items() if slot != "t"
    ]
    pairs = [(x, y.get()) for x, y in [*zip(host, there, strict=True), *slots]]
    return max(float(np.abs(x - y).max() / (np.abs(x).max() + 1e-30)) for x, y in pairs)


def found(name, old, new):
    """Plant a fault, and return the error that found it, or the deviation of numbers; an empty string if it was missed."""
    with standin.installed() as cupy:
        from arrayopt.engines.cuda import launches, table

        def broken(*args, **options):
            text = emit(*args, **options)
            if old in text and "struct Pass0" in text:
                changed.append(name)
                return text.replace(old, new)
            return text

        emit, changed = table.emit, []
        table.emit, launches._resident = broken, lambda: 3
        try:
            with standin.checking(random=True, seed=1, workers=3):
                error = steps(cupy, name)
        except Exception as error:
            said = repr(error)
        else:
            said = "" if error < 1e-5 else f"an error of {error:.0e}"
        assert changed, "the text to break is not there"
        return said


if __name__ == "__main__":
    rule, number = sys.argv[1:]
    print(found(rule, *PLANTED[rule][int(number)][1:]) if number != "none" else found(rule, "\n", "\n"))
