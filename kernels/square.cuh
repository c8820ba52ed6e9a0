// A pass over products of matrices with their transposes: `side` x `side` values for each matrix, in aligned scratch memory.
// A piece is kChunk values of one matrix.

template <class Pass>
__device__ __forceinline__ void square_piece(Pass& pass, long long side, int piece) {
    const long long size = side * side, pieces = (size + kChunk - 1) / kChunk, batch = piece / pieces;
    const long long begin = batch * size + piece % pieces * kChunk, stop = (batch + 1) * size;
    typename Pass::Sums sums;
    pass.enter_batch(batch);
    if (size % kVector == 0) flat_elements<Pass, true>(pass, begin, begin + kChunk < stop ? begin + kChunk : stop, sums);
    else flat_elements<Pass, false>(pass, begin, begin + kChunk < stop ? begin + kChunk : stop, sums);
}
