// The scores of a few queries: keys are read once for all queries that share them.
//
// If a gradient or a map will compute the scores again, they must have the same bits as here, so that their errors cancel
// those of the log-sum-exp. Then keys are packed as in the other passes, which sums products in the same order.
// Otherwise they are packed only if that is faster.
#pragma once
#include "products.h"

namespace {

constexpr int FEW_QUERIES = 12;                         // that share a head of keys; kernels/native/rules.py knows it
constexpr int UNPACKED_QUERIES = BYTES == 32 ? 4 : 12;  // for which packing keys takes longer than it saves

INLINE int64_t queries_per_key(const Problem &problem) { return problem.h / problem.g * problem.t; }

template <class T, class Op> struct FewQueries {
    typedef typename Op::Element Element;
    // How many keys ahead memory is prefetched. Beyond the last key, prefetching would be slow: nothing may be there.
    static constexpr int AHEAD = 24;

    const Problem &problem;
    int64_t rows, depth;  // queries of a head of keys; d rounded up for products
    int64_t units;        // d in whole vectors of units
    bool packs;           // are keys packed?
    Real unit;            // a product times this is a score

    FewQueries(const Problem &problem) : problem(problem) {
        rows = queries_per_key(problem), depth = round_up(problem.d, Op::DEPTH_MULTIPLE);
        units = round_up(round_up(problem.d, Op::PAIR) / Op::PAIR, LANES);
        packs = problem.recomputed || rows > UNPACKED_QUERIES;
        unit = Op::PAIR == 1 ? (Real)1 : (Real)problem.scale;
    }

    // The work as a number of floating-point operations that take as long. For fewer than four queries, reading a key takes
    // longer than its products. Each query adds a constant time, about that of 4,000 operations.
    double operations() const {
        double keys = 2. * problem.s * (problem.d + problem.w) * larger<int64_t>(rows, 4);
        return problem.b * problem.g * (keys + 4e3 * rows);
    }

    struct Queries {
        int64_t b, g;
        Element *packed;  // [rows, depth]
        Element *panel;   // [depth, PANEL]: packed keys
        Vector *vectors;  // [rows, units]: for keys that aren't packed
        Vector *unused;   // [rows]
    };

    int64_t head_of(const Queries &queries, int64_t row) const {
        return queries.g * (problem.h / problem.g) + row / problem.t;
    }

    void pack(const Queries &queries, int64_t row) const {
        const T *q = row_at<T>(problem.q, problem.q_stride, queries.b, head_of(queries, row), row % problem.t);
        Element *packed = queries.packed + row * depth;
        // In float32 queries are multiplied by the scale. In bfloat16 they aren't, so that they stay exact.
        pack_query<Op>(packed, q, problem.q_stride[3], problem.d, Op::PAIR == 1 ? (Real)problem.scale : (Real)1);
        for (int64_t x = 0; x < units; x += LANES)
            queries.vectors[(row * units + x) / LANES] = Op::units(packed, 1, x, problem.d);
    }

    // Multiplies all queries by count keys; the products are written to `to`, [rows, STEP].
    template <int STEP> void multiply_keys(const Queries &queries, int64_t first, int64_t count, Real *to) const {
        if (packs) return multiply_packed<STEP>(queries, first, count, to);
        bool fits = problem.k_stride[3] == 1 && problem.d % (LANES * Op::PAIR) == 0;
        each_four(rows, [&](int64_t row, auto group) {
            multiply_unpacked<STEP, group>(queries, row, first, count, fits, to);
        });
    }

    template <int STEP> void multiply_packed(const Queries &queries, int64_t first, int64_t count, Real *to) const {
        for (int64_t c = 0; c < count; c += PANEL) {
            int64_t columns = smaller<int64_t>(PANEL, count - c);
            for (int64_t j = 0; j < columns; j += LANES) {
                const T *keys = row_at<T>(problem.k, problem.k_stride, queries.b, queries.g, first + c + j);
                int64_t later = smaller<int64_t>(LANES, problem.s - (first + c + j) - AHEAD);  // keys to prefetch
                for (int64_t n = 0; n < later; n++) fetch(keys + (AHEAD + n) * problem.k_stride[2], problem.d);
                pack_columns<Op>(queries.panel + Op::place(0, j), keys, problem.k_stride + 2,
                                 smaller<int64_t>(LANES, columns - j), problem.d);
            }
            multiply<Op, false, false>((int)rows, columns, queries.packed, depth, queries.panel, to + c, STEP, depth,
                                       queries.unused);
        }
    }

    // Does the same with keys that aren't packed, for ROWS queries, which use a key while it is in the registers.
    template <int STEP, int ROWS>
    void multiply_unpacked(const Queries &queries, int64_t row, int64_t first, int64_t count, bool fits,
                           Real *to) const {
        const T *keys = row_at<T>(problem.k, problem.k_stride, queries.b, queries.g, first);
        const Vector *q = queries.vectors + row * units / LANES;
        for (int64_t j = 0; j < count; j += LANES) {
            Vector sum[ROWS][LANES];
            int64_t some = smaller<int64_t>(LANES, count - j);
            for (int64_t n = some; n < LANES; n++)
                for (int i = 0; i < ROWS; i++) sum[i][n] = Vector{};
            for (int64_t n = 0; n < some; n++) {
                const T *key = keys + (j + n) * problem.k_stride[2];
                if (row == 0 && first + j + n + AHEAD < problem.s) fetch(key + AHEAD * problem.k_stride[2], problem.d);
                Vector one[ROWS] = {};
                if (fits)
                    for (int64_t x = 0; x < units; x += LANES)
                        add_units<ROWS>(one, q + x / LANES, Op::units(key, 1, x, units * Op::PAIR));
                else
                    for (int64_t x = 0; x < units; x += LANES)
                        add_units<ROWS>(one, q + x / LANES, Op::units(key, problem.k_stride[3], x, problem.d));
                for (int i = 0; i < ROWS; i++) sum[i][n] = one[i];
            }
            for (int i = 0; i < ROWS; i++) store(to + (row + i) * STEP + j, sums(sum[i]));
        }
    }

    template <int ROWS> void add_units(Vector *sum, const Vector *q, Vector key) const {
        for (int i = 0; i < ROWS; i++) sum[i] = Op::add(sum[i], q[i * units / LANES], key);
    }

    INLINE void fetch(const T *row, int64_t numbers) {
        for (int64_t x = 0; x < numbers; x += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + x);
    }
};

}  // namespace
