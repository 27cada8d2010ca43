/* Fused CPU loops: the law in one pass over memory.

   Plain C without torch or Python headers, called through ctypes by native.py. Built without fast-math and without
   contraction: a division is a division, and a product and a sum are two roundings. One source for every instruction
   set: native_loops.h is compiled for AVX-512, AVX2 and the baseline (NEON is the baseline of 64-bit ARM), and the
   level is chosen at run time. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define SHARED static __attribute__((noinline))
#define ALIGNED __attribute__((aligned(64)))
#define PUBLIC __attribute__((visibility("default")))
#else
#define INLINE static inline
#define SHARED static
#define ALIGNED
#define PUBLIC
#endif

enum { BLOCK = 1024, CHUNK = 1 << 16, LANES = 64, SHORT = 16, GRAIN = 1 << 14 };

enum { F16, BF16, F32, F64, I8, U8, I16, I32, I64 };

/* The elementwise ops, by the names of native.py; each is a formula of native_loops.h. A gradient rule joins here. */
#define MAPS(X)         \
    X(fake_quantize)    \
    X(clipped_identity) \
    X(in_range)         \
    X(tanh)             \
    X(hard_tanh)        \
    X(quantize)         \
    X(quantize_integer) \
    X(quantize_backward) \
    X(dequantize)       \
    X(dequantize_backward)

#define MAP_OF(f) MAP_##f,
enum { MAPS(MAP_OF) MAP_identity };
#undef MAP_OF

enum { FOLD_add, FOLD_min, FOLD_max };
enum { REDUCE_abs_max, REDUCE_min_max, REDUCE_learned };

/* c = (i / period) * channels + (i / inner) % channels: the scale group of element i */
typedef struct {
    int64_t elements, period, channels, inner;
} Layout;

/* Memory as [periods][rows][channels][inner], a group being one (period, channel). Cut into units by shape alone, so
   that the number of threads changes no sum:
   - long runs (chunks > 0): a unit is CHUNK elements of one run;
   - short runs: a unit is one of ``shares`` of the rows, over ``piece`` columns.
   Partial results lie as [periods][shares][channels][chunks or 1], with shares = rows for long runs. */
typedef struct {
    int64_t periods, rows, channels, inner;
    int64_t chunks, shares, pieces, piece, units;
    int32_t fold[2], two;
    double *partial[2];
} Reduce;

typedef struct {
    Layout layout;
    Reduce reduce;
    double quant_min, quant_max;
    int32_t map, reduction, pact, wide; /* wide: the arithmetic is in double */
    int32_t y_type, g_type, x_type, threads;
    int32_t marks_nan; /* a group's own scale is NaN where the group holds one: y, its codes, cannot */
    void *y;
    const void *g, *x, *scale, *zero_point; /* g: NULL for a forward; the last two in the type of the arithmetic */
    void *first;                            /* the scale of a group's own range, in the type of the arithmetic */
    int32_t *own_zero_point;
} Call;

/* Sums of products of codes, and what makes values of them; by_row, by_column: one for each, not one for all */
typedef struct {
    int64_t rows, columns;
    int32_t scale_by_row, zero_by_row, scale_by_column, y_type, wide, threads;
    void *y;
    const int32_t *sums, *zero_point, *column_sums; /* the last two: NULL where there is no zero point */
    const void *x_scale, *w_scale, *bias;           /* in the type of the arithmetic; bias may be NULL */
} Sums;

static const double START[] = {0, INFINITY, -INFINITY};

static double merge(int fold, double a, double b) {
    switch (fold) {
    case FOLD_min: return b < a ? b : a;
    case FOLD_max: return b > a ? b : a;
    default: return a + b;
    }
}

/* ---- bits ---- */

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* 2^k, a normal number */
INLINE float power_f32(int k) { return as_float((uint32_t)(k + 127) << 23); }

INLINE double power_f64(int k) {
    uint64_t bits = (uint64_t)(k + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float from_bfloat(uint16_t b) { return as_float((uint32_t)b << 16); }

/* Half to even: the carry of the lower half. */
INLINE uint16_t to_bfloat(float value) {
    uint32_t bits = as_bits(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* The exponent moves from a bias of 15 to one of 127; a subnormal is its digits times 2^-24. */
INLINE float from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, size = h & 0x7fffu, bits = (size << 13) + 0x38000000u;
    bits = size >= 0x7c00u ? bits | 0x7f800000u : bits; /* infinity and NaN */
    bits = size < 0x0400u ? as_bits((float)(int32_t)size * 0x1p-24f) : bits;
    return as_float(bits | sign);
}

INLINE uint16_t to_half(float value) {
    uint32_t bits = as_bits(value), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    uint32_t normal = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1)) >> 13;
    uint32_t subnormal = as_bits(as_float(size) + 0.5f) - 0x3f000000u; /* the sum rounds at half's last place */
    uint32_t special = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = size >= 0x47800000u ? special : size < 0x38800000u ? subnormal : normal;
    return (uint16_t)(half | sign);
}

/* ---- one copy of the loops for each level and type ---- */

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)

/* Without an instruction that rounds: the sum with 3 * 2^(bits - 2) drops the fraction, half to even. */
#define RINT_F32(v) (__builtin_fabsf(v) < 0x1p22f ? ((v) + 0x1.8p23f) - 0x1.8p23f : (v))
#define RINT_F64(v) (__builtin_fabs(v) < 0x1p51 ? ((v) + 0x1.8p52) - 0x1.8p52 : (v))

#define LEVEL baseline
#if defined(__aarch64__)
#define ROUNDS
#endif
#include "native_level.h"
#undef LEVEL

#if defined(__x86_64__) && defined(__GNUC__)
#define X86
#undef ROUNDS
#define ROUNDS
#define LEVEL avx2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include "native_level.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef LEVEL

#define LEVEL avx512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#include "native_level.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef LEVEL
#endif

/* ---- levels ---- */

typedef struct {
    const char *name;
    void (*map_range[2])(const Call *, int64_t, int64_t);
    void (*reduce_unit[2])(const Call *, int64_t);
    void (*per_batch_unit[2])(const Call *, int64_t);
    void (*bits_range[2])(const Call *, int64_t, int64_t);
    void (*scale_rows[2])(const Sums *, int64_t, int64_t);
} Level;

#define LEVEL_OF(level)                                                \
    {                                                                  \
        #level, {map_range_f32_##level, map_range_f64_##level},        \
            {reduce_unit_f32_##level, reduce_unit_f64_##level},        \
            {per_batch_unit_f32_##level, per_batch_unit_f64_##level},  \
            {bits_range_f32_##level, bits_range_f64_##level}, {        \
            scale_rows_f32_##level, scale_rows_f64_##level             \
        }                                                              \
    }

/* Slowest first. */
static const Level LEVELS[] = {
    LEVEL_OF(baseline),
#ifdef X86
    LEVEL_OF(avx2),
    LEVEL_OF(avx512),
#endif
};

static int level;

/* How many levels this processor runs. */
PUBLIC int lowbit_levels(void) {
#ifdef X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 1;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 3
               : 2;
#else
    return 1;
#endif
}

/* Whether Intel made it: MKL has its widest loops for those alone. */
PUBLIC int lowbit_is_intel(void) {
#ifdef X86
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
#else
    return 0;
#endif
}

PUBLIC const char *lowbit_level_name(int index) { return LEVELS[index].name; }

PUBLIC void lowbit_set_level(int index) { level = index; }

PUBLIC const char *lowbit_map_name(int index) {
#define NAME_OF(f) #f,
    static const char *const names[] = {MAPS(NAME_OF) "identity"};
#undef NAME_OF
    return index < (int)(sizeof names / sizeof *names) ? names[index] : 0;
}

/* What native.py must agree on. */
PUBLIC int64_t lowbit_call_size(void) { return (int64_t)(sizeof(Call) + sizeof(Sums)); }

PUBLIC int64_t lowbit_block(void) { return BLOCK; }

PUBLIC int64_t lowbit_chunk(void) { return CHUNK; }

/* ---- the calls of native.py: ``made`` once for a plan, the rest for each call ---- */

static Call fill(const Call *made, void *y, const void *g, const void *x, const void *scale, const void *zero_point,
                 int threads) {
    Call c = *made;
    c.y = y, c.g = g, c.x = x, c.scale = scale, c.zero_point = zero_point;
    c.threads = c.layout.elements <= GRAIN ? 1 : threads;
    return c;
}

static void in_ranges(const Call *c, void (*range)(const Call *, int64_t, int64_t)) {
    int64_t n = c->layout.elements, blocks = (n + BLOCK - 1) / BLOCK;
    if (c->threads == 1) {
        range(c, 0, n);
        return;
    }
#pragma omp parallel for num_threads(c->threads) schedule(static)
    for (int t = 0; t < c->threads; t++) {
        int64_t from = blocks * t / c->threads * BLOCK, to = blocks * (t + 1) / c->threads * BLOCK;
        range(c, from, to < n ? to : n);
    }
}

PUBLIC void lowbit_map(const Call *made, void *y, const void *g, const void *x, const void *scale,
                       const void *zero_point, int threads) {
    Call c = fill(made, y, g, x, scale, zero_point, threads);
    in_ranges(&c, LEVELS[level].map_range[c.wide]);
}

/* Bit i of ``bits``: whether the rule passes a gradient to x[i] */
PUBLIC void lowbit_gradient_bits(const Call *made, uint8_t *bits, const void *x, const void *scale,
                                 const void *zero_point, int threads) {
    Call c = fill(made, bits, 0, x, scale, zero_point, threads);
    in_ranges(&c, LEVELS[level].bits_range[c.wide]);
}

/* y[i] = bit i of ``bits`` ? g[i] : 0, for n elements of ``size`` bytes */
PUBLIC void lowbit_select(int64_t n, int size, const uint8_t *bits, const void *g, void *y, int threads) {
    threads = n <= GRAIN ? 1 : threads;
#define SELECT(T)                                                                                     \
    for (int64_t b = 0; b < n / 8; b++)                                                               \
        for (int k = 0; k < 8; k++)                                                                   \
            ((T *)y)[8 * b + k] = (T)(((const T *)g)[8 * b + k] & (T)(0 - (T)((bits[b] >> k) & 1)));  \
    for (int64_t i = n / 8 * 8; i < n; i++)                                                           \
        ((T *)y)[i] = (T)(((const T *)g)[i] & (T)(0 - (T)((bits[i / 8] >> i % 8) & 1)));
    if (size == 2) {
#pragma omp parallel for num_threads(threads) schedule(static)
        SELECT(uint16_t)
    } else if (size == 4) {
#pragma omp parallel for num_threads(threads) schedule(static)
        SELECT(uint32_t)
    } else {
#pragma omp parallel for num_threads(threads) schedule(static)
        SELECT(uint64_t)
    }
#undef SELECT
}

/* y = float(sum - z * column_sum) * (s_x * s_w) + b */
PUBLIC void lowbit_scale_sums(const Sums *c) {
    void (*scale_rows)(const Sums *, int64_t, int64_t) = LEVELS[level].scale_rows[c->wide];
    int threads = c->rows * c->columns <= GRAIN ? 1 : c->threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) scale_rows(c, c->rows * t / threads, c->rows * (t + 1) / threads);
}

/* ---- transposing, in blocks that are one vector wide ---- */

#if defined(__clang__)
#define SHUFFLE(T, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#elif defined(__GNUC__)
#define SHUFFLE(T, a, b, ...) __builtin_shuffle(a, b, (T##x){__VA_ARGS__})
#endif

#ifdef SHUFFLE
typedef uint8_t uint8_tx __attribute__((vector_size(16)));
typedef uint16_t uint16_tx __attribute__((vector_size(16)));
typedef uint32_t uint32_tx __attribute__((vector_size(16)));
#define LOW_uint8_t 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_uint8_t 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define LOW_uint16_t 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_uint16_t 4, 12, 5, 13, 6, 14, 7, 15
#define LOW_uint32_t 0, 4, 1, 5
#define HIGH_uint32_t 2, 6, 3, 7

/* Lane by lane, row i with row i + n / 2: log2(n) times this, and rows are columns. */
#define BLOCK_OF(T)                                                                                 \
    INLINE void transpose_block_##T(const T *x, int64_t columns, T *y, int64_t rows, T flip) {      \
        enum { N = 16 / sizeof(T) };                                                                \
        T##x a[N], b[N];                                                                            \
        for (int i = 0; i < N; i++) memcpy(&a[i], x + i * columns, 16), a[i] ^= flip;               \
        for (int s = 1; s < N; s *= 2) {                                                            \
            for (int i = 0; i < N / 2; i++) {                                                       \
                b[2 * i] = SHUFFLE(T, a[i], a[i + N / 2], LOW_##T);                                 \
                b[2 * i + 1] = SHUFFLE(T, a[i], a[i + N / 2], HIGH_##T);                            \
            }                                                                                       \
            memcpy(a, b, sizeof a);                                                                 \
        }                                                                                           \
        for (int i = 0; i < N; i++) memcpy(y + i * rows, &a[i], 16);                                \
    }
#else
#define BLOCK_OF(T)                                                                                 \
    INLINE void transpose_block_##T(const T *x, int64_t columns, T *y, int64_t rows, T flip) {      \
        for (int i = 0; i < (int)(16 / sizeof(T)); i++)                                             \
            for (int j = 0; j < (int)(16 / sizeof(T)); j++) y[j * rows + i] = x[i * columns + j] ^ flip; \
    }
#endif

/* A strip of 16 columns, which is a whole line of the cache or less of each row. */
#define TRANSPOSE_OF(T)                                                                                    \
    BLOCK_OF(T)                                                                                            \
    static void transpose_##T(int64_t rows, int64_t columns, int64_t strip, const T *x, T *y, T flip) {    \
        enum { N = 16 / sizeof(T) };                                                                       \
        int64_t end = strip + 16 < columns ? strip + 16 : columns;                                         \
        for (int64_t r = 0; r < rows; r += N)                                                              \
            for (int64_t c = strip; c < end; c += N)                                                       \
                if (r + N <= rows && c + N <= end)                                                         \
                    transpose_block_##T(x + r * columns + c, columns, y + c * rows + r, rows, flip);       \
                else                                                                                       \
                    for (int64_t j = c; j < end && j < c + N; j++)                                         \
                        for (int64_t i = r; i < rows && i < r + N; i++)                                    \
                            y[j * rows + i] = x[i * columns + j] ^ flip;                                   \
    }

TRANSPOSE_OF(uint8_t)
TRANSPOSE_OF(uint16_t)
TRANSPOSE_OF(uint32_t)

/* y[n][c][r] = x[n][r][c], elements of ``size`` bytes; ``unsign``, of one byte: + 128 */
PUBLIC void lowbit_transpose(int64_t batch, int64_t rows, int64_t columns, int size, int unsign, const void *x, void *y,
                             int threads) {
    int64_t strips = (columns + 15) / 16, all = rows * columns;
    threads = batch * all <= GRAIN ? 1 : threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < batch * strips; t++) {
        int64_t at = t / strips * all, strip = t % strips * 16;
        if (size == 1)
            transpose_uint8_t(rows, columns, strip, (const uint8_t *)x + at, (uint8_t *)y + at, unsign ? 128 : 0);
        else if (size == 2)
            transpose_uint16_t(rows, columns, strip, (const uint16_t *)x + at, (uint16_t *)y + at, 0);
        else
            transpose_uint32_t(rows, columns, strip, (const uint32_t *)x + at, (uint32_t *)y + at, 0);
    }
}

static void for_each_unit(const Call *c, void (*unit)(const Call *, int64_t)) {
    int64_t units = c->reduce.units;
    if (c->threads == 1 || units == 1) {
        for (int64_t u = 0; u < units; u++) unit(c, u);
        return;
    }
#pragma omp parallel for num_threads(c->threads) schedule(static)
    for (int64_t u = 0; u < units; u++) unit(c, u);
}

/* The partial results of a group, in order, to its result. */
static double finish(const Reduce *r, int which, int64_t group) {
    int64_t period = group / r->channels, channel = group % r->channels, chunks = r->chunks ? r->chunks : 1;
    double total = START[r->fold[which]];
    for (int64_t share = 0; share < r->shares; share++) {
        const double *partial =
            r->partial[which] + ((period * r->shares + share) * r->channels + channel) * chunks;
        for (int64_t chunk = 0; chunk < chunks; chunk++) total = merge(r->fold[which], total, partial[chunk]);
    }
    return total;
}

static void put(void *to, int wide, int64_t at, double value) {
    if (wide)
        ((double *)to)[at] = value;
    else
        ((float *)to)[at] = (float)value;
}

/* ``partial``: room for the partial results, those of the second fold after those of the first */
PUBLIC void lowbit_reduce(const Call *made, void *y, const void *g, const void *x, const void *scale,
                          const void *zero_point, void *first, void *second, double *partial, int threads) {
    Call c = fill(made, y, g, x, scale, zero_point, threads);
    Reduce *r = &c.reduce;
    int64_t groups = r->periods * r->channels;
    r->partial[0] = partial, r->partial[1] = partial + groups * r->shares * (r->chunks ? r->chunks : 1);
    for_each_unit(&c, LEVELS[level].reduce_unit[c.wide]);
#pragma omp parallel for num_threads(c.threads) schedule(static) if (groups > GRAIN)
    for (int64_t group = 0; group < groups; group++) {
        double a = finish(r, 0, group), b = r->two ? finish(r, 1, group) : 0;
        if (c.reduction == REDUCE_min_max) {
            a = isfinite(a) ? a + 0.0 : 0; /* -0 and 0 are one */
            b = isfinite(b) ? b + 0.0 : 0;
        }
        put(first, c.wide, group, a);
        if (second) put(second, c.wide, group, b);
    }
}

PUBLIC void lowbit_per_batch(const Call *made, void *y, const void *x, void *scale, int32_t *zero_point, int threads) {
    Call c = fill(made, y, 0, x, 0, 0, threads);
    c.first = scale, c.own_zero_point = zero_point;
    for_each_unit(&c, LEVELS[level].per_batch_unit[c.wide]);
}

/* ---- the state of an EMA, in float: a scale, or the two ends of a range ---- */

static float blend(float state, float batch, int started, float decay, float rest) {
    float kept = decay * state, added = rest * batch;
    return started ? kept + added : batch;
}

/* s = decay * s + rest * s_batch where there is data; the first is copied in */
PUBLIC void lowbit_ema_scale(int64_t n, double quant_min, double quant_max, double decay, double rest,
                             const float *magnitude, const float *scale, const uint8_t *started, float *new_scale,
                             uint8_t *new_started) {
    Call c = {.quant_min = quant_min, .quant_max = quant_max, .reduction = REDUCE_abs_max};
    for (int64_t i = 0; i < n; i++) {
        float batch, zero;
        own_params_f32_baseline(&c, magnitude[i], 0, &batch, &zero);
        int has_data = magnitude[i] > 0;
        new_scale[i] = has_data ? blend(scale[i], batch, started[i], (float)decay, (float)rest) : scale[i];
        new_started[i] = started[i] | has_data;
    }
}

/* lo and hi likewise; s and z follow from them */
PUBLIC void lowbit_ema_range(int64_t n, double quant_min, double quant_max, double decay, double rest, const float *low,
                             const float *high, const float *state_low, const float *state_high, const float *scale,
                             const int32_t *zero_point, const uint8_t *started, float *new_low, float *new_high,
                             float *new_scale, int32_t *new_zero_point, uint8_t *new_started) {
    Call c = {.quant_min = quant_min, .quant_max = quant_max, .reduction = REDUCE_min_max};
    for (int64_t i = 0; i < n; i++) {
        int has_data = (low[i] != 0) | (high[i] != 0);
        float lo = has_data ? blend(state_low[i], low[i], started[i], (float)decay, (float)rest) : state_low[i];
        float hi = has_data ? blend(state_high[i], high[i], started[i], (float)decay, (float)rest) : state_high[i];
        float s = scale[i], z = 0;
        new_low[i] = lo, new_high[i] = hi, new_started[i] = started[i] | has_data;
        if (new_started[i]) own_params_f32_baseline(&c, lo, hi, &s, &z);
        new_scale[i] = s, new_zero_point[i] = new_started[i] ? (int32_t)z : zero_point[i];
    }
}
