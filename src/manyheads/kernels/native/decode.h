// Attention of a few queries over many keys, as in generation (Shazeer 2019, arXiv:1911.02150). Keys and values are
// read once for all queries that share them, and values aren't packed. The keys of a head are divided into splits. Each
// split has its own maximum and sums. They are merged in a fixed order, so that results don't depend on threads.
#pragma once
#include "few.h"

#include <cmath>

namespace {

template <class T, class Op> struct Decode : FewQueries<T, Op> {
    typedef FewQueries<T, Op> Base;
    using Base::problem, Base::rows, Base::depth, Base::units, Base::unit, Base::head_of;
    static constexpr int STEP = 256;  // keys in a step, few enough to stay in the first-level cache for all queries
    static constexpr int SHORT = 512, LONG = 4096;  // the smallest and the largest number of keys in a split
    static constexpr int SPLITS = 16;               // splits of all heads if keys suffice: enough for 16 threads

    Real *kept_scores;           // [b * h * t, line]: where scores are stored for statistics, or null
    int64_t line;                // the distance between two rows of kept_scores
    bool lse_known;              // if true, only scores are computed
    int64_t width;               // w rounded up to whole vectors
    int64_t split_size, splits;  // keys in a split; splits of a head
    Real *partial;               // [b * g, splits, rows, width + 2]: output, maximum and sum of weights
    int64_t next = 0;            // the next split to compute; shared by all threads

    Decode(const Problem &problem, Real *kept_scores, int64_t line, bool lse_known)
        : Base(problem), kept_scores(kept_scores), line(line), lse_known(lse_known) {
        split_size =
            smaller<int64_t>(larger<int64_t>(round_up(problem.b * problem.g * problem.s / SPLITS, STEP), SHORT), LONG);
        splits = round_up(problem.s, split_size) / split_size;
        width = round_up(problem.w, LANES);
        allocate(call_storage, array(partial, problem.b * problem.g * splits * rows * (width + 2)));
    }

    struct Split : Base::Queries {
        Real *score;  // [rows, STEP]: scores, then weights
        Real *sums;   // [rows, width + 2]
    };

    Real *kept_row(const Split &split, int64_t row) const {
        return kept_scores + ((split.b * problem.h + head_of(split, row)) * problem.t + row % problem.t) * line;
    }

    // Computes split n of a head of keys.
    void compute(int64_t head, int64_t n) {
        Split split = {};
        split.b = head / problem.g, split.g = head % problem.g;
        int64_t even = round_up(rows, Op::ROWS_MULTIPLE);
        allocate(scratch, array(split.packed, even * depth), array(split.panel, depth * PANEL),
                 array(split.vectors, rows * units / LANES), array(split.score, even * STEP),
                 array(split.unused, rows));
        split.sums = partial + (head * splits + n) * rows * (width + 2);
        for (int64_t row = 0; row < rows; row++) {
            this->pack(split, row);
            Real *sums = split.sums + row * (width + 2);
            memset(sums, 0, sizeof(Real) * width);
            sums[width] = -INF, sums[width + 1] = 0;
            int64_t stop = kept_scores ? smaller(line, (n + 1) * split_size) : 0;
            for (int64_t j = n * split_size; j < stop; j++) kept_row(split, row)[j] = -INF;
        }
        Interval some = {problem.s, 0}, every = {0, problem.s};  // keys visible to some query, and to every query
        for (int64_t row = 0; row < problem.t; row++) {
            Interval keys = visible_keys(problem, split.b, row);
            some = {smaller(some.begin, keys.begin), larger(some.end, keys.end)};
            every = {larger(every.begin, keys.begin), smaller(every.end, keys.end)};
        }
        bool needs_masking = problem.slopes || problem.bias || problem.keep || problem.key_ids;
        int64_t end = smaller(some.end, (n + 1) * split_size), count;
        for (int64_t first = larger(some.begin, n * split_size); first < end; first += count) {
            count = smaller<int64_t>(STEP, end - first);
            // Keys that every query can attend to need no masking: unless they are few, they get steps of their own.
            Interval free = {larger(every.begin, first), smaller(every.end, first + count)};
            if (free.end - free.begin >= 2 * LANES) count = (first < free.begin ? free.begin : free.end) - first;
            this->template multiply_keys<STEP>(split, first, count, split.score);
            bool whole = !needs_masking && every.begin <= first && first + count <= every.end;
            for (int64_t row = 0; row < rows; row++) finish(split, row, first, count);
            if (lse_known) continue;
            const T *values = row_at<T>(problem.v, problem.v_stride, split.b, split.g, first);
            if (whole || are_finite(values, count)) add(split, values, count, problem.s - first);
            else add_visible(split, values, count);
        }
    }

    // Turns products into scores: applies scale, softcap, bias and mask.
    void finish(const Split &split, int64_t row, int64_t first, int64_t count) const {
        Real *score = split.score + row * STEP;
        int64_t whole = round_up(count, LANES);
        scale_and_cap(problem, unit, score, nullptr, whole);
        Interval keys = visible_keys(problem, split.b, row % problem.t);
        keys.end = smaller(keys.end, first + count);
        apply_bias_and_mask<3>(problem, score, split.b, head_of(split, row), row % problem.t, first, count, whole,
                               keys);
        if (kept_scores) memcpy(kept_row(split, row) + first, score, sizeof(Real) * count);
    }

    // Turns scores into weights relative to the running maximum. If the maximum grows, rescales the earlier sums.
    void weigh(const Split &split, int64_t row, int64_t count) const {
        Real *score = split.score + row * STEP, *sums = split.sums + row * (width + 2), before = sums[width];
        Vector top = broadcast(before), sum = {};
        for (int64_t j = 0; j < count; j += LANES) top = max(load(score + j), top);
        Real now = maximum(top);
        Vector reference = broadcast(now == -INF ? (Real)0 : now);
        for (int64_t j = 0; j < count; j += LANES) {
            Vector weight = exp2(log2_weight(load(score + j), reference));
            store(score + j, weight);
            sum += weight;
        }
        Real shrink = before == -INF ? (Real)0 : (Real)std::exp2((before - now) * LOG2E);
        if (now != before)
            for (int64_t x = 0; x < width; x += LANES) store(sums + x, shrink * load(sums + x));
        sums[width] = now, sums[width + 1] = ::sum(sum) + (now != before ? shrink : (Real)1) * sums[width + 1];
    }

    // The most queries of a group whose sums of N vectors, and these, fit in the registers.
    template <int N> static constexpr int MOST_ROWS = N <= 2 ? 4 : (BYTES == 64 ? 16 : 8) / N;

    bool are_finite(const T *values, int64_t count) const {
        Integers finite = Integers{} - 1;
        for (int64_t j = 0; j < count; j++)
            for (int64_t x = 0; x < problem.w; x += LANES) {
                Vector v = Single::units(values + j * problem.v_stride[2], problem.v_stride[3], x, problem.w);
                finite &= v - v == (Real)0;
            }
        return !bit_mask(~finite);
    }

    // Adds weights times values. Weights of masked keys are 0: their values must be finite. left: the number of values from
    // the first of these to the last of the tensor.
    void add(const Split &split, const T *values, int64_t count, int64_t left) const {
        for (int64_t row = 0; row < rows; row++) weigh(split, row, round_up(count, LANES));
        for (int64_t x = 0; x < problem.w;) {
            int64_t whole = problem.v_stride[3] == 1 ? (problem.w - x) / LANES : 0;  // vectors that are whole
            if (whole >= 8 && rows <= MOST_ROWS<8>) x += add_to_all<8>(split, x, values, count, left);
            else if (whole >= 4 && rows <= MOST_ROWS<4>) x += add_to_all<4>(split, x, values, count, left);
            else if (whole >= 2) x += add_to_all<2>(split, x, values, count, left);
            else x += add_to_all<1>(split, x, values, count, left);
        }
    }

    // Adds N vectors of each value, from number x on, to all queries; only a single one may reach beyond the value.
    // Returns how many numbers that are.
    template <int N>
    int64_t add_to_all(const Split &split, int64_t x, const T *values, int64_t count, int64_t left) const {
        each_four(rows, [&](int64_t row, auto group) {
            if constexpr (group <= MOST_ROWS<N>) add_some<group, N>(split, row, x, values, count, left);
        });
        return N * LANES;
    }

    template <int ROWS, int N>
    void add_some(const Split &split, int64_t row, int64_t x, const T *values, int64_t count, int64_t left) const {
        Vector sum[ROWS][N] = {};
        const Real *weight = split.score + row * STEP;
        for (int64_t j = 0; j < count; j++) {
            const T *value = values + j * problem.v_stride[2];
            Vector v[N];
            if (row == 0 && j + Base::AHEAD < left)
                Base::fetch(value + Base::AHEAD * problem.v_stride[2] + x, N * LANES);
            for (int n = 0; n < N; n++)
                v[n] = N > 1 ? widen(value + x + n * LANES) : Single::units(value, problem.v_stride[3], x, problem.w);
            for (int i = 0; i < ROWS; i++)
                for (int n = 0; n < N; n++) sum[i][n] += broadcast(weight[i * STEP + j]) * v[n];
        }
        for (int i = 0; i < ROWS; i++) {
            Real *to = split.sums + (row + i) * (width + 2) + x;
            for (int n = 0; n < N; n++) store(to + n * LANES, load(to + n * LANES) + sum[i][n]);
        }
    }

    // The same, without the values of masked keys.
    void add_visible(const Split &split, const T *values, int64_t count) const {
        for (int64_t row = 0; row < rows; row++) {
            Real *weight = split.score + row * STEP, *to = split.sums + row * (width + 2);
            bool visible[STEP];
            for (int64_t j = 0; j < count; j++) visible[j] = !(weight[j] == -INF);
            weigh(split, row, round_up(count, LANES));
            for (int64_t j = 0; j < count; j++)
                for (int64_t x = 0; visible[j] && x < problem.w; x += LANES) {
                    Vector v = Single::units(values + j * problem.v_stride[2], problem.v_stride[3], x, problem.w);
                    store(to + x, load(to + x) + weight[j] * v);
                }
        }
    }

    // Merges the splits of a head of keys, and writes the output and the log-sum-exp.
    void merge(int64_t head) const {
        int64_t b = head / problem.g, g = head % problem.g, size = width + 2;
        for (int64_t row = 0; row < rows; row++) {
            int64_t h = g * (problem.h / problem.g) + row / problem.t, t = row % problem.t;
            Real *sums = partial + (head * splits * rows + row) * size,
                 sink = problem.sink ? ((const Real *)problem.sink)[h] : -INF;
            Real top = sink;
            for (int64_t n = 0; n < splits; n++) top = larger(top, sums[n * rows * size + width]);
            Wide total = sink == -INF ? 0 : std::exp2((sink - top) * LOG2E);
            for (int64_t n = 0; n < splits; n++) {
                Real *split_sums = sums + n * rows * size;
                Real by = split_sums[width] == -INF ? (Real)0 : (Real)std::exp2((split_sums[width] - top) * LOG2E);
                total += by * split_sums[width + 1];
                for (int64_t x = 0; x < width; x += LANES)
                    store(sums + x, (n ? load(sums + x) : Vector{}) + by * load(split_sums + x));
            }
            Real by = total == 0 ? (Real)0 : (Real)(1 / total);
            T *out =
                (T *)problem.out + b * problem.out_stride[0] + h * problem.out_stride[1] + t * problem.out_stride[2];
            each(problem.w, problem.out_stride[3], [&](int64_t x, int64_t at) { narrow(by * sums[x], out[at]); });
            if (problem.lse)
                ((Real *)problem.lse)[(b * problem.h + h) * problem.t + t] =
                    total == 0 ? -INF : (Real)(top + std::log(total));
        }
    }

    void run() {
        int64_t pieces = problem.b * problem.g * splits;
        run_on<Op>(threads_for(problem, this->operations(), pieces), [&] {
            take_each(next, pieces, [&](int64_t n) { compute(n / splits, n % splits); });
        });
        for (int64_t head = 0; !lse_known && head < problem.b * problem.g; head++) merge(head);
    }
};

}  // namespace
