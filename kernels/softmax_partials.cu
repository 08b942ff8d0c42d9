// The summary of a shard's logits, in one read: for each row and tile the maximum and the sum of exponentials (with
// ENTROPY also their first moment), and the logits of the row's targets. It writes the whole message that the ranks
// gather (logprob/partials.py).
//
// Grid (rows / blockDim.y, splits): a block has blockDim.y rows, each with blockDim.x / 32 warps; the tiles of a row are
// dealt to the splits, and the units of its tiles to the warps. A unit is unit_columns columns of a tile, summed by one
// warp; which lane sums which element, and in which order, follows from the index in the tile alone, so no bit depends
// on the grid, the block, the other rows, the number of ranks or the alignment.
// Dynamic shared memory: fields x units of a block's rows, in floats.
//
// Reads a logit once (sizeof(T) bytes) and writes nothing of the vocabulary's size: 4 x (slots x fields + targets) bytes
// a row. A row whose targets are all ignored is not read, unless for its entropy.
// Source: the running maximum and sum are those of the online softmax (Milakov and Gimelshein, 2018).
#include "common.cuh"

constexpr int VECTORS = 4;  // loads of 16 bytes that a lane has in flight

// Adds VECTORS vectors to a lane's partial: their maximum first, then one rescale.
template <class T, bool ENTROPY>
__device__ __forceinline__ void add_vectors(Partial& lane, const unsigned (&words)[VECTORS][4], float to_log2) {
    constexpr int COUNT = elements_of<T>;
    float top = neg_inf();
#pragma unroll
    for (int j = 0; j < VECTORS; ++j)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) top = fmaxf(top, Words<T>::get(words[j], i));
    float before = lane.maximum;
    lane.maximum = fmaxf(before, top);
    float pivot = pivot_of(lane.maximum);
    float delta = (before - pivot) * to_log2, factor = exp2_approx(delta);
    if constexpr (ENTROPY) lane.moment = (lane.moment + fmaxf(delta * LN_2, LOWEST) * lane.sum) * factor;
    lane.sum *= factor;
    float sums[VECTORS], moments[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        sums[j] = moments[j] = 0.0f;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            float d = (Words<T>::get(words[j], i) - pivot) * to_log2;
            float e = exp2_approx(d);
            sums[j] += e;
            if constexpr (ENTROPY) moments[j] += e * fmaxf(d, LOWEST);
        }
    }
    lane.sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if constexpr (ENTROPY) lane.moment += ((moments[0] + moments[1]) + (moments[2] + moments[3])) * LN_2;
}

// A warp's summary of `count` columns from `p` on; the same in all lanes.
template <class T, int WIDTH, bool ENTROPY>
__device__ __forceinline__ Partial summary_of_unit(const T* p, int64 stride, int count, float to_log2) {
    constexpr int COUNT = elements_of<T>, STEP = WARP * COUNT, BATCH = VECTORS * STEP;
    constexpr unsigned NEG_INF = Words<T>::NEG_INF;
    int first = threadIdx.x % WARP * COUNT;
    if (WIDTH != STRIDED) stride = 1;
    p += first * stride;
    Partial lane = {neg_inf(), 0.0f, 0.0f};
    unsigned words[VECTORS][4];
    for (; count >= BATCH; count -= BATCH, p += BATCH * stride) {
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) load_vector<T, WIDTH>(p + j * STEP * stride, stride, words[j]);
        add_vectors<T, ENTROPY>(lane, words, to_log2);
    }
    if (count > 0) {  // what is not there counts as -inf
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[j][i] = NEG_INF;
            if (first + j * STEP + COUNT <= count) load_vector<T, WIDTH>(p + j * STEP * stride, stride, words[j]);
        }
#pragma unroll
        for (int j = 0; j < VECTORS; ++j) {
            int left = count - first - j * STEP;
            if (left > 0 && left < COUNT) load_some(p + j * STEP * stride, stride, left, words[j]);
        }
        add_vectors<T, ENTROPY>(lane, words, to_log2);
    }
    Partial whole = {lane.maximum, 0.0f, 0.0f};
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2)
        whole.maximum = fmaxf(whole.maximum, __shfl_xor_sync(ALL_LANES, whole.maximum, other));
    float delta = (lane.maximum - pivot_of(whole.maximum)) * to_log2, factor = exp2_approx(delta);
    whole.sum = lane.sum * factor;
    if constexpr (ENTROPY) whole.moment = (lane.moment + fmaxf(delta * LN_2, LOWEST) * lane.sum) * factor;
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) {
        whole.sum += __shfl_xor_sync(ALL_LANES, whole.sum, other);
        if constexpr (ENTROPY) whole.moment += __shfl_xor_sync(ALL_LANES, whole.moment, other);
    }
    return whole;
}

// rows: of this launch, the first of which is first_row of all_rows.
// logits: [rows, columns] by inner, outer_stride, inner_stride (row_offset) and column_stride, in elements.
// first_column, end_column: of the shard in the vocabulary, for the header.
// tiles, tile_columns: their product is the columns that count.
// slots: of a row in the message; those behind the tiles are empty.
// local_target: [rows, targets] columns of this shard, IGNORED, or -1 where another rank owns it; null: no targets.
// to_log2: log2(e) / temperature.
// message: [HEADER_FLOATS + rows * (slots * fields + targets)].
template <class T, int WIDTH, bool ENTROPY>
__global__ void __launch_bounds__(256, WIDTH == STRIDED ? 2 : 4)  // addresses of single elements need registers
    softmax_partials(const T* logits, int inner, int64 outer_stride, int64 inner_stride, int64 column_stride, int rows,
                     int64 first_row, int64 all_rows, int64 columns, int64 first_column, int64 end_column, int tiles, int64 tile_columns, int slots,
                     int unit_columns, const int64* local_target, int targets, float to_log2, float* message) {
    constexpr int FIELDS = fields_of<ENTROPY>;
    int row = blockIdx.x * blockDim.y + threadIdx.y;
    const int64* of_row = local_target + (first_row + row) * targets;
    bool active = row < rows;
    if (active && !ENTROPY && targets) {
        active = false;
        for (int k = 0; k < targets; ++k) active |= global_load(of_row + k) != IGNORED;
    }
    const T* x = logits;
    if (row < rows) x += row_offset(row, inner, outer_stride, inner_stride);

    int tiles_here = tiles / gridDim.y, first_tile = blockIdx.y * tiles_here;
    int units_of_tile = (int)((tile_columns + unit_columns - 1) / unit_columns), units = tiles_here * units_of_tile;
    float* partials = static_cast<float*>(dynamic_shared()) + threadIdx.y * units * FIELDS;
    for (int unit = threadIdx.x / WARP; unit < units; unit += blockDim.x / WARP) {
        int64 begin = (int64)(unit % units_of_tile) * unit_columns;
        int64 left = tile_columns - begin;
        Partial partial = {neg_inf(), 0.0f, 0.0f};
        if (active) {
            int64 column = (first_tile + unit / units_of_tile) * tile_columns + begin;
            partial = summary_of_unit<T, WIDTH, ENTROPY>(x + column * column_stride, column_stride,
                                                         left < unit_columns ? (int)left : unit_columns, to_log2);
        }
        if (threadIdx.x % WARP == 0) {
            shared_store(partials + unit * FIELDS, partial.maximum);
            shared_store(partials + unit * FIELDS + 1, partial.sum);
            if constexpr (ENTROPY) shared_store(partials + unit * FIELDS + 2, partial.moment);
        }
    }
    __syncthreads();

    if (first_row == 0 && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.y == 0 && threadIdx.x < 4) {
        int i = threadIdx.x;
        int64 value = i == 0 ? first_column : i == 1 ? end_column : i == 2 ? columns : all_rows;
        unsigned* header = reinterpret_cast<unsigned*>(message) + 2 * i;
        global_store(header, (unsigned)value);
        global_store(header + 1, (unsigned)(value >> 32));
    }
    if (row >= rows) return;
    float* out = message + HEADER_FLOATS + (first_row + row) * ((int64)slots * FIELDS + targets);
    int tile = first_tile + threadIdx.x;
    if (threadIdx.x < tiles_here) {
        const float* units_here = partials + threadIdx.x * units_of_tile * FIELDS;
        auto at = [=](int i) -> Partial {
            const float* p = units_here + i * FIELDS;
            return {shared_load(p), shared_load(p + 1), ENTROPY ? shared_load(p + 2) : 0.0f};
        };
        store_partial<ENTROPY>(out + tile * FIELDS, merge_in_order<ENTROPY>(units_of_tile, at, to_log2));
    }
    if (blockIdx.y != 0) return;
    for (int slot = tiles + threadIdx.x; slot < slots; slot += blockDim.x)
        store_partial<ENTROPY>(out + slot * FIELDS, {neg_inf(), 0.0f, 0.0f});
    for (int k = threadIdx.x; k < targets; k += blockDim.x) {
        int64 column = global_load(of_row + k);
        global_store(out + slots * FIELDS + k, column < 0 ? 0.0f : widen(global_load(x + column * column_stride)));
    }
}
