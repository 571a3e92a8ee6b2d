/* A call: its arguments, the order in which memory is visited, and the threads that share it. */

/* Numbers of any dtype: a table, or the weight of a norm. Strides count elements. */
typedef struct {
    const char *data; /* NULL if there are none */
    int dtype;
    i64 sb, st, sd;
} Numbers;

static double number_at(const char *data, int dtype, i64 at)
{
    switch (dtype) {
    case FLOAT32: return (double)((const float *)data)[at];
    case BFLOAT16: return (double)load_bf16(((const uint16_t *)data)[at]);
    case FLOAT16: return (double)load_f16(((const half *)data)[at]);
    default: return ((const double *)data)[at];
    }
}

static void store_number(char *data, int dtype, i64 at, double number)
{
    switch (dtype) {
    case FLOAT32: ((float *)data)[at] = (float)number; break;
    case BFLOAT16: ((uint16_t *)data)[at] = store_bf16(plain_nan((float)number)); break;
    case FLOAT16: ((half *)data)[at] = store_f16((float)number); break;
    default: ((double *)data)[at] = number;
    }
}

/* A tensor (B, H, T, D), and the one that gets its result; both are dense along D. */
typedef struct {
    const char *x;
    char *y;
    i64 H, x_sb, x_sh, x_st, y_sb, y_sh, y_st;
} Tensor;

typedef struct Job Job;
struct Job {
    int dtype; /* of the tensors */
    i64 B, T, D;
    Numbers cos, sin;
    i64 rows, P;
    i64 to_second; /* in a doubled table, elements from a number to the same one again; otherwise 0 */
    i64 start;
    const char *pos; /* positions, or NULL */
    int wide_pos;    /* whether they have 64 bits */
    i64 pos_sb, pos_st;
    int sequential; /* whether the tokens of a sequence take consecutive rows */
    int interleaved_in, interleaved_out, transposed;
    i64 first_channel;
    Numbers weight; /* of a norm */
    double eps, shift;
    int all_heads;
    Tensor tensors[2];
    i64 count;
    Tensor gradient; /* the incoming one, if the job is that of a gradient */
    i64 sums;        /* numbers of the gradient of the weight, or 0 */
    char *to_weight; /* that gradient, in the dtype of the weight */
    i64 (*place)(const Job *, i64 i); /* index in it of the i-th number, if that is not i */
    i64 scratch; /* bytes that a thread needs besides its table rows; the sums of a tile come first */
    void (*begin)(const Job *, char *scratch);
    /* Tokens t .. t+nt-1 of sequence b; c and s hold their table rows. */
    void (*run_tile)(const Job *, i64 b, i64 t, i64 nt, const char *c, const char *s, char *scratch);
    i64 tile, tiles; /* tokens of a tile, and tiles of a sequence */
    i64 threads;
    double *shares; /* the sums of each thread */
    int failed;
};

enum {
    PARALLEL_ELEMENTS = 1 << 18, /* below this, waking threads costs more than they save */
    TILE_BYTES = 128 << 10, /* of table rows, converted once for all heads of their tokens */
};

static i64 position_at(const Job *j, i64 b, i64 t)
{
    const i64 at = b * j->pos_sb + t * j->pos_st;
    if (!j->pos) return 0;
    return j->wide_pos ? ((const i64 *)j->pos)[at] : ((const int32_t *)j->pos)[at];
}

static i64 table_row(const Job *j, i64 b, i64 t)
{
    return j->start + (j->sequential ? t : 0) + position_at(j, b, t);
}

/* Whether every token has a row in the table. */
static int in_range(const Job *j)
{
    /* A larger position could overflow the sum in table_row. */
    const i64 limit = INT64_MAX / 4;
    for (i64 b = 0; b < (j->pos_sb ? j->B : 1); b++)
        for (i64 t = 0; t < j->T; t++) {
            if (!j->pos && t == 1) t = j->T - 1;
            const i64 at = position_at(j, b, t), row = at > limit || at < -limit ? -1 : table_row(j, b, t);
            if (row < 0 || row >= j->rows) return 0;
        }
    return 1;
}

/* Whether a doubled table, in the rows that tokens take, has the same number twice for each pair. */
static int is_doubled(const Job *j, const Numbers *table)
{
    const i64 tables = table->sb || j->pos_sb ? j->B : 1;
    for (i64 b = 0; b < tables; b++)
        for (i64 t = 0; t < j->T; t++) {
            const i64 at = b * table->sb + table_row(j, b, t) * table->st;
            for (i64 p = 0; p < j->P; p++)
                if (number_at(table->data, table->dtype, at + p * table->sd) !=
                    number_at(table->data, table->dtype, at + p * table->sd + j->to_second))
                    return 0;
        }
    return 1;
}

/* The number of a norm's factors; 0 without a norm. */
static i64 factors(const Job *j)
{
    return j->weight.data ? (j->all_heads ? j->tensors[0].H : 1) * j->D : 0;
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
    const int words = WORDS_OF_PAIRS && j->dtype == BFLOAT16 && half && !j->weight.data;
    return words ? EVEN_THEN_ODD : FLOATS;
}

/* Convert one row of a table; `row` has room for its numbers. */
static void convert_row(const Job *j, const Numbers *table, i64 at, double sign, double *row, char *to)
{
    const double *from = (const double *)table->data + at;
    if (table->dtype != FLOAT64 || table->sd != 1) {
        for (i64 p = 0; p < j->P; p++) row[p] = number_at(table->data, table->dtype, at + p * table->sd);
        from = row;
    }
    isas[isa].kernels->convert_row(from, to, (size_t)j->P, sign, table_order(j));
}

/* Convert the table rows of nt tokens to the precision of the computation, one after the other. */
static void convert_tables(const Job *j, i64 b, i64 t, i64 nt, double *row, char *c, char *s)
{
    for (i64 n = 0; n < nt; n++) {
        const i64 at = table_row(j, b, t + n), to = n * j->P * real_size(j);
        convert_row(j, &j->cos, b * j->cos.sb + at * j->cos.st, 1, row, c + to);
        convert_row(j, &j->sin, b * j->sin.sb + at * j->sin.st, j->transposed ? -1 : 1, row, s + to);
    }
}

/* Whether all sequences take the same rows of one table. */
static int shares_rows(const Job *j) { return !j->cos.sb && !j->sin.sb && !j->pos_sb; }

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
    Kernel *const *kernels = j->gradient.x ? all->norm_backward : j->weight.data ? all->normed : all->rows;
    const i64 skipped = j->weight.data ? 0 : j->first_channel * element_size[j->dtype];
    if (!j->weight.data && rows.x != rows.y && j->D > 2 * j->P) copy_unrotated(j, &rows);
    rows.x = (const char *)rows.x + skipped;
    rows.y = (char *)rows.y + skipped;
    kernels[j->dtype](&rows, (size_t)j->P, 2 * j->interleaved_in + j->interleaved_out, norm);
}

/* Rotate the heads of one tensor; see `run_tile` of Job. */
static void rotate_tile(const Job *j, const Tensor *a, i64 b, i64 t, i64 nt, const char *c,
                        const char *s, Norm norm)
{
    const i64 size = element_size[j->dtype], table = j->P * real_size(j);
    const char *const x = a->x + (b * a->x_sb + t * a->x_st) * size;
    char *const y = a->y + (b * a->y_sb + t * a->y_st) * size;
    /* Visit memory in its order: the heads of a token, or the tokens of some heads. */
    const int by_token = a->x_sh <= a->x_st || j->all_heads;
    const i64 most = j->weight.data ? 1 : HEADS_PER_STEP, grouped = a->H - a->H % most;
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
            if (j->gradient.x) {
                const Tensor *const g = &j->gradient;
                norm.g = g->x + (b * g->x_sb + (t + n) * g->x_st + h * g->x_sh) * size;
                norm.g_step = by_token ? g->x_sh : g->x_st;
            }
            rotate_block(j, rows, &norm);
        }
}

/* Convert a norm's factors to the precision of the computation, in the order of factor_at. */
static void convert_factors(const Job *j, char *weight)
{
    const Numbers *const from = &j->weight;
    for (i64 i = 0; i < factors(j); i++) {
        const double factor = number_at(from->data, from->dtype, factor_at(j, i) * from->sd) + j->shift;
        if (real_size(j) == 8)
            ((double *)weight)[i] = factor;
        else
            ((float *)weight)[i] = plain_nan((float)factor);
    }
}

static Norm norm_of(const Job *j, const char *weight, char *work)
{
    const Norm norm = {(size_t)j->D, (size_t)j->first_channel, j->weight.data ? weight : NULL,
                       j->eps, j->all_heads, work, NULL, NULL, 0};
    return norm;
}

/* The scratch of a rotation: sums, if the gradient of the weight is wanted, factors, and two rows. */
static void begin_rotation(const Job *j, char *scratch) { convert_factors(j, scratch + j->sums * real_size(j)); }

static void rotate_tiles(const Job *j, i64 b, i64 t, i64 nt, const char *c, const char *s, char *scratch)
{
    char *const weight = scratch + j->sums * real_size(j);
    Norm norm = norm_of(j, weight, weight + factors(j) * real_size(j));
    norm.sums = scratch;
    for (i64 n = 0; n < j->count; n++) rotate_tile(j, &j->tensors[n], b, t, nt, c, s, norm);
}

/* Run units first .. last-1; a unit is a tile of tokens of one sequence, with all its heads. */
static void run_units(i64 first, i64 last, void *job)
{
    Job *const j = job;
    uint32_t thread = 0;
    const i64 size = real_size(j), tables = j->tile * j->P * size, row = j->P * (i64)sizeof(double);
    char *const block = malloc((size_t)(2 * tables + j->scratch + row + 8 + CACHE_LINE));
    /* A job of one thread may be run by any thread of somebody else's loop. */
    if (j->threads > 1) torch.thread(&thread);
    if (!block) {
        j->failed = 1;
        return;
    }
    char *const c = block + (-(uintptr_t)block & (CACHE_LINE - 1)), *const s = c + tables;
    char *const scratch = s + tables;
    /* After everything else, at a multiple of eight. */
    double *const gathered = (double *)(c + (2 * tables + j->scratch + 7) / 8 * 8);
    j->begin(j, scratch);
    for (i64 unit = first, ready = -1; unit < last; unit++) {
        const i64 b = unit % j->B, tile = unit / j->B, t = tile * j->tile;
        const i64 nt = j->T - t < j->tile ? j->T - t : j->tile;
        if (tile != ready || !shares_rows(j)) convert_tables(j, b, t, nt, gathered, c, s), ready = tile;
        memset(scratch, 0, (size_t)(j->sums * size));
        j->run_tile(j, b, t, nt, c, s, scratch);
        /* In half precision, the sums of a unit are floats; those of a thread are doubles. */
        for (i64 i = 0; i < j->sums; i++)
            j->shares[thread * j->sums + i] +=
                size == 8 ? ((double *)scratch)[i] : (double)((float *)scratch)[i];
    }
    free(block);
}

/* Divide the tokens into tiles, and choose the number of threads. */
static void plan(Job *j, i64 elements)
{
    uint32_t threads = 1;
    if (elements >= PARALLEL_ELEMENTS) torch.num_threads(&threads);
    j->tile = j->P ? TILE_BYTES / (2 * j->P * real_size(j)) : 1;
    if (j->tile < 1) j->tile = 1;
    /* At least four units for each thread. */
    const i64 fair = (j->B * j->T + 4 * (i64)threads - 1) / (4 * (i64)threads);
    if (threads > 1 && j->tile > fair) j->tile = fair;
    if (j->tile > j->T) j->tile = j->T;
    j->tiles = (j->T + j->tile - 1) / j->tile;
    j->threads = threads;
}

/* Run a job of so many elements on its threads, and store the gradient of the weight. */
static const char *run(Job *j, i64 elements)
{
    if (elements) {
        plan(j, elements);
        if (j->sums && !(j->shares = calloc((size_t)(j->threads * j->sums), sizeof *j->shares)))
            return "no memory for the sums";
        const i64 units = j->B * j->tiles;
        if (j->threads > 1)
            torch.parallel_for(0, units, (units + j->threads - 1) / j->threads, run_units, j);
        else
            run_units(0, units, j);
    }
    for (i64 i = 0; i < j->sums; i++) {
        double sum = 0;
        for (i64 thread = 0; elements && thread < j->threads; thread++) sum += j->shares[thread * j->sums + i];
        store_number(j->to_weight, j->weight.dtype, j->place ? j->place(j, i) : i, sum);
    }
    free(j->shares);
    return j->failed ? "no memory for the table rows" : NULL;
}
