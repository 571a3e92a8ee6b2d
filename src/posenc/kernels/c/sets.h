/* What is compiled once for every instruction set, and which of them runs here. */
enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64, DTYPES };
static const i64 element_size[DTYPES] = {4, 2, 2, 8};

#if defined(__GNUC__) && defined(__aarch64__) && PACKS_PAIRS
#define NEON 1
#else
#define NEON 0
#endif

/* Rows at equal steps, and the table rows they take. */
typedef struct {
    const void *x;
    void *y;
    const void *c, *s;
    i64 count, x_step, y_step, table_step; /* the last one in bytes */
    i64 abreast, x_next, y_next; /* rows that take the same table row at each step */
} Rows;

/* RMSNorm of rows, with its factors in the precision of the computation. */
typedef struct {
    size_t channels, column;
    const void *weight;
    double eps;
    int whole; /* over all rows together, each with factors of its own */
} Norm;

/* What the gradient of normalised rows takes besides. */
typedef struct {
    const void *g; /* gradients to the results */
    i64 g_step;
    void *work, *sums; /* room for two rows; the gradient to the factors, to be added to */
} Back;

enum {
    AHEAD = 1024, /* bytes between what a kernel works on and what it asks for */
#if defined(__x86_64__) || defined(_M_X64)
    ABREAST = 4, /* heads that are turned token by token, so that a table row is near for all of them */
#else
    ABREAST = 1, /* a Neoverse N1 writes fewer streams well */
#endif
    WORD_BLOCK = 32, /* pairs of bfloat16 that are turned as words of two neighbours */
    WORDS_OF_PAIRS = PACKS_PAIRS && !NEON,
};

/* A table row as a kernel takes it: as it is, rounded, or rounded with the even columns of each block
 * before its odd ones. */
typedef enum { DOUBLES, FLOATS, EVEN_THEN_ODD } Order;

typedef struct {
    void (*rows[DTYPES])(const Rows *rows, size_t P, int layout);
    void (*normed[DTYPES])(const Rows *rows, size_t P, int layout, const Norm *norm);
    void (*back[DTYPES])(const Rows *rows, size_t P, int layout, const Norm *norm, const Back *back);
    void (*ready)(const double *row, void *to, size_t P, double sign, Order order);
} Set;

#if defined(__GNUC__) && defined(__x86_64__)
#ifdef __clang__
#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma"
#else
#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,prefer-vector-width=512"
#endif
#define ISA avx512
#define TARGET __attribute__((target(AVX512)))
#define WORDS_OF_512
#include "avx512.h"
#include "rows.h"
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "rows.h"
#endif
#if NEON
#include "neon.h"
#endif
#define ISA baseline
#define TARGET
#include "rows.h"

static const struct {
    const char *name;
    const Set *set;
} isas[] = {
#if defined(__GNUC__) && defined(__x86_64__)
    {"avx512", &set_all_avx512},
    {"avx2", &set_all_avx2},
#endif
#if NEON
    {"neon", &set_all_baseline},
#else
    {"baseline", &set_all_baseline},
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
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
    if (i == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return i < ISAS;
}
