/* One dtype of rows.h: KIND, ELEM as stored, REAL to compute in, LOAD and STORE between them. */

/* The pairs from..to-1 of a row. */
TARGET INLINE void FN(pairs)(const ELEM *x, ELEM *y, const REAL *c, const REAL *s, size_t P, int in,
                             int out, size_t from, size_t to)
{
    INDEPENDENT for (size_t i = from; i < to; i++) {
#ifdef WORDS
        if (in && out) {
            const uint32_t w = load_word(x + 2 * i);
            const float a = lower_bf16(w), b = upper_bf16(w);
            store_word(y + 2 * i, pack_bf16(a * c[i] - b * s[i], a * s[i] + b * c[i]));
            continue;
        }
#endif
        const REAL a = LOAD(x[in ? 2 * i : i]), b = LOAD(x[in ? 2 * i + 1 : P + i]);
        y[out ? 2 * i : i] = STORE(a * c[i] - b * s[i]);
        y[out ? 2 * i + 1 : P + i] = STORE(a * s[i] + b * c[i]);
    }
}

#ifdef WORDS
/* Two pairs of the half layout at a time, with the table's even columns before its odd ones. */
TARGET INLINE void FN(words)(const ELEM *x, ELEM *y, const REAL *c, const REAL *s, size_t P,
                             size_t from, size_t to)
{
    const REAL *c1 = c + P / 2, *s1 = s + P / 2;
    INDEPENDENT for (size_t i = from; i < to; i++) {
        const uint32_t u = load_word(x + 2 * i), v = load_word(x + P + 2 * i);
        const float a0 = lower_bf16(u), a1 = upper_bf16(u), b0 = lower_bf16(v), b1 = upper_bf16(v);
        store_word(y + 2 * i, pack_bf16(a0 * c[i] - b0 * s[i], a1 * c1[i] - b1 * s1[i]));
        store_word(y + P + 2 * i, pack_bf16(a0 * s[i] + b0 * c[i], a1 * s1[i] + b1 * c1[i]));
    }
}
#endif

/* One row; `whole` says at compile time that blocks leave nothing over. */
TARGET INLINE void FN(turn)(const ELEM *x, ELEM *y, const REAL *c, const REAL *s, size_t P, int in,
                            int out, int whole)
{
    size_t done = 0;
#ifdef TAKE
    /* Two blocks at a time, so that one computes while the other waits. */
    for (; done + 2 * LANES <= P; done += 2 * LANES) {
        VECTOR a[4], b[4], p[4], q[4];
        for (size_t k = 0; k < 2; k++)
            TAKE(x + (in ? 2 : 1) * (done + LANES * k), P, in, a + 2 * k, b + 2 * k);
        for (size_t k = 0; k < 4; k++) {
            const VECTOR ck = TABLE(c + done + LANES / 2 * k), sk = TABLE(s + done + LANES / 2 * k);
            p[k] = a[k] * ck - b[k] * sk;
            q[k] = b[k] * ck + a[k] * sk;
        }
        for (size_t k = 0; k < 2; k++)
            GIVE(y + (out ? 2 : 1) * (done + LANES * k), P, out, p + 2 * k, q + 2 * k);
    }
    if (whole) return;
#endif
#ifdef WORDS
    if (!in && !out && P % 2 == 0) {
        const size_t blocks = P / 2 & -(size_t)BLOCK;
        FN(words)(x, y, c, s, P, 0, blocks);
        if (!whole) FN(words)(x, y, c, s, P, blocks, P / 2);
        return;
    }
#endif
    const size_t blocks = P & -(size_t)BLOCK;
    if (done < blocks) FN(pairs)(x, y, c, s, P, in, out, done, blocks), done = blocks;
    if (!whole) FN(pairs)(x, y, c, s, P, in, out, done, P);
}

TARGET INLINE void FN(layout)(const Rows *r, size_t P, int in, int out, int whole)
{
    const ELEM *x = r->x;
    ELEM *y = r->y;
    const REAL *c = r->c, *s = r->s;
    const size_t bytes = 2 * P * sizeof(ELEM);
    const i64 ahead = 1 + AHEAD / (i64)bytes;
    for (i64 n = r->count; n > 0; n--) {
        fetch(x + ahead * r->x_step, bytes);
        if (x != y) fetch(y + ahead * r->y_step, bytes);
        FN(turn)(x, y, c, s, P, in, out, whole);
        x += r->x_step, y += r->y_step, c += r->table_step, s += r->table_step;
    }
}

TARGET static void FN(rows)(const Rows *r, size_t P, int layout)
{
    /* Short rows would feel a loop for what is left over, even one that does not run. */
    const int whole = P % (2 * BLOCK) == 0;
    switch (2 * layout + whole) {
    case 0: FN(layout)(r, P, 0, 0, 0); break;
    case 1: FN(layout)(r, P, 0, 0, 1); break;
    case 2: case 3: FN(layout)(r, P, 0, 1, 0); break;
    case 4: case 5: FN(layout)(r, P, 1, 0, 0); break;
    case 6: FN(layout)(r, P, 1, 1, 0); break;
    default: FN(layout)(r, P, 1, 1, 1); break;
    }
}

#include "norm.h"

#undef KIND
#undef ELEM
#undef REAL
#undef LOAD
#undef STORE
#undef TAKE
#undef GIVE
#undef LANES
#undef VECTOR
#undef TABLE
#undef WORDS
