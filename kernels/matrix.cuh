// A pass over a tensor that is seen as a batch of matrices: A x B of them, with R rows and C columns each.
//
// A piece is a tile of one matrix, TR rows by TC columns, or G whole matrices. Its sums over rows, columns and matrices go
// to places of their own, and are added up in order by the stage after.

struct Tile {
    long long R, C, TR, TC, G, NR, NC;  // extents; rows and columns of a tile, matrices of a piece; tiles along each
    long long batches;                  // A x B
};

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

// A warp takes a row of a tile, a lane N neighbouring columns of it.
template <class Pass, int N, bool kAligned>
__device__ __forceinline__ void tile_by_warps(Pass& pass, const Tile& t, int piece) {
    W* const of_warp = column_room();  // [kColumn][kWarps][32 * N]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long tile_column = piece % t.NC, tile_row = piece / t.NC % t.NR;
    const long long first = piece / t.NC / t.NR * t.G, stop = first + t.G < t.batches ? first + t.G : t.batches;
    const long long r0 = tile_row * t.TR, r1 = r0 + t.TR < t.R ? r0 + t.TR : t.R;
    const long long c = tile_column * t.TC + lane * N;
    const int n = c >= t.C ? 0 : t.C - c < N ? (int)(t.C - c) : N;
    typename Pass::Sums sums;
    start<typename Pass::OfWhole>(sums.whole), start<typename Pass::OfRow>(sums.row), start<typename Pass::OfBatch>(sums.batch);
    for (long long batch = first; batch < stop; ++batch) {
        W columns[Pass::kColumn > 0 ? Pass::kColumn : 1][N] = {};
        start_columns<typename Pass::OfColumn>(columns);
        pass.enter_batch(batch);
        for (long long r = r0 + warp; r < r1; r += kWarps) {
            const long long row = batch * t.R + r;
            pass.enter_row(row, r);
            if (n > 0) pass.template at<N, kAligned>(row * t.C + c, n, c, sums, columns);
            if constexpr (Pass::kRow > 0) {
#pragma unroll
                for (int k = 0; k < Pass::kRow; ++k) sums.row[k] = warp_fold<typename Pass::OfRow>(k, sums.row[k]);
                if (lane == 0) pass.keep_row(row * t.NC + tile_column, sums);
                start<typename Pass::OfRow>(sums.row);
            }
        }
        if constexpr (Pass::kColumn > 0) {
#pragma unroll
            for (int k = 0; k < Pass::kColumn; ++k)
#pragma unroll
                for (int j = 0; j < N; ++j) of_warp[(k * kWarps + warp) * 32 * N + lane * N + j] = columns[k][j];
            __syncthreads();
            for (int at = threadIdx.x; at < 32 * N && tile_column * t.TC + at < t.C; at += kThreads) {
#pragma unroll
                for (int k = 0; k < Pass::kColumn; ++k) {
                    W sum = of_warp[k * kWarps * 32 * N + at];
#pragma unroll
                    for (int w = 1; w < kWarps; ++w) sum = Pass::OfColumn::fold(k, sum, of_warp[(k * kWarps + w) * 32 * N + at]);
                    pass.keep_column(k, (batch * t.NR + tile_row) * t.C + tile_column * t.TC + at, sum);
                }
            }
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
    const long long batch = piece * t.G + threadIdx.x;
    typename Pass::Sums sums;
    start<typename Pass::OfWhole>(sums.whole), start<typename Pass::OfRow>(sums.row), start<typename Pass::OfBatch>(sums.batch);
    if (threadIdx.x < t.G && batch < t.batches) {
        pass.enter_batch(batch);
        if constexpr (Pass::kColumn > 0)
#pragma unroll
            for (int k = 0; k < Pass::kColumn; ++k)
                for (int c = 0; c < t.C; ++c) column[(k * kSmallColumns + c) * kThreads] = Pass::OfColumn::start(k, (W)0);
        for (long long r = 0; r < t.R; ++r) {
            const long long row = batch * t.R + r;
            pass.enter_row(row, r);
            for (int c = 0; c < t.C; ++c) {
                W columns[Pass::kColumn > 0 ? Pass::kColumn : 1][1] = {};
                start_columns<typename Pass::OfColumn>(columns);
                pass.template at<1, false>(row * t.C + c, 1, c, sums, columns);
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
    else if (t.TC <= 32) tile_by_warps<Pass, 1, false>(pass, t, piece);
    else if (aligned) tile_by_warps<Pass, 4, true>(pass, t, piece);
    else tile_by_warps<Pass, 4, false>(pass, t, piece);
}
