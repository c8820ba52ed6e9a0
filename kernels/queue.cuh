// One step as a queue of tickets.
//
// An update is a sequence of stages for each tensor: passes over its elements, and between them what is computed from their
// sums. A stage is cut into pieces, which do not depend on the grid. A ticket is one piece of one stage, or some pieces of a pass
// over a large tensor, one after the other; or stages of one piece that follow each other, for a small tensor all. Blocks take
// tickets in order, until none is left.
//
// A ticket of a stage waits until all earlier pieces of its tensor are done. Those are tickets before it, which other blocks
// have taken already; so there is always a block that can go on, and any grid will do.
//
// Who works on a ticket has taken the next one already. That one is later, so it keeps nobody from going on.
//
// The order of the queue is free where it keeps this promise. With all tensors' first stages first, then all second ones,
// it may be run in several launches, one after the other, and nothing waits; or the stages of a tensor come soon after
// one another, while what they share is in the L2 cache, in one launch.

struct Ticket {
    int tensor;
    int piece;
    short stage, stop;  // stages [stage, stop)
    int wait;           // tickets of the tensor's earlier stages
    int count;          // pieces, from `piece` on, of a pass
};

struct Step {
    const long long* table;   // kColumns integers a tensor: extents, tiles, addresses, offsets
    const double* scalars;    // kScalars values a tensor: hyper-parameters and what follows from them
    double* values;           // kValues values a tensor: what stages leave of it for later ones
    W* work;                  // values over rows and columns, and partial sums
    W* working;               // scalars and values again, as the elements' arithmetic takes them
};

// The same addresses, known to be the device's.
__device__ __forceinline__ Step located(const Step& step) {
    return {global(step.table), global(step.scalars), global(step.values), global(step.work), global(step.working)};
}

// The ticket that the block works on. It is read where it is needed: registers are for the passes.
__device__ __forceinline__ Ticket& now() {
    __shared__ Ticket ticket;
    return ticket;
}

__device__ void piece(const Step& step, int stage);  // what the plan says of the ticket's first piece, or of all; below

// Leaves `count` pieces of the ticket, from `piece` on. All threads must call it.
__device__ __forceinline__ void leave(int piece, int count) {
    __syncthreads();
    if (threadIdx.x == 0) now().piece = piece, now().count = count;
    __syncthreads();
}

// Whether the ticket has one more piece, with which it goes on.
__device__ __forceinline__ bool next_piece() {
    const int piece = now().piece, count = now().count;
    if (count > 1) leave(piece + 1, count - 1);
    return count > 1;
}

// All pieces of the ticket have been done at once.
__device__ __forceinline__ void pass_over_rest() {
    if (now().count > 1) leave(now().piece, 1);
}

// Waits until `count` tickets are done, and sees what they have written.
__device__ __forceinline__ void wait_for(unsigned* done, unsigned count) {
    if (threadIdx.x == 0) {
        while (atomicAdd(done, 0u) < count) __nanosleep(100);
        __threadfence();
    }
    __syncthreads();
}

// Says that a ticket is done, after what its piece has written can be seen; all threads have written before.
__device__ __forceinline__ void finish(unsigned* done) {
    __threadfence();
    atomicAdd(done, 1u);
}

// The next ticket whose tensor takes part; where none is left, one of no tensor.
__device__ __forceinline__ Ticket take(const Ticket* queue, unsigned count, unsigned* taken, const bool* part,
                                       const int* skip, const int* layer) {
    unsigned next = atomicAdd(taken, 1u);
    while (next < count && ((part != nullptr && !part[queue[next].tensor]) ||
                            (layer != nullptr && skip[layer[queue[next].tensor]] != 0)))
        next = atomicAdd(taken, 1u);
    return next < count ? queue[next] : Ticket{-1, 0, 0, 0, 0, 0};
}

// Tickets [first, last) of the queue. taken, done: counters, of the launch and of each tensor, all zero at first. part: for each
// tensor whether the step updates it; null: all. skip[0]: whether the step changes nothing; skip null: it does. layer: for each
// tensor where skip says whether it is skipped alone; null: none is. Tickets of the others are passed over.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
run(const Step step, const Ticket* queue, int first, int last, unsigned* taken, unsigned* done,
    const bool* part, const int* skip, const int* layer) {
    __shared__ Ticket next;  // the first thread's
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
                if (next_piece()) continue;  // of one pass
                if (++stage >= now().stop) break;
                __syncthreads();
            }
        }
        __syncthreads();
        unsigned* waited = nullptr;  // nobody waits for a tensor's last stage, and no thread for the fence of the first
        if (threadIdx.x == 0) {
            if (kStages > 1 && now().stop < kStages) waited = done + now().tensor;
            now() = next;
        }
        __syncthreads();
        if (kStages > 1 && waited != nullptr) finish(waited);
    }
}
