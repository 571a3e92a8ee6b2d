/* The ops of posenc on the CPU, at the speed of memory, and the launches of those on CUDA, registered with PyTorch through its stable C ABI.
 * Python's own ABI is the stable one too, so that one build serves every Python and every torch. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include "formats.h"
#include "../rotation/softplus.h"
#include "isa.h"
#include "torch.h"
#include "schedule.h"
#include "../cache/cache.h"
#include "../rotation/polar.h"
#include "arguments.h"
#include "ops.h"
#include "plans.h"

/* register(path of libtorch_cpu) implements the ops, which Python has defined, for tensors on the CPU. It
 * returns None, or the name of what this torch does not have. */
static PyObject *py_register(PyObject *self, PyObject *path)
{
    (void)self;
    PyObject *const bytes = PyUnicode_EncodeFSDefault(path);
    if (!bytes) return NULL;
    const LoadedLibrary loaded = loaded_library(PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    const char *missing = loaded ? find_torch(loaded) : "libtorch_cpu";
    if (!missing) missing = implement("CPU", cpu_ops, sizeof cpu_ops / sizeof *cpu_ops);
    if (missing) return PyUnicode_FromString(missing);
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
    {"register", py_register, METH_O, NULL},
#if HAS_CUDA_OPS
    {"find_cuda", py_find_cuda, METH_O, NULL},
    {"define_cuda", py_define_cuda, METH_VARARGS, NULL},
    {"pop_missed", py_pop_missed, METH_NOARGS, NULL},
    {"install", py_install, METH_VARARGS, NULL},
#endif
    {"isa", py_isa, METH_NOARGS, NULL},
    {"set_isa", py_set_isa, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (isa = 0; !runs_here(isa);) isa++;
    return PyModule_Create(&module);
}
