/* A call that rotates queries and keys, and writes keys and values to caches. Each thread takes whole
 * tokens, whose heads it rotates and writes together. */
typedef struct {
    i64 x, B, H, T, D, x_sb, x_sh, x_st, x_sd;
    i64 format, cache, pages, heads, page, width, y_sp, y_sh, y_st, y_sd;
    i64 scale, scale_sb, scale_sh, scale_st; /* float32, one for each row, or 0 */
    i64 scales, scales_sp, scales_sh, scales_st; /* float32 to be written like the cache, or 0 */
} Cached;

/* The arguments of cache() in their order; the first are those of rotate(). */
typedef struct {
    i64 shared[SHARED_ARGUMENTS]; /* the norm is that of q */
    Tensor q;
    i64 k_weight, k_all_heads;
    i64 slots, slots_sb, slots_st;
    Cached k, v;
} CacheArguments;

typedef struct {
    Job q, k, v; /* values have no pairs */
    const CacheArguments *given;
} CacheJob;

static void make_jobs(CacheJob *job, const CacheArguments *given)
{
    memset(job, 0, sizeof *job);
    memcpy(&job->q, given->shared, sizeof given->shared);
    job->given = given;
    job->q.tensors[0] = given->q;
    job->q.B = given->q.B, job->q.T = given->q.T, job->q.D = given->q.D;
    job->k = job->v = job->q;
    job->k.weight = given->k_weight, job->k.all_heads = given->k_all_heads;
    job->k.tensors[0].H = given->k.H;
    job->k.encodes = given->k.format != SAME_FORMAT;
    job->v.weight = job->v.all_heads = job->v.P = job->v.first_channel = 0;
    job->v.D = given->v.D;
}

static i64 slot_of(const CacheArguments *a, i64 b, i64 t)
{
    return ((const i64 *)(intptr_t)a->slots)[b * a->slots_sb + t * a->slots_st];
}

/* Whether every slot is in the cache, or -1; if not, *bad is the first that is not. */
static int slots_in_range(const CacheArguments *a, i64 *bad)
{
    const i64 count = a->k.pages * a->k.page;
    for (i64 b = 0; b < a->q.B; b++)
        for (i64 t = 0; t < a->q.T; t++) {
            *bad = slot_of(a, b, t);
            if (*bad < -1 || *bad >= count) return 0;
        }
    return 1;
}

/* Write the heads of one token to their slot. */
static void write_token(const Job *j, const Cached *a, i64 b, i64 t, i64 slot, const char *c,
                        const char *s, const Norm *norm)
{
    const i64 size = element_size[j->dtype], page = slot / a->page, place = slot % a->page;
    const RowBlock rows = {
        (const char *)(intptr_t)a->x + (b * a->x_sb + t * a->x_st) * size,
        (char *)(intptr_t)a->cache +
            (page * a->y_sp + place * a->y_st) * (a->format == SAME_FORMAT ? size : 1),
        c, s, a->H, a->x_sh, a->y_sh, 0, 1, a->x_sh, a->y_sh,
    };
    if (a->format != SAME_FORMAT) {
        const float *const scale = (const float *)(intptr_t)a->scale;
        float *const scales = (float *)(intptr_t)a->scales;
        const Encoding to = {
            (int)a->format,
            scale ? scale + b * a->scale_sb + t * a->scale_st : NULL,
            scales ? scales + page * a->scales_sp + place * a->scales_st : NULL,
            a->scale_sh,
            a->scales_sh,
        };
        const int layout = 2 * (int)j->interleaved_in + (int)j->interleaved_out;
        isas[isa].kernels->encoded[j->dtype](&rows, (size_t)j->P, layout, norm, &to);
    } else if (j->P) {
        rotate_block(j, rows, norm);
    } else {
        copy_unrotated(j, &rows);
    }
}

static Norm norm_of(const Job *j, const char *weight, char *work)
{
    const Norm norm = {(size_t)j->D, (size_t)j->first_channel, j->weight ? weight : NULL,
                       j->eps.number, (int)j->all_heads, work, NULL, NULL, 0};
    return norm;
}

/* As run_units, for queries, keys and values. */
static void write_units(CacheJob *job, i64 first, i64 last)
{
    Job *const q = &job->q, *const k = &job->k, *const v = &job->v;
    const i64 size = real_size(q), row = q->P * size, tables = q->tile * row;
    const i64 work = 2 * (q->D > v->D ? q->D : v->D) * size;
    const int every_sequence = q->table_sb == 0 && q->pos_sb == 0;
    const int shared = table_order(q) == table_order(k);
    char *const block =
        malloc((size_t)(4 * tables + (factors(q) + factors(k)) * size + work + CACHE_LINE));
    if (!block) {
        q->failed = 1;
        return;
    }
    char *const c = block + (-(uintptr_t)block & (CACHE_LINE - 1)), *const s = c + tables;
    char *const kc = shared ? c : s + tables, *const ks = kc + tables;
    char *const q_weight = c + 4 * tables, *const k_weight = q_weight + factors(q) * size;
    char *const rows = k_weight + factors(k) * size;
    const Norm of_q = norm_of(q, q_weight, rows), of_k = norm_of(k, k_weight, rows);
    const Norm of_v = norm_of(v, NULL, rows);
    convert_factors(q, q_weight);
    convert_factors(k, k_weight);
    for (i64 unit = first, ready = -1; unit < last; unit++) {
        const i64 b = unit % q->B, tile = unit / q->B, t = tile * q->tile;
        const i64 nt = q->T - t < q->tile ? q->T - t : q->tile;
        if (tile != ready || !every_sequence) {
            convert_tables(q, b, t, nt, c, s), ready = tile;
            if (!shared) convert_tables(k, b, t, nt, kc, ks);
        }
        rotate_tile(q, &q->tensors[0], b, t, nt, c, s, of_q);
        for (i64 n = 0; n < nt; n++) {
            const i64 slot = slot_of(job->given, b, t + n);
            if (slot < 0) continue;
            write_token(k, &job->given->k, b, t + n, slot, kc + n * row, ks + n * row, &of_k);
            write_token(v, &job->given->v, b, t + n, slot, NULL, NULL, &of_v);
        }
    }
    free(block);
}

static void write_share(void *of)
{
    CacheJob *const job = of;
    const i64 units = job->q.B * job->q.tiles, n = pool.threads(), i = pool.thread();
    write_units(job, units * i / n, units * (i + 1) / n);
}

static int write_all(CacheJob *job, i64 elements)
{
    const i64 threads = plan(&job->q, elements);
    if (threads > 1)
        pool.parallel(write_share, job, (unsigned)threads, 0);
    else
        write_units(job, 0, job->q.B * job->q.tiles);
    return job->q.failed;
}
