// An attention problem as numbers and addresses: what Python passes and every build of the kernel reads.
#pragma once
#include <cstdint>

extern "C" {

constexpr int64_t INTERFACE = 11;  // increased whenever a struct or function changes; Python compares it before any call

enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };

// Strides are in elements, and 0 along broadcast dimensions. A null pointer means that there is no such tensor. Apart
// from ids and counts, tensors without a stated dtype are float, or double for problems of float64.
struct Problem {
    int64_t b, h, g, t, s, d, w;
    int64_t dtype;
    const void *q, *k, *v;  // [b, h, t, d], [b, g, s, d], [b, g, s, w]
    int64_t q_stride[4], k_stride[4], v_stride[4], out_stride[4];
    void *out;                                 // [b, h, t, w]
    void *lse;                                 // [b, h, t], contiguous: natural logarithms; null if not wanted
    double scale, softcap;                     // softcap 0: none
    const void *sink;                          // [h] or null
    int64_t offset;                            // the position of row 0
    const int64_t *offsets;                    // [b] or null: the position of row 0 of each sequence
    int64_t low, high;                         // the band: query i attends to key j only if low <= j - i <= high
    const int64_t *first, *last;               // [b] or null: only keys first <= j < last are visible
    const int64_t *query_ids, *key_ids;        // [b, t] and [b, s] or null: keys with the id of the query are visible
    int64_t query_ids_stride, key_ids_stride;  // over b: 0 if all sequences share the ids
    const uint8_t *keep;                       // [b, h, t, s] or null: 0 where masked
    int64_t keep_stride[4];
    const void *bias;  // [b, h, t, s] or null: added to scores, -inf where masked
    int64_t bias_stride[4];
    const void *slopes;  // [h] or null: ALiBi
    int64_t slopes_stride;
    int64_t recomputed;  // not 0 if a gradient or a map will compute the scores again for this lse
    int64_t threads;
};

// The inputs of the gradient besides a problem with out and lse, and where the results are written. If at most 12 queries
// share a head of at most 64 keys, without d_lse, d_bias, d_slopes and sink, lse may be null; then out is not read.
struct Gradient {
    const void *d_out;  // [b, h, t, w], of the problem's dtype
    int64_t d_out_stride[4];
    const void *d_lse;   // [b, h, t], contiguous, or null
    void *dq, *dk, *dv;  // [b, h, t, d], [b, g, s, d], [b, g, s, w], contiguous, of its dtype
    void *delta;         // [b, h, t], contiguous, or null: d_out · out − d_lse of each row
    void *d_bias;        // zeros to add to, or null; broadcast by strides of 0
    int64_t d_bias_stride[4];
    void *d_slopes;  // [b, h, chunks], zeros to add to, or null
    int64_t shared;  // not 0 if several heads add to the same element of d_bias
    int64_t chunks;  // the keys of a head are split into at most this many chunks, each computed by one thread
};

// A pooled map of all weights: row r covers the queries from r * t / rows (rounded down) on, columns the keys likewise.
struct PooledMap {
    int64_t rows, cols;
    void *sum, *max;  // [b, h, rows, cols], zeros to add to, or null
};

// Statistics of a problem's weights and where they are written; null if not wanted.
struct Statistics {
    int64_t lse_known;                 // not 0 if the problem's lse is given; then there are no values and no output
    int64_t first_counted;             // the first query that counts in `received`
    void *total, *entropy, *distance;  // [b, h, t]: sums of weights, entropies in nats, distances in positions
    void *max_score;                   // [b, h, t]
    void *received;                    // [b, h, s]: sums of the weights that keys receive
    int64_t top_k;                     // the number of largest scores to find for each query
    void *top_scores;                  // [b, h, t, top_k], descending
    int64_t *top_keys;                 // [b, h, t, top_k]: their keys, -1 if fewer are visible
    int64_t maps;
    const PooledMap *map;  // [maps]
    int64_t chunks;        // queries are split into at least this many chunks over all heads, if possible
};

}  // extern "C"

// Runs work(data) on this number of threads, one of which is the caller's, and returns when all are done.
void parallel(int64_t threads, void (*work)(void *data), void *data);

// The parts of a forward pass whose time is measured on one thread, in a library compiled with TIMED
// (benchmarks/parts.py).
enum Part { PACKING, TIMES_KEYS, SOFTMAX, TIMES_VALUES, PARTS };
#if defined(TIMED)
#include <chrono>
extern double part_seconds[PARTS];
struct Timer {
    Part part;
    std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
    ~Timer() { part_seconds[part] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); }
};
#define TIME(part) \
    Timer timer { part }
#else
#define TIME(part) (void)0
#endif
