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
