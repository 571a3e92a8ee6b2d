/* The kernels, compiled once for every instruction set, and the choice of the set for this CPU. */
enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64, DTYPES };
static const i64 element_size[DTYPES] = {4, 2, 2, 8};

#if defined(__GNUC__) && defined(__aarch64__) && PACKS_PAIRS
#define NEON 1
#else
#define NEON 0
#endif

/* Rows at equal steps, and their table rows. */
typedef struct {
    const void *x;
    void *y;
    const void *c, *s;
    i64 count, x_step, y_step, table_step; /* the last one in bytes */
    i64 per_step, x_head, y_head; /* rows that share a table row at each step, and their strides */
} RowBlock;

/* RMSNorm of rows, with its factors in the precision of the computation. */
typedef struct {
    size_t channels, first_channel;
    const void *weight;
    double eps;
    int all_heads; /* over all rows together, each with factors of its own */
    void *work; /* two rows of scratch, for gradients */
    void *sums; /* for the factors' gradients */
    const void *g; /* the incoming gradients */
    i64 g_step;
} Norm;

/* Rows of PoPE at equal steps, their table rows, and the phases of their heads, or NULL. With g, the
 * incoming gradients, y is the gradient of x, and sums that of the phases. */
typedef struct {
    const void *x;
    void *y;
    const void *g, *c, *s, *pc, *ps;
    void *sums;
    i64 count, x_step, y_step, g_step, table_step, phase_step;
} PolarRows;

enum {
    PREFETCH_BYTES = 1024, /* from the bytes in use to those that are prefetched */
#if defined(__x86_64__) || defined(_M_X64)
    HEADS_PER_STEP = 4, /* heads rotated together, while their table row is in the cache */
#else
    HEADS_PER_STEP = 1, /* a Neoverse N1 is slower with several output streams */
#endif
    WORD_BLOCK = 32, /* pairs of bfloat16 that are rotated as words of two neighbours */
    WORDS_OF_PAIRS = PACKS_PAIRS && !NEON,
};

/* How a kernel reads a table row: in double, in float, or in float with the even columns of each
 * block before its odd ones. */
typedef enum { DOUBLES, FLOATS, EVEN_THEN_ODD } TableOrder;

/* Pairs that LOAD_PAIRS loads, in two vectors of first channels and two of second ones. */
#define LANES (2 * sizeof(VECTOR) / sizeof(REAL))

typedef void Kernel(const RowBlock *rows, size_t P, int layout, const Norm *norm);
typedef struct {
    Kernel *rows[DTYPES], *normed[DTYPES], *norm_backward[DTYPES];
    void (*polar[DTYPES])(const PolarRows *rows, size_t D);
    void (*convert_row)(const double *row, void *to, size_t P, double sign, TableOrder order);
} Kernels;

#if defined(__GNUC__) && defined(__x86_64__)
#include "../rotation/f16c.h"
#ifdef __clang__
#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c"
#else
#define AVX512 "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,prefer-vector-width=512"
#endif
#define ISA avx512
#define TARGET __attribute__((target(AVX512)))
#define WORDS_OF_512
#define HAS_F16C
#include "../rotation/avx512.h"
#include "dtypes.h"
#define ISA avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define HAS_F16C
#include "dtypes.h"
#endif
#if NEON
#include "../rotation/neon.h"
#endif
#define ISA baseline
#define TARGET
#include "dtypes.h"

static const struct {
    const char *name;
    const Kernels *kernels;
} isas[] = {
#if defined(__GNUC__) && defined(__x86_64__)
    {"avx512", &kernels_all_avx512},
    {"avx2", &kernels_all_avx2},
#endif
#if NEON
    {"neon", &kernels_all_baseline},
#else
    {"baseline", &kernels_all_baseline},
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
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma") && has_f16c();
    if (i == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#endif
    return i < ISAS;
}
