// The gradient of a few queries: keys and values are read as they lie by all queries that share them, and the gradients
// of each are written once. Scores are computed as in the forward pass (`Decode::score_packed`), so that their bits are
// those of the log-sum-exp. The work is split along the keys; what the splits add to gradients of queries is summed in
// order, whatever thread computed it.
#pragma once
#include "products.h"

#include <cmath>

namespace {

template <class T, class Op> struct DecodeGradient {
    typedef typename Op::E E;
    static constexpr int STEP = 64;     // keys in a step, at least a panel
    static constexpr int SHORT = 512;   // keys in a split, at least
    static constexpr int KEY_VECTORS = BYTES == 64 ? 4 : 2, MIX_VECTORS = 4;  // of a row, whose sums stay in registers

    const Problem &p;
    const Gradient &y;
    int64_t rows, depth;                // queries of a head of keys; d rounded up for products
    int64_t long_row, wide_row;         // d and w in whole groups of vectors
    int64_t split, splits;              // keys in a split; splits of a head
    R *parts;                           // [b * g, splits, rows, long_row]: gradients of queries, without the scale
    R unit;                             // what products are multiplied by, as in the forward pass
    int64_t next = 0;
    bool odd = false;                   // is something not finite? Then nothing here is of use

    DecodeGradient(const Problem &p, const Gradient &y) : p(p), y(y) {
        rows = p.h / p.g * p.t, depth = up(p.d, Op::DEPTH);
        long_row = up(p.d, MIX_VECTORS * W), wide_row = up(p.w, MIX_VECTORS * W);
        split = larger<int64_t>(up(up(p.s, y.chunks) / y.chunks, STEP), SHORT), splits = up(p.s, split) / split;
        unit = Op::PAIR == 1 ? (R)1 : (R)p.scale;
        allocate(store_of, array(parts, p.b * p.g * splits * rows * long_row));
    }

    struct Split {
        int64_t b, g;
        E *packed, *panel;        // [rows, depth]: queries; [depth, PANEL]: keys
        R *q, *d_out;             // [rows, long_row], [rows, wide_row]: zeros beyond d and w
        R *lse, *delta;           // [rows]
        R *score, *grad, *bend;   // [rows, STEP]: scores, then weights; gradients of weights, then of scores; of softcap
        V *unused;                // [rows]
        R *dq;                    // [rows, long_row]
    };

    int64_t head_of(const Split &k, int64_t row) const { return k.g * (p.h / p.g) + row / p.t; }

    // Copies a row of `width` numbers, zeros beyond; what isn't finite is noticed.
    void copy(R *to, int64_t to_width, const T *row, int64_t step, int64_t width) {
        I bad = {};
        for (int64_t x = 0; x < to_width; x += W) {
            V some = x < width ? Single::units(row, step, x, width) : V{};
            bad |= not_finite(some);
            store(to + x, some);
        }
        notice(bad);
    }

    // Not 0 where a number isn't finite. (A sum over all numbers would wait for each addition.)
    INLINE I not_finite(V v) { return (I)(v - v); }
    void notice(I bad) {
        if (lanes(bad != 0)) __atomic_store_n(&odd, true, __ATOMIC_RELAXED);
    }

    void open(const Split &k, bool first) {
        for (int64_t row = 0; row < rows; row++) {
            int64_t h = head_of(k, row), t = row % p.t, place = (k.b * p.h + h) * p.t + t;
            const T *q = at<T>(p.q, p.q_stride, k.b, h, t), *out = at<T>(p.out, p.out_stride, k.b, h, t);
            copy(k.q + row * long_row, long_row, q, p.q_stride[3], p.d);
            copy(k.d_out + row * wide_row, wide_row, at<T>(y.d_out, y.d_out_stride, k.b, h, t), y.d_out_stride[3], p.w);
            pack_query<Op>(k.packed + row * depth, q, p.q_stride[3], p.d, Op::PAIR == 1 ? (R)p.scale : (R)1);
            R lse = ((const R *)p.lse)[place], delta = y.d_lse ? -((const R *)y.d_lse)[place] : (R)0;
            V sums = {};
            for (int64_t x = 0; x < p.w; x += W)
                sums += load(k.d_out + row * wide_row + x) * Single::units(out, p.out_stride[3], x, p.w);
            delta += sum(sums);
            k.lse[row] = lse == -INF ? INF : lse, k.delta[row] = delta;  // of nothing that is seen weights are 0
            if (first && y.delta) ((R *)y.delta)[place] = delta;
        }
        memset(k.dq, 0, sizeof(R) * rows * long_row);
    }

    void compute(int64_t head, int64_t n) {
        Split k = {};
        k.b = head / p.g, k.g = head % p.g;
        int64_t even = up(rows, Op::EVEN), tile = even * STEP;
        allocate(scratch, array(k.packed, even * depth), array(k.panel, depth * PANEL), array(k.q, rows * long_row),
                 array(k.d_out, rows * wide_row), array(k.lse, rows), array(k.delta, rows), array(k.score, tile),
                 array(k.grad, tile), array(k.bend, p.softcap ? tile : 0), array(k.unused, rows));
        if (!p.softcap) k.bend = nullptr;
        k.dq = parts + (head * splits + n) * rows * long_row;
        open(k, n == 0);
        int64_t end = smaller((n + 1) * split, p.s);
        for (int64_t first = n * split; first < end; first += STEP) step(k, first, smaller<int64_t>(STEP, end - first));
    }

    void step(const Split &k, int64_t first, int64_t count) {
        for (int64_t c = 0; c < count; c += PANEL) {
            int64_t columns = smaller<int64_t>(PANEL, count - c);
            pack_columns<Op>(k.panel, ::at<T>(p.k, p.k_stride, k.b, k.g, first + c), p.k_stride + 2, columns, p.d);
            columns_of<Op, false, false>((int)rows, columns, k.packed, depth, k.panel, k.score + c, STEP, depth, k.unused);
        }
        const T *keys = ::at<T>(p.k, p.k_stride, k.b, k.g, first), *values = ::at<T>(p.v, p.v_stride, k.b, k.g, first);
        each_four(rows, [&](int64_t row, auto group) { times_values<group>(k, row, values, count); });
        for (int64_t row = 0; row < rows; row++) weigh(k, row, first, count);
        int64_t place = (k.b * p.g + k.g) * p.s + first;
        mix((T *)y.dv + place * p.w, p.w, k.score, k.d_out, wide_row, 1, count);
        mix((T *)y.dk + place * p.d, p.d, k.grad, k.q, long_row, (R)p.scale, count);
        each_four(rows, [&](int64_t row, auto group) { times_keys<group>(k, row, keys, count); });
    }

    // Gradients of weights: of so many queries' outputs, times the values.
    template <int ROWS> void times_values(const Split &k, int64_t row, const T *values, int64_t count) {
        I bad = {};
        for (int64_t j = 0; j < count; j += W) {
            V sum[ROWS][W];
            int64_t some = smaller<int64_t>(W, count - j);
            for (int64_t n = some; n < W; n++)
                for (int i = 0; i < ROWS; i++) sum[i][n] = V{};
            for (int64_t n = 0; n < some; n++) {
                V one[ROWS];
                for (int i = 0; i < ROWS; i++) one[i] = V{};
                for (int64_t x = 0; x < p.w; x += W) {
                    V value = Single::units(values + (j + n) * p.v_stride[2], p.v_stride[3], x, p.w);
                    bad |= not_finite(value);
                    for (int i = 0; i < ROWS; i++) one[i] += load(k.d_out + (row + i) * wide_row + x) * value;
                }
                for (int i = 0; i < ROWS; i++) sum[i][n] = one[i];
            }
            for (int i = 0; i < ROWS; i++) store(k.grad + (row + i) * STEP + j, sums(sum[i]));
        }
        notice(bad);
    }

    // Products become weights, and gradients of weights those of scores.
    void weigh(const Split &k, int64_t row, int64_t first, int64_t count) const {
        R *score = k.score + row * STEP, *grad = k.grad + row * STEP, *bend = k.bend ? k.bend + row * STEP : nullptr;
        int64_t whole = up(count, W);
        soften(p, unit, score, bend, whole);
        Interval own = visible_keys(p, k.b, row % p.t);
        own.end = smaller(own.end, first + count);
        constrain<3>(p, score, k.b, head_of(k, row), row % p.t, first, count, whole, own);
        V lse = all(k.lse[row]), delta = all(k.delta[row]);
        for (int64_t j = 0; j < whole; j += W) {
            V s = load(score + j);
            I visible = s != -INF;
            V weight = exp2(exponent(s, lse)), pull = weight * (load(grad + j) - delta);
            if (bend) pull *= load(bend + j);
            store(score + j, (V)((I)weight & visible)), store(grad + j, (V)((I)pull & visible));
        }
    }

    // Gradients of keys or values: to [count, width] = factor · by [rows, STEP], turned over, · x [rows, line].
    void mix(T *to, int64_t width, const R *by, const R *x, int64_t line, R factor, int64_t count) const {
        int64_t j = 0;
        for (; j + 2 <= count; j += 2) mix_some<2>(to + j * width, width, by + j, x, line, factor);
        if (j < count) mix_some<1>(to + j * width, width, by + j, x, line, factor);
    }

    template <int KEYS>
    void mix_some(T *to, int64_t width, const R *by, const R *x, int64_t line, R factor) const {
        constexpr int N = MIX_VECTORS;
        for (int64_t c = 0; c < width; c += N * W) {
            V sum[KEYS][N];
            for (int j = 0; j < KEYS; j++)  // one by one: compilers fill a whole array by a slow instruction
                for (int n = 0; n < N; n++) sum[j][n] = V{};
            for (int64_t row = 0; row < rows; row++)
                for (int n = 0; n < N; n++) {
                    V one = load(x + row * line + c + n * W);
                    for (int j = 0; j < KEYS; j++) sum[j][n] += all(by[row * STEP + j]) * one;
                }
            for (int j = 0; j < KEYS; j++)
                for (int n = 0; n < N; n++) {
                    int64_t from = c + n * W;
                    if (from < width) narrow(factor * sum[j][n], to + j * width + from, smaller<int64_t>(W, width - from));
                }
        }
    }

    // What keys add to the gradients of so many queries.
    template <int ROWS> void times_keys(const Split &k, int64_t row, const T *keys, int64_t count) {
        constexpr int N = KEY_VECTORS;
        I bad = {};
        for (int64_t c = 0; c < p.d; c += N * W) {
            V sum[ROWS][N];
            bool fits = p.k_stride[3] == 1 && c + N * W <= p.d;
            for (int i = 0; i < ROWS; i++)
                for (int n = 0; n < N; n++) sum[i][n] = load(k.dq + (row + i) * long_row + c + n * W);
            for (int64_t j = 0; j < count; j++) {
                const T *key = keys + j * p.k_stride[2];
                V one[N];
                for (int n = 0; n < N; n++) {
                    int64_t x = c + n * W;
                    one[n] = fits ? wide(key + x) : x < p.d ? Single::units(key, p.k_stride[3], x, p.d) : V{};
                    bad |= not_finite(one[n]);
                }
                for (int i = 0; i < ROWS; i++)
                    for (int n = 0; n < N; n++) sum[i][n] += all(k.grad[(row + i) * STEP + j]) * one[n];
            }
            for (int i = 0; i < ROWS; i++)
                for (int n = 0; n < N; n++) store(k.dq + (row + i) * long_row + c + n * W, sum[i][n]);
        }
        notice(bad);
    }

    // The parts of the gradients of a head's queries become one.
    void merge(int64_t head) const {
        for (int64_t row = 0; row < rows; row++) {
            int64_t h = head % p.g * (p.h / p.g) + row / p.t;
            T *to = (T *)y.dq + ((head / p.g * p.h + h) * p.t + row % p.t) * p.d;
            const R *part = parts + (head * splits * rows + row) * long_row;
            for (int64_t x = 0; x < p.d; x++) {
                R sum = 0;
                for (int64_t n = 0; n < splits; n++) sum += part[n * rows * long_row + x];
                narrow((R)p.scale * sum, to[x]);
            }
        }
    }

    static void computing(void *data) {
        DecodeGradient &all = *(DecodeGradient *)data;
        [[maybe_unused]] typename Op::Ready ready;
        share(all.next, all.p.b * all.p.g * all.splits, [&](int64_t n) { all.compute(n / all.splits, n % all.splits); });
    }

    int run() {
        parallel(5. * p.b * p.h * p.t * p.s * (p.d + p.w) < 4e6 ? 1 : p.threads, computing, this);
        for (int64_t head = 0; !odd && head < p.b * p.g; head++) merge(head);
        forget();
        return odd ? 2 : 0;
    }
};

}  // namespace
