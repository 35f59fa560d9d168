// The gradient of a few queries. Keys and values are read once, without packing, by all queries that share them, and their
// gradients are written once. Scores are computed as in the forward pass (`FewQueries`), with the bits that
// belong to the log-sum-exp. If all keys are in one step, they suffice: without a given log-sum-exp it is computed again, and
// the output isn't read. The work is split along the keys; gradients of queries are summed over the splits in a
// fixed order, so that the bits don't depend on threads.
#pragma once
#include "few.h"

#include <cmath>

namespace {

template <class T, class Op> struct DecodeGradient : FewQueries<T, Op> {
    typedef FewQueries<T, Op> Base;
    using Base::problem, Base::rows, Base::depth, Base::units, Base::unit, Base::head_of;
    static constexpr int STEP = 64;                                           // keys in a step, at least a panel
    static constexpr int SHORT = 512;                                         // keys in a split, at least
    static constexpr int KEY_VECTORS = BYTES == 64 ? 4 : 2, MIX_VECTORS = 4;  // whose sums stay in registers

    const Gradient &gradient;
    int64_t long_row, wide_row;  // d and w in multiples of MIX_VECTORS vectors
    int64_t split_size, splits;  // keys in a split; splits of a head
    Real *partial_dq;            // [b * g, splits, rows, long_row]: gradients of queries, without the scale
    int64_t next = 0;
    bool has_nonfinite = false;  // if true, the results can't be used: masked numbers would leak into them

    DecodeGradient(const Problem &problem, const Gradient &gradient) : Base(problem), gradient(gradient) {
        long_row = round_up(problem.d, MIX_VECTORS * LANES), wide_row = round_up(problem.w, MIX_VECTORS * LANES);
        split_size = larger<int64_t>(round_up(round_up(problem.s, gradient.chunks) / gradient.chunks, STEP), SHORT),
        splits = round_up(problem.s, split_size) / split_size;
        allocate(call_storage, array(partial_dq, problem.b * problem.g * splits * rows * long_row));
        if (!problem.lse) this->packs = rows > UNPACKED_QUERIES;  // no bits of the forward pass are needed
    }

    struct Split : Base::Queries {
        Real *q, *d_out;        // [rows, long_row], [rows, wide_row]: zeros beyond d and w
        Real *lse, *delta;      // [rows]
        Real *score, *d_score;  // [rows, STEP]: scores, then weights; gradients of weights, then of scores
        Real *cap_slope;        // [rows, STEP]: slopes of the softcap
        Real *dq;               // [rows, long_row]
    };

    // Copies a row of `width` numbers, with zeros beyond, and notes non-finite numbers.
    void copy(Real *to, int64_t to_width, const T *row, int64_t step, int64_t width) {
        Integers nonfinite = {};
        for (int64_t x = 0; x < to_width; x += LANES) {
            Vector some = x < width ? Single::units(row, step, x, width) : Vector{};
            nonfinite |= is_nonfinite(some);
            store(to + x, some);
        }
        notice(nonfinite);
    }

    // Returns non-zero bits in lanes with a non-finite number. (A sum of differences would wait for each addition.)
    INLINE Integers is_nonfinite(Vector v) { return (Integers)(v - v); }
    void notice(Integers nonfinite) {
        if (bit_mask(nonfinite != 0)) __atomic_store_n(&has_nonfinite, true, __ATOMIC_RELAXED);
    }

    void read_queries(const Split &split, bool first) {
        for (int64_t row = 0; row < rows; row++) {
            int64_t h = head_of(split, row), t = row % problem.t, place = (split.b * problem.h + h) * problem.t + t;
            const T *q = row_at<T>(problem.q, problem.q_stride, split.b, h, t),
                    *out = row_at<T>(problem.out, problem.out_stride, split.b, h, t);
            copy(split.q + row * long_row, long_row, q, problem.q_stride[3], problem.d);
            copy(split.d_out + row * wide_row, wide_row,
                 row_at<T>(gradient.d_out, gradient.d_out_stride, split.b, h, t), gradient.d_out_stride[3], problem.w);
            this->pack(split, row);
            if (!problem.lse) continue;
            Real lse = ((const Real *)problem.lse)[place],
                 delta = gradient.d_lse ? -((const Real *)gradient.d_lse)[place] : (Real)0;
            delta += dot(split.d_out + row * wide_row, 1, out, problem.out_stride[3], problem.w);
            split.lse[row] = lse == -INF ? INF : lse;  // if everything is masked, weights become 0
            split.delta[row] = delta;
            if (first && gradient.delta) ((Real *)gradient.delta)[place] = delta;
        }
        memset(split.dq, 0, sizeof(Real) * rows * long_row);
    }

    void compute(int64_t head, int64_t n) {
        Split split = {};
        split.b = head / problem.g, split.g = head % problem.g;
        int64_t even = round_up(rows, Op::ROWS_MULTIPLE), tile = even * STEP;
        allocate(scratch, array(split.packed, even * depth), array(split.panel, depth * PANEL),
                 array(split.vectors, rows * units / LANES), array(split.q, rows * long_row),
                 array(split.d_out, rows * wide_row), array(split.lse, rows), array(split.delta, rows),
                 array(split.score, tile), array(split.d_score, tile),
                 array(split.cap_slope, problem.softcap ? tile : 0), array(split.unused, rows));
        if (!problem.softcap) split.cap_slope = nullptr;
        split.dq = partial_dq + (head * splits + n) * rows * long_row;
        read_queries(split, n == 0);
        int64_t end = smaller((n + 1) * split_size, problem.s);
        for (int64_t first = n * split_size; first < end; first += STEP)
            step(split, first, smaller<int64_t>(STEP, end - first));
    }

    void step(const Split &split, int64_t first, int64_t count) {
        this->template multiply_keys<STEP>(split, first, count, split.score);
        const T *keys = ::row_at<T>(problem.k, problem.k_stride, split.b, split.g, first),
                *values = ::row_at<T>(problem.v, problem.v_stride, split.b, split.g, first);
        each_four(rows, [&](int64_t row, auto group) { times_values<group>(split, row, values, count); });
        for (int64_t row = 0; row < rows; row++) weigh(split, row, first, count);
        int64_t place = (split.b * problem.g + split.g) * problem.s + first;
        mix((T *)gradient.dv + place * problem.w, problem.w, split.score, split.d_out, wide_row, 1, count);
        mix((T *)gradient.dk + place * problem.d, problem.d, split.d_score, split.q, long_row, (Real)problem.scale,
            count);
        each_four(rows, [&](int64_t row, auto group) { times_keys<group>(split, row, keys, count); });
    }

    // Computes gradients of weights: gradients of some queries' outputs times the values.
    template <int ROWS> void times_values(const Split &split, int64_t row, const T *values, int64_t count) {
        Integers nonfinite = {};
        for (int64_t j = 0; j < count; j += LANES) {
            Vector sum[ROWS][LANES];
            int64_t some = smaller<int64_t>(LANES, count - j);
            for (int64_t n = some; n < LANES; n++)
                for (int i = 0; i < ROWS; i++) sum[i][n] = Vector{};
            for (int64_t n = 0; n < some; n++) {
                Vector one[ROWS];
                for (int i = 0; i < ROWS; i++) one[i] = Vector{};
                for (int64_t x = 0; x < problem.w; x += LANES) {
                    Vector value =
                        Single::units(values + (j + n) * problem.v_stride[2], problem.v_stride[3], x, problem.w);
                    nonfinite |= is_nonfinite(value);
                    for (int i = 0; i < ROWS; i++) one[i] += load(split.d_out + (row + i) * wide_row + x) * value;
                }
                for (int i = 0; i < ROWS; i++) sum[i][n] = one[i];
            }
            for (int i = 0; i < ROWS; i++) store(split.d_score + (row + i) * STEP + j, sums(sum[i]));
        }
        notice(nonfinite);
    }

    // Turns products into weights, and gradients of weights into gradients of scores.
    void weigh(const Split &split, int64_t row, int64_t first, int64_t count) const {
        Real *score = split.score + row * STEP, *grad = split.d_score + row * STEP,
             *cap_slope = split.cap_slope ? split.cap_slope + row * STEP : nullptr;
        int64_t whole = round_up(count, LANES);
        scale_and_cap(problem, unit, score, cap_slope, whole);
        Interval keys = visible_keys(problem, split.b, row % problem.t);
        keys.end = smaller(keys.end, first + count);
        apply_bias_and_mask<3>(problem, score, split.b, head_of(split, row), row % problem.t, first, count, whole,
                               keys);
        Real reference = problem.lse ? split.lse[row] : largest(score, whole), delta = 0;
        Vector total = {}, mean = {};
        for (int64_t j = 0; j < whole; j += LANES) {
            Vector s = load(score + j), weight = exp2(log2_weight(s, broadcast(reference)));
            weight = (Vector)((Integers)weight & (Integers)(s != -INF));
            store(score + j, weight), total += weight;
        }
        if (problem.lse) {
            delta = split.delta[row];
        } else {
            Real by = 1 / ::sum(total);  // unless all keys are masked
            for (int64_t j = 0; j < whole && ::sum(total) > 0; j += LANES) {
                Vector weight = by * load(score + j);
                store(score + j, weight), mean += visible(weight, weight * load(grad + j));
            }
            delta = ::sum(mean);
        }
        for (int64_t j = 0; j < whole; j += LANES) {
            Vector weight = load(score + j), d_score = weight * (load(grad + j) - delta);
            if (cap_slope) d_score *= load(cap_slope + j);
            store(grad + j, visible(weight, d_score));
        }
    }

    // Returns x, with zeros where weights are 0: there x may be NaN.
    INLINE Vector visible(Vector weight, Vector x) { return (Vector)((Integers)x & (Integers)(weight != (Real)0)); }

    // Returns the largest score of a query, or infinity if all are −∞.
    Real largest(const Real *score, int64_t count) const {
        Vector top = broadcast(-(Real)INF);
        for (int64_t j = 0; j < count; j += LANES) top = max(load(score + j), top);
        return maximum(top) == -INF ? INF : maximum(top);
    }

    // Computes gradients of keys or values: to [count, width] = factor · byᵀ · x, where by [rows, STEP], x [rows, line].
    void mix(T *to, int64_t width, const Real *by, const Real *x, int64_t line, Real factor, int64_t count) const {
        int64_t j = 0;
        for (; j + 2 <= count; j += 2) mix_some<2>(to + j * width, width, by + j, x, line, factor);
        if (j < count) mix_some<1>(to + j * width, width, by + j, x, line, factor);
    }

    template <int KEYS>
    void mix_some(T *to, int64_t width, const Real *by, const Real *x, int64_t line, Real factor) const {
        constexpr int N = MIX_VECTORS;
        for (int64_t c = 0; c < width; c += N * LANES) {
            Vector sum[KEYS][N];
            for (int j = 0; j < KEYS; j++)  // one by one: compilers clear a whole array by a slow instruction
                for (int n = 0; n < N; n++) sum[j][n] = Vector{};
            for (int64_t row = 0; row < rows; row++)
                for (int n = 0; n < N; n++) {
                    Vector one = load(x + row * line + c + n * LANES);
                    for (int j = 0; j < KEYS; j++) sum[j][n] += broadcast(by[row * STEP + j]) * one;
                }
            for (int j = 0; j < KEYS; j++)
                for (int n = 0; n < N; n++) {
                    int64_t from = c + n * LANES;
                    if (from < width)
                        narrow(factor * sum[j][n], to + j * width + from, smaller<int64_t>(LANES, width - from));
                }
        }
    }

    // Adds gradients of scores times keys to the gradients of some queries.
    template <int ROWS> void times_keys(const Split &split, int64_t row, const T *keys, int64_t count) {
        constexpr int N = KEY_VECTORS;
        Integers nonfinite = {};
        for (int64_t c = 0; c < problem.d; c += N * LANES) {
            Vector sum[ROWS][N];
            bool fits = problem.k_stride[3] == 1 && c + N * LANES <= problem.d;
            for (int i = 0; i < ROWS; i++)
                for (int n = 0; n < N; n++) sum[i][n] = load(split.dq + (row + i) * long_row + c + n * LANES);
            for (int64_t j = 0; j < count; j++) {
                const T *key = keys + j * problem.k_stride[2];
                Vector one[N];
                for (int n = 0; n < N; n++) {
                    int64_t x = c + n * LANES;
                    one[n] = fits            ? widen(key + x)
                             : x < problem.d ? Single::units(key, problem.k_stride[3], x, problem.d)
                                             : Vector{};
                    nonfinite |= is_nonfinite(one[n]);
                }
                for (int i = 0; i < ROWS; i++)
                    for (int n = 0; n < N; n++) sum[i][n] += broadcast(split.d_score[(row + i) * STEP + j]) * one[n];
            }
            for (int i = 0; i < ROWS; i++)
                for (int n = 0; n < N; n++) store(split.dq + (row + i) * long_row + c + n * LANES, sum[i][n]);
        }
        notice(nonfinite);
    }

    // Sums the gradients of a head's queries over the splits.
    void merge(int64_t head) const {
        for (int64_t row = 0; row < rows; row++) {
            int64_t h = head % problem.g * (problem.h / problem.g) + row / problem.t;
            T *to = (T *)gradient.dq + ((head / problem.g * problem.h + h) * problem.t + row % problem.t) * problem.d;
            const Real *part = partial_dq + (head * splits * rows + row) * long_row;
            for (int64_t x = 0; x < problem.d; x += LANES) {
                Vector sum = {};
                for (int64_t n = 0; n < splits; n++) sum += load(part + n * rows * long_row + x);
                narrow((Real)problem.scale * sum, to + x, smaller<int64_t>(LANES, problem.d - x));
            }
        }
    }

    int run() {
        int64_t pieces = problem.b * problem.g * splits;
        run_on<Op>(threads_for(problem, 2.5 * this->operations(), pieces), [&] {
            take_each(next, pieces, [&](int64_t n) { compute(n / splits, n % splits); });
        });
        for (int64_t head = 0; !has_nonfinite && head < problem.b * problem.g; head++) merge(head);
        release_storage();
        return has_nonfinite ? 2 : 0;
    }
};

}  // namespace
