/* One whole forward pass of a Llama-shaped model in bfloat16 on one CPU thread.
 *
 * Speed: at few rows a step costs what reading the weights costs, so weights lie in one arena in the order
 * they are read, and everything between two matrices happens in cache, inside one call.
 *
 * Numerics: what a row computes never depends on the rows beside it. Every dot product runs over k in the
 * same order whatever the number of rows, and attention runs over fixed spans of 128 keys from position 0.
 * Sums are float32; values are rounded to bfloat16 where a layer's tensors are stored.
 *
 * Layouts (a "tile" is 16 x 16 pairs of bfloat16, 1 KiB, what one AMX register holds):
 *   weights      [group of 64 outputs][k tile][4][16 k pairs][16 outputs][2]
 *   keys         [block][kv head][16 keys][d / 32][16 d pairs][16 keys][2]
 *   values       [block][kv head][32 keys][d / 16][16 key pairs][16 d][2]
 * Legend: M rows, N outputs, K inputs, D head size, G query heads a kv head.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_AMX 1
#else
#define HAVE_AMX 0
#endif

typedef uint16_t bf16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

enum { TILE = 512, GROUP = 64, KEYS = 32, SPAN = 128, ROWS = 16, PANEL = 1 << 20 };

static int use_amx = 0;

/* ---- bfloat16 and vectors */

static inline f32x16 load_f32(const float *p) { f32x16 v; memcpy(&v, p, 64); return v; }
static inline void store_f32(float *p, f32x16 v) { memcpy(p, &v, 64); }
static inline f32x16 splat(float x) { return x - (f32x16){0}; }

static inline f32x16 load_bf16(const bf16 *p) {
    u16x16 half;
    memcpy(&half, p, 32);
    return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
}

static inline void store_bf16(bf16 *p, f32x16 v) {
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    u32x16 nan = (u32x16)(v != v);
    u16x16 half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), u16x16);
    memcpy(p, &half, 32);
}

static inline float to_f32(bf16 x) { uint32_t b = (uint32_t)x << 16; float f; memcpy(&f, &b, 4); return f; }

static inline bf16 to_bf16(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    return x != x ? 0x7fc0 : (bf16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

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
void outrider_pack(const bf16 *weight, bf16 *packed, int64_t N, int64_t K) {
    int64_t groups = (N + GROUP - 1) / GROUP, ktiles = K / 32;
    for (int64_t g = 0; g < groups; g++)
        for (int64_t kt = 0; kt < ktiles; kt++)
            for (int j = 0; j < 4; j++)
                for (int pair = 0; pair < 16; pair++)
                    for (int lane = 0; lane < 16; lane++) {
                        int64_t n = g * GROUP + j * 16 + lane, k = kt * 32 + pair * 2;
                        *packed++ = n < N ? weight[n * K + k] : 0;
                        *packed++ = n < N ? weight[n * K + k + 1] : 0;
                    }
}

/* One row of a packed matrix: the embedding of a token where it is tied to the head. */
static void unpack_row(const bf16 *packed, int64_t n, int64_t K, bf16 *row) {
    const bf16 *tile = packed + (n / GROUP) * (K / 32) * 4 * TILE + ((n % GROUP) / 16) * TILE + (n % 16) * 2;
    for (int64_t kt = 0; kt < K / 32; kt++, tile += 4 * TILE)
        for (int pair = 0; pair < 16; pair++, row += 2) memcpy(row, tile + pair * 32, 4);
}

#if HAVE_AMX
static inline void prefetch(const bf16 *w, int elements) {
    for (int at = 0; at < elements; at += 32) _mm_prefetch((const char *)(w + at), _MM_HINT_T0);
}

/* Up to 16 rows: the group's four columns of tiles at once. */
static void narrow_product(const bf16 *x, int64_t stride, const bf16 *w, int64_t ktiles, int first, float *out) {
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
static void wide_product(const bf16 *x, int64_t stride, const bf16 *w, int64_t ktiles, int first, float *out) {
    for (int half = 0; half < 2; half++, w += 2 * TILE, out += 32) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (int64_t kt = 0; kt < ktiles; kt++) {
            const bf16 *tiles = w + kt * 4 * TILE;
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
static void group_product(const bf16 *x, int64_t stride, int rows, const bf16 *w, int64_t ktiles, int first,
                          float *out) {
#if HAVE_AMX
    if (use_amx) {
        (rows > ROWS ? wide_product : narrow_product)(x, stride, w, ktiles, first, out);
        return;
    }
#endif
    (void)first;
    for (int row = 0; row < rows; row++) {
        f32x16 total[4] = {{0}};
        const bf16 *tiles = w;
        for (int64_t kt = 0; kt < ktiles; kt++)
            for (int j = 0; j < 4; j++, tiles += TILE)
                for (int pair = 0; pair < 16; pair++) {
                    u32x16 both;
                    memcpy(&both, tiles + pair * 32, 64);
                    const bf16 *value = x + row * stride + kt * 32 + pair * 2;
                    total[j] += (f32x16)(both << 16) * to_f32(value[0]);
                    total[j] += (f32x16)(both & 0xffff0000u) * to_f32(value[1]);
                }
        for (int j = 0; j < 4; j++) store_f32(out + row * GROUP + j * 16, total[j]);
    }
}

typedef enum { STORE, ADD, SILU_MUL, FLOATS } Finish;

/* out = finish(x [M][K] times packed [N][K] + bias).
 *   STORE     out bf16 [M][N]
 *   ADD       out bf16 [M][N] += the product: the residual stream
 *   SILU_MUL  each group is 32 gates and their 32 ups; out bf16 [M][N / 2] = silu(gate) * up
 *   FLOATS    out float [M][N] */
static void finish_rows(const float *part, int rows, int64_t m, int64_t g, int64_t N, const bf16 *bias, Finish finish,
                        void *out) {
    int64_t width = N - g * GROUP < GROUP ? N - g * GROUP : GROUP;
    for (int row = 0; row < rows; row++) {
        const float *value = part + row * GROUP;
        if (finish == SILU_MUL) {
            bf16 *to = (bf16 *)out + (m + row) * (N / 2) + g * 32;
            for (int i = 0; i < 32; i += 16) {
                f32x16 gate = load_f32(value + i), up = load_f32(value + 32 + i);
                store_bf16(to + i, gate / (1.0f + exp16(-gate)) * up);
            }
            continue;
        }
        for (int64_t i = 0; i < width; i += 16) {
            f32x16 v = load_f32(value + i);
            int64_t at = (m + row) * N + g * GROUP + i;
            if (bias) v += load_bf16(bias + g * GROUP + i);
            if (finish == FLOATS) { store_f32((float *)out + at, v); continue; }
            if (finish == ADD) v += load_bf16((bf16 *)out + at);
            store_bf16((bf16 *)out + at, v);
        }
    }
}

static void matmul(const bf16 *x, int64_t M, const bf16 *w, int64_t N, int64_t K, const bf16 *bias, Finish finish,
                   void *out) {
    float part[2 * ROWS * GROUP] __attribute__((aligned(64)));
    int64_t groups = (N + GROUP - 1) / GROUP, ktiles = K / 32, group_size = ktiles * 4 * TILE;
    /* Weights are read once, a panel that the second-level cache holds at a time; rows pass over the panel. */
    int64_t panel = PANEL / (group_size * (int64_t)sizeof(bf16));
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

static void rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t width, float eps) {
    f32x16 squares = {0};
    for (int64_t i = 0; i < width; i += 16) { f32x16 v = load_bf16(x + i); squares += v * v; }
    float scale = 1.0f / sqrtf(sum(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += 16) store_bf16(out + i, load_bf16(x + i) * scale * load_bf16(weight + i));
}

/* ---- attention over the paged cache */

typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, intermediate, vocab, layers, block_size;
    float eps, scale;
    int32_t tied;
    const bf16 *embedding;      /* [vocab][hidden], or the packed head where tied */
    const bf16 *final_norm, *head;
    const float *cosines, *sines; /* [positions][D / 2] */
} Model;

typedef struct {
    const bf16 *input_norm, *post_norm, *q_norm, *k_norm; /* the last two may be null */
    const bf16 *qkv, *qkv_bias, *o, *gate_up, *down;      /* packed; the bias may be null */
    bf16 *keys, *values;                                  /* this layer's pools */
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
static void rotate(bf16 *head, const bf16 *norm, float eps, const float *cosine, const float *sine, int64_t D) {
    if (norm) rms_norm(head, norm, head, D, eps);
    for (int64_t i = 0; i < D / 2; i += 16) {
        f32x16 a = load_bf16(head + i), b = load_bf16(head + D / 2 + i);
        f32x16 c = load_f32(cosine + i), s = load_f32(sine + i);
        store_bf16(head + i, a * c - b * s);
        store_bf16(head + D / 2 + i, b * c + a * s);
    }
}

static void remember(const Model *m, const Layer *layer, int64_t block, int64_t offset, int64_t h, const bf16 *key,
                     const bf16 *value) {
    int64_t D = m->head_dim, cell = (block * m->kv_heads + h) * m->block_size * D;
    bf16 *k = layer->keys + cell + (offset / 16) * 16 * D + (offset % 16) * 2;
    for (int64_t d = 0; d < D; d += 2) memcpy(k + (d / 2) * 32, key + d, 4);
    bf16 *v = layer->values + cell + (offset / KEYS) * KEYS * D;
    /* A new group starts clean: weight 0 times what an earlier owner left must be 0, and 0 * NaN is not. */
    if (offset % KEYS == 0) memset(v, 0, (size_t)(KEYS * D) * sizeof(bf16));
    v += ((offset % KEYS) / 2) * 32 + offset % 2;
    for (int64_t d = 0; d < D; d++) v[(d / 16) * TILE + (d % 16) * 2] = value[d];
}

/* scores [rows][SPAN] = q [rows][D] times 32 keys. */
static void score(const bf16 *q, int rows, const bf16 *k, int64_t D, float *scores) {
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
    for (int row = 0; row < rows; row++)
        for (int half = 0; half < 2; half++) {
            f32x16 total = {0};
            for (int64_t d = 0; d < D; d += 2) {
                u32x16 both;
                memcpy(&both, k + half * 16 * D + (d / 2) * 32, 64);
                total += (f32x16)(both << 16) * to_f32(q[row * D + d]);
                total += (f32x16)(both & 0xffff0000u) * to_f32(q[row * D + d + 1]);
            }
            store_f32(scores + row * SPAN + half * 16, total);
        }
}

/* out [rows][D] += weights [rows][SPAN] times the values of `groups` groups of 32 keys. */
static void gather(const bf16 *weights, int rows, const bf16 *const *values, int groups, int64_t D, float *out) {
    for (int64_t d = 0; d < D / 16; d++) {
#if HAVE_AMX
        if (use_amx) {
            _tile_loadd(0, out + d * 16, D * 4);
            for (int g = 0; g < groups; g++) {
                _tile_loadd(4, weights + g * KEYS, SPAN * 2);
                _tile_loadd(5, values[g] + d * TILE, 64);
                _tile_dpbf16ps(0, 4, 5);
            }
            _tile_stored(0, out + d * 16, D * 4);
            continue;
        }
#endif
        for (int row = 0; row < rows; row++) {
            f32x16 total = load_f32(out + row * D + d * 16);
            for (int g = 0; g < groups; g++)
                for (int pair = 0; pair < 16; pair++) {
                    const bf16 *weight = weights + row * SPAN + g * KEYS + pair * 2;
                    u32x16 both;
                    memcpy(&both, values[g] + d * TILE + pair * 32, 64);
                    total += (f32x16)(both << 16) * to_f32(weight[0]);
                    total += (f32x16)(both & 0xffff0000u) * to_f32(weight[1]);
                }
            store_f32(out + row * D + d * 16, total);
        }
    }
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
static void attend(const Model *m, const Layer *layer, const int64_t *blocks, int64_t h, const bf16 *q, int rows,
                   const int64_t *at, float *out) {
    float scores[ROWS * SPAN] __attribute__((aligned(64)));
    bf16 weights[ROWS * SPAN] __attribute__((aligned(64)));
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
        const bf16 *values[SPAN / KEYS];
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
                memset(weights + r * SPAN, 0, SPAN * sizeof(bf16));
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
                store_bf16(weights + r * SPAN + i * 16, weight);
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

static void attention(const Model *m, const Layer *layer, const Batch *batch, bf16 *qkv, bf16 *out) {
    int64_t D = m->head_dim, G = m->heads / m->kv_heads, wide = (m->heads + 2 * m->kv_heads) * D;
    for (int64_t s = 0; s < batch->spans; s++) {
        const int64_t *blocks = batch->blocks + batch->tables[s];
        for (int64_t i = 0; i < batch->counts[s]; i++) {
            int64_t row = batch->starts[s] + i, at = batch->lengths[s] - batch->counts[s] + i;
            const float *cosine = m->cosines + batch->positions[row] * (D / 2);
            const float *sine = m->sines + batch->positions[row] * (D / 2);
            bf16 *q = qkv + row * wide, *k = q + m->heads * D, *v = k + m->kv_heads * D;
            for (int64_t h = 0; h < m->heads; h++) rotate(q + h * D, layer->q_norm, m->eps, cosine, sine, D);
            for (int64_t h = 0; h < m->kv_heads; h++) {
                rotate(k + h * D, layer->k_norm, m->eps, cosine, sine, D);
                remember(m, layer, blocks[at / m->block_size], at % m->block_size, h, k + h * D, v + h * D);
            }
        }
        for (int64_t h = 0; h < m->kv_heads; h++)
            for (int64_t done = 0; done < batch->counts[s] * G; done += ROWS) {
                bf16 q[ROWS * 256] __attribute__((aligned(64)));
                float result[ROWS * 256] __attribute__((aligned(64)));
                int64_t at[ROWS];
                int rows = batch->counts[s] * G - done < ROWS ? (int)(batch->counts[s] * G - done) : ROWS;
                for (int r = 0; r < rows; r++) {
                    int64_t i = (done + r) / G, row = batch->starts[s] + i;
                    at[r] = batch->lengths[s] - batch->counts[s] + i;
                    memcpy(q + r * D, qkv + row * wide + (h * G + (done + r) % G) * D, (size_t)D * sizeof(bf16));
                }
                attend(m, layer, blocks, h, q, rows, at, result);
                for (int r = 0; r < rows; r++) {
                    int64_t row = batch->starts[s] + (done + r) / G;
                    bf16 *to = out + row * m->heads * D + (h * G + (done + r) % G) * D;
                    for (int64_t d = 0; d < D; d += 16) store_bf16(to + d, load_f32(result + r * D + d));
                }
            }
    }
}

/* ---- the forward pass */

/* scratch holds rows * (3 * hidden + (heads + 2 kv_heads) * D + heads * D + intermediate) values. */
void outrider_forward(const Model *m, const Layer *layers, const Batch *batch, bf16 *scratch, float *logits) {
    int64_t R = batch->rows, H = m->hidden, attended = m->heads * m->head_dim;
    int64_t wide = (m->heads + 2 * m->kv_heads) * m->head_dim;
    bf16 *hidden = scratch, *normed = hidden + R * H, *qkv = normed + R * H, *mixed = qkv + R * wide;
    bf16 *middle = mixed + R * attended, *last = middle + R * m->intermediate;
    for (int64_t r = 0; r < R; r++)
        if (m->tied) unpack_row(m->embedding, batch->tokens[r], H, hidden + r * H);
        else memcpy(hidden + r * H, m->embedding + batch->tokens[r] * H, (size_t)H * sizeof(bf16));
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
