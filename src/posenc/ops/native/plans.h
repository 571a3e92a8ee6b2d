/* The ops on CUDA. What a call does there is a plan: tensors to make, and steps over them and the arguments.
 * Python plans once for every kind of call (plan.py); this file makes the key of a call from the schema of its
 * op, and carries out the plan of that key. A call without a plan is refused, and Python makes one. */
#if defined(__linux__) && defined(__GNUC__)
#define HAS_CUDA_OPS 1

enum { MOST_OPS = 32, MOST_ARGUMENTS = 48, MOST_WORDS = 256 };
enum { MOST_MADE = 24, MOST_STEPS = 24, MOST_PARAMETERS = 112, MOST_ROW = MOST_TENSORS };
enum { MOST_PLAN_BYTES = 64 << 20 }; /* of all plans together; those that were not used for longest go first */

/* What an op takes, a letter for each argument, as `Field.letter` of op.py has them. */
enum { TENSOR = 't', MAYBE_TENSOR = '?', WRITTEN = 'w', MAYBE_WRITTEN = 'W', INTEGER = 'i', NUMBER = 'f', START = 's' };
static struct {
    char fields[MOST_ARGUMENTS + 1];
} cuda_ops[MOST_OPS];
static int cuda_op_count;

/* Everything that a plan depends on: all of a call but the addresses of its tensors and its start. */
typedef struct {
    int count;
    i64 words[MOST_WORDS];
} Key;

typedef struct {
    enum { FROM_TENSOR, FROM_START, FROM_NUMBER } source;
    i64 value; /* the place of a tensor, or the bits of a number */
} Parameter;

typedef struct {
    enum { LAUNCH, COPY, FILL_WITH_ZEROS } kind;
    int to, from; /* the places of tensors */
    void *function;
    unsigned grid[3], threads, shared, overlaps; /* the last: whether it may start during the kernel before it */
    int first, count; /* of its parameters */
} Step;

typedef struct Plan {
    struct Plan *next;           /* with the same hash */
    struct Plan *newer, *older;  /* by use */
    int users, is_dropped;
    size_t bytes;
    int results, made_count, step_count;
    i64 least, most; /* the starts that it is for */
    Key *key;
    View *made; /* the results before the others */
    Step *steps;
    Parameter *parameters;
} Plan;

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
    int32_t (*zero)(Handle);
} cuda;

static struct {
    Plan *by_hash[4096], *newest, *oldest;
    size_t bytes;
    char is_locked;
} plans;
static __thread Key missed; /* that of this thread's last call, if it had no plan; empty otherwise */

static void lock_plans(void) { while (__atomic_test_and_set(&plans.is_locked, __ATOMIC_ACQUIRE)); }
static void unlock_plans(void) { __atomic_clear(&plans.is_locked, __ATOMIC_RELEASE); }

static Plan **place_of(const Key *key)
{
    uint64_t hash = 0;
    for (int i = 0; i < key->count; i++) {
        hash = (hash ^ (uint64_t)key->words[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return &plans.by_hash[hash % (sizeof plans.by_hash / sizeof *plans.by_hash)];
}

static int is_same_key(const Key *a, const Key *b)
{
    return a->count == b->count && !memcmp(a->words, b->words, (size_t)a->count * sizeof *a->words);
}

static void unlink_by_use(Plan *p)
{
    *(p->newer ? &p->newer->older : &plans.newest) = p->older;
    *(p->older ? &p->older->newer : &plans.oldest) = p->newer;
}

static void link_as_newest(Plan *p)
{
    p->newer = NULL, p->older = plans.newest;
    *(plans.newest ? &plans.newest->newer : &plans.oldest) = p;
    plans.newest = p;
}

/* The plan of a key, which the caller gives back to `release`, or NULL. */
static Plan *plan_of(const Key *key)
{
    lock_plans();
    Plan *p = *place_of(key);
    while (p && !is_same_key(p->key, key)) p = p->next;
    if (p) {
        p->users++;
        if (p != plans.newest) unlink_by_use(p), link_as_newest(p);
    }
    unlock_plans();
    return p;
}

static void release(Plan *p)
{
    lock_plans();
    const int is_over = --p->users == 0 && p->is_dropped;
    unlock_plans();
    if (is_over) free(p);
}

/* Take a plan out, which is freed by its last user. The plans are locked. */
static void drop(Plan *p)
{
    Plan **at = place_of(p->key);
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    unlink_by_use(p);
    plans.bytes -= p->bytes, p->is_dropped = 1;
    if (!p->users) free(p);
}

static void keep(Plan *p)
{
    lock_plans();
    Plan *before = *place_of(p->key);
    while (before && !is_same_key(before->key, p->key)) before = before->next;
    if (before) drop(before);
    while (plans.oldest && plans.bytes + p->bytes > MOST_PLAN_BYTES) drop(plans.oldest);
    p->next = *place_of(p->key), *place_of(p->key) = p;
    plans.bytes += p->bytes;
    link_as_newest(p);
    unlock_plans();
}

static void add_word(Key *key, i64 word)
{
    if (key->count < MOST_WORDS) key->words[key->count] = word;
    key->count++;
}

/* All that is known of a tensor but its address. */
static void add_tensor(Key *key, const View *v)
{
    const i64 aligned = ((uintptr_t)v->data & 15) == 0;
    if (!v->handle) {
        add_word(key, -1);
        return;
    }
    add_word(key, (i64)v->dtype | v->dim << 16 | aligned << 24 | (i64)v->device << 32 | (i64)v->index << 40);
    for (i64 d = 0; d < v->dim; d++) add_word(key, v->size[d]), add_word(key, v->step[d]);
}

/* A call as it was read: its key, tensors, the places of those that are written, and its start. */
typedef struct {
    Key key;
    View views[MOST_ROW];
    char *tensors[MOST_ROW]; /* addresses of the arguments, and then of the tensors that are made */
    int count, is_written[MOST_ARGUMENTS];
    i64 start;
} Row;

static const char *read_row(Call *c, int op, Row *r)
{
    r->key.count = 0, r->count = 0, r->start = 0;
    add_word(&r->key, op);
    for (const char *field = cuda_ops[op].fields; *field; field++)
        switch (*field) {
        case TENSOR: case MAYBE_TENSOR: case WRITTEN: case MAYBE_WRITTEN: {
            const int may_be_none = *field == MAYBE_TENSOR || *field == MAYBE_WRITTEN;
            View *const v = &r->views[r->count];
            *v = may_be_none ? optional_argument(c) : tensor_argument(c);
            r->is_written[r->count] = *field == WRITTEN || *field == MAYBE_WRITTEN;
            r->tensors[r->count++] = v->data;
            add_tensor(&r->key, v);
            break;
        }
        case START: r->start = integer_argument(c); break;
        default: add_word(&r->key, integer_argument(c)); /* the bits, if it is a number */
        }
    return c->problem ? c->problem : r->key.count > MOST_WORDS ? "this call is too large" : NULL;
}

/* Why tensors must not be written, or NULL: the rest of that depends on no address, and a plan knows it. */
static const char *shared_memory(const Row *r)
{
    for (int i = 0; i < r->count; i++)
        for (int k = 0; r->is_written[i] && k < r->count; k++)
            if (k != i && (r->is_written[k] ? k < i : is_integer(&r->views[k])) && overlap(&r->views[i], &r->views[k]))
                return "a tensor shares memory with one that is written";
    return NULL;
}

static int run_launch(const Plan *p, const Step *s, const Row *r, int32_t device)
{
    i64 values[MOST_PARAMETERS];
    void *parameters[MOST_PARAMETERS], *stream;
    LaunchAttribute overlap = {OVERLAP_THE_PREVIOUS_KERNEL, {0}, {{0}}};
    LaunchConfig config = {{s->grid[0], s->grid[1], s->grid[2]}, {s->threads, 1, 1}, s->shared, NULL,
                           &overlap, s->overlaps};
    overlap.value.number = 1;
    for (int i = 0; i < s->count; i++) {
        const Parameter *const from = &p->parameters[s->first + i];
        values[i] = from->source == FROM_TENSOR ? (i64)(intptr_t)r->tensors[from->value]
                    : from->source == FROM_START ? r->start : from->value;
        parameters[i] = &values[i];
    }
    if (cuda.stream(device, &stream)) return 0;
    config.stream = stream;
    return cuda.launch(&config, s->function, parameters, NULL) == 0;
}

/* Carry the steps out, on the device of the first tensor. */
static const char *run_steps(const Plan *p, Row *r)
{
    const int32_t device = r->views->index;
    int32_t current = device;
    void *guard = NULL;
    int is_done = 1;
    if (cuda.device(&current) || (current != device && cuda.guard(device, &guard)))
        return "the device cannot be chosen";
    for (int i = 0; i < p->step_count && is_done; i++) {
        const Step *const s = &p->steps[i];
        const Handle to = r->views[s->to].handle;
        if (s->kind == LAUNCH) is_done = run_launch(p, s, r, device);
        if (s->kind == COPY) is_done = !torch.copy(to, r->views[s->from].handle, 0);
        if (s->kind == FILL_WITH_ZEROS) is_done = !cuda.zero(to);
    }
    if (guard) cuda.delete_guard(guard);
    return is_done ? NULL : "a launch failed";
}

static const char *run_plan(Call *c, const Plan *p, Row *r)
{
    const int count = r->count;
    if (r->start < p->least || r->start > p->most) return "a token has no row in the tables";
    for (int i = 0; i < p->made_count; i++) {
        const View *const m = &p->made[i];
        View *const v = &r->views[r->count];
        TRY(make(c, m->dim, m->size, m->step, m->dtype, r->views, v));
        r->tensors[r->count++] = v->data;
    }
    TRY(run_steps(p, r));
    give_back(c, r->views + count, p->results);
    return NULL;
}

static const char *cuda_op(Call *c, int op)
{
    Row row;
    missed.count = 0;
    TRY(read_row(c, op, &row));
    TRY(shared_memory(&row));
    Plan *const plan = plan_of(&row.key);
    if (!plan) {
        missed = row.key;
        return "there is no plan for this call yet";
    }
    const char *const problem = run_plan(c, plan, &row);
    release(plan);
    return problem;
}

/* An op of torch is a function without data, so there is one for each number; the numbers are octal. */
#define EIGHT(X, n) X(n##0) X(n##1) X(n##2) X(n##3) X(n##4) X(n##5) X(n##6) X(n##7)
#define NUMBERS(X) EIGHT(X, 0) EIGHT(X, 01) EIGHT(X, 02) EIGHT(X, 03)
#define DEFINE_CUDA(number) DEFINE(cuda, op_##number, cuda_op(&c, number))
NUMBERS(DEFINE_CUDA)
#define NAME_OF(number) cuda_op_##number,
static Op *const cuda_functions[MOST_OPS] = {NUMBERS(NAME_OF)};

/* find_cuda(path of libtorch_cuda) looks up what launches need. It returns None, or the name of what is missing. */
static PyObject *py_find_cuda(PyObject *self, PyObject *path)
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
        {loaded, "aoti_torch_zero_", &cuda.zero},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *const found = wanted[i].library ? symbol_of(wanted[i].library, wanted[i].name) : NULL;
        if (!found) return PyUnicode_FromString(wanted[i].name);
        memcpy(wanted[i].to, &found, sizeof found);
    }
    Py_RETURN_NONE;
}

/* define_cuda(name, fields) implements an op for CUDA by its plans; whether that could be done. */
static PyObject *py_define_cuda(PyObject *self, PyObject *arguments)
{
    const char *name, *fields;
    (void)self;
    if (!PyArg_ParseTuple(arguments, "ss", &name, &fields)) return NULL;
    if (cuda_op_count == MOST_OPS || strlen(fields) > MOST_ARGUMENTS) Py_RETURN_FALSE;
    const NamedOp op = {name, cuda_functions[cuda_op_count]};
    strcpy(cuda_ops[cuda_op_count++].fields, fields);
    return PyBool_FromLong(!implement("CUDA", &op, 1));
}

/* pop_missed() returns the key of this thread's last call, if it had no plan, or None. */
static PyObject *py_pop_missed(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    if (!missed.count) Py_RETURN_NONE;
    const Py_ssize_t size = (Py_ssize_t)(missed.count * (int)sizeof *missed.words);
    PyObject *const key = PyBytes_FromStringAndSize((const char *)missed.words, size);
    missed.count = 0;
    return key;
}

/* Numbers that Python gave, read one after the other. */
typedef struct {
    PyObject *list;
    Py_ssize_t next;
} Reader;

static i64 next_number(Reader *from)
{
    PyObject *const item = from->next < PyList_Size(from->list) ? PyList_GetItem(from->list, from->next++) : NULL;
    if (!item && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a plan ends too early");
    return item ? PyLong_AsLongLong(item) : 0;
}

/* A tensor to make: the number of its dtype in `dtype_names`, its axes, sizes and strides. */
static void read_made(Reader *from, View *v)
{
    static const int32_t *const all[] = {
#define ADDRESS(name) &dtypes.name,
        TORCH_DTYPES(ADDRESS)
#undef ADDRESS
    };
    const i64 dtype = next_number(from);
    memset(v, 0, sizeof *v);
    v->dim = next_number(from);
    if (dtype < 0 || dtype >= (i64)(sizeof all / sizeof *all) || v->dim < 0 || v->dim > MOST_DIMS) {
        PyErr_SetString(PyExc_ValueError, "a plan makes an unknown tensor");
        return;
    }
    v->dtype = *all[dtype];
    for (i64 d = 0; d < v->dim; d++) v->size[d] = next_number(from);
    for (i64 d = 0; d < v->dim; d++) v->step[d] = next_number(from);
}

/* Read the parameters of a launch: whether the kernel has them, after which Triton adds pointers to memory that
 * these kernels do not use. */
static int read_parameters(Reader *from, Step *s, Parameter *parameters, int tensors)
{
    size_t offset, size;
    for (int i = 0; i < s->count; i++) {
        const i64 source = next_number(from), wanted = next_number(from), value = next_number(from);
        if (s->first + i >= MOST_STEPS * MOST_PARAMETERS || i >= MOST_PARAMETERS - 4) return 0;
        if (source == FROM_TENSOR && (value < 0 || value >= tensors)) return 0;
        if (cuda.parameter(s->function, (size_t)i, &offset, &size) || (i64)size != wanted) return 0;
        parameters[s->first + i].source = (int)source, parameters[s->first + i].value = value;
    }
    for (int added = 0; !cuda.parameter(s->function, (size_t)s->count, &offset, &size); added++) {
        if (size != sizeof(void *) || added == 4) return 0;
        parameters[s->first + s->count].source = FROM_NUMBER, parameters[s->first + s->count++].value = 0;
    }
    return 1;
}

static void *take(char **memory, size_t bytes)
{
    char *const taken = *memory;
    *memory += (bytes + 15) / 16 * 16;
    return taken;
}

/* install(key, numbers) keeps a plan for calls of this key; whether that can be done. The numbers are: how many
 * tensors the call has, how many are made and how many of these are results, the least and the greatest start,
 * and the number of steps; the tensors that are made; the steps. A launch is (0, function, grid x, y, z, threads,
 * shared memory, whether it overlaps, number of parameters, and of each: source, bytes, value); a copy is
 * (1, to, from), zeros are (2, to). */
static PyObject *py_install(PyObject *self, PyObject *arguments)
{
    Key key;
    View made[MOST_MADE];
    Step steps[MOST_STEPS];
    PyObject *bytes;
    Reader from = {NULL, 0};
    (void)self;
    if (!PyArg_ParseTuple(arguments, "SO!", &bytes, &PyList_Type, &from.list)) return NULL;
    const Py_ssize_t size = PyBytes_Size(bytes);
    const i64 given = next_number(&from), makes = next_number(&from), results = next_number(&from);
    const i64 least = next_number(&from), most = next_number(&from), count = next_number(&from);
    if (PyErr_Occurred()) return NULL;
    const i64 tensors = given + makes;
    if (size > (Py_ssize_t)sizeof key.words || makes > MOST_MADE || count > MOST_STEPS || tensors > MOST_ROW ||
        given < 1 || results < 0 || results > makes || count < 0)
        Py_RETURN_FALSE;
    Parameter *const parameters = malloc((size_t)(MOST_STEPS * MOST_PARAMETERS) * sizeof *parameters);
    if (!parameters) return PyErr_NoMemory();
    memcpy(key.words, PyBytes_AsString(bytes), (size_t)size);
    key.count = (int)(size / (Py_ssize_t)sizeof *key.words);
    for (i64 i = 0; i < makes && !PyErr_Occurred(); i++) read_made(&from, &made[i]);
    int fits = 1, parameter_count = 0;
    for (i64 i = 0; i < count && fits && !PyErr_Occurred(); i++) {
        Step *const s = &steps[i];
        memset(s, 0, sizeof *s);
        const i64 kind = next_number(&from);
        s->kind = (int)kind;
        if (kind == LAUNCH) {
            s->function = (void *)(intptr_t)next_number(&from);
            for (int d = 0; d < 3; d++) s->grid[d] = (unsigned)next_number(&from);
            s->threads = (unsigned)next_number(&from), s->shared = (unsigned)next_number(&from);
            s->overlaps = next_number(&from) != 0;
            s->first = parameter_count, s->count = (int)next_number(&from);
            fits = read_parameters(&from, s, parameters, (int)tensors);
            parameter_count += s->count;
        } else {
            s->to = (int)next_number(&from), s->from = kind == COPY ? (int)next_number(&from) : 0;
            fits = s->to >= 0 && s->to < tensors && s->from >= 0 && s->from < tensors;
        }
    }
    if (PyErr_Occurred() || !fits) {
        free(parameters);
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_FALSE;
    }
    const size_t sizes[] = {sizeof(Plan), offsetof(Key, words) + (size_t)size, (size_t)makes * sizeof *made, (size_t)count * sizeof *steps,
                            (size_t)parameter_count * sizeof *parameters};
    size_t total = 0;
    for (int i = 0; i < 5; i++) total += (sizes[i] + 15) / 16 * 16;
    char *memory = malloc(total);
    if (memory) {
        Plan *const p = take(&memory, sizes[0]);
        memset(p, 0, sizeof *p);
        p->key = memcpy(take(&memory, sizes[1]), &key, sizes[1]);
        p->made = memcpy(take(&memory, sizes[2]), made, sizes[2]);
        p->steps = memcpy(take(&memory, sizes[3]), steps, sizes[3]);
        p->parameters = memcpy(take(&memory, sizes[4]), parameters, sizes[4]);
        p->bytes = total, p->results = (int)results, p->made_count = (int)makes, p->step_count = (int)count;
        p->least = least, p->most = most;
        keep(p);
    }
    free(parameters);
    return PyBool_FromLong(memory != NULL);
}
#else
#define HAS_CUDA_OPS 0
#endif
