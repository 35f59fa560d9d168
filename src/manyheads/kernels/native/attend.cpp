// Attention forward and what is read off its weights, compiled once for each vector width (LEVEL names the build).
//
// The softmax is online (Milakov & Gimelshein 2018, arXiv:1805.02867), over blocks of queries and keys (Dao et
// al. 2022, arXiv:2205.14135). Keys and values are packed once per head into panels of a few vectors; a product
// of 6 rows by a panel keeps its sums in registers.
//
// A look beside the output keeps the weights of a block of queries until its rows are summed, as its log-sum-exp
// makes them what they are: nothing is computed twice. Where the log-sum-exp is known they are read step by step.
#include "decode.h"
#include "look.h"

#include <cmath>
#include <cstdlib>
#include <memory>
#include <sched.h>

namespace {

constexpr int ROWS = 96;  // queries in a block, at most
constexpr int64_t TOGETHER = 64 << 20;  // bytes of packed keys and values at a time, or one head's
constexpr int FEW = 12;   // queries of a key for which packing isn't paid back

// -- one call --------------------------------------------------------------------------------------

struct Range {  // of the ids in a panel of keys
    int64_t least, most;
};

template <class T, class Op> struct Call {
    typedef typename Op::E E;
    static constexpr int KEYS = Op::KEYS;

    const Problem &p;
    const Look *y;                  // what is read off the weights, or null
    bool known, whole;              // is lse given? Are the weights of whole rows kept?
    int64_t line;                   // from one row of a block's scores to the next
    int64_t panels, depth, across;  // panels of keys, d rounded up to pairs, panels of a value
    int64_t batch, from = 0;        // heads of keys that are packed and computed at a time, from this one on
    E *keys, *values;               // [batch, panels, depth, PANEL], [batch, across, panels * PANEL, PANEL]
    uint8_t *infinite;              // [batch, panels]: holds a value that isn't finite
    R *squares;                     // [batch, panels * PANEL]: |k|², infinite where the value is EXTREME or INFINITE
    Range *ranges;                  // [b, panels]
    int64_t threads;
    int64_t rows, blocks;           // queries in a block; blocks in a head
    int64_t next = 0, packed = 0;   // what is to be packed, and what is, counted up by all threads
    int64_t following = 0;          // what is to be computed
    int64_t parts;                  // of a head, each computed by one thread: blocks, or chunks of them
    Sum *columns;                   // [batch * h / g, parts, panels * PANEL]: what keys receive in a chunk
    R *sides;                       // the same, all columns of grids, twice: of cells that began in another chunk
    const R *given;                 // [b * h * t, line]: the scores, where they are known; or null
    R unit;                         // what a product of packed numbers is multiplied by to be a score

    Call(const Problem &problem, const Look *look, const R *given = nullptr) : p(problem), y(look), given(given) {
        known = y && y->known, whole = y && !known && (y->received || y->grids);
        panels = up(p.s, PANEL) / PANEL;
        line = (whole ? panels * PANEL : KEYS) + W;  // not a power of two, whose lines share places in a cache
        depth = up(p.d, Op::DEPTH);
        across = up(p.w, PANEL) / PANEL;
        // Waking threads takes longer than it saves where there is little to do. What makes few blocks is cut finer,
        // so that threads have alike to do; whatever their number, as blocks have a say in the last bits.
        double work = 2. * p.b * p.h * p.t * p.s * (p.d + p.w);
        threads = work < 4e6 ? 1 : p.threads;
        rows = Op::EVEN > 1 ? 2 * Op::EVEN : near_cache() < (2 << 20) ? ROWS / 2 : ROWS;
        if (p.b * p.h * up(p.t, rows) / rows < 16) rows = Op::EVEN > 1 ? Op::EVEN : 3 * STRIP;
        blocks = up(p.t, rows) / rows;
        int64_t k = given ? 0 : panels * depth * PANEL * sizeof(E), v = across * panels * PANEL * PANEL * sizeof(E);
        batch = smaller(larger<int64_t>(TOGETHER / larger<int64_t>(k + v, 1), 1), p.b * p.g);
        int64_t queries = batch * (p.h / p.g);
        parts = y ? smaller(larger<int64_t>(y->chunks / queries, 1), blocks) : blocks;
        int64_t all_parts = queries * parts;
        allocate(store_of, array(keys, given ? 0 : batch * panels * depth * PANEL),
                 array(values, batch * across * panels * PANEL * PANEL), array(infinite, batch * panels),
                 array(ranges, p.key_ids ? p.b * panels : 0),
                 array(columns, y && y->received ? all_parts * panels * PANEL : 0), array(sides, all_parts * side()),
                 array(squares, batch * panels * PANEL));
        // In float32 the queries carry the scale; in bfloat16 they stay exact, but for the sign.
        unit = Op::PAIR == 1 ? (R)1 : (R)std::fabs(p.scale);
    }

    int64_t side() const {  // numbers in a chunk's part of `sides`
        int64_t size = 0;
        for (int64_t n = 0; y && n < y->grids; n++) size += 2 * y->grid[n].cols;
        return size;
    }

    // Is each thread to have heads of its own, as many as the others? Where they are small, so that what it packed
    // is still in its caches.
    bool own_heads() const {
        double head = 2. * (p.h / p.g) * p.t * p.s * (p.d + p.w);
        return !given && !p.key_ids && head < 4e7 && heads() % threads == 0;
    }

    // Where a key or a value of one head lies.
    const T *key_at(int64_t head, int64_t j) const { return at<T>(p.k, p.k_stride, head / p.g, head % p.g, j); }
    const T *value_at(int64_t head, int64_t j) const {
        return p.w ? at<T>(p.v, p.v_stride, head / p.g, head % p.g, j) : nullptr;
    }

    int64_t heads() const { return smaller(batch, p.b * p.g - from); }

    // Packs a panel of keys, and of values, of one head; what isn't finite in a value is 0 in its panel.
    void pack(int64_t head, int64_t panel) {
        TIME(PACKING);
        int64_t first = panel * PANEL, count = smaller<int64_t>(PANEL, p.s - first);
        const T *k = key_at(head, first), *v = value_at(head, first);
        int64_t place = head - from;
        R *square = squares + (place * panels + panel) * PANEL;
        pack_columns<Op>(keys + (place * panels + panel) * depth * PANEL, k, p.k_stride + 2, count, p.d, 1, square);
        E *to = values + (place * across * panels + panel) * PANEL * PANEL;
        uint8_t kinds[PANEL];
        pack_rows<Op>(to, panels * PANEL * PANEL, v, p.v_stride + 2, count, p.w, kinds);
        for (int64_t j = 0; j < count; j++) square[j] = kinds[j] ? INF : square[j];
        infinite[place * panels + panel] = any(kinds, count, INFINITE);
        if (p.key_ids && head % p.g == 0) {
            int64_t b = head / p.g;
            const int64_t *ids = p.key_ids + b * p.key_ids_stride + first;
            Range range = {ids[0], ids[0]};
            for (int64_t j = 1; j < count; j++) range = {smaller(range.least, ids[j]), larger(range.most, ids[j])};
            ranges[b * panels + panel] = range;
        }
    }

    // Everything about a block of queries.
    struct Block {
        int64_t b, h, head, first;  // head: of the keys
        int rows;
        int64_t position;           // of its first row
        Range ids;
        E *q;                       // [ROWS, depth]
        bool *bounded, all_bounded;  // [ROWS]: are the weights of a row e^score, without a maximum?
        R *score;                   // [ROWS, line]
        E *weight;                  // the same place in float32
        R *out;                     // [ROWS, across * PANEL]
        V *top, *total;             // [ROWS]: of the columns at hand; of all so far
        R *peak;                    // [ROWS]: the highest number of `top`
        R *highest;                 // [ROWS]: the running maximum, or the log-sum-exp where it is known
        // For a look:
        int64_t part, start;        // its chunk, and the first query of that
        V *spread, *away;           // [ROWS]: sums of weights times their logarithms (of 2), and times distances
        R *best;                    // [ROWS]: the largest score
        V *top_scores;              // [ROWS, vectors of top]
        I *top_keys;
        Interval *windows;          // [panels]: the columns of each step
        R *grounds;                 // [panels, ROWS]: the running maximum of each step
        int64_t steps;
    };

    R *scores(const Block &k, int row, int64_t first) const { return k.score + row * line + (whole ? first : 0); }
    E *weights(const Block &k, int row, int64_t first) const {
        return Op::PAIR == 1 ? (E *)scores(k, row, first) : k.weight + row * KEYS;
    }
    Largest largest(const Block &k, int row) const {
        int64_t vectors = up(y->top, W) / W;
        return {y->top, k.top_scores + row * vectors, k.top_keys + row * vectors};
    }

    // What the products at hand become: scores with softcap, bias and mask, and their top.
    void finish(const Block &k, int row, int64_t first, int64_t count) const {
        R *score = scores(k, row, first);
        soften(p, unit, score, nullptr, count);
        constrain<3>(p, score, k.b, k.h, k.first + row, first, smaller(count, p.s - first), count, visible_keys(p, k.b, k.first + row));
        V top = all(-INF);
        for (int64_t j = 0; j < count; j += W) top = max(load(score + j), top);
        k.top[row] = top;
    }

    // Products, which times the factor are scores, become weights; what was summed so far shrinks where there is a
    // new maximum. A known log-sum-exp takes the place of the maximum.
    template <bool LOOK> void weigh(const Block &k, int row, int64_t first, int64_t count, R factor) const {
        R *score = scores(k, row, first);
        E *weight = weights(k, row, first);
        R before = k.highest[row], now = known ? before : larger(before, factor * k.peak[row]);
        V ground = all(now == -INF ? (R)0 : now), sum = {}, more = {}, spread = {};
        V place = {}, moment = {};  // a weight's, in pairs of vectors
        for (int64_t j = 0; j < count; j += 2 * W) {
            V x = load(score + j), z = load(score + j + W);
            if (Op::PAIR == 2) x = rounded(factor * x), z = rounded(factor * z);
            x = exponent(x, ground), z = exponent(z, ground);
            V p = exp2(x), r = exp2(z);
            sum += p, more += r;
            if (LOOK) {  // of what weighs 0 the logarithm may be infinite
                spread += p * max(x, all((R)2 * LEAST)), spread += r * max(z, all((R)2 * LEAST));
                moment += place * p, moment += place * r, place += (R)1;
                if (Op::PAIR == 2) store(score + j, p), store(score + j + W, r);
            }
            Op::weights(weight + j, p, r);
        }
        V away = {};
        if (LOOK && y->distance) away = apart(score, first - k.position - row, count, sum, more, moment);
        sum += more;
        if (now != before) {
            R less = (R)((before - now) * LOG2E), shrink = before == -INF ? (R)0 : (R)std::exp2(less);
            R *out = k.out + row * across * PANEL;
            for (int64_t x = 0; x < across * PANEL; x += W) store(out + x, shrink * load(out + x));
            if (LOOK) {
                if (shrink != 0) spread += shrink * (k.spread[row] + less * k.total[row]);
                k.spread[row] = spread, k.away[row] = away + shrink * k.away[row];
            }
            sum += shrink * k.total[row];
        } else {
            if (LOOK) k.spread[row] += spread, k.away[row] += away;
            sum += k.total[row];
        }
        k.total[row] = sum;
        k.highest[row] = now;
    }

    // Products, which times the factor are scores, become weights e^score; where not `plain`, some are masked. Of a look,
    // `spread` is of the scores less the largest so far, as a large number would cost it its digits.
    template <bool PLAIN, bool LOOK>
    void weigh_bounded(const Block &k, int row, int64_t first, int64_t count, R factor, R before) const {
#if defined(HAS_EXP)
        R *score = scores(k, row, first);
        E *weight = weights(k, row, first);
        V sum = {}, more = {}, spread = {}, place = {}, moment = {}, total = k.total[row];
        R most = LOOK && k.best[row] != -INF ? k.best[row] : 0;
        for (int64_t j = 0; j < count; j += 2 * W) {
            V x = load(score + j), z = load(score + j + W);
            if (PLAIN && Op::PAIR == 2) x = rounded(factor * x), z = rounded(factor * z);
            V p = exp(x), r = exp(z);
            if (!PLAIN) p = (V)((I)p & (x > -INF)), r = (V)((I)r & (z > -INF));
            sum += p, more += r;
            if (LOOK) {
                if (!PLAIN) x = max(x, all(-2 * EXP_MOST)), z = max(z, all(-2 * EXP_MOST));  // else 0 · ∞
                spread += p * (x - most), spread += r * (z - most);
                moment += place * p, moment += place * r, place += (R)1;
                if (Op::PAIR == 2) store(score + j, p), store(score + j + W, r);
            }
            Op::weights(weight + j, p, r);
        }
        k.total[row] = total + (sum + more);
        if (LOOK) {
            if (before != -INF && before != most) spread += (before - most) * total;
            k.spread[row] += spread;
            if (y->distance) k.away[row] += apart(score, first - k.position - row, count, sum, more, moment);
        }
#else
        (void)k, (void)row, (void)first, (void)count, (void)factor, (void)before;
#endif
    }

    // Finds the rows whose scores are known to be so small that no weight e^score, sum of weights or product with a value
    // overflows or loses digits, by |q·k| <= |q||k| over the keys that a row may see. No other key has a say in it, so
    // that whatever is masked doesn't change a bit.
    void find_bounded(Block &k) const {
        memset(k.bounded, 0, sizeof(bool) * k.rows), k.all_bounded = false;
#if defined(HAS_EXP)
        const R LEAST_SQUARE = 1e-35f, most = 40;  // e^40 · 2^32 · 2^31 keys is below 2^126, and e^-40 · 2^-32 above 2^-102
        if (given || known || p.bias || p.keep || p.key_ids) return;
        const R *square = squares + (k.head - from) * panels * PANEL;
        R sink = p.sink ? std::fabs(((const R *)p.sink)[k.h]) : 0, slope = p.slopes ? slope_of(k) : 0, largest = 0;
        Interval over = {0, 0};  // the keys that `largest` is of
        int bounded = 0;
        for (int row = 0; row < k.rows; row++) {
            Interval keys = visible_keys(p, k.b, k.first + row);
            if (keys.begin < keys.end) {
                if (keys.begin != over.begin || keys.end < over.end) over = {keys.begin, keys.begin}, largest = 0;
                largest = larger(largest, largest_of(square + over.end, keys.end - over.end));
                over = keys;
            }
            // A square below what the format holds may be 0: with `LEAST_SQUARE` the bound holds all the same, and what
            // isn't finite stays so beside a query of zeros.
            R reach = (R)1.001 * unit * std::sqrt(largest + LEAST_SQUARE) *
                      std::sqrt(squared<Op>(k.q + row * depth, p.d) + LEAST_SQUARE);
            bool fits = finite(reach);
            int64_t i = k.position + row;
            if (p.softcap) reach = smaller(reach, (R)p.softcap);
            if (p.slopes) reach += std::fabs(slope) * (R)larger(std::llabs(keys.begin - i), std::llabs(keys.end - i));
            // One key weighs exactly 1 only with a maximum.
            k.bounded[row] = fits && reach <= most && sink <= most && keys.end - keys.begin > 1;
            bounded += k.bounded[row];
        }
        k.all_bounded = bounded == k.rows;
#endif
    }

    R slope_of(const Block &k) const { return ((const R *)p.slopes)[k.h * p.slopes_stride]; }

    // The largest of count numbers that aren't below 0; infinite if one of them isn't finite.
    static R largest_of(const R *x, int64_t count) {
        V top = {};
        int64_t j = 0;
        for (; j + W <= count; j += W) {
            V some = load(x + j);
            top = max(some < INF ? some : all(INF), top);
        }
        R most = highest(top);
        for (; j < count; j++) most = x[j] < INF ? larger(most, x[j]) : INF;
        return most;
    }

    // Weights times how far the keys are, the first of which stands `from` behind the query: by their moment, the sum
    // of weights times the pair of vectors that they are in, where all are on one side and no difference is small.
    V apart(const R *weight, int64_t from, int64_t count, V sum, V more, V moment) const {
        V at, far = {};
        for (int n = 0; n < W; n++) at[n] = n;
        if (from > 0 || from + 2 * count < 0) {
            far = (sum + more) * (at + (R)from) + more * (R)W + moment * (R)(2 * W);
            return max(far, -far);
        }
        for (int64_t j = 0; j < count; j += W) {
            V one = at + (R)(from + j);
            far += load(weight + j) * max(one, -one);
        }
        return far;
    }

    void weigh(const Block &k, int row, int64_t first, int64_t count, R factor, bool plain) const {
        R before = -INF;  // the largest score so far
        if (y) {
            R high = factor * k.peak[row];
            before = k.best[row], k.best[row] = larger(before, high);
            if (y->top && high > largest(k, row).least())
                largest(k, row).take(scores(k, row, first), factor, first, count, factor * k.top[row]);
        }
        if (!k.bounded[row])
            y ? weigh<true>(k, row, first, count, factor) : weigh<false>(k, row, first, count, factor);
        else if (plain)
            y ? weigh_bounded<true, true>(k, row, first, count, factor, before)
              : weigh_bounded<true, false>(k, row, first, count, factor, before);
        else
            y ? weigh_bounded<false, true>(k, row, first, count, factor, before)
              : weigh_bounded<false, false>(k, row, first, count, factor, before);
    }

    // Adds what the panels left out: values that aren't finite, for the rows that may see them.
    void add_infinite(const Block &k, int row, int64_t first, int64_t j) const {
        R weight = Op::unpack(weights(k, row, first)[j]);
        const T *v = value_at(k.head, first + j);
        for (int64_t x = 0; x < p.w; x++) {
            R y = wide(v[x * p.v_stride[3]]);
            if (!finite(y)) k.out[row * across * PANEL + x] += weight * y;
        }
    }

    // Columns first … first + count of a block: scores, weights, and what they add to the output.
    void step(const Block &k, int64_t first, int64_t count, bool plain) const {
        if (given) return step_given(k, first, count);
        multiply_keys(k, first, count);
        weigh_all(k, first, up(count, 2 * W), plain);
        multiply_values(k, first, up(count, Op::DEPTH));
    }

    void multiply_keys(const Block &k, int64_t first, int64_t count) const {
        TIME(TIMES_KEYS);
        const E *panel = keys + ((k.head - from) * panels * PANEL + first) * depth;
        for (int row = 0; row < k.rows; row++) k.top[row] = all(-INF);
        for (int64_t c = 0; c < count; c += PANEL) {
            int64_t columns = smaller<int64_t>(PANEL, count - c);
            R *score = scores(k, 0, first) + c;
            if (k.all_bounded && !y)
                columns_of<Op, false, false>(k.rows, columns, k.q, depth, panel + c * depth, score, line, depth, k.top);
            else
                columns_of<Op, false, true>(k.rows, columns, k.q, depth, panel + c * depth, score, line, depth, k.top);
        }
    }

    void weigh_all(const Block &k, int64_t first, int64_t count, bool plain) const {
        TIME(SOFTMAX);
        R factor = plain ? unit : (R)1;
        if (!plain)
            for (int row = 0; row < k.rows; row++) finish(k, row, first, count);
        if (!k.all_bounded || y) find_peaks(k);
        bool some = false;  // is a value infinite or NaN?
        for (int64_t c = 0; c < count; c += PANEL) some |= infinite[(k.head - from) * panels + (first + c) / PANEL];
        for (int row = 0; row < k.rows; row++) {
            if (some && !k.bounded[row]) weigh_infinite(k, row, first, count, factor);
            else weigh(k, row, first, count, factor, plain);
        }
    }

    void multiply_values(const Block &k, int64_t first, int64_t count) const {
        TIME(TIMES_VALUES);
        for (int64_t a = 0; a < across; a++)
            columns_of<Op, true, false>(k.rows, smaller<int64_t>(PANEL, p.w - a * PANEL), weights(k, 0, first),
                                        Op::PAIR == 1 ? line : KEYS,
                                        values + (((k.head - from) * across + a) * panels * PANEL + first) * PANEL,
                                        k.out + a * PANEL, across * PANEL, count, k.top);
    }

    // The highest score of each row of a step: of several rows at once, so that none waits for itself.
    void find_peaks(const Block &k) const {
        for (int row = 0; row < k.rows; row += W) {
            V tops[W];
            for (int n = 0; n < W; n++) tops[n] = k.top[smaller(row + n, k.rows - 1)];
            store(k.peak + row, maxima(tops));
        }
    }

    // The same where the scores are there.
    void step_given(const Block &k, int64_t first, int64_t count) const {
        int64_t whole = up(count, 2 * W);
        for (int row = 0; row < k.rows; row++) {
            R *score = scores(k, row, first);
            const R *from = given + ((k.b * p.h + k.h) * p.t + k.first + row) * panels * PANEL + first;
            memcpy(score, from, sizeof(R) * count);
            for (int64_t j = count; j < whole; j++) score[j] = -INF;
            V top = all(-INF);
            for (int64_t j = 0; j < whole; j += W) top = max(load(score + j), top);
            k.top[row] = top;
        }
        find_peaks(k);
        for (int row = 0; row < k.rows; row++) weigh(k, row, first, whole, 1, false);
    }

    // The same where some value isn't finite: a row that sees it takes it in, however little it weighs.
    void weigh_infinite(const Block &k, int row, int64_t first, int64_t count, R factor) const {
        uint8_t visible[KEYS];
        for (int64_t j = 0; j < count; j++) visible[j] = !(scores(k, row, first)[j] == -INF);
        weigh(k, row, first, count, factor, false);
        for (int64_t j = 0; j < smaller(count, p.s - first); j++)
            if (visible[j]) add_infinite(k, row, first, j);
    }

    int64_t part_at(int64_t q_head, int64_t n) const { return (q_head - from * (p.h / p.g)) * parts + n; }

    // Part n of a head: a block, or all blocks of a chunk.
    void compute(int64_t head, int64_t n) {
        n = parts - 1 - n;  // the last first: where causal, they are the longest
        if (!y) return attend(head, n, 0, 0);
        int64_t at = part_at(head, n), first = n * blocks / parts;
        if (y->received) memset(columns + at * panels * PANEL, 0, sizeof(Sum) * panels * PANEL);
        memset(sides + at * side(), 0, sizeof(R) * side());
        bool votes = !y->best && !y->top && !y->grids && known;  // and nothing else
        for (int64_t block = first; block < (n + 1) * blocks / parts; block++)
            if (!votes || (block + 1) * rows > y->first) attend(head, block, n, first * rows);
    }

    void attend(int64_t q_head, int64_t block, int64_t part, int64_t start) {
        Block k = {};
        k.h = q_head % p.h, k.b = q_head / p.h, k.part = part, k.start = start;
        k.head = k.b * p.g + k.h / (p.h / p.g);
        k.first = block * rows;
        k.rows = (int)smaller(rows, p.t - k.first);
        k.position = offset_of(p, k.b) + k.first;
        int64_t wide_out = across * PANEL, tops = y ? ROWS * up(y->top, W) / W : 0, steps = whole ? panels : 0;
        allocate(scratch, array(k.q, ROWS * depth), array(k.score, up(smaller<int64_t>(rows, p.t), Op::EVEN) * line),
                 array(k.weight, Op::PAIR == 1 ? 0 : ROWS * KEYS), array(k.out, ROWS * wide_out), array(k.top, ROWS),
                 array(k.total, ROWS), array(k.highest, ROWS), array(k.spread, y ? ROWS : 0),
                 array(k.away, y ? ROWS : 0), array(k.best, y ? ROWS : 0), array(k.top_scores, tops),
                 array(k.top_keys, tops), array(k.windows, steps), array(k.grounds, steps * ROWS), array(k.peak, ROWS),
                 array(k.bounded, ROWS));
        if (Op::PAIR == 1) k.weight = (E *)k.score;

        R by = Op::PAIR == 1 ? (R)p.scale : p.scale < 0 ? -(R)1 : (R)1;
        const T *q = ::at<T>(p.q, p.q_stride, k.b, k.h, k.first);
        R sink = p.sink ? ((const R *)p.sink)[k.h] : -INF;
        for (int row = 0; row < k.rows; row++) {
            if (!given)  // else it may be of another dtype
                pack_query<Op>(k.q + row * depth, q + row * p.q_stride[2], p.q_stride[3], p.d, by);
            k.total[row] = V{};
            if (y) k.spread[row] = k.away[row] = V{}, k.best[row] = -INF, largest(k, row).clear();
        }
        memset(k.out, 0, sizeof(R) * k.rows * wide_out);
        if (p.query_ids) {
            const int64_t *ids = p.query_ids + k.b * p.query_ids_stride + k.first;
            k.ids = {ids[0], ids[0]};
            for (int row = 1; row < k.rows; row++)
                k.ids = {smaller(k.ids.least, ids[row]), larger(k.ids.most, ids[row])};
        }
        find_bounded(k);
        for (int row = 0; row < k.rows; row++) k.highest[row] = k.bounded[row] ? (R)0 : known ? lse_of(k)[row] : sink;
        walk(k);
        write(k, sink);
        if (whole) look_back(k);
    }

    R *lse_of(const Block &k) const { return (R *)p.lse + (k.b * p.h + k.h) * p.t + k.first; }

    // The columns that some row may see, in steps; those that all rows see whole are plain.
    void walk(Block &k) const {
        Interval top = visible_keys(p, k.b, k.first), bottom = visible_keys(p, k.b, k.first + k.rows - 1);
        int64_t begin = smaller(top.begin, bottom.begin), end = larger(top.end, bottom.end);
        int64_t full_begin = larger(top.begin, bottom.begin), full_end = smaller(top.end, bottom.end);
        bool never = p.softcap || p.slopes || p.bias || p.keep || (p.key_ids && k.ids.least != k.ids.most);
        auto plain = [&](int64_t panel) {
            if (never || given || panel * PANEL < full_begin || (panel + 1) * PANEL > full_end) return false;
            return !p.key_ids || ranges[k.b * panels + panel].least == ranges[k.b * panels + panel].most;
        };
        for (int64_t panel = begin / PANEL, count; panel * PANEL < end; panel += count) {
            count = 1;  // panels that are taken together
            if (skips(k, panel)) continue;
            bool every = plain(panel);
            while ((count + 1) * PANEL <= KEYS && (panel + count) * PANEL < end && !skips(k, panel + count) &&
                   plain(panel + count) == every)
                count++;
            int64_t first = panel * PANEL, columns = smaller(count * PANEL, end - first);
            step(k, first, columns, every);
            if (known) gather(k, first, columns, nullptr);
            if (!whole) continue;
            k.windows[k.steps] = {first, first + columns};
            memcpy(k.grounds + k.steps++ * ROWS, k.highest, sizeof(R) * k.rows);
        }
    }

    bool skips(const Block &k, int64_t panel) const {  // has no id of these queries
        if (!p.key_ids || given) return false;
        const Range &range = ranges[k.b * panels + panel];
        return range.most < k.ids.least || k.ids.most < range.least;
    }

    void write(const Block &k, R sink) const {
        for (int row = 0; row < k.rows; row++) {
            Wide top = k.highest[row];
            R seen = sum(k.total[row]), total = seen;
            if (!known) {
                if (sink != -INF) total += (R)std::exp2((sink - top) * LOG2E);
                R by = total == (R)0 ? (R)0 : (R)1 / total;
                int64_t t = k.first + row;
                T *out = (T *)p.out + k.b * p.out_stride[0] + k.h * p.out_stride[1] + t * p.out_stride[2];
                const R *from = k.out + row * across * PANEL;
                each(p.w, p.out_stride[3], [&](int64_t x, int64_t at) { narrow(by * from[x], out[at]); });
                if (p.lse) lse_of(k)[row] = total == 0 ? -INF : (R)(top + std::log((Wide)total));
            }
            if (y) tell(k, row, seen, known ? (R)1 : total);
        }
    }

    // -- a look -------------------------------------------------------------------------------------

    // The statistics of a row, whose weights times `total` are at hand and sum to `seen`.
    void tell(const Block &k, int row, R seen, R total) const {
        int64_t at = (k.b * p.h + k.h) * p.t + k.first + row;
        if (seen == (R)0) total = 1;  // it sees nothing
        Wide by = 1 / (Wide)total;
        k.total[row] = all((R)by);  // all that is asked of it from here on
        if (y->total) ((R *)y->total)[at] = (R)(by * seen);
        if (y->entropy) {  // neither summand is below 0, but for rounding
            Wide unit = k.bounded[row] ? (Wide)1 : LOG2E, most = k.bounded[row] ? (Wide)k.best[row] : (Wide)0;
            R entropy = (R)(by * (seen * (std::log((Wide)total) - most) - sum(k.spread[row]) / unit));
            ((R *)y->entropy)[at] = entropy < 0 ? (R)0 : entropy;
        }
        if (y->distance) ((R *)y->distance)[at] = (R)(by * sum(k.away[row]));
        if (y->best) ((R *)y->best)[at] = k.best[row];
        Largest found = largest(k, row);
        for (int64_t n = 0; n < y->top; n++) {
            ((R *)y->top_scores)[at * y->top + n] = found.score(n);
            y->top_keys[at * y->top + n] = found.key(n);
        }
    }

    // The weights of whole rows, whose sums are known now.
    void look_back(const Block &k) const {
        R factor[ROWS] = {};
        for (int64_t n = 0; n < k.steps; n++) {
            for (int row = 0; row < k.rows; row++) {
                R ground = k.grounds[n * ROWS + row];
                factor[row] = ground == -INF ? -INF : (R)((ground - k.highest[row]) * LOG2E);
            }
            for (int row = 0; row < ROWS; row += W) store(factor + row, exp2(load(factor + row)));
            for (int row = 0; row < k.rows; row++) factor[row] *= k.total[row][0];
            gather(k, k.windows[n].begin, k.windows[n].end - k.windows[n].begin, factor);
        }
    }

    // What a step's weights, times their factors (null: 1), add to columns and cells.
    void gather(const Block &k, int64_t first, int64_t count, const R *factor) const {
        const R *weight = scores(k, 0, first);
        int64_t head = k.b * p.h + k.h, at = part_at(head, k.part);
        R one[ROWS], votes[ROWS];
        for (int row = 0; row < k.rows; row++) {
            one[row] = factor ? factor[row] : (R)1;
            votes[row] = k.first + row < y->first ? (R)0 : one[row];
        }
        if (y->received) add_columns(columns + at * panels * PANEL + first, weight, line, votes, k.rows, count);
        R *beside = sides + at * side();
        for (int64_t n = 0; n < y->grids; n++) {
            const Grid &grid = y->grid[n];
            for (int64_t row = 0; row < k.rows;) {
                int64_t cell = cell_of(k.first + row, grid.rows, p.t);
                int64_t stop = smaller<int64_t>(edge_of(cell + 1, grid.rows, p.t) - k.first, k.rows);
                bool elsewhere = edge_of(cell, grid.rows, p.t) < k.start;
                R *sum = (R *)grid.sum, *most = (R *)grid.most;
                if (sum) sum = elsewhere ? beside : sum + (head * grid.rows + cell) * grid.cols;
                if (most) most = elsewhere ? beside + grid.cols : most + (head * grid.rows + cell) * grid.cols;
                Cells cells = {grid.cols, p.s, sum, most};
                cells.add(weight + row * line, line, one + row, stop - row, first, count);
                row = stop;
            }
            beside += 2 * grid.cols;
        }
    }

    // What the chunks of a head found, in order.
    void merge(int64_t head) const {
        for (int64_t j = 0; y->received && j < p.s; j++) {
            Sum sum = 0;
            for (int64_t n = 0; n < parts; n++) sum += columns[part_at(head, n) * panels * PANEL + j];
            ((R *)y->received)[head * p.s + j] = (R)sum;
        }
        for (int64_t n = 1; n < parts; n++) {
            const R *beside = sides + part_at(head, n) * side();
            for (int64_t m = 0; m < y->grids; m++) {
                const Grid &grid = y->grid[m];
                int64_t at = (head * grid.rows + cell_of(n * blocks / parts * rows, grid.rows, p.t)) * grid.cols;
                for (int64_t c = 0; c < grid.cols; c++) {
                    if (grid.sum) ((R *)grid.sum)[at + c] += beside[c];
                    R *most = grid.most ? (R *)grid.most + at + c : nullptr;
                    if (most) *most = larger(*most, beside[grid.cols + c]);
                }
                beside += 2 * grid.cols;
            }
        }
    }

    static void merging(void *data) {
        Call &call = *(Call *)data;
        int64_t queries = call.p.h / call.p.g;
        share(call.next, call.heads() * queries, [&](int64_t n) { call.merge(call.from * queries + n); });
    }

    // -- threads ------------------------------------------------------------------------------------

    // Every thread packs panels that no other has taken, and computes when all are packed.
    static void sharing(void *data) {
        Call &call = *(Call *)data;
        [[maybe_unused]] typename Op::Ready ready;
        int64_t count = call.given ? 0 : call.heads() * call.panels, queries = call.p.h / call.p.g;
        share(call.next, count, [&](int64_t n) {
            call.pack(call.from + n / call.panels, n % call.panels);
            __atomic_fetch_add(&call.packed, 1, __ATOMIC_RELEASE);
        });
        while (__atomic_load_n(&call.packed, __ATOMIC_ACQUIRE) < count) sched_yield();
        share(call.following, call.heads() * queries * call.parts,
              [&](int64_t n) { call.compute(call.from * queries + n / call.parts, n % call.parts); });
    }

    // Every thread packs a head and computes it.
    static void owning(void *data) {
        Call &call = *(Call *)data;
        [[maybe_unused]] typename Op::Ready ready;
        int64_t queries = call.p.h / call.p.g, items = queries * call.parts;
        share(call.next, call.heads(), [&](int64_t n) {
            n += call.from;
            for (int64_t panel = 0; panel < call.panels; panel++) call.pack(n, panel);
            for (int64_t item = 0; item < items; item++)
                call.compute(n * queries + item / call.parts, item % call.parts);
        });
    }

    void run() {
        for (; from < p.b * p.g; from += batch) {
            next = packed = following = 0;
            parallel(threads, own_heads() ? owning : sharing, this);
            next = 0;
            if (y && (y->received || y->grids)) parallel(threads, merging, this);
        }
        if (!given) forget();
    }
};

}  // namespace

#define NAME2(level) attend_##level
#define NAME(level) NAME2(level)
#define SCORES2(level) scores_##level
#define SCORES(level) SCORES2(level)

namespace {

// A problem by the queries that share a key: few of them don't pay for packing it.
template <class T, class Op> void attend(const Problem &p, const Look *look) {
    if (p.h / p.g * p.t > FEW) return Call<T, Op>(p, look).run();
    int64_t line = up(p.s, PANEL), size = look ? p.b * p.h * p.t * line : 0;
    std::unique_ptr<R[]> scores(size ? new R[size] : nullptr);
    Decode<T, Op>(p, scores.get(), line, look && look->known).run();
    forget();
    if (!look) return;
    Look after = *look;
    Problem bare = p;
    after.known = 1, bare.w = 0;
    Call<R, Single>(bare, &after, scores.get()).run();
    forget();
}

// scale · q·k with softcap of all queries and keys, [b, h, t, s], with the bits that every other pass gives them.
template <class T, class Op> struct Scores {
    typedef typename Op::E E;

    const Problem &p;
    R *to;
    int64_t next = 0;

    // A panel of keys of one head, with all queries that share it.
    void compute(int64_t head, int64_t first) const {
        int64_t b = head / p.g, count = smaller<int64_t>(PANEL, p.s - first), depth = up(p.d, Op::DEPTH);
        E *panel, *queries;
        R *score;
        V *unused;
        allocate(scratch, array(panel, depth * PANEL), array(queries, ROWS * depth), array(score, ROWS * PANEL),
                 array(unused, ROWS));
        pack_columns<Op>(panel, ::at<T>(p.k, p.k_stride, b, head % p.g, first), p.k_stride + 2, count, p.d);
        for (int64_t h = head % p.g * (p.h / p.g), last = h + p.h / p.g; h < last; h++)
            for (int64_t t = 0; t < p.t; t += ROWS) {
                int rows = (int)smaller<int64_t>(ROWS, p.t - t);
                const T *q = ::at<T>(p.q, p.q_stride, b, h, t);
                for (int row = 0; row < rows; row++)
                    pack_query<Op>(queries + row * depth, q + row * p.q_stride[2], p.q_stride[3], p.d,
                                   Op::PAIR == 1 ? (R)p.scale : (R)1);
                columns_of<Op, false, false>(rows, count, queries, depth, panel, score, PANEL, depth, unused);
                for (int row = 0; row < rows; row++) {
                    soften(p, Op::PAIR == 1 ? (R)1 : (R)p.scale, score + row * PANEL, nullptr, up(count, W));
                    memcpy(to + ((b * p.h + h) * p.t + t + row) * p.s + first, score + row * PANEL, sizeof(R) * count);
                }
            }
    }

    static void computing(void *data) {
        Scores &all = *(Scores *)data;
        [[maybe_unused]] typename Op::Ready ready;
        int64_t panels = up(all.p.s, PANEL) / PANEL;
        share(all.next, all.p.b * all.p.g * panels,
              [&](int64_t n) { all.compute(n / panels, n % panels * PANEL); });
    }

    void run() { parallel(2. * p.b * p.h * p.t * p.s * p.d < 4e6 ? 1 : p.threads, computing, this); }
};

template <class T, class Op> void scores(const Problem &p, void *to) { Scores<T, Op>{p, (R *)to}.run(); }

}  // namespace

void SCORES(LEVEL)(const Problem *p, void *to) {
#if defined(REAL)
    scores<double, Single>(*p, to);
#else
    switch (p->dtype) {
        case FLOAT32: return scores<float, Single>(*p, to);
        case FLOAT16: return scores<Half, Single>(*p, to);
        case BFLOAT16: return scores<Brain, Brains>(*p, to);
    }
#endif
}

// look may be null: then there is only the output.
void NAME(LEVEL)(const Problem *p, const Look *look) {
#if defined(REAL)
    attend<double, Single>(*p, look);
#else
    switch (p->dtype) {
        case FLOAT32: return attend<float, Single>(*p, look);
        case FLOAT16: return attend<Half, Single>(*p, look);
        case BFLOAT16: return attend<Brain, Brains>(*p, look);
    }
#endif
}
