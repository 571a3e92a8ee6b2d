/* PoPE for one dtype of dtypes.h, which also defines ABS, EXP_MINUS (exp of minus a number from 0 to SOFTPLUS_LIMIT) and
 * LOG1P (of a number from 0 to 1): softplus(x) is max(x, 0) + log1p(exp(-|x|)). */

/* exp(-|x|), with SOFTPLUS_LIMIT for larger |x| and for NaN. */
TARGET INLINE REAL FN(decay)(REAL x)
{
    const REAL a = ABS(x);
    return EXP_MINUS(a < SOFTPLUS_LIMIT ? a : SOFTPLUS_LIMIT);
}

TARGET INLINE REAL FN(softplus)(REAL x, REAL decay) { return (x < 0 ? 0 : x) + LOG1P(decay); }

/* Write the channels of a row; `turned`, a compile-time constant, says that there is a phase. */
TARGET INLINE void FN(polar_row)(const ELEM *x, ELEM *y, const REAL *c, const REAL *s, const REAL *pc,
                                 const REAL *ps, size_t D, int turned)
{
    INDEPENDENT for (size_t i = 0; i < D; i++) {
        const REAL v = LOAD(x[i]), size = FN(softplus)(v, FN(decay)(v));
        const REAL cos = turned ? c[i] * pc[i] - s[i] * ps[i] : c[i];
        const REAL sin = turned ? s[i] * pc[i] + c[i] * ps[i] : s[i];
        y[i] = STORE(size * cos);
        y[D + i] = STORE(size * sin);
    }
}

/* Write the gradient of a row, and add that of its phase to `sum`. */
TARGET INLINE void FN(polar_row_backward)(const ELEM *x, ELEM *dx, const ELEM *g, const REAL *c,
                                          const REAL *s, const REAL *pc, const REAL *ps, REAL *sum,
                                          size_t D, int turned)
{
    INDEPENDENT for (size_t i = 0; i < D; i++) {
        const REAL v = LOAD(x[i]), a = LOAD(g[i]), b = LOAD(g[D + i]), decay = FN(decay)(v);
        const REAL cos = turned ? c[i] * pc[i] - s[i] * ps[i] : c[i];
        const REAL sin = turned ? s[i] * pc[i] + c[i] * ps[i] : s[i];
        /* The slope of softplus, which is NaN if v is. */
        const REAL slope = (v < 0 ? decay : v >= 0 ? 1 : v) / (1 + decay);
        dx[i] = STORE(slope * (a * cos + b * sin));
        if (turned) sum[i] += FN(softplus)(v, decay) * (b * cos - a * sin);
    }
}

TARGET static void FN(polar)(const PolarRows *r, size_t D)
{
    const size_t bytes = D * sizeof(ELEM);
    const i64 ahead = 1 + PREFETCH_BYTES / (i64)bytes;
    for (i64 n = 0; n < r->count; n++) {
        const ELEM *const x = (const ELEM *)r->x + n * r->x_step;
        ELEM *const y = (ELEM *)r->y + n * r->y_step;
        const REAL *const c = (const REAL *)r->c + n * r->table_step;
        const REAL *const s = (const REAL *)r->s + n * r->table_step;
        const REAL *const pc = (const REAL *)r->pc + n * r->phase_step;
        const REAL *const ps = (const REAL *)r->ps + n * r->phase_step;
        prefetch(x + ahead * r->x_step, bytes);
        if (r->g) {
            const ELEM *const g = (const ELEM *)r->g + n * r->g_step;
            REAL *const sum = (REAL *)r->sums + n * r->phase_step;
            prefetch(g + ahead * r->g_step, 2 * bytes);
            if (r->pc)
                FN(polar_row_backward)(x, y, g, c, s, pc, ps, sum, D, 1);
            else
                FN(polar_row_backward)(x, y, g, c, s, pc, ps, sum, D, 0);
        } else {
            prefetch(y + ahead * r->y_step, 2 * bytes);
            if (r->pc)
                FN(polar_row)(x, y, c, s, pc, ps, D, 1);
            else
                FN(polar_row)(x, y, c, s, pc, ps, D, 0);
        }
    }
}
