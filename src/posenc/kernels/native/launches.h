/* The ops on CUDA. Their kernels are Triton's, compiled and launched by Python the first time; after that
 * the op launches them itself. A launch is found by everything it depends on: dtypes, sizes, strides and
 * alignments of the tensors, and the flags of the call. Other calls are refused, and Python runs them. */
#if defined(__linux__) && defined(__GNUC__)
#define HAS_CUDA_OPS 1

enum { MOST_PARAMETERS = 80, MOST_TOGETHER = 10, MOST_WORDS = 200, MOST_LAUNCHES = 4096 };
enum { ROW = MOST_TENSORS, MOST_MADE = 24 }; /* tensors of a launch of an op, and those that a call makes */
enum { A_TENSOR, THE_START, A_NUMBER };

typedef struct {
    void *function;
    unsigned grid[3], threads, shared, early;
    int count;
    struct {
        int kind, size; /* of the parameter, in bytes */
        i64 value;      /* an index of a tensor, or the bits of a number */
    } parameters[MOST_PARAMETERS];
} Launch;

/* All that the launches of a call depend on. */
typedef struct {
    int count;
    i64 words[MOST_WORDS];
} Key;

/* What a call does: the tensors that it makes, results before others, and its launches. */
typedef struct {
    int results, made_count, count;
    View made[MOST_MADE];
    Launch launches[MOST_TOGETHER];
} Work;

typedef struct Entry {
    struct Entry *next;
    Key key;
    Work work; /* as far as `size_of` says */
} Entry;

/* As in cuda.h. */
typedef struct {
    int id;
    char unused[4];
    union { char room[64]; int number; } value;
} LaunchAttribute;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    LaunchAttribute *attributes;
    unsigned count;
} LaunchConfig;
enum { OVERLAP_THE_PREVIOUS_KERNEL = 6 };

static struct {
    int (*launch)(const LaunchConfig *, void *, void **, void **);
    int (*parameter)(void *, size_t, size_t *, size_t *);
    int32_t (*stream)(int32_t, void **);
    int32_t (*device)(int32_t *);
    int32_t (*guard)(int32_t, void **);
    int32_t (*delete_guard)(void *);
} cuda;

static Entry *entries[1024];
static int entry_count;
static char entries_busy;
static __thread Key missed; /* the call of this thread that no launch was found for; empty if none */

static void lock_entries(void) { while (__atomic_test_and_set(&entries_busy, __ATOMIC_ACQUIRE)); }
static void unlock_entries(void) { __atomic_clear(&entries_busy, __ATOMIC_RELEASE); }

static Entry **place_of(const Key *key)
{
    uint64_t hash = 0;
    for (int i = 0; i < key->count; i++) {
        hash = (hash ^ (uint64_t)key->words[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return &entries[hash % (sizeof entries / sizeof *entries)];
}

static int same_key(const Key *a, const Key *b)
{
    return a->count == b->count && !memcmp(a->words, b->words, (size_t)a->count * sizeof *a->words);
}

static size_t size_of(const Work *work)
{
    return offsetof(Work, launches) + (size_t)work->count * sizeof *work->launches;
}

/* Copy the work of a call. If it is not known, the call is `missed`. */
static const char *find_work(const Key *key, Work *to)
{
    int found = 0;
    if (key->count < MOST_WORDS) {
        lock_entries();
        for (const Entry *e = *place_of(key); e && !found; e = e->next)
            if ((found = same_key(&e->key, key))) memcpy(to, &e->work, size_of(&e->work));
        unlock_entries();
    }
    if (!found) missed = *key;
    return !found ? "this kernel was not launched before" : !to->count ? "more than launches is for Python" : NULL;
}

static void keep_work(const Entry *entry)
{
    const size_t size = offsetof(Entry, work) + size_of(&entry->work);
    Entry *const made = malloc(size);
    if (!made) return;
    memcpy(made, entry, size);
    lock_entries();
    if (entry_count == MOST_LAUNCHES) {
        for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
            while (entries[i]) {
                Entry *const first = entries[i];
                entries[i] = first->next;
                free(first);
            }
        entry_count = 0;
    }
    Entry **const place = place_of(&made->key);
    made->next = *place, *place = made, entry_count++;
    unlock_entries();
}

static void add_word(Key *key, i64 word)
{
    if (key->count < MOST_WORDS) key->words[key->count++] = word;
}

static void add_view(Key *key, const View *v)
{
    const i64 aligned = ((uintptr_t)v->data & 15) == 0;
    add_word(key, v->handle ? 1 | (i64)v->dtype << 1 | v->dim << 16 | aligned << 32 : 0);
    for (i64 d = 0; v->handle && d < v->dim; d++) add_word(key, v->size[d]), add_word(key, v->step[d]);
}

/* The part of a key that all ops have. */
static void add_rotation(Key *key, int op, const Rotation *r)
{
    add_word(key, op | (i64)r->x->index << 16);
    add_word(key, r->interleaved_in | r->interleaved_out << 1 | r->last << 2 | r->transposed << 3 |
                      (r->twin && !r->trusted) << 4);
    add_view(key, &r->cos), add_view(key, &r->sin), add_view(key, &r->positions);
}

/* Launch a kernel on the current stream of a device, which is the current one. */
static int launch(Launch *l, char *const *tensors, i64 start, int32_t device)
{
    void *parameters[MOST_PARAMETERS], *stream;
    LaunchAttribute overlap = {OVERLAP_THE_PREVIOUS_KERNEL, {0}, {{0}}};
    LaunchConfig config = {{l->grid[0], l->grid[1], l->grid[2]}, {l->threads, 1, 1}, l->shared, NULL,
                           &overlap, l->early};
    overlap.value.number = 1;
    for (int i = 0; i < l->count; i++) {
        i64 *const value = &l->parameters[i].value;
        if (l->parameters[i].kind == A_TENSOR) *value = (i64)(intptr_t)tensors[*value];
        if (l->parameters[i].kind == THE_START) *value = start;
        parameters[i] = value;
    }
    if (cuda.stream(device, &stream)) return 0;
    config.stream = stream;
    return cuda.launch(&config, l->function, parameters, NULL) == 0;
}

/* Launch kernels on the device of `like`, each with its row of tensors; the next one is `step` rows on. */
static const char *run_work(Work *work, char *(*tensors)[ROW], int step, i64 start, const View *like)
{
    int32_t current = like->index;
    void *guard = NULL;
    int launched = 1;
    if (cuda.device(&current) || (current != like->index && cuda.guard(like->index, &guard)))
        return "the device cannot be chosen";
    for (int i = 0; i < work->count && launched; i++)
        launched = launch(&work->launches[i], tensors[i * step], start, like->index);
    if (guard) cuda.delete_guard(guard);
    return launched ? NULL : "a launch failed";
}

/* Run the launch of a key, with the first row of tensors, or its launches, of which there are at most `most`,
 * with the next rows; or say why not. */
static const char *run_launches(const Key *key, char *(*tensors)[ROW], int most, const Rotation *r)
{
    Work work;
    TRY(find_work(key, &work));
    if (work.count > most) return "these launches are for Python";
    return run_work(&work, tensors + (work.count > 1), 1, r->start, r->x);
}

/* Whether Triton's kernels take these tables as they are: columns side by side, in the same places; without a
 * check that both numbers of a pair are the same, unless there is a kernel for that too. */
static int are_usual_tables(const Rotation *r, int are_checked)
{
    const View *const c = &r->cos, *const s = &r->sin;
    return c->step[c->dim - 1] == 1 && !memcmp(c->step, s->step, (size_t)c->dim * sizeof *c->step) &&
           (!r->twin || ((r->trusted || are_checked) && r->columns == 1)) && r->start <= INT32_MAX;
}

static int is_usual(const View *v) { return has_rows(v) && count_of(v) > 0; }

/* Why a rotation is for Python, or NULL. */
static const char *unusual(const Rotation *r, int tables_are_checked)
{
    if (!are_usual_tables(r, tables_are_checked)) return "these tables are for Python";
    for (int i = 0; i < r->count; i++) {
        if (!is_usual(&r->x[i]) || r->x[i].dtype != r->x->dtype) return "these tensors are for Python";
        if (r->weight[i].handle && r->weight[i].step[0] != 1) return "this weight is for Python";
    }
    return NULL;
}

static const char *make_usual(Call *c, const View *x, const Rotation *r, View *y)
{
    TRY(make_same(c, x, r, y));
    return has_rows(y) ? NULL : "this result is for Python";
}

static const char *cuda_rotate_op(Call *c, int count, int in_place)
{
    Rotation r = {0};
    View y[2];
    Key key;
    key.count = 0;
    read_rotation(c, &r, count, 0);
    TRY(wrong_rotation(c, &r));
    TRY(unusual(&r, 1));
    if (in_place) TRY(unwritable(r.x, count, &r.positions));
    if (in_place && r.interleaved_in != r.interleaved_out) return "two layouts are for Python";
    add_rotation(&key, count | in_place << 2, &r);
    for (int i = 0; i < count; i++) {
        add_view(&key, &r.x[i]);
        y[i] = r.x[i];
        if (!in_place) TRY(make_usual(c, &r.x[i], &r, &y[i]));
    }
    const int k = count - 1;
    char *const at = r.positions.handle ? r.positions.data : r.x->data;
    char *const row[] = {r.x[0].data, r.x[k].data, y[0].data, y[k].data, r.cos.data, r.sin.data, at};
    char *tensors[3][ROW] = {{0}, {r.cos.data, r.sin.data}}; /* of the rotation; or of the check, and then it */
    memcpy(tensors[0], row, sizeof row), memcpy(tensors[2], row, sizeof row);
    TRY(run_launches(&key, tensors, r.twin && !r.trusted ? 2 : 1, &r));
    if (!in_place) give_back(c, y, count);
    return NULL;
}

static void add_norm(Key *key, const Rotation *r)
{
    i64 bits[2];
    memcpy(&bits[0], &r->eps, sizeof r->eps), memcpy(&bits[1], &r->shift, sizeof r->shift);
    add_word(key, bits[0]), add_word(key, bits[1]);
}

static const char *cuda_norm_op(Call *c, int count)
{
    Rotation r = {0};
    View y[2];
    Key key;
    key.count = 0;
    read_rotation(c, &r, count, 1);
    TRY(wrong_rotation(c, &r));
    TRY(unusual(&r, 0));
    add_rotation(&key, 8 | count, &r);
    add_norm(&key, &r);
    for (int i = 0; i < count; i++) {
        add_view(&key, &r.x[i]), add_view(&key, &r.weight[i]);
        TRY(make_usual(c, &r.x[i], &r, &y[i]));
    }
    /* Of both, of the queries only, and of the keys only. */
    char *tensors[3][ROW] = {{0}};
    for (int i = 0; i < 3; i++) {
        const int first = i == 2 ? count - 1 : 0, last = i == 1 ? 0 : count - 1;
        char *const at = r.positions.handle ? r.positions.data : r.x[first].data;
        char *const row[] = {r.x[first].data, r.x[last].data, y[first].data, y[last].data,
                             r.weight[first].data, r.weight[last].data, r.cos.data, r.sin.data, at};
        memcpy(tensors[i], row, sizeof row);
    }
    TRY(run_launches(&key, tensors, 2, &r));
    give_back(c, y, count);
    return NULL;
}

static const char *cuda_cache_op(Call *c)
{
    CacheArguments a = {0};
    View y;
    Key key;
    key.count = 0;
    read_cache_arguments(c, &a);
    const Rotation *const r = &a.r;
    const View *const q = r->x, *const v = q + 2;
    TRY(wrong_cache_arguments(c, &a));
    TRY(unusual(r, 0));
    if (!is_usual(v)) return "these tensors are for Python";
    const View *const given[] = {q, q + 1, v, &a.cache[0], &a.cache[1], &a.scales[0], &a.scales[1],
                                 &a.slots, &r->weight[0], &r->weight[1], &a.scale[0], &a.scale[1]};
    add_rotation(&key, 16, r);
    add_norm(&key, r);
    for (size_t i = 0; i < sizeof given / sizeof *given; i++) add_view(&key, given[i]);
    TRY(make_usual(c, q, r, &y));
    const View *const maybe[] = {&r->positions, &r->weight[0], &r->weight[1],
                                 a.scales[0].handle ? &a.scales[0] : &a.scale[0],
                                 a.scales[1].handle ? &a.scales[1] : &a.scale[1]};
    char *tensors[1][ROW] = {{q->data, q[1].data, v->data, y.data, a.cache[0].data, a.cache[1].data,
                              a.slots.data, r->cos.data, r->sin.data}};
    for (int i = 0; i < 5; i++) tensors[0][9 + i] = maybe[i]->handle ? maybe[i]->data : q->data;
    TRY(run_launches(&key, tensors, 1, r));
    give_back(c, &y, 1);
    return NULL;
}

/* Why tokens have no rows from `start` on, or NULL; of a tensor, what belongs to it, cos, sin and positions. */
static const char *wrong_row(const View *v, i64 start)
{
    const View *const cos = v + 2, *const at = v + 4;
    const i64 rows = v->dim == 4 && cos->dim > 1 ? cos->size[cos->dim - 2] : 0;
    if (start < 0 || start > rows || (!at->handle && v->size[2] > rows - start)) return "a token has no row in the tables";
    return NULL;
}

/* An op that repeats what Python did in a call whose arguments were the same in everything but the addresses
 * of the tensors and, if `kinds` has an s or an r, the start. There is a letter for each argument: a tensor, an
 * optional one (?), an integer, a number, or the start, which is also an integer; an r is a row of the tables,
 * which follow the tensor and what belongs to it, before the positions. */
static const char *replay(Call *c, int op, const char *kinds)
{
    Key key;
    key.count = 0;
    Work work;
    View views[ROW], results[MOST_MADE];
    char *tensors[1][ROW];
    int count = 0;
    i64 start = 0;
    add_word(&key, op);
    for (const char *kind = kinds; *kind; kind++)
        if (*kind == 't' || *kind == '?') {
            const View v = *kind == 't' ? tensor_argument(c) : optional_argument(c);
            views[count] = v, tensors[0][count++] = v.data;
            add_word(&key, (i64)v.device << 32 | v.index);
            add_view(&key, &v);
        } else {
            const i64 word = integer_argument(c); /* the bits, if it is a number */
            if (*kind != 's' && *kind != 'r') add_word(&key, word);
            if (*kind == 's' || *kind == 'S' || *kind == 'r') start = word;
            if (*kind == 'r' && !c->problem) c->problem = wrong_row(&views[count - 5], word);
        }
    TRY(c->problem);
    if (start < 0 || start > (i64)1 << 30) return "a start below zero is for Python";
    TRY(find_work(&key, &work));
    for (int i = 0; i < work.made_count; i++) {
        const View *const m = &work.made[i];
        View y;
        TRY(make(c, m->dim, m->size, m->step, m->dtype, views, &y));
        tensors[0][count++] = y.data;
        if (i < work.results) results[i] = y;
    }
    TRY(run_work(&work, tensors, 0, start, views));
    give_back(c, results, work.results);
    return NULL;
}

#define CUDA_OPS(X)                                                        \
    X(rotate, "rotate", cuda_rotate_op(&c, 1, 0))                          \
    X(rotate_qk, "rotate_qk", cuda_rotate_op(&c, 2, 0))                    \
    X(rotate_in_place, "rotate_", cuda_rotate_op(&c, 1, 1))                \
    X(rotate_qk_in_place, "rotate_qk_", cuda_rotate_op(&c, 2, 1))          \
    X(norm_rotate, "norm_rotate", cuda_norm_op(&c, 1))                     \
    X(norm_rotate_qk, "norm_rotate_qk", cuda_norm_op(&c, 2))               \
    X(rotate_and_cache, "rotate_and_cache", cuda_cache_op(&c))             \
    X(polar, "polar", replay(&c, 34, "t?tt?r"))                            \
    X(polar_backward, "polar_backward", replay(&c, 35, "tt?tt?r"))         \
    X(attend, "attend", replay(&c, 32, "ttt????iisnii"))                   \
    X(attend_backward, "attend_backward", replay(&c, 33, "t?tttttt????iiSnii"))          \
    X(attend_terms, "attend_terms", replay(&c, 36, "ttt?????????iisnii"))                \
    X(attend_terms_backward, "attend_terms_backward", replay(&c, 37, "t?ttttt?????????iiSnii"))
#define DEFINE_CUDA(id, name, call) DEFINE(cuda, id, (missed.count = 0, call))
CUDA_OPS(DEFINE_CUDA)
#define ROW_OF_CUDA(id, name, call) {name ".plain", cuda_##id},
static const NamedOp cuda_ops[] = {CUDA_OPS(ROW_OF_CUDA)};

/* register_cuda(path of libtorch_cuda) implements the ops for CUDA. It returns None, or the name of what is
 * missing. */
static PyObject *py_register_cuda(PyObject *self, PyObject *path)
{
    (void)self;
    PyObject *const bytes = PyUnicode_EncodeFSDefault(path);
    if (!bytes) return NULL;
    const LoadedLibrary loaded = loaded_library(PyBytes_AsString(bytes));
    const LoadedLibrary driver = loaded_library("libcuda.so.1");
    Py_DECREF(bytes);
    const struct { LoadedLibrary library; const char *name; void *to; } wanted[] = {
        {driver, "cuLaunchKernelEx", &cuda.launch},
        {driver, "cuFuncGetParamInfo", &cuda.parameter},
        {loaded, "aoti_torch_get_current_cuda_stream", &cuda.stream},
        {loaded, "aoti_torch_get_current_device_index", &cuda.device},
        {loaded, "aoti_torch_create_cuda_guard", &cuda.guard},
        {loaded, "aoti_torch_delete_cuda_guard", &cuda.delete_guard},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *const found = wanted[i].library ? symbol_of(wanted[i].library, wanted[i].name) : NULL;
        if (!found) return PyUnicode_FromString(wanted[i].name);
        memcpy(wanted[i].to, &found, sizeof found);
    }
    const char *const missing = implement("CUDA", cuda_ops, sizeof cuda_ops / sizeof *cuda_ops);
    if (missing) return PyUnicode_FromString(missing);
    Py_RETURN_NONE;
}

/* missed() returns the key of the last call of this thread, if no launch was found for it, or None. */
static PyObject *py_missed(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    if (!missed.count) Py_RETURN_NONE;
    const Py_ssize_t size = (Py_ssize_t)(missed.count * (int)sizeof *missed.words);
    PyObject *const key = PyBytes_FromStringAndSize((const char *)missed.words, size);
    missed.count = 0;
    return key;
}

/* Read a launch: (function, grid x, y, z, threads, shared memory, whether it overlaps the previous kernel,
 * *(kind, size, value) of its parameters). Whether the kernel has these parameters. */
static int read_launch(PyObject *given, Launch *l, int most_tensors)
{
    const Py_ssize_t count = PyTuple_Size(given);
    i64 numbers[7 + 3 * MOST_PARAMETERS];
    if (count < 7 || count > 7 + 3 * (MOST_PARAMETERS - 4) || (count - 7) % 3) return 0;
    for (Py_ssize_t i = 0; i < count; i++) numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(given, i));
    if (PyErr_Occurred()) return 0;
    l->function = (void *)(intptr_t)numbers[0];
    for (int i = 0; i < 3; i++) l->grid[i] = (unsigned)numbers[1 + i];
    l->threads = (unsigned)numbers[4], l->shared = (unsigned)numbers[5], l->early = numbers[6] != 0;
    l->count = (int)(count - 7) / 3;
    size_t offset, size;
    for (int i = 0; i < l->count; i++) {
        const i64 *const from = numbers + 7 + 3 * i;
        l->parameters[i].kind = (int)from[0], l->parameters[i].size = (int)from[1];
        l->parameters[i].value = from[2];
        if (from[0] == A_TENSOR && (from[2] < 0 || from[2] >= most_tensors)) return 0;
        if (cuda.parameter(l->function, (size_t)i, &offset, &size) || (i64)size != from[1]) return 0;
    }
    /* What Triton adds: pointers to scratch memory, which these kernels do not use. */
    for (int added = 0; !cuda.parameter(l->function, (size_t)l->count, &offset, &size); added++) {
        if (size != sizeof(void *) || added == 4) return 0;
        l->parameters[l->count].kind = A_NUMBER, l->parameters[l->count].size = (int)size;
        l->parameters[l->count++].value = 0;
    }
    return 1;
}

static void delete_launch(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, "posenc launch")); }

/* prepare(*numbers of a launch) returns what launch() takes, or None if this kernel needs more than that. */
static PyObject *py_prepare(PyObject *self, PyObject *numbers)
{
    Launch *const made = malloc(sizeof *made);
    (void)self;
    if (!made) return PyErr_NoMemory();
    if (read_launch(numbers, made, MOST_PARAMETERS)) return PyCapsule_New(made, "posenc launch", delete_launch);
    free(made);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* launch(prepared, device, start, *addresses of the tensors) on the current stream of the device, which must
 * be the current one; whether it was launched. */
static PyObject *py_launch(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    char *tensors[MOST_PARAMETERS];
    Launch copy;
    (void)self;
    if (count < 3 || count > 3 + MOST_PARAMETERS) return PyErr_Format(PyExc_TypeError, "%zd arguments", count);
    const Launch *const prepared = PyCapsule_GetPointer(arguments[0], "posenc launch");
    const i64 device = PyLong_AsLongLong(arguments[1]), start = PyLong_AsLongLong(arguments[2]);
    for (Py_ssize_t i = 3; i < count; i++)
        tensors[i - 3] = (char *)(intptr_t)PyLong_AsLongLong(arguments[i]);
    if (PyErr_Occurred()) return NULL;
    memcpy(&copy, prepared, offsetof(Launch, parameters) +
                                (size_t)prepared->count * sizeof *prepared->parameters);
    for (int i = 0; i < copy.count; i++)
        if (copy.parameters[i].kind == A_TENSOR && copy.parameters[i].value >= count - 3) Py_RETURN_FALSE;
    return PyBool_FromLong(launch(&copy, tensors, start, (int32_t)device));
}

/* Read a tensor to make: (dtype, *sizes, *strides), where the dtype is a name of torch's. */
static int read_made(PyObject *given, View *v)
{
    const Py_ssize_t count = PyTuple_Size(given);
    memset(v, 0, sizeof *v);
    v->dim = (count - 1) / 2;
    if (count < 1 || v->dim > MOST_DIMS || count != 1 + 2 * v->dim) return 0;
    for (Py_ssize_t d = 0; d < v->dim; d++) {
        v->size[d] = PyLong_AsLongLong(PyTuple_GetItem(given, 1 + d));
        v->step[d] = PyLong_AsLongLong(PyTuple_GetItem(given, 1 + v->dim + d));
    }
    v->dtype = -1;
#define READ(name) \
    if (!PyUnicode_CompareWithASCIIString(PyTuple_GetItem(given, 0), #name)) v->dtype = dtypes.name;
    TORCH_DTYPES(READ)
#undef READ
    return v->dtype >= 0 && !PyErr_Occurred();
}

/* install(key, launches, tensors that it makes, number of results) keeps what a call does, for calls like it;
 * whether the op can do that. An op that makes its results itself has none here. Without launches, such calls
 * stay Python's. */
static PyObject *py_install(PyObject *self, PyObject *arguments)
{
    Entry entry;
    Work *const work = &entry.work;
    PyObject *key, *launches, *made;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "SO!O!i", &key, &PyTuple_Type, &launches, &PyTuple_Type, &made, &work->results))
        return NULL;
    const Py_ssize_t size = PyBytes_Size(key), count = PyTuple_Size(launches), makes = PyTuple_Size(made);
    if (size > (Py_ssize_t)sizeof entry.key.words || count > MOST_TOGETHER || makes > MOST_MADE ||
        work->results < 0 || work->results > makes)
        Py_RETURN_FALSE;
    memcpy(entry.key.words, PyBytes_AsString(key), (size_t)size);
    entry.key.count = (int)(size / (Py_ssize_t)sizeof *entry.key.words);
    work->count = (int)count, work->made_count = (int)makes;
    int fits = 1;
    for (int i = 0; i < makes && fits; i++) fits = read_made(PyTuple_GetItem(made, i), &work->made[i]);
    for (int i = 0; i < count && fits; i++)
        fits = read_launch(PyTuple_GetItem(launches, i), &work->launches[i], ROW);
    if (PyErr_Occurred()) return NULL;
    if (fits) keep_work(&entry);
    return PyBool_FromLong(fits);
}
#else
#define HAS_CUDA_OPS 0
#endif
