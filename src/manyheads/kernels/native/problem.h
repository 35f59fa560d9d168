// One attention problem in numbers and pointers: what Python hands over and every build of the kernel reads.
#pragma once
#include <cstdint>

extern "C" {

constexpr int64_t INTERFACE = 9;  // counted up whenever a struct or function changes: Python asks before it calls

enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };

// Strides are in elements, and 0 along what is broadcast. Pointers that may be null say "none". What no dtype
// is said of, but ids and counts, is float, or double where the problem is of float64.
struct Problem {
    int64_t b, h, g, t, s, d, w;
    int64_t dtype;
    const void *q, *k, *v;                   // [b, h, t, d], [b, g, s, d], [b, g, s, w]
    int64_t q_stride[4], k_stride[4], v_stride[4], out_stride[4];
    void *out;                               // [b, h, t, w]
    void *lse;                               // [b, h, t], contiguous: natural logarithms; null if not wanted
    double scale, softcap;                   // softcap 0: none
    const void *sink;                        // [h] or null
    int64_t offset;                          // the position of row 0
    const int64_t *offsets;                  // [b] or null: one for each sequence
    int64_t low, high;                       // the band: low <= j - i <= high
    const int64_t *first, *last;             // [b] or null: keys first <= j < last are real
    const int64_t *query_ids, *key_ids;      // [b, t] and [b, s] or null: seen where they are equal
    int64_t query_ids_stride, key_ids_stride;  // over b: 0 for ids that all share
    const uint8_t *keep;                     // [b, h, t, s] or null: seen where not 0
    int64_t keep_stride[4];
    const void *bias;                        // [b, h, t, s] or null: added, -inf hides
    int64_t bias_stride[4];
    const void *slopes;                      // [h] or null: ALiBi
    int64_t slopes_stride;
    int64_t again;                           // will a gradient or a map compute the scores again, from this lse?
    int64_t threads;
};

// What the gradient of a problem needs beside it (whose out and lse are given), and where it is written.
struct Gradient {
    const void *d_out;                       // [b, h, t, w], of the problem's dtype
    int64_t d_out_stride[4];
    const void *d_lse;                       // [b, h, t], contiguous, or null
    void *dq, *dk, *dv;                      // [b, h, t, d], [b, g, s, d], [b, g, s, w], contiguous, of its dtype
    void *delta;                             // [b, h, t], contiguous: of each row, d_out · out − d_lse; null if not wanted
    void *d_bias;                            // zeros that are added to, or null; broadcast by strides of 0
    int64_t d_bias_stride[4];
    void *d_slopes;                          // [b, h, chunks] zeros that are added to, or null
    int64_t shared;                          // do several heads add to one place of d_bias?
    int64_t chunks;                          // at most so many of the keys of a head, each summed by one thread
};

// A picture of all weights: cell r covers the queries from r * t / rows on, rounded down, and likewise for keys.
struct Grid {
    int64_t rows, cols;
    void *sum, *most;                        // [b, h, rows, cols], zeros that are added to, or null
};

// What is read off the weights of a problem, and where it is written; null where it isn't asked for.
struct Look {
    int64_t known;                           // is the problem's lse given? Then there are no values and no output
    int64_t first;                           // the first query that counts in `received`
    void *total, *entropy, *distance, *best;  // [b, h, t]: of all weights, nats, positions, and the largest score
    void *received;                          // [b, h, s]
    int64_t top;                             // of each query so many of the largest scores, in order
    void *top_scores;                        // [b, h, t, top]
    int64_t *top_keys;                       // the same: -1 where there are fewer
    int64_t grids;
    const Grid *grid;
    int64_t chunks;                          // of the queries of heads at hand, each summed by one thread, if enough
};

}  // extern "C"

// Runs work(data) on so many threads at once, this one among them; returns when all are done.
void parallel(int64_t threads, void (*work)(void *data), void *data);

// Where the time of a forward pass on one thread goes: measured only in a library that is compiled with TIMED
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
#define TIME(part) Timer timer{part}
#else
#define TIME(part) (void)0
#endif
