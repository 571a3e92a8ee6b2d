/* Normalised and rotated rows in 8 bits, for one dtype of dtypes.h. */

/* The largest magnitude of a row; a NaN does not count. Magnitudes are compared as integers, which are
 * in the same order, because the compiler vectorises that. */
TARGET static REAL FN(largest)(const REAL *x, size_t D)
{
    const REAL_BITS sign = (REAL_BITS)1 << (8 * sizeof(REAL_BITS) - 1);
    REAL found = (REAL)INFINITY;
    REAL_BITS infinite, most = 0;
    memcpy(&infinite, &found, sizeof infinite);
    for (size_t k = 0; k < D; k++) {
        REAL_BITS size;
        memcpy(&size, x + k, sizeof size);
        size &= ~sign;
        size = size > infinite ? 0 : size;
        most = size > most ? size : most;
    }
    memcpy(&found, &most, sizeof found);
    return found;
}

/* Divide a row by its scale and round it, by way of float. */
TARGET static void FN(encode)(const REAL *x, uint8_t *y, size_t D, REAL scale, int format)
{
    if (format == FORMAT_E4M3) {
        INDEPENDENT for (size_t k = 0; k < D; k++) y[k] = store_e4m3((float)(x[k] / scale));
    } else if (format == FORMAT_E5M2) {
        INDEPENDENT for (size_t k = 0; k < D; k++) y[k] = store_e5m2((float)(x[k] / scale));
    } else {
        INDEPENDENT for (size_t k = 0; k < D; k++) y[k] = store_int8((float)(x[k] / scale));
    }
}

/* Rotate a row of unpack_row into another, whose channels are in the order of the output. */
TARGET static void FN(rotate_wide)(const REAL *x, REAL *y, const REAL *c, const REAL *s, size_t P,
                                   const Norm *n, int out)
{
    const size_t start = n->first_channel, end = start + 2 * P;
    const REAL *const a = x + start, *const b = a + P;
    REAL *const p = y + start, *const q = out ? p + 1 : p + P;
    const size_t step = out ? 2 : 1;
    INDEPENDENT for (size_t i = 0; i < P; i++) {
        p[step * i] = a[i] * c[i] - b[i] * s[i];
        q[step * i] = b[i] * c[i] + a[i] * s[i];
    }
    memcpy(y, x, start * sizeof(REAL));
    memcpy(y + end, x + end, (n->channels - end) * sizeof(REAL));
}

/* Normalise rows if there is a weight, rotate them if P is not 0, and store them in 8 bits. */
TARGET static void FN(encoded)(const RowBlock *r, size_t P, int layout, const Norm *n,
                               const Encoding *to)
{
    const size_t D = n->channels;
    const i64 group = n->all_heads ? r->count : 1;
    REAL *const x = n->work, *const turned = x + D;
    REAL norm = 1;
    for (i64 i = 0; i < r->count; i++) {
        const ELEM *const row = (const ELEM *)r->x + i * r->x_step;
        FN(unpack_row)(row, x, P, n, P ? layout >> 1 : 0);
        if (n->weight) {
            const REAL *const w = (const REAL *)n->weight + (n->all_heads ? i * (i64)D : 0);
            if (i % group == 0) {
                REAL sum = FN(squares)(row, D);
                for (i64 k = 1; k < group; k++) sum += FN(squares)(row + k * r->x_step, D);
                norm = FN(scale)(sum, (double)D * (double)group, n->eps);
            }
            INDEPENDENT for (size_t k = 0; k < D; k++) x[k] = x[k] * norm * w[k];
        }
        if (P) FN(rotate_wide)(x, turned, r->c, r->s, P, n, layout & 1);
        const REAL *const made = P ? turned : x;
        float scale = to->scale ? to->scale[i * to->scale_step] : 1;
        if (to->scales) {
            scale = (float)(FN(largest)(made, D) / (REAL)largest_of[to->format]);
            if (scale == 0) scale = 1;
            to->scales[i * to->scales_step] = scale;
        }
        FN(encode)(made, (uint8_t *)r->y + i * r->y_step, D, (REAL)scale, to->format);
    }
}
