/* Rotary embedding on the CPU at the speed of memory, behind Python's stable ABI and without torch's
 * headers: tensors come as addresses and strides, threads from the OpenMP pool that torch loaded. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* RTLD_DEFAULT, madvise */
#endif
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifndef _WIN32
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#endif
#include "formats.h"

enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64, DTYPES };
static const i64 element_size[DTYPES] = {4, 2, 2, 8};

/* Rows at equal steps, from the first rotated channel on, and the table rows they take. */
typedef struct {
    const void *x;
    void *y;
    const void *c, *s;
    i64 count, x_step, y_step, table_step;
} Rows;

typedef void (*Kernel)(const Rows *rows, size_t P, int layout);

#if defined(__GNUC__) && defined(__x86_64__)
#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,fma,prefer-vector-width=512")))
#include "rows.h"
#define ISA avx2
#define TARGET __attribute__((target("avx2,f16c,fma")))
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
} isas[] = {
#if defined(__GNUC__) && defined(__x86_64__)
    {"avx512", kernels_all_avx512},
    {"avx2", kernels_all_avx2},
#endif
#ifdef NEON
    {"neon", kernels_all_baseline},
#else
    {"baseline", kernels_all_baseline},
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
               __builtin_cpu_supports("f16c");
    if (i == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
#endif
    return i < ISAS;
}

/* The arguments of rotate() in their order. Pointers are integers and strides count elements. */
typedef struct {
    i64 x, y, dtype, B, H, T, D, x_sb, x_sh, x_st, y_sb, y_sh, y_st;
    i64 cos, sin, rows, table_sb, table_st; /* float64 */
    i64 start, pos, pos_sb, pos_st, advance;
    i64 P, column, interleaved_in, interleaved_out, transposed, threads;
} Job;
enum { ARGUMENTS = sizeof(Job) / sizeof(i64) };

enum {
    PARALLEL_ELEMENTS = 1 << 18, /* below this, waking threads costs more than they bring */
    HUGE_BYTES = 32 << 20,       /* malloc maps anything larger afresh */
    TILE_BYTES = 32 << 10,       /* of table rows, made ready once for all heads of their tokens */
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

/* The table rows of nt tokens, in the precision of the computation, one after the other. */
static void ready_tables(const Job *j, i64 b, i64 t, i64 nt, void *c, void *s)
{
    const double *cos = (const double *)(intptr_t)j->cos + b * j->table_sb;
    const double *sin = (const double *)(intptr_t)j->sin + b * j->table_sb;
    const double sign = j->transposed ? -1 : 1;
    const int wide = j->dtype == FLOAT32 || j->dtype == FLOAT64;
    for (i64 n = 0; n < nt; n++) {
        const i64 at = table_row(j, b, t + n) * j->table_st, to = n * j->P;
        if (wide)
            for (i64 i = 0; i < j->P; i++) {
                ((double *)c)[to + i] = cos[at + i];
                ((double *)s)[to + i] = sign * sin[at + i];
            }
        else
            for (i64 i = 0; i < j->P; i++) {
                ((float *)c)[to + i] = plain_nan((float)cos[at + i]);
                ((float *)s)[to + i] = plain_nan((float)(sign * sin[at + i]));
            }
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

/* Units first .. last-1; a unit is a tile of tokens of one sequence, with all its heads. */
static void run_units(Plan *p, i64 first, i64 last)
{
    const Job *j = p->job;
    const i64 size = element_size[j->dtype], step = j->P * (size == 2 ? 4 : 8);
    const int layout = 2 * (int)j->interleaved_in + (int)j->interleaved_out;
    const int rest = j->x != j->y && j->D > 2 * j->P;
    const Kernel kernel = isas[isa].kernels[j->dtype];
    char *const c = malloc((size_t)(2 * p->tile * step)), *const s = c + p->tile * step;
    if (!c) {
        p->failed = 1;
        return;
    }
    /* Memory is walked in the order it lies in: the heads of a token, or the tokens of a head. */
    const int heads_together = j->x_sh <= j->x_st;
    for (i64 unit = first; unit < last; unit++) {
        const i64 b = unit / p->tiles, t = unit % p->tiles * p->tile;
        const i64 nt = j->T - t < p->tile ? j->T - t : p->tile;
        const char *x = (const char *)(intptr_t)j->x + (b * j->x_sb + t * j->x_st) * size;
        char *y = (char *)(intptr_t)j->y + (b * j->y_sb + t * j->y_st) * size;
        const i64 outer = heads_together ? nt : j->H, inner = heads_together ? j->H : nt;
        const i64 x_outer = heads_together ? j->x_st : j->x_sh;
        const i64 y_outer = heads_together ? j->y_st : j->y_sh;
        const i64 x_inner = heads_together ? j->x_sh : j->x_st;
        const i64 y_inner = heads_together ? j->y_sh : j->y_st;
        ready_tables(j, b, t, nt, c, s);
        for (i64 n = 0; n < outer; n++, x += x_outer * size, y += y_outer * size) {
            const i64 row = heads_together ? n * step : 0;
            const Rows rows = {x + j->column * size, y + j->column * size, c + row, s + row,
                               inner, x_inner, y_inner, heads_together ? 0 : j->P};
            if (rest) copy_rest(j, x, y, inner, x_inner, y_inner);
            kernel(&rows, (size_t)j->P, layout);
        }
    }
    free(c);
}

static void run_share(void *plan)
{
    Plan *p = plan;
    const i64 units = p->job->B * p->tiles, n = pool.threads(), i = pool.thread();
    run_units(p, units * i / n, units * (i + 1) / n);
}

/* A large output is mapped afresh, and small pages would fault one by one as it is written. */
static void advise_huge_pages(const Job *j, i64 bytes)
{
#ifdef MADV_HUGEPAGE
    const i64 span = (j->B - 1) * j->y_sb + (j->H - 1) * j->y_sh + (j->T - 1) * j->y_st + j->D;
    if (bytes >= HUGE_BYTES && j->y != j->x && span == j->B * j->H * j->T * j->D) {
        const i64 page = sysconf(_SC_PAGESIZE), from = (j->y + page - 1) & -page;
        madvise((void *)(intptr_t)from, (size_t)((j->y + bytes - from) & -page), MADV_HUGEPAGE);
    }
#else
    (void)j, (void)bytes;
#endif
}

static int run(const Job *j)
{
    const i64 elements = j->B * j->H * j->T * j->D, size = element_size[j->dtype];
    advise_huge_pages(j, elements * size);
    i64 threads = 1;
    if (pool.parallel && elements >= PARALLEL_ELEMENTS)
        threads = j->threads > 0 ? j->threads : pool.max_threads();
    Plan p = {j, TILE_BYTES / (2 * j->P * (size == 2 ? 4 : 8)), 0, 0};
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

static PyObject *py_rotate(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Job job;
    i64 *fields = &job.x, bad = 0;
    int failed = 0;
    (void)self;
    if (given != ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "%zd arguments given, %d wanted", given, ARGUMENTS);
    for (int i = 0; i < ARGUMENTS; i++)
        if ((fields[i] = PyLong_AsLongLong(args[i])) == -1 && PyErr_Occurred()) return NULL;
    if (job.dtype < 0 || job.dtype >= DTYPES)
        return PyErr_Format(PyExc_ValueError, "no dtype has code %lld", (long long)job.dtype);
    if (job.P < 1 || job.column < 0 || job.column + 2 * job.P > job.D)
        return PyErr_Format(PyExc_ValueError, "%lld pairs from channel %lld on do not fit %lld",
                            (long long)job.P, (long long)job.column, (long long)job.D);
    const i64 elements = job.B * job.H * job.T * job.D;
    if (elements == 0) Py_RETURN_NONE;
    if (!in_range(&job, &bad)) return PyLong_FromLongLong(bad);
    if (elements < PARALLEL_ELEMENTS) {
        failed = run(&job);
    } else {
        Py_BEGIN_ALLOW_THREADS
        failed = run(&job);
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
