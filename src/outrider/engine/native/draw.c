/* The token that noise draws, row by row: argmax of logit / temperature + noise(key, token).
 *
 * The recipe is written in outrider/sampling/noise.py; this file follows it operation by operation and is
 * compiled without fused multiply-adds, so that every result is the same bit for bit. Few tokens need their
 * noise: an upper bound of it follows from the leading zeros of a hash, and only who can still win is computed.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { CHUNK = 64 }; /* small, so that few chunks hold anybody who can win */

typedef uint64_t u64x8 __attribute__((vector_size(64)));

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u, MIX_1 = 0xBF58476D1CE4E5B9u, MIX_2 = 0x94D049BB133111EBu;
static const uint64_t ONES = ((uint64_t)1 << 52) - 1;
static const double LN2 = 0x1.62e42fefa39efp-1;
static const double MOST_NOISE = 36.75; /* 53 ln 2, rounded up */
enum { MOST_TOKENS = 1 << 20 };

static inline uint64_t hash52(uint64_t key, uint64_t token) {
    uint64_t bits = key + token * GOLDEN;
    bits = (bits ^ (bits >> 30)) * MIX_1;
    bits = (bits ^ (bits >> 27)) * MIX_2;
    return (bits ^ (bits >> 31)) >> 12;
}

static double logarithm(double x) {
    int64_t bits;
    memcpy(&bits, &x, 8);
    int64_t exponent = (bits >> 52) - 1023;
    bits = (bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000;
    double m;
    memcpy(&m, &bits, 8);
    if (m > 0x1.6a09e667f3bcdp+0) {
        m = m * 0.5;
        exponent += 1;
    }
    double s = (m - 1.0) / (m + 1.0), z = s * s, sum = 1.0 / 23.0;
    for (int n = 21; n >= 1; n -= 2) sum = sum * z + 1.0 / (double)n;
    return (double)exponent * LN2 + (s * 2.0) * sum;
}

static double gumbel(uint64_t key, uint64_t token) {
    double uniform = ((double)(int64_t)hash52(key, token) + 0.5) * 0x1p-52;
    return -logarithm(-logarithm(uniform));
}

/* The complements (2^52 - 1 - k) of CHUNK tokens from `first` on; returns whether any is at most `limit`. */
static int complements(uint64_t key, uint64_t first, const u64x8 *steps, uint64_t limit, uint64_t *out) {
    u64x8 start = (u64x8){} + (key + first * GOLDEN), any = {};
    for (int i = 0; i < CHUNK / 8; i++) {
        u64x8 bits = start + steps[i];
        bits = (bits ^ (bits >> 30)) * MIX_1;
        bits = (bits ^ (bits >> 27)) * MIX_2;
        bits = ONES - ((bits ^ (bits >> 31)) >> 12);
        any |= (u64x8)(bits <= limit);
        memcpy(out + 8 * i, &bits, 64);
    }
    uint64_t found = 0;
    for (int lane = 0; lane < 8; lane++) found |= any[lane];
    return found != 0;
}

/* The largest complement with which a token that trails the best by `gap` can still win: its noise is at most
 * -log((complement + 0.5) 2^-52), so the complement is at most 2^52 exp(-gap). One bit is given away for
 * rounding. */
static uint64_t limit_of(double gap) {
    if (!(gap > 0)) return ONES; /* also where it is no number */
    int bits = 53 - (int)floor(gap / LN2 - 1e-6);
    return bits >= 52 ? ONES : bits <= 0 ? 0 : ((uint64_t)1 << bits) - 1;
}

void outrider_draw(const float *logits, int64_t rows, int64_t vocab, int64_t stride, const double *temperatures,
                   const uint64_t *keys, int64_t *chosen) {
    u64x8 steps[CHUNK / 8]; /* token * GOLDEN within a chunk */
    for (uint64_t i = 0; i < CHUNK; i++) steps[i / 8][i % 8] = i * GOLDEN;
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * stride;
        const double temperature = temperatures[row];
        const uint64_t key = keys[row];
        float tops[MOST_TOKENS / CHUNK]; /* the largest logit of each chunk */
        int64_t winner = 0;
        float top = -INFINITY;
        for (int64_t base = 0, chunk = 0; base < vocab; base += CHUNK, chunk++) {
            int n = (int)(vocab - base < CHUNK ? vocab - base : CHUNK);
            float most = -INFINITY;
            for (int i = 0; i < n; i++) most = x[base + i] > most ? x[base + i] : most;
            tops[chunk] = most;
            if (most > top) top = most, winner = base;
        }
        if (top == -INFINITY) {
            chosen[row] = 0;
            continue;
        }
        while (x[winner] != top) winner++;
        double best = (double)top / temperature + gumbel(key, (uint64_t)winner);
        for (int64_t base = 0, chunk = 0; base < vocab; base += CHUNK, chunk++) {
            double gap = best - (double)tops[chunk] / temperature;
            if (!(gap < MOST_NOISE)) continue;
            uint64_t limit = limit_of(gap), complement[CHUNK];
            if (!complements(key, (uint64_t)base, steps, limit, complement)) continue;
            int n = (int)(vocab - base < CHUNK ? vocab - base : CHUNK);
            for (int i = 0; i < n; i++) {
                if (complement[i] > limit || x[base + i] == -INFINITY) continue;
                double scaled = (double)x[base + i] / temperature;
                if (complement[i] > limit_of(best - scaled)) continue;
                double value = scaled + gumbel(key, (uint64_t)(base + i));
                if (value > best || (value == best && base + i < winner)) best = value, winner = base + i;
            }
        }
        chosen[row] = winner;
    }
}
