/* A call of PoPE, or of its gradient. Its job is that of a rotation: P is D, the weight is the phases
 * (H, D), and the result of tensors[0] has 2 D channels, or is its gradient. */

static i64 phases_of(const Job *j) { return j->weight.data ? j->tensors[0].H * j->D : 0; }

/* The scratch: sums, if the gradient of the phases is wanted, then cosines, then sines of the phases. */
static void begin_polar(const Job *j, char *scratch)
{
    const i64 count = phases_of(j);
    char *const to = scratch + j->sums * real_size(j);
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

static void polar_tile(const Job *j, i64 b, i64 t, i64 nt, const char *c, const char *s, char *scratch)
{
    const Tensor *const a = &j->tensors[0], *const g = &j->gradient;
    const i64 size = element_size[j->dtype], real = real_size(j);
    const char *const phases = scratch + j->sums * real;
    /* In the order of memory. */
    const int by_token = a->x_sh <= a->x_st;
    for (i64 i = 0; i < (by_token ? nt : a->H); i++) {
        const i64 n = by_token ? i : 0, h = by_token ? 0 : i, phase = h * j->D * real;
        const PolarRows rows = {
            a->x + (b * a->x_sb + (t + n) * a->x_st + h * a->x_sh) * size,
            a->y + (b * a->y_sb + (t + n) * a->y_st + h * a->y_sh) * size,
            !g->x ? NULL : g->x + (b * g->x_sb + (t + n) * g->x_st + h * g->x_sh) * size,
            c + n * j->P * real,
            s + n * j->P * real,
            j->weight.data ? phases + phase : NULL,
            j->weight.data ? phases + phases_of(j) * real + phase : NULL,
            j->weight.data ? scratch + phase : NULL,
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
