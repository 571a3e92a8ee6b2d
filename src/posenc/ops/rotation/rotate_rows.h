/* The rotation of rows for one dtype. dtypes.h defines KIND, ELEM (the stored type), REAL (the type of
 * the computation), LOAD and STORE between ELEM and REAL, BLOCK, the pairs rotated together, if not
 * 16, and what polar_rows.h needs. */
#ifndef BLOCK
#define BLOCK 16
#endif

/* Rotate the pairs from .. to-1 of a row. */
TARGET INLINE void FN(pairs)(const ELEM *x, ELEM *y, const REAL *c, const REAL *s, size_t P, int in,
                             int out, size_t from, size_t to)
{
    INDEPENDENT for (size_t i = from; i < to; i++) {
#ifdef WORDS
        if (in && out) {
            const uint32_t w = load_word(x + 2 * i);
            const float a = lower_bf16(w), b = upper_bf16(w);
            store_word(y + 2 * i, pack_bf16(a * c[i] - b * s[i], b * c[i] + a * s[i]));
            continue;
        }
#endif
        const REAL a = LOAD(x[in ? 2 * i : i]), b = LOAD(x[in ? 2 * i + 1 : P + i]);
        y[out ? 2 * i : i] = STORE(a * c[i] - b * s[i]);
        y[out ? 2 * i + 1 : P + i] = STORE(b * c[i] + a * s[i]);
    }
}

/* Rotate BLOCK pairs. */
TARGET INLINE void FN(block)(const ELEM *x, ELEM *y, const REAL *c, const REAL *s, size_t P, int in,
                             int out, size_t from)
{
#ifdef VECTOR
    enum { PARTS = BLOCK / LANES };
    VECTOR a[2 * PARTS], b[2 * PARTS], p[2 * PARTS], q[2 * PARTS];
    for (size_t k = 0; k < PARTS; k++)
        LOAD_PAIRS(x + (in ? 2 : 1) * (from + LANES * k), P, in, out, a + 2 * k, b + 2 * k);
    for (size_t k = 0; k < 2 * PARTS; k++) {
        const VECTOR ck = TABLE(c + from + LANES / 2 * k), sk = TABLE(s + from + LANES / 2 * k);
        p[k] = a[k] * ck - b[k] * sk;
        q[k] = b[k] * ck + a[k] * sk;
    }
    for (size_t k = 0; k < PARTS; k++)
        STORE_PAIRS(y + (out ? 2 : 1) * (from + LANES * k), P, in, out, p + 2 * k, q + 2 * k);
#else
#ifdef WORDS
    if (!in && !out) {
        /* Two pairs at a time, with the block's even columns before its odd ones in the table. */
        const REAL *const c0 = c + from, *const c1 = c0 + BLOCK / 2;
        const REAL *const s0 = s + from, *const s1 = s0 + BLOCK / 2;
        const ELEM *const first = x + from, *const second = first + P;
        ELEM *const to = y + from;
        INDEPENDENT for (size_t i = 0; i < BLOCK / 2; i++) {
            const uint32_t u = load_word(first + 2 * i), v = load_word(second + 2 * i);
            const float a0 = lower_bf16(u), b0 = lower_bf16(v), a1 = upper_bf16(u), b1 = upper_bf16(v);
            store_word(to + 2 * i, pack_bf16(a0 * c0[i] - b0 * s0[i], a1 * c1[i] - b1 * s1[i]));
            store_word(to + P + 2 * i, pack_bf16(b0 * c0[i] + a0 * s0[i], b1 * c1[i] + a1 * s1[i]));
        }
        return;
    }
#endif
    FN(pairs)(x, y, c, s, P, in, out, from, from + BLOCK);
#endif
}

/* Rotate all rows; `even`, a compile-time constant, says that P is a multiple of BLOCK. */
TARGET INLINE void FN(layout)(const RowBlock *r, size_t P, int in, int out, int even)
{
    const i64 per_step = HEADS_PER_STEP > 1 ? r->per_step : 1;
    const size_t bytes = 2 * P * sizeof(ELEM);
    const i64 ahead = 1 + PREFETCH_BYTES / (per_step * (i64)bytes);
    const ELEM *x = r->x;
    ELEM *y = r->y;
    const char *c = r->c, *s = r->s;
    for (i64 n = r->count; n > 0; n--) {
        for (i64 g = 0; g < per_step; g++) {
            const ELEM *from = x + g * r->x_head;
            ELEM *to = y + g * r->y_head;
            size_t done = 0;
            prefetch(from + ahead * r->x_step, bytes);
            if (x != y) prefetch(to + ahead * r->y_step, bytes);
            for (; done + BLOCK <= P; done += BLOCK)
                FN(block)(from, to, (const REAL *)c, (const REAL *)s, P, in, out, done);
            if (!even) FN(pairs)(from, to, (const REAL *)c, (const REAL *)s, P, in, out, done, P);
        }
        x += r->x_step, y += r->y_step, c += r->table_step, s += r->table_step;
    }
}

TARGET static void FN(rows)(const RowBlock *r, size_t P, int layout, const Norm *none)
{
    (void)none;
    /* On short rows, a loop for the pairs left over costs time even if it does not run. */
    const int even = P % BLOCK == 0;
    switch (2 * layout + even) {
    case 0: FN(layout)(r, P, 0, 0, 0); break;
    case 1: FN(layout)(r, P, 0, 0, 1); break;
    case 2: case 3: FN(layout)(r, P, 0, 1, 0); break;
    case 4: case 5: FN(layout)(r, P, 1, 0, 0); break;
    case 6: FN(layout)(r, P, 1, 1, 0); break;
    default: FN(layout)(r, P, 1, 1, 1); break;
    }
}

#include "norm.h"
#include "norm_backward.h"
#include "polar_rows.h"

#undef KIND
#undef ELEM
#undef BLOCK
#undef REAL
#undef LOAD
#undef STORE
#undef SOFTPLUS_LIMIT
#undef ABS
#undef EXP_MINUS
#undef LOG1P
#undef VECTOR
#undef TABLE
#undef WORDS
