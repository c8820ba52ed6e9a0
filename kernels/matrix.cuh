// A pass over a tensor that is seen as a batch of matrices: A x B of them, with R rows and C columns each.
//
// Loops whose length the compiler does not know are not unrolled: there are many of them, and all share the registers of one
// kernel.
//
// A piece is a tile of one matrix, TR rows by TC columns, or G whole matrices. Its sums over rows, columns and matrices go
// to places of their own, and are added up in order by the stage after.

struct Tile {
    long long R, C;         // extents
    int TR, TC, G, NR, NC;  // rows and columns of a tile, matrices of a piece; tiles along each
    long long batches;      // A x B
};

__device__ __forceinline__ Tile tile_of(const long long* t) {
    return {t[IN_R],      t[IN_C],       (int)t[IN_TR], (int)t[IN_TC],
            (int)t[IN_G], (int)t[IN_NR], (int)t[IN_NC], t[IN_A] * t[IN_B]};
}

// A number, of which the compiler is not to know that it is the same. What follows from it is then computed where it is used,
// and not kept in registers.
__device__ __forceinline__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Room for sums over columns, which the passes take one after the other.
__device__ __forceinline__ W* column_room() {
    __shared__ W room[kColumnRoom];
    return room;
}

template <class Of, int K, int N>
__device__ __forceinline__ void start_columns(W (&columns)[K][N]) {
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int j = 0; j < N; ++j) columns[k][j] = Of::start(k, (W)0);
}

// What is done with N neighbouring columns, from c on, of rows r, r + kWarps, ... of which `left` are left in the tile: of kRows,
// which are read before the first is used; of one, where they are not aligned.
template <class Pass, int N, int kRows>
__device__ __forceinline__ void rows_of_tile(const Pass& pass, const Tile& t, bool aligned, long long batch, long long r, int left,
                                             long long c, int n, int tile_column, typename Pass::Sums& sums, W (*columns)[N]) {
    const long long row = batch * t.R + r, at = row * t.C + c, stride = kWarps * t.C;
    // Zero where nothing is read: what has a value on some paths alone would keep its registers from the other passes, too.
    typename Pass::template Loads<N> loads[kRows] = {};
    if (aligned && n == N) {
#pragma unroll
        for (int u = 0; u < kRows; ++u)
            if (u * kWarps < left) loads[u] = pass.template load<N, true>(at + u * stride, N);
    } else if (n > 0) {
        loads[0] = pass.template load<N, false>(at, n);
    }
    const typename Pass::template Columns<N> values = pass.template columns<N>(c, n);
#pragma unroll
    for (int u = 0; u < kRows; ++u)
        if (u * kWarps < left) {
            const typename Pass::Row of_row = pass.row(row + u * kWarps, r + u * kWarps);
            if (n > 0) pass.template work<N>(at + u * stride, n, aligned, loads[u], of_row, values, sums, columns);
            if constexpr (Pass::kRow > 0) {
#pragma unroll
                for (int k = 0; k < Pass::kRow; ++k) sums.row[k] = warp_fold<typename Pass::OfRow>(k, sums.row[k]);
                if (threadIdx.x % 32 == 0) pass.keep_row((row + u * kWarps) * t.NC + tile_column, sums);
                start<typename Pass::OfRow>(sums.row);
            }
        }
}

// Adds up what the warps have of a tile's columns. Where the tile lies is found out again: to know it all along would take
// registers from the loop over rows.
template <class Pass, int N>
__device__ __forceinline__ void keep_columns(Pass& pass, int piece, long long batch) {
    const W* const of_warp = column_room();
    const Tile t = tile_of(pass.t);
    const int tile_column = piece % t.NC, tile_row = piece / t.NC % t.NR;
    const long long c = (long long)tile_column * t.TC, to = (batch * t.NR + tile_row) * t.C + c;
#pragma unroll 1
    for (int at = threadIdx.x; at < 32 * N && c + at < t.C; at += kThreads) {
#pragma unroll
        for (int k = 0; k < Pass::kColumn; ++k) {
            W sum = of_warp[k * kWarps * 32 * N + at];
#pragma unroll
            for (int w = 1; w < kWarps; ++w) sum = Pass::OfColumn::fold(k, sum, of_warp[(k * kWarps + w) * 32 * N + at]);
            pass.keep_column(k, to + at, sum);
        }
    }
}

// A warp takes a row of a tile, a lane N neighbouring columns of it.
template <class Pass, int N, int kRows>
__device__ __forceinline__ void tile_by_warps(Pass& pass, const Tile& t, bool aligned, int piece) {
    W* const of_warp = column_room();  // [kColumn][kWarps][32 * N]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile_column = piece % t.NC, tile_row = piece / t.NC % t.NR;
    const long long first = (long long)(piece / t.NC / t.NR) * t.G, stop = first + t.G < t.batches ? first + t.G : t.batches;
    const long long r0 = (long long)tile_row * t.TR, c = (long long)tile_column * t.TC + lane * N;
    const int rows = t.R - r0 < t.TR ? (int)(t.R - r0) : t.TR;
    const int n = c >= t.C ? 0 : t.C - c < N ? (int)(t.C - c) : N;
    typename Pass::Sums sums;
    start<typename Pass::OfWhole>(sums.whole), start<typename Pass::OfRow>(sums.row), start<typename Pass::OfBatch>(sums.batch);
#pragma unroll 1
    for (long long batch = first; batch < stop; ++batch) {
        W columns[Pass::kColumn > 0 ? Pass::kColumn : 1][N] = {};
        start_columns<typename Pass::OfColumn>(columns);
        pass.enter_batch(batch);
#pragma unroll 1
        for (int next = warp; next < rows; next += aligned ? kRows * kWarps : kWarps) {
            const int r = anew(next), left = aligned ? rows - r : 1;  // else addresses are carried from row to row: registers
            rows_of_tile<Pass, N, kRows>(pass, t, aligned, batch, r0 + r, left, c, n, tile_column, sums, columns);
        }
        if constexpr (Pass::kColumn > 0) {
#pragma unroll
            for (int k = 0; k < Pass::kColumn; ++k)
#pragma unroll
                for (int j = 0; j < N; ++j) of_warp[(k * kWarps + warp) * 32 * N + lane * N + j] = columns[k][j];
            __syncthreads();
            keep_columns<Pass, N>(pass, anew(piece), batch);
            __syncthreads();
        }
        if constexpr (Pass::kBatch > 0) {
            block_fold<typename Pass::OfBatch>(sums.batch);
            if (threadIdx.x == 0) pass.keep_batch((batch * t.NR + tile_row) * t.NC + tile_column, sums);
            start<typename Pass::OfBatch>(sums.batch);
        }
    }
    if constexpr (Pass::kWhole > 0) {
        block_fold<typename Pass::OfWhole>(sums.whole);
        if (threadIdx.x == 0) pass.keep_whole(piece, sums);
    }
}

// A thread takes a whole small matrix, as those of convolutions are; NR and NC are 1.
template <class Pass>
__device__ __forceinline__ void matrices_by_threads(Pass& pass, const Tile& t, int piece) {
    W* const column = column_room() + threadIdx.x;  // [kColumn][kSmallColumns][kThreads]
    const long long batch = (long long)piece * t.G + threadIdx.x;
    typename Pass::Sums sums;
    start<typename Pass::OfWhole>(sums.whole), start<typename Pass::OfRow>(sums.row), start<typename Pass::OfBatch>(sums.batch);
    if (threadIdx.x < t.G && batch < t.batches) {
        pass.enter_batch(batch);
        if constexpr (Pass::kColumn > 0)
#pragma unroll
            for (int k = 0; k < Pass::kColumn; ++k)
#pragma unroll 1
                for (int c = 0; c < t.C; ++c) column[(k * kSmallColumns + c) * kThreads] = Pass::OfColumn::start(k, (W)0);
#pragma unroll 1
        for (long long r = 0; r < t.R; ++r) {
            const long long row = batch * t.R + r;
            const typename Pass::Row of_row = pass.row(row, r);
#pragma unroll 1
            for (int c = 0; c < t.C; ++c) {
                W columns[Pass::kColumn > 0 ? Pass::kColumn : 1][1] = {};
                start_columns<typename Pass::OfColumn>(columns);
                const auto loads = pass.template load<1, false>(row * t.C + c, 1);
                pass.template work<1>(row * t.C + c, 1, false, loads, of_row, pass.template columns<1>(c, 1), sums, columns);
                if constexpr (Pass::kColumn > 0)
#pragma unroll
                    for (int k = 0; k < Pass::kColumn; ++k) {
                        W& kept = column[(k * kSmallColumns + c) * kThreads];
                        kept = Pass::OfColumn::fold(k, kept, columns[k][0]);
                    }
            }
            if constexpr (Pass::kRow > 0) {
                pass.keep_row(row, sums);
                start<typename Pass::OfRow>(sums.row);
            }
        }
        if constexpr (Pass::kColumn > 0)
#pragma unroll
            for (int k = 0; k < Pass::kColumn; ++k)
#pragma unroll 1
                for (int c = 0; c < t.C; ++c) pass.keep_column(k, batch * t.C + c, column[(k * kSmallColumns + c) * kThreads]);
        if constexpr (Pass::kBatch > 0) pass.keep_batch(batch, sums);
    }
    if constexpr (Pass::kWhole > 0) {
        block_fold<typename Pass::OfWhole>(sums.whole);
        if (threadIdx.x == 0) pass.keep_whole(piece, sums);
    }
}

template <class Pass>
__device__ __forceinline__ void matrix_piece(Pass& pass, const Tile& t, bool aligned, int piece) {
    if (t.R * t.C <= kSmallMatrix && t.C <= kSmallColumns) matrices_by_threads(pass, t, piece);
    else if (t.TC <= 32) tile_by_warps<Pass, 1, 1>(pass, t, false, piece);
    else tile_by_warps<Pass, 4, Pass::kAhead>(pass, t, aligned, piece);
}
