/* The kernels of every dtype, compiled once for each instruction set.
 *
 * Define ISA (a name) and TARGET (the attribute that enables it) before the include. Loops are plain
 * C, which the compiler vectorises; neon.h and avx512.h replace those that intrinsics make faster. */

#define NAME3(a, b, c) a##_##b##_##c
#define NAME2(a, b, c) NAME3(a, b, c)
#define FN(name) NAME2(name, KIND, ISA)

#define KIND f32
#define ELEM float
#define REAL double
#define LOAD(v) ((double)(v))
#define STORE(v) ((float)(v))
#define SOFTPLUS_LIMIT SOFTPLUS_LIMIT_F32
#define ABS fabs
#define EXP_MINUS exp_minus_f32
#define LOG1P log1p_f32
#if NEON
#define BLOCK 8
#define VECTOR float64x2_t
#define TABLE vld1q_f64
#endif
#include "../rotation/rotate_rows.h"

#define KIND f64
#define ELEM double
#define REAL double
#define LOAD(v) (v)
#define STORE(v) (v)
#define SOFTPLUS_LIMIT 800.0
#define ABS fabs
#define EXP_MINUS(a) exp(-(a))
#define LOG1P log1p
#include "../rotation/rotate_rows.h"

#define KIND bf16
#define ELEM uint16_t
#define REAL float
#define LOAD(v) load_bf16(v)
#define STORE(v) store_bf16(v)
#define SOFTPLUS_LIMIT SOFTPLUS_LIMIT_HALF
#define ABS fabsf
#define EXP_MINUS exp_minus_half
#define LOG1P log1p_half
#if NEON
#define VECTOR float32x4_t
#define TABLE vld1q_f32
#elif defined(WORDS_OF_512)
#define BLOCK WORD_BLOCK
#define VECTOR __m512
#define TABLE _mm512_loadu_ps
#elif PACKS_PAIRS
#define BLOCK WORD_BLOCK
#define WORDS
#endif
#include "../rotation/rotate_rows.h"

#define KIND f16
#define ELEM half
#define REAL float
#define LOAD(v) load_f16(v)
#define STORE(v) store_f16(v)
#define SOFTPLUS_LIMIT SOFTPLUS_LIMIT_HALF
#define ABS fabsf
#define EXP_MINUS exp_minus_half
#define LOG1P log1p_half
#if NEON
#define VECTOR float32x4_t
#define TABLE vld1q_f32
#elif defined(HAS_F16C)
#define VECTOR __m256
#define TABLE _mm256_loadu_ps
#endif
#include "../rotation/rotate_rows.h"

#define KIND all
/* Convert a table row to the precision and order that the kernels read. */
TARGET static void FN(convert_row)(const double *row, void *to, size_t P, double sign, TableOrder order)
{
    double *const d = to;
    float *const f = to;
    size_t done = 0;
    if (order == DOUBLES) {
        INDEPENDENT for (size_t i = 0; i < P; i++) d[i] = sign * row[i];
        return;
    }
    for (; order == EVEN_THEN_ODD && done + WORD_BLOCK <= P; done += WORD_BLOCK)
        INDEPENDENT for (size_t i = 0; i < WORD_BLOCK / 2; i++) {
            f[done + i] = plain_nan((float)(sign * row[done + 2 * i]));
            f[done + WORD_BLOCK / 2 + i] = plain_nan((float)(sign * row[done + 2 * i + 1]));
        }
    INDEPENDENT for (size_t i = done; i < P; i++) f[i] = plain_nan((float)(sign * row[i]));
}

#define EACH(name) \
    {NAME2(name, f32, ISA), NAME2(name, bf16, ISA), NAME2(name, f16, ISA), NAME2(name, f64, ISA)}
static const Kernels FN(kernels) = {EACH(rows), EACH(normed), EACH(norm_backward),
                                     EACH(polar), FN(convert_row)};

#undef EACH
#undef KIND
#undef NAME3
#undef NAME2
#undef FN
#undef ISA
#undef TARGET
#undef WORDS_OF_512
#undef HAS_F16C
