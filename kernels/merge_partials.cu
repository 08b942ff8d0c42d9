// The merge of all ranks' messages, in column order: each row's maximum and log-sum, the log-probabilities of its targets
// and, with ENTROPY, its entropy. One thread a row; grid (rows / blockDim.x).
//
// What does not fit (other numbers of rows, ranges with a gap, an overlap or a wrong order) gives NaN in every row, a
// target that no rank owns gives NaN; the host is never waited for.
// Reads 4 x ranks x (slots x fields + targets) bytes a row, writes 8 to 12 and 4 a target.
#include "common.cuh"

struct Header {
    int64 start, end, columns, rows;
};

// Messages follow each other at any multiple of 4 bytes: integers are read in halves.
__device__ __forceinline__ int64 load_integer(const float* message, int i) {
    const unsigned* halves = reinterpret_cast<const unsigned*>(message) + 2 * i;
    return (int64)((unsigned long long)global_load(halves) | (unsigned long long)global_load(halves + 1) << 32);
}

__device__ __forceinline__ Header load_header(const float* message) {
    return {load_integer(message, 0), load_integer(message, 1), load_integer(message, 2), load_integer(message, 3)};
}

// gathered: [ranks, HEADER_FLOATS + rows * (slots * fields + targets)].
// target: [rows, targets] tokens, the same on every rank; null: no targets, and no ranges are compared.
// to_log2: log2(e) * scale; scale: 1 / temperature.
// maximum, log_sum, entropy: [rows]; logprob: [rows, targets].
template <bool ENTROPY>
__global__ void __launch_bounds__(128)
    merge_partials(const float* gathered, int ranks, int rows, int slots, const int64* target, int targets,
                   float to_log2, float scale, float* maximum, float* log_sum, float* logprob, float* entropy) {
    constexpr int FIELDS = fields_of<ENTROPY>;
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    int64 row_length = (int64)slots * FIELDS + targets, length = HEADER_FLOATS + rows * row_length;
    bool fits = true;
    int64 expected = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        Header header = load_header(gathered + rank * length);
        fits &= header.rows == rows;
        if (!targets) continue;
        fits &= 0 <= header.start && header.start <= header.end && header.end - header.start <= header.columns;
        if (header.start == header.end) continue;  // owns nothing, wherever it says that nothing lies
        fits &= header.start == expected;
        expected = header.end;
    }
    const float* of_row = gathered + HEADER_FLOATS + row * row_length;
    auto at = [=](int i) { return load_partial<ENTROPY>(of_row + i / slots * length + i % slots * FIELDS); };
    Partial whole = merge_in_order<ENTROPY>(ranks * slots, at, to_log2);
    float logs = fits ? logf(whole.sum) : not_a_number();
    global_store(maximum + row, whole.maximum);
    global_store(log_sum + row, logs);
    if constexpr (ENTROPY) global_store(entropy + row, logs - whole.moment / whole.sum);
    for (int k = 0; k < targets; ++k) {
        int64 token = global_load(target + (int64)row * targets + k);
        float value = token == IGNORED ? 0.0f : not_a_number();
        for (int rank = 0; rank < ranks; ++rank) {
            const float* message = gathered + rank * length;
            if (token < load_integer(message, 0) || token >= load_integer(message, 1)) continue;
            float logit = global_load(of_row + rank * length + slots * FIELDS + k);
            value = (logit - whole.maximum) * scale - logs;
        }
        global_store(logprob + (int64)row * targets + k, value);
    }
}
