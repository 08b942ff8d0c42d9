// The gradient of log-probabilities and entropy with respect to a shard's logits, in one read and one write:
//     scale * (sum of g * 1[target] - p * (g + h * (log p + entropy))),    p = exp((x - maximum) * scale - log_sum)
// for g, h the incoming gradients of the log-probabilities (in the second place their sum) and of the entropy. Rounded
// once, to the logits' type. result may be logits: a thread loads what it overwrites before it stores.
//
// Grid (rows, columns / columns of a block); a thread has VECTORS vectors of 16 bytes. Dynamic shared memory: with more
// than one target a bit for each of the block's columns.
// Reads a logit once and writes it once, 2 * sizeof(T) bytes; the target's twice. A row whose incoming gradients are all zero is written
// without being read, also where it holds NaN; so are the columns past `width`.
#include "common.cuh"

constexpr int VECTORS = 4;
constexpr int THREADS = 256;

// What the elements of a row share. g: sum of the log-probabilities' incoming gradients; h: the entropy's.
struct Row {
    float top, log_sum, entropy, g, h, to_log2, weight;
};

template <bool ENTROPY> __device__ __forceinline__ float gradient_at(float x, const Row& row) {
    float d = (x - row.top) * row.to_log2;
    float p = exp2_approx(d) * row.weight;  // times -scale
    if constexpr (ENTROPY)
        return p * (row.g + row.h * (fmaxf(d * LN_2 - row.log_sum, LOWEST) + row.entropy));
    else
        return p * row.g;
}

// A block's columns, `here` of them, of which the first `inside` have a gradient. FULL: all of them, as many as a block
// can have, and at most one target, which the caller sees to. `add` adds what several targets of a row get.
template <class T, int WIDTH, bool ENTROPY, bool FULL, class Add>
__device__ __forceinline__ void write_columns(const T* x, int64 column_stride, T* out, int64 result_column_stride,
                                              int here, int inside, const Row& row, Add add) {
    constexpr int COUNT = elements_of<T>;
    unsigned words[VECTORS][4];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        int column = (j * THREADS + threadIdx.x) * COUNT;
        if (FULL || column + COUNT <= inside) {
            load_vector<T, WIDTH>(x + column * column_stride, column_stride, words[j]);
        } else if (column < inside) {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[j][i] = 0;
            load_some(x + column * column_stride, column_stride, inside - column, words[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        int column = (j * THREADS + threadIdx.x) * COUNT;
        unsigned rounded[4] = {0, 0, 0, 0};
        if (FULL || column < inside) {
            float values[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) values[i] = gradient_at<ENTROPY>(Words<T>::get(words[j], i), row);
            if constexpr (!FULL) add(column, values);
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                Words<T>::put(rounded, i, FULL || column + i < inside ? values[i] : 0.0f);
        }
        if (FULL || column + COUNT <= here)
            store_vector<T, WIDTH>(out + column * result_column_stride, result_column_stride, rounded);
        else if (column < here)
            store_some(out + column * result_column_stride, result_column_stride, here - column, rounded);
    }
}

// logits, result: [rows, columns] as in softmax_partials; both have the same `inner`.
// g_logprob: [rows, targets], null: zero; local_target: [rows, targets] as in softmax_partials; null: no targets.
// maximum, log_sum, entropy, g_entropy: [rows]; the last two are read with ENTROPY only.
template <class T, int WIDTH, bool ENTROPY>
__global__ void __launch_bounds__(THREADS, 4)
    logprob_backward(const T* logits, int inner, int64 outer_stride, int64 inner_stride, int64 column_stride, T* result,
                     int64 result_outer_stride, int64 result_inner_stride, int64 result_column_stride, int64 columns,
                     int64 width, const float* maximum, const float* log_sum, const float* entropy,
                     const float* g_logprob, const int64* local_target, int targets, const float* g_entropy,
                     float scale) {
    constexpr int COUNT = elements_of<T>, BLOCK_COLUMNS = THREADS * COUNT * VECTORS;
    int at = blockIdx.x;
    int64 first = (int64)blockIdx.y * BLOCK_COLUMNS;
    if (WIDTH != STRIDED) column_stride = result_column_stride = 1;
    const T* x = logits + row_offset(at, inner, outer_stride, inner_stride) + first * column_stride;
    T* out = result + row_offset(at, inner, result_outer_stride, result_inner_stride) + first * result_column_stride;
    auto left = [=](int64 whole) { return (int)(whole - first < BLOCK_COLUMNS ? whole - first : BLOCK_COLUMNS); };
    int here = left(columns), inside = left(width);  // columns of the block; may be below 1: that count

    const int64* of_row = local_target + (int64)at * targets;
    const float* g_of_row = g_logprob + (int64)at * targets;
    bool several = g_logprob && targets > 1;
    unsigned* marks = static_cast<unsigned*>(dynamic_shared());
    if (several) {
        for (int i = threadIdx.x; i < BLOCK_COLUMNS / 32; i += THREADS) shared_store(marks + i, 0u);
        __syncthreads();
    }
    Row row = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, scale * LOG2_E, 0.0f};
    bool active = false;
    int64 target = -1;  // the only one, in the block's columns
    for (int k = 0; g_logprob && k < targets; ++k) {
        int64 column = global_load(of_row + k);
        if (column == IGNORED) continue;  // its log-probability is constant
        float amount = global_load(g_of_row + k);
        row.g += amount;
        active |= amount != 0.0f;
        target = column < 0 ? -1 : column - first;
        if (several && k % THREADS == threadIdx.x && target >= 0 && target < inside)
            shared_or(marks + target / 32, 1u << target % 32);
    }
    if (several) __syncthreads();
    if constexpr (ENTROPY) {
        row.h = global_load(g_entropy + at);
        active |= row.h != 0.0f;
    }
    if (active) {
        row.top = global_load(maximum + at);
        row.log_sum = global_load(log_sum + at);
        if constexpr (ENTROPY) row.entropy = global_load(entropy + at);
        row.weight = -scale * exp2_approx(-row.log_sum * LOG2_E);
    } else {
        inside = 0;
    }
    // The thread whose vector holds the only target: it overwrites what it will have written.
    bool mine = !several && target >= 0 && target < inside && target / COUNT % THREADS == threadIdx.x;
    float x_target = mine ? widen(global_load(x + target * column_stride)) : 0.0f;

    auto add = [=](int column, float(&values)[COUNT]) {
        if (!several || !(shared_load(marks + column / 32) >> column % 32 & ((1u << COUNT) - 1))) return;
        for (int k = 0; k < targets; ++k) {
            int64 place = global_load(of_row + k) - first - column;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (place == i) values[i] += global_load(g_of_row + k) * scale;
        }
    };
    if (inside == BLOCK_COLUMNS && !several)
        write_columns<T, WIDTH, ENTROPY, true>(x, column_stride, out, result_column_stride, here, inside, row, add);
    else
        write_columns<T, WIDTH, ENTROPY, false>(x, column_stride, out, result_column_stride, here, inside, row, add);
    if (mine)
        global_store(out + target * result_column_stride,
                     narrow<T>(gradient_at<ENTROPY>(x_target, row) + row.g * scale));
}
