/* The rotation of rows, for each dtype, compiled once for every instruction set.
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
#define PACKED 1
#ifdef NEON
#define TAKE take_bf16
#define GIVE give_bf16
#endif
#include "turn.h"
#undef PACKED

#define KIND f16
#define ELEM half
#define REAL float
#define LOAD(v) load_f16(v)
#define STORE(v) store_f16(v)
#ifdef NEON
#define TAKE take_f16
#define GIVE give_f16
#endif
#include "turn.h"

#define KIND all
static const Kernel FN(kernels)[DTYPES] = {NAME2(rows, f32, ISA), NAME2(rows, bf16, ISA),
                                           NAME2(rows, f16, ISA), NAME2(rows, f64, ISA)};
#undef KIND

#undef NAME3
#undef NAME2
#undef FN
#undef ISA
#undef TARGET
