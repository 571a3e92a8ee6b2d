/* The gradient of normalised and rotated rows, for one dtype of dtypes.h. */

/* Convert a row to REAL, in the order of the factors: the first channels of all pairs come before the
 * second ones. */
TARGET static void FN(unpack_row)(const ELEM *x, REAL *to, size_t P, const Norm *n, int interleaved)
{
    const size_t start = n->first_channel;
    const ELEM *const pairs = x + start;
    REAL *const first = to + start, *const second = first + P;
    const size_t same = interleaved ? start : n->channels;
    INDEPENDENT for (size_t i = 0; i < same; i++) to[i] = LOAD(x[i]);
    if (!interleaved) return;
    INDEPENDENT for (size_t i = 0; i < P; i++) {
        first[i] = LOAD(pairs[2 * i]);
        second[i] = LOAD(pairs[2 * i + 1]);
    }
    INDEPENDENT for (size_t i = start + 2 * P; i < n->channels; i++) to[i] = LOAD(x[i]);
}

TARGET static void FN(pack_row)(const REAL *x, ELEM *to, size_t P, const Norm *n, int interleaved)
{
    const size_t start = n->first_channel;
    const REAL *const first = x + start, *const second = first + P;
    ELEM *const pairs = to + start;
    const size_t same = interleaved ? start : n->channels;
    INDEPENDENT for (size_t i = 0; i < same; i++) to[i] = STORE(x[i]);
    if (!interleaved) return;
    INDEPENDENT for (size_t i = 0; i < P; i++) {
        pairs[2 * i] = STORE(first[i]);
        pairs[2 * i + 1] = STORE(second[i]);
    }
    INDEPENDENT for (size_t i = start + 2 * P; i < n->channels; i++) to[i] = STORE(x[i]);
}

/* Load row i into x, and its incoming gradient, rotated back, into t. */
TARGET static void FN(load_row)(const RowBlock *r, i64 i, size_t P, int in, int out, const Norm *n,
                                REAL *x, REAL *t)
{
    const REAL *const c = (const REAL *)((const char *)r->c + i * r->table_step);
    const REAL *const s = (const REAL *)((const char *)r->s + i * r->table_step);
    REAL *const a = t + n->first_channel, *const b = a + P;
    FN(unpack_row)((const ELEM *)r->x + i * r->x_step, x, P, n, in);
    FN(unpack_row)((const ELEM *)n->g + i * n->g_step, t, P, n, out);
    INDEPENDENT for (size_t j = 0; j < P; j++) {
        const REAL p = a[j], q = b[j];
        a[j] = p * c[j] + q * s[j], b[j] = q * c[j] - p * s[j];
    }
}

/* Add the sum of x x to *squares, and that of x t w to *dot. */
TARGET static void FN(sums)(const REAL *x, const REAL *t, const REAL *w, size_t D, REAL *squares,
                            REAL *dot)
{
    enum { WIDTH = 16 };
    REAL a[WIDTH] = {0}, b[WIDTH] = {0};
    size_t done = 0;
    for (; done + WIDTH <= D; done += WIDTH)
        for (size_t k = 0; k < WIDTH; k++) {
            a[k] += x[done + k] * x[done + k];
            b[k] += x[done + k] * (t[done + k] * w[done + k]);
        }
    for (; done < D; done++) a[0] += x[done] * x[done], b[0] += x[done] * (t[done] * w[done]);
    for (size_t width = WIDTH / 2; width > 0; width /= 2)
        for (size_t k = 0; k < width; k++) a[k] += a[k + width], b[k] += b[k + width];
    *squares += a[0], *dot += b[0];
}

/* Write the gradients of the rows into r->y, and add those of the factors to n->sums. */
TARGET static void FN(norm_backward)(const RowBlock *r, size_t P, int layout, const Norm *n)
{
    const int in = layout >> 1, out = layout & 1;
    const size_t D = n->channels;
    const i64 group = n->all_heads ? r->count : 1;
    const double count = (double)D * (double)group;
    REAL *const x = n->work, *const t = x + D;
    for (i64 first = 0; first < r->count; first += group) {
        REAL squares = 0, dot = 0;
        for (i64 i = 0; i < group; i++) {
            FN(load_row)(r, first + i, P, in, out, n, x, t);
            FN(sums)(x, t, (const REAL *)n->weight + i * (i64)D, D, &squares, &dot);
        }
        const REAL scale = FN(scale)(squares, count, n->eps);
        const REAL pull = scale * scale * scale * dot / (REAL)count;
        for (i64 i = 0; i < group; i++) {
            const REAL *const w = (const REAL *)n->weight + i * (i64)D;
            REAL *const sum = (REAL *)n->sums + i * (i64)D;
            if (group > 1) FN(load_row)(r, first + i, P, in, out, n, x, t);
            INDEPENDENT for (size_t j = 0; j < D; j++) {
                sum[j] += t[j] * x[j] * scale;
                x[j] = t[j] * w[j] * scale - x[j] * pull;
            }
            FN(pack_row)(x, (ELEM *)r->y + (first + i) * r->y_step, P, n, in);
        }
    }
}
