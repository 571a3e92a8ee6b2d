/* A call that rotates queries and keys, and writes keys and values to caches. Each thread takes whole
 * tokens, whose heads it rotates and writes together. */
typedef struct {
    const char *x; /* keys or values (B, H, T, D) */
    i64 H, x_sb, x_sh, x_st;
    int format;
    char *cache; /* (pages, H, page, D) */
    i64 page, y_sp, y_sh, y_st;
    const char *scale; /* float32, one for each row, or NULL */
    i64 scale_sb, scale_sh, scale_st;
    char *scales; /* float32 to be written like the cache, or NULL */
    i64 scales_sp, scales_sh, scales_st;
} Cached;

typedef struct {
    Job q, k, v; /* values have no pairs */
    Cached keys, values;
    const char *slots;
    int wide_slots; /* whether they have 64 bits */
    i64 slots_sb, slots_st, count;
} CacheJob;

static i64 slot_of(const CacheJob *j, i64 b, i64 t)
{
    const i64 at = b * j->slots_sb + t * j->slots_st;
    return j->wide_slots ? ((const i64 *)j->slots)[at] : ((const int32_t *)j->slots)[at];
}

/* Whether every slot is in the cache, or -1. */
static int slots_in_range(const CacheJob *j)
{
    for (i64 b = 0; b < j->q.B; b++)
        for (i64 t = 0; t < j->q.T; t++) {
            const i64 slot = slot_of(j, b, t);
            if (slot < -1 || slot >= j->count) return 0;
        }
    return 1;
}

/* Write the heads of one token to their slot. */
static void write_token(const Job *j, const Cached *a, i64 b, i64 t, i64 slot, const char *c,
                        const char *s, const Norm *norm)
{
    const i64 size = element_size[j->dtype], page = slot / a->page, place = slot % a->page;
    const RowBlock rows = {
        a->x + (b * a->x_sb + t * a->x_st) * size,
        a->cache + (page * a->y_sp + place * a->y_st) * (a->format == SAME_FORMAT ? size : 1),
        c, s, a->H, a->x_sh, a->y_sh, 0, 1, a->x_sh, a->y_sh,
    };
    if (a->format != SAME_FORMAT) {
        const float *const scale = (const float *)a->scale;
        float *const scales = (float *)a->scales;
        const Encoding to = {
            a->format,
            scale ? scale + b * a->scale_sb + t * a->scale_st : NULL,
            scales ? scales + page * a->scales_sp + place * a->scales_st : NULL,
            a->scale_sh,
            a->scales_sh,
        };
        const int layout = 2 * j->interleaved_in + j->interleaved_out;
        isas[isa].kernels->encoded[j->dtype](&rows, (size_t)j->P, layout, norm, &to);
    } else if (j->P) {
        rotate_block(j, rows, norm);
    } else {
        copy_unrotated(j, &rows);
    }
}

static Norm norm_of(const Job *j, const char *weight, char *work)
{
    const Norm norm = {(size_t)j->D, (size_t)j->first_channel, j->weight.data ? weight : NULL,
                       j->eps, j->all_heads, work, NULL, NULL, 0};
    return norm;
}

/* As run_units, for queries, keys and values. */
static void write_units(CacheJob *job, i64 first, i64 last)
{
    Job *const q = &job->q, *const k = &job->k, *const v = &job->v;
    const i64 size = real_size(q), row = q->P * size, tables = q->tile * row;
    const i64 work = 2 * (q->D > v->D ? q->D : v->D) * size;
    const int shared = table_order(q) == table_order(k);
    char *const block =
        malloc((size_t)(4 * tables + (factors(q) + factors(k)) * size + work + q->P * 8 + 8 + CACHE_LINE));
    if (!block) {
        q->failed = 1;
        return;
    }
    char *const c = block + (-(uintptr_t)block & (CACHE_LINE - 1)), *const s = c + tables;
    char *const kc = shared ? c : s + tables, *const ks = kc + tables;
    char *const q_weight = c + 4 * tables, *const k_weight = q_weight + factors(q) * size;
    char *const rows = k_weight + factors(k) * size;
    double *const gathered = (double *)(c + (rows + work - c + 7) / 8 * 8);
    const Norm of_q = norm_of(q, q_weight, rows), of_k = norm_of(k, k_weight, rows);
    const Norm of_v = norm_of(v, NULL, rows);
    convert_factors(q, q_weight);
    convert_factors(k, k_weight);
    for (i64 unit = first, ready = -1; unit < last; unit++) {
        const i64 b = unit % q->B, tile = unit / q->B, t = tile * q->tile;
        const i64 nt = q->T - t < q->tile ? q->T - t : q->tile;
        if (tile != ready || !shares_rows(q)) {
            convert_tables(q, b, t, nt, gathered, c, s), ready = tile;
            if (!shared) convert_tables(k, b, t, nt, gathered, kc, ks);
        }
        rotate_tile(q, &q->tensors[0], b, t, nt, c, s, of_q);
        for (i64 n = 0; n < nt; n++) {
            const i64 slot = slot_of(job, b, t + n);
            if (slot < 0) continue;
            write_token(k, &job->keys, b, t + n, slot, kc + n * row, ks + n * row, &of_k);
            write_token(v, &job->values, b, t + n, slot, NULL, NULL, &of_v);
        }
    }
    free(block);
}

static void write_share(i64 first, i64 last, void *job) { write_units(job, first, last); }

static int write_all(CacheJob *job, i64 elements)
{
    plan(&job->q, elements);
    split(&job->q, write_share, job);
    return job->q.failed;
}
