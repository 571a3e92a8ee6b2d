/* AVX-512: 32 pairs of bfloat16 between memory and registers, in words of two neighbours. The
 * compiler's code for the plain loops takes 28 steps where this takes 22. */
#define BITS(v) _mm512_castps_si512(v)
#define FLOATS(v) _mm512_castsi512_ps(v)

/* Elements 0, 16, 1, 17, ... of 32, so that each word holds one element of each half. */
TARGET INLINE __m512i paired(__m512i halves)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, halves);
}

/* Elements 0, 2, 4, ... of 32, then the odd ones. */
TARGET INLINE __m512i halved(__m512i pairs)
{
    const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
                                           30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutexvar_epi16(order, pairs);
}

/* Load 32 pairs in the order of columns; if both layouts are half, even columns before odd ones. */
TARGET INLINE void load_pairs_bf16(const uint16_t *x, size_t P, int in, int out, __m512 *a, __m512 *b)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    __m512i u = _mm512_loadu_si512(x), v = _mm512_loadu_si512(x + (in ? 32 : P));
    if (out && !in) u = paired(u), v = paired(v);
    const __m512 u0 = FLOATS(_mm512_slli_epi32(u, 16)), u1 = FLOATS(_mm512_and_si512(u, upper));
    const __m512 v0 = FLOATS(_mm512_slli_epi32(v, 16)), v1 = FLOATS(_mm512_and_si512(v, upper));
    a[0] = u0, a[1] = in ? v0 : u1;
    b[0] = in ? u1 : v0, b[1] = v1;
}

/* round_bf16 of formats.h: it adds the dot product of (bit 16, 1) and (1, 0x7fff), 16 bits each. */
TARGET INLINE __m512i round512_bf16(__m512 f)
{
    const __m512i u = BITS(f), one = _mm512_set1_epi32(1), odd = _mm512_set1_epi32(0x10000);
    const __m512i bit = _mm512_ternarylogic_epi32(u, odd, one, 0xea); /* (u & odd) | one */
    return _mm512_dpwssd_epi32(u, bit, _mm512_set1_epi32(0x17fff));
}

TARGET INLINE __m512i pack512_bf16(__m512 lower, __m512 upper)
{
    /* Move the upper half of each word of `lower` to the lower half of that word of `upper`. */
    const __m512i down = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    const __mmask64 halves = 0x3333333333333333;
    return _mm512_mask_shuffle_epi8(round512_bf16(upper), halves, round512_bf16(lower), down);
}

TARGET INLINE void store_pairs_bf16(uint16_t *y, size_t P, int in, int out, const __m512 *p,
                                    const __m512 *q)
{
    __m512i u = pack512_bf16(p[0], out ? q[0] : p[1]), v = pack512_bf16(out ? p[1] : q[0], q[1]);
    if (in && !out) u = halved(u), v = halved(v);
    _mm512_storeu_si512(y, u);
    _mm512_storeu_si512(y + (out ? 32 : P), v);
}

#undef BITS
#undef FLOATS
