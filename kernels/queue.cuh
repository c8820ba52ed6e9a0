// One step as a queue of tickets.
//
// An update is a sequence of stages for each tensor: passes over its elements, and computations on their sums between passes. A
// stage is divided into pieces, which do not depend on the grid. A ticket is one piece of one stage; or consecutive pieces of a
// pass over a large tensor; or consecutive stages of one piece each, which may be all stages of a small tensor. Blocks take
// tickets in order, until none is left.
//
// A ticket of a stage waits until all pieces of earlier stages of its tensor are done. Their tickets come before it, and blocks
// have already taken them. So some block can always continue, and any grid works.
//
// A block that works on a ticket has already taken its next one. That one is later, so no ticket before it waits for it.
//
// The queue may have any order that keeps this promise. If the first stages of all tensors come first, then all second stages,
// it can run in several launches, and nothing waits. If the stages of a tensor follow each other closely, their common data is
// still in the L2 cache, in one launch.

struct Ticket {
    int tensor;
    int piece;
    short stage, stop;  // stages [stage, stop)
    int wait;           // number of tickets of the tensor's earlier stages
    int count;          // number of pieces of a pass, from `piece` on
};

struct Step {
    const long long* table;   // kColumns integers a tensor: extents, tiles, addresses, offsets
    const double* scalars;    // kScalars values a tensor: hyper-parameters and values that depend on them
    double* values;           // kValues values a tensor: results of stages for later stages
    W* work;                  // values over rows and columns, and partial sums
    W* working;               // scalars and values again, in the dtype of the elements' arithmetic
};

// The same addresses, which the compiler then knows to be in global memory.
__device__ __forceinline__ Step located(const Step& step) {
    return {global(step.table), global(step.scalars), global(step.values), global(step.work), global(step.working)};
}

// The ticket that the block works on, in shared memory, because the passes need the registers.
__device__ __forceinline__ Ticket& now() {
    __shared__ Ticket ticket;
    return ticket;
}

__device__ void piece(const Step& step, int stage);  // runs the ticket's first piece, or all; generated, below

// Sets the remaining pieces of the ticket: `count` of them, from `piece` on. All threads must call it.
__device__ __forceinline__ void leave(int piece, int count) {
    __syncthreads();
    if (threadIdx.x == 0) now().piece = piece, now().count = count;
    __syncthreads();
}

// Moves the ticket to its next piece. Returns false if there is none.
__device__ __forceinline__ bool next_piece() {
    const int piece = now().piece, count = now().count;
    if (count > 1) leave(piece + 1, count - 1);
    return count > 1;
}

// Marks all pieces of the ticket as done, when a pass has processed them together.
__device__ __forceinline__ void pass_over_rest() {
    if (now().count > 1) leave(now().piece, 1);
}

// Waits until `count` tickets are done, and their writes are visible.
__device__ __forceinline__ void wait_for(unsigned* done, unsigned count) {
    if (threadIdx.x == 0) {
        while (atomicAdd(done, 0u) < count) __nanosleep(100);
        __threadfence();
    }
    __syncthreads();
}

// Signals that a ticket is done, after making its writes visible. All threads must have written before.
__device__ __forceinline__ void finish(unsigned* done) {
    __threadfence();
    atomicAdd(done, 1u);
}

// Takes the next ticket of a tensor that the step updates. If none is left, returns one with tensor -1.
__device__ __forceinline__ Ticket take(const Ticket* queue, unsigned count, unsigned* taken, const bool* part,
                                       const int* skip, const int* layer) {
    unsigned next = atomicAdd(taken, 1u);
    while (next < count && ((part != nullptr && !part[queue[next].tensor]) ||
                            (layer != nullptr && skip[layer[queue[next].tensor]] != 0)))
        next = atomicAdd(taken, 1u);
    return next < count ? queue[next] : Ticket{-1, 0, 0, 0, 0, 0};
}

// Works on tickets [first, last) of the queue. taken: the launch's counter. done: a counter for each tensor. Both start at 0.
// part: for each tensor, whether the step updates it; null for all. skip[0]: whether the step is skipped; `skip` may be null.
// layer: for each tensor, the index in `skip` for its layer; null if none is skipped alone. Other tensors' tickets are dropped.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
run(const Step step, const Ticket* queue, int first, int last, unsigned* taken, unsigned* done,
    const bool* part, const int* skip, const int* layer) {
    __shared__ Ticket next;  // only the first thread uses it
    if (skip != nullptr && *skip != 0) return;
    if (threadIdx.x == 0) now() = take(queue + first, (unsigned)(last - first), taken, part, skip, layer);
    __syncthreads();
    while (now().tensor >= 0) {
        if (threadIdx.x == 0) next = take(queue + first, (unsigned)(last - first), taken, part, skip, layer);
        if (kStages > 1 && now().wait > 0) wait_for(done + now().tensor, (unsigned)now().wait);
        if (kStages == 1) {
            do piece(step, 0);
            while (next_piece());
        } else {
            for (int stage = now().stage; stage < now().stop;) {
                piece(step, stage);
                if (next_piece()) continue;  // the same pass
                if (++stage >= now().stop) break;
                __syncthreads();
            }
        }
        __syncthreads();
        unsigned* waited = nullptr;  // no ticket waits for a last stage, and no other thread for the fence of the first
        if (threadIdx.x == 0) {
            if (kStages > 1 && now().stop < kStages) waited = done + now().tensor;
            now() = next;
        }
        __syncthreads();
        if (kStages > 1 && waited != nullptr) finish(waited);
    }
}
