/* The loops, compiled once for each instruction set and each type of the arithmetic.

   native.c defines before each inclusion:
     M          the type of the arithmetic, float or double
     M_TYPE     its name among the types of memory, F32 or F64
     NAME(f)    f with a suffix of its own
     RINT(v)    v rounded half to even

   Memory holds any type. A block of it is converted to M, computed and converted back, inside the first-level cache;
   where memory holds M already, the loops run on it directly. So each formula is written once. */

/* ---- the formulas: g upstream, s and z of the element's scale group, quant_min and quant_max ---- */

#define ELEMENT M g, M x, M s, M z, M quant_min, M quant_max

INLINE M NAME(code)(M x, M s, M z) { return RINT(x / s) + z; }

INLINE M NAME(clamp)(M v, M low, M high) {
    v = v < low ? low : v;
    return v > high ? high : v; /* NaN stays */
}

/* y = (clamp(round(x / s) + z) - z) * s */
INLINE M NAME(fake_quantize)(ELEMENT) {
    (void)g;
    return (NAME(clamp)(NAME(code)(x, s, z), quant_min, quant_max) - z) * s;
}

/* dx = g where lo <= x <= hi, else 0 */
INLINE M NAME(clipped_identity)(ELEMENT) {
    return ((x >= (quant_min - z) * s) & (x <= (quant_max - z) * s)) ? g : 0;
}

/* dx = g where quant_min <= round(x / s) + z <= quant_max, else 0 */
INLINE M NAME(in_range)(ELEMENT) {
    M q = NAME(code)(x, s, z);
    return ((q >= quant_min) & (q <= quant_max)) ? g : 0;
}

INLINE M NAME(power)(int k) { return sizeof(M) == 4 ? (M)power_f32(k) : (M)power_f64(k); }

/* dx = g * (1 - tanh(x / s)^2) = g * 4 e / (1 + e)^2, e = exp(-2 abs(x / s)); 0 where x is not finite */
INLINE M NAME(tanh)(ELEMENT) {
    (void)z, (void)quant_min, (void)quant_max;
    M v = FABS(x / s), limit = sizeof(M) == 4 ? 54 : 375; /* beyond, 4 e is 0 */
    v = -2 * (v < limit ? v : limit);                     /* NaN too */
    /* e = 2^n * e^r, abs(r) <= log(2) / 2; n times the first part of log(2) is exact: it has few bits. */
    M n = RINT(v * (M)1.4426950408889634);
    M r = sizeof(M) == 4 ? (v - n * (M)0.693359375) - n * (M)-2.12194440e-4
                         : (v - n * (M)6.93145751953125e-1) - n * (M)1.42860682030941723212e-6;
    M p = 0;
#define TERM(k) p = (p + 1) * (r * (M)(1.0 / k));
    if (sizeof(M) == 8) { TERM(13) TERM(12) TERM(11) TERM(10) TERM(9) TERM(8) }
    TERM(7) TERM(6) TERM(5) TERM(4) TERM(3) TERM(2)
#undef TERM
    int half = (int)(n / 2), rest = (int)n - half;
    /* 2^n in two factors, the second after all else: only there may the result become subnormal and round. */
    M most = (1 + (r + r * p)) * NAME(power)(half), t = 1 + most * NAME(power)(rest);
    return FABS(x) <= M_MAX ? g * (4 * most / (t * t) * NAME(power)(rest)) : 0;
}

/* dx = g * (1 - abs(x) / bound) where abs(x) < bound, else 0; bound = hi for x >= 0 and -lo for x < 0 */
INLINE M NAME(hard_tanh)(ELEMENT) {
    M bound = x >= 0 ? (quant_max - z) * s : -((quant_min - z) * s);
    M slope = 1 - FABS(x) / bound;
    return FABS(x) < bound ? g * slope : 0;
}

/* q = clamp(round(x / s) + z) */
INLINE M NAME(quantize)(ELEMENT) {
    (void)g;
    return NAME(clamp)(NAME(code)(x, s, z), quant_min, quant_max);
}

/* the same, with NaN as z */
INLINE M NAME(quantize_integer)(ELEMENT) {
    (void)g;
    M v = RINT(x / s);
    return NAME(clamp)((v == v ? v : 0) + z, quant_min, quant_max);
}

/* dx = g / s where quant_min <= round(x / s) + z <= quant_max, else 0 */
INLINE M NAME(quantize_backward)(ELEMENT) { return NAME(in_range)(g / s, x, s, z, quant_min, quant_max); }

/* y = (q - z) * s */
INLINE M NAME(dequantize)(ELEMENT) {
    (void)g, (void)quant_min, (void)quant_max;
    return (x - z) * s;
}

/* dq = g * s */
INLINE M NAME(dequantize_backward)(ELEMENT) {
    (void)g, (void)z, (void)quant_min, (void)quant_max;
    return x * s;
}

/* ---- memory to M and back ---- */

SHARED void NAME(load)(M *restrict to, const void *from, int type, int64_t at, int64_t n) {
    switch (type) {
#define CASE(TYPE, T, VALUE)                              \
    case TYPE: {                                          \
        const T *restrict v = (const T *)from + at;       \
        for (int64_t i = 0; i < n; i++) to[i] = (M)VALUE; \
        break;                                            \
    }
        CASE(F16, uint16_t, from_half(v[i]))
        CASE(BF16, uint16_t, from_bfloat(v[i]))
        CASE(F32, float, v[i])
        CASE(F64, double, v[i])
        CASE(I8, int8_t, v[i])
        CASE(U8, uint8_t, v[i])
        CASE(I16, int16_t, v[i])
        CASE(I32, int32_t, v[i])
        CASE(I64, int64_t, v[i])
#undef CASE
    }
}

SHARED void NAME(store)(void *to, int type, int64_t at, const M *restrict from, int64_t n) {
    switch (type) {
#define CASE(TYPE, T, VALUE)                          \
    case TYPE: {                                      \
        T *restrict v = (T *)to + at;                 \
        for (int64_t i = 0; i < n; i++) v[i] = VALUE; \
        break;                                        \
    }
        CASE(F16, uint16_t, to_half((float)from[i]))
        CASE(BF16, uint16_t, to_bfloat((float)from[i]))
        CASE(F32, float, (float)from[i])
        CASE(F64, double, (double)from[i])
        CASE(I8, int8_t, (int8_t)(int32_t)from[i])
        CASE(U8, uint8_t, (uint8_t)(int32_t)from[i])
        CASE(I16, int16_t, (int16_t)(int32_t)from[i])
        CASE(I32, int32_t, (int32_t)from[i])
        CASE(I64, int64_t, (int64_t)from[i])
#undef CASE
    }
}

/* n elements from ``at``, in M: where they lie, or converted into the buffer */
SHARED const M *NAME(view)(M *buffer, const void *from, int type, int64_t at, int64_t n) {
    if (type == M_TYPE) return (const M *)from + at;
    NAME(load)(buffer, from, type, at, n);
    return buffer;
}

/* ---- the scale group of every element of a block ---- */

typedef struct {
    const M *s, *z; /* of each element; where uniform, of all */
    int uniform;
    ALIGNED M s_block[BLOCK], z_block[BLOCK];
} NAME(Params);

static void NAME(start)(NAME(Params) *p, const Call *c) {
    p->s = p->s_block, p->z = p->z_block;
    if (!c->zero_point) memset(p->z_block, 0, sizeof p->z_block);
}

SHARED void NAME(set)(M *restrict to, M value, int64_t n) {
    for (int64_t j = 0; j < n; j++) to[j] = value;
}

SHARED void NAME(spread)(NAME(Params) *p, const Call *c, int64_t i, int64_t n) {
    const Layout *l = &c->layout;
    const M *scale = c->scale, *zero_point = c->zero_point;
    int64_t in_period = i % l->period, base = i / l->period * l->channels;
    int64_t channel = in_period / l->inner % l->channels, left = l->inner - in_period % l->inner;
    p->uniform = left >= n;
    if (p->uniform || (l->inner == 1 && channel + n <= l->channels)) { /* as they lie in memory */
        p->s = scale + base + channel;
        if (zero_point) p->z = zero_point + base + channel;
        return;
    }
    p->s = p->s_block;
    if (zero_point) p->z = p->z_block;
    for (int64_t at = 0; at < n;) {
        int64_t group = base + channel, most = l->inner == 1 ? l->channels - channel : left;
        int64_t count = most < n - at ? most : n - at;
        if (l->inner == 1) { /* neighbours lie in neighbouring groups */
            memcpy(p->s_block + at, scale + group, (size_t)count * sizeof(M));
            if (zero_point) memcpy(p->z_block + at, zero_point + group, (size_t)count * sizeof(M));
            channel += count;
        } else {
            NAME(set)(p->s_block + at, scale[group], count);
            if (zero_point) NAME(set)(p->z_block + at, zero_point[group], count);
            channel++;
        }
        at += count, in_period += count, left = l->inner;
        if (channel == l->channels) channel = 0;
        if (in_period == l->period) in_period = 0, base += l->channels;
    }
}

/* ---- elementwise ---- */

#define BLOCK_OF(f)                                                                                       \
    SHARED void NAME(f##_block)(M *restrict y, const M *restrict g, const M *restrict x,                  \
                                const NAME(Params) *p, int64_t n, M quant_min, M quant_max) {             \
        const M *restrict s = p->s, *restrict z = p->z, s0 = *s, z0 = *z;                                 \
        if (p->uniform)                                                                                   \
            for (int64_t i = 0; i < n; i++) y[i] = NAME(f)(g[i], x[i], s0, z0, quant_min, quant_max);     \
        else                                                                                              \
            for (int64_t i = 0; i < n; i++) y[i] = NAME(f)(g[i], x[i], s[i], z[i], quant_min, quant_max); \
    }
MAPS(BLOCK_OF)
#undef BLOCK_OF

/* y of one block whose scales are set; g and x in M */
static void NAME(map_block)(const Call *c, M *buffer, const M *g, const M *x, const NAME(Params) *p, int64_t i,
                            int64_t n) {
    M *y = c->y_type == M_TYPE ? (M *)c->y + i : buffer, low = (M)c->quant_min, high = (M)c->quant_max;
    switch (c->map) {
#define CASE(f)                                      \
    case MAP_##f:                                    \
        NAME(f##_block)(y, g, x, p, n, low, high); \
        break;
        MAPS(CASE)
#undef CASE
    case MAP_identity: /* dx = g */
        for (int64_t j = 0; j < n; j++) y[j] = g[j];
        break;
    }
    if (y == buffer) NAME(store)(c->y, c->y_type, i, buffer, n);
}

static void NAME(map_range)(const Call *c, int64_t from, int64_t to) {
    ALIGNED M yb[BLOCK], gb[BLOCK], xb[BLOCK];
    NAME(Params) p;
    NAME(start)(&p, c);
    for (int64_t i = from; i < to; i += BLOCK) {
        int64_t n = to - i < BLOCK ? to - i : BLOCK;
        const M *x = NAME(view)(xb, c->x, c->x_type, i, n);
        const M *g = c->g ? NAME(view)(gb, c->g, c->g_type, i, n) : x;
        NAME(spread)(&p, c, i, n);
        NAME(map_block)(c, yb, g, x, &p, i, n);
    }
}

/* bit i of y: whether the rule, one of those that only clip, passes a gradient to x[i]; ``from`` starts a byte */
static void NAME(bits_range)(const Call *c, int64_t from, int64_t to) {
    ALIGNED M yb[BLOCK], ones[BLOCK], xb[BLOCK];
    NAME(Params) p;
    Call block = *c;
    block.y = yb, block.y_type = M_TYPE;
    NAME(start)(&p, c);
    NAME(set)(ones, 1, BLOCK);
    for (int64_t i = from; i < to; i += BLOCK) {
        int64_t n = to - i < BLOCK ? to - i : BLOCK;
        const M *x = NAME(view)(xb, c->x, c->x_type, i, n);
        ALIGNED uint8_t passed[BLOCK];
        NAME(spread)(&p, c, i, n);
        NAME(map_block)(&block, yb, ones, x, &p, 0, n);
        for (int64_t j = 0; j < n; j++) passed[j] = yb[j] != 0;
        for (int64_t j = n; j % 8; j++) passed[j] = 0;
        for (int64_t j = 0; j < n; j += 8) {
            unsigned byte = 0;
            for (int k = 0; k < 8; k++) byte |= (unsigned)passed[j + k] << k;
            ((uint8_t *)c->y)[(i + j) / 8] = (uint8_t)byte;
        }
    }
}

/* ---- the values of sums of products of codes ---- */

static void NAME(scale_rows)(const Sums *c, int64_t from, int64_t to) {
    ALIGNED M yb[BLOCK], scales[BLOCK];
    const M *x_scale = c->x_scale, *w_scale = c->w_scale, *bias = c->bias;
    for (int64_t row = from; row < to; row++) {
        M s = x_scale[c->scale_by_row ? row : 0];
        int32_t z = c->zero_point ? c->zero_point[c->zero_by_row ? row : 0] : 0;
        for (int64_t j = 0; j < c->columns; j += BLOCK) {
            int64_t n = c->columns - j < BLOCK ? c->columns - j : BLOCK, at = row * c->columns + j;
            const int32_t *restrict sums = c->sums + at, *restrict column = c->zero_point ? c->column_sums + j : 0;
            M *restrict y = c->y_type == M_TYPE ? (M *)c->y + at : yb;
            const M *restrict w = c->scale_by_column ? w_scale + j : scales;
            if (!c->scale_by_column) NAME(set)(scales, *w_scale, n);
            if (column)
                for (int64_t i = 0; i < n; i++) y[i] = (M)(sums[i] - z * column[i]) * (s * w[i]);
            else
                for (int64_t i = 0; i < n; i++) y[i] = (M)sums[i] * (s * w[i]);
            if (bias)
                for (int64_t i = 0; i < n; i++) y[i] = y[i] + bias[j + i];
            if (y == yb) NAME(store)(c->y, c->y_type, at, yb, n);
        }
    }
}

/* ---- reductions: each lane in its own order, so that no instruction set changes the sum ---- */

#define ADD(a, b) ((a) + (b))
#define MIN(a, b) ((b) < (a) ? (b) : (a))
#define MAX(a, b) ((b) > (a) ? (b) : (a))
#define FOLD_OF(f, OP)                                                                       \
    SHARED M NAME(f##_long)(const M *restrict t, int64_t n, M start) {                       \
        ALIGNED M lane[LANES];                                                               \
        for (int j = 0; j < LANES; j++) lane[j] = start;                                     \
        int64_t i = 0;                                                                       \
        for (; i + LANES <= n; i += LANES)                                                   \
            for (int j = 0; j < LANES; j++) lane[j] = OP(lane[j], t[i + j]);                 \
        for (int j = 0; i + j < n; j++) lane[j] = OP(lane[j], t[i + j]);                     \
        for (int w = LANES / 2; w; w /= 2)                                                   \
            for (int j = 0; j < w; j++) lane[j] = OP(lane[j], lane[j + w]);                  \
        return lane[0];                                                                      \
    }                                                                                        \
    SHARED void NAME(f##_groups)(double *restrict to, const M *restrict t, int64_t groups, int64_t inner) { \
        if (inner == 1)                                                                      \
            for (int64_t k = 0; k < groups; k++) to[k] = (double)t[k];                       \
        else if (inner < SHORT)                                                              \
            for (int64_t k = 0; k < groups; k++, t += inner) {                               \
                M total = t[0];                                                              \
                for (int64_t i = 1; i < inner; i++) total = OP(total, t[i]);                 \
                to[k] = (double)total;                                                       \
            }                                                                                \
        else                                                                                 \
            for (int64_t k = 0; k < groups; k++, t += inner) {                               \
                ALIGNED M lane[SHORT];                                                       \
                int64_t i = SHORT;                                                           \
                for (int j = 0; j < SHORT; j++) lane[j] = t[j];                              \
                for (; i + SHORT <= inner; i += SHORT)                                       \
                    for (int j = 0; j < SHORT; j++) lane[j] = OP(lane[j], t[i + j]);         \
                for (; i < inner; i++) lane[0] = OP(lane[0], t[i]);                          \
                for (int j = 0; j < 8; j++) lane[j] = OP(lane[j], lane[j + 8]);              \
                for (int j = 0; j < 4; j++) lane[j] = OP(lane[j], lane[j + 4]);              \
                to[k] = (double)OP(OP(lane[0], lane[2]), OP(lane[1], lane[3]));              \
            }                                                                                \
    }                                                                                        \
    SHARED void NAME(f##_rows)(M *restrict sum, const M *restrict t, int64_t n) {            \
        for (int64_t i = 0; i < n; i++) sum[i] = OP(sum[i], t[i]);                           \
    }
FOLD_OF(add, ADD)
FOLD_OF(min, MIN)
FOLD_OF(max, MAX)
#undef FOLD_OF

SHARED M NAME(fold)(int fold, const M *t, int64_t n) {
    switch (fold) {
    case FOLD_min: return NAME(min_long)(t, n, (M)INFINITY);
    case FOLD_max: return NAME(max_long)(t, n, (M)-INFINITY);
    default: return NAME(add_long)(t, n, 0);
    }
}

static void NAME(fold_groups)(int fold, double *to, const M *t, int64_t groups, int64_t inner) {
    switch (fold) {
    case FOLD_min: NAME(min_groups)(to, t, groups, inner); break;
    case FOLD_max: NAME(max_groups)(to, t, groups, inner); break;
    default: NAME(add_groups)(to, t, groups, inner);
    }
}

SHARED void NAME(fold_rows)(int fold, M *sum, const M *t, int64_t n) {
    switch (fold) {
    case FOLD_min: NAME(min_rows)(sum, t, n); break;
    case FOLD_max: NAME(max_rows)(sum, t, n); break;
    default: NAME(add_rows)(sum, t, n);
    }
}

typedef struct {
    ALIGNED M first[BLOCK], second[BLOCK];
} NAME(Terms);

/* ds = g * slope, dz = -g * s outside the range (where there is a zero point): the terms of the two sums */
SHARED void NAME(learned_terms)(NAME(Terms) *t, const Call *c, const M *restrict g, const M *restrict x,
                                const NAME(Params) *p, int64_t n) {
    M quant_min = (M)c->quant_min, quant_max = (M)c->quant_max, s0 = *p->s, z0 = *p->z;
    const M *restrict each_s = p->s, *restrict each_z = p->z;
    M *restrict first = t->first, *restrict second = t->second;
#define TERMS(S, Z, BELOW, ABOVE, INSIDE)                                       \
    for (int64_t i = 0; i < n; i++) {                                           \
        M s = S, low = quant_min - Z, high = quant_max - Z, v = x[i] / s;       \
        int below = x[i] BELOW low * s, above = x[i] ABOVE high * s;            \
        M slope = above ? high : below ? low : (INSIDE);                        \
        (void)v;                                                                \
        M product = g[i] * slope;                                               \
        first[i] = x[i] == x[i] ? product : 0;                                  \
    }                                                                           \
    for (int64_t i = 0; i < (c->reduce.two ? n : 0); i++) {                     \
        M s = S, low = quant_min - Z, high = quant_max - Z;                     \
        int outside = (x[i] BELOW low * s) | (x[i] ABOVE high * s);             \
        second[i] = outside ? -g[i] * s : 0;                                    \
    }
    if (c->pact && p->uniform) { TERMS(s0, z0, <=, >=, (M)0) }
    else if (c->pact) { TERMS(each_s[i], each_z[i], <=, >=, (M)0) }
    else if (p->uniform) { TERMS(s0, z0, <, >, RINT(v) - v) }
    else { TERMS(each_s[i], each_z[i], <, >, RINT(v) - v) }
#undef TERMS
}

/* the terms of a block's reduction, which are written elementwise; of a learned scale dx too */
SHARED void NAME(terms)(NAME(Terms) *t, const Call *c, int64_t i, int64_t n) {
    ALIGNED M yb[BLOCK], gb[BLOCK], xb[BLOCK];
    const M *restrict x = NAME(view)(xb, c->x, c->x_type, i, n);
    switch (c->reduction) {
    case REDUCE_abs_max:
        for (int64_t j = 0; j < n; j++) t->first[j] = FABS(x[j]) <= M_MAX ? FABS(x[j]) : 0;
        break;
    case REDUCE_min_max:
        for (int64_t j = 0; j < n; j++) t->first[j] = FABS(x[j]) <= M_MAX ? x[j] : (M)INFINITY;
        for (int64_t j = 0; j < n; j++) t->second[j] = FABS(x[j]) <= M_MAX ? x[j] : (M)-INFINITY;
        break;
    case REDUCE_learned: {
        NAME(Params) p;
        NAME(start)(&p, c);
        const M *g = NAME(view)(gb, c->g, c->g_type, i, n);
        NAME(spread)(&p, c, i, n);
        NAME(map_block)(c, yb, g, x, &p, i, n);
        NAME(learned_terms)(t, c, g, x, &p, n);
    }
    }
}

/* One unit of a reduction to its partial results; see Call. */
static void NAME(reduce_unit)(const Call *c, int64_t unit) {
    const Reduce *r = &c->reduce;
    NAME(Terms) t;
    if (r->chunks) { /* one chunk of one run of ``inner`` elements */
        int64_t run = unit / r->chunks, from = unit % r->chunks * CHUNK;
        int64_t to = from + CHUNK < r->inner ? from + CHUNK : r->inner;
        double first = START[r->fold[0]], second = START[r->fold[1]];
        for (int64_t i = from; i < to; i += BLOCK) {
            int64_t n = to - i < BLOCK ? to - i : BLOCK;
            NAME(terms)(&t, c, run * r->inner + i, n);
            first = merge(r->fold[0], first, (double)NAME(fold)(r->fold[0], t.first, n));
            if (r->two) second = merge(r->fold[1], second, (double)NAME(fold)(r->fold[1], t.second, n));
        }
        r->partial[0][unit] = first;
        if (r->two) r->partial[1][unit] = second;
        return;
    }
    /* a share of the rows of one period, over a piece of its columns */
    int64_t piece = unit % r->pieces, share = unit / r->pieces % r->shares, period = unit / r->pieces / r->shares;
    int64_t width = r->channels * r->inner, column = piece * r->piece;
    int64_t n = width - column < r->piece ? width - column : r->piece;
    int64_t together = r->pieces == 1 ? BLOCK / width : 1; /* narrow rows are added up several at a time */
    NAME(Terms) sum;
    for (int64_t j = 0; j < n * together; j++) {
        sum.first[j] = (M)START[r->fold[0]];
        sum.second[j] = (M)START[r->fold[1]];
    }
    int64_t last = r->rows * (share + 1) / r->shares;
    for (int64_t row = r->rows * share / r->shares; row < last; row += together) {
        int64_t count = n * (last - row < together ? last - row : together);
        NAME(terms)(&t, c, (period * r->rows + row) * width + column, count);
        NAME(fold_rows)(r->fold[0], sum.first, t.first, count);
        if (r->two) NAME(fold_rows)(r->fold[1], sum.second, t.second, count);
    }
    for (int64_t k = 1; k < together; k++) {
        NAME(fold_rows)(r->fold[0], sum.first, sum.first + k * n, n);
        if (r->two) NAME(fold_rows)(r->fold[1], sum.second, sum.second + k * n, n);
    }
    int64_t at = (period * r->shares + share) * r->channels + column / r->inner;
    NAME(fold_groups)(r->fold[0], r->partial[0] + at, sum.first, n / r->inner, r->inner);
    if (r->two) NAME(fold_groups)(r->fold[1], r->partial[1] + at, sum.second, n / r->inner, r->inner);
}

/* ---- scale and zero point from a group's own range, and y, while the group is in cache ---- */

SHARED void NAME(own_params)(const Call *c, double first, double second, M *scale, M *zero_point) {
    M quant_min = (M)c->quant_min, quant_max = (M)c->quant_max, floor = (M)1e-12;
    if (c->reduction == REDUCE_abs_max) {
        M s = (M)first / quant_max;
        *scale = s < floor ? floor : s, *zero_point = 0;
        return;
    }
    M lo = (M)first, hi = (M)second, steps = quant_max - quant_min;
    lo = FABS(lo) <= M_MAX && lo < 0 ? lo : 0; /* widened to hold 0 */
    hi = FABS(hi) <= M_MAX && hi > 0 ? hi : 0;
    M s = (hi - lo) / steps;
    s = s <= M_MAX ? s : hi / steps - lo / steps; /* a range wider than the type's largest number */
    s = s < floor ? floor : s;
    *scale = s, *zero_point = NAME(clamp)(RINT(quant_min - lo / s), quant_min, quant_max);
}

SHARED int NAME(has_nan)(const M *x, int64_t n) {
    int found = 0;
    for (int64_t i = 0; i < n; i++) found |= x[i] != x[i];
    return found;
}

static void NAME(per_batch_unit)(const Call *c, int64_t unit) {
    ALIGNED M yb[BLOCK], xb[BLOCK];
    double first[BLOCK], second[BLOCK];
    NAME(Params) p;
    NAME(Terms) t;
    const Reduce *r = &c->reduce;
    int64_t size = r->chunks ? r->inner : r->piece, from = unit * size; /* one group, or a block of small ones */
    int64_t to = from + size < c->layout.elements ? from + size : c->layout.elements;
    int64_t groups = (to - from) / r->inner, group = from / r->inner;
    if (r->chunks) {
        *first = START[r->fold[0]], *second = START[r->fold[1]];
        for (int64_t i = from; i < to; i += BLOCK) {
            int64_t n = to - i < BLOCK ? to - i : BLOCK;
            NAME(terms)(&t, c, i, n);
            *first = merge(r->fold[0], *first, (double)NAME(fold)(r->fold[0], t.first, n));
            if (r->two) *second = merge(r->fold[1], *second, (double)NAME(fold)(r->fold[1], t.second, n));
        }
    } else {
        NAME(terms)(&t, c, from, to - from);
        NAME(fold_groups)(r->fold[0], first, t.first, groups, r->inner);
        if (r->two) NAME(fold_groups)(r->fold[1], second, t.second, groups, r->inner);
    }
    p.s = p.s_block, p.z = p.z_block, p.uniform = groups == 1;
    for (int64_t k = 0; k < groups; k++) {
        M s, z;
        NAME(own_params)(c, first[k], second[k], &s, &z);
        ((M *)c->first)[group + k] = s;
        if (c->own_zero_point) c->own_zero_point[group + k] = (int32_t)z;
        NAME(set)(p.s_block + k * r->inner, s, p.uniform ? 1 : r->inner);
        NAME(set)(p.z_block + k * r->inner, z, p.uniform ? 1 : r->inner);
    }
    for (int64_t i = from; i < to; i += BLOCK) { /* the second time from the cache */
        int64_t n = to - i < BLOCK ? to - i : BLOCK;
        const M *x = NAME(view)(xb, c->x, c->x_type, i, n);
        if (c->marks_nan && NAME(has_nan)(x, n))
            for (int64_t k = 0; k < groups; k++) /* one that is many blocks, or many in this block */
                if (groups == 1 || NAME(has_nan)(x + k * r->inner, r->inner)) ((M *)c->first)[group + k] = (M)NAN;
        NAME(map_block)(c, yb, x, x, &p, i, n);
    }
}

#undef ELEMENT
#undef ADD
#undef MIN
#undef MAX
