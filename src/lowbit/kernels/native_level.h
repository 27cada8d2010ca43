/* The loops of one instruction set, in float and in double; see native.c. */

#define NAME(f) JOIN(f##_f32, LEVEL)
#define M float
#define M_TYPE F32
#define M_MAX FLT_MAX
#define FABS __builtin_fabsf
#ifdef ROUNDS
#define RINT __builtin_rintf
#else
#define RINT RINT_F32
#endif
#include "native_loops.h"
#undef NAME
#undef M
#undef M_TYPE
#undef M_MAX
#undef FABS
#undef RINT

#define NAME(f) JOIN(f##_f64, LEVEL)
#define M double
#define M_TYPE F64
#define M_MAX DBL_MAX
#define FABS __builtin_fabs
#ifdef ROUNDS
#define RINT __builtin_rint
#else
#define RINT RINT_F64
#endif
#include "native_loops.h"
#undef NAME
#undef M
#undef M_TYPE
#undef M_MAX
#undef FABS
#undef RINT
