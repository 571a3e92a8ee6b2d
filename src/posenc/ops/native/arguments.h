/* The arguments that all ops share, and the rules they must keep so that no kernel leaves a tensor's
 * memory. Nothing reads the words of a refusal: Python checks again what was refused, and says why. */
typedef struct {
    View x[3]; /* queries, keys and values, or one tensor */
    int count; /* of those that are rotated */
    View weight[2]; /* of a norm; the handle of one that is absent is NULL */
    double eps, shift;
    View cos, sin, positions;
    i64 start, width;
    int interleaved_in, interleaved_out, transposed, rotate_last;
    int known_doubled; /* the tables have each number twice, as the caller knows */
    int tokens_first, pages_of_tokens, is_flat;
    i64 pairs, to_second, columns; /* see Job; the last is the step from pair to pair in a table */
} Rotation;

static void read_rows(Call *c, Rotation *r)
{
    r->cos = tensor_argument(c), r->sin = tensor_argument(c), r->positions = optional_argument(c);
    r->start = integer_argument(c);
    /* One form for each thing: positions (1, T), and one table for all sequences without their axis. */
    if (r->positions.handle && r->positions.dim == 1) add_axis(&r->positions);
    if (!c->problem && r->cos.dim != r->sin.dim) c->problem = "cos and sin differ in their axes";
    drop_axis(&r->cos), drop_axis(&r->sin);
}

/* The bits of a layout, as `Spec.bits` in spec.py has them. */
enum { INTERLEAVED_IN = 1, INTERLEAVED_OUT = 2, ROTATE_LAST = 4, TRANSPOSED = 8, DOUBLED_TABLES = 16 };
/* Forms of the tensors, which no other code knows. */
enum { TOKENS_FIRST = 32, PAGES_OF_TOKENS = 64 };
enum { KNOWN_BITS = 127, WIDTH_SHIFT = 16 };

static void read_layout(Call *c, Rotation *r)
{
    const i64 layout = integer_argument(c);
    const i64 width = layout >> WIDTH_SHIFT; /* of the heads, or 0 if any will do */
    if (((layout & 0xffff & ~KNOWN_BITS) || width < 0) && !c->problem) c->problem = "the layout has unknown bits";
    r->interleaved_in = (layout & INTERLEAVED_IN) != 0;
    r->interleaved_out = (layout & INTERLEAVED_OUT) != 0;
    r->rotate_last = (layout & ROTATE_LAST) != 0, r->transposed = (layout & TRANSPOSED) != 0;
    r->width = width, r->known_doubled = (layout & DOUBLED_TABLES) != 0;
    r->tokens_first = (layout & TOKENS_FIRST) != 0, r->pages_of_tokens = (layout & PAGES_OF_TOKENS) != 0;
    for (int i = 0; i < 3; i++)
        if (r->tokens_first && r->x[i].dim == 4) swap_axes(&r->x[i]);
}

/* Read the arguments of a rotation of `count` tensors, with a norm or without one. */
static void read_rotation(Call *c, Rotation *r, int count, int normed)
{
    r->count = count;
    for (int i = 0; i < count; i++) r->x[i] = tensor_argument(c);
    for (int i = 0; normed && i < count; i++) r->weight[i] = tensor_argument(c);
    read_rows(c, r);
    read_layout(c, r);
    if (normed) r->eps = number_argument(c), r->shift = number_argument(c);
}

static int is_elsewhere(const View *a, const View *b)
{
    return a->handle && (a->device != b->device || a->index != b->index);
}

static int is_integer(const View *v) { return v->dtype == dtypes.int64 || v->dtype == dtypes.int32; }

/* Why tensors are not floating (B, H, T, D) that differ in H only, or NULL. */
static const char *wrong_tensors(const View *x, int count)
{
    for (int i = 0; i < count; i++) {
        if (x[i].dim != 4 || float_dtype(x[i].dtype) < 0) return "a tensor is not floating, (B, H, T, D)";
        if (x[i].size[0] != x->size[0] || x[i].size[2] != x->size[2] || x[i].size[3] != x->size[3])
            return "tensors differ in more than their heads";
        if (is_elsewhere(x + i, x)) return "tensors are on several devices";
    }
    return NULL;
}

/* Why tables and rows do not fit a tensor, or NULL; positions on the CPU are read later. */
static const char *wrong_rows(const View *x, const View *cos, const View *sin, const View *positions, i64 start)
{
    const i64 batch = x->size[0], length = x->size[2], dim = cos->dim;
    if (is_elsewhere(cos, x) || is_elsewhere(sin, x) || is_elsewhere(positions, x))
        return "tensors are on several devices";
    if (float_dtype(cos->dtype) < 0 || float_dtype(sin->dtype) < 0 || sin->dim != dim ||
        (dim != 2 && dim != 3) || memcmp(cos->size, sin->size, (size_t)dim * sizeof(i64)) ||
        (dim == 3 && cos->size[0] != 1 && cos->size[0] != batch))
        return "cos and sin are not floating tables (R, P) or (B, R, P) of one shape";
    const i64 rows = cos->size[dim - 2];
    if (start < 0 || start > rows || (!positions->handle && length > rows - start))
        return "a token has no row in the tables";
    if (!positions->handle) return NULL;
    if (!is_integer(positions) || positions->dim != 2 || (positions->size[0] != 1 && positions->size[0] != batch) ||
        (positions->size[1] != length && (positions->size[1] != 1 || positions->is_flat)))
        return "positions are not int64 or int32, (T,) or (1 or B, 1 or T)";
    return NULL;
}

/* A norm's weight for (B, H, T, D): of each head, or of all heads together. */
static int is_weight(const View *w, const View *x)
{
    return !is_elsewhere(w, x) && w->dim == 1 && float_dtype(w->dtype) >= 0 &&
           (w->size[0] == x->size[3] || w->size[0] == x->size[1] * x->size[3]);
}

/* Work out the pairs of a rotation; why it does not fit, or NULL. */
static const char *wrong_rotation(const Call *c, Rotation *r)
{
    TRY(c->problem);
    TRY(wrong_tensors(r->x, r->count));
    TRY(wrong_rows(r->x, &r->cos, &r->sin, &r->positions, r->start));
    const i64 width = r->x->size[3], columns = r->cos.size[r->cos.dim - 1];
    r->pairs = columns, r->to_second = 0, r->columns = 1;
    if ((r->known_doubled || columns > width / 2) && columns <= width && columns % 2 == 0) {
        r->pairs = columns / 2;
        r->to_second = r->interleaved_in ? 1 : r->pairs;
        r->columns = r->interleaved_in ? 2 : 1;
        r->cos.size[r->cos.dim - 1] = r->sin.size[r->sin.dim - 1] = r->pairs;
    }
    if (r->known_doubled && !r->to_second) return "the tables do not have each number twice";
    if (r->pairs < 1 || r->pairs > width / 2) return "the tables have no pairs, or more than channels";
    if (r->width && r->width != width) return "the heads have another width";
    for (int i = 0; i < r->count; i++)
        if (r->weight[i].handle && !is_weight(&r->weight[i], &r->x[i])) return "a weight does not fit its tensor";
    return NULL;
}

static i64 bytes_of_element(const View *v)
{
    const int dtype = float_dtype(v->dtype);
    if (dtype >= 0) return element_size[dtype];
    return v->dtype == dtypes.int64 ? 8 : v->dtype == dtypes.int32 ? 4 : 1;
}

/* The number of bytes from the first element of a tensor to beyond its last, along strides of less than `row`
 * bytes. */
static i64 extent(const View *v, i64 row)
{
    const i64 size = bytes_of_element(v);
    i64 last = 0;
    for (i64 d = 0; d < v->dim; d++)
        if (v->size[d] > 1 && v->step[d] * size < row) last += v->step[d] * (v->size[d] - 1);
    return (last + 1) * size;
}

/* Whether strides of more than `row` bytes are multiples of it. */
static int is_of_rows(const View *v, i64 row)
{
    const i64 size = bytes_of_element(v);
    for (i64 d = 0; d < v->dim; d++)
        if (v->size[d] > 1 && v->step[d] * size > row && v->step[d] * size % row) return 0;
    return 1;
}

/* Whether two tensors, which may be absent, may share an element: see `overlaps` in overlap.py. */
static int overlap(const View *a, const View *b)
{
    const View *const both[] = {a, b};
    if (!a->handle || !b->handle || !count_of(a) || !count_of(b)) return 0;
    const i64 distance = b->data - a->data;
    if (distance >= extent(a, INT64_MAX) || -distance >= extent(b, INT64_MAX)) return 0;
    for (int i = 0; i < 2; i++)
        for (i64 d = 0; d < both[i]->dim; d++) {
            const i64 row = both[i]->step[d] * bytes_of_element(both[i]);
            if (both[i]->size[d] < 2 || row == 0) continue;
            const i64 first = (distance % row + row) % row;
            if (extent(a, row) <= first && first + extent(b, row) <= row && is_of_rows(a, row) &&
                is_of_rows(b, row))
                return 0;
        }
    return 1;
}

/* Why tensors, which may be absent, must not be written, or NULL. `integers` are read while that happens. */
static const char *unwritable(const View *x, int count, const View *integers)
{
    for (int i = 0; i < count; i++) {
        for (i64 d = 0; d < x[i].dim; d++)
            if (x[i].step[d] == 0 && x[i].size[d] > 1) return "a tensor shares memory with itself";
        for (int k = 0; k < i; k++)
            if (overlap(x + i, x + k)) return "two tensors share memory";
        if (overlap(x + i, integers)) return "positions or slots share memory with what is written";
    }
    return NULL;
}

/* The job of a rotation, without its tensors. */
static Job job_of(const Rotation *r)
{
    Job j = {0};
    const View *const x = r->x, *const positions = &r->positions;
    const i64 dim = r->cos.dim;
    const View *const tables[] = {&r->cos, &r->sin};
    Numbers *const to[] = {&j.cos, &j.sin};
    for (int i = 0; i < 2; i++) {
        const View *const v = tables[i];
        to[i]->data = v->data, to[i]->dtype = float_dtype(v->dtype);
        to[i]->sb = dim == 3 ? v->step[0] : 0;
        to[i]->st = v->step[dim - 2], to[i]->sd = v->step[dim - 1] * r->columns;
    }
    j.B = x->size[0], j.T = x->size[2], j.D = x->size[3];
    j.rows = r->cos.size[dim - 2], j.P = r->pairs, j.start = r->start;
    j.to_second = r->known_doubled ? 0 : r->to_second * r->cos.step[dim - 1];
    j.interleaved_in = r->interleaved_in, j.interleaved_out = r->interleaved_out;
    j.first_channel = r->rotate_last ? j.D - 2 * j.P : 0, j.transposed = r->transposed;
    j.sequential = 1;
    if (positions->handle) {
        const int each = positions->size[1] == j.T && j.T != 1;
        j.pos = positions->data, j.wide_pos = positions->dtype == dtypes.int64;
        j.pos_sb = positions->size[0] > 1 ? positions->step[0] : 0;
        j.pos_st = each ? positions->step[1] : 0;
        j.sequential = !each;
    }
    return j;
}

/* Why the values of a job do not fit, or NULL. */
static const char *wrong_values(const Job *j, const View *positions)
{
    if (positions->handle && !count_of(positions)) return NULL; /* there is no token */
    if (!in_range(j)) return "positions must be in [0, R), the rows of the tables";
    if (j->to_second && !(is_doubled(j, &j->cos) && is_doubled(j, &j->sin)))
        return "both numbers of a pair are not the same in cos or sin";
    return NULL;
}
