/* 64-bit ARM: four pairs of float32, or eight in half precision, between memory and registers. The
 * compiler's code for the plain loops is up to 3 times slower on a Neoverse N1. */
#include <arm_neon.h>

#define BITS(v) vreinterpretq_u16_f32(v)
#define FLOATS(v) vreinterpretq_f32_u16(v)
#define LOAD_PAIRS(x, P, in, out, a, b) NAME2(load, pairs, KIND)(x, P, in, a, b)
#define STORE_PAIRS(y, P, in, out, p, q) NAME2(store, pairs, KIND)(y, P, out, p, q)

INLINE void load_pairs_f32(const float *x, size_t P, int interleaved, float64x2_t *a, float64x2_t *b)
{
    const float32x4_t u = vld1q_f32(x), v = vld1q_f32(x + (interleaved ? 4 : P));
    const float32x4_t first = interleaved ? vuzp1q_f32(u, v) : u;
    const float32x4_t second = interleaved ? vuzp2q_f32(u, v) : v;
    a[0] = vcvt_f64_f32(vget_low_f32(first)), a[1] = vcvt_high_f64_f32(first);
    b[0] = vcvt_f64_f32(vget_low_f32(second)), b[1] = vcvt_high_f64_f32(second);
}

INLINE void store_pairs_f32(float *y, size_t P, int interleaved, const float64x2_t *p,
                     const float64x2_t *q)
{
    const float32x4_t first = vcvt_high_f32_f64(vcvt_f32_f64(p[0]), p[1]);
    const float32x4_t second = vcvt_high_f32_f64(vcvt_f32_f64(q[0]), q[1]);
    vst1q_f32(y, interleaved ? vzip1q_f32(first, second) : first);
    vst1q_f32(y + (interleaved ? 4 : P), interleaved ? vzip2q_f32(first, second) : second);
}

INLINE void load_pairs_bf16(const uint16_t *x, size_t P, int interleaved, float32x4_t *a, float32x4_t *b)
{
    const uint16x8_t zero = vdupq_n_u16(0);
    const uint16x8_t u = vld1q_u16(x), v = vld1q_u16(x + (interleaved ? 8 : P));
    if (interleaved) {
        a[0] = FLOATS(vtrn1q_u16(zero, u)), b[0] = FLOATS(vtrn2q_u16(zero, u));
        a[1] = FLOATS(vtrn1q_u16(zero, v)), b[1] = FLOATS(vtrn2q_u16(zero, v));
    } else {
        a[0] = FLOATS(vzip1q_u16(zero, u)), a[1] = FLOATS(vzip2q_u16(zero, u));
        b[0] = FLOATS(vzip1q_u16(zero, v)), b[1] = FLOATS(vzip2q_u16(zero, v));
    }
}

/* Round eight floats, given by their upper and lower halves, to bfloat16. If the upper half is even,
 * the lower one is first decremented, so that a tie rounds to even. A NaN of all ones would overflow
 * to zero, but none occurs: bfloat16 inputs have zeros as lower halves, and tables hold plain_nan. */
INLINE uint16x8_t round8_bf16(uint16x8_t upper, uint16x8_t lower)
{
    const uint16x8_t even = vbicq_u16(vdupq_n_u16(1), upper);
    return vrsraq_n_u16(upper, vqsubq_u16(lower, even), 16);
}

INLINE void store_pairs_bf16(uint16_t *y, size_t P, int interleaved, const float32x4_t *p,
                      const float32x4_t *q)
{
    const uint16x8_t p0 = BITS(p[0]), p1 = BITS(p[1]), q0 = BITS(q[0]), q1 = BITS(q[1]);
    if (interleaved) {
        vst1q_u16(y, round8_bf16(vtrn2q_u16(p0, q0), vtrn1q_u16(p0, q0)));
        vst1q_u16(y + 8, round8_bf16(vtrn2q_u16(p1, q1), vtrn1q_u16(p1, q1)));
    } else {
        vst1q_u16(y, round8_bf16(vuzp2q_u16(p0, p1), vuzp1q_u16(p0, p1)));
        vst1q_u16(y + P, round8_bf16(vuzp2q_u16(q0, q1), vuzp1q_u16(q0, q1)));
    }
}

INLINE void load_pairs_f16(const half *x, size_t P, int interleaved, float32x4_t *a, float32x4_t *b)
{
    const uint16x8_t u = vld1q_u16((const uint16_t *)x);
    const uint16x8_t v = vld1q_u16((const uint16_t *)x + (interleaved ? 8 : P));
    const float16x8_t first = vreinterpretq_f16_u16(interleaved ? vuzp1q_u16(u, v) : u);
    const float16x8_t second = vreinterpretq_f16_u16(interleaved ? vuzp2q_u16(u, v) : v);
    a[0] = vcvt_f32_f16(vget_low_f16(first)), a[1] = vcvt_high_f32_f16(first);
    b[0] = vcvt_f32_f16(vget_low_f16(second)), b[1] = vcvt_high_f32_f16(second);
}

INLINE void store_pairs_f16(half *y, size_t P, int interleaved, const float32x4_t *p,
                     const float32x4_t *q)
{
    const uint16x8_t u = vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(p[0]), p[1]));
    const uint16x8_t v = vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(q[0]), q[1]));
    vst1q_u16((uint16_t *)y, interleaved ? vzip1q_u16(u, v) : u);
    vst1q_u16((uint16_t *)y + (interleaved ? 8 : P), interleaved ? vzip2q_u16(u, v) : v);
}
