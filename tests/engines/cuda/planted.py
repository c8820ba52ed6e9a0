"""Faults to plant in the engine and its kernels, which its tests must find; see test_cuda_planted.py.

(description, file, source text, its replacement, the test that finds the fault)
"""

from tests.engines.cuda.planted_later import LATER
from tests.engines.cuda.planted_others import OTHERS

STRICT, CUPY, STEPS, STANDIN = (f"tests/engines/cuda/test_cupy{x}.py" for x in ("_strict", "", "_steps", "_standin"))
TABLE, JUDGE, QUEUE, UPLOAD, DEVICE, CUT, EMIT, LAUNCHES = (
    f"arrayopt/engines/cuda/{x}.py"
    for x in ("table", "judge", "queue", "upload", "device", "cut", "emit_pass", "launches")
)
LOCATED = "arrayopt/engines/cuda/located.py"
LOWERING = "arrayopt/fusion/lowering.py"
JOINT = "arrayopt/engines/cuda/phased_batch.py"
STREAMS = "arrayopt/streams.py"
REPORTS = "tests/engines/cuda/test_cupy_streams.py::test_reports_leave_no_numbers_of_updates_behind"
LEFT_OUT = f"{STRICT}::test_tensors_that_are_left_out_stay_as_they_are"
ALIGNED = f"{STRICT}::test_words_are_read_only_where_all_is_aligned"
GRAPH = f"{STRICT}::test_a_graph_finds_all_that_it_needs_however_many_steps_later"
TILES = f"{STRICT}::test_several_matrices_of_several_tiles[CAME]"
ROUNDED = f"{STRICT}::test_ties_are_rounded_to_even_and_nan_stays_nan"
AWKWARD = f"{CUPY}::test_arrays_that_are_not_contiguous_or_not_aligned"
SCALED = f"{STEPS}::test_a_captured_step_with_a_loss_scale_and_clipping"
DEVICES = f"{CUPY}::test_several_devices"
WINDOWS = "tests/engines/cuda/test_cupy_windows.py::test_parts_that_end"
EVEN, DRAWN = (f"{WINDOWS}_where_tiles_do_give_what_one_process_does[{x}-4]" for x in ("centred", "random numbers"))
ON_STREAMS = "tests/engines/cuda/test_cupy_streams.py"
CALLS = f"{ON_STREAMS}::test_calls_on_any_streams_do_what_calls_on_one_do"
OF_DEVICES = f"{ON_STREAMS}::test_tensors_of_pytorch_are_worked_on_on_the_current_streams_of_their_devices"
OF_PYTORCH = f"{ON_STREAMS}::test_a_captured_step_of_pytorch_is_captured_on_one_stream_and_replayed_on_another"
STAGING = f"{ON_STREAMS}::test_staging_memory_is_not_given_away_before_it_is_read"
TOTALS = "tests/engines/cuda/test_cupy_totals.py"
MANY = f"{TOTALS}::test_many_tensors_are_added_up_in_order"
UNEVEN, BATCHES = (f"{WINDOWS}_anywhere_have_the_sums_of_whole_tensors[{x}]" for x in ("matrices", "batches"))

MISSED = [
    ("the counter of another tensor begun anew", "kernels/prepare.cuh", "done[tensor] = 0;", "done[0] = 0;", LEFT_OUT),
    ("a gradient's alignment ignored", LOCATED, "self.even & (column % WORD == 0)", "self.even", ALIGNED),
    ("8-byte alignment taken for 16", LOCATED, "WORD = 16\n", "WORD = 8\n", ALIGNED),
    ("all arrays on device 0", DEVICE, "device=detached(array).device.id", "device=0", DEVICES),
    ("ties of bfloat16 rounded up", "kernels/storage.cuh", "0x7fffu + (bits >> 16 & 1u)", "0x8000u", ROUNDED),
    ("a 32-bit offset of a piece", "kernels/flat.cuh", "(long long)piece * chunk", "(long long)(piece * (int)chunk)", f"{STRICT}::test_a_row_of_more_elements_than_32_bits_count"),
    ("counts not fetched", TABLE, "counts[:, self.counted] = self.array.get().T", "pass", f"{STRICT}::test_counts_that_a_replay_has_moved_on_are_fetched"),
    ("the guard against overflow of squares", "kernels/judge.cuh", "sum[1] += shrunk * shrunk;", "sum[1] += norm * norm;", f"{STRICT}::test_a_joint_norm_of_which_the_square_is_no_number"),
    ("the queue kept by the number of rows", "arrayopt/engines/batch.py", "key = there.tobytes()", "key = bytes(int(there.sum()))", LEFT_OUT),
    ("partial sums of columns of another matrix", "kernels/matrix.cuh", "(batch * t.NR + tile_row) * t.C", "(batch + tile_row) * t.C", TILES),
]  # fmt: skip
"""Faults that earlier tests did not find."""

MORE = [
    ("a tensor left out is counted", "kernels/prepare.cuh", "(part != nullptr && !part[tensor]) || ", "", LEFT_OUT),
    ("a tensor left out is updated", "kernels/queue.cuh", "((part != nullptr && !part", "((false && !part", LEFT_OUT),
    ("no barrier between a ticket's stages", "kernels/queue.cuh", "break;\n                __syncthreads();\n", "break;\n", LEFT_OUT),
    ("launches end where those of all tensors do", QUEUE, "np.searchsorted(left, self.ends).tolist()", "self.ends", LEFT_OUT),
    ("too much of a queue left", QUEUE, "part.take(self._owner)", "part.take(self._owner) | True", "tests/engines/cuda/test_queue.py::test_what_is_left_of_a_queue"),
    ("a graph does not keep the set of tensors alive", TABLE, "record(self, rows, self.alive,", "record(self, self.alive,", GRAPH),
    ("a table does not know that a graph has it", TABLE, "record(self, rows, self.alive,", "record(rows, self.alive,", f"{STEPS}::test_an_array_that_has_moved_since_the_capture_is_refused"),
    ("a graph does not keep gradients alive", TABLE, "record(self, rows, self.alive, list(grads))", "record(self, rows)", f"{STRICT}::test_gradients_of_a_graph_live_as_long_as_it_may_be_replayed"),
    ("counts on the current device", TABLE, "        with self.access.section():\n            self.table = ", "        with cupy.cuda.Device(0):\n            self.table = ", DEVICES),
    ("a table on the current device", TABLE, "        with self.access.section():\n            self._set_up(", "        with cupy.cuda.Device(0):\n            self._set_up(", DEVICES),
    ("NaN rounded like a number", "kernels/storage.cuh", "x == x ? rounded : bits >> 16 | 0x40u", "rounded", f"{STRICT}::test_the_nan_of_a_gpu_stays_nan"),
    ("a table that is not sent where a gradient lies elsewhere", LOCATED, "            column[rows.all] = found\n            self.sent = False", "            column[rows.all] = found", LEFT_OUT),
    ("pinned memory written while it is read", UPLOAD, "if event.done:", "if True:", f"{STEPS}::test_a_captured_step_replays_with_new_learning_rates_and_counts"),
    ("values sent while a stream is captured", UPLOAD, "uncaptured()\n        buffer, event", "buffer, event", f"{STEPS}::test_nothing_is_sent_while_a_stream_is_captured"),
    ("the last step's factor", TABLE, "                self.factor = self.device_factor.array\n", "", f"{STEPS}::test_the_host_s_factor_follows_one_of_the_device"),
    ("a copy of a gradient made once", LOCATED, "        self.packed[row][...] = detached(g)\n", "", AWKWARD),
    ("a copy of a parameter not written back", LOCATED, "                (self.put_wide if name in self.widens else self.replace)(row, name, copy)\n", "                pass\n", AWKWARD),
    ("a copy of a parameter not read again", LOCATED, "                copy[...] = detached(self.stored(row, name))\n", "                pass\n", AWKWARD),
    ("partial sums of rows of another tile", "kernels/matrix.cuh", "(row + u * kWarps) * t.NC + tile_column, sums", "(row + u * kWarps) + tile_column, sums", TILES),
    ("sums of columns of another tile", LOWERING, '(ab * rows + name("rt"))', '(ab + name("rt"))', TILES),
    ("a step that is to be skipped is made", "kernels/queue.cuh", "if (skip != nullptr && *skip != 0) return;", "(void)skip;", f"{STEPS}::test_a_skipped_step_changes_no_bit"),
    ("a step that is skipped is counted", "kernels/prepare.cuh", " || (skip != nullptr && *skip != 0)", "", f"{STEPS}::test_a_skipped_step_changes_no_bit"),
    ("a norm of another tensor", LOCATED, "np.arange(len(self.tensors)) * there.shape[1] + column\n", "np.arange(len(self.tensors)) * 0 + column\n", f"{STEPS}::test_clip_norm"),
    ("a ticket of the second pass too early", QUEUE, 'waits.ravel()[entry]', 'waits.ravel()[entry] // 2', LEFT_OUT),
    ("a 32-bit offset of a row", "kernels/matrix.cuh", "return row * t.C + c;", "return (int)(row * t.C + c);", f"{STRICT}::test_a_matrix_of_more_elements_than_32_bits_count"),
    ("the first column of a part forgotten", "kernels/matrix.cuh", "t.TC + t.c0 + lane * N;", "t.TC + lane * N;", UNEVEN),
    ("sums of a part's columns in the first columns", "kernels/matrix.cuh", "t.TC + t.c0, to", "t.TC, to", UNEVEN),
    ("the first row of a part forgotten", "kernels/matrix.cuh", "tile_row * t.TR + t.r0, c", "tile_row * t.TR, c", UNEVEN),
    ("the first matrix of a part forgotten", "kernels/matrix.cuh", "(long long)group * t.G + t.a0", "(long long)group * t.G", BATCHES),
    ("a part's elements where the whole tensor's are", "kernels/matrix.cuh", "r * t.stride + c - t.before", "r * t.stride + c", EVEN),
    ("rows of a part as far from each other as the whole's", "kernels/matrix.cuh", "= kWarps * t.stride;", "= kWarps * t.C;", EVEN),
    ("pieces of a part numbered from nought", QUEUE, 'queue["piece"][of_pass] = ', "_ = ", EVEN),
    ("a part's words read by the whole's columns", LOCATED, "columns = self.windows[:, STRIDE]", "pass", UNEVEN),
    ("random numbers of a part by its own positions", EMIT, "origin + row * t[IN_C] - {place}", "origin", DRAWN),
    ("PyTorch's stream not taken", DEVICE, "return there if self.stream is None else", "return there if True else", OF_DEVICES),
    ("PyTorch's stream asked for before its device is entered", DEVICE, "with there, stream():", "with stream(), there:", OF_DEVICES),
    ("PyTorch's streams do not wait for each other", STREAMS, "now.wait_stream(last)", "pass", OF_PYTORCH),
    ("streams do not wait for each other", STREAMS, "now.wait_event(event)", "pass", f"{CALLS}[cupy-1]"),
    ("an event recorded on the stream that waits", STREAMS, "event.record(last)", "event.record(now)", f"{CALLS}[cupy-1]"),
    ("a stream that is not remembered", STREAMS, "self._take((library, device), now)", "pass", CALLS),
    ("what is captured waits for what is not", STREAMS, " or _captured(library, device, now)", "", OF_PYTORCH),
    ("counts fetched before they are there", "arrayopt/state/run.py", '        self.streams.meet("Optimizer")\n', "", f"{ON_STREAMS}::test_what_others_read_is_there"),
    ("slots looked at before they are there", "arrayopt/state/shown.py", '        self._tensor.run.streams.meet("Optimizer.state")\n', "", f"{ON_STREAMS}::test_each_call_waits_for_the_stream_of_the_last_step[look]"),
    ("an event recorded before what it stands for", UPLOAD, "        self.array.set(buffer, stream=stream)\n        event.record(stream)\n", "        event.record(stream)\n        self.array.set(buffer, stream=stream)\n", STAGING),
    ("staging memory given away", UPLOAD, "weakref.finalize(self, _orphans.extend, self.buffers)", "weakref.finalize(self, len, [])", STAGING),
    ("staging memory of others taken while it is read", UPLOAD, "if not x[1].done]", "if False]", STAGING),
    ("a report counts the updates themselves", LAUNCHES, "table.counts.array if table.report_counts is None else table.report_counts", "table.counts.array", REPORTS),
    ("a report with the counts of the last one", TABLE, "if self.report_counts is not None and self.depends_on_t:", "if False:", REPORTS),
    ("tensors beyond the threads of a block left out of the global norm", "kernels/judge.cuh", "i < count; i += kThreads", "i < count && i < kThreads; i += kThreads", f"{ON_STREAMS}::test_the_joint_norm_of_more_tensors_than_a_block_has_threads"),
    ("gradients after an overflow scaled by the scale before", JUDGE, "self.committed[...] = self.verdict", "self.committed[:-1] = self.verdict[:-1]", f"{STEPS}::test_accumulation_with_a_loss_scale"),
    ("no more of a total than a block has threads", "kernels/totals.cuh", "at < end; at += kThreads) {\n        const int mine", "at < begin + 1; at += kThreads) {\n        const int mine", MANY),
    ("no barrier before a total's numbers are added", "kernels/totals.cuh", "[mine]);\n        __syncthreads();", "[mine]);", MANY),
    ("no barrier after a total's numbers were added", "kernels/totals.cuh", "number[i]);\n        __syncthreads();", "number[i]);", MANY),
    ("a graph's table of totals is not kept", UPLOAD, "if not run.is_captured(owner) and len(kept) >= most", "if True", f"{TOTALS}::test_a_captured_step_is_an_eager_one"),
    ("a phase takes the total of the first tensor", JOINT, "self.wanted_at: Ints = self.totals.array.data.ptr + 8 * cells", "self.wanted_at: Ints = self.totals.array.data.ptr + 0 * cells", TOTALS),
    ("the largest number of a total forgets NaN", "kernels/totals.cuh", "a != a || a > b", "a > b", f"{TOTALS}::test_the_largest_number_of_none"),
    ("a loss scale that is not kept", JUDGE, "self.committed[...] = self.verdict", "pass", SCALED),
]  # fmt: skip
"""Other faults."""

PLANTED = MISSED + MORE + LATER + OTHERS
EACH_RUN = {"ties of bfloat16 rounded up"}
