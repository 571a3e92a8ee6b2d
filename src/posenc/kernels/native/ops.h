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
static View make_same(Call *c, const View *x, const Rotation *r)
{
    View like = *x, y;
    i64 step[MOST_DIMS];
    if (r->tokens_first) swap_axes(&like);
    /* Tokens (T, H, D) were given the first axis. */
    const int more = r->is_flat;
    for (int d = 0; more && d < 3; d++) like.size[d] = like.size[d + 1], like.step[d] = like.step[d + 1];
    like.dim -= more;
    steps_like(&like, step);
    y = make(c, like.dim, like.size, step, x->dtype, x);
    if (!c->problem && more) add_axis(&y);
    if (!c->problem && r->tokens_first) swap_axes(&y);
    return y;
}

/* As make_same; `to` is what a kernel writes, a dense tensor if need be. */
static View make_like(Call *c, const View *x, const Rotation *r, View *to)
{
    i64 step[MOST_DIMS];
    const View y = make_same(c, x, r);
    *to = y;
    if (!c->problem && !has_rows(&y)) {
        contiguous_steps(x->dim, x->size, step);
        *to = make(c, x->dim, x->size, step, x->dtype, x);
    }
    return y;
}

/* Copy the result to where the caller wants it, if a kernel could not write there. */
static void settle(Call *c, const View *y, const View *made)
{
    if (!c->problem && made->handle != y->handle && torch.copy(y->handle, made->handle, 0))
        c->problem = "a copy failed";
}

static View with_rows(Call *c, const View *x) { return has_rows(x) ? *x : dense_copy(c, x); }

static void run_rotation(Call *c, Job *j, i64 heads)
{
    if (!c->problem && run(j, j->B * heads * j->T * j->D, factors(j), run_share, factor_at))
        c->problem = "no memory for the table rows";
}

/* Rotate tensors into others, in one job if they have one dtype; x and y have dense rows. */
static void rotate_views(Call *c, Job *j, const View *x, const View *y, int count)
{
    const int together = count == 1 || x[0].dtype == x[1].dtype;
    for (int i = 0; i < count && !c->problem; i += together ? count : 1) {
        i64 heads = 0;
        j->dtype = float_dtype(x[i].dtype), j->count = together ? count : 1;
        for (int n = 0; n < j->count; n++)
            j->tensors[n] = tensor_of(&x[i + n], &y[i + n]), heads += x[i + n].size[1];
        if (j->B && j->T && heads) run_rotation(c, j, heads);
    }
}

static void rotate_op(Value *stack, int plain, int count, int in_place)
{
    Call c = {stack, {0}, 0, NULL, plain};
    Rotation r = {0};
    View from[2], to[2], y[2];
    r.count = count;
    for (int i = 0; i < count; i++) r.x[i] = tensor_argument(&c);
    read_rows(&c, &r);
    read_layout(&c, &r);
    if (!c.problem) c.problem = wrong_rotation(&r);
    if (!c.problem && in_place) c.problem = unwritable(r.x, count);
    if (!c.problem && in_place) read_first(&c, &r.positions, r.x, count);
    Job j = {0};
    if (!c.problem) j = job_of(&r), c.problem = wrong_values(&j, &r.positions);
    /* Between two layouts, a kernel would overwrite channels before it reads them. */
    const int apart = r.interleaved_in != r.interleaved_out;
    for (int i = 0; i < count && !c.problem; i++) {
        const View *const x = &r.x[i];
        if (in_place) {
            from[i] = apart ? dense_copy(&c, x) : with_rows(&c, x);
            y[i] = *x, to[i] = has_rows(x) ? *x : from[i];
            if (apart && !has_rows(x)) to[i] = dense_copy(&c, x);
        } else {
            from[i] = with_rows(&c, x), y[i] = make_like(&c, x, &r, &to[i]);
        }
    }
    if (!c.problem) rotate_views(&c, &j, from, to, count);
    for (int i = 0; i < count; i++) settle(&c, &y[i], &to[i]);
    for (int i = 0; i < count && !c.problem && !in_place; i++) stack[i] = result(&c, &y[i]);
    finish(&c);
}


/* Give a job the norm of one tensor. */
static void set_norm(Job *j, const View *weight, const View *x, double eps, double shift)
{
    const Numbers numbers = {weight->data, float_dtype(weight->dtype), 0, 0, weight->step[0]};
    j->weight = numbers, j->eps = eps, j->shift = shift;
    j->all_heads = weight->size[0] != x->size[3];
}

static void norm_op(Value *stack, int plain, int count)
{
    Call c = {stack, {0}, 0, NULL, plain};
    Rotation r = {0};
    View weight[2], y[2];
    r.count = count;
    for (int i = 0; i < count; i++) r.x[i] = tensor_argument(&c);
    for (int i = 0; i < count; i++) weight[i] = tensor_argument(&c);
    read_rows(&c, &r);
    read_layout(&c, &r);
    const double eps = number_argument(&c), shift = number_argument(&c);
    if (!c.problem) c.problem = wrong_rotation(&r);
    for (int i = 0; i < count && !c.problem; i++)
        if (!is_weight(&weight[i], &r.x[i])) c.problem = "a weight does not fit its tensor";
    Job j = {0};
    if (!c.problem) j = job_of(&r), c.problem = wrong_values(&j, &r.positions);
    for (int i = 0; i < count && !c.problem; i++) {
        View to;
        const View x = with_rows(&c, &r.x[i]);
        y[i] = make_like(&c, &r.x[i], &r, &to);
        set_norm(&j, &weight[i], &x, eps, shift);
        if (!c.problem) rotate_views(&c, &j, &x, &to, 1);
        settle(&c, &y[i], &to);
    }
    for (int i = 0; i < count && !c.problem; i++) stack[i] = result(&c, &y[i]);
    finish(&c);
}


/* A new tensor of the numbers of a weight's gradient. */
static View make_sums(Call *c, const double *sums, const View *weight)
{
    i64 step[MOST_DIMS];
    contiguous_steps(weight->dim, weight->size, step);
    const View made = make(c, weight->dim, weight->size, step, weight->dtype, weight);
    for (i64 i = 0; !c->problem && i < count_of(weight); i++)
        store_number(made.data, float_dtype(made.dtype), i, sums[i]);
    return made;
}

static int is_like(const View *a, const View *b)
{
    return !is_elsewhere(a, b) && a->dim == b->dim && a->dtype == b->dtype &&
           !memcmp(a->size, b->size, (size_t)a->dim * sizeof *a->size);
}

/* The gradients of norm_rotate with respect to x and the weight. */
static void norm_backward_op(Value *stack, int plain)
{
    Call c = {stack, {0}, 0, NULL, plain};
    Rotation r = {0};
    View to = {0}, dx = {0}, dw = {0};
    const View g = tensor_argument(&c);
    r.count = 1, r.x[0] = tensor_argument(&c);
    const View weight = tensor_argument(&c);
    read_rows(&c, &r);
    read_layout(&c, &r);
    const double eps = number_argument(&c), shift = number_argument(&c);
    if (!c.problem) c.problem = wrong_rotation(&r);
    if (!c.problem && (!is_weight(&weight, r.x) || !is_like(&g, r.x)))
        c.problem = "the weight or the gradient does not fit its tensor";
    Job j = {0};
    if (!c.problem) j = job_of(&r), c.problem = wrong_values(&j, &r.positions);
    if (!c.problem) {
        const View x = with_rows(&c, r.x), from = with_rows(&c, &g);
        dx = make_like(&c, r.x, &r, &to);
        set_norm(&j, &weight, &x, eps, shift);
        j.dtype = float_dtype(x.dtype), j.count = 2;
        j.to_weight = calloc((size_t)weight.size[0] + 1, sizeof *j.to_weight);
        if (!j.to_weight) c.problem = "no memory for the sums";
        if (!c.problem) {
            j.tensors[0] = tensor_of(&x, &to), j.tensors[1] = tensor_of(&from, &from);
            if (j.B && j.T && x.size[1]) run_rotation(&c, &j, x.size[1]);
            dw = make_sums(&c, j.to_weight, &weight);
        }
        free(j.to_weight);
        settle(&c, &dx, &to);
    }
    if (!c.problem) stack[0] = result(&c, &dx), stack[1] = result(&c, &dw);
    finish(&c);
}

static int cache_format(const View *cache, const View *x)
{
    if (cache->dtype == x->dtype) return SAME_FORMAT;
    if (cache->dtype == dtypes.float8_e4m3fn) return FORMAT_E4M3;
    if (cache->dtype == dtypes.float8_e5m2) return FORMAT_E5M2;
    return cache->dtype == dtypes.int8 ? FORMAT_INT8 : -1;
}

/* Whether a scale is float32, of the first three sizes. */
static int is_scale(const View *s, const i64 *size, const View *x)
{
    return !is_elsewhere(s, x) && s->dim == 3 && s->dtype == dtypes.float32 &&
           !memcmp(s->size, size, 3 * sizeof *size);
}

static const char *wrong_cache(const View *x, const View *cache, const View *scale, const View *scales)
{
    if (is_elsewhere(cache, x) || cache->dim != 4 || cache_format(cache, x) < 0 ||
        cache->size[1] != x->size[1] || cache->size[3] != x->size[3] || cache->step[3] != 1 ||
        (!cache->data && count_of(cache)))
        return "a cache is not (pages, H, page, D), dense along D, in a dtype of caches";
    if (unwritable(cache, 1)) return "a cache shares memory with itself";
    const int given = scale->handle != NULL, written = scales->handle != NULL;
    if (given + written > 1 || (given + written && cache_format(cache, x) == SAME_FORMAT))
        return "only a cache of 8 bits may have a scale or scales, and must not have both";
    if (given && !is_scale(scale, x->size, x)) return "a scale is not float32, (B, H, T)";
    if (written && (!is_scale(scales, cache->size, x) || unwritable(scales, 1)))
        return "scales are not float32, (pages, H, page)";
    return NULL;
}

static Cached cached_of(const View *x, const View *cache, const View *scale, const View *scales)
{
    Cached a = {x->data, x->size[1], x->step[0], x->step[1], x->step[2], cache_format(cache, x),
                cache->data, cache->size[2], cache->step[0], cache->step[1], cache->step[2],
                NULL, 0, 0, 0, NULL, 0, 0, 0};
    if (scale->handle)
        a.scale = scale->data, a.scale_sb = scale->step[0], a.scale_sh = scale->step[1],
        a.scale_st = scale->step[2];
    if (scales->handle)
        a.scales = scales->data, a.scales_sp = scales->step[0], a.scales_sh = scales->step[1],
        a.scales_st = scales->step[2];
    return a;
}

/* The arguments of rotate_and_cache, in their order; those that may be absent have no handle then. */
typedef struct {
    Rotation r;
    View k_cache, v_cache, k_scales, v_scales, slots, q_weight, k_weight, k_scale, v_scale;
    double eps, shift;
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
    View *const paged[] = {&a->k_cache, &a->v_cache, &a->k_scales, &a->v_scales};
    for (int i = 0; i < 4 && r->pages_of_tokens; i++) swap_axes(paged[i]);
    if (r->x[1].dim == 4) expand_scale(&a->k_scale, &r->x[1]);
    if (r->x[2].dim == 4) expand_scale(&a->v_scale, &r->x[2]);
}

static void read_cache_arguments(Call *c, CacheArguments *a)
{
    a->r.count = 2;
    for (int i = 0; i < 3; i++) a->r.x[i] = tensor_argument(c);
    a->k_cache = tensor_argument(c), a->v_cache = tensor_argument(c);
    a->k_scales = optional_argument(c), a->v_scales = optional_argument(c);
    a->slots = tensor_argument(c);
    a->q_weight = optional_argument(c), a->k_weight = optional_argument(c);
    a->k_scale = optional_argument(c), a->v_scale = optional_argument(c);
    read_rows(c, &a->r);
    a->r.count = 3;
    read_layout(c, &a->r);
    a->r.count = 2;
    a->eps = number_argument(c), a->shift = number_argument(c);
    if (!c->problem && c->plain) unfold(a);
}

static const char *wrong_cache_arguments(CacheArguments *a)
{
    const View *const q = &a->r.x[0], *const k = &a->r.x[1], *const v = &a->r.x[2];
    const char *wrong = wrong_rotation(&a->r);
    if (wrong) return wrong;
    if (v->dim != 4 || v->size[0] != q->size[0] || v->size[2] != q->size[2] || q->dtype != k->dtype ||
        q->dtype != v->dtype || is_elsewhere(v, q) || v->size[3] < 1)
        return "v is not (B, H, T, D) like q and k, and of their dtype";
    if (a->slots.dim != 2 || a->slots.size[0] != q->size[0] || a->slots.size[1] != q->size[2] ||
        !is_integer(&a->slots) || is_elsewhere(&a->slots, q))
        return "slots are not int64 or int32, (B, T)";
    if ((a->q_weight.handle && !is_weight(&a->q_weight, q)) ||
        (a->k_weight.handle && !is_weight(&a->k_weight, k)))
        return "a weight does not fit its tensor";
    if ((wrong = wrong_cache(k, &a->k_cache, &a->k_scale, &a->k_scales))) return wrong;
    if ((wrong = wrong_cache(v, &a->v_cache, &a->v_scale, &a->v_scales))) return wrong;
    if (a->k_cache.size[0] * a->k_cache.size[2] != a->v_cache.size[0] * a->v_cache.size[2])
        return "caches differ in their number of slots";
    if (overlap(&a->k_cache, &a->v_cache)) return "the caches share memory";
    if (a->k_scales.handle && a->v_scales.handle && overlap(&a->k_scales, &a->v_scales))
        return "the scales share memory";
    return NULL;
}

static void cache_op(Value *stack, int plain)
{
    Call c = {stack, {0}, 0, NULL, plain};
    CacheArguments a = {0};
    View y = {0}, to = {0};
    read_cache_arguments(&c, &a);
    if (!c.problem) c.problem = wrong_cache_arguments(&a);
    const View written[] = {a.k_cache, a.v_cache, a.k_scales, a.v_scales};
    read_first(&c, &a.r.positions, written, 4);
    read_first(&c, &a.slots, written, 4);
    if (!c.problem) {
        const View q = with_rows(&c, &a.r.x[0]), k = with_rows(&c, &a.r.x[1]);
        const View v = with_rows(&c, &a.r.x[2]);
        CacheJob job = {0};
        y = make_like(&c, &a.r.x[0], &a.r, &to);
        if (!c.problem) {
            job.q = job_of(&a.r), job.q.dtype = float_dtype(q.dtype), job.q.count = 1;
            job.k = job.v = job.q;
            job.q.tensors[0] = tensor_of(&q, &to), job.k.tensors[0].H = k.size[1];
            if (a.q_weight.handle) set_norm(&job.q, &a.q_weight, &q, a.eps, a.shift);
            if (a.k_weight.handle) set_norm(&job.k, &a.k_weight, &k, a.eps, a.shift);
            job.v.P = job.v.first_channel = 0, job.v.D = v.size[3];
            job.keys = cached_of(&k, &a.k_cache, &a.k_scale, &a.k_scales);
            job.values = cached_of(&v, &a.v_cache, &a.v_scale, &a.v_scales);
            job.k.encodes = job.keys.format != SAME_FORMAT;
            job.slots = a.slots.data, job.wide_slots = a.slots.dtype == dtypes.int64;
            job.slots_sb = a.slots.step[0], job.slots_st = a.slots.step[1];
            job.count = a.k_cache.size[0] * a.k_cache.size[2];
            c.problem = wrong_values(&job.q, &a.r.positions);
            if (!c.problem && !slots_in_range(&job)) c.problem = "a slot is not in the cache";
        }
        const i64 tokens = q.size[0] * q.size[2];
        const i64 width = q.size[1] * q.size[3] + k.size[1] * k.size[3] + v.size[1] * v.size[3];
        if (!c.problem && tokens && write_all(&job, tokens * width))
            c.problem = "no memory for the table rows";
        settle(&c, &y, &to);
    }
    if (!c.problem) stack[0] = result(&c, &y);
    finish(&c);
}

/* PoPE, with its phases as the weight of a job; `g` is the incoming gradient of its gradient. */
static void polar_op(Value *stack, int plain, int backward)
{
    Call c = {stack, {0}, 0, NULL, plain};
    Rotation r = {0};
    View g = {0}, y = {0}, to = {0}, sums = {0};
    if (backward) g = tensor_argument(&c);
    r.count = 1, r.x[0] = tensor_argument(&c);
    r.interleaved_in = r.interleaved_out = 1; /* tables in the order of their columns */
    const View delta = optional_argument(&c);
    read_rows(&c, &r);
    const View *const given = &r.x[0];
    if (!c.problem) c.problem = wrong_tensors(given, 1);
    if (!c.problem) c.problem = wrong_rows(given, &r.cos, &r.sin, &r.positions, r.start);
    if (!c.problem && r.cos.size[r.cos.dim - 1] != given->size[3])
        c.problem = "cos and sin do not have a column for each channel";
    const i64 *const size = given->size;
    if (!c.problem && delta.handle &&
        (is_elsewhere(&delta, given) || delta.dim != 2 || float_dtype(delta.dtype) < 0 ||
         delta.size[0] != size[1] || delta.size[1] != size[3]))
        c.problem = "delta is not floating, (H, D)";
    if (!c.problem && backward &&
        (is_elsewhere(&g, given) || g.dim != 4 || g.dtype != given->dtype ||
         memcmp(g.size, size, 3 * sizeof *size) || g.size[3] != 2 * size[3]))
        c.problem = "the gradient is not that of the result";
    if (!c.problem) {
        r.pairs = size[3], r.columns = 1;
        Job j = job_of(&r);
        c.problem = wrong_values(&j, &r.positions);
        const View x = with_rows(&c, given);
        const i64 wide[] = {size[0], size[1], size[2], 2 * size[3]}, many = size[1] * size[3];
        i64 step[MOST_DIMS];
        contiguous_steps(4, wide, step);
        if (backward)
            y = make_like(&c, given, &r, &to);
        else
            y = to = make(&c, 4, wide, step, x.dtype, &x);
        if (!c.problem) {
            const View from = backward ? with_rows(&c, &g) : x;
            const Numbers phases = {delta.data, delta.handle ? float_dtype(delta.dtype) : 0, 0,
                                    delta.handle ? delta.step[0] : 0, delta.handle ? delta.step[1] : 0};
            if (delta.handle) j.weight = phases;
            j.dtype = float_dtype(x.dtype), j.count = 1 + backward;
            j.tensors[0] = tensor_of(&x, &to), j.tensors[1] = tensor_of(&from, &from);
            if (backward && delta.handle) {
                j.to_weight = calloc((size_t)many + 1, sizeof *j.to_weight);
                if (!j.to_weight) c.problem = "no memory for the sums";
            }
            if (!c.problem && count_of(&x) &&
                run(&j, count_of(&x), delta.handle ? many : 0, polar_share, same_place))
                c.problem = "no memory for the table rows";
            if (!c.problem && j.to_weight) sums = make_sums(&c, j.to_weight, &delta);
            free(j.to_weight);
        }
        settle(&c, &y, &to);
        /* An op cannot return None in place of a tensor. */
        if (!c.problem && backward && !delta.handle) {
            const i64 none[] = {0}, one[] = {1};
            sums = make(&c, 1, none, one, x.dtype, &x);
        }
    }
    if (!c.problem) {
        stack[0] = result(&c, &y);
        if (backward) stack[1] = result(&c, &sums);
    }
    finish(&c);
}

/* Each op twice: with its rules for gradients, and plain. */
#define BOTH(name, function, ...)                                                              \
    static void op_##name(Value *s, uint64_t n, uint64_t m) { (void)n, (void)m, function(s, 0 __VA_ARGS__); } \
    static void plain_##name(Value *s, uint64_t n, uint64_t m) { (void)n, (void)m, function(s, 1 __VA_ARGS__); }
#define COMMA ,
BOTH(rotate, rotate_op, COMMA 1, 0)
BOTH(rotate_qk, rotate_op, COMMA 2, 0)
BOTH(rotate_in_place, rotate_op, COMMA 1, 1)
BOTH(rotate_qk_in_place, rotate_op, COMMA 2, 1)
BOTH(norm_rotate, norm_op, COMMA 1)
BOTH(norm_rotate_qk, norm_op, COMMA 2)
BOTH(norm_rotate_backward, norm_backward_op, )
BOTH(rotate_and_cache, cache_op, )
BOTH(polar, polar_op, COMMA 0)
BOTH(polar_backward, polar_op, COMMA 1)

static const struct {
    const char *name, *plain_name;
    Op *run, *plain;
} cpu_ops[] = {
    {"rotate", "rotate.plain", op_rotate, plain_rotate},
    {"rotate_qk", "rotate_qk.plain", op_rotate_qk, plain_rotate_qk},
    {"rotate_", "rotate_.plain", op_rotate_in_place, plain_rotate_in_place},
    {"rotate_qk_", "rotate_qk_.plain", op_rotate_qk_in_place, plain_rotate_qk_in_place},
    {"norm_rotate", "norm_rotate.plain", op_norm_rotate, plain_norm_rotate},
    {"norm_rotate_qk", "norm_rotate_qk.plain", op_norm_rotate_qk, plain_norm_rotate_qk},
    {"norm_rotate_backward", "norm_rotate_backward.plain", op_norm_rotate_backward,
     plain_norm_rotate_backward},
    {"rotate_and_cache", "rotate_and_cache.plain", op_rotate_and_cache, plain_rotate_and_cache},
    {"polar", "polar.plain", op_polar, plain_polar},
    {"polar_backward", "polar_backward.plain", op_polar_backward, plain_polar_backward},
};
