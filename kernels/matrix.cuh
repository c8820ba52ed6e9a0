// A pass over a tensor that is seen as a batch of matrices: A x B of them, with R rows and C columns each.
//
// Loops of a length unknown to the compiler are not unrolled: there are many of them, and all share the registers of one
// kernel.
//
// A piece is a tile of one matrix, TR rows by TC columns, or G whole matrices. Its sums over rows, columns and matrices are
// written to separate places, and the next stage adds them up in order.
//
// If the user has divided a tensor, only a part of it is on this device: a window of matrices, rows and columns. These, and the
// pieces, are numbered as in the whole tensor. The elements of the part are contiguous.

struct Tile {
    long long R, C;            // extents
    int TR, TC, G, NR, NC;     // rows and columns of a tile, matrices of a piece; tiles along rows and columns
    long long a0, r0, c0;      // matrix, row and column at which the first tile would begin, if all tiles before were full
    long long a1, r1, c1;      // end of the matrices, rows and columns of the part
    long long stride, matrix;  // distance between rows, and between matrices, in elements
    long long before;          // distance, in these strides, from the tensor's first element to the part's first element
};

__device__ __forceinline__ Tile tile_of(const long long* t) {
    Tile tile = {t[IN_R], t[IN_C], (int)t[IN_TR], (int)t[IN_TC], (int)t[IN_G], (int)t[IN_NR], (int)t[IN_NC]};
    if constexpr (kWindow == 0) {
        tile.a1 = t[IN_A] * t[IN_B], tile.r1 = tile.R, tile.c1 = tile.stride = tile.C;
    } else {
        const long long* const window = t + kWindow;
        tile.a0 = window[0], tile.r0 = window[1], tile.c0 = window[2];
        tile.a1 = window[3], tile.r1 = window[4], tile.c1 = window[5];
        tile.stride = window[6], tile.matrix = window[7], tile.before = window[8];
    }
    return tile;
}

// The offset of an element. row: the number of row r of the matrix among the rows of all matrices.
__device__ __forceinline__ long long element(const Tile& t, long long row, long long batch, long long r, long long c) {
    if constexpr (kWindow == 0) return row * t.C + c;
    else return batch * t.matrix + r * t.stride + c - t.before;
}

// Shared memory for sums over columns, which the passes use one after the other.
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

// Reduces the k-th result of each of kRows rows, a power of two, over the lanes of a warp: a lane gets the result of row
// lane / (32 / kRows). In each exchange a lane passes on half of its rows, so there are few. The bits are those of warp_fold().
template <class Of, int kRows>
__device__ __forceinline__ W fold_rows(int k, W (&x)[kRows]) {
    const int lane = threadIdx.x % 32;
    int distance = 16;
#pragma unroll
    for (int count = kRows / 2; count > 0; count /= 2, distance /= 2) {
#pragma unroll
        for (int u = 0; u < count; ++u) {
            const bool upper = (lane & distance) != 0;
            const W mine = upper ? x[u + count] : x[u], other = upper ? x[u] : x[u + count];
            x[u] = Of::fold(k, mine, __shfl_xor_sync(0xffffffffu, other, distance));
        }
    }
#pragma unroll
    for (; distance > 0; distance /= 2) x[0] = Of::fold(k, x[0], __shfl_xor_sync(0xffffffffu, x[0], distance));
    return x[0];
}

// Processes N neighbouring columns, from c on, of kRows rows r, r + kWarps, ..., all read before the first is used. left: the
// number of rows of the tile from r on. n: how many of the columns exist; if rows are aligned, all or none.
template <class Pass, int N, int kRows, bool kAligned>
__device__ __forceinline__ void rows_of_tile(const Pass& pass, const Tile& t, long long batch, long long r, int left, long long c, int n,
                                             int tile_column, typename Pass::Sums& sums, W (*columns)[N]) {
    constexpr int kRow = Pass::kRow > 0 ? Pass::kRow : 1;
    const long long row = batch * t.R + r, at = element(t, row, batch, r, c), stride = kWarps * t.stride;
    const int there = kAligned ? N : n;
    // Initialized to zero, because a variable with a value on some paths only would occupy its registers in other passes, too.
    typename Pass::template Loads<N> loads[kRows] = {};
    typename Pass::Row of_row[kRows] = {};
#pragma unroll
    for (int u = 0; u < kRows; ++u)
        if (n > 0 && u * kWarps < left) loads[u] = pass.template load<N, kAligned>(at + u * stride, there);
#pragma unroll
    for (int u = 0; u < kRows; ++u)
        if (u * kWarps < left) of_row[u] = pass.row(row + u * kWarps, r + u * kWarps);
    const typename Pass::template Columns<N> values = pass.template columns<N>(c, n);
    W of_rows[kRow][kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
        if (n > 0 && u * kWarps < left) pass.template work<N>(at + u * stride, there, kAligned, loads[u], of_row[u], values, sums, columns);
#pragma unroll
        for (int k = 0; k < Pass::kRow; ++k) of_rows[k][u] = sums.row[k];
        start<typename Pass::OfRow>(sums.row);
    }
    if constexpr (Pass::kRow > 0) {
#pragma unroll
        for (int k = 0; k < Pass::kRow; ++k) sums.row[k] = fold_rows<typename Pass::OfRow>(k, of_rows[k]);
        const int lane = threadIdx.x % 32, u = lane / (32 / kRows);
        if (lane % (32 / kRows) == 0 && u * kWarps < left) pass.keep_row((row + u * kWarps) * t.NC + tile_column, sums);
        start<typename Pass::OfRow>(sums.row);
    }
}

// Adds up the warps' sums over a tile's columns. The position of the tile is computed again, because keeping it would take
// registers from the loop over rows.
template <class Pass, int N>
__device__ __forceinline__ void keep_columns(Pass& pass, int piece, long long batch) {
    const W* const of_warp = column_room();
    const Tile t = tile_of(pass.t);
    const int tile_column = piece % t.NC, tile_row = piece / t.NC % t.NR;
    const long long c = (long long)tile_column * t.TC + t.c0, to = (batch * t.NR + tile_row) * t.C + c;
#pragma unroll 1
    for (int at = threadIdx.x; at < 32 * N && c + at < t.c1; at += kThreads) {
#pragma unroll
        for (int k = 0; k < Pass::kColumn; ++k) {
            W sum = of_warp[k * kWarps * 32 * N + at];
#pragma unroll
            for (int w = 1; w < kWarps; ++w) sum = Pass::OfColumn::fold(k, sum, of_warp[(k * kWarps + w) * 32 * N + at]);
            pass.keep_column(k, to + at, sum);
        }
    }
}

// Processes tiles: a warp takes a row at a time, and a lane N neighbouring columns of it.
template <class Pass, int N, int kRows>
__device__ __forceinline__ void tile_by_warps(Pass& pass, const Tile& t, bool aligned, int piece) {
    W* const of_warp = column_room();  // [kColumn][kWarps][32 * N]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile_column = piece % t.NC, tile_row = piece / t.NC % t.NR;
    const long long first = (long long)(piece / t.NC / t.NR) * t.G + t.a0, stop = first + t.G < t.a1 ? first + t.G : t.a1;
    const long long r0 = (long long)tile_row * t.TR + t.r0, c = (long long)tile_column * t.TC + t.c0 + lane * N;
    const int rows = t.r1 - r0 < t.TR ? (int)(t.r1 - r0) : t.TR;
    const int n = c >= t.c1 ? 0 : t.c1 - c < N ? (int)(t.c1 - c) : N;
    typename Pass::Sums sums;
    start<typename Pass::OfWhole>(sums.whole), start<typename Pass::OfRow>(sums.row), start<typename Pass::OfBatch>(sums.batch);
#pragma unroll 1
    for (long long batch = first; batch < stop; ++batch) {
        W columns[Pass::kColumn > 0 ? Pass::kColumn : 1][N] = {};
        start_columns<typename Pass::OfColumn>(columns);
        pass.enter_batch(batch);
        // anew(), because the compiler would otherwise keep addresses in registers from row to row
        if (N > 1 && aligned) {
#pragma unroll 1
            for (int next = warp; next < rows; next += kRows * kWarps) {
                const int r = anew(next);
                rows_of_tile<Pass, N, kRows, N != 1>(pass, t, batch, r0 + r, rows - r, c, n, tile_column, sums, columns);
            }
        } else {
#pragma unroll 1
            for (int next = warp; next < rows; next += kWarps) {
                const int r = anew(next);
                rows_of_tile<Pass, N, 1, false>(pass, t, batch, r0 + r, 1, c, n, tile_column, sums, columns);
            }
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

// Processes small matrices, such as kernels of convolutions: one, or a part of one, per thread. NR and NC are 1 if it is whole.
template <class Pass>
__device__ __forceinline__ void matrices_by_threads(Pass& pass, const Tile& t, int piece) {
    W* const column = column_room() + threadIdx.x;  // [kColumn][kSmallColumns][kThreads]
    const int tile_column = kWindow == 0 ? 0 : piece % t.NC, tile_row = kWindow == 0 ? 0 : piece / t.NC % t.NR;
    const int group = kWindow == 0 ? piece : piece / t.NC / t.NR;
    const long long batch = (long long)group * t.G + t.a0 + threadIdx.x, r0 = (long long)tile_row * t.TR + t.r0;
    const long long of_rows = kWindow == 0 ? batch : batch * t.NR + tile_row;
    const int c0 = tile_column * t.TC + (int)t.c0;
    typename Pass::Sums sums;
    start<typename Pass::OfWhole>(sums.whole), start<typename Pass::OfRow>(sums.row), start<typename Pass::OfBatch>(sums.batch);
    if (threadIdx.x < t.G && batch < t.a1) {
        pass.enter_batch(batch);
        if constexpr (Pass::kColumn > 0)
#pragma unroll
            for (int k = 0; k < Pass::kColumn; ++k)
#pragma unroll 1
                for (int c = c0; c < t.c1; ++c) column[(k * kSmallColumns + c) * kThreads] = Pass::OfColumn::start(k, (W)0);
#pragma unroll 1
        for (long long r = r0; r < t.r1; ++r) {
            const long long row = batch * t.R + r;
            const typename Pass::Row of_row = pass.row(row, r);
#pragma unroll 1
            for (int c = c0; c < t.c1; ++c) {
                W columns[Pass::kColumn > 0 ? Pass::kColumn : 1][1] = {};
                start_columns<typename Pass::OfColumn>(columns);
                const long long at = element(t, row, batch, r, c);
                const auto loads = pass.template load<1, false>(at, 1);
                pass.template work<1>(at, 1, false, loads, of_row, pass.template columns<1>(c, 1), sums, columns);
                if constexpr (Pass::kColumn > 0)
#pragma unroll
                    for (int k = 0; k < Pass::kColumn; ++k) {
                        W& kept = column[(k * kSmallColumns + c) * kThreads];
                        kept = Pass::OfColumn::fold(k, kept, columns[k][0]);
                    }
            }
            if constexpr (Pass::kRow > 0) {
                pass.keep_row(kWindow == 0 ? row : row * t.NC + tile_column, sums);
                start<typename Pass::OfRow>(sums.row);
            }
        }
        if constexpr (Pass::kColumn > 0)
#pragma unroll
            for (int k = 0; k < Pass::kColumn; ++k)
#pragma unroll 1
                for (int c = c0; c < t.c1; ++c) pass.keep_column(k, of_rows * t.C + c, column[(k * kSmallColumns + c) * kThreads]);
        if constexpr (Pass::kBatch > 0) pass.keep_batch(kWindow == 0 ? batch : of_rows * t.NC + tile_column, sums);
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
