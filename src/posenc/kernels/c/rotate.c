/* Rotary embedding on the CPU at the speed of memory, behind Python's stable ABI and without torch's
 * headers: tensors come as addresses and strides, threads from the OpenMP pool that torch loaded. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* RTLD_DEFAULT */
#endif
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#ifndef _WIN32
#include <dlfcn.h>
#endif
#include "formats.h"
#include "softplus.h"
#include "isa.h"
#include "schedule.h"
#include "cache.h"
#include "polar.h"

/* Append an int, or the ints of a tuple, to the numbers, of which there is room for `most`; return 0
 * with an exception set otherwise. */
static int append_numbers(PyObject *given, i64 *numbers, int *count, int most)
{
    const Py_ssize_t many = PyTuple_Check(given) ? PyTuple_Size(given) : -1;
    for (Py_ssize_t i = 0; i < (many < 0 ? 1 : many); i++, ++*count) {
        const i64 number = PyLong_AsLongLong(many < 0 ? given : PyTuple_GetItem(given, i));
        if (number == -1 && PyErr_Occurred()) return 0;
        if (*count < most) numbers[*count] = number;
    }
    return 1;
}

/* Read the arguments shared by all tensors, and those of one tensor or two, in tuples or one by one; return
 * 0 with an exception set otherwise. */
static int read_job(Job *job, PyObject *const *args, Py_ssize_t given)
{
    int count = 0;
    for (Py_ssize_t i = 0; i < given; i++)
        if (!append_numbers(args[i], &job->dtype, &count, MOST_ARGUMENTS)) return 0;
    job->encodes = 0;
    job->count = (count - SHARED_ARGUMENTS) / TENSOR_ARGUMENTS;
    if (job->count < 1 || job->count > 2 ||
        count != SHARED_ARGUMENTS + job->count * TENSOR_ARGUMENTS) {
        PyErr_Format(PyExc_TypeError, "%d numbers given, %d wanted, and %d a tensor", count,
                     SHARED_ARGUMENTS, TENSOR_ARGUMENTS);
        return 0;
    }
    job->B = job->tensors[0].B, job->T = job->tensors[0].T, job->D = job->tensors[0].D;
    return 1;
}

/* Whether a tensor has strided channels or null pointers. */
static int is_unusual(const Job *job)
{
    for (i64 n = 0; n < job->count; n++) {
        const Tensor *const a = &job->tensors[n];
        const int nowhere = (!a->x || !a->y) && a->B && a->H && a->T && a->D;
        if (a->x_sd != 1 || a->y_sd != 1 || nowhere) return 1;
    }
    return 0;
}

static PyObject *misfit(const Job *job)
{
    return PyErr_Format(PyExc_ValueError, "%lld tables of %lld pairs do not fit (%lld, ..., %lld)",
                        (long long)job->tables, (long long)job->P, (long long)job->B, (long long)job->D);
}

/* Check the rows, and call `work` without the GIL if it takes long. */
static PyObject *run_job(Job *job, i64 elements, int (*work)(Job *, i64))
{
    i64 bad = 0;
    if (!in_range(job, &bad)) return PyLong_FromLongLong(bad);
    if (elements == 0) Py_RETURN_NONE;
    PyThreadState *const state = elements < PARALLEL_ELEMENTS ? NULL : PyEval_SaveThread();
    const int failed = work(job, elements);
    if (state) PyEval_RestoreThread(state);
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* rotate(the numbers of Job) returns None, a row outside the table, or NotImplemented for strided channels
 * or null pointers. */
static PyObject *py_rotate(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Job job;
    i64 heads = 0;
    (void)self;
    if (!read_job(&job, args, given)) return NULL;
    if (is_unusual(&job)) Py_RETURN_NOTIMPLEMENTED;
    if (job.P < 1 || job.first_channel < 0 || job.first_channel + 2 * job.P > job.D ||
        (job.tables && job.tables != job.B))
        return misfit(&job);
    for (i64 n = 0; n < job.count; n++) heads += job.tensors[n].H;
    return run_job(&job, job.B * heads * job.T * job.D, run);
}

/* polar(the numbers of Job, as polar.h has them) returns what rotate() does. */
static PyObject *py_polar(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    Job job = {0};
    (void)self;
    if (!read_job(&job, args, given)) return NULL;
    if (is_unusual(&job)) Py_RETURN_NOTIMPLEMENTED;
    if (job.P != job.D || (job.tables && job.tables != job.B)) return misfit(&job);
    return run_job(&job, job.B * job.tensors[0].H * job.T * job.D, run_polar);
}

/* cache(the numbers of CacheArguments), in tuples or one by one. Returns None, or (what, number) for a
 * row outside the table or a slot outside the caches; nothing is written then. */
static PyObject *py_cache(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    enum { COUNT = sizeof(CacheArguments) / sizeof(i64) };
    CacheArguments a;
    CacheJob job;
    i64 bad = 0;
    int count = 0;
    (void)self;
    for (Py_ssize_t i = 0; i < given; i++)
        if (!append_numbers(args[i], a.shared, &count, COUNT)) return NULL;
    if (count != COUNT)
        return PyErr_Format(PyExc_TypeError, "%d numbers given, %d wanted", count, (int)COUNT);
    make_jobs(&job, &a);
    if (!in_range(&job.q, &bad)) return Py_BuildValue("sL", "row", (long long)bad);
    if (!slots_in_range(&a, &bad)) return Py_BuildValue("sL", "slot", (long long)bad);
    const i64 elements = a.q.B * a.q.T * (a.q.H * a.q.D + a.k.H * a.k.D + a.v.H * a.v.D);
    if (elements == 0) Py_RETURN_NONE;
    PyThreadState *const state = elements < PARALLEL_ELEMENTS ? NULL : PyEval_SaveThread();
    const int failed = write_all(&job, elements);
    if (state) PyEval_RestoreThread(state);
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_isa(PyObject *self, PyObject *none)
{
    return (void)self, (void)none, PyUnicode_FromString(isas[isa].name);
}

static PyObject *py_set_isa(PyObject *self, PyObject *name)
{
    (void)self;
    for (int i = 0; PyUnicode_Check(name) && i < ISAS; i++)
        if (runs_here(i) && PyUnicode_CompareWithASCIIString(name, isas[i].name) == 0) {
            isa = i;
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "%R does not run here", name);
}

static PyMethodDef methods[] = {
    {"rotate", (PyCFunction)(void (*)(void))py_rotate, METH_FASTCALL, NULL},
    {"polar", (PyCFunction)(void (*)(void))py_polar, METH_FASTCALL, NULL},
    {"cache", (PyCFunction)(void (*)(void))py_cache, METH_FASTCALL, NULL},
    {"isa", py_isa, METH_NOARGS, NULL},
    {"set_isa", py_set_isa, METH_O, NULL},
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
    if (found[0] && found[1] && found[2] && found[3]) memcpy(&pool, found, sizeof pool);
#endif
    return PyModule_Create(&module);
}
