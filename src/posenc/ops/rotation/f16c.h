/* AVX2 and AVX-512: 16 pairs of float16 between memory and registers, by instructions that convert
 * eight numbers. GCC does not use them for load_f16 and store_f16 in a loop. */
#include <cpuid.h>
#include <immintrin.h>

#define F16C __attribute__((target("avx2,f16c")))
#define LOAD_PAIRS NAME2(load, pairs, KIND)
#define STORE_PAIRS NAME2(store, pairs, KIND)

F16C INLINE __m256 floats8(const uint16_t *x)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
}

F16C INLINE void load_pairs_f16(const uint16_t *x, size_t P, int in, int out, __m256 *a, __m256 *b)
{
    (void)out;
    for (size_t k = 0; k < 2; k++, x += in ? 16 : 8) {
        if (!in) {
            a[k] = floats8(x), b[k] = floats8(x + P);
            continue;
        }
        /* Words of two channels: first ones to the lower half of the vector, second ones to the upper. */
        const __m256i w = _mm256_loadu_si256((const __m256i *)x), lower = _mm256_set1_epi32(0xffff);
        const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(w, lower), _mm256_srli_epi32(w, 16));
        const __m256i parts = _mm256_permute4x64_epi64(packed, 0xd8);
        a[k] = _mm256_cvtph_ps(_mm256_castsi256_si128(parts));
        b[k] = _mm256_cvtph_ps(_mm256_extracti128_si256(parts, 1));
    }
}

F16C INLINE void store_pairs_f16(uint16_t *y, size_t P, int in, int out, const __m256 *p,
                                 const __m256 *q)
{
    (void)in;
    for (size_t k = 0; k < 2; k++, y += out ? 16 : 8) {
        const __m128i u = _mm256_cvtps_ph(p[k], 0), v = _mm256_cvtps_ph(q[k], 0); /* to nearest even */
        _mm_storeu_si128((__m128i *)y, out ? _mm_unpacklo_epi16(u, v) : u);
        _mm_storeu_si128((__m128i *)(y + (out ? 8 : P)), out ? _mm_unpackhi_epi16(u, v) : v);
    }
}

static int has_f16c(void)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
