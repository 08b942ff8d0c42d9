// CUDA kernels on the processor: what their source needs of CUDA, one fiber a thread. **No GPU, and nothing about speed.**
//
// Included before the text of a kernel of kernels/ (or one written alike). Blocks run one after another; a thread runs
// until it waits at a barrier or in a shuffle, or ends. What is found and reported, with the kernel, block and thread:
// barriers and shuffles that threads do not all reach; access outside the buffers, misaligned, or writing to what is
// read only; shared memory read before it is written; two threads at one address between barriers, one of them writing
// (threads of different blocks: at any time). Loads and stores through the helpers are counted.
#pragma once
#define CUDA_ON_HOST

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace on_host {

struct Buffer {
    uint64_t address, bytes;
    int64_t writable;
};

// Of a buffer; as tests/kernels_on_host/__init__.py reads it.
struct Counts {
    int64_t bytes[2], accesses[2][5], warp_accesses[2], sectors[2];  // [0]: read, [1]: written; of 1, 2, 4, 8, 16 bytes
};

// A launch, as tests/kernels_on_host/__init__.py writes it.
struct Launch {
    const char* name;
    unsigned grid[3], block[3];
    int64_t shared_bytes;
    void** arguments;
    const int64_t* sizes;  // of the arguments
    int64_t argument_count;
    const Buffer* buffers;
    int64_t buffer_count, flags;
    Counts* counts;
    char* error;
    int64_t error_size;
};

enum Flags { CHECK = 1, COUNT = 2, REVERSE = 4 };
constexpr int LANES = 32;

extern int flags, current;  // current: the thread's number in its block

// In cuda_on_host.cpp.
int run(void (*body)(), const Launch& launch);
uint32_t exchange(const char* operation, unsigned mask, uint32_t value, int source);
void on_global(uint64_t address, int bytes, bool write);
void on_shared(uint64_t address, int bytes, bool write, bool atomic);
void* shared_begin();

inline bool checking() { return flags & CHECK; }

// What the parameters of a kernel are, and how it is called.
template <class... Types> struct Call {
    static inline void (*kernel)(Types...);
    static inline void** arguments;

    template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
    template <int... I> struct Count<0, I...> {
        static void call() { kernel(*static_cast<Types*>(arguments[I])...); }
    };
};

template <class... Types> int launch(void (*kernel)(Types...), const Launch& launch) {
    const int64_t expected[] = {(int64_t)sizeof(Types)...};
    const int count = sizeof...(Types);
    if (launch.argument_count != count) {
        std::snprintf(launch.error, launch.error_size, "%s: %d arguments, expected %d", launch.name,
                      (int)launch.argument_count, count);
        return 1;
    }
    for (int i = 0; i < count; ++i) {
        if (launch.sizes[i] == expected[i]) continue;
        std::snprintf(launch.error, launch.error_size, "%s: argument %d has %d bytes, expected %d", launch.name, i,
                      (int)launch.sizes[i], (int)expected[i]);
        return 1;
    }
    Call<Types...>::kernel = kernel;
    Call<Types...>::arguments = launch.arguments;
    return run(Call<Types...>::template Count<count>::call, launch);
}

template <class V> inline uint32_t bits_of(V value) {
    static_assert(sizeof(V) == 4);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

template <class V> V from_bits(uint32_t bits) {
    V value;
    std::memcpy(&value, &bits, 4);
    return value;
}

}  // namespace on_host

// ---------------------------------------------------------------------- what kernels call

inline void __syncthreads() { on_host::exchange("__syncthreads()", 0, 0, -1); }

template <class V> V __shfl_xor_sync(unsigned mask, V value, int lane_mask) {
    int source = on_host::current % on_host::LANES ^ lane_mask;
    return on_host::from_bits<V>(on_host::exchange("__shfl_xor_sync", mask, on_host::bits_of(value), source));
}

template <class V> V __shfl_sync(unsigned mask, V value, int lane) {
    return on_host::from_bits<V>(
        on_host::exchange("__shfl_sync", mask, on_host::bits_of(value), lane % on_host::LANES));
}

template <class V> inline V global_load(const V* p) {
    if (on_host::checking()) on_host::on_global((uint64_t)p, sizeof(V), false);
    return *p;
}

template <class V> inline void global_store(V* p, V value) {
    if (on_host::checking()) on_host::on_global((uint64_t)p, sizeof(V), true);
    *p = value;
}

template <class V> V shared_load(const V* p) {
    if (on_host::checking()) on_host::on_shared((uint64_t)p, sizeof(V), false, false);
    return *p;
}

template <class V> void shared_store(V* p, V value) {
    if (on_host::checking()) on_host::on_shared((uint64_t)p, sizeof(V), true, false);
    *p = value;
}

inline unsigned shared_or(unsigned* p, unsigned bits) {
    if (on_host::checking()) on_host::on_shared((uint64_t)p, sizeof(unsigned), true, true);
    unsigned before = *p;
    *p |= bits;
    return before;
}

inline void* dynamic_shared() {
    return on_host::shared_begin();
}

inline unsigned __float_as_uint(float value) { return on_host::bits_of(value); }
inline int __float_as_int(float value) { return (int)on_host::bits_of(value); }
inline float __uint_as_float(unsigned bits) { return on_host::from_bits<float>(bits); }
inline float __int_as_float(int bits) { return on_host::from_bits<float>((uint32_t)bits); }

inline float exp2_approx(float x) {
    float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;  // NaN stays
}

inline float half_to_float(unsigned short bits) {
    unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    float value = std::ldexp((float)(exponent ? fraction | 1024 : fraction), exponent ? (int)exponent - 25 : -24);
    return __uint_as_float(sign | __float_as_uint(value));
}

inline unsigned short float_to_half(float value) {
    unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u;
    float size = std::fabs(value);
    if (size != size) return (unsigned short)0x7fff;
    if (size >= 65520.0f) return (unsigned short)(sign | 0x7c00u);
    int exponent;
    std::frexp(size, &exponent);
    int unit = size == 0.0f || exponent < -13 ? -24 : exponent - 11;  // 2^unit is the last place
    float steps = std::nearbyint(std::ldexp(size, -unit));  // to even
    unsigned magnitude = (unsigned)steps;
    return (unsigned short)(sign | (unit == -24 ? magnitude : ((unsigned)(unit + 24) << 10) + magnitude));
}
