/* The ops on the CPU. Each reads its arguments, refuses those that do not fit, and runs a job. */

/* Whether a kernel can read and write a tensor as it is. */
static int has_rows(const View *v) { return v->step[v->dim - 1] == 1 && (v->data || !count_of(v)); }

static Tensor tensor_of(const View *x, const View *y)
{
    const Tensor t = {x->data, y->data, x->size[1], x->step[0], x->step[1], x->step[2],
                      y->step[0], y->step[1], y->step[2]};
    return t;
}

/* A new tensor like `x`, as (B, H, T, D), whatever its form. */
static const char *make_same(Call *c, const View *x, const Rotation *r, View *y)
{
    View like = *x;
    i64 step[MOST_DIMS];
    if (r->tokens_first) swap_axes(&like);
    /* Tokens (T, H, D) were given the first axis. */
    const int more = r->is_flat;
    for (int d = 0; more && d < 3; d++) like.size[d] = like.size[d + 1], like.step[d] = like.step[d + 1];
    like.dim -= more;
    steps_like(&like, step);
    TRY(make(c, like.dim, like.size, step, x->dtype, x, y));
    if (more) add_axis(y);
    if (r->tokens_first) swap_axes(y);
    return NULL;
}

/* As make_same; `to` is what a kernel writes, a dense tensor if need be. */
static const char *make_like(Call *c, const View *x, const Rotation *r, View *y, View *to)
{
    TRY(make_same(c, x, r, y));
    *to = *y;
    if (has_rows(y)) return NULL;
    return y->is_swapped ? "a copy would exchange axes" : make_contiguous(c, x->dim, x->size, x, to);
}

/* Copy the result to where the caller wants it, if a kernel could not write there. */
static const char *settle(const View *y, const View *to) { return to->handle == y->handle ? NULL : copy(y, to); }

static const char *with_rows(Call *c, const View *x, View *to)
{
    *to = *x;
    return has_rows(x) ? NULL : dense_copy(c, x, to);
}

static const char *run_rotation(Job *j, i64 heads)
{
    const i64 rows = j->gradient.x ? 2 * j->D : 0;
    j->scratch = (j->sums + factors(j) + rows) * real_size(j);
    j->begin = begin_rotation, j->run_tile = rotate_tiles;
    return run(j, j->B * heads * j->T * j->D);
}

/* Rotate tensors into others, in one job if they have one dtype; x and y have dense rows. */
static const char *rotate_views(Job *j, const View *x, const View *y, int count)
{
    const int together = count == 1 || x[0].dtype == x[1].dtype;
    for (int i = 0; i < count; i += together ? count : 1) {
        i64 heads = 0;
        j->dtype = float_dtype(x[i].dtype), j->count = together ? count : 1;
        for (int n = 0; n < j->count; n++)
            j->tensors[n] = tensor_of(&x[i + n], &y[i + n]), heads += x[i + n].size[1];
        TRY(run_rotation(j, heads));
    }
    return NULL;
}

static const char *rotate_op(Call *c, int count, int in_place)
{
    Rotation r = {0};
    View from[2] = {{0}}, to[2] = {{0}}, y[2];
    read_rotation(c, &r, count, 0);
    TRY(wrong_rotation(c, &r));
    if (in_place) TRY(unwritable(r.x, count, &r.positions));
    Job j = job_of(&r);
    TRY(wrong_values(&j, &r.positions));
    /* Between two layouts, a kernel would overwrite channels before it reads them. */
    const int apart = r.interleaved_in != r.interleaved_out;
    for (int i = 0; i < count; i++) {
        const View *const x = &r.x[i];
        if (!in_place) {
            TRY(with_rows(c, x, &from[i]));
            TRY(make_like(c, x, &r, &y[i], &to[i]));
            continue;
        }
        y[i] = to[i] = from[i] = *x;
        if (apart || !has_rows(x)) TRY(dense_copy(c, x, &from[i]));
        if (!has_rows(x)) TRY(dense_copy(c, x, &to[i]));
    }
    TRY(rotate_views(&j, from, to, count));
    for (int i = 0; i < count; i++) TRY(settle(&y[i], &to[i]));
    if (!in_place) give_back(c, y, count);
    return NULL;
}

/* Give a job the norm of tensor `i`. */
static void set_norm(Job *j, const Rotation *r, int i)
{
    const View *const weight = &r->weight[i];
    if (!weight->handle) return;
    const Numbers numbers = {weight->data, float_dtype(weight->dtype), 0, 0, weight->step[0]};
    j->weight = numbers, j->eps = r->eps, j->shift = r->shift;
    j->all_heads = weight->size[0] != r->x[i].size[3];
}

static const char *norm_op(Call *c, int count)
{
    Rotation r = {0};
    View x, to, y[2];
    read_rotation(c, &r, count, 1);
    TRY(wrong_rotation(c, &r));
    Job j = job_of(&r);
    TRY(wrong_values(&j, &r.positions));
    for (int i = 0; i < count; i++) {
        TRY(with_rows(c, &r.x[i], &x));
        TRY(make_like(c, &r.x[i], &r, &y[i], &to));
        set_norm(&j, &r, i);
        TRY(rotate_views(&j, &x, &to, 1));
        TRY(settle(&y[i], &to));
    }
    give_back(c, y, count);
    return NULL;
}

static int is_like(const View *a, const View *b)
{
    return !is_elsewhere(a, b) && a->dim == b->dim && a->dtype == b->dtype &&
           !memcmp(a->size, b->size, (size_t)a->dim * sizeof *a->size);
}

/* The gradients of norm_rotate with respect to x and the weight. */
static const char *norm_backward_op(Call *c)
{
    Rotation r = {0};
    View x, from, to, results[2];
    View g = tensor_argument(c);
    read_rotation(c, &r, 1, 1);
    TRY(wrong_rotation(c, &r));
    if (r.tokens_first && g.dim == 4) swap_axes(&g);
    if (!is_like(&g, r.x)) return "the gradient does not fit its tensor";
    Job j = job_of(&r);
    TRY(wrong_values(&j, &r.positions));
    TRY(with_rows(c, r.x, &x));
    TRY(with_rows(c, &g, &from));
    TRY(make_like(c, r.x, &r, &results[0], &to));
    TRY(make_contiguous(c, 1, r.weight->size, r.weight, &results[1]));
    set_norm(&j, &r, 0);
    j.gradient = tensor_of(&from, &from), j.tensors[0].H = x.size[1];
    j.sums = factors(&j), j.place = factor_at, j.to_weight = results[1].data;
    TRY(rotate_views(&j, &x, &to, 1));
    TRY(settle(&results[0], &to));
    give_back(c, results, 2);
    return NULL;
}

static int has_8_bits(const View *v)
{
    return v->dtype == dtypes.float8_e4m3fn || v->dtype == dtypes.float8_e5m2 || v->dtype == dtypes.int8;
}

/* Whether a scale is float32, of the first three sizes. */
static int is_scale(const View *s, const i64 *size, const View *x)
{
    return !is_elsewhere(s, x) && s->dim == 3 && s->dtype == dtypes.float32 &&
           !memcmp(s->size, size, 3 * sizeof *size);
}

static const char *wrong_cache(const View *x, const View *cache, const View *scale, const View *scales)
{
    if (is_elsewhere(cache, x) || cache->dim != 4 || (cache->dtype != x->dtype && !has_8_bits(cache)) ||
        cache->size[1] != x->size[1] || cache->size[3] != x->size[3] || cache->step[3] != 1 ||
        (!cache->data && count_of(cache)))
        return "a cache is not (pages, H, page, D), dense along D, in a dtype of caches";
    const int has_scale = scale->handle != NULL, has_scales = scales->handle != NULL;
    if (has_scale + has_scales > 1 || (has_scale + has_scales && !has_8_bits(cache)))
        return "only a cache of 8 bits may have a scale or scales, and must not have both";
    if (has_scale && !is_scale(scale, x->size, x)) return "a scale is not float32, (B, H, T)";
    if (has_scales && !is_scale(scales, cache->size, x))
        return "scales are not float32, (pages, H, page)";
    return NULL;
}

/* The arguments of rotate_and_cache: of keys and of values; those that may be absent have no handle then. */
typedef struct {
    Rotation r;
    View cache[2], scales[2], slots, scale[2];
} CacheArguments;

/* A scale that all tokens share, () or (H,), as (B, H, T). */
static void expand_scale(View *scale, const View *x)
{
    const i64 step = scale->dim == 1 && scale->size[0] > 1 ? scale->step[0] : 0;
    if (!scale->handle || scale->dim > 1 || (scale->dim == 1 && scale->size[0] != 1 && !step)) return;
    if (scale->dim == 1 && scale->size[0] > 1 && scale->size[0] != x->size[1]) return;
    scale->dim = 3, memcpy(scale->size, x->size, 3 * sizeof(i64));
    scale->step[0] = scale->step[2] = 0, scale->step[1] = step;
}

/* Tensors in the forms that the library takes, as (B, H, T, D) and (pages, H, page, D). */
static void unfold(CacheArguments *a)
{
    Rotation *const r = &a->r;
    if (r->x->dim == 3 && r->x[1].dim == 3 && r->x[2].dim == 3 && a->slots.dim == 1 && !r->is_flat) {
        r->is_flat = r->tokens_first = 1;
        for (int i = 0; i < 3; i++) add_axis(&r->x[i]), swap_axes(&r->x[i]);
        add_axis(&a->slots);
    }
    for (int i = 0; i < 2; i++) {
        if (r->pages_of_tokens) swap_axes(&a->cache[i]), swap_axes(&a->scales[i]);
        if (r->x[1 + i].dim == 4) expand_scale(&a->scale[i], &r->x[1 + i]);
    }
}

static void read_cache_arguments(Call *c, CacheArguments *a)
{
    Rotation *const r = &a->r;
    r->count = 2;
    for (int i = 0; i < 3; i++) r->x[i] = tensor_argument(c);
    for (int i = 0; i < 2; i++) a->cache[i] = tensor_argument(c);
    for (int i = 0; i < 2; i++) a->scales[i] = optional_argument(c);
    a->slots = tensor_argument(c);
    for (int i = 0; i < 2; i++) r->weight[i] = optional_argument(c);
    for (int i = 0; i < 2; i++) a->scale[i] = optional_argument(c);
    read_rows(c, r);
    read_layout(c, r);
    r->eps = number_argument(c), r->shift = number_argument(c);
    if (!c->problem) unfold(a);
}

static const char *wrong_cache_arguments(const Call *c, CacheArguments *a)
{
    const View *const q = &a->r.x[0], *const k = q + 1, *const v = q + 2;
    TRY(wrong_rotation(c, &a->r));
    if (v->dim != 4 || v->size[0] != q->size[0] || v->size[2] != q->size[2] || q->dtype != k->dtype ||
        q->dtype != v->dtype || is_elsewhere(v, q) || v->size[3] < 1)
        return "v is not (B, H, T, D) like q and k, and of their dtype";
    if (a->slots.dim != 2 || a->slots.size[0] != q->size[0] || a->slots.size[1] != q->size[2] ||
        !is_integer(&a->slots) || is_elsewhere(&a->slots, q))
        return "slots are not int64 or int32, (B, T)";
    for (int i = 0; i < 2; i++) TRY(wrong_cache(k + i, &a->cache[i], &a->scale[i], &a->scales[i]));
    if (a->cache[0].size[0] * a->cache[0].size[2] != a->cache[1].size[0] * a->cache[1].size[2])
        return "caches differ in their number of slots";
    TRY(unwritable(a->cache, 2, &a->r.positions));
    TRY(unwritable(a->cache, 2, &a->slots));
    TRY(unwritable(a->scales, 2, &a->r.positions));
    return unwritable(a->scales, 2, &a->slots);
}

static const char *cache_op(Call *c)
{
    CacheArguments a = {0};
    CacheJob job = {0};
    View x[3], y, to;
    read_cache_arguments(c, &a);
    TRY(wrong_cache_arguments(c, &a));
    for (int i = 0; i < 2; i++)
        if (has_8_bits(&a.cache[i])) return "a cache of 8 bits is for Python";
    for (int i = 0; i < 3; i++) TRY(with_rows(c, &a.r.x[i], &x[i]));
    const View *const q = x, *const k = x + 1, *const v = x + 2;
    TRY(make_like(c, a.r.x, &a.r, &y, &to));
    job.q = job_of(&a.r), job.q.dtype = float_dtype(q->dtype);
    job.k = job.v = job.q;
    job.v.P = job.v.first_channel = 0, job.v.D = v->size[3];
    job.q.tensors[0] = tensor_of(q, &to);
    job.k.tensors[0] = tensor_of(k, &a.cache[0]), job.v.tensors[0] = tensor_of(v, &a.cache[1]);
    set_norm(&job.q, &a.r, 0), set_norm(&job.k, &a.r, 1);
    if (table_order(&job.q) != table_order(&job.k)) return "a norm of only one of q and k is for Python";
    job.k_page = a.cache[0].size[2], job.v_page = a.cache[1].size[2];
    job.slots = a.slots.data, job.wide_slots = a.slots.dtype == dtypes.int64;
    job.slots_sb = a.slots.step[0], job.slots_st = a.slots.step[1];
    job.count = a.cache[0].size[0] * a.cache[0].size[2];
    TRY(wrong_values(&job.q, &a.r.positions));
    if (!slots_in_range(&job)) return "a slot is not in the cache";
    job.q.scratch = (factors(&job.q) + factors(&job.k)) * real_size(&job.q);
    job.q.begin = begin_cache, job.q.run_tile = cache_tile;
    const i64 width = q->size[1] * q->size[3] + k->size[1] * k->size[3] + v->size[1] * v->size[3];
    TRY(run(&job.q, q->size[0] * q->size[2] * width));
    TRY(settle(&y, &to));
    give_back(c, &y, 1);
    return NULL;
}

/* PoPE, with its phases as the weight of a job; `g` is the incoming gradient of its gradient. */
static const char *polar_op(Call *c, int backward)
{
    Rotation r = {0};
    View x, g = {0}, from = {0}, to, results[2];
    if (backward) g = tensor_argument(c);
    r.x[0] = tensor_argument(c);
    r.interleaved_in = r.interleaved_out = 1; /* tables in the order of their columns */
    const View delta = optional_argument(c);
    read_rows(c, &r);
    const i64 *const size = r.x->size;
    TRY(c->problem);
    TRY(wrong_tensors(r.x, 1));
    TRY(wrong_rows(r.x, &r.cos, &r.sin, &r.positions, r.start));
    if (r.cos.size[r.cos.dim - 1] != size[3]) return "cos and sin do not have a column for each channel";
    if (delta.handle && (is_elsewhere(&delta, r.x) || delta.dim != 2 || float_dtype(delta.dtype) < 0 ||
                         delta.size[0] != size[1] || delta.size[1] != size[3]))
        return "delta is not floating, (H, D)";
    const i64 wide[] = {size[0], size[1], size[2], 2 * size[3]}, none[] = {0};
    if (backward && (is_elsewhere(&g, r.x) || g.dim != 4 || g.dtype != r.x->dtype ||
                     memcmp(g.size, wide, sizeof wide)))
        return "the gradient is not that of the result";
    r.pairs = size[3], r.columns = 1;
    Job j = job_of(&r);
    TRY(wrong_values(&j, &r.positions));
    TRY(with_rows(c, r.x, &x));
    j.dtype = float_dtype(x.dtype);
    if (delta.handle) {
        const Numbers phases = {delta.data, float_dtype(delta.dtype), 0, delta.step[0], delta.step[1]};
        j.weight = phases;
    }
    if (backward) {
        TRY(with_rows(c, &g, &from));
        TRY(make_like(c, r.x, &r, &results[0], &to));
        /* An op cannot return None in place of a tensor. */
        TRY(make_contiguous(c, delta.handle ? 2 : 1, delta.handle ? delta.size : none,
                            delta.handle ? &delta : &x, &results[1]));
        j.gradient = tensor_of(&from, &from);
        if (delta.handle) j.sums = size[1] * size[3], j.to_weight = results[1].data;
    } else {
        TRY(make_contiguous(c, 4, wide, &x, &results[0]));
        to = results[0];
    }
    j.tensors[0] = tensor_of(&x, &to);
    j.scratch = (j.sums + 2 * phases_of(&j)) * real_size(&j);
    j.begin = begin_polar, j.run_tile = polar_tile;
    TRY(run(&j, count_of(&x)));
    TRY(settle(&results[0], &to));
    give_back(c, results, 1 + backward);
    return NULL;
}

/* Native code is behind the overload "plain" of an op, for calls that need no gradient. */
#define CPU_OPS(X)                                            \
    X(rotate, "rotate", rotate_op(&c, 1, 0))                  \
    X(rotate_qk, "rotate_qk", rotate_op(&c, 2, 0))            \
    X(rotate_in_place, "rotate_", rotate_op(&c, 1, 1))        \
    X(rotate_qk_in_place, "rotate_qk_", rotate_op(&c, 2, 1))  \
    X(norm_rotate, "norm_rotate", norm_op(&c, 1))             \
    X(norm_rotate_qk, "norm_rotate_qk", norm_op(&c, 2))       \
    X(norm_rotate_backward, "norm_rotate_backward", norm_backward_op(&c)) \
    X(rotate_and_cache, "rotate_and_cache", cache_op(&c))     \
    X(polar, "polar", polar_op(&c, 0))                        \
    X(polar_backward, "polar_backward", polar_op(&c, 1))
#define DEFINE(device, id, call)                                         \
    static void device##_##id(Value *stack, uint64_t n, uint64_t m)      \
    {                                                                    \
        Call c = begin(stack);                                           \
        (void)n, (void)m, finish(&c, call);                              \
    }
#define DEFINE_CPU(id, name, call) DEFINE(cpu, id, call)
CPU_OPS(DEFINE_CPU)

typedef struct {
    const char *name;
    Op *run;
} NamedOp;
#define ROW_OF_CPU(id, name, call) {name ".plain", cpu_##id},
static const NamedOp cpu_ops[] = {CPU_OPS(ROW_OF_CPU)};

/* Implement ops, which Python has defined, for a kind of device; the name of what cannot be, or NULL. */
static const char *implement(const char *device, const NamedOp *ops, size_t count)
{
    Library library = NULL;
    TRY(torch.library("posenc", device, "posenc", 0, &library) ? "a library" : NULL);
    for (size_t i = 0; i < count; i++)
        if (torch.implement(library, ops[i].name, ops[i].run, ABI_VERSION)) return ops[i].name;
    return NULL;
}
