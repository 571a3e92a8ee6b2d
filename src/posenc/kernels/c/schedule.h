/* A call: its arguments, the order in which memory is visited, and the threads that share it. */
typedef struct {
    i64 x, y, B, H, T, D, x_sb, x_sh, x_st, x_sd, y_sb, y_sh, y_st, y_sd;
} Tensor;

/* The arguments of rotate() in their order. Pointers are integers and strides count elements. */
typedef struct {
    i64 dtype, cos, sin, tables, rows, P, table_sb, table_st, table_sd; /* tables are float64 */
    i64 start, pos, pos_sb, pos_st, sequential;
    i64 interleaved_in, interleaved_out, first_channel, transposed;
    i64 weight; /* float64 factors of a norm, or 0 */
    union { i64 bits; double number; } eps;
    i64 all_heads;
    i64 to_weight; /* float64 gradient of weight, or 0; tensors[1] is then the incoming gradient */
    Tensor tensors[2];
    i64 count, B, T, D; /* derived from the tensors */
    i64 encodes; /* whether the result is in 8 bits */
    i64 tile, tiles; /* tokens of a tile, and tiles of a sequence */
    double *shares; /* partial gradients of the weight, one for each thread */
    int failed;
} Job;
enum {
    SHARED_ARGUMENTS = offsetof(Job, tensors) / sizeof(i64),
    TENSOR_ARGUMENTS = sizeof(Tensor) / sizeof(i64),
    MOST_ARGUMENTS = SHARED_ARGUMENTS + 2 * TENSOR_ARGUMENTS,
};

enum {
    PARALLEL_ELEMENTS = 1 << 18, /* below this, waking threads costs more than they save */
    TILE_BYTES = 128 << 10, /* of table rows, converted once for all heads of their tokens */
};

static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*thread)(void), (*threads)(void), (*max_threads)(void);
} pool;

static i64 table_row(const Job *j, i64 b, i64 t)
{
    i64 row = j->start + (j->sequential ? t : 0);
    return j->pos ? row + ((const i64 *)(intptr_t)j->pos)[b * j->pos_sb + t * j->pos_st] : row;
}

/* Whether every token has a row in the table; if not, *bad is the first row outside it. */
static int in_range(const Job *j, i64 *bad)
{
    /* A larger position could overflow the sum in table_row. */
    const i64 far = INT64_MAX / 4;
    for (i64 b = 0; b < (j->pos_sb ? j->B : 1); b++)
        for (i64 t = 0; t < j->T; t++) {
            if (!j->pos && t == 1) t = j->T - 1;
            i64 at = j->pos ? ((const i64 *)(intptr_t)j->pos)[b * j->pos_sb + t * j->pos_st] : 0;
            *bad = at > far || at < -far ? at : table_row(j, b, t);
            if (*bad < 0 || *bad >= j->rows) return 0;
        }
    return 1;
}

/* The number of a norm's factors; 0 without a norm. */
static i64 factors(const Job *j)
{
    return j->weight ? (j->all_heads ? j->tensors[0].H : 1) * j->D : 0;
}

/* The i-th factor's index in the weight; factors of first channels precede those of second ones. */
static i64 factor_at(const Job *j, i64 i)
{
    const i64 c = i % j->D - j->first_channel;
    if (!j->interleaved_in || c < 0 || c >= 2 * j->P) return i;
    return i - c + (c < j->P ? 2 * c : 2 * (c - j->P) + 1);
}

/* Bytes of a number in the precision of the computation. */
static i64 real_size(const Job *j) { return j->dtype == FLOAT32 || j->dtype == FLOAT64 ? 8 : 4; }

/* How the kernel of this call reads its tables. */
static TableOrder table_order(const Job *j)
{
    if (real_size(j) == 8) return DOUBLES;
    const int half = !j->interleaved_in && !j->interleaved_out;
    const int words = WORDS_OF_PAIRS && j->dtype == BFLOAT16 && half && !j->weight && !j->encodes;
    return words ? EVEN_THEN_ODD : FLOATS;
}

/* Convert the table rows of nt tokens to the precision of the computation, one after the other. */
static void convert_tables(const Job *j, i64 b, i64 t, i64 nt, char *c, char *s)
{
    const double *cos = (const double *)(intptr_t)j->cos + b * j->table_sb;
    const double *sin = (const double *)(intptr_t)j->sin + b * j->table_sb;
    const TableOrder order = table_order(j);
    for (i64 n = 0; n < nt; n++) {
        const i64 at = table_row(j, b, t + n) * j->table_st, to = n * j->P * real_size(j);
        isas[isa].kernels->convert_row(cos + at, c + to, (size_t)j->P, 1, order);
        isas[isa].kernels->convert_row(sin + at, s + to, (size_t)j->P, j->transposed ? -1 : 1, order);
    }
}

/* Copy the channels that are not rotated. */
static void copy_unrotated(const Job *j, const RowBlock *r)
{
    const i64 size = element_size[j->dtype], from = j->first_channel * size;
    const i64 to = from + 2 * j->P * size;
    for (i64 n = 0; n < r->count; n++)
        for (i64 g = 0; g < r->per_step; g++) {
            const char *const x = (const char *)r->x + (n * r->x_step + g * r->x_head) * size;
            char *const y = (char *)r->y + (n * r->y_step + g * r->y_head) * size;
            memcpy(y, x, (size_t)from);
            memcpy(y + to, x + to, (size_t)(j->D * size - to));
        }
}

/* Rotate whole rows, after a norm if there is one, or compute the gradient of both. */
static void rotate_block(const Job *j, RowBlock rows, const Norm *norm)
{
    const Kernels *const all = isas[isa].kernels;
    Kernel *const *kernels = j->to_weight ? all->norm_backward : j->weight ? all->normed : all->rows;
    const i64 skipped = j->weight ? 0 : j->first_channel * element_size[j->dtype];
    if (!j->weight && rows.x != rows.y && j->D > 2 * j->P) copy_unrotated(j, &rows);
    rows.x = (const char *)rows.x + skipped;
    rows.y = (char *)rows.y + skipped;
    kernels[j->dtype](&rows, (size_t)j->P, 2 * (int)j->interleaved_in + (int)j->interleaved_out, norm);
}

/* Rotate one tensor's heads of tokens t .. t+nt-1 of sequence b; c and s hold their table rows. */
static void rotate_tile(const Job *j, const Tensor *a, i64 b, i64 t, i64 nt, const char *c,
                      const char *s, Norm norm)
{
    const i64 size = element_size[j->dtype], table = j->P * real_size(j);
    const char *const x = (const char *)(intptr_t)a->x + (b * a->x_sb + t * a->x_st) * size;
    char *const y = (char *)(intptr_t)a->y + (b * a->y_sb + t * a->y_st) * size;
    /* Visit memory in its order: the heads of a token, or the tokens of some heads. */
    const int by_token = a->x_sh <= a->x_st || j->all_heads;
    const i64 most = j->weight ? 1 : HEADS_PER_STEP, grouped = a->H - a->H % most;
    for (i64 n = 0; n < nt; n += by_token ? 1 : nt)
        for (i64 h = 0, heads; h < a->H; h += heads) {
            const i64 per_step = h < grouped ? most : 1;
            heads = !by_token ? per_step : h < grouped ? grouped : a->H - grouped;
            const RowBlock rows = {
                x + (n * a->x_st + h * a->x_sh) * size,
                y + (n * a->y_st + h * a->y_sh) * size,
                c + n * table,
                s + n * table,
                by_token ? heads / per_step : nt,
                by_token ? per_step * a->x_sh : a->x_st,
                by_token ? per_step * a->y_sh : a->y_st,
                by_token ? 0 : table,
                per_step,
                a->x_sh,
                a->y_sh,
            };
            if (j->to_weight) {
                const Tensor *const g = &j->tensors[1];
                norm.g = (const char *)(intptr_t)g->x +
                         (b * g->x_sb + (t + n) * g->x_st + h * g->x_sh) * size;
                norm.g_step = by_token ? g->x_sh : g->x_st;
            }
            rotate_block(j, rows, &norm);
        }
}

/* Convert a norm's factors to the precision of the computation, in the order of factor_at. */
static void convert_factors(const Job *j, char *weight)
{
    for (i64 i = 0; i < factors(j); i++) {
        const double factor = ((const double *)(intptr_t)j->weight)[factor_at(j, i)];
        if (real_size(j) == 8)
            ((double *)weight)[i] = factor;
        else
            ((float *)weight)[i] = plain_nan((float)factor);
    }
}

/* Run units first .. last-1; a unit is a tile of tokens of one sequence, with all its heads. */
static void run_units(Job *j, i64 first, i64 last, i64 thread)
{
    const i64 size = real_size(j), tables = j->tile * j->P * size, weights = factors(j) * size;
    const int every_sequence = j->table_sb == 0 && j->pos_sb == 0;
    const i64 room = j->to_weight ? 2 * j->D * size + weights : 0;
    char *const block = malloc((size_t)(2 * tables + weights + room + CACHE_LINE));
    if (!block) {
        j->failed = 1;
        return;
    }
    char *const c = block + (-(uintptr_t)block & (CACHE_LINE - 1)), *const s = c + tables;
    char *const weight = s + tables, *const work = weight + weights;
    const Norm norm = {(size_t)j->D, (size_t)j->first_channel, weight, j->eps.number,
                       (int)j->all_heads, work, work + 2 * j->D * size, NULL, 0};
    convert_factors(j, weight);
    for (i64 unit = first, ready = -1; unit < last; unit++) {
        const i64 b = unit % j->B, tile = unit / j->B, t = tile * j->tile;
        const i64 nt = j->T - t < j->tile ? j->T - t : j->tile;
        if (tile != ready || !every_sequence) convert_tables(j, b, t, nt, c, s), ready = tile;
        if (j->to_weight) memset(norm.sums, 0, (size_t)weights);
        for (i64 n = 0; n < (j->to_weight ? 1 : j->count); n++)
            rotate_tile(j, &j->tensors[n], b, t, nt, c, s, norm);
        /* In half precision, the sums of a unit are floats; those of a thread are doubles. */
        for (i64 i = 0; j->to_weight && i < factors(j); i++)
            j->shares[thread * factors(j) + i] +=
                size == 8 ? ((double *)norm.sums)[i] : (double)((float *)norm.sums)[i];
    }
    free(block);
}

static void run_share(void *job)
{
    Job *const j = job;
    const i64 units = j->B * j->tiles, n = pool.threads(), i = pool.thread();
    run_units(j, units * i / n, units * (i + 1) / n, i);
}

/* Divide the tokens into tiles; return the number of threads. */
static i64 plan(Job *j, i64 elements)
{
    const i64 threads = pool.parallel && elements >= PARALLEL_ELEMENTS ? pool.max_threads() : 1;
    j->tile = TILE_BYTES / (2 * j->P * real_size(j));
    if (j->tile < 1) j->tile = 1;
    /* At least four units for each thread. */
    const i64 fair = (j->B * j->T + 4 * threads - 1) / (4 * threads);
    if (threads > 1 && j->tile > fair) j->tile = fair;
    if (j->tile > j->T) j->tile = j->T;
    j->tiles = (j->T + j->tile - 1) / j->tile;
    j->failed = 0;
    return threads;
}

static int run(Job *j, i64 elements)
{
    const i64 threads = plan(j, elements);
    j->shares = j->to_weight ? calloc((size_t)(threads * factors(j)), sizeof *j->shares) : NULL;
    if (j->to_weight && !j->shares) return 1;
    if (threads > 1)
        pool.parallel(run_share, j, (unsigned)threads, 0);
    else
        run_units(j, 0, j->B * j->tiles, 0);
    for (i64 i = 0; j->to_weight && i < threads * factors(j); i++)
        ((double *)(intptr_t)j->to_weight)[factor_at(j, i % factors(j))] += j->shares[i];
    free(j->shares);
    return j->failed;
}
