/* The functions of PyTorch's stable C ABI that the ops call, looked up in the libtorch that is loaded. No
 * header of torch is needed to build. Every function but `check` returns zero if it succeeded. */
typedef struct AtenTensorOpaque *Handle; /* a tensor; one that an op is given is its own to delete */
typedef struct TorchLibraryOpaque *Library;
typedef uint64_t Value; /* an argument or a result of an op: a handle, or the bits of a number */
typedef void Op(Value *stack, uint64_t arguments, uint64_t results);

#define TORCH_FUNCTIONS(X)                                                                               \
    X(get_dim, "aoti_torch_get_dim", int32_t, (Handle, i64 *))                                           \
    X(get_sizes, "aoti_torch_get_sizes", int32_t, (Handle, i64 **))                                      \
    X(get_strides, "aoti_torch_get_strides", int32_t, (Handle, i64 **))                                  \
    X(get_dtype, "aoti_torch_get_dtype", int32_t, (Handle, int32_t *))                                   \
    X(get_device, "aoti_torch_get_device_type", int32_t, (Handle, int32_t *))                            \
    X(get_index, "aoti_torch_get_device_index", int32_t, (Handle, int32_t *))                            \
    X(get_data, "aoti_torch_get_data_ptr", int32_t, (Handle, void **))                                   \
    X(is_defined, "aoti_torch_is_defined", int32_t, (Handle, bool *))                                    \
    X(empty, "aoti_torch_empty_strided", int32_t,                                                        \
      (i64, const i64 *, const i64 *, int32_t, int32_t, int32_t, Handle *))                              \
    X(copy, "aoti_torch_copy_", int32_t, (Handle, Handle, int32_t))                                      \
    X(delete_tensor, "aoti_torch_delete_tensor_object", int32_t, (Handle))                               \
    X(check, "aoti_torch_check", void, (bool, const char *, const char *, uint32_t, const char *))       \
    X(library, "aoti_torch_library_init_impl", int32_t,                                                  \
      (const char *, const char *, const char *, uint32_t, Library *))                                   \
    X(implement, "torch_library_impl", int32_t, (Library, const char *, Op *, uint64_t))                 \
    X(parallel_for, "torch_parallel_for", int32_t, (i64, i64, i64, void (*)(i64, i64, void *), void *))  \
    X(num_threads, "torch_get_num_threads", int32_t, (uint32_t *))                                       \
    X(thread, "torch_get_thread_idx", int32_t, (uint32_t *))

#define DECLARE(field, symbol, result, arguments) result (*field) arguments;
static struct {
    TORCH_FUNCTIONS(DECLARE)
    int32_t (*delete_value)(Value *); /* frees what an optional argument points to; from torch 2.13 on */
    void (*delete_memory)(void *);    /* C++'s operator delete, for older ones */
} torch;
#undef DECLARE

/* The numbers that torch has for dtypes. */
#define TORCH_DTYPES(X) \
    X(float32) X(bfloat16) X(float16) X(float64) X(float8_e4m3fn) X(float8_e5m2) X(int8) X(int32) X(int64)
#define DECLARE(name) int32_t name;
static struct { TORCH_DTYPES(DECLARE) } dtypes;
#undef DECLARE

/* The ABI that the extension is written for: torch 2.11. */
#define ABI_VERSION ((uint64_t)2 << 56 | (uint64_t)11 << 48)

#ifdef _WIN32
#include <windows.h>
typedef HMODULE LoadedLibrary;
static LoadedLibrary loaded_library(const char *path) { return GetModuleHandleA(path); }
static void *symbol_of(LoadedLibrary library, const char *name)
{
    return (void *)GetProcAddress(library, name);
}
#else
#include <dlfcn.h>
typedef void *LoadedLibrary;
/* A library that the process has loaded already, or NULL. */
static LoadedLibrary loaded_library(const char *path)
{
    return dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
}
static void *symbol_of(LoadedLibrary library, const char *name) { return dlsym(library, name); }
#endif

/* Look all functions up; return the name of one that is missing, or NULL. */
static const char *find_torch(LoadedLibrary library)
{
    void *address;
#define FIND(field, symbol, result, arguments)       \
    if (!(address = symbol_of(library, symbol))) return symbol; \
    memcpy(&torch.field, &address, sizeof address);
    TORCH_FUNCTIONS(FIND)
#undef FIND
#define FIND(name)                                                               \
    if (!(address = symbol_of(library, "aoti_torch_dtype_" #name))) return "the dtype " #name; \
    int32_t (*dtype_##name)(void);                                               \
    memcpy(&dtype_##name, &address, sizeof address);                                 \
    dtypes.name = dtype_##name();
    TORCH_DTYPES(FIND)
#undef FIND
    if ((address = symbol_of(library, "torch_delete_stable_ivalue")))
        memcpy(&torch.delete_value, &address, sizeof address);
    else if ((address = symbol_of(library, "_ZdlPv")))
        memcpy(&torch.delete_memory, &address, sizeof address);
    else
        return "torch_delete_stable_ivalue";
    return NULL;
}

/* A dtype of torch as a number of ours, or -1. */
static int float_dtype(int32_t dtype)
{
    if (dtype == dtypes.float32) return FLOAT32;
    if (dtype == dtypes.bfloat16) return BFLOAT16;
    if (dtype == dtypes.float16) return FLOAT16;
    return dtype == dtypes.float64 ? FLOAT64 : -1;
}

/* A tensor as an op reads it; the handle of an optional one that is absent is NULL. */
enum { MOST_DIMS = 4 };
typedef struct {
    Handle handle;
    i64 dim, size[MOST_DIMS], step[MOST_DIMS];
    int32_t dtype, device, index;
    int is_flat; /* whether the first axis was added */
    int is_swapped; /* whether the second and the third axis of the handle were exchanged */
    char *data;
} View;

/* Whether everything about a tensor could be read. */
static int read_view(Handle handle, View *v)
{
    bool defined = false;
    i64 *size, *step;
    void *data;
    memset(v, 0, sizeof *v);
    v->handle = handle;
    if (torch.is_defined(handle, &defined) || !defined || torch.get_dim(handle, &v->dim) ||
        v->dim > MOST_DIMS ||
        torch.get_sizes(handle, &size) || torch.get_strides(handle, &step) ||
        torch.get_dtype(handle, &v->dtype) || torch.get_device(handle, &v->device) ||
        torch.get_index(handle, &v->index) || torch.get_data(handle, &data))
        return 0;
    memcpy(v->size, size, (size_t)v->dim * sizeof *size);
    memcpy(v->step, step, (size_t)v->dim * sizeof *step);
    v->data = data;
    return 1;
}

/* A call of an op. Its arguments are read one after the other; `finish` deletes the tensors. */
enum { MOST_TENSORS = 40 };
typedef struct {
    Value *stack;
    const Value *next;
    Handle held[MOST_TENSORS];
    int count;
    const char *problem; /* of the arguments that were read, or NULL */
} Call;

static Call begin(Value *stack)
{
    const Call c = {stack, stack, {0}, 0, NULL};
    return c;
}

/* What can fail returns why it did, or NULL. */
#define TRY(attempt)                             \
    do {                                         \
        const char *const problem_ = (attempt);  \
        if (problem_) return problem_;           \
    } while (0)

static View hold(Call *c, Handle handle)
{
    View v = {0};
    if (c->count == MOST_TENSORS) {
        torch.delete_tensor(handle), c->problem = "there are too many tensors";
        return v;
    }
    c->held[c->count++] = handle;
    if (!read_view(handle, &v) && !c->problem) c->problem = "a tensor has no memory, or five axes";
    return v;
}

static View tensor_argument(Call *c) { return hold(c, (Handle)(uintptr_t)*c->next++); }

static View optional_argument(Call *c)
{
    Value *const held = (Value *)(uintptr_t)*c->next++;
    View v = {0};
    if (!held) return v;
    v = hold(c, (Handle)(uintptr_t)*held);
    if (torch.delete_value)
        torch.delete_value(held);
    else
        torch.delete_memory(held);
    return v;
}

static i64 integer_argument(Call *c) { return (i64)*c->next++; }

static double number_argument(Call *c)
{
    double number;
    memcpy(&number, c->next++, sizeof number);
    return number;
}

/* Delete the arguments. If the call failed, raise a RuntimeError in Python, whose caller says more. */
static void finish(Call *c, const char *problem)
{
    while (c->count) torch.delete_tensor(c->held[--c->count]);
    if (problem) torch.check(false, "", "posenc", 0, problem);
}

static i64 count_of(const View *v)
{
    i64 count = 1;
    for (i64 d = 0; d < v->dim; d++) count *= v->size[d];
    return count;
}

/* Whether the elements fill a stretch of memory, each place once. */
static int is_dense(const View *v)
{
    i64 step = 1, left = 0;
    if (!count_of(v)) return 1;
    for (i64 d = 0; d < v->dim; d++) left += v->size[d] > 1;
    while (left > 0) {
        i64 d = 0;
        while (d < v->dim && (v->size[d] < 2 || v->step[d] != step)) d++;
        if (d == v->dim) return 0;
        step *= v->size[d];
        left--;
    }
    return 1;
}

static void contiguous_steps(i64 dim, const i64 *size, i64 *step)
{
    i64 next = 1;
    for (i64 d = dim - 1; d >= 0; d--) step[d] = next, next *= size[d] > 1 ? size[d] : 1;
}

/* Whether the axis `a` comes after `b` in memory (1), before it (-1), or cannot be told (0). */
static int order_of(const View *v, int a, int b)
{
    if (v->step[a] == 0 || v->step[b] == 0) return 0;
    if (v->step[a] != v->step[b]) return v->step[a] < v->step[b] ? -1 : 1;
    return v->size[a] > v->size[b];
}

/* The strides of `torch.empty_like` for at most four axes: those of `v` if its elements fill a stretch of
 * memory, otherwise dense ones, with the axes in the same order. */
static void steps_like(const View *v, i64 *step)
{
    int axes[MOST_DIMS];
    i64 next = 1;
    if (is_dense(v)) {
        memcpy(step, v->step, (size_t)v->dim * sizeof *step);
        return;
    }
    for (int i = 0; i < v->dim; i++) axes[i] = (int)v->dim - 1 - i;
    /* A stable insertion that passes over axes whose order cannot be told, as torch's does. */
    for (int i = 1; i < v->dim; i++)
        for (int at = i, before = i - 1; before >= 0; before--) {
            const int order = order_of(v, axes[before], axes[at]);
            if (order < 0) break;
            if (order > 0) {
                const int axis = axes[before];
                axes[before] = axes[at], axes[at] = axis, at = before;
            }
        }
    for (int i = 0; i < v->dim; i++) {
        step[axes[i]] = next;
        if (v->size[axes[i]] > 1) next *= v->size[axes[i]];
    }
}

static void swap(i64 *a, i64 *b)
{
    const i64 held = *a;
    *a = *b, *b = held;
}

/* Exchange the second and the third axis: (B, T, H, D) becomes (B, H, T, D), and back. */
static void swap_axes(View *v)
{
    swap(&v->size[1], &v->size[2]), swap(&v->step[1], &v->step[2]);
    v->is_swapped = !v->is_swapped;
}

/* A tensor with one more axis before its others, as `v[None]`. */
static void add_axis(View *v)
{
    for (i64 d = v->dim++; d > 0; d--) v->size[d] = v->size[d - 1], v->step[d] = v->step[d - 1];
    v->size[0] = 1, v->step[0] *= v->size[1], v->is_flat = 1;
}

/* A tensor of three axes without its first, if that has one element, as `v[0]`. */
static void drop_axis(View *v)
{
    if (v->dim != 3 || v->size[0] != 1) return;
    for (i64 d = 0; d < 2; d++) v->size[d] = v->size[d + 1], v->step[d] = v->step[d + 1];
    v->dim = 2;
}

/* A new tensor on the device of `like`, which `finish` deletes. */
static const char *make(Call *c, i64 dim, const i64 *size, const i64 *step, int32_t dtype, const View *like,
                        View *to)
{
    Handle handle = NULL;
    if (torch.empty(dim, size, step, dtype, like->device, like->index, &handle))
        return "no memory for the result";
    *to = hold(c, handle);
    return c->problem;
}

/* A new contiguous tensor of these sizes. */
static const char *make_contiguous(Call *c, i64 dim, const i64 *size, const View *like, View *to)
{
    i64 step[MOST_DIMS];
    contiguous_steps(dim, size, step);
    return make(c, dim, size, step, like->dtype, like, to);
}

static const char *copy(const View *to, const View *from)
{
    return torch.copy(to->handle, from->handle, 0) ? "a copy failed" : NULL;
}

/* A contiguous copy. torch copies by handles, which do not know that axes were exchanged: that is for Python. */
static const char *dense_copy(Call *c, const View *v, View *to)
{
    if (v->is_swapped) return "a copy would exchange axes";
    TRY(make_contiguous(c, v->dim, v->size, v, to));
    return copy(to, v);
}

/* Hand tensors of `make` to the caller of the op. */
static void give_back(Call *c, const View *results, int count)
{
    for (int n = 0; n < count; n++) {
        c->stack[n] = (Value)(uintptr_t)results[n].handle;
        for (int i = 0; i < c->count; i++)
            if (c->held[i] == results[n].handle) c->held[i] = c->held[--c->count];
    }
}
