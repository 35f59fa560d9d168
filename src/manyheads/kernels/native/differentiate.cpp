// The gradient, compiled once for each vector width (LEVEL names the build).
//
// Scores are computed again, and weights from them and the log-sum-exp (Dao et al. 2022, arXiv:2205.14135). A thread
// computes blocks of keys, each with the queries to which some of its keys are visible. Scores are laid out as [keys,
// queries]: `multiply` needs weights and gradients of scores in this layout, as its left side or as a panel, so that
// nothing is transposed. Gradients of queries are summed in each chunk, which is a fixed set of blocks, and then over
// chunks in order. So the bits depend neither on the number of threads nor on their timing.
#include "decode_gradient.h"

#include <cmath>

namespace {

constexpr int QUERIES = 128;              // in a step
constexpr int64_t OWN_NUMBERS = 1 << 20;  // the most packed numbers of a head that one thread packs and computes

template <class T, class Op> struct Backward {
    typedef typename Op::Element Element;
    static constexpr bool PAIRS = Op::PAIR == 2;
    static constexpr int KEYS = Op::ROWS_MULTIPLE > 1 ? 128 : 96;  // in a block, at most

    const Problem &problem;
    const Gradient &gradient;
    int64_t panels, depth, value_depth;  // panels of queries; d and w rounded up for products
    int64_t lines;                       // d rounded up to the rows of a product
    int64_t key_row, value_row;          // depth and value_depth in whole vectors
    int64_t key_panels, value_panels;    // panels of d, of w
    int64_t block_size, blocks, chunks;  // keys of a block; blocks; chunks of blocks
    int64_t first_head = 0;              // the first head of queries in these arrays, which have `heads` of them:
    Element *q_columns, *q_rows;         // [heads, panels, depth, PANEL], [heads, key_panels, panels * PANEL, PANEL]
    Element *out_columns, *out_rows;     // the same of the gradient of the output: value_depth, value_panels
    Real *lse;                           // [heads, panels * PANEL]: infinite where everything is masked
    Real *delta;                         // the same: Σ weight · gradient of the weight, less d_lse
    Real *dq;                            // [heads, chunks, lines, panels * PANEL]: without the scale
    Real unit;                           // a product times this is a score, with the bits of the forward pass
    int64_t next = 0;
    bool has_nonfinite = false;  // if true, the results can't be used: masked numbers would leak into them

    Backward(const Problem &problem, const Gradient &gradient) : problem(problem), gradient(gradient) {
        panels = round_up(problem.t, PANEL) / PANEL;
        depth = round_up(problem.d, Op::DEPTH_MULTIPLE), value_depth = round_up(problem.w, Op::DEPTH_MULTIPLE),
        lines = round_up(problem.d, Op::ROWS_MULTIPLE);
        key_row = round_up(depth, LANES), value_row = round_up(value_depth, LANES);
        key_panels = round_up(problem.d, PANEL) / PANEL, value_panels = round_up(problem.w, PANEL) / PANEL;
        // The keys of a single head are divided in two if they would be one block, so that two threads can share them.
        bool is_single = problem.b * problem.g == 1 && problem.s <= KEYS;
        block_size = is_single ? round_up((problem.s + 1) / 2, LANES) : KEYS;
        blocks = round_up(problem.s, block_size) / block_size, chunks = smaller(gradient.chunks, blocks);
        unit = PAIRS ? (Real)problem.scale : (Real)1;
    }

    void reserve(int64_t heads) {
        int64_t rows = heads * panels * PANEL;
        allocate(call_storage, array(q_columns, rows * depth), array(q_rows, rows * key_panels * PANEL),
                 array(out_columns, rows * value_depth), array(out_rows, rows * value_panels * PANEL), array(lse, rows),
                 array(delta, rows), array(dq, rows * chunks * lines));
    }

    // -- queries ------------------------------------------------------------------------------------

    // Packs a panel of queries and of gradients of their outputs, and computes lse and delta of its rows.
    void pack(int64_t head, int64_t panel) {
        int64_t first = panel * PANEL, count = smaller<int64_t>(PANEL, problem.t - first), b = head / problem.h,
                h = head % problem.h;
        const int64_t *d_step = gradient.d_out_stride, *out_step = problem.out_stride;
        const T *q = row_at<T>(problem.q, problem.q_stride, b, h, first),
                *d = row_at<T>(gradient.d_out, d_step, b, h, first);
        const T *out = row_at<T>(problem.out, out_step, b, h, first);
        int64_t local = head - first_head, place = local * panels + panel;
        pack_columns<Op>(q_columns + place * depth * PANEL, q, problem.q_stride + 2, count, problem.d,
                         (Real)problem.scale);
        pack_columns<Op>(out_columns + place * value_depth * PANEL, d, d_step + 2, count, problem.w);
        int64_t apart = panels * PANEL * PANEL;
        Element *q_to = q_rows + (local * key_panels * panels + panel) * PANEL * PANEL;
        Element *d_to = out_rows + (local * value_panels * panels + panel) * PANEL * PANEL;
        uint8_t kinds[2][PANEL];
        pack_rows<Op>(q_to, apart, q, problem.q_stride + 2, count, problem.d, kinds[0]);
        pack_rows<Op>(d_to, apart, d, d_step + 2, count, problem.w, kinds[1]);
        if (any(kinds[0], count, INFINITE) || any(kinds[1], count, INFINITE))
            __atomic_store_n(&has_nonfinite, true, __ATOMIC_RELAXED);
        Real *norm = lse + place * PANEL, *mean = delta + place * PANEL;
        for (int64_t n = 0; n < PANEL; n++) {
            int64_t row = head * problem.t + first + n;
            Real l = n < count ? ((const Real *)problem.lse)[row] : -(Real)INF;
            norm[n] = l == -INF ? INF : l;
            // In the order of the product with values: in float32, the gradients of scores of a row with one key are exactly 0.
            Real sum = 0;
            for (int64_t x = 0; n < count && x < problem.w; x++)
                sum += widen(d[n * d_step[2] + x * d_step[3]]) * widen(out[n * out_step[2] + x * out_step[3]]);
            mean[n] = n < count && gradient.d_lse ? sum - ((const Real *)gradient.d_lse)[row] : sum;
            if (n < count && gradient.delta) ((Real *)gradient.delta)[row] = mean[n];
        }
    }

    // -- blocks of keys -----------------------------------------------------------------------------

    struct Block {
        int64_t b, g, chunk, first, count;   // count: of keys
        Element *keys, *key_columns;         // [KEYS, key_row], [lines, KEYS]
        Element *values;                     // [KEYS, value_row]
        Real *dk, *dv;                       // [KEYS, key_panels * PANEL], [KEYS, value_panels * PANEL]
        Real *score, *d_weight, *cap_slope;  // [KEYS, QUERIES]: scores, gradients of weights, slopes of the softcap
        Element *weights, *d_scores;         // [KEYS, QUERIES]: in float32 they are `score` and `d_weight`
        Element *d_score_pairs;              // gradients of scores as a panel whose pairs are along the keys
        Vector *unused;                      // [KEYS]
    };

    // Returns the queries to which key j is visible by the band and the lengths.
    Interval visible_queries(const Block &block, int64_t j) const {
        if (problem.first && !(problem.first[block.b] <= j && j < problem.last[block.b])) return {0, 0};
        int64_t offset = offset_of(problem, block.b),
                begin = smaller(larger<int64_t>(j - problem.high - offset, 0), problem.t);
        return {begin, larger(smaller(j - problem.low - offset + 1, problem.t), begin)};
    }

    Block block_of(int64_t b, int64_t g, int64_t chunk, int64_t index) const {
        Block block = {};
        block.b = b, block.g = g, block.chunk = chunk, block.first = index * block_size;
        block.count = smaller(block_size, problem.s - block.first);
        int64_t tile = KEYS * QUERIES, small = PAIRS ? tile : 0;
        allocate(scratch, array(block.keys, KEYS * key_row), array(block.key_columns, KEYS * lines),
                 array(block.values, KEYS * value_row), array(block.dk, KEYS * key_panels * PANEL),
                 array(block.dv, KEYS * value_panels * PANEL), array(block.score, tile), array(block.d_weight, tile),
                 array(block.cap_slope, problem.softcap ? tile : 0), array(block.weights, small),
                 array(block.d_scores, small), array(block.d_score_pairs, small), array(block.unused, KEYS));
        if (!PAIRS)
            block.weights = (Element *)block.score, block.d_scores = block.d_score_pairs = (Element *)block.d_weight;
        return block;
    }

    // Reads the keys and values of a block and clears their gradients.
    void read_keys(const Block &block) {
        const T *keys = row_at<T>(problem.k, problem.k_stride, block.b, block.g, block.first);
        const T *values = row_at<T>(problem.v, problem.v_stride, block.b, block.g, block.first);
        bool all_finite =
            copy(block.keys, key_row, block.key_columns, keys, problem.k_stride + 2, block.count, problem.d);
        all_finite &= copy(block.values, value_row, nullptr, values, problem.v_stride + 2, block.count, problem.w);
        if (!all_finite) __atomic_store_n(&has_nonfinite, true, __ATOMIC_RELAXED);
        memset(block.dk, 0, sizeof(Real) * block.count * key_panels * PANEL);
        memset(block.dv, 0, sizeof(Real) * block.count * value_panels * PANEL);
    }

    // Copies rows of keys or values and, unless `columns` is null, their columns to columns [width, KEYS]. Both are padded
    // with zeros to the depth of a product. Returns true if all numbers are finite.
    static bool copy(Element *to, int64_t to_row, Element *columns, const T *rows, const int64_t step[2], int64_t count,
                     int64_t width) {
        Integers nonfinite = {};  // not 0 in lanes with such a number
        for (int64_t j = 0; j < round_up(count, Op::DEPTH_MULTIPLE); j += LANES)
            for (int64_t x = 0; x < to_row; x += LANES) {
                Vector block[LANES];
                for (int64_t n = 0; n < LANES; n++) {
                    bool real = j + n < count && x < width;
                    block[n] = real ? Single::units(rows + (j + n) * step[0], step[1], x, width) : Vector{};
                    nonfinite |= (Integers)(block[n] - block[n]);
                    Op::round(to + (j + n) * to_row + x, block[n]);
                }
                if (!columns) continue;
                transpose(block);
                for (int64_t m = 0; m < smaller<int64_t>(LANES, width - x); m++)
                    Op::round(columns + (x + m) * KEYS + j, block[m]);
            }
        return !bit_mask(nonfinite != 0);
    }

    // Writes a row of `width` numbers, times a factor; whole vectors of it are read.
    INLINE void write_row(const Real *row, Real factor, T *to, int64_t width) {
        for (int64_t x = 0; x < width; x += LANES)
            narrow(factor * load(row + x), to + x, smaller<int64_t>(LANES, width - x));
    }

    void write_keys(const Block &block) const {
        int64_t at = (block.b * problem.g + block.g) * problem.s + block.first;
        T *dk = (T *)gradient.dk + at * problem.d, *dv = (T *)gradient.dv + at * problem.w;
        for (int64_t j = 0; j < block.count; j++) {
            write_row(block.dk + j * key_panels * PANEL, (Real)problem.scale, dk + j * problem.d, problem.d);
            write_row(block.dv + j * value_panels * PANEL, 1, dv + j * problem.w, problem.w);
        }
    }

    // Turns products of a key into scores, −∞ where masked, and keeps the slopes of the softcap.
    void finish(const Block &block, int64_t h, int64_t row, int64_t first, int64_t count) const {
        Real *score = block.score + row * QUERIES;
        scale_and_cap(problem, unit, score, block.cap_slope + row * QUERIES, count);
        int64_t j = block.first + row;
        apply_bias_and_mask<2>(problem, score, block.b, h, first, j, smaller(count, problem.t - first), count,
                               visible_queries(block, j));
    }

    // Turns scores (products if `plain`) and gradients of weights into weights and gradients of scores.
    void weigh(const Block &block, int64_t row, const Real *lse, const Real *delta, int64_t count, bool plain) const {
        Real *score = block.score + row * QUERIES, *d_weight = block.d_weight + row * QUERIES;
        for (int64_t n = 0; n < count; n += LANES) {
            Vector s = load(score + n);
            if (PAIRS && plain) s = rounded(unit * s);
            Vector weight = exp2(log2_weight(s, load(lse + n)));
            Vector d_score = weight * (load(d_weight + n) - load(delta + n));
            if (!plain) {
                Integers masked = s == -INF;
                weight = (Vector)((Integers)weight & ~masked), d_score = (Vector)((Integers)d_score & ~masked);
            }
            store(score + n, weight), store(d_weight + n, d_score);
        }
    }

    // Adds gradients of scores to those of bias and slopes, and then multiplies them by the slope of the softcap.
    void collect(const Block &block, int64_t h, int64_t row, int64_t first, int64_t count, Real &slope) const {
        Real *d_weight = block.d_weight + row * QUERIES;
        int64_t away = block.first + row - first - offset_of(problem, block.b);
        if (gradient.d_bias) {
            const int64_t *step = gradient.d_bias_stride;
            Real *to = (Real *)row_at<Real>(gradient.d_bias, step, block.b, h, first) + (block.first + row) * step[3];
            for (int64_t n = 0; n < count; n++) to[n * step[2]] += d_weight[n];
        }
        if (gradient.d_slopes)
            for (int64_t n = 0; n < count; n++) slope -= d_weight[n] * std::fabs((Real)(away - n));
        if (problem.softcap)
            for (int64_t n = 0; n < count; n += LANES)
                store(d_weight + n, load(d_weight + n) * load(block.cap_slope + row * QUERIES + n));
    }

    // Computes queries first … first + count of a head with a block of keys. plain: nothing is masked or added.
    void step(const Block &block, int64_t h, int64_t first, int64_t count, bool plain) const {
        int64_t head = block.b * problem.h + h, local = head - first_head, rows = panels * PANEL,
                at = local * rows + first;
        int64_t even = round_up(block.count, Op::DEPTH_MULTIPLE), whole = round_up(count, LANES),
                used = round_up(count, Op::DEPTH_MULTIPLE);
        for (int64_t c = 0; c < count; c += PANEL) {
            int64_t columns = smaller<int64_t>(PANEL, count - c);
            multiply<Op, false, false>((int)even, columns, block.keys, key_row, q_columns + (at + c) * depth,
                                       block.score + c, QUERIES, depth, block.unused);
            multiply<Op, false, false>((int)even, columns, block.values, value_row,
                                       out_columns + (at + c) * value_depth, block.d_weight + c, QUERIES, value_depth,
                                       block.unused);
        }
        Real slope = 0;
        for (int64_t row = 0; row < even; row++) {
            if (row < block.count) {
                if (!plain) finish(block, h, row, first, whole);
                weigh(block, row, lse + at, delta + at, whole, plain);
                if (gradient.d_bias || gradient.d_slopes || problem.softcap)
                    collect(block, h, row, first, count, slope);
            } else {
                memset(block.score + row * QUERIES, 0, sizeof(Real) * whole);
                memset(block.d_weight + row * QUERIES, 0, sizeof(Real) * whole);
            }
            if constexpr (PAIRS)
                if (row % 2) round(block, row - 1, whole, used);
        }
        if (gradient.d_slopes) ((Real *)gradient.d_slopes)[head * gradient.chunks + block.chunk] += slope;
        const Element *outs = out_rows + local * value_panels * rows * PANEL,
                      *queries = q_rows + local * key_panels * rows * PANEL;
        for (int64_t a = 0; a < value_panels; a++)
            multiply<Op, true, false>((int)block.count, smaller<int64_t>(PANEL, problem.w - a * PANEL), block.weights,
                                      QUERIES, outs + (a * rows + first) * PANEL, block.dv + a * PANEL,
                                      value_panels * PANEL, used, block.unused);
        for (int64_t a = 0; a < key_panels; a++)
            multiply<Op, true, false>((int)block.count, smaller<int64_t>(PANEL, problem.d - a * PANEL), block.d_scores,
                                      QUERIES, queries + (a * rows + first) * PANEL, block.dk + a * PANEL,
                                      key_panels * PANEL, used, block.unused);
        Real *to = dq + (local * chunks + block.chunk) * lines * rows + first;
        for (int64_t c = 0; c < count; c += PANEL)
            multiply<Op, true, false, QUERIES>((int)problem.d, smaller<int64_t>(PANEL, count - c), block.key_columns,
                                               KEYS, block.d_score_pairs + Op::template place<QUERIES>(0, c), to + c,
                                               rows, even, block.unused);
    }

    // Rounds two rows of weights and of gradients of scores to bfloat16, the latter in two layouts; zeros up to `used`.
    void round(const Block &block, int64_t row, int64_t count, int64_t used) const {
        for (int64_t at = row * QUERIES; at < (row + 2) * QUERIES && count < used; at += QUERIES)
            memset(block.weights + at + count, 0, sizeof(Element) * (used - count)),
                memset(block.d_scores + at + count, 0, sizeof(Element) * (used - count));
        for (int64_t n = 0; n < count; n += LANES) {
            int64_t at = row * QUERIES + n, next = at + QUERIES;
            Vector first = load(block.d_weight + at), second = load(block.d_weight + next);
            Op::round(block.weights + at, load(block.score + at)),
                Op::round(block.weights + next, load(block.score + next));
            Op::round(block.d_scores + at, first), Op::round(block.d_scores + next, second);
            Op::pair(block.d_score_pairs + Op::template place<QUERIES>(row / 2, n), first, second);
        }
    }

    // Goes through all queries that see a key of a block.
    void compute(const Block &block) const {
        int64_t begin = problem.t, end = 0, full_begin = 0, full_end = problem.t;
        for (int64_t row = 0; row < block.count; row++) {
            Interval by = visible_queries(block, block.first + row);
            if (by.begin < by.end) begin = smaller(begin, by.begin), end = larger(end, by.end);
            full_begin = larger(full_begin, by.begin), full_end = smaller(full_end, by.end);
        }
        bool needs_masking = problem.softcap || problem.slopes || problem.bias || problem.keep || problem.key_ids;
        for (int64_t h = block.g * (problem.h / problem.g); h < (block.g + 1) * (problem.h / problem.g); h++)
            for (int64_t first = begin / PANEL * PANEL; first < end; first += QUERIES) {
                int64_t count = smaller<int64_t>(QUERIES, end - first);
                if (problem.key_ids && !shares_ids(block, first, count)) continue;
                bool plain = !needs_masking && full_begin <= first && first + count <= full_end;
                step(block, h, first, count,
                     plain && (count % LANES == 0 || first + count == problem.t));  // whole vectors
            }
    }

    bool shares_ids(const Block &block, int64_t first, int64_t count) const {  // might a query have the id of a key?
        const int64_t *queries = problem.query_ids + block.b * problem.query_ids_stride + first;
        const int64_t *keys = problem.key_ids + block.b * problem.key_ids_stride + block.first;
        int64_t least = queries[0], most = queries[0], low = keys[0], high = keys[0];
        for (int64_t n = 1; n < count; n++) least = smaller(least, queries[n]), most = larger(most, queries[n]);
        for (int64_t n = 1; n < block.count; n++) low = smaller(low, keys[n]), high = larger(high, keys[n]);
        return least <= high && low <= most;
    }

    // -- gradients of queries -----------------------------------------------------------------------

    void write_queries(int64_t head, int64_t panel) const {
        int64_t first = panel * PANEL, count = smaller<int64_t>(PANEL, problem.t - first), rows = panels * PANEL;
        T *to = (T *)gradient.dq + (head * problem.t + first) * problem.d;
        const Real *from = dq + (head - first_head) * chunks * lines * rows + first;
        for (int64_t x = 0; x < problem.d; x += LANES) {
            int64_t some = smaller<int64_t>(LANES, problem.d - x);
            for (int64_t n = 0; n < count; n += LANES) {
                Vector block[LANES];
                for (int64_t m = 0; m < LANES; m++) {
                    block[m] = Vector{};
                    if (m < some)
                        for (int64_t chunk = 0; chunk < chunks; chunk++)
                            block[m] += load(from + (chunk * lines + x + m) * rows + n);
                }
                transpose(block);
                for (int64_t m = 0; m < smaller<int64_t>(LANES, count - n); m++)
                    narrow((Real)problem.scale * block[m], to + (n + m) * problem.d + x, some);
            }
        }
    }

    // -- threads ------------------------------------------------------------------------------------

    // Computes a chunk of a head. If heads add to the same gradient of a bias, computes this chunk of all heads, in order.
    void compute_chunks(int64_t n) {
        int64_t together = gradient.shared ? problem.b * problem.g : 1, first = n / chunks * together;
        for (int64_t head = first; head < first + together; head++) compute_chunk(head, n % chunks);
    }

    void compute_chunk(int64_t head, int64_t chunk) {
        int64_t size = lines * panels * PANEL, queries = problem.h / problem.g;
        for (int64_t h = head * queries; h < (head + 1) * queries; h++)
            memset(dq + ((h - first_head) * chunks + chunk) * size, 0, sizeof(Real) * size);
        for (int64_t index = chunk; index < blocks; index += chunks) {
            Block block = block_of(head / problem.g, head % problem.g, chunk, index);
            read_keys(block);
            compute(block);
            write_keys(block);
        }
    }

    // Operations of the products of a head of keys.
    double operations() const { return 5. * (problem.h / problem.g) * problem.t * problem.s * (problem.d + problem.w); }

    // Calls f(n) for every n < count, on threads.
    template <class F> void run_all(int64_t count, F f) {
        next = 0;
        run_on<Op>(threads_for(problem, problem.b * problem.g * operations()), [&] { take_each(next, count, f); });
    }

    // Returns true if each thread should pack and compute whole heads of keys. This is faster if heads are small, so that they
    // stay in the thread's caches, and if all threads get about the same number of heads.
    bool threads_own_heads(int64_t threads) const {
        int64_t heads = problem.b * problem.g, numbers = depth + value_depth + (key_panels + value_panels) * PANEL,
                rows = problem.h / problem.g * panels * PANEL;
        return !gradient.shared && operations() < 1e8 && rows * (numbers + chunks * lines) < OWN_NUMBERS &&
               (chunks == 1 || heads % threads == 0 || heads >= 4 * threads);
    }

    void own_heads(int64_t threads) {
        run_on<Op>(threads, [&] {
            Backward own = *this;
            int64_t queries = problem.h / problem.g;
            own.reserve(queries);
            take_each(next, problem.b * problem.g, [&](int64_t n) {
                own.first_head = n * queries;
                for (int64_t m = 0; m < queries * panels; m++) own.pack(n * queries + m / panels, m % panels);
                for (int64_t m = 0; m < chunks && !own.has_nonfinite; m++) own.compute_chunk(n, m);
                for (int64_t m = 0; m < queries * panels && !own.has_nonfinite; m++)
                    own.write_queries(n * queries + m / panels, m % panels);
            });
            if (own.has_nonfinite) __atomic_store_n(&has_nonfinite, true, __ATOMIC_RELAXED);
            release_storage();
        });
    }

    int run() {
        int64_t heads = problem.b * problem.g, threads = threads_for(problem, heads * operations(), heads * chunks);
        if (threads_own_heads(threads)) {
            own_heads(threads);
            return has_nonfinite ? 2 : 0;
        }
        reserve(problem.b * problem.h);
        int64_t count = problem.b * problem.h * panels;
        heads = gradient.shared ? 1 : heads;
        run_all(count, [&](int64_t n) { pack(n / panels, n % panels); });
        if (!has_nonfinite) run_all(heads * chunks, [&](int64_t n) { compute_chunks(n); });
        if (!has_nonfinite) run_all(count, [&](int64_t n) { write_queries(n / panels, n % panels); });
        release_storage();
        return has_nonfinite ? 2 : 0;
    }
};

constexpr int SOME_QUERIES = 48;  // that share a head of keys

// Computes the gradient by `Backward`, which packs queries and keys, or by `DecodeGradient`. Packing takes longer than it
// saves if few queries share a head of keys, or up to SOME_QUERIES if these leave half of their vectors empty.
template <class T, class Op> int differentiate(const Problem &problem, const Gradient &gradient) {
    int64_t group = problem.h / problem.g, rows = queries_per_key(problem);
    bool few = rows <= FEW_QUERIES || (rows <= SOME_QUERIES && 2 * rows <= group * round_up(problem.t, LANES));
    if (few && !gradient.d_bias && !gradient.d_slopes) return DecodeGradient<T, Op>(problem, gradient).run();
    return Backward<T, Op>(problem, gradient).run();
}

}  // namespace

int OF_BUILD(differentiate)(const Problem *problem, const Gradient *gradient) {
    return with_types(*problem, [&](auto number, auto op) {
        return differentiate<decltype(number), decltype(op)>(*problem, *gradient);
    });
}
