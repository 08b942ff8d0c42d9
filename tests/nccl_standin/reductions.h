/* The numbers of the stand-in: the type codes and reductions of NCCL, rounded as its kernels round.
 *
 * - Integers wrap. AVG divides the wrapped sum and truncates toward zero.
 * - fp16, bf16: every pairwise addition or multiplication rounds to the type, to nearest even.
 * - fp8: every pairwise step rounds to the type and saturates: no result is infinite. (NCCL goes through fp16. For no
 *   two operands of either type does that change the sum, the product, the larger or the smaller: all were compared.)
 * - MIN and MAX drop NaN where the other operand is a number, and order -0 below +0.
 * - AVG of floats multiplies by 1/n rounded to the type: each rank's values before they are added, or the sum
 *   afterwards (scale_before). NCCL's releases do the former; its newest kernels on symmetric memory the latter.
 *
 * Ranks are reduced in the order 0, 1, 2, ...; NCCL's order depends on its algorithm and on the place in the tensor.
 */
#ifndef NCCL_STANDIN_REDUCTIONS_H
#define NCCL_STANDIN_REDUCTIONS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2, TYPES };
enum { SUM, PROD, MAX, MIN, AVG, REDUCTIONS };

static const struct {
    const char *name;
    size_t bytes;
} TYPE[TYPES] = {
    {"int8", 1},    {"uint8", 1},   {"int32", 4},   {"uint32", 4},   {"int64", 8},      {"uint64", 8},
    {"float16", 2}, {"float32", 4}, {"float64", 8}, {"bfloat16", 2}, {"float8e4m3", 1}, {"float8e5m2", 1},
};
static const char *const REDUCTION[REDUCTIONS] = {"sum", "prod", "max", "min", "avg"};

/* --- Floating-point types that C lacks -------------------------------------------------------------------------- */

typedef struct {
    int mantissa, bias, top; /* mantissa bits; bias of the exponent; the largest exponent of a finite number */
    double largest;
    unsigned infinity, nan; /* without the sign; where there is no infinity both are the NaN */
    bool saturates;
} Small;

static const Small HALF = {10, 15, 15, 65504.0, 0x7c00, 0x7fff, false};
static const Small BRAIN = {7, 127, 127, 0x1.fep127, 0x7f80, 0x7fff, false};
static const Small E4M3 = {3, 7, 8, 448.0, 0x7f, 0x7f, true};
static const Small E5M2 = {2, 15, 15, 57344.0, 0x7c, 0x7e, true};

static double decode(unsigned bits, const Small *type, unsigned sign_bit) {
    unsigned magnitude = bits & (sign_bit - 1);
    double value;
    if (type->infinity == type->nan ? magnitude == type->nan : magnitude > type->infinity)
        value = NAN;
    else if (magnitude == type->infinity)
        value = INFINITY;
    else {
        unsigned fraction = magnitude & ((1u << type->mantissa) - 1);
        int exponent = (int)(magnitude >> type->mantissa);
        if (exponent > 0) fraction |= 1u << type->mantissa;
        value = ldexp(fraction, (exponent > 0 ? exponent : 1) - type->bias - type->mantissa);
    }
    return bits & sign_bit ? -value : value;
}

/* To nearest even, in one rounding from a double. A sum or product of two such numbers, taken in double, is either
 * exact or has so many more bits that rounding it twice changes nothing. */
static unsigned encode(double value, const Small *type, unsigned sign_bit) {
    unsigned sign = signbit(value) ? sign_bit : 0;
    if (isnan(value)) return type->nan;
    double magnitude = fabs(value);
    if (magnitude == 0) return sign;
    int exponent = isinf(magnitude) ? type->top + 1 : ilogb(magnitude);
    if (exponent < 1 - type->bias) exponent = 1 - type->bias;
    if (exponent <= type->top) {
        double quanta = rint(ldexp(magnitude, type->mantissa - exponent));
        if (ldexp(quanta, exponent - type->mantissa) <= type->largest) {
            unsigned whole = (unsigned)quanta, one = 1u << type->mantissa;
            /* a fraction that rounded up to the next power of two carries into the exponent by itself */
            return sign | (whole < one ? whole : ((unsigned)(exponent + type->bias) << type->mantissa) + whole - one);
        }
    }
    return sign | (type->saturates ? encode(type->largest, type, sign_bit) : type->infinity);
}

static double half_value(uint16_t bits) { return decode(bits, &HALF, 0x8000); }
static double brain_value(uint16_t bits) { return decode(bits, &BRAIN, 0x8000); }
static double e4m3_value(uint8_t bits) { return decode(bits, &E4M3, 0x80); }
static double e5m2_value(uint8_t bits) { return decode(bits, &E5M2, 0x80); }
static uint16_t half_bits(double value) { return (uint16_t)encode(value, &HALF, 0x8000); }
static uint16_t brain_bits(double value) { return (uint16_t)encode(value, &BRAIN, 0x8000); }
static uint8_t e4m3_bits(double value) { return (uint8_t)encode(value, &E4M3, 0x80); }
static uint8_t e5m2_bits(double value) { return (uint8_t)encode(value, &E5M2, 0x80); }

/* --- Two operands ----------------------------------------------------------------------------------------------- */

static double larger(double a, double b) {
    if (isnan(a)) return b;
    if (isnan(b)) return a;
    if (a == b) return signbit(a) ? b : a;
    return a > b ? a : b;
}

static double smaller(double a, double b) { return -larger(-a, -b); }

/* into[i] = into[i] op from[i]; integers in an unsigned type W at least as wide as int, so that nothing overflows */
#define REDUCE_INTEGERS(T, W)                                                                \
    do {                                                                                     \
        T *a = into;                                                                         \
        const T *b = from;                                                                   \
        for (size_t i = 0; i < count; i++) switch (reduction) {                              \
                case PROD: a[i] = (T)((W)a[i] * (W)b[i]); break;                             \
                case MAX: a[i] = a[i] > b[i] ? a[i] : b[i]; break;                           \
                case MIN: a[i] = a[i] < b[i] ? a[i] : b[i]; break;                           \
                default: a[i] = (T)((W)a[i] + (W)b[i]);                                      \
            }                                                                                \
    } while (0)

#define REDUCE_FLOATS(T, W, VALUE, BITS)                                                     \
    do {                                                                                     \
        T *a = into;                                                                         \
        const T *b = from;                                                                   \
        for (size_t i = 0; i < count; i++) {                                                 \
            W x = (W)VALUE(a[i]), y = (W)VALUE(b[i]);                                        \
            switch (reduction) {                                                             \
                case PROD: a[i] = BITS(x * y); break;                                        \
                case MAX: a[i] = BITS(larger(x, y)); break;                                  \
                case MIN: a[i] = BITS(smaller(x, y)); break;                                 \
                default: a[i] = BITS(x + y);                                                 \
            }                                                                                \
        }                                                                                    \
    } while (0)

static void reduce_into(void *into, const void *from, size_t count, int type, int reduction) {
    switch (type) {
        case INT8: REDUCE_INTEGERS(int8_t, uint32_t); break;
        case UINT8: REDUCE_INTEGERS(uint8_t, uint32_t); break;
        case INT32: REDUCE_INTEGERS(int32_t, uint32_t); break;
        case UINT32: REDUCE_INTEGERS(uint32_t, uint32_t); break;
        case INT64: REDUCE_INTEGERS(int64_t, uint64_t); break;
        case UINT64: REDUCE_INTEGERS(uint64_t, uint64_t); break;
        case FLOAT32: REDUCE_FLOATS(float, float, , (float)); break;
        case FLOAT64: REDUCE_FLOATS(double, double, , ); break;
        case FLOAT16: REDUCE_FLOATS(uint16_t, double, half_value, half_bits); break;
        case BFLOAT16: REDUCE_FLOATS(uint16_t, double, brain_value, brain_bits); break;
        case FLOAT8E4M3: REDUCE_FLOATS(uint8_t, double, e4m3_value, e4m3_bits); break;
        case FLOAT8E5M2: REDUCE_FLOATS(uint8_t, double, e5m2_value, e5m2_bits); break;
    }
}

/* --- The mean --------------------------------------------------------------------------------------------------- */

static bool is_integer(int type) { return type <= UINT64; }

#define SCALE_INTEGERS(T)                                                                    \
    do {                                                                                     \
        T *a = values;                                                                       \
        for (size_t i = 0; i < count; i++) a[i] = (T)(a[i] / (T)n);                          \
    } while (0)

#define SCALE_FLOATS(T, W, VALUE, BITS, RECIPROCAL)                                             \
    do {                                                                                     \
        T *a = values;                                                                       \
        W scale = (W)VALUE(BITS(RECIPROCAL));                                                \
        for (size_t i = 0; i < count; i++) a[i] = BITS((W)VALUE(a[i]) * scale);              \
    } while (0)

static void scale_by_ranks(void *values, size_t count, int type, int n) {
    float reciprocal = (float)(1.0 / n);
    switch (type) {
        /* n fits into int8: MAX_RANKS */
        case INT8: SCALE_INTEGERS(int8_t); break;
        case UINT8: SCALE_INTEGERS(uint8_t); break;
        case INT32: SCALE_INTEGERS(int32_t); break;
        case UINT32: SCALE_INTEGERS(uint32_t); break;
        case INT64: SCALE_INTEGERS(int64_t); break;
        case UINT64: SCALE_INTEGERS(uint64_t); break;
        case FLOAT32: SCALE_FLOATS(float, float, , (float), reciprocal); break;
        case FLOAT64: SCALE_FLOATS(double, double, , , 1.0 / n); break;
        case FLOAT16: SCALE_FLOATS(uint16_t, double, half_value, half_bits, reciprocal); break;
        case BFLOAT16: SCALE_FLOATS(uint16_t, double, brain_value, brain_bits, reciprocal); break;
        case FLOAT8E4M3: SCALE_FLOATS(uint8_t, double, e4m3_value, e4m3_bits, reciprocal); break;
        case FLOAT8E5M2: SCALE_FLOATS(uint8_t, double, e5m2_value, e5m2_bits, reciprocal); break;
    }
}

#endif
