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

TARGET INLINE void FN(turn)(const ELEM *x, ELEM *y, const REAL *c, const REAL *s, size_t P, int in,
                            int out)
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
    /* Blocks of a fixed size need no loop for what is left over, which short rows would feel. */
    for (; i + BLOCK <= P; i += BLOCK)
        INDEPENDENT for (size_t n = i; n < i + BLOCK; n++) {
            REAL a, b;
            FN(get)(x, n, P, in, &a, &b);
            FN(put)(y, n, P, out, a * c[n] - b * s[n], a * s[n] + b * c[n]);
        }
    for (; i < P; i++) {
        REAL a, b;
        FN(get)(x, i, P, in, &a, &b);
        FN(put)(y, i, P, out, a * c[i] - b * s[i], a * s[i] + b * c[i]);
    }
}

TARGET INLINE void FN(layout)(const Rows *r, size_t P, int in, int out)
{
    const ELEM *x = r->x;
    ELEM *y = r->y;
    const REAL *c = r->c, *s = r->s;
    for (i64 n = r->count; n > 0; n--) {
        FN(turn)(x, y, c, s, P, in, out);
        x += r->x_step, y += r->y_step, c += r->table_step, s += r->table_step;
    }
}

TARGET static void FN(rows)(const Rows *r, size_t P, int layout)
{
    switch (layout) {
    case 0: FN(layout)(r, P, 0, 0); break;
    case 1: FN(layout)(r, P, 0, 1); break;
    case 2: FN(layout)(r, P, 1, 0); break;
    default: FN(layout)(r, P, 1, 1); break;
    }
}

#undef KIND
#undef ELEM
#undef REAL
#undef LOAD
#undef STORE
#undef TAKE
#undef GIVE
