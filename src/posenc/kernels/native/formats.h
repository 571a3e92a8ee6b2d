/* Number formats: how a half-precision number becomes a float and back, and how a float becomes a
 * number of 8 bits, rounding to nearest even. */
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline, unused))
#elif defined(_MSC_VER)
#define INLINE static __forceinline
#else
#define INLINE static inline
#endif

#if defined(_WIN32) || (defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
#define PACKS_PAIRS 1
#else
#define PACKS_PAIRS 0
#endif

/* In place, x and y are the same row, which rules out `restrict`; but no pair depends on another. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#elif defined(_MSC_VER)
#define INDEPENDENT __pragma(loop(ivdep))
#else
#define INDEPENDENT
#endif

enum { CACHE_LINE = 64 };

typedef int64_t i64;

/* Prefetch bytes that are soon read or written. A Xeon's hardware prefetcher crosses neither pages nor
 * heads; on an ARM core, the rotation takes longer than its memory accesses. */
INLINE void prefetch(const void *from, size_t bytes)
{
#if defined(__GNUC__) && defined(__x86_64__)
    for (size_t at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch((const char *)from + at);
#else
    (void)from, (void)bytes;
#endif
}

INLINE uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

INLINE float float_of(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Replace any NaN by the usual one, whose lower half is zero. */
INLINE float plain_nan(float f) { return f != f ? float_of(0x7fc00000u) : f; }

INLINE float load_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

/* Round to bfloat16, in the upper half. A NaN of all ones would overflow to zero, but none occurs:
 * bfloat16 inputs have zeros as lower halves, and tables hold plain_nan. */
INLINE uint32_t round_bf16(float f)
{
    const uint32_t u = bits_of(f);
    return u + 0x7fffu + ((u >> 16) & 1);
}

INLINE uint16_t store_bf16(float f) { return (uint16_t)(round_bf16(f) >> 16); }

/* Load two neighbours as one word: a shift is cheaper than a load of every second element. */
INLINE uint32_t load_word(const uint16_t *x)
{
    uint32_t w;
    memcpy(&w, x, sizeof w);
    return w;
}

INLINE void store_word(uint16_t *y, uint32_t w) { memcpy(y, &w, sizeof w); }
INLINE float lower_bf16(uint32_t w) { return float_of(w << 16); }
INLINE float upper_bf16(uint32_t w) { return float_of(w & 0xffff0000u); }

INLINE uint32_t pack_bf16(float lower, float upper)
{
    return round_bf16(lower) >> 16 | (round_bf16(upper) & 0xffff0000u);
}

#if defined(__aarch64__) && defined(__GNUC__)
typedef __fp16 half;
INLINE float load_f16(half h) { return (float)h; }
INLINE half store_f16(float f) { return (half)f; }
#else
typedef uint16_t half;

INLINE float load_f16(half h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fffu, tiny = mag < 0x0400;
    const uint32_t rebias = mag < 0x7c00 ? (112 + tiny) << 23 : 224u << 23;
    /* A subnormal is read as if it had a leading one, which is then subtracted. Other numbers subtract
     * zero, because a loop with a conditional operation is not vectorised. */
    const float one = float_of(tiny ? 113u << 23 : 0);
    return float_of(sign | bits_of(float_of((mag << 13) + rebias) - one));
}

INLINE half store_f16(float f)
{
    const uint32_t u = bits_of(f), mag = u & 0x7fffffffu;
    const uint32_t normal = (mag - (112u << 23) + 0x0fffu + ((mag >> 13) & 1)) >> 13;
    /* 0.5 has the spacing of half-precision subnormals, so the addition itself rounds to them. */
    const uint32_t tiny = bits_of(float_of(mag) + 0.5f) - bits_of(0.5f);
    const uint32_t special = mag > 0x7f800000u ? 0x7e00u | ((mag >> 13) & 0x1ff) : 0x7c00u;
    const uint32_t h = mag < 0x38800000u ? tiny : mag < 0x477ff000u ? normal : special;
    return (half)((u >> 16 & 0x8000) | h);
}
#endif

/* The formats of a cache: that of the tensor, or one of 8 bits. */
enum { SAME_FORMAT, FORMAT_E4M3, FORMAT_E5M2, FORMAT_INT8 };
static const float largest_of[] = {0, 448, 57344, 127};

/* Round to 8 bits with this many bits of fraction and this bias of the exponent, and limit to `most`. */
INLINE uint8_t store_float8(float f, uint32_t fraction, uint32_t bias, float most)
{
    const uint32_t u = bits_of(f), size = u & 0x7fffffffu, drop = 23 - fraction;
    const uint32_t mag = size > bits_of(most) ? bits_of(most) : size;
    const uint32_t half_down = (1u << (drop - 1)) - 1;
    const uint32_t normal = ((mag + half_down + (mag >> drop & 1)) >> drop) - ((127 - bias) << fraction);
    /* This number has the spacing of subnormals, so the addition itself rounds to them. */
    const uint32_t spaced = (151 - bias - fraction) << 23;
    const uint32_t tiny = bits_of(float_of(mag) + float_of(spaced)) - spaced;
    const uint32_t code = mag < (128 - bias) << 23 ? tiny : normal;
    return (uint8_t)((u >> 24 & 0x80) | (size > 0x7f800000u ? 0x7f : code));
}

INLINE uint8_t store_e4m3(float f) { return store_float8(f, 3, 7, 448); }
INLINE uint8_t store_e5m2(float f) { return store_float8(f, 2, 15, 57344); }

/* Round to an integer from -127 to 127; NaN becomes 0. */
INLINE uint8_t store_int8(float f)
{
    const float limited = f > 127 ? 127 : f < -127 ? -127 : f == f ? f : 0;
    /* At 1.5 * 2^23 floats are integers, and the lower bits of the sum are those of the number. */
    return (uint8_t)bits_of(limited + 12582912.0f);
}
