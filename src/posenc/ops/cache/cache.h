/* A call that rotates queries and keys, and writes keys and values to caches. Each thread takes whole
 * tokens, whose heads it rotates and writes together. */
typedef struct {
    Job q, k, v; /* the results of k and v are caches (pages, H, page, D); values have no pairs */
    i64 k_page, v_page; /* slots of a page */
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
static void write_token(const Job *j, i64 page, i64 b, i64 t, i64 slot, const char *c, const char *s,
                        const Norm *norm)
{
    const Tensor *const a = &j->tensors[0];
    const i64 size = element_size[j->dtype];
    const RowBlock rows = {
        a->x + (b * a->x_sb + t * a->x_st) * size,
        a->y + (slot / page * a->y_sb + slot % page * a->y_st) * size,
        c, s, a->H, a->x_sh, a->y_sh, 0, 1, a->x_sh, a->y_sh,
    };
    if (j->P)
        rotate_block(j, rows, norm);
    else
        copy_unrotated(j, &rows);
}

/* The scratch: factors of queries and of keys. */
static void begin_cache(const Job *q, char *scratch)
{
    convert_factors(q, scratch);
    convert_factors(&((const CacheJob *)q)->k, scratch + factors(q) * real_size(q));
}

static void cache_tile(const Job *q, i64 b, i64 t, i64 nt, const char *c, const char *s, char *scratch)
{
    const CacheJob *const job = (const CacheJob *)q; /* queries are its first member */
    const Job *const k = &job->k, *const v = &job->v;
    const i64 row = q->P * real_size(q);
    const Norm of_k = norm_of(k, scratch + factors(q) * real_size(q), NULL);
    rotate_tile(q, &q->tensors[0], b, t, nt, c, s, norm_of(q, scratch, NULL));
    for (i64 n = 0; n < nt; n++) {
        const i64 slot = slot_of(job, b, t + n);
        if (slot < 0) continue;
        write_token(k, job->k_page, b, t + n, slot, c + n * row, s + n * row, &of_k);
        write_token(v, job->v_page, b, t + n, slot, NULL, NULL, NULL);
    }
}
