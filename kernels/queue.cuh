// One step as a queue of tickets.
//
// An update is a sequence of stages for each tensor: passes over its elements, and between them what is computed from their
// sums. A stage is cut into pieces, which do not depend on the grid. A ticket is one piece of one stage, or, for a small
// tensor, all stages of it. Blocks take tickets in order, until none is left.
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
    int wait;           // pieces of the tensor's earlier stages
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

// A number, of which the compiler is not to know that it is the same. What follows from it is then computed where it is used,
// and not before the loop over the stages, for all of them, which takes more registers than there are.
__device__ __forceinline__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ void piece(const Step& step, int stage, int tensor, int piece);  // what the plan says; below

// Waits until `count` pieces are done, and sees what they have written.
__device__ __forceinline__ void wait_for(unsigned* done, unsigned count) {
    if (threadIdx.x == 0) {
        while (atomicAdd(done, 0u) < count) __nanosleep(100);
        __threadfence();
    }
    __syncthreads();
}

// Says that a piece is done, after what it has written can be seen; all threads have written before.
__device__ __forceinline__ void finish(unsigned* done) {
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(done, 1u);
    }
}

// The place in the queue, from its launch's first ticket on, of the next ticket whose tensor takes part.
__device__ __forceinline__ unsigned take(const Ticket* queue, unsigned count, unsigned* taken, const bool* part) {
    unsigned next = atomicAdd(taken, 1u);
    while (part != nullptr && next < count && !part[queue[next].tensor]) next = atomicAdd(taken, 1u);
    return next;
}

// Tickets [first, last) of the queue. taken, done: counters, of the launch and of each tensor, all zero at first. part: for each
// tensor whether the step updates it; null: all. Tickets of the others are passed over.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
run(const Step step, const Ticket* queue, int first, int last, unsigned* taken, unsigned* done,
    const bool* part, const int* skip) {
    __shared__ unsigned next[2];  // taken in turns: one is written while the other may still be read
    if (skip != nullptr && *skip != 0) return;
    if (threadIdx.x == 0) next[0] = take(queue + first, (unsigned)(last - first), taken, part);
    __syncthreads();
    for (int turn = 0; next[turn] < (unsigned)(last - first); turn = 1 - turn) {
        const Ticket ticket = queue[first + next[turn]];
        if (threadIdx.x == 0) next[1 - turn] = take(queue + first, (unsigned)(last - first), taken, part);
        if (kStages > 1 && ticket.wait > 0) wait_for(done + ticket.tensor, (unsigned)ticket.wait);
        for (int stage = ticket.stage; stage < ticket.stop; ++stage) {
            if (stage > ticket.stage) __syncthreads();
            piece(step, stage, ticket.tensor, ticket.piece);
        }
        __syncthreads();
        if (kStages > 1 && ticket.stop < kStages) finish(done + ticket.tensor);  // nobody waits for a tensor's last stage
    }
}
