// What the kernels share: how logits are loaded, widened and stored, and how rows are found.
//
// Needs no header of CUDA's, so that NVRTC compiles it where none are installed. All access to memory goes through
// global_load, global_store, shared_load, shared_store and shared_or: where CUDA_ON_HOST is defined the environment
// provides them (and exp2_approx, half_to_float, float_to_half, dynamic_shared), checks every access and counts bytes.

#ifndef CUDA_ON_HOST

template <class V> __device__ __forceinline__ V global_load(const V* p) { return *p; }
template <class V> __device__ __forceinline__ void global_store(V* p, V value) { *p = value; }
// Said in PTX, for the compiler splits these where a narrower store of the same words stands nearby.
__device__ __forceinline__ void global_store(uint4* p, uint4 v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void global_store(uint2* p, uint2 v) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
template <class V> __device__ __forceinline__ V shared_load(const V* p) { return *p; }
template <class V> __device__ __forceinline__ void shared_store(V* p, V value) { *p = value; }
__device__ __forceinline__ unsigned shared_or(unsigned* p, unsigned bits) { return atomicOr(p, bits); }

__device__ __forceinline__ void* dynamic_shared() {
    extern __shared__ uint4 shared_memory[];
    return shared_memory;
}

// 2^x; relative error below 2^-22, results below 2^-126 become 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#endif

typedef long long int64;

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float LARGEST = 3.402823466e38f;  // a float; what stands for the maximum of nothing but -inf is -LARGEST
constexpr float LOWEST = -1e4f;             // exp(LOWEST) is 0; stands for -inf where 0 * (-inf) has to be 0
constexpr int64 IGNORED = -100;             // target of a row that counts for nothing
constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int VECTOR_BYTES = 16;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

// The maximum to subtract: finite where it is -inf, so that -inf - pivot is -inf, not NaN.
__device__ __forceinline__ float pivot_of(float maximum) { return fmaxf(maximum, -LARGEST); }

// ---------------------------------------------------------------------- types of logits

struct Bf16 {
    unsigned short bits;
};
struct Half {
    unsigned short bits;
};
struct Float {
    unsigned bits;
};

// A vector is 16 bytes of T, held as four words. get() widens its i-th element (i is known to the compiler); put()
// rounds a value to nearest even into it, where the words are zero before. NEG_INF: a word of -inf.
template <class T> struct Words;

template <> struct Words<Bf16> {
    static constexpr unsigned NEG_INF = 0xff80ff80u;

    static __device__ __forceinline__ float get(const unsigned (&words)[4], int i) {
        unsigned word = words[i >> 1];
        return __uint_as_float((i & 1) ? word & 0xffff0000u : word << 16);
    }
    static __device__ __forceinline__ unsigned round(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        unsigned short rounded;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
        return rounded;
#endif
        unsigned bits = __float_as_uint(value);
        return value != value ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    }
    static __device__ __forceinline__ void put(unsigned (&words)[4], int i, float value) {
        words[i >> 1] |= round(value) << ((i & 1) * 16);
    }
};

template <> struct Words<Half> {
    static constexpr unsigned NEG_INF = 0xfc00fc00u;

    static __device__ __forceinline__ float get(const unsigned (&words)[4], int i) {
        return half_to_float((unsigned short)(words[i >> 1] >> ((i & 1) * 16)));
    }
    static __device__ __forceinline__ unsigned round(float value) { return float_to_half(value); }
    static __device__ __forceinline__ void put(unsigned (&words)[4], int i, float value) {
        words[i >> 1] |= round(value) << ((i & 1) * 16);
    }
};

template <> struct Words<Float> {
    static constexpr unsigned NEG_INF = 0xff800000u;

    static __device__ __forceinline__ float get(const unsigned (&words)[4], int i) { return __uint_as_float(words[i]); }
    static __device__ __forceinline__ unsigned round(float value) { return __float_as_uint(value); }
    static __device__ __forceinline__ void put(unsigned (&words)[4], int i, float value) { words[i] = round(value); }
};

template <class T> __device__ __forceinline__ float widen(T value) {
    unsigned words[4] = {value.bits, 0, 0, 0};
    return Words<T>::get(words, 0);
}

template <class T> __device__ __forceinline__ T narrow(float value) {
    T result;
    result.bits = (decltype(result.bits))Words<T>::round(value);
    return result;
}

// ---------------------------------------------------------------------- vectors in memory

template <class T> constexpr int elements_of = VECTOR_BYTES / (int)sizeof(T);

// The elements [0, count) of a vector of which the others lie outside.
template <class T> __device__ __forceinline__ void load_some(const T* p, int64 stride, int count, unsigned (&words)[4]) {
    constexpr int OF_WORD = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < elements_of<T>; ++i) {
        if (i >= count) continue;
        unsigned shift = i % OF_WORD * 16, mask = sizeof(T) == 4 ? 0xffffffffu : 0xffffu << shift;
        words[i / OF_WORD] = (words[i / OF_WORD] & ~mask) | (unsigned)global_load(p + i * stride).bits << shift;
    }
}

template <class T> __device__ __forceinline__ void store_some(T* p, int64 stride, int count, const unsigned (&words)[4]) {
    constexpr int OF_WORD = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < elements_of<T>; ++i) {
        if (i >= count) continue;
        T value;
        value.bits = (decltype(value.bits))(words[i / OF_WORD] >> (i % OF_WORD * 16));
        global_store(p + i * stride, value);
    }
}

// How a vector lies in memory, by the template argument WIDTH of the kernels: in pieces of 16, 8, 4 or 2 bytes, the
// widest that the alignment of all rows allows; or STRIDED: its elements lie column_stride apart.
constexpr int STRIDED = 0;

template <class T, int WIDTH> __device__ __forceinline__ void load_vector(const T* p, int64 stride, unsigned (&words)[4]) {
    if constexpr (WIDTH == 16) {
        uint4 v = global_load(reinterpret_cast<const uint4*>(p));
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (WIDTH == 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint2 v = global_load(reinterpret_cast<const uint2*>(p) + i);
            words[2 * i] = v.x, words[2 * i + 1] = v.y;
        }
    } else if constexpr (WIDTH == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = global_load(reinterpret_cast<const unsigned*>(p) + i);
    } else {
        load_some(p, WIDTH == STRIDED ? stride : 1, elements_of<T>, words);
    }
}

template <class T, int WIDTH> __device__ __forceinline__ void store_vector(T* p, int64 stride, const unsigned (&words)[4]) {
    if constexpr (WIDTH == 16) {
        uint4 v;
        v.x = words[0], v.y = words[1], v.z = words[2], v.w = words[3];
        global_store(reinterpret_cast<uint4*>(p), v);
    } else if constexpr (WIDTH == 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint2 v;
            v.x = words[2 * i], v.y = words[2 * i + 1];
            global_store(reinterpret_cast<uint2*>(p) + i, v);
        }
    } else if constexpr (WIDTH == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) global_store(reinterpret_cast<unsigned*>(p) + i, words[i]);
    } else {
        store_some(p, WIDTH == STRIDED ? stride : 1, elements_of<T>, words);
    }
}

// Where a row begins, in elements: rows are two dimensions deep, so that a slice of a batch of sequences needs no copy.
__device__ __forceinline__ int64 row_offset(unsigned row, unsigned inner, int64 outer_stride, int64 inner_stride) {
    return (int64)(row / inner) * outer_stride + (int64)(row % inner) * inner_stride;
}

// ---------------------------------------------------------------------- summaries

// Of some columns of a row: maximum, sum of exp(d), and with entropy moment = sum of d * exp(d), where
// d = (x - maximum) / temperature.
struct Partial {
    float maximum, sum, moment;
};

// Merges count partials, given by at(0), at(1), ... in column order. to_log2 = log2(e) / temperature.
template <bool ENTROPY, class At> __device__ __forceinline__ Partial merge_in_order(int count, At at, float to_log2) {
    Partial merged = {neg_inf(), 0.0f, 0.0f};
    for (int i = 0; i < count; ++i) merged.maximum = fmaxf(merged.maximum, at(i).maximum);
    float pivot = pivot_of(merged.maximum);
    for (int i = 0; i < count; ++i) {
        Partial part = at(i);
        float delta = (part.maximum - pivot) * to_log2, factor = exp2_approx(delta);
        merged.sum += part.sum * factor;
        if constexpr (ENTROPY) merged.moment += (part.moment + fmaxf(delta * LN_2, LOWEST) * part.sum) * factor;
    }
    return merged;
}

// The message of a rank, as logprob/partials.py lays it out: a header of 4 integers, then a row after another.
constexpr int HEADER_FLOATS = 8;

template <bool ENTROPY> constexpr int fields_of = ENTROPY ? 3 : 2;

template <bool ENTROPY> __device__ __forceinline__ Partial load_partial(const float* p) {
    return {global_load(p), global_load(p + 1), ENTROPY ? global_load(p + 2) : 0.0f};
}

template <bool ENTROPY> __device__ __forceinline__ void store_partial(float* p, Partial partial) {
    global_store(p, partial.maximum);
    global_store(p + 1, partial.sum);
    if constexpr (ENTROPY) global_store(p + 2, partial.moment);
}
