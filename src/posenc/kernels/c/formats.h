/* Number formats: how a half-precision number becomes a float and back, rounding to nearest even. */
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

/* In place, x and y are the same row, so `restrict` would lie; but a pair depends on no other. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#elif defined(_MSC_VER)
#define INDEPENDENT __pragma(loop(ivdep))
#else
#define INDEPENDENT
#endif

enum { BLOCK = 16 };

typedef int64_t i64;

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

/* Any NaN as the usual one, whose lower half is zero. */
INLINE float plain_nan(float f) { return f != f ? float_of(0x7fc00000u) : f; }

INLINE float load_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

/* The bfloat16 in the upper half. Adding the rounding could carry a NaN into zero or infinity. */
INLINE uint32_t round_bf16(float f)
{
    const uint32_t u = bits_of(f);
    return f != f ? u | 0x00400000u : u + 0x7fffu + ((u >> 16) & 1);
}

INLINE uint16_t store_bf16(float f) { return (uint16_t)(round_bf16(f) >> 16); }

#if defined(__aarch64__) && defined(__GNUC__)
typedef __fp16 half;
INLINE float load_f16(half h) { return (float)h; }
INLINE half store_f16(float f) { return (half)f; }
#else
typedef uint16_t half;

INLINE float load_f16(half h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fffu;
    const uint32_t normal = (mag << 13) + (112u << 23);
    const uint32_t special = normal + (112u << 23);
    const uint32_t tiny = bits_of((float)(int32_t)mag * 0x1p-24f);
    return float_of(sign | (mag < 0x0400 ? tiny : mag < 0x7c00 ? normal : special));
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
