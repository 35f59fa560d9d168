// A few queries against many keys, as one token after another is generated (Shazeer 2019, arXiv:1911.02150): keys and
// values are read once, as they lie, by all queries that share them, and the work is split along the keys. A split's
// sums are those of its own maximum; they are put together in order, whatever thread made them.
//
// Where a gradient or a map will compute the scores again, they must have the same bits, or they don't cancel the
// log-sum-exp. There keys are packed as everywhere else, so that products are summed in one order. It takes up to
// twice as long.
#pragma once
#include "products.h"

#include <cmath>

namespace {

template <class T, class Op> struct Decode {
    typedef typename Op::E E;
    static constexpr int STEP = 256;     // keys, which stay near for all queries
    static constexpr int SHORT = 512, LONG = 4096;  // keys that one thread reads, at least and at most
    static constexpr int SPLITS = 16;    // over all heads, if there are so many keys: each thread has something to do
    static constexpr int AHEAD = 24;     // keys that are fetched before they are needed

    const Problem &p;
    R *kept;                             // [b * h * t, line]: the scores, for statistics of them; or null
    int64_t line;
    bool known;                          // is lse given? Then only scores are computed
    int64_t rows, width, units, depth;   // queries of a key; w and d in whole vectors; d rounded up to pairs
    int64_t split, splits;               // keys in a split; splits of a head
    R *parts;                            // [b * g, splits, rows, width + 2]: outputs, a maximum and a sum
    R unit;
    int64_t next = 0;

    Decode(const Problem &p, R *kept, int64_t line, bool known) : p(p), kept(kept), line(line), known(known) {
        rows = p.h / p.g * p.t;
        split = smaller<int64_t>(larger<int64_t>(up(p.b * p.g * p.s / SPLITS, STEP), SHORT), LONG);
        splits = up(p.s, split) / split;
        width = up(p.w, W), depth = up(p.d, Op::DEPTH), units = up(up(p.d, Op::PAIR) / Op::PAIR, W);
        unit = Op::PAIR == 1 ? (R)1 : (R)p.scale;
        allocate(store_of, array(parts, p.b * p.g * splits * rows * (width + 2)));
    }

    struct Split {
        int64_t b, g;
        E *packed;   // [rows, depth]: queries, where keys are packed
        E *panel;    // [depth, PANEL]: keys
        V *q;        // [rows, units]: queries, where keys are read as they lie
        R *score;    // [rows, STEP]: scores, then weights
        V *unused;   // [rows]
        R *part;     // [rows, width + 2]
    };

    int64_t head_of(const Split &k, int64_t row) const { return k.g * (p.h / p.g) + row / p.t; }

    R *kept_of(const Split &k, int64_t row) const {
        return kept + ((k.b * p.h + head_of(k, row)) * p.t + row % p.t) * line;
    }

    void compute(int64_t head, int64_t n) {
        Split k = {};
        k.b = head / p.g, k.g = head % p.g;
        int64_t even = up(rows, Op::EVEN);
        allocate(scratch, array(k.packed, even * depth), array(k.panel, depth * PANEL), array(k.q, rows * units / W),
                 array(k.score, even * STEP), array(k.unused, rows));
        k.part = parts + (head * splits + n) * rows * (width + 2);
        for (int64_t row = 0; row < rows; row++) {
            const T *q = ::at<T>(p.q, p.q_stride, k.b, head_of(k, row), row % p.t);
            E *one = k.packed + row * depth;
            // In float32 the queries carry the scale; in bfloat16 they stay exact.
            pack_query<Op>(one, q, p.q_stride[3], p.d, Op::PAIR == 1 ? (R)p.scale : (R)1);
            for (int64_t x = 0; x < units; x += W) k.q[(row * units + x) / W] = Op::units(one, 1, x, p.d);
            R *part = k.part + row * (width + 2);
            memset(part, 0, sizeof(R) * width);
            part[width] = -INF, part[width + 1] = 0;
            int64_t stop = kept ? smaller(line, (n + 1) * split) : 0;
            for (int64_t j = n * split; j < stop; j++) kept_of(k, row)[j] = -INF;
        }
        Interval some = {p.s, 0}, every = {0, p.s};
        for (int64_t row = 0; row < p.t; row++) {
            Interval own = visible_keys(p, k.b, row);
            some = {smaller(some.begin, own.begin), larger(some.end, own.end)};
            every = {larger(every.begin, own.begin), smaller(every.end, own.end)};
        }
        bool never = p.slopes || p.bias || p.keep || p.key_ids;
        int64_t end = smaller(some.end, (n + 1) * split);
        for (int64_t first = larger(some.begin, n * split); first < end; first += STEP) {
            int64_t count = smaller<int64_t>(STEP, end - first);
            p.again ? score_packed(k, first, count) : score(k, first, count);
            bool whole = !never && every.begin <= first && first + count <= every.end;
            for (int64_t row = 0; row < rows; row++) finish(k, row, first, count);
            if (!known && whole) add(k, first, count);
            if (!known && !whole) add_seen(k, first, count);
        }
    }

    // Products of all queries with count keys, with the bits of every other pass.
    void score_packed(const Split &k, int64_t first, int64_t count) const {
        for (int64_t c = 0; c < count; c += PANEL) {
            int64_t columns = smaller<int64_t>(PANEL, count - c);
            for (int64_t j = 0; j < columns; j += W) {
                const T *keys = at<T>(p.k, p.k_stride, k.b, k.g, first + c + j);
                for (int64_t n = 0; n < W; n++) fetch(keys + (AHEAD + n) * p.k_stride[2], p.d);
                pack_columns<Op>(k.panel + j * Op::PAIR, keys, p.k_stride + 2, smaller<int64_t>(W, columns - j), p.d);
            }
            columns_of<Op, false, false>((int)rows, columns, k.packed, depth, k.panel, k.score + c, STEP, depth,
                                         k.unused);
        }
    }

    // The same, each key read once as it lies: of so many queries at a time, which share a key in the registers.
    void score(const Split &k, int64_t first, int64_t count) const {
        bool fits = p.k_stride[3] == 1 && p.d % (W * Op::PAIR) == 0;
        each_four(rows, [&](int64_t row, auto group) { score_rows<group>(k, row, first, count, fits); });
    }

    template <int ROWS> void score_rows(const Split &k, int64_t row, int64_t first, int64_t count, bool fits) const {
        const T *keys = at<T>(p.k, p.k_stride, k.b, k.g, first);
        const V *q = k.q + row * units / W;
        for (int64_t j = 0; j < count; j += W) {
            V sum[ROWS][W];
            int64_t some = smaller<int64_t>(W, count - j);
            for (int64_t n = some; n < W; n++)
                for (int i = 0; i < ROWS; i++) sum[i][n] = V{};
            for (int64_t n = 0; n < some; n++) {
                const T *key = keys + (j + n) * p.k_stride[2];
                if (row == 0) fetch(key + AHEAD * p.k_stride[2], p.d);
                V one[ROWS] = {};
                if (fits)
                    for (int64_t x = 0; x < units; x += W)
                        add_units<ROWS>(one, q + x / W, Op::units(key, 1, x, units * Op::PAIR));
                else
                    for (int64_t x = 0; x < units; x += W)
                        add_units<ROWS>(one, q + x / W, Op::units(key, p.k_stride[3], x, p.d));
                for (int i = 0; i < ROWS; i++) sum[i][n] = one[i];
            }
            for (int i = 0; i < ROWS; i++) store(k.score + (row + i) * STEP + j, sums(sum[i]));
        }
    }

    template <int ROWS> void add_units(V *sum, const V *q, V key) const {
        for (int i = 0; i < ROWS; i++) sum[i] = Op::add(sum[i], q[i * units / W], key);
    }

    INLINE void fetch(const T *row, int64_t numbers) {
        for (int64_t x = 0; x < numbers; x += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + x);
    }

    // Products become scores with softcap, bias and mask.
    void finish(const Split &k, int64_t row, int64_t first, int64_t count) const {
        R *score = k.score + row * STEP;
        int64_t whole = up(count, W);
        soften(p, unit, score, nullptr, whole);
        Interval own = visible_keys(p, k.b, row % p.t);
        own.end = smaller(own.end, first + count);
        constrain<3>(p, score, k.b, head_of(k, row), row % p.t, first, count, whole, own);
        if (kept) memcpy(kept_of(k, row) + first, score, sizeof(R) * count);
    }

    // Scores become weights under the maximum so far, and what was summed shrinks with it.
    void weigh(const Split &k, int64_t row, int64_t count) const {
        R *score = k.score + row * STEP, *part = k.part + row * (width + 2), before = part[width];
        V top = all(before), sum = {};
        for (int64_t j = 0; j < count; j += W) top = max(load(score + j), top);
        R now = highest(top);
        V ground = all(now == -INF ? (R)0 : now);
        for (int64_t j = 0; j < count; j += W) {
            V weight = exp2(exponent(load(score + j), ground));
            store(score + j, weight);
            sum += weight;
        }
        R shrink = before == -INF ? (R)0 : (R)std::exp2((before - now) * LOG2E);
        if (now != before)
            for (int64_t x = 0; x < width; x += W) store(part + x, shrink * load(part + x));
        part[width] = now, part[width + 1] = ::sum(sum) + (now != before ? shrink : (R)1) * part[width + 1];
    }

    // Weights of keys that all see, times their values: of so many queries and columns at a time.
    void add(const Split &k, int64_t first, int64_t count) const {
        for (int64_t row = 0; row < rows; row++) weigh(k, row, up(count, W));
        const T *values = at<T>(p.v, p.v_stride, k.b, k.g, first);
        each_four(rows, [&](int64_t row, auto group) { add_rows<group, group <= 2 ? 8 : 4>(k, row, values, count); });
    }

    template <int ROWS, int N> void add_rows(const Split &k, int64_t row, const T *values, int64_t count) const {
        for (int64_t x = 0; x < p.w; x += N * W) {
            int64_t some = smaller<int64_t>(N, (width - x) / W);
            bool fits = p.v_stride[3] == 1 && x + some * W <= p.w;
            if (N == 8 && fits && some == 8) add_some<ROWS, N>(k, row, x, values, count, 8, true);
            else if (fits && some == 4) add_some<ROWS, 4>(k, row, x, values, count, 4, true);
            else add_some<ROWS, N>(k, row, x, values, count, some, false);
        }
    }

    template <int ROWS, int N>
    void add_some(const Split &k, int64_t row, int64_t x, const T *values, int64_t count, int64_t some,
                            bool fits) const {
        V sum[ROWS][N] = {};
        const R *weight = k.score + row * STEP;
        for (int64_t j = 0; j < count; j++) {
            const T *value = values + j * p.v_stride[2];
            V v[N] = {};
            if (fits) {
                fetch(value + AHEAD * p.v_stride[2] + x, N * W);
                for (int n = 0; n < N; n++) v[n] = wide(value + x + n * W);
            } else {
                for (int n = 0; n < some; n++) v[n] = Single::units(value, p.v_stride[3], x + n * W, p.w);
            }
            for (int i = 0; i < ROWS; i++)
                for (int n = 0; n < N; n++) sum[i][n] += all(weight[i * STEP + j]) * v[n];
        }
        for (int i = 0; i < ROWS; i++) {
            R *to = k.part + (row + i) * (width + 2) + x;
            for (int n = 0; n < some; n++) store(to + n * W, load(to + n * W) + sum[i][n]);
        }
    }

    // The same where some see what others don't: whatever a hidden value holds, it isn't touched.
    void add_seen(const Split &k, int64_t first, int64_t count) const {
        const T *values = at<T>(p.v, p.v_stride, k.b, k.g, first);
        for (int64_t row = 0; row < rows; row++) {
            R *weight = k.score + row * STEP, *to = k.part + row * (width + 2);
            bool visible[STEP];
            for (int64_t j = 0; j < count; j++) visible[j] = !(weight[j] == -INF);
            weigh(k, row, up(count, W));
            for (int64_t j = 0; j < count; j++)
                for (int64_t x = 0; visible[j] && x < p.w; x += W) {
                    V v = Single::units(values + j * p.v_stride[2], p.v_stride[3], x, p.w);
                    store(to + x, load(to + x) + weight[j] * v);
                }
        }
    }

    // The parts of a query's output become one.
    void merge(int64_t head) const {
        int64_t b = head / p.g, g = head % p.g, size = width + 2;
        for (int64_t row = 0; row < rows; row++) {
            int64_t h = g * (p.h / p.g) + row / p.t, t = row % p.t;
            R *part = parts + (head * splits * rows + row) * size, sink = p.sink ? ((const R *)p.sink)[h] : -INF;
            R top = sink;
            for (int64_t n = 0; n < splits; n++) top = larger(top, part[n * rows * size + width]);
            Wide total = sink == -INF ? 0 : std::exp2((sink - top) * LOG2E);
            for (int64_t n = 0; n < splits; n++) {
                R *own = part + n * rows * size;
                R by = own[width] == -INF ? (R)0 : (R)std::exp2((own[width] - top) * LOG2E);
                total += by * own[width + 1];
                for (int64_t x = 0; x < width; x += W)
                    store(part + x, (n ? load(part + x) : V{}) + by * load(own + x));
            }
            R by = total == 0 ? (R)0 : (R)(1 / total);
            T *out = (T *)p.out + b * p.out_stride[0] + h * p.out_stride[1] + t * p.out_stride[2];
            each(p.w, p.out_stride[3], [&](int64_t x, int64_t at) { narrow(by * part[x], out[at]); });
            if (p.lse) ((R *)p.lse)[(b * p.h + h) * p.t + t] = total == 0 ? -INF : (R)(top + std::log(total));
        }
    }

    static void computing(void *data) {
        Decode &all = *(Decode *)data;
        [[maybe_unused]] typename Op::Ready ready;
        int64_t items = all.p.b * all.p.g * all.splits;
        share(all.next, items, [&](int64_t n) { all.compute(n / all.splits, n % all.splits); });
    }

    void run() {
        parallel(2. * p.b * p.h * p.t * p.s * (p.d + p.w) < 4e6 ? 1 : p.threads, computing, this);
        for (int64_t head = 0; !known && head < p.b * p.g; head++) merge(head);
    }
};

}  // namespace
