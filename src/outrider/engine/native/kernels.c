/* One whole forward pass of a Llama-shaped model on one CPU thread, in bfloat16 or, with -DFLOAT32, in float32.
 *
 * Speed: at few rows a step costs what reading the weights costs, so weights lie in one arena in the order
 * they are read, and everything between two matrices happens in cache, inside one call.
 *
 * Numerics: what a row computes never depends on the rows beside it. Every dot product runs over k in the
 * same order whatever the number of rows, and attention runs over fixed spans of 128 keys from position 0.
 * Sums are float32; values are rounded to the element type where a layer's tensors are stored.
 *
 * Layouts. A "cell" is what is multiplied in one lane at a time, 4 bytes: a pair of bfloat16 or one float32, PAIR
 * elements. A "tile" is 32 deep and 16 wide, 512 elements; of bfloat16 it is what one AMX register holds.
 *   weights      [group of 64 outputs][k / 32][4][32 / PAIR][16 outputs][PAIR]
 *   keys         [block][kv head][16 keys][d / PAIR][16 keys][PAIR]
 *   values       [block][kv head][32 keys][d / 16][32 / PAIR][16 d][PAIR]
 * Legend: M rows, N outputs, K inputs, D head size, G query heads a kv head.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AMX_BF16__) && defined(__linux__) && !defined(FLOAT32)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_AMX 1
#else
#define HAVE_AMX 0
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

enum { DEPTH = 32, TILE = DEPTH * 16, GROUP = 64, KEYS = 32, SPAN = 128, ROWS = 16, PANEL = 1 << 20 };

static int use_amx = 0;

/* ---- vectors, and the element type in them */

static inline f32x16 load_f32(const float *p) { f32x16 v; memcpy(&v, p, 64); return v; }
static inline void store_f32(float *p, f32x16 v) { memcpy(p, &v, 64); }
static inline f32x16 splat(float x) { return x - (f32x16){0}; }

#ifdef FLOAT32
typedef float element;
enum { PAIR = 1 };

static inline f32x16 load(const element *p) { return load_f32(p); }
static inline void store(element *p, f32x16 v) { store_f32(p, v); }
static inline float to_f32(element x) { return x; }

/* Element i of 16 cells. */
static inline f32x16 lanes_of(const element *cells, int i) { (void)i; return load_f32(cells); }
#else
typedef uint16_t element;
enum { PAIR = 2 };

static inline f32x16 load(const element *p) {
    u16x16 half;
    memcpy(&half, p, 32);
    return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
}

static inline void store(element *p, f32x16 v) {
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    u32x16 nan = (u32x16)(v != v);
    u16x16 half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), u16x16);
    memcpy(p, &half, 32);
}

static inline float to_f32(element x) { uint32_t b = (uint32_t)x << 16; float f; memcpy(&f, &b, 4); return f; }

/* Element i of 16 cells. */
static inline f32x16 lanes_of(const element *cells, int i) {
    u32x16 both;
    memcpy(&both, cells, 64);
    return (f32x16)(i ? both & 0xffff0000u : both << 16);
}
#endif

static inline f32x16 select16(i32x16 mask, f32x16 yes, f32x16 no) {
    return (f32x16)((mask & (i32x16)yes) | (~mask & (i32x16)no));
}

static inline f32x16 larger(f32x16 a, f32x16 b) { return select16(a > b, a, b); } /* b where either is NaN */

/* Halving: lanes 0-7 with 8-15, then 4 apart, 2 apart, 1 apart. A fixed order, whatever the compiler. */
static const i32x16 APART[4] = {{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7},
                                {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11},
                                {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13},
                                {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}};
#if defined(__clang__)
static inline f32x16 shuffled(f32x16 v, i32x16 from) {
    f32x16 out;
    for (int i = 0; i < 16; i++) out[i] = v[from[i]];
    return out;
}
#else
static inline f32x16 shuffled(f32x16 v, i32x16 from) { return __builtin_shuffle(v, from); }
#endif

static inline float sum(f32x16 v) {
    for (int i = 0; i < 4; i++) v += shuffled(v, APART[i]);
    return v[0];
}

static inline float maximum(f32x16 v) {
    for (int i = 0; i < 4; i++) v = larger(v, shuffled(v, APART[i]));
    return v[0];
}

/* e^x to 2 ulp: x = n ln 2 + r, polynomial in r, exponent n by bits. Below e^-87 is 0; NaN stays NaN. */
static inline f32x16 exp16(f32x16 x) {
    i32x16 keep = x > -87.0f;
    f32x16 nan = select16(x != x, x, splat(0.0f));
    x = select16(x < 88.0f, x, splat(88.0f));
    x = select16(keep, x, splat(0.0f));
    f32x16 scaled = x * 1.44269504088896341f;
    f32x16 half = select16(scaled < 0.0f, splat(-0.5f), splat(0.5f));
    i32x16 n = __builtin_convertvector(scaled + half, i32x16);
    f32x16 whole = __builtin_convertvector(n, f32x16);
    f32x16 r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    f32x16 power = (f32x16)((n + 127) << 23);
    return select16(keep, p * power, nan);
}

/* ---- AMX: permission once a process, shapes once a matrix */

int outrider_native_init(int allow_amx) {
    (void)allow_amx;
#if HAVE_AMX
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    use_amx = allow_amx && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#endif
    return use_amx;
}

#if HAVE_AMX
/* Tiles 0-3 accumulate `rows` x 16 floats, 4 holds `rows` x 32 of A, 5-7 hold 16 pairs x 16 of B.
 * Beyond 16 rows: 0, 1 and 4 for the first 16, 2, 3 and 5 for the rest, 6 and 7 for B. */
static void configure(int rows) {
    struct { uint8_t palette, start; uint8_t zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
        config.bytes[t] = 64;
        if (rows > ROWS) config.rows[t] = t == 2 || t == 3 || t == 5 ? rows - ROWS : ROWS;
        else config.rows[t] = t <= 4 ? rows : ROWS;
    }
    _tile_loadconfig(&config);
}
#endif

/* ---- matrices */

/* weight [N][K] row-major to tiles; N is padded with zeros to a multiple of 64, K is a multiple of 32. */
void outrider_pack(const element *weight, element *packed, int64_t N, int64_t K) {
    for (int64_t g = 0; g < N; g += GROUP)
        for (int64_t k = 0; k < K; k += DEPTH)
            for (int64_t column = g; column < g + GROUP; column += 16)
                for (int64_t cell = k; cell < k + DEPTH; cell += PAIR)
                    for (int64_t n = column; n < column + 16; n++)
                        for (int64_t i = cell; i < cell + PAIR; i++) *packed++ = n < N ? weight[n * K + i] : 0;
}

/* One row of a packed matrix: the embedding of a token where it is tied to the head. */
static void unpack_row(const element *packed, int64_t n, int64_t K, element *row) {
    const element *tile = packed + n / GROUP * GROUP * K + n % GROUP / 16 * TILE + n % 16 * PAIR;
    for (int64_t k = 0; k < K; k += DEPTH, tile += 4 * TILE)
        for (int64_t i = 0; i < DEPTH; i += PAIR) memcpy(row + k + i, tile + i * 16, 4);
}

/* Rows x 2 vectors of sums in registers: 24 of 32 with AVX-512; what AVX2 and NEON hold of these vectors. */
#ifdef __AVX512F__
enum { ABREAST = 12 };
#else
enum { ABREAST = 3 };
#endif

/* out [rows][32] += x [rows][depth] times two columns of tiles, `apart` elements from each other, over k in order. */
static inline __attribute__((always_inline)) void rows_product(const element *x, int64_t stride, int rows,
                                                               const element *w, int64_t apart, int64_t depth,
                                                               float *out, int64_t out_stride) {
    f32x16 left[ABREAST], right[ABREAST];
    for (int r = 0; r < rows; r++) {
        left[r] = load_f32(out + r * out_stride);
        right[r] = load_f32(out + r * out_stride + 16);
    }
    for (int64_t k = 0; k < depth; k += PAIR, w += 16 * PAIR)
        for (int i = 0; i < PAIR; i++) {
            f32x16 a = lanes_of(w, i), b = lanes_of(w + apart, i);
            for (int r = 0; r < rows; r++) {
                float value = to_f32(x[r * stride + k + i]);
                left[r] += a * value;
                right[r] += b * value;
            }
        }
    for (int r = 0; r < rows; r++) {
        store_f32(out + r * out_stride, left[r]);
        store_f32(out + r * out_stride + 16, right[r]);
    }
}

/* The same for any number of rows. Each case compiles for its own, so that the sums stay in registers. */
static void columns_product(const element *x, int64_t stride, int rows, const element *w, int64_t apart, int64_t depth,
                            float *out, int64_t out_stride) {
    for (; rows > 0; rows -= ABREAST, x += ABREAST * stride, out += ABREAST * out_stride)
        switch (rows < ABREAST ? rows : ABREAST) {
#define CASE(n) case n: rows_product(x, stride, n, w, apart, depth, out, out_stride); break;
            CASE(1) CASE(2) CASE(3)
#ifdef __AVX512F__
            CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
        }
}

static inline void prefetch(const element *w, int elements) {
    for (int at = 0; at < elements; at += 16 * PAIR) __builtin_prefetch(w + at);
}

#if HAVE_AMX
/* Up to 16 rows: the group's four columns of tiles at once. */
static void narrow_product(const element *x, int64_t stride, const element *w, int64_t ktiles, int first, float *out) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t kt = 0; kt < ktiles; kt++, x += 32, w += 4 * TILE) {
        if (first) prefetch(w + 8 * TILE, 4 * TILE);
        _tile_loadd(4, x, stride * 2);
        _tile_loadd(5, w, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, w + TILE, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, w + 2 * TILE, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, w + 3 * TILE, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, out, GROUP * 4);
    _tile_stored(1, out + 16, GROUP * 4);
    _tile_stored(2, out + 32, GROUP * 4);
    _tile_stored(3, out + 48, GROUP * 4);
}

/* 17 to 32 rows: two columns at a time, each weight tile serves twice. */
static void wide_product(const element *x, int64_t stride, const element *w, int64_t ktiles, int first, float *out) {
    for (int half = 0; half < 2; half++, w += 2 * TILE, out += 32) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (int64_t kt = 0; kt < ktiles; kt++) {
            const element *tiles = w + kt * 4 * TILE;
            if (first) prefetch(tiles + 8 * TILE, 2 * TILE);
            _tile_loadd(4, x + kt * 32, stride * 2);
            _tile_loadd(5, x + ROWS * stride + kt * 32, stride * 2);
            _tile_loadd(6, tiles, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            _tile_loadd(7, tiles + TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out, GROUP * 4);
        _tile_stored(1, out + 16, GROUP * 4);
        _tile_stored(2, out + ROWS * GROUP, GROUP * 4);
        _tile_stored(3, out + ROWS * GROUP + 16, GROUP * 4);
    }
}
#endif

/* out [rows][64] = x [rows][K] times one group; rows <= 32. `first`: its weights come from memory. */
static void group_product(const element *x, int64_t stride, int rows, const element *w, int64_t ktiles, int first,
                          float *out) {
#if HAVE_AMX
    if (use_amx) {
        (rows > ROWS ? wide_product : narrow_product)(x, stride, w, ktiles, first, out);
        return;
    }
#endif
    memset(out, 0, (size_t)(rows * GROUP) * sizeof(float));
    for (int64_t kt = 0; kt < ktiles; kt++, x += DEPTH, w += 4 * TILE) {
        if (first) prefetch(w + 8 * TILE, 4 * TILE);
        columns_product(x, stride, rows, w, TILE, DEPTH, out, GROUP);
        columns_product(x, stride, rows, w + 2 * TILE, TILE, DEPTH, out + 32, GROUP);
    }
}

typedef enum { STORE, ADD, SILU_MUL, FLOATS } Finish;

/* out = finish(x [M][K] times packed [N][K] + bias).
 *   STORE     out [M][N]
 *   ADD       out [M][N] += the product: the residual stream
 *   SILU_MUL  each group is 32 gates and their 32 ups; out [M][N / 2] = silu(gate) * up
 *   FLOATS    out float [M][N] */
static void finish_rows(const float *part, int rows, int64_t m, int64_t g, int64_t N, const element *bias,
                        Finish finish, void *out) {
    int64_t width = N - g * GROUP < GROUP ? N - g * GROUP : GROUP;
    for (int row = 0; row < rows; row++) {
        const float *value = part + row * GROUP;
        if (finish == SILU_MUL) {
            element *to = (element *)out + (m + row) * (N / 2) + g * 32;
            for (int i = 0; i < 32; i += 16) {
                f32x16 gate = load_f32(value + i), up = load_f32(value + 32 + i);
                store(to + i, gate / (1.0f + exp16(-gate)) * up);
            }
            continue;
        }
        for (int64_t i = 0; i < width; i += 16) {
            f32x16 v = load_f32(value + i);
            int64_t at = (m + row) * N + g * GROUP + i;
            if (bias) v += load(bias + g * GROUP + i);
            if (finish == FLOATS) { store_f32((float *)out + at, v); continue; }
            if (finish == ADD) v += load((element *)out + at);
            store((element *)out + at, v);
        }
    }
}

static void matmul(const element *x, int64_t M, const element *w, int64_t N, int64_t K, const element *bias,
                   Finish finish, void *out) {
    float part[2 * ROWS * GROUP] __attribute__((aligned(64)));
    int64_t groups = (N + GROUP - 1) / GROUP, ktiles = K / 32, group_size = ktiles * 4 * TILE;
    /* Weights are read once, a panel that the second-level cache holds at a time; rows pass over the panel. */
    int64_t panel = PANEL / (group_size * (int64_t)sizeof(element));
    if (panel < 1) panel = 1;
    int configured = 0;
    for (int64_t begin = 0; begin < groups; begin += panel)
        for (int64_t m = 0; m < M; m += 2 * ROWS) {
            int rows = M - m < 2 * ROWS ? (int)(M - m) : 2 * ROWS;
#if HAVE_AMX
            if (use_amx && rows != configured) configure(configured = rows);
#else
            (void)configured;
#endif
            for (int64_t g = begin; g < groups && g < begin + panel; g++) {
                group_product(x + m * K, K, rows, w + g * group_size, ktiles, m == 0, part);
                finish_rows(part, rows, m, g, N, bias, finish, out);
            }
        }
}

static void rms_norm(const element *x, const element *weight, element *out, int64_t width, float eps) {
    f32x16 squares = {0};
    for (int64_t i = 0; i < width; i += 16) { f32x16 v = load(x + i); squares += v * v; }
    float scale = 1.0f / sqrtf(sum(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += 16) store(out + i, load(x + i) * scale * load(weight + i));
}

/* ---- attention over the paged cache */

typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, intermediate, vocab, layers, block_size;
    float eps, scale;
    int32_t tied;
    const element *embedding;      /* [vocab][hidden], or the packed head where tied */
    const element *final_norm, *head;
    const float *cosines, *sines; /* [positions][D / 2] */
} Model;

typedef struct {
    const element *input_norm, *post_norm, *q_norm, *k_norm; /* the last two may be null */
    const element *qkv, *qkv_bias, *o, *gate_up, *down;      /* packed; the bias may be null */
    element *keys, *values;                                  /* this layer's pools */
    int64_t window;                                       /* positions seen, this one included; 0: all */
} Layer;

typedef struct {
    int64_t rows, spans, logit_rows;
    const int64_t *tokens, *positions, *wanted; /* [rows], [rows], [logit_rows] */
    const int64_t *starts, *counts, *lengths;   /* [spans] */
    const int64_t *tables;                      /* [spans + 1]: where a span's blocks begin in `blocks` */
    const int64_t *blocks;
} Batch;

/* Rotates a head in place (the two halves of it are the pairs), after its norm where there is one. */
static void rotate(element *head, const element *norm, float eps, const float *cosine, const float *sine, int64_t D) {
    if (norm) rms_norm(head, norm, head, D, eps);
    for (int64_t i = 0; i < D / 2; i += 16) {
        f32x16 a = load(head + i), b = load(head + D / 2 + i);
        f32x16 c = load_f32(cosine + i), s = load_f32(sine + i);
        store(head + i, a * c - b * s);
        store(head + D / 2 + i, b * c + a * s);
    }
}

/* A key and its value into the cache. What sees a value sees its key: a value that is not finite is kept as 0 and
 * makes its key NaN, because rows that do not see it multiply it by a weight of 0, and 0 * NaN is not 0. */
static void remember(const Model *m, const Layer *layer, int64_t block, int64_t offset, int64_t h, const element *key,
                     const element *value) {
    int64_t D = m->head_dim, cell = (block * m->kv_heads + h) * m->block_size * D;
    element *k = layer->keys + cell + offset / 16 * 16 * D + offset % 16 * PAIR;
    element *v = layer->values + cell + offset / KEYS * KEYS * D;
    if (offset % KEYS == 0) memset(v, 0, (size_t)(KEYS * D) * sizeof(element)); /* an earlier owner's */
    v += offset % KEYS / PAIR * PAIR * 16 + offset % PAIR;
    int finite = 1;
    for (int64_t d = 0; d < D; d++) finite &= fabsf(to_f32(value[d])) < INFINITY;
    for (int64_t d = 0; d < D; d += PAIR)
        if (finite) memcpy(k + d * 16, key + d, 4);
        else memset(k + d * 16, 0xff, 4); /* NaN in both types */
    for (int64_t d = 0; d < D; d++) v[d / 16 * TILE + d % 16 * PAIR] = finite ? value[d] : 0;
}

/* scores [rows][SPAN] = q [rows][D] times 32 keys. */
static void score(const element *q, int rows, const element *k, int64_t D, float *scores) {
#if HAVE_AMX
    if (use_amx) {
        _tile_zero(0); _tile_zero(1);
        for (int64_t d = 0; d < D / 32; d++) {
            _tile_loadd(4, q + d * 32, D * 2);
            _tile_loadd(5, k + d * TILE, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, k + 16 * D + d * TILE, 64);
            _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, scores, SPAN * 4);
        _tile_stored(1, scores + 16, SPAN * 4);
        return;
    }
#endif
    for (int row = 0; row < rows; row++) memset(scores + row * SPAN, 0, KEYS * sizeof(float));
    columns_product(q, D, rows, k, 16 * D, D, scores, SPAN);
}

/* out [rows][D] += weights [rows][SPAN] times the values of `groups` groups of 32 keys. */
static void gather(const element *weights, int rows, const element *const *values, int groups, int64_t D, float *out) {
#if HAVE_AMX
    if (use_amx) {
        for (int64_t d = 0; d < D / 16; d++) {
            _tile_loadd(0, out + d * 16, D * 4);
            for (int g = 0; g < groups; g++) {
                _tile_loadd(4, weights + g * KEYS, SPAN * 2);
                _tile_loadd(5, values[g] + d * TILE, 64);
                _tile_dpbf16ps(0, 4, 5);
            }
            _tile_stored(0, out + d * 16, D * 4);
        }
        return;
    }
#endif
    for (int g = 0; g < groups; g++)
        for (int64_t d = 0; d < D; d += 32)
            columns_product(weights + g * KEYS, SPAN, rows, values[g] + d * KEYS, TILE, KEYS, out + d, D);
}

/* What one query row may see of a span of keys: lanes `from`..`to`, both included; none where to < from. */
typedef struct { int32_t from, to; } Range;

static inline Range visible(const Layer *layer, int64_t at, int64_t base) {
    int64_t begin = layer->window && at >= layer->window ? at - layer->window + 1 : 0;
    Range seen = {(int32_t)(begin > base ? begin - base : 0), (int32_t)(at - base)};
    return seen;
}

/* Up to 16 query rows of one sequence and kv head, over all keys they may see: softmax with running maxima
 * (Milakov and Gimelshein 2018, arXiv 1805.02867), spans of 128 keys. Row r is at position `at[r]`. */
static void attend(const Model *m, const Layer *layer, const int64_t *blocks, int64_t h, const element *q, int rows,
                   const int64_t *at, float *out) {
    float scores[ROWS * SPAN] __attribute__((aligned(64)));
    element weights[ROWS * SPAN] __attribute__((aligned(64)));
    float top[ROWS];
    f32x16 total[ROWS];
    int64_t D = m->head_dim, last = 0, first = INT64_MAX;
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const f32x16 minus = splat(-INFINITY);
    memset(out, 0, (size_t)(ROWS * D) * sizeof(float));
    for (int r = 0; r < rows; r++) {
        int64_t begin = visible(layer, at[r], 0).from;
        top[r] = -INFINITY;
        total[r] = splat(0);
        if (at[r] > last) last = at[r];
        if (begin < first) first = begin;
    }
#if HAVE_AMX
    if (use_amx) configure(rows);
#endif
    for (int64_t base = first / SPAN * SPAN; base <= last; base += SPAN) {
        const element *values[SPAN / KEYS];
        int groups = 0;
        for (int64_t key = base; key <= last && key < base + SPAN; key += KEYS, groups++) {
            int64_t cell = (blocks[key / m->block_size] * m->kv_heads + h) * m->block_size * D;
            int64_t inside = key % m->block_size * D;
            score(q, rows, layer->keys + cell + inside, D, scores + groups * KEYS);
            values[groups] = layer->values + cell + inside;
        }
        for (int r = 0; r < rows; r++) {
            Range seen = visible(layer, at[r], base);
            if (seen.to < seen.from || seen.from >= groups * KEYS) {
                memset(weights + r * SPAN, 0, SPAN * sizeof(element));
                continue;
            }
            f32x16 s[SPAN / 16], best = minus;
            for (int i = 0; i < 2 * groups; i++) {
                s[i] = load_f32(scores + r * SPAN + i * 16) * m->scale;
                if (seen.from > i * 16 || seen.to < i * 16 + 15) {
                    i32x16 lane = lanes + i * 16;
                    s[i] = select16((lane >= seen.from) & (lane <= seen.to), s[i], minus);
                }
                best = larger(s[i], best);
            }
            float peak = maximum(best);
            if (peak > top[r]) {
                f32x16 shrink = exp16(splat(top[r] - peak));
                total[r] *= shrink;
                for (int64_t d = 0; d < D; d += 16) store_f32(out + r * D + d, load_f32(out + r * D + d) * shrink);
                top[r] = peak;
            }
            for (int i = 0; i < 2 * groups; i++) {
                f32x16 weight = exp16(s[i] - top[r]); /* a NaN among the scores makes the total a NaN */
                store(weights + r * SPAN + i * 16, weight);
                total[r] += weight;
            }
        }
        gather(weights, rows, values, groups, D, out);
    }
    for (int r = 0; r < rows; r++) {
        float whole = sum(total[r]);
        for (int64_t d = 0; d < D; d += 16) store_f32(out + r * D + d, load_f32(out + r * D + d) / whole);
    }
}

static void attention(const Model *m, const Layer *layer, const Batch *batch, element *qkv, element *out) {
    int64_t D = m->head_dim, G = m->heads / m->kv_heads, wide = (m->heads + 2 * m->kv_heads) * D;
    for (int64_t s = 0; s < batch->spans; s++) {
        const int64_t *blocks = batch->blocks + batch->tables[s];
        for (int64_t i = 0; i < batch->counts[s]; i++) {
            int64_t row = batch->starts[s] + i, at = batch->lengths[s] - batch->counts[s] + i;
            const float *cosine = m->cosines + batch->positions[row] * (D / 2);
            const float *sine = m->sines + batch->positions[row] * (D / 2);
            element *q = qkv + row * wide, *k = q + m->heads * D, *v = k + m->kv_heads * D;
            for (int64_t h = 0; h < m->heads; h++) rotate(q + h * D, layer->q_norm, m->eps, cosine, sine, D);
            for (int64_t h = 0; h < m->kv_heads; h++) {
                rotate(k + h * D, layer->k_norm, m->eps, cosine, sine, D);
                remember(m, layer, blocks[at / m->block_size], at % m->block_size, h, k + h * D, v + h * D);
            }
        }
        for (int64_t h = 0; h < m->kv_heads; h++)
            for (int64_t done = 0; done < batch->counts[s] * G; done += ROWS) {
                element q[ROWS * 256] __attribute__((aligned(64)));
                float result[ROWS * 256] __attribute__((aligned(64)));
                int64_t at[ROWS];
                int rows = batch->counts[s] * G - done < ROWS ? (int)(batch->counts[s] * G - done) : ROWS;
                for (int r = 0; r < rows; r++) {
                    int64_t i = (done + r) / G, row = batch->starts[s] + i;
                    at[r] = batch->lengths[s] - batch->counts[s] + i;
                    memcpy(q + r * D, qkv + row * wide + (h * G + (done + r) % G) * D, (size_t)D * sizeof(element));
                }
                attend(m, layer, blocks, h, q, rows, at, result);
                for (int r = 0; r < rows; r++) {
                    int64_t row = batch->starts[s] + (done + r) / G;
                    element *to = out + row * m->heads * D + (h * G + (done + r) % G) * D;
                    for (int64_t d = 0; d < D; d += 16) store(to + d, load_f32(result + r * D + d));
                }
            }
    }
}

/* ---- the forward pass */

/* scratch holds rows * (3 * hidden + (heads + 2 kv_heads) * D + heads * D + intermediate) values. */
void outrider_forward(const Model *m, const Layer *layers, const Batch *batch, element *scratch, float *logits) {
    int64_t R = batch->rows, H = m->hidden, attended = m->heads * m->head_dim;
    int64_t wide = (m->heads + 2 * m->kv_heads) * m->head_dim;
    element *hidden = scratch, *normed = hidden + R * H, *qkv = normed + R * H, *mixed = qkv + R * wide;
    element *middle = mixed + R * attended, *last = middle + R * m->intermediate;
    for (int64_t r = 0; r < R; r++)
        if (m->tied) unpack_row(m->embedding, batch->tokens[r], H, hidden + r * H);
        else memcpy(hidden + r * H, m->embedding + batch->tokens[r] * H, (size_t)H * sizeof(element));
    for (const Layer *layer = layers; layer < layers + m->layers; layer++) {
        for (int64_t r = 0; r < R; r++) rms_norm(hidden + r * H, layer->input_norm, normed + r * H, H, m->eps);
        matmul(normed, R, layer->qkv, wide, H, layer->qkv_bias, STORE, qkv);
        attention(m, layer, batch, qkv, mixed);
        matmul(mixed, R, layer->o, H, attended, 0, ADD, hidden);
        for (int64_t r = 0; r < R; r++) rms_norm(hidden + r * H, layer->post_norm, normed + r * H, H, m->eps);
        matmul(normed, R, layer->gate_up, 2 * m->intermediate, H, 0, SILU_MUL, middle);
        matmul(middle, R, layer->down, H, m->intermediate, 0, ADD, hidden);
    }
    for (int64_t i = 0; i < batch->logit_rows; i++)
        rms_norm(hidden + batch->wanted[i] * H, m->final_norm, last + i * H, H, m->eps);
    if (batch->logit_rows) matmul(last, batch->logit_rows, m->head, m->vocab, H, 0, FLOATS, logits);
#if HAVE_AMX
    if (use_amx) _tile_release();
#endif
}
