// The gradient, compiled once for each vector width (LEVEL names the build).
//
// Scores are computed again, and weights from the log-sum-exp (Dao et al. 2022, arXiv:2205.14135). A thread owns
// blocks of keys and walks over the queries that see them, so that scores lie [keys, queries]: what a row of
// weights is multiplied by to be a gradient of values or keys then lies as `product` wants it, and so do, as a
// panel, the gradients of scores that are summed over keys. Gradients of queries are summed per chunk, a fixed
// choice of blocks, and chunks in order: the bits depend on neither threads nor chance.
#include "decode_gradient.h"
#include "products.h"

#include <cmath>

namespace {

constexpr int KEYS = 96;      // in a block
constexpr int QUERIES = 128;  // in a step

template <class T, class Op> struct Backward {
    typedef typename Op::E E;
    static constexpr bool PAIRS = Op::PAIR == 2;

    const Problem &p;
    const Gradient &y;
    int64_t panels, depth, deep;     // panels of queries; d and w rounded up as products need it
    int64_t lines;                   // d, as many as the rows of a product that gives gradients of queries
    int64_t key_row, value_row;      // depth and deep in whole vectors
    int64_t across, over;            // panels of d, of w
    int64_t blocks, chunks;          // of keys; of these blocks
    E *q_columns, *q_rows;           // [b * h, panels, depth, PANEL], [b * h, across, panels * PANEL, PANEL]
    E *out_columns, *out_rows;       // of the gradient of the output, the same with deep and over
    R *lse;                          // [b * h, panels * PANEL]: infinite where nothing is seen
    R *delta;                        // the same: what a row's gradients of weights are on average
    R *dq;                           // [b * h, chunks, lines, panels * PANEL]: without the scale
    R unit;                          // what products are multiplied by: as the forward pass does it, to the bit
    int64_t next = 0;
    bool odd = false;                // is something not finite? What is masked would leak: nothing here is of use

    Backward(const Problem &p, const Gradient &y) : p(p), y(y) {
        panels = up(p.t, PANEL) / PANEL;
        depth = up(p.d, Op::DEPTH), deep = up(p.w, Op::DEPTH), lines = up(p.d, Op::EVEN);
        key_row = up(depth, W), value_row = up(deep, W);
        across = up(p.d, PANEL) / PANEL, over = up(p.w, PANEL) / PANEL;
        blocks = up(p.s, KEYS) / KEYS, chunks = smaller(y.chunks, blocks);
        unit = PAIRS ? (R)p.scale : (R)1;
        int64_t rows = p.b * p.h * panels * PANEL;
        allocate(store_of, array(q_columns, rows * depth), array(q_rows, rows * across * PANEL),
                 array(out_columns, rows * deep), array(out_rows, rows * over * PANEL), array(lse, rows),
                 array(delta, rows), array(dq, rows * chunks * lines));
    }

    // -- queries ------------------------------------------------------------------------------------

    // Packs a panel of queries and of gradients of their outputs; what else a row needs is two numbers.
    void pack(int64_t head, int64_t panel) {
        int64_t first = panel * PANEL, count = smaller<int64_t>(PANEL, p.t - first), b = head / p.h, h = head % p.h;
        const int64_t *d_step = y.d_out_stride, *out_step = p.out_stride;
        const T *q = at<T>(p.q, p.q_stride, b, h, first), *d = at<T>(y.d_out, d_step, b, h, first);
        const T *out = at<T>(p.out, out_step, b, h, first);
        int64_t place = head * panels + panel;
        pack_columns<Op>(q_columns + place * depth * PANEL, q, p.q_stride + 2, count, p.d, (R)p.scale);
        pack_columns<Op>(out_columns + place * deep * PANEL, d, d_step + 2, count, p.w);
        int64_t apart = panels * PANEL * PANEL;
        E *q_to = q_rows + (head * across * panels + panel) * PANEL * PANEL;
        E *d_to = out_rows + (head * over * panels + panel) * PANEL * PANEL;
        uint8_t kinds[2][PANEL];
        pack_rows<Op>(q_to, apart, q, p.q_stride + 2, count, p.d, kinds[0]);
        pack_rows<Op>(d_to, apart, d, d_step + 2, count, p.w, kinds[1]);
        if (any(kinds[0], count, INFINITE) || any(kinds[1], count, INFINITE)) __atomic_store_n(&odd, true, __ATOMIC_RELAXED);
        R *norm = lse + place * PANEL, *mean = delta + place * PANEL;
        for (int64_t n = 0; n < PANEL; n++) {
            int64_t row = head * p.t + first + n;
            R l = n < count ? ((const R *)p.lse)[row] : -(R)INF;
            norm[n] = l == -INF ? INF : l;
            R sum = 0;
            for (int64_t x = 0; n < count && x < p.w; x++)
                sum += wide(d[n * d_step[2] + x * d_step[3]]) * wide(out[n * out_step[2] + x * out_step[3]]);
            mean[n] = n < count && y.d_lse ? sum - ((const R *)y.d_lse)[row] : sum;
            if (n < count && y.delta) ((R *)y.delta)[row] = mean[n];
        }
    }

    // -- blocks of keys -----------------------------------------------------------------------------

    struct Block {
        int64_t b, g, chunk, first, count;  // count: of keys
        E *k, *k_down, *v;        // [KEYS, key_row], [lines, KEYS], [KEYS, value_row]
        R *dk, *dv;               // [KEYS, across * PANEL], [KEYS, over * PANEL]
        R *score, *grad, *bend;   // [KEYS, QUERIES]: scores, gradients of weights, what the softcap bends them by
        E *weight, *pull, *pairs; // the same places in float32; weights, and gradients of scores in both orders
        V *unused;                // [KEYS]
    };

    Interval seen_by(const Block &k, int64_t j) const {  // the queries that see a key, but for ids, keep and bias
        if (p.first && !(p.first[k.b] <= j && j < p.last[k.b])) return {0, 0};
        int64_t offset = offset_of(p, k.b), begin = smaller(larger<int64_t>(j - p.high - offset, 0), p.t);
        return {begin, larger(smaller(j - p.low - offset + 1, p.t), begin)};
    }

    Block block_of(int64_t b, int64_t g, int64_t chunk, int64_t block) const {
        Block k = {};
        k.b = b, k.g = g, k.chunk = chunk, k.first = block * KEYS;
        k.count = smaller<int64_t>(KEYS, p.s - k.first);
        int64_t tile = KEYS * QUERIES, small = PAIRS ? tile : 0;
        allocate(scratch, array(k.k, KEYS * key_row), array(k.k_down, KEYS * lines), array(k.v, KEYS * value_row),
                 array(k.dk, KEYS * across * PANEL), array(k.dv, KEYS * over * PANEL), array(k.score, tile),
                 array(k.grad, tile), array(k.bend, p.softcap ? tile : 0), array(k.weight, small),
                 array(k.pull, small), array(k.pairs, small), array(k.unused, KEYS));
        if (!PAIRS) k.weight = (E *)k.score, k.pull = k.pairs = (E *)k.grad;
        return k;
    }

    // The keys and values of a block, and zeros for their gradients.
    void open(const Block &k) {
        const T *keys = at<T>(p.k, p.k_stride, k.b, k.g, k.first);
        const T *values = at<T>(p.v, p.v_stride, k.b, k.g, k.first);
        bool fine = copy(k.k, key_row, k.k_down, keys, p.k_stride + 2, k.count, p.d);
        fine &= copy(k.v, value_row, nullptr, values, p.v_stride + 2, k.count, p.w);
        if (!fine) __atomic_store_n(&odd, true, __ATOMIC_RELAXED);
        memset(k.dk, 0, sizeof(R) * k.count * across * PANEL);
        memset(k.dv, 0, sizeof(R) * k.count * over * PANEL);
    }

    // Copies rows of keys or values, and, unless `down` is null, their columns to down [width, KEYS]. Zeros round both up
    // along a product's depth. Returns whether all numbers are finite.
    static bool copy(E *to, int64_t to_row, E *down, const T *rows, const int64_t step[2], int64_t count, int64_t width) {
        V sums = {};  // of zeros, unless something isn't finite
        for (int64_t j = 0; j < up(count, Op::DEPTH); j += W)
            for (int64_t x = 0; x < to_row; x += W) {
                V block[W];
                for (int64_t n = 0; n < W; n++) {
                    bool real = j + n < count && x < width;
                    block[n] = real ? Single::units(rows + (j + n) * step[0], step[1], x, width) : V{};
                    sums += block[n] - block[n];
                    Op::round(to + (j + n) * to_row + x, block[n]);
                }
                if (!down) continue;
                transpose(block);
                for (int64_t m = 0; m < smaller<int64_t>(W, width - x); m++)
                    Op::round(down + (x + m) * KEYS + j, block[m]);
            }
        return sum(sums) == 0;
    }

    void close(const Block &k) const {
        int64_t at = (k.b * p.g + k.g) * p.s + k.first;
        T *dk = (T *)y.dk + at * p.d, *dv = (T *)y.dv + at * p.w;
        for (int64_t j = 0; j < k.count; j++) {
            for (int64_t x = 0; x < p.d; x++) narrow((R)p.scale * k.dk[j * across * PANEL + x], dk[j * p.d + x]);
            for (int64_t x = 0; x < p.w; x++) narrow(k.dv[j * over * PANEL + x], dv[j * p.w + x]);
        }
    }

    // Products of one row become scores, −∞ where they aren't seen; what the softcap bends its gradient by is kept.
    void finish(const Block &k, int64_t h, int64_t row, int64_t first, int64_t count) const {
        R *score = k.score + row * QUERIES;
        soften(p, unit, score, k.bend + row * QUERIES, count);
        int64_t j = k.first + row;
        constrain<2>(p, score, k.b, h, first, j, smaller(count, p.t - first), count, seen_by(k, j));
    }

    // Scores (or, where plain, products) and gradients of weights become weights and gradients of scores.
    void weigh(const Block &k, int64_t row, const R *lse, const R *delta, int64_t count, bool plain) const {
        R *score = k.score + row * QUERIES, *grad = k.grad + row * QUERIES;
        for (int64_t n = 0; n < count; n += W) {
            V s = load(score + n);
            if (PAIRS && plain) s = rounded(unit * s);
            V weight = exp2(exponent(s, load(lse + n)));
            V pull = weight * (load(grad + n) - load(delta + n));
            if (!plain) {
                I hidden = s == -INF;
                weight = (V)((I)weight & ~hidden), pull = (V)((I)pull & ~hidden);
            }
            store(score + n, weight), store(grad + n, pull);
        }
    }

    // What the gradients of scores add to those of bias and slopes; the softcap bends them after.
    void collect(const Block &k, int64_t h, int64_t row, int64_t first, int64_t count, R &slope) const {
        R *grad = k.grad + row * QUERIES;
        int64_t away = k.first + row - first - offset_of(p, k.b);
        if (y.d_bias) {
            const int64_t *step = y.d_bias_stride;
            R *to = (R *)at<R>(y.d_bias, step, k.b, h, first) + (k.first + row) * step[3];
            for (int64_t n = 0; n < count; n++) to[n * step[2]] += grad[n];
        }
        if (y.d_slopes)
            for (int64_t n = 0; n < count; n++) slope -= grad[n] * std::fabs((R)(away - n));
        if (p.softcap)
            for (int64_t n = 0; n < count; n += W) store(grad + n, load(grad + n) * load(k.bend + row * QUERIES + n));
    }

    // Queries first … first + count of a head, with a block of keys. plain: each sees each, and nothing is added.
    void step(const Block &k, int64_t h, int64_t first, int64_t count, bool plain) const {
        int64_t head = k.b * p.h + h, rows = panels * PANEL, at = head * rows + first;
        int64_t even = up(k.count, Op::DEPTH), whole = up(count, W), used = up(count, Op::DEPTH);
        for (int64_t c = 0; c < count; c += PANEL) {
            int64_t columns = smaller<int64_t>(PANEL, count - c);
            columns_of<Op, false, false>((int)even, columns, k.k, key_row, q_columns + (at + c) * depth, k.score + c,
                                         QUERIES, depth, k.unused);
            columns_of<Op, false, false>((int)even, columns, k.v, value_row, out_columns + (at + c) * deep, k.grad + c,
                                         QUERIES, deep, k.unused);
        }
        R slope = 0;
        for (int64_t row = 0; row < k.count; row++) {
            if (!plain) finish(k, h, row, first, whole);
            weigh(k, row, lse + at, delta + at, whole, plain);
            if (y.d_bias || y.d_slopes || p.softcap) collect(k, h, row, first, count, slope);
        }
        for (int64_t row = k.count; row < even; row++) {
            memset(k.score + row * QUERIES, 0, sizeof(R) * whole);
            memset(k.grad + row * QUERIES, 0, sizeof(R) * whole);
        }
        if (y.d_slopes) ((R *)y.d_slopes)[head * y.chunks + k.chunk] += slope;
        if constexpr (PAIRS) round(k, even, whole, used);
        const E *outs = out_rows + head * over * rows * PANEL, *queries = q_rows + head * across * rows * PANEL;
        for (int64_t a = 0; a < over; a++)
            columns_of<Op, true, false>((int)k.count, smaller<int64_t>(PANEL, p.w - a * PANEL), k.weight, QUERIES,
                                        outs + (a * rows + first) * PANEL, k.dv + a * PANEL, over * PANEL, used,
                                        k.unused);
        for (int64_t a = 0; a < across; a++)
            columns_of<Op, true, false>((int)k.count, smaller<int64_t>(PANEL, p.d - a * PANEL), k.pull, QUERIES,
                                        queries + (a * rows + first) * PANEL, k.dk + a * PANEL, across * PANEL, used,
                                        k.unused);
        R *to = dq + (head * chunks + k.chunk) * lines * rows + first;
        for (int64_t c = 0; c < count; c += PANEL)
            columns_of<Op, true, false, QUERIES>((int)p.d, smaller<int64_t>(PANEL, count - c), k.k_down, KEYS,
                                                 k.pairs + c * Op::PAIR, to + c, rows, even, k.unused);
    }

    // Weights and gradients of scores in bfloat16, the latter in both orders; zeros up to `used`.
    void round(const Block &k, int64_t rows, int64_t count, int64_t used) const {
        for (int64_t row = 0; row < rows && count < used; row++)
            memset(k.weight + row * QUERIES + count, 0, sizeof(E) * (used - count)),
                memset(k.pull + row * QUERIES + count, 0, sizeof(E) * (used - count));
        for (int64_t row = 0; row < rows; row += 2)
            for (int64_t n = 0; n < count; n += W) {
                int64_t at = row * QUERIES + n, next = at + QUERIES;
                Op::round(k.weight + at, load(k.score + at)), Op::round(k.weight + next, load(k.score + next));
                Op::round(k.pull + at, load(k.grad + at)), Op::round(k.pull + next, load(k.grad + next));
                Op::pair(k.pairs + at + n, load(k.grad + at), load(k.grad + next));
            }
    }

    // All queries that see a block of keys.
    void walk(const Block &k) const {
        int64_t begin = p.t, end = 0, full_begin = 0, full_end = p.t;
        for (int64_t row = 0; row < k.count; row++) {
            Interval by = seen_by(k, k.first + row);
            if (by.begin < by.end) begin = smaller(begin, by.begin), end = larger(end, by.end);
            full_begin = larger(full_begin, by.begin), full_end = smaller(full_end, by.end);
        }
        bool never = p.softcap || p.slopes || p.bias || p.keep || p.key_ids;
        for (int64_t h = k.g * (p.h / p.g); h < (k.g + 1) * (p.h / p.g); h++)
            for (int64_t first = begin / PANEL * PANEL; first < end; first += QUERIES) {
                int64_t count = smaller<int64_t>(QUERIES, end - first);
                if (p.key_ids && !shares(k, first, count)) continue;
                bool plain = !never && full_begin <= first && first + count <= full_end;
                step(k, h, first, count, plain && (count % W == 0 || first + count == p.t));  // vectors are whole
            }
    }

    bool shares(const Block &k, int64_t first, int64_t count) const {  // is an id of these queries one of a key's?
        const int64_t *queries = p.query_ids + k.b * p.query_ids_stride + first;
        const int64_t *keys = p.key_ids + k.b * p.key_ids_stride + k.first;
        int64_t least = queries[0], most = queries[0], low = keys[0], high = keys[0];
        for (int64_t n = 1; n < count; n++) least = smaller(least, queries[n]), most = larger(most, queries[n]);
        for (int64_t n = 1; n < k.count; n++) low = smaller(low, keys[n]), high = larger(high, keys[n]);
        return least <= high && low <= most;
    }

    // -- gradients of queries -----------------------------------------------------------------------

    void write(int64_t head, int64_t panel) const {
        int64_t first = panel * PANEL, count = smaller<int64_t>(PANEL, p.t - first), rows = panels * PANEL;
        T *to = (T *)y.dq + (head * p.t + first) * p.d;
        const R *from = dq + head * chunks * lines * rows + first;
        for (int64_t x = 0; x < p.d; x += W) {
            int64_t some = smaller<int64_t>(W, p.d - x);
            for (int64_t n = 0; n < count; n += W) {
                V block[W];
                for (int64_t m = 0; m < W; m++) {
                    block[m] = V{};
                    if (m < some)
                        for (int64_t chunk = 0; chunk < chunks; chunk++)
                            block[m] += load(from + (chunk * lines + x + m) * rows + n);
                }
                transpose(block);
                for (int64_t m = 0; m < smaller<int64_t>(W, count - n); m++)
                    for (int64_t c = 0; c < some; c++) narrow((R)p.scale * block[m][c], to[(n + m) * p.d + x + c]);
            }
        }
    }

    // -- threads ------------------------------------------------------------------------------------

    static void packing(void *data) {
        Backward &all = *(Backward *)data;
        share(all.next, all.p.b * all.p.h * all.panels, [&](int64_t n) { all.pack(n / all.panels, n % all.panels); });
    }

    // One chunk of a head, or, where heads add to the same gradient of a bias, of all heads in order.
    static void walking(void *data) {
        Backward &all = *(Backward *)data;
        [[maybe_unused]] typename Op::Ready ready;
        int64_t heads = all.p.b * all.p.g, together = all.y.shared ? heads : 1;
        share(all.next, heads / together * all.chunks, [&](int64_t n) {
            int64_t first = n / all.chunks * together;
            for (int64_t head = first; head < first + together; head++) all.walk_chunk(head, n % all.chunks);
        });
    }

    void walk_chunk(int64_t head, int64_t chunk) {
        int64_t size = lines * panels * PANEL, queries = p.h / p.g;
        for (int64_t h = head * queries; h < (head + 1) * queries; h++)
            memset(dq + (h * chunks + chunk) * size, 0, sizeof(R) * size);
        for (int64_t block = chunk; block < blocks; block += chunks) {
            Block k = block_of(head / p.g, head % p.g, chunk, block);
            open(k);
            walk(k);
            close(k);
        }
    }

    static void writing(void *data) {
        Backward &all = *(Backward *)data;
        share(all.next, all.p.b * all.p.h * all.panels, [&](int64_t n) { all.write(n / all.panels, n % all.panels); });
    }

    int run() {
        int64_t threads = 5. * p.b * p.h * p.t * p.s * (p.d + p.w) < 4e6 ? 1 : p.threads;
        void (*phases[])(void *) = {packing, walking, writing};
        for (auto phase : phases) {
            next = 0;
            parallel(threads, phase, this);
            if (odd) break;
        }
        forget();
        return odd ? 2 : 0;
    }
};

}  // namespace

#define NAME2(level) differentiate_##level
#define NAME(level) NAME2(level)

namespace {

constexpr int FEW = 12, SOME = 48;  // queries that share a key

// Few queries don't pay for packing keys in both orders, nor do some, if half of the vectors that hold a head's queries
// would be empty.
template <class T, class Op> int differentiate(const Problem &p, const Gradient &y) {
    int64_t group = p.h / p.g, rows = group * p.t;
    bool few = rows <= FEW || (rows <= SOME && 2 * rows <= group * up(p.t, W));
    if (few && !y.d_bias && !y.d_slopes) return DecodeGradient<T, Op>(p, y).run();
    return Backward<T, Op>(p, y).run();
}

}  // namespace

int NAME(LEVEL)(const Problem *p, const Gradient *y) {
#if defined(REAL)
    return differentiate<double, Single>(*p, *y);
#else
    switch (p->dtype) {
        case FLOAT32: return differentiate<float, Single>(*p, *y);
        case FLOAT16: return differentiate<Half, Single>(*p, *y);
        case BFLOAT16: return differentiate<Brain, Brains>(*p, *y);
    }
    return 0;
#endif
}
