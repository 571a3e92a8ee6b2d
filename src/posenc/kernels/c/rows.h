/* The rotation of rows, for each dtype, and the table rows it takes, compiled once for every
 * instruction set.
 *
 * Included with ISA (a name) and TARGET (the attribute that turns the set on). Loops are plain C for
 * the compiler to vectorise. */

#define NAME3(a, b, c) a##_##b##_##c
#define NAME2(a, b, c) NAME3(a, b, c)
#define FN(name) NAME2(name, KIND, ISA)

#define KIND f32
#define ELEM float
#define REAL double
#define LOAD(v) ((double)(v))
#define STORE(v) ((float)(v))
#ifdef NEON
#define TAKE take_f32
#define GIVE give_f32
#define VECTOR float64x2_t
#define LANES 4
#define TABLE vld1q_f64
#endif
#include "turn.h"

#define KIND f64
#define ELEM double
#define REAL double
#define LOAD(v) (v)
#define STORE(v) (v)
#include "turn.h"

#define KIND bf16
#define ELEM uint16_t
#define REAL float
#define LOAD(v) load_bf16(v)
#define STORE(v) store_bf16(v)
#ifdef NEON
#define TAKE take_bf16
#define GIVE give_bf16
#define VECTOR float32x4_t
#define LANES 8
#define TABLE vld1q_f32
#elif PACKS_PAIRS
#define WORDS
#define WORDS_OF_PAIRS
#endif
#include "turn.h"

#define KIND f16
#define ELEM half
#define REAL float
#define LOAD(v) load_f16(v)
#define STORE(v) store_f16(v)
#ifdef NEON
#define TAKE take_f16
#define GIVE give_f16
#define VECTOR float32x4_t
#define LANES 8
#define TABLE vld1q_f32
#endif
#include "turn.h"

#define KIND all
/* A table row as the kernels take it: doubles, or floats, or floats of even columns before odd ones. */
TARGET static void FN(ready)(const double *row, void *to, size_t P, double sign, Order order)
{
    double *const d = to;
    float *const f = to;
    if (order == DOUBLES)
        INDEPENDENT for (size_t i = 0; i < P; i++) d[i] = sign * row[i];
    else if (order == FLOATS)
        INDEPENDENT for (size_t i = 0; i < P; i++) f[i] = plain_nan((float)(sign * row[i]));
    else
        INDEPENDENT for (size_t i = 0; i < P / 2; i++) {
            f[i] = plain_nan((float)(sign * row[2 * i]));
            f[P / 2 + i] = plain_nan((float)(sign * row[2 * i + 1]));
        }
}

static const Set FN(set) = {
    {NAME2(rows, f32, ISA), NAME2(rows, bf16, ISA), NAME2(rows, f16, ISA), NAME2(rows, f64, ISA)},
    {NAME2(normed, f32, ISA), NAME2(normed, bf16, ISA), NAME2(normed, f16, ISA),
     NAME2(normed, f64, ISA)},
    FN(ready),
};
#undef KIND

#undef NAME3
#undef NAME2
#undef FN
#undef ISA
#undef TARGET
