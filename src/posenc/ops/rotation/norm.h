/* RMSNorm before the rotation, for one dtype of dtypes.h: a row is read for its mean square, which brings
 * it to the cache, and then normalised as it is rotated. */

/* One over the root of a mean square. */
TARGET INLINE REAL FN(scale)(REAL sum, double count, double eps)
{
    if (sizeof(REAL) == sizeof(float)) return 1 / sqrtf((float)sum / (float)count + (float)eps);
    return (REAL)(1 / sqrt((double)sum / count + eps));
}

TARGET static REAL FN(squares)(const ELEM *x, size_t D)
{
    const size_t half = D / 2;
    REAL sum = 0;
    size_t done = 0;
#ifdef VECTOR
    VECTOR sums[4] = {{0}};
    for (; done + LANES <= half; done += LANES) {
        VECTOR a[2], b[2];
        LOAD_PAIRS(x + done, half, 0, 0, a, b);
        for (size_t k = 0; k < 2; k++) sums[k] += a[k] * a[k], sums[k + 2] += b[k] * b[k];
    }
    sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (size_t k = 0; k < LANES / 2; k++) sum += sums[0][k];
#else
    enum { WIDTH = 16 };
    REAL sums[2 * WIDTH] = {0};
    for (; done + WIDTH <= half; done += WIDTH)
        for (size_t k = 0; k < WIDTH; k++) {
            const REAL a = LOAD(x[done + k]), b = LOAD(x[half + done + k]);
            sums[k] += a * a, sums[k + WIDTH] += b * b;
        }
    for (size_t width = WIDTH; width > 0; width /= 2)
        for (size_t k = 0; k < width; k++) sums[k] += sums[k + width];
    sum = sums[0];
#endif
    for (size_t i = done; i < half; i++) sum += LOAD(x[i]) * LOAD(x[i]);
    for (size_t i = half + done; i < D; i++) sum += LOAD(x[i]) * LOAD(x[i]);
    return sum;
}

/* Normalise and rotate the pairs of a row; `w` has the factors of first channels, then of second. */
TARGET INLINE void FN(rotate_normed)(const ELEM *x, ELEM *y, const REAL *c, const REAL *s,
                                   const REAL *w, REAL scale, size_t P, int in, int out)
{
    size_t done = 0;
#ifdef VECTOR
    for (; done + LANES <= P; done += LANES) {
        VECTOR a[2], b[2], p[2], q[2];
        /* If the other layout is interleaved, columns keep their order. */
        LOAD_PAIRS(x + (in ? 2 : 1) * done, P, in, 1, a, b);
        for (size_t k = 0; k < 2; k++) {
            const size_t at = done + LANES / 2 * k;
            const VECTOR u = a[k] * scale * TABLE(w + at), v = b[k] * scale * TABLE(w + P + at);
            p[k] = u * TABLE(c + at) - v * TABLE(s + at);
            q[k] = v * TABLE(c + at) + u * TABLE(s + at);
        }
        STORE_PAIRS(y + (out ? 2 : 1) * done, P, 1, out, p, q);
    }
#endif
    INDEPENDENT for (size_t i = done; i < P; i++) {
        const REAL a = LOAD(x[in ? 2 * i : i]) * scale * w[i];
        const REAL b = LOAD(x[in ? 2 * i + 1 : P + i]) * scale * w[P + i];
        y[out ? 2 * i : i] = STORE(a * c[i] - b * s[i]);
        y[out ? 2 * i + 1 : P + i] = STORE(a * s[i] + b * c[i]);
    }
}

TARGET INLINE void FN(normed_layout)(const RowBlock *r, size_t P, const Norm *n, int in, int out)
{
    const size_t D = n->channels, first = n->first_channel;
    const ELEM *x = r->x;
    ELEM *y = r->y;
    const char *c = r->c, *s = r->s;
    const REAL *w = n->weight;
    REAL sum = FN(squares)(x, D);
    for (i64 i = 1; n->all_heads && i < r->count; i++) sum += FN(squares)(x + i * r->x_step, D);
    const double count = (double)D * (n->all_heads ? (double)r->count : 1);
    for (i64 i = r->count; i > 0; i--) {
        const REAL scale = FN(scale)(sum, count, n->eps);
        /* The next row's sum overlaps with the rotation of this one. */
        if (!n->all_heads && i > 1) sum = FN(squares)(x + r->x_step, D);
        FN(rotate_normed)(x + first, y + first, (const REAL *)c, (const REAL *)s, w + first, scale, P,
                          in, out);
        INDEPENDENT for (size_t k = 0; k < first; k++) y[k] = STORE(LOAD(x[k]) * scale * w[k]);
        INDEPENDENT for (size_t k = first + 2 * P; k < D; k++) y[k] = STORE(LOAD(x[k]) * scale * w[k]);
        x += r->x_step, y += r->y_step, c += r->table_step, s += r->table_step;
        if (n->all_heads) w += D;
    }
}

/* Normalise and rotate whole rows into other memory. */
TARGET static void FN(normed)(const RowBlock *r, size_t P, int layout, const Norm *n)
{
    switch (layout) {
    case 0: FN(normed_layout)(r, P, n, 0, 0); break;
    case 1: FN(normed_layout)(r, P, n, 0, 1); break;
    case 2: FN(normed_layout)(r, P, n, 1, 0); break;
    default: FN(normed_layout)(r, P, n, 1, 1); break;
    }
}
