/* One dtype of rows.h: KIND, ELEM as stored, REAL to compute in, LOAD and STORE between them. */

INLINE void FN(get)(const ELEM *x, size_t i, size_t P, int interleaved, REAL *a, REAL *b)
{
#ifdef PACKED
    if (interleaved && PACKS_PAIRS) {
        /* One load holds the pair, and shifts are cheaper than picking every second element. */
        uint32_t both;
        memcpy(&both, x + 2 * i, sizeof both);
        *a = float_of(both << 16), *b = float_of(both & 0xffff0000u);
        return;
    }
#endif
    *a = LOAD(x[interleaved ? 2 * i : i]), *b = LOAD(x[interleaved ? 2 * i + 1 : P + i]);
}

INLINE void FN(put)(ELEM *y, size_t i, size_t P, int interleaved, REAL a, REAL b)
{
#ifdef PACKED
    if (interleaved && PACKS_PAIRS) {
        uint32_t both = round_bf16(a) >> 16 | (round_bf16(b) & 0xffff0000u);
        memcpy(y + 2 * i, &both, sizeof both);
        return;
    }
#endif
    y[interleaved ? 2 * i : i] = STORE(a), y[interleaved ? 2 * i + 1 : P + i] = STORE(b);
}

TARGET INLINE void FN(turn)(const ELEM *restrict x, ELEM *restrict y, const REAL *restrict c,
                            const REAL *restrict s, size_t P, int in, int out)
{
    size_t i = 0;
#ifdef TAKE
    for (; i + 8 <= P; i += 8) {
        float32x4_t a[2], b[2], p[2], q[2];
        TAKE(x + (in ? 2 * i : i), P, in, a, b);
        for (int k = 0; k < 2; k++) {
            const float32x4_t ck = vld1q_f32(c + i + 4 * k), sk = vld1q_f32(s + i + 4 * k);
            p[k] = vfmsq_f32(vmulq_f32(a[k], ck), b[k], sk);
            q[k] = vfmaq_f32(vmulq_f32(b[k], ck), a[k], sk);
        }
        GIVE(y + (out ? 2 * i : i), P, out, p, q);
    }
#endif
    for (; i < P; i++) {
        REAL a, b;
        FN(get)(x, i, P, in, &a, &b);
        FN(put)(y, i, P, out, a * c[i] - b * s[i], a * s[i] + b * c[i]);
    }
}

/* `x` and `y` point at the first rotated channel; `out` has room for 2P elements. */
TARGET static void FN(row)(const void *x, void *y, const void *c, const void *s, void *out,
                           size_t P, int layout)
{
    switch (layout) {
    case 0: FN(turn)(x, out, c, s, P, 0, 0); break;
    case 1: FN(turn)(x, out, c, s, P, 0, 1); break;
    case 2: FN(turn)(x, out, c, s, P, 1, 0); break;
    default: FN(turn)(x, out, c, s, P, 1, 1); break;
    }
    memcpy(y, out, 2 * P * sizeof(ELEM));
}

#undef KIND
#undef ELEM
#undef REAL
#undef LOAD
#undef STORE
#undef TAKE
#undef GIVE
