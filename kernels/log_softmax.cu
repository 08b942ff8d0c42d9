// A shard's part of the log-softmax over the whole vocabulary: (x - maximum) * scale - log_sum, rounded once to OUT,
// which is T or Float.
//
// Grid (rows, columns / columns of a block); a thread has VECTORS vectors of 16 bytes of T.
// Reads a logit once and writes a value once, sizeof(T) + sizeof(OUT) bytes.
#include "common.cuh"

constexpr int VECTORS = 4;
constexpr int THREADS = 256;

// A block's columns, `here` of them. FULL: as many as a block can have.
template <class T, int WIDTH, class OUT, int OUT_WIDTH, bool FULL>
__device__ __forceinline__ void write_columns(const T* x, int64 column_stride, OUT* out, int64 result_column_stride,
                                              int here, float top, float log_sum, float scale) {
    constexpr int COUNT = elements_of<T>, OUT_COUNT = elements_of<OUT>;
    unsigned words[VECTORS][4];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        int column = (j * THREADS + threadIdx.x) * COUNT;
        if (FULL || column + COUNT <= here) {
            load_vector<T, WIDTH>(x + column * column_stride, column_stride, words[j]);
        } else if (column < here) {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[j][i] = 0;
            load_some(x + column * column_stride, column_stride, here - column, words[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        int column = (j * THREADS + threadIdx.x) * COUNT;
        if (!FULL && column >= here) continue;
#pragma unroll
        for (int part = 0; part < COUNT; part += OUT_COUNT) {
            unsigned rounded[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < OUT_COUNT; ++i)
                Words<OUT>::put(rounded, i, (Words<T>::get(words[j], part + i) - top) * scale - log_sum);
            OUT* at = out + (column + part) * result_column_stride;
            if (FULL || column + part + OUT_COUNT <= here)
                store_vector<OUT, OUT_WIDTH>(at, result_column_stride, rounded);
            else if (column + part < here)
                store_some(at, result_column_stride, here - column - part, rounded);
        }
    }
}

// logits, result: [rows, columns] as in softmax_partials, OUT_WIDTH being the result's WIDTH; maximum, log_sum: [rows].
template <class T, int WIDTH, class OUT, int OUT_WIDTH>
__global__ void __launch_bounds__(THREADS, 4)
    log_softmax(const T* logits, int inner, int64 outer_stride, int64 inner_stride, int64 column_stride, OUT* result,
                int64 result_outer_stride, int64 result_inner_stride, int64 result_column_stride, int64 columns,
                const float* maximum, const float* log_sum, float scale) {
    constexpr int BLOCK_COLUMNS = THREADS * elements_of<T> * VECTORS;
    int row = blockIdx.x;
    int64 first = (int64)blockIdx.y * BLOCK_COLUMNS;
    if (WIDTH != STRIDED) column_stride = 1;
    if (OUT_WIDTH != STRIDED) result_column_stride = 1;
    const T* x = logits + row_offset(row, inner, outer_stride, inner_stride) + first * column_stride;
    OUT* out = result + row_offset(row, inner, result_outer_stride, result_inner_stride) + first * result_column_stride;
    float top = global_load(maximum + row), logs = global_load(log_sum + row);
    if (columns - first >= BLOCK_COLUMNS)
        write_columns<T, WIDTH, OUT, OUT_WIDTH, true>(x, column_stride, out, result_column_stride, BLOCK_COLUMNS, top,
                                                      logs, scale);
    else
        write_columns<T, WIDTH, OUT, OUT_WIDTH, false>(x, column_stride, out, result_column_stride,
                                                       (int)(columns - first), top, logs, scale);
}
