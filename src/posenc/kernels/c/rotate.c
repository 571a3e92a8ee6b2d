/* Rotary embedding on the CPU at the speed of memory, behind Python's stable ABI and without torch's
 * headers: tensors come as addresses and strides, threads from the OpenMP pool that torch loaded. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* RTLD_DEFAULT, madvise */
#endif
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <dlfcn.h>
#endif
#include "formats.h"
#ifdef __linux__
#include "memory.h"
#endif

enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64, DTYPES };
static const i64 element_size[DTYPES] = {4, 2, 2, 8};

/* Rows at equal steps, from the first rotated channel on, and the table rows they take. */
typedef struct {
    const void *x;
    void *y;
    const void *c, *s;
    i64 count, x_step, y_step, table_step;
} Rows;

enum { AHEAD = 1024 }; /* bytes between what a kernel works on and what it asks for */
typedef void (*Kernel)(const Rows *rows, size_t P, int layout);
typedef enum { DOUBLES, FLOATS, EVEN_THEN_ODD } Order;

#if defined(__GNUC__) && defined(__x86_64__)
#ifdef __clang__
#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq,fma"
#else
#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512"
#endif
#define ISA avx512
#define TARGET __attribute__((target(AVX512)))
#include "rows.h"
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "rows.h"
#endif
#if defined(__GNUC__) && defined(__aarch64__) && PACKS_PAIRS
#define NEON 1
#include "neon.h"
#endif
#define ISA baseline
#define TARGET
#include "rows.h"

static const struct {
    const char *name;
    const Kernel *kernels;
    void (*ready)(const double *row, void *to, size_t P, double sign, Order order);
} isas[] = {
#if defined(__GNUC__) && defined(__x86_64__)
    {"avx512", kernels_all_avx512, ready_all_avx512},
    {"avx2", kernels_all_avx2, ready_all_avx2},
#endif
#ifdef NEON
    {"neon", kernels_all_baseline, ready_all_baseline},
#else
    {"baseline", kernels_all_baseline, ready_all_baseline},
#endif
};
enum { ISAS = sizeof isas / sizeof isas[0] };
static int isa = ISAS - 1;

static int runs_here(int i)
{
#if defined(__GNUC__) && defined(__x86_64__)
    if (i == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("fma");
    if (i == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return i < ISAS;
}

typedef struct {
    i64 x, y, B, H, T, D, x_sb, x_sh, x_st, x_sd, y_sb, y_sh, y_st, y_sd;
} Tensor;

/* The arguments of rotate() in their order. Pointers are integers and strides count elements. */
typedef struct {
    i64 dtype, cos, sin, tables, rows, P, table_sb, table_st, table_sd; /* float64 */
    i64 start, pos, pos_sb, pos_st, advance;
    i64 interleaved_in, interleaved_out, column, transposed;
    Tensor tensors[2];
    i64 count, B, T, D; /* found from them */
} Job;
enum {
    SHARED_ARGUMENTS = offsetof(Job, tensors) / sizeof(i64),
    TENSOR_ARGUMENTS = sizeof(Tensor) / sizeof(i64),
    MOST_ARGUMENTS = SHARED_ARGUMENTS + 2 * TENSOR_ARGUMENTS,
};

enum {
    PARALLEL_ELEMENTS = 1 << 18, /* below this, waking threads costs more than they bring */
    TILE_BYTES = 128 << 10, /* of table rows, made ready once for all heads of their tokens */
};

static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*thread)(void), (*threads)(void), (*max_threads)(void);
} pool;

static i64 table_row(const Job *j, i64 b, i64 t)
{
    i64 row = j->start + (j->advance ? t : 0);
    return j->pos ? row + ((const i64 *)(intptr_t)j->pos)[b * j->pos_sb + t * j->pos_st] : row;
}

/* Whether every token has a row in the table; otherwise the first that has not, in *bad. */
static int in_range(const Job *j, i64 *bad)
{
    /* A position this large would wrap around in the sum above. */
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

typedef struct {
    const Job *job;
    i64 tile, tiles;
    int failed;
} Plan;

/* Bytes of a number in the precision of the computation. */
static i64 real_size(const Job *j) { return j->dtype == FLOAT32 || j->dtype == FLOAT64 ? 8 : 4; }

/* How the kernel takes its tables: two pairs of the half layout at a time, from even and odd columns. */
static Order table_order(const Job *j)
{
    if (real_size(j) == 8) return DOUBLES;
#ifdef WORDS_OF_PAIRS
    if (j->dtype == BFLOAT16 && !j->interleaved_in && !j->interleaved_out && j->P % 2 == 0)
        return EVEN_THEN_ODD;
#endif
    return FLOATS;
}

/* The table rows of nt tokens, in the precision of the computation, one after the other. */
static void ready_tables(const Job *j, i64 b, i64 t, i64 nt, char *c, char *s)
{
    const double *cos = (const double *)(intptr_t)j->cos + b * j->table_sb;
    const double *sin = (const double *)(intptr_t)j->sin + b * j->table_sb;
    const Order order = table_order(j);
    for (i64 n = 0; n < nt; n++) {
        const i64 at = table_row(j, b, t + n) * j->table_st, to = n * j->P * real_size(j);
        isas[isa].ready(cos + at, c + to, (size_t)j->P, 1, order);
        isas[isa].ready(sin + at, s + to, (size_t)j->P, j->transposed ? -1 : 1, order);
    }
}

/* The channels that are not rotated. */
static void copy_rest(const Job *j, const char *x, char *y, i64 count, i64 x_step, i64 y_step)
{
    const i64 size = element_size[j->dtype], from = j->column * size, to = from + 2 * j->P * size;
    for (; count > 0; count--, x += x_step * size, y += y_step * size) {
        memcpy(y, x, (size_t)from);
        memcpy(y + to, x + to, (size_t)(j->D * size - to));
    }
}

/* Rows that start at channel 0, with the channels that are not rotated. */
static void turn_rows(const Job *j, Rows rows)
{
    const i64 column = j->column * element_size[j->dtype];
    if (rows.x != rows.y && j->D > 2 * j->P)
        copy_rest(j, rows.x, rows.y, rows.count, rows.x_step, rows.y_step);
    rows.x = (const char *)rows.x + column;
    rows.y = (char *)rows.y + column;
    isas[isa].kernels[j->dtype](&rows, (size_t)j->P,
                                2 * (int)j->interleaved_in + (int)j->interleaved_out);
}

/* One tensor's heads of the tokens t .. t+nt-1 of sequence b, whose table rows are in c and s. */
static void turn_tile(const Job *j, const Tensor *a, i64 b, i64 t, i64 nt, const char *c,
                      const char *s)
{
    const i64 size = element_size[j->dtype], table = j->P * real_size(j);
    const char *x = (const char *)(intptr_t)a->x + (b * a->x_sb + t * a->x_st) * size;
    char *y = (char *)(intptr_t)a->y + (b * a->y_sb + t * a->y_st) * size;
    /* Memory is walked in the order it lies in: the heads of a token, or the tokens of a head. */
    const int heads_together = a->x_sh <= a->x_st;
    const i64 outer = heads_together ? nt : a->H, inner = heads_together ? a->H : nt;
    const i64 x_outer = heads_together ? a->x_st : a->x_sh;
    const i64 y_outer = heads_together ? a->y_st : a->y_sh;
    const i64 x_inner = heads_together ? a->x_sh : a->x_st;
    const i64 y_inner = heads_together ? a->y_sh : a->y_st;
    for (i64 n = 0; n < outer; n++, x += x_outer * size, y += y_outer * size) {
        const i64 row = heads_together ? n * table : 0;
        const Rows rows = {x, y, c + row, s + row, inner, x_inner, y_inner,
                           heads_together ? 0 : j->P};
        turn_rows(j, rows);
    }
}

/* Units first .. last-1; a unit is a tile of tokens of one sequence, with all its heads. */
static void run_units(Plan *p, i64 first, i64 last)
{
    const Job *j = p->job;
    const i64 tables = p->tile * j->P * real_size(j);
    const int every_sequence = j->table_sb == 0 && j->pos_sb == 0;
    char *const block = malloc((size_t)(2 * tables + CACHE_LINE));
    if (!block) {
        p->failed = 1;
        return;
    }
    char *const c = block + (-(uintptr_t)block & (CACHE_LINE - 1)), *const s = c + tables;
    for (i64 unit = first, ready = -1; unit < last; unit++) {
        const i64 b = unit % j->B, tile = unit / j->B, t = tile * p->tile;
        const i64 nt = j->T - t < p->tile ? j->T - t : p->tile;
        if (tile != ready || !every_sequence) ready_tables(j, b, t, nt, c, s), ready = tile;
        for (i64 n = 0; n < j->count; n++) turn_tile(j, &j->tensors[n], b, t, nt, c, s);
    }
    free(block);
}

static void run_share(void *plan)
{
    Plan *p = plan;
    const i64 units = p->job->B * p->tiles, n = pool.threads(), i = pool.thread();
    run_units(p, units * i / n, units * (i + 1) / n);
}

static int run(const Job *j, i64 elements)
{
    i64 threads = 1;
    if (pool.parallel && elements >= PARALLEL_ELEMENTS) threads = pool.max_threads();
    Plan p = {j, TILE_BYTES / (2 * j->P * real_size(j)), 0, 0};
    if (p.tile < 1) p.tile = 1;
    /* At least four units for each thread. */
    const i64 fair = (j->B * j->T + 4 * threads - 1) / (4 * threads);
    if (threads > 1 && p.tile > fair) p.tile = fair;
    if (p.tile > j->T) p.tile = j->T;
    p.tiles = (j->T + p.tile - 1) / p.tile;
    if (threads > 1)
        pool.parallel(run_share, &p, (unsigned)threads, 0);
    else
        run_units(&p, 0, j->B * p.tiles);
    return p.failed;
}

/* Append an int, or the ints of a tuple, to the numbers; false with an error set if it is neither. */
static int append_numbers(PyObject *given, i64 *numbers, int *count)
{
    const Py_ssize_t many = PyTuple_Check(given) ? PyTuple_Size(given) : -1;
    for (Py_ssize_t i = 0; i < (many < 0 ? 1 : many); i++, ++*count) {
        const i64 number = PyLong_AsLongLong(many < 0 ? given : PyTuple_GetItem(given, i));
        if (number == -1 && PyErr_Occurred()) return 0;
        if (*count < MOST_ARGUMENTS) numbers[*count] = number;
    }
    return 1;
}

/* rotate(shared arguments, arguments of one tensor[, of another]), in tuples or one by one: None, or a
 * row that is missing, or NotImplemented for channels that do not lie side by side. */
static PyObject *py_rotate(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Job job;
    i64 heads = 0, bad = 0;
    int failed = 0, count = 0;
    (void)self;
    for (Py_ssize_t i = 0; i < given; i++)
        if (!append_numbers(args[i], &job.dtype, &count)) return NULL;
    job.count = (count - SHARED_ARGUMENTS) / TENSOR_ARGUMENTS;
    if (job.count < 1 || job.count > 2 ||
        count != SHARED_ARGUMENTS + job.count * TENSOR_ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "%d numbers given, %d wanted, and %d a tensor", count,
                            SHARED_ARGUMENTS, TENSOR_ARGUMENTS);
    job.B = job.tensors[0].B, job.T = job.tensors[0].T, job.D = job.tensors[0].D;
    for (i64 n = 0; n < job.count; n++)
        if (job.tensors[n].x_sd != 1 || job.tensors[n].y_sd != 1) Py_RETURN_NOTIMPLEMENTED;
    if (job.dtype < 0 || job.dtype >= DTYPES)
        return PyErr_Format(PyExc_ValueError, "no dtype has code %lld", (long long)job.dtype);
    if (job.P < 1 || job.column < 0 || job.column + 2 * job.P > job.D)
        return PyErr_Format(PyExc_ValueError, "%lld pairs from channel %lld on do not fit %lld",
                            (long long)job.P, (long long)job.column, (long long)job.D);
    for (i64 n = 0; n < job.count; n++) heads += job.tensors[n].H;
    const i64 elements = job.B * heads * job.T * job.D;
    if (elements == 0) Py_RETURN_NONE;
    if (!in_range(&job, &bad)) return PyLong_FromLongLong(bad);
    if (elements < PARALLEL_ELEMENTS) {
        failed = run(&job, elements);
    } else {
        Py_BEGIN_ALLOW_THREADS
        failed = run(&job, elements);
        Py_END_ALLOW_THREADS
    }
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_isa(PyObject *self, PyObject *none)
{
    return (void)self, (void)none, PyUnicode_FromString(isas[isa].name);
}

static PyObject *py_set_isa(PyObject *self, PyObject *name)
{
    char here[64] = "";
    (void)self;
    for (int i = 0; i < ISAS; i++) {
        if (!runs_here(i)) continue;
        PyObject *known = PyUnicode_FromString(isas[i].name);
        const int differs = known ? PyUnicode_Compare(name, known) : 0;
        Py_XDECREF(known);
        if (PyErr_Occurred()) return NULL;
        if (!differs) {
            isa = i;
            Py_RETURN_NONE;
        }
        strcat(strcat(here, here[0] ? ", " : ""), isas[i].name);
    }
    return PyErr_Format(PyExc_ValueError, "%R does not run here; these do: %s", name, here);
}

static PyObject *py_parallel(PyObject *self, PyObject *none)
{
    return (void)self, (void)none, PyBool_FromLong(pool.parallel != NULL);
}

static PyMethodDef methods[] = {
    {"rotate", (PyCFunction)(void (*)(void))py_rotate, METH_FASTCALL, NULL},
    {"isa", py_isa, METH_NOARGS, NULL},
    {"set_isa", py_set_isa, METH_O, NULL},
    {"parallel", py_parallel, METH_NOARGS, NULL},
#ifdef __linux__
    {"empty", (PyCFunction)(void (*)(void))py_empty, METH_FASTCALL, NULL},
    {"keep", py_keep, METH_O, NULL},
#endif
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_rotate", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

#ifndef _WIN32
static void *torch_symbol(const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    /* Some wheels load their OpenMP privately: look where libtorch_cpu itself would find it. */
    void *torch = found ? NULL : dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!torch) return found;
    found = dlsym(torch, name);
    dlclose(torch);
    return found;
}
#endif

PyMODINIT_FUNC PyInit__rotate(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (isa = 0; !runs_here(isa);) isa++;
#ifndef _WIN32
    void *found[] = {torch_symbol("GOMP_parallel"), torch_symbol("omp_get_thread_num"),
                     torch_symbol("omp_get_num_threads"), torch_symbol("omp_get_max_threads")};
    if (found[0] && found[1] && found[2] && found[3]) {
        memcpy(&pool.parallel, &found[0], sizeof found[0]);
        memcpy(&pool.thread, &found[1], sizeof found[0]);
        memcpy(&pool.threads, &found[2], sizeof found[0]);
        memcpy(&pool.max_threads, &found[3], sizeof found[0]);
    }
#endif
    return PyModule_Create(&module);
}
