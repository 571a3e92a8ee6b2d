/* A call of PoPE, or of its gradient. Its job is that of a rotation: P is D, the weight is the phases
 * (H, D), and the result of tensors[0] has 2 D channels. With a second tensor, which is the incoming
 * gradient, the result is the gradient of the first. */

/* The cosines and then the sines of the phases, in the precision of the computation. */
static void convert_phases(const Job *j, char *to)
{
    const i64 count = j->weight.data ? j->tensors[0].H * j->D : 0;
    for (i64 i = 0; i < count; i++) {
        const i64 at = i / j->D * j->weight.st + i % j->D * j->weight.sd;
        const double phase = number_at(j->weight.data, j->weight.dtype, at);
        if (real_size(j) == 8)
            ((double *)to)[i] = cos(phase), ((double *)to)[count + i] = sin(phase);
        else
            ((float *)to)[i] = plain_nan((float)cos(phase)),
            ((float *)to)[count + i] = plain_nan((float)sin(phase));
    }
}

/* Tokens t .. t+nt-1 of sequence b, in the order of memory; c and s hold their table rows. */
static void polar_tile(const Job *j, i64 b, i64 t, i64 nt, const char *c, const char *s,
                       const char *phases, char *sums)
{
    const Tensor *const a = &j->tensors[0], *const g = &j->tensors[1];
    const i64 size = element_size[j->dtype], real = real_size(j);
    const int by_token = a->x_sh <= a->x_st;
    for (i64 i = 0; i < (by_token ? nt : a->H); i++) {
        const i64 n = by_token ? i : 0, h = by_token ? 0 : i, phase = h * j->D * real;
        const PolarRows rows = {
            a->x + (b * a->x_sb + (t + n) * a->x_st + h * a->x_sh) * size,
            a->y + (b * a->y_sb + (t + n) * a->y_st + h * a->y_sh) * size,
            j->count == 1 ? NULL : g->x + (b * g->x_sb + (t + n) * g->x_st + h * g->x_sh) * size,
            c + n * j->P * real,
            s + n * j->P * real,
            j->weight.data ? phases + phase : NULL,
            j->weight.data ? phases + a->H * j->D * real + phase : NULL,
            j->weight.data ? sums + phase : NULL,
            by_token ? a->H : nt,
            by_token ? a->x_sh : a->x_st,
            by_token ? a->y_sh : a->y_st,
            by_token ? g->x_sh : g->x_st,
            by_token ? 0 : j->P,
            by_token && j->weight.data ? j->D : 0,
        };
        isas[isa].kernels->polar[j->dtype](&rows, (size_t)j->D);
    }
}

/* As run_units. */
static void polar_units(Job *j, i64 first, i64 last, i64 thread)
{
    const i64 size = real_size(j), tables = j->tile * j->P * size;
    const i64 many = j->weight.data ? j->tensors[0].H * j->D : 0;
    char *const block = malloc((size_t)(2 * tables + 3 * many * size + j->P * 8 + 8 + CACHE_LINE));
    if (!block) {
        j->failed = 1;
        return;
    }
    char *const c = block + (-(uintptr_t)block & (CACHE_LINE - 1)), *const s = c + tables;
    char *const phases = s + tables, *const sums = phases + 2 * many * size;
    double *const gathered = (double *)(c + (2 * tables + 3 * many * size + 7) / 8 * 8);
    convert_phases(j, phases);
    for (i64 unit = first, ready = -1; unit < last; unit++) {
        const i64 b = unit % j->B, tile = unit / j->B, t = tile * j->tile;
        const i64 nt = j->T - t < j->tile ? j->T - t : j->tile;
        if (tile != ready || !shares_rows(j)) convert_tables(j, b, t, nt, gathered, c, s), ready = tile;
        if (j->to_weight) memset(sums, 0, (size_t)(many * size));
        polar_tile(j, b, t, nt, c, s, phases, sums);
        /* In half precision, the sums of a unit are floats; those of a thread are doubles. */
        for (i64 i = 0; j->to_weight && i < many; i++)
            j->shares[thread * many + i] +=
                size == 8 ? ((double *)sums)[i] : (double)((float *)sums)[i];
    }
    free(block);
}

static void polar_share(i64 first, i64 last, void *job)
{
    polar_units(job, first, last, thread_of(job));
}

static i64 same_place(const Job *j, i64 i) { return (void)j, i; }
