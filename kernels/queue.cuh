// One step as a queue of tickets.
//
// An update is a sequence of stages for each tensor: passes over its elements, and between them what is computed from their
// sums. A stage is cut into pieces, which do not depend on the grid. A ticket is one piece of one stage, or, for a small
// tensor, all stages of it. Blocks take tickets in order, until none is left.
//
// A ticket of a stage waits until all earlier pieces of its tensor are done. Those are tickets before it, which other blocks
// have taken already; so there is always a block that can go on, and any grid will do.
//
// The order of the queue is free where it keeps this promise. With all tensors' first stages first, then all second ones,
// it may be run in several launches, one after the other, and nothing waits; or the stages of a tensor come soon after
// one another, while what they share is in the L2 cache, in one launch.

struct Ticket {
    int tensor;
    int piece;
    short stage, stop;  // stages [stage, stop)
    int wait;           // pieces of the tensor's earlier stages
};

struct Step {
    const long long* table;   // kColumns integers a tensor: extents, tiles, addresses, offsets
    const double* scalars;    // kScalars values a tensor: hyper-parameters and what follows from them
    double* values;           // kValues values a tensor: what stages leave of it for later ones
    W* work;                  // values over rows and columns, and partial sums
};

__device__ void piece(const Step& step, int stage, int tensor, int piece);  // what the plan says; below

// Waits until `count` pieces are done, and sees what they have written.
__device__ __forceinline__ void wait_for(unsigned* done, unsigned count) {
    if (threadIdx.x == 0) {
        while (atomicAdd(done, 0u) < count) {
        }
        __threadfence();
    }
    __syncthreads();
}

// Says that a piece is done, after what it has written can be seen.
__device__ __forceinline__ void finish(unsigned* done) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(done, 1u);
    }
}

// Tickets [first, last) of the queue. taken, done: counters, of the launch and of each tensor, all zero at first. part: for each
// tensor whether the step updates it; null: all. Tickets of the others are passed over.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
run(const Step step, const Ticket* queue, int first, int last, unsigned* taken, unsigned* done,
    const bool* part, const int* skip) {
    __shared__ unsigned next;
    if (skip != nullptr && *skip != 0) return;
    for (;;) {
        if (threadIdx.x == 0) next = atomicAdd(taken, 1u);
        __syncthreads();
        if (next >= (unsigned)(last - first)) return;
        const Ticket ticket = queue[first + next];
        if (part != nullptr && !part[ticket.tensor]) {
            __syncthreads();  // here too
            continue;
        }
        if (ticket.wait > 0) wait_for(done + ticket.tensor, (unsigned)ticket.wait);
        for (int stage = ticket.stage; stage < ticket.stop; ++stage) {
            if (stage > ticket.stage) __syncthreads();
            piece(step, stage, ticket.tensor, ticket.piece);
        }
        finish(done + ticket.tensor);  // here all threads meet, so `next` may be written again
    }
}
