// The forward pass of attention, and statistics of its weights. Compiled once for each vector width (LEVEL names the
// build).
//
// The softmax is online (Milakov & Gimelshein 2018, arXiv:1805.02867), over blocks of queries and keys (Dao et al.
// 2022, arXiv:2205.14135). Keys and values are packed once per head into panels of a few vectors; a product of 6 rows
// by a panel keeps its sums in registers.
//
// If statistics are computed together with the output, the weights of a block of queries are stored until the sums of
// its rows are known, and then normalised, so that no product is computed twice. If the log-sum-exp is given, weights
// are normalised from the start.
#include "decode.h"
#include "statistics.h"

#include <cmath>
#include <cstdlib>
#include <memory>
#include <sched.h>
#include <type_traits>

namespace {

constexpr int ROWS = 96;                     // the most queries in a block
constexpr int64_t STORAGE_BYTES = 64 << 20;  // the most packed keys and values at a time, unless one head has more

// -- one call --------------------------------------------------------------------------------------

struct IdRange {  // the smallest and the largest id in a panel of keys or a block of queries
    int64_t least, most;
};

template <class T, class Op> struct Call {
    typedef typename Op::Element Element;
    static constexpr int KEYS = Op::KEYS;
    // The distance between rows of weights. If it were a power of two, they would be mapped to the same sets of the cache.
    static constexpr int WEIGHT_LINE = KEYS + LANES * Op::PAIR;

    const Problem &problem;
    const Statistics *statistics;   // or null
    bool lse_known, keeps_rows;     // is lse given? Are the weights of whole rows stored, for statistics?
    int64_t panels, depth, across;  // panels of keys of a head; d rounded up for products; panels across a value
    int64_t batch, first_head = 0;  // how many heads of keys are packed and computed at a time; the first of them
    Element *keys, *values;         // [batch, panels, depth, PANEL], [batch, across, panels * PANEL, PANEL]
    uint8_t *infinite;              // [batch, panels]: has a value of the panel a non-finite number?
    Real *squares;                  // [batch, panels * PANEL]: |k|², infinite where the value is EXTREME or INFINITE
    IdRange *ranges;                // [b, panels]: of the ids of keys
    int64_t threads;
    int64_t rows, blocks;          // queries in a block; blocks in a head
    int64_t next = 0, packed = 0;  // shared by all threads: the next panel to pack, and how many panels are packed
    int64_t next_to_compute = 0;   // shared by all threads
    int64_t chunks;                // the blocks of a head are divided into chunks, each computed by one thread
    WideReal *columns;             // [batch * h / g, chunks, panels * PANEL]: the weight that keys receive in a chunk
    Real *shared_rows;         // [batch * h / g, chunks, shared_row_size()]: sums and maxima for the row of each pooled
                               // map that began in the previous chunk
    const Real *given_scores;  // [b * h * t, line] or null
    Real unit;                 // the factor that turns a product of packed numbers into a score

    Call(const Problem &problem, const Statistics *statistics, const Real *given_scores = nullptr)
        : problem(problem), statistics(statistics), given_scores(given_scores) {
        lse_known = statistics && statistics->lse_known,
        keeps_rows = statistics && !lse_known && (statistics->received || statistics->maps);
        panels = round_up(problem.s, PANEL) / PANEL;
        depth = round_up(problem.d, Op::DEPTH_MULTIPLE);
        across = round_up(problem.w, PANEL) / PANEL;
        threads = threads_for(problem, 2. * problem.b * problem.h * problem.t * problem.s * (problem.d + problem.w));
        // If there are few blocks, smaller ones are used, so that all threads get about the same work. Their size must
        // not depend on the number of threads, because it changes the last bits of results.
        auto few_blocks = [&] { return problem.b * problem.h * round_up(problem.t, rows) / rows < 16; };
        if (Op::ROWS_MULTIPLE > 1) {
            for (rows = 4 * Op::ROWS_MULTIPLE; rows > Op::ROWS_MULTIPLE && few_blocks();) rows /= 2;
        } else {
            rows = second_level_cache() < (2 << 20) ? ROWS / 2 : ROWS;
            if (few_blocks()) rows = 3 * ROW_GROUP;
        }
        blocks = round_up(problem.t, rows) / rows;
        int64_t key_bytes = given_scores ? 0 : panels * depth * PANEL * sizeof(Element),
                value_bytes = across * panels * PANEL * PANEL * sizeof(Element);
        batch = smaller(larger<int64_t>(STORAGE_BYTES / larger<int64_t>(key_bytes + value_bytes, 1), 1),
                        problem.b * problem.g);
        int64_t queries = batch * (problem.h / problem.g);
        chunks = statistics ? smaller(larger<int64_t>(statistics->chunks / queries, 1), blocks) : blocks;
        int64_t all_chunks = queries * chunks;
        allocate(call_storage, array(keys, given_scores ? 0 : batch * panels * depth * PANEL),
                 array(values, batch * across * panels * PANEL * PANEL), array(infinite, batch * panels),
                 array(ranges, problem.key_ids ? problem.b * panels : 0),
                 array(columns, statistics && statistics->received ? all_chunks * panels * PANEL : 0),
                 array(shared_rows, all_chunks * shared_row_size()), array(squares, batch * panels * PANEL));
        // In float32, packing multiplies queries by the scale. In bfloat16 that would round them, so packing multiplies
        // them by its sign only.
        unit = Op::PAIR == 1 ? (Real)1 : (Real)std::fabs(problem.scale);
    }

    int64_t shared_row_size() const {  // numbers that a chunk has in `shared_rows`
        int64_t size = 0;
        for (int64_t n = 0; statistics && n < statistics->maps; n++) size += 2 * statistics->map[n].cols;
        return size;
    }

    // Returns true if each thread should pack and compute whole heads. This is faster if heads are small, so that they
    // stay in the thread's caches, and if all threads get the same number of heads.
    bool threads_own_heads() const {
        double head = 2. * (problem.h / problem.g) * problem.t * problem.s * (problem.d + problem.w);
        return !given_scores && !problem.key_ids && head < 4e7 && heads() % threads == 0;
    }

    const T *key_at(int64_t head, int64_t j) const {
        return row_at<T>(problem.k, problem.k_stride, head / problem.g, head % problem.g, j);
    }
    const T *value_at(int64_t head, int64_t j) const {
        return problem.w ? row_at<T>(problem.v, problem.v_stride, head / problem.g, head % problem.g, j) : nullptr;
    }

    int64_t heads() const { return smaller(batch, problem.b * problem.g - first_head); }

    // Packs a panel of keys and a panel of values of one head. Non-finite numbers of values are 0 in the panel.
    void pack(int64_t head, int64_t panel) {
        TIME(PACKING);
        int64_t first = panel * PANEL, count = smaller<int64_t>(PANEL, problem.s - first);
        const T *key = key_at(head, first), *value = value_at(head, first);
        int64_t place = head - first_head;
        Real *square = squares + (place * panels + panel) * PANEL;
        pack_columns<Op>(keys + (place * panels + panel) * depth * PANEL, key, problem.k_stride + 2, count, problem.d,
                         1, square);
        Element *to = values + (place * across * panels + panel) * PANEL * PANEL;
        uint8_t kinds[PANEL];
        pack_rows<Op>(to, panels * PANEL * PANEL, value, problem.v_stride + 2, count, problem.w, kinds);
        for (int64_t j = 0; j < count; j++) square[j] = kinds[j] ? INF : square[j];
        infinite[place * panels + panel] = any(kinds, count, INFINITE);
        if (problem.key_ids && head % problem.g == 0) {
            int64_t b = head / problem.g;
            const int64_t *ids = problem.key_ids + b * problem.key_ids_stride + first;
            IdRange range = {ids[0], ids[0]};
            for (int64_t j = 1; j < count; j++) range = {smaller(range.least, ids[j]), larger(range.most, ids[j])};
            ranges[b * panels + panel] = range;
        }
    }

    struct KeptStep {  // the weights of a step
        int64_t first, count;
        const Real *weights;  // [ROWS, line]
        int64_t line;
    };
    struct Block {                  // a block of queries
        int64_t b, h, head, first;  // head: the head of keys, b * g + …; first: the first query
        int rows;
        int64_t position;  // the position of the first query
        IdRange ids;
        Element *q;                  // [ROWS, depth]
        bool *bounded, all_bounded;  // [ROWS]: are weights e^score, with no maximum? (see find_bounded)
        Real *score;                 // [ROWS, line]: those of a step; for statistics, steps are one after the other
        int64_t line;                // the distance between its rows
        Element *weight;             // [ROWS, WEIGHT_LINE]; in float32 it is `score`
        Real *out;                   // [ROWS, across * PANEL]
        Vector *maxima, *sums;       // [ROWS]: maxima of the scores of this step; sums of the weights so far
        Real *maximum;               // [ROWS]: the largest number in each of `maxima`
        Real *running_max;           // [ROWS]: the largest score so far, or the log-sum-exp if it is given
        // For statistics:
        int64_t chunk, chunk_start;            // the chunk of the block, and the first query of the chunk
        Vector *entropy_sums, *distance_sums;  // [ROWS]: sums of weights times their log₂, and times distances
        Real *max_score;                       // [ROWS]: the largest score so far
        Vector *top_scores;                    // [ROWS, vectors of top_k]
        Integers *top_keys;
        KeptStep *kept;  // [panels]
        Real *step_max;  // [panels, ROWS]: the running maximum of each step
        int64_t steps;
    };

    Real *scores(const Block &block, int row) const { return block.score + row * block.line; }
    Element *weights(const Block &block, int row) const {
        return Op::PAIR == 1 ? (Element *)scores(block, row) : block.weight + row * WEIGHT_LINE;
    }
    Largest largest(const Block &block, int row) const {
        int64_t vectors = round_up(statistics->top_k, LANES) / LANES;
        return {statistics->top_k, block.top_scores + row * vectors, block.top_keys + row * vectors};
    }

    // Turns the products of a step into scores (applies scale, softcap, bias and mask), and finds their maxima.
    void finish(const Block &block, int row, int64_t first, int64_t count) const {
        Real *score = scores(block, row);
        scale_and_cap(problem, unit, score, nullptr, count);
        apply_bias_and_mask<3>(problem, score, block.b, block.h, block.first + row, first,
                               smaller(count, problem.s - first), count,
                               visible_keys(problem, block.b, block.first + row));
        Vector top = broadcast(-INF);
        for (int64_t j = 0; j < count; j += LANES) top = max(load(score + j), top);
        block.maxima[row] = top;
    }

    // Turns products of a row into weights; a product times the factor is a score. If the maximum grows, the earlier sums
    // are rescaled. A given log-sum-exp is used instead of the maximum.
    template <bool STATISTICS>
    INLINE_METHOD void weigh(const Block &block, int row, int64_t first, int64_t count, Real factor) const {
        if (STATISTICS) note_largest(block, row, first, count, factor);
        Real *score = scores(block, row);
        Element *weight = weights(block, row);
        Real before = block.running_max[row], now = lse_known ? before : larger(before, factor * block.maximum[row]);
        Vector reference = broadcast(now == -INF ? (Real)0 : now), sum = {}, more = {}, entropy = {};
        Vector place = {}, moment = {};  // the index of a pair of vectors; the sum of weights times this index
        for (int64_t j = 0; j < count; j += 2 * LANES) {
            Vector low = load(score + j), high = load(score + j + LANES);
            if (Op::PAIR == 2) low = rounded(factor * low), high = rounded(factor * high);
            low = log2_weight(low, reference), high = log2_weight(high, reference);
            Vector low_weight = exp2(low), high_weight = exp2(high);
            sum += low_weight, more += high_weight;
            if (STATISTICS) {  // the logarithm of a weight of 0 may be infinite
                entropy += low_weight * max(low, broadcast((Real)2 * LEAST_EXPONENT)),
                    entropy += high_weight * max(high, broadcast((Real)2 * LEAST_EXPONENT));
                moment += place * low_weight, moment += place * high_weight, place += (Real)1;
                if (Op::PAIR == 2) store(score + j, low_weight), store(score + j + LANES, high_weight);
            }
            Op::weights(weight + j, low_weight, high_weight);
        }
        Vector distance = {};
        if (STATISTICS && statistics->distance)
            distance = weighted_distance(score, first - block.position - row, count, sum, more, moment);
        sum += more;
        if (now != before) {
            Real less = (Real)((before - now) * LOG2E), shrink = before == -INF ? (Real)0 : (Real)std::exp2(less);
            Real *out = block.out + row * across * PANEL;
            for (int64_t x = 0; x < across * PANEL; x += LANES) store(out + x, shrink * load(out + x));
            if (STATISTICS) {
                if (shrink != 0) entropy += shrink * (block.entropy_sums[row] + less * block.sums[row]);
                block.entropy_sums[row] = entropy,
                block.distance_sums[row] = distance + shrink * block.distance_sums[row];
            }
            sum += shrink * block.sums[row];
        } else {
            if (STATISTICS) block.entropy_sums[row] += entropy, block.distance_sums[row] += distance;
            sum += block.sums[row];
        }
        block.sums[row] = sum;
        block.running_max[row] = now;
    }

    // Turns products of a row into weights e^score; a product times the factor is a score. If not PLAIN, some scores are
    // masked. For entropies, the largest score so far is subtracted from scores, because sums of large numbers lose digits.
    template <bool PLAIN, bool STATISTICS>
    INLINE_METHOD void weigh_bounded(const Block &block, int row, int64_t first, int64_t count, Real factor) const {
#if defined(HAS_EXP)
        Real before = STATISTICS ? note_largest(block, row, first, count, factor) : -INF;
        Real *score = scores(block, row);
        Element *weight = weights(block, row);
        Vector sum = {}, more = {}, entropy = {}, place = {}, moment = {}, total = block.sums[row];
        Real most = STATISTICS && block.max_score[row] != -INF ? block.max_score[row] : 0;
        for (int64_t j = 0; j < count; j += 2 * LANES) {
            Vector low = load(score + j), high = load(score + j + LANES), low_weight, high_weight;
            if (Op::PAIR == 2) {
                low_weight = exp2_of_product(low, factor * (Real)LOG2E),
                high_weight = exp2_of_product(high, factor * (Real)LOG2E);
                if (STATISTICS) low *= factor, high *= factor;
            } else {
                low_weight = exp(low), high_weight = exp(high);
                if (!PLAIN)
                    low_weight = (Vector)((Integers)low_weight & (low > -INF)),
                    high_weight = (Vector)((Integers)high_weight & (high > -INF));
            }
            sum += low_weight, more += high_weight;
            if (STATISTICS) {
                if (!PLAIN)
                    low = max(low, broadcast(-2 * EXP_MOST)), high = max(high, broadcast(-2 * EXP_MOST));  // not 0 · ∞
                entropy += low_weight * (low - most), entropy += high_weight * (high - most);
                moment += place * low_weight, moment += place * high_weight, place += (Real)1;
                if (Op::PAIR == 2) store(score + j, low_weight), store(score + j + LANES, high_weight);
            }
            Op::weights(weight + j, low_weight, high_weight);
        }
        block.sums[row] = total + (sum + more);
        if (STATISTICS) {
            if (before != -INF && before != most) entropy += (before - most) * total;
            block.entropy_sums[row] += entropy;
            if (statistics->distance)
                block.distance_sums[row] +=
                    weighted_distance(score, first - block.position - row, count, sum, more, moment);
        }
#else
        (void)block, (void)row, (void)first, (void)count, (void)factor;
#endif
    }

    // Updates the largest scores of a row for statistics, and returns the largest score before.
    Real note_largest(const Block &block, int row, int64_t first, int64_t count, Real factor) const {
        Real high = factor * block.maximum[row], before = block.max_score[row];
        block.max_score[row] = larger(before, high);
        if (statistics->top_k && high > largest(block, row).least())
            largest(block, row).take(scores(block, row), factor, first, count, factor * block.maxima[row]);
        return before;
    }

    // Finds the rows whose scores are so small that no weight e^score, sum of weights or product with a value overflows
    // or loses digits, by the bound |q·k| <= |q||k| over the visible keys. Masked keys are excluded, so that their
    // content doesn't change any bit of the result.
    void find_bounded(Block &block) const {
        memset(block.bounded, 0, sizeof(bool) * block.rows), block.all_bounded = false;
#if defined(HAS_EXP)
        const Real LEAST_SQUARE = 1e-35f;
        const Real most = 40;  // e^40 · 2^32 · 2^31 keys is below 2^126, and e^-40 · 2^-32 above 2^-102
        if (given_scores || lse_known || problem.bias || problem.keep || problem.key_ids) return;
        const Real *square = squares + (block.head - first_head) * panels * PANEL;
        Real sink = problem.sink ? std::fabs(((const Real *)problem.sink)[block.h]) : 0,
             slope = problem.slopes ? slope_of(block) : 0, largest = 0;
        Interval over = {0, 0};  // the keys whose largest square is `largest`
        int bounded = 0;
        for (int row = 0; row < block.rows; row++) {
            Interval keys = visible_keys(problem, block.b, block.first + row);
            if (keys.begin < keys.end) {
                if (keys.begin != over.begin || keys.end < over.end) over = {keys.begin, keys.begin}, largest = 0;
                largest = larger(largest, largest_in(square + over.end, keys.end - over.end));
                over = keys;
            }
            // The square of tiny numbers may underflow to 0. With LEAST_SQUARE the bound still holds, and it is
            // non-finite for a non-finite key even if the query is 0.
            Real bound = (Real)1.001 * unit * std::sqrt(largest + LEAST_SQUARE) *
                         std::sqrt(squared_norm<Op>(block.q + row * depth, problem.d) + LEAST_SQUARE);
            bool fits = is_finite(bound);
            int64_t i = block.position + row;
            if (problem.softcap) bound = smaller(bound, (Real)problem.softcap);
            if (problem.slopes)
                bound += std::fabs(slope) * (Real)larger(std::llabs(keys.begin - i), std::llabs(keys.end - i));
            // The weight of a single key is exactly 1 only if the maximum is subtracted.
            block.bounded[row] = fits && bound <= most && sink <= most && keys.end - keys.begin > 1;
            bounded += block.bounded[row];
        }
        block.all_bounded = bounded == block.rows;
#endif
    }

    Real slope_of(const Block &block) const { return ((const Real *)problem.slopes)[block.h * problem.slopes_stride]; }

    // Returns the largest of count numbers >= 0, or infinity if one of them isn't finite.
    static Real largest_in(const Real *x, int64_t count) {
        Vector top = {};
        int64_t j = 0;
        for (; j + LANES <= count; j += LANES) {
            Vector some = load(x + j);
            top = max(some < INF ? some : broadcast(INF), top);
        }
        Real most = maximum(top);
        for (; j < count; j++) most = x[j] < INF ? larger(most, x[j]) : INF;
        return most;
    }

    // Returns the sum of weights times the distances of their keys, the first of which is `from` positions after the
    // query. If all keys are after it, or so far before it that no digits cancel, the sum is computed from `moment`:
    // the sum of weights times the index of their pair of vectors.
    Vector weighted_distance(const Real *weight, int64_t from, int64_t count, Vector sum, Vector more,
                             Vector moment) const {
        Vector at, far = {};
        for (int n = 0; n < LANES; n++) at[n] = n;
        if (from > 0 || from + 2 * count < 0) {
            far = (sum + more) * (at + (Real)from) + more * (Real)LANES + moment * (Real)(2 * LANES);
            return max(far, -far);
        }
        for (int64_t j = 0; j < count; j += LANES) {
            Vector offset = at + (Real)(from + j);
            far += load(weight + j) * max(offset, -offset);
        }
        return far;
    }

    // Turns products of rows from `row` up to `stop` into weights. Either all of them are bounded or none.
    template <bool STATISTICS>
    void weigh_rows(const Block &block, int row, int stop, int64_t first, int64_t count, Real factor,
                    bool plain) const {
        bool bounded = block.bounded[row];
        if (bounded && plain)
            for (; row < stop; row++) weigh_bounded<true, STATISTICS>(block, row, first, count, factor);
        else if (bounded)
            for (; row < stop; row++) weigh_bounded<false, STATISTICS>(block, row, first, count, factor);
        else
            for (; row < stop; row++) weigh<STATISTICS>(block, row, first, count, factor);
    }

    void weigh(const Block &block, int row, int stop, int64_t first, int64_t count, Real factor, bool plain) const {
        statistics ? weigh_rows<true>(block, row, stop, first, count, factor, plain)
                   : weigh_rows<false>(block, row, stop, first, count, factor, plain);
    }

    // Adds the non-finite numbers of a value, which are 0 in its panel, to a row that attends to it.
    void add_infinite(const Block &block, int row, int64_t first, int64_t j) const {
        Real weight = Op::unpack(weights(block, row)[j]);
        const T *value = value_at(block.head, first + j);
        for (int64_t x = 0; x < problem.w; x++) {
            Real number = widen(value[x * problem.v_stride[3]]);
            if (!is_finite(number)) block.out[row * across * PANEL + x] += weight * number;
        }
    }

    // Computes the scores and weights of keys first … first + count and adds weights times values to the output.
    void step(const Block &block, int64_t first, int64_t count, bool plain) const {
        if (given_scores) return step_given(block, first, count);
        multiply_keys(block, first, count);
        weigh_all(block, first, round_up(count, 2 * LANES), plain);
        multiply_values(block, first, round_up(count, Op::DEPTH_MULTIPLE));
    }

    void multiply_keys(const Block &block, int64_t first, int64_t count) const {
        TIME(TIMES_KEYS);
        const Element *panel = keys + ((block.head - first_head) * panels * PANEL + first) * depth;
        for (int row = 0; row < block.rows; row++) block.maxima[row] = broadcast(-INF);
        for (int64_t c = 0; c < count; c += PANEL) {
            int64_t columns = smaller<int64_t>(PANEL, count - c);
            Real *score = scores(block, 0) + c;
            if (block.all_bounded && !statistics)
                multiply<Op, false, false>(block.rows, columns, block.q, depth, panel + c * depth, score, block.line,
                                           depth, block.maxima);
            else
                multiply<Op, false, true>(block.rows, columns, block.q, depth, panel + c * depth, score, block.line,
                                          depth, block.maxima);
        }
    }

    void weigh_all(const Block &block, int64_t first, int64_t count, bool plain) const {
        TIME(SOFTMAX);
        Real factor = plain ? unit : (Real)1;
        if (!plain)
            for (int row = 0; row < block.rows; row++) finish(block, row, first, count);
        if (!block.all_bounded || statistics) find_maximum(block);
        bool some = false;  // is some number of a value infinite or NaN?
        for (int64_t c = 0; c < count; c += PANEL)
            some |= infinite[(block.head - first_head) * panels + (first + c) / PANEL];
        for (int row = 0, stop; row < block.rows; row = stop) {
            stop = row + 1;
            if (some && !block.bounded[row]) {
                weigh_infinite(block, row, first, count, factor);
                continue;
            }
            while (stop < block.rows && block.bounded[stop] == block.bounded[row] && (!some || block.bounded[row]))
                stop++;
            weigh(block, row, stop, first, count, factor, plain);
        }
    }

    void multiply_values(const Block &block, int64_t first, int64_t count) const {
        TIME(TIMES_VALUES);
        for (int64_t a = 0; a < across; a++)
            multiply<Op, true, false>(
                block.rows, smaller<int64_t>(PANEL, problem.w - a * PANEL), weights(block, 0),
                Op::PAIR == 1 ? block.line : WEIGHT_LINE,
                values + (((block.head - first_head) * across + a) * panels * PANEL + first) * PANEL,
                block.out + a * PANEL, across * PANEL, count, block.maxima);
    }

    // Finds the largest score of each row of a step, for several rows at a time, to hide the latency of instructions.
    void find_maximum(const Block &block) const {
        for (int row = 0; row < block.rows; row += LANES) {
            Vector tops[LANES];
            for (int n = 0; n < LANES; n++) tops[n] = block.maxima[smaller(row + n, block.rows - 1)];
            store(block.maximum + row, maxima(tops));
        }
    }

    // Computes the weights of given scores.
    void step_given(const Block &block, int64_t first, int64_t count) const {
        int64_t whole = round_up(count, 2 * LANES);
        for (int row = 0; row < block.rows; row++) {
            Real *score = scores(block, row);
            const Real *from = given_scores +
                               ((block.b * problem.h + block.h) * problem.t + block.first + row) * panels * PANEL +
                               first;
            memcpy(score, from, sizeof(Real) * count);
            for (int64_t j = count; j < whole; j++) score[j] = -INF;
            Vector top = broadcast(-INF);
            for (int64_t j = 0; j < whole; j += LANES) top = max(load(score + j), top);
            block.maxima[row] = top;
        }
        find_maximum(block);
        for (int row = 0; row < block.rows; row++) weigh(block, row, row + 1, first, whole, 1, false);
    }

    // Computes the weights of a row if some value isn't finite. Such a value must be added to the output if its key is
    // visible, even if its weight is 0.
    void weigh_infinite(const Block &block, int row, int64_t first, int64_t count, Real factor) const {
        uint8_t visible[KEYS];
        for (int64_t j = 0; j < count; j++) visible[j] = !(scores(block, row)[j] == -INF);
        weigh(block, row, row + 1, first, count, factor, false);
        for (int64_t j = 0; j < smaller(count, problem.s - first); j++)
            if (visible[j]) add_infinite(block, row, first, j);
    }

    int64_t chunk_at(int64_t q_head, int64_t n) const {
        return (q_head - first_head * (problem.h / problem.g)) * chunks + n;
    }

    // Computes chunk n of a head: a block, or several blocks if there are statistics.
    void compute(int64_t head, int64_t n) {
        n = chunks - 1 - n;  // the last chunk first: under a causal mask it takes longest
        if (!statistics) return attend(head, n, 0, 0);
        int64_t at = chunk_at(head, n), first = n * blocks / chunks;
        if (statistics->received) memset(columns + at * panels * PANEL, 0, sizeof(WideReal) * panels * PANEL);
        memset(shared_rows + at * shared_row_size(), 0, sizeof(Real) * shared_row_size());
        bool only_received = !statistics->max_score && !statistics->top_k && !statistics->maps &&
                             lse_known;  // only `received` is wanted
        for (int64_t index = first; index < (n + 1) * blocks / chunks; index++)
            if (!only_received || (index + 1) * rows > statistics->first_counted) attend(head, index, n, first * rows);
    }

    // Computes block `index` of a head, which belongs to chunk `part`; `start` is the first query of the chunk.
    void attend(int64_t q_head, int64_t index, int64_t part, int64_t start) {
        Block block = {};
        block.h = q_head % problem.h, block.b = q_head / problem.h, block.chunk = part, block.chunk_start = start;
        block.head = block.b * problem.g + block.h / (problem.h / problem.g);
        block.first = index * rows;
        block.rows = (int)smaller(rows, problem.t - block.first);
        block.position = offset_of(problem, block.b) + block.first;
        int64_t wide_out = across * PANEL, tops = statistics ? ROWS * round_up(statistics->top_k, LANES) / LANES : 0,
                steps = keeps_rows ? panels : 0;
        allocate(scratch, array(block.q, ROWS * depth),
                 array(block.score, score_rows(smaller<int64_t>(rows, problem.t)) *
                                        (keeps_rows ? panels * line_of(1) : line_of(KEYS))),
                 array(block.weight, Op::PAIR == 1 ? 0 : ROWS * WEIGHT_LINE), array(block.out, ROWS * wide_out),
                 array(block.maxima, ROWS), array(block.sums, ROWS), array(block.running_max, ROWS),
                 array(block.entropy_sums, statistics ? ROWS : 0), array(block.distance_sums, statistics ? ROWS : 0),
                 array(block.max_score, statistics ? ROWS : 0), array(block.top_scores, tops),
                 array(block.top_keys, tops), array(block.kept, steps), array(block.step_max, steps * ROWS),
                 array(block.maximum, ROWS), array(block.bounded, ROWS));
        if (Op::PAIR == 1) block.weight = (Element *)block.score;

        Real by = Op::PAIR == 1 ? (Real)problem.scale : problem.scale < 0 ? -(Real)1 : (Real)1;
        const T *q = ::row_at<T>(problem.q, problem.q_stride, block.b, block.h, block.first);
        Real sink = problem.sink ? ((const Real *)problem.sink)[block.h] : -INF;
        for (int row = 0; row < block.rows; row++) {
            if (!given_scores)  // with given scores, q isn't used and may have another dtype
                pack_query<Op>(block.q + row * depth, q + row * problem.q_stride[2], problem.q_stride[3], problem.d,
                               by);
            block.sums[row] = Vector{};
            if (statistics)
                block.entropy_sums[row] = block.distance_sums[row] = Vector{}, block.max_score[row] = -INF,
                largest(block, row).clear();
        }
        memset(block.out, 0, sizeof(Real) * block.rows * wide_out);
        if (problem.query_ids) {
            const int64_t *ids = problem.query_ids + block.b * problem.query_ids_stride + block.first;
            block.ids = {ids[0], ids[0]};
            for (int row = 1; row < block.rows; row++)
                block.ids = {smaller(block.ids.least, ids[row]), larger(block.ids.most, ids[row])};
        }
        find_bounded(block);
        for (int row = 0; row < block.rows; row++)
            block.running_max[row] = block.bounded[row] ? (Real)0 : lse_known ? lse_of(block)[row] : sink;
        walk(block);
        write(block, sink);
        if (keeps_rows) finish_statistics(block);
    }

    Real *lse_of(const Block &block) const {
        return (Real *)problem.lse + (block.b * problem.h + block.h) * problem.t + block.first;
    }

    // Rows of scores that a product writes, and the distance between them, which isn't a power of two either.
    static int64_t score_rows(int64_t rows) { return round_up(rows, Op::ROWS_MULTIPLE); }
    static int64_t line_of(int64_t columns) { return round_up(columns, PANEL) + LANES; }

    // Processes the keys that are visible to some row, in steps of one or several panels. Panels that are fully visible
    // to all rows need no mask.
    void walk(Block &block) const {
        Interval top = visible_keys(problem, block.b, block.first),
                 bottom = visible_keys(problem, block.b, block.first + block.rows - 1);
        int64_t begin = smaller(top.begin, bottom.begin), end = larger(top.end, bottom.end);
        int64_t full_begin = larger(top.begin, bottom.begin), full_end = smaller(top.end, bottom.end);
        bool needs_masking = problem.softcap || problem.slopes || problem.bias || problem.keep ||
                             (problem.key_ids && block.ids.least != block.ids.most);
        auto plain = [&](int64_t panel) {
            if (needs_masking || given_scores || panel * PANEL < full_begin || (panel + 1) * PANEL > full_end)
                return false;
            return !problem.key_ids || ranges[block.b * panels + panel].least == ranges[block.b * panels + panel].most;
        };
        for (int64_t panel = begin / PANEL, count; panel * PANEL < end; panel += count) {
            count = 1;  // the panels of a step
            if (has_no_common_id(block, panel)) continue;
            bool every = plain(panel);
            while ((count + 1) * PANEL <= KEYS && (panel + count) * PANEL < end &&
                   !has_no_common_id(block, panel + count) && plain(panel + count) == every)
                count++;
            int64_t first = panel * PANEL, columns = smaller(count * PANEL, end - first);
            block.line = line_of(columns);
            step(block, first, columns, every);
            KeptStep kept = {first, columns, block.score, block.line};
            if (lse_known) gather(block, kept, nullptr);
            if (!keeps_rows) continue;
            block.kept[block.steps] = kept;
            memcpy(block.step_max + block.steps++ * ROWS, block.running_max, sizeof(Real) * block.rows);
            block.score += score_rows(block.rows) * block.line;
        }
    }

    // Returns true if the ids of the block's queries and of a panel of keys are in disjoint ranges.
    bool has_no_common_id(const Block &block, int64_t panel) const {
        if (!problem.key_ids || given_scores) return false;
        const IdRange &range = ranges[block.b * panels + panel];
        return range.most < block.ids.least || block.ids.most < range.least;
    }

    // Normalises and writes the output and the log-sum-exp of a block, and statistics of its rows.
    void write(const Block &block, Real sink) const {
        for (int row = 0; row < block.rows; row++) {
            Wide top = block.running_max[row];
            Real sum_of_weights = sum(block.sums[row]), total = sum_of_weights;
            if (!lse_known) {
                if (sink != -INF) total += (Real)std::exp2((sink - top) * LOG2E);
                Real by = total == (Real)0 ? (Real)0 : (Real)1 / total;
                int64_t t = block.first + row;
                T *out = (T *)problem.out + block.b * problem.out_stride[0] + block.h * problem.out_stride[1] +
                         t * problem.out_stride[2];
                const Real *from = block.out + row * across * PANEL;
                each(problem.w, problem.out_stride[3], [&](int64_t x, int64_t at) { narrow(by * from[x], out[at]); });
                if (problem.lse) lse_of(block)[row] = total == 0 ? -INF : (Real)(top + std::log((Wide)total));
            }
            if (statistics) write_statistics(block, row, sum_of_weights, lse_known ? (Real)1 : total);
        }
    }

    // -- statistics -----------------------------------------------------------------------------------

    // Writes the statistics of a row, whose unnormalised weights sum to `sum_of_weights`; `total` includes the sink.
    void write_statistics(const Block &block, int row, Real sum_of_weights, Real total) const {
        int64_t at = (block.b * problem.h + block.h) * problem.t + block.first + row;
        if (sum_of_weights == (Real)0) total = 1;  // everything is masked
        Wide by = 1 / (Wide)total;
        block.sums[row] = broadcast((Real)by);  // from here on, only the normaliser is needed
        if (statistics->total) ((Real *)statistics->total)[at] = (Real)(by * sum_of_weights);
        if (statistics->entropy) {  // both summands are >= 0, except for rounding
            Wide unit = block.bounded[row] ? (Wide)1 : LOG2E,
                 most = block.bounded[row] ? (Wide)block.max_score[row] : (Wide)0;
            Real entropy =
                (Real)(by * (sum_of_weights * (std::log((Wide)total) - most) - sum(block.entropy_sums[row]) / unit));
            ((Real *)statistics->entropy)[at] = entropy < 0 ? (Real)0 : entropy;
        }
        if (statistics->distance) ((Real *)statistics->distance)[at] = (Real)(by * sum(block.distance_sums[row]));
        if (statistics->max_score) ((Real *)statistics->max_score)[at] = block.max_score[row];
        Largest found = largest(block, row);
        for (int64_t n = 0; n < statistics->top_k; n++) {
            ((Real *)statistics->top_scores)[at * statistics->top_k + n] = found.score(n);
            statistics->top_keys[at * statistics->top_k + n] = found.key(n);
        }
    }

    // Adds the stored weights of all steps, whose normalisers are now known, to columns and pooled maps.
    void finish_statistics(const Block &block) const {
        Real factor[ROWS] = {};
        for (int64_t n = 0; n < block.steps; n++) {
            for (int row = 0; row < block.rows; row++) {
                Real reference = block.step_max[n * ROWS + row];
                factor[row] = reference == -INF ? -INF : (Real)((reference - block.running_max[row]) * LOG2E);
            }
            for (int row = 0; row < ROWS; row += LANES) store(factor + row, exp2(load(factor + row)));
            for (int row = 0; row < block.rows; row++) factor[row] *= block.sums[row][0];
            gather(block, block.kept[n], factor);
        }
    }

    // Adds the weights of a step, multiplied by a factor for each row (null: 1), to columns and pooled maps.
    void gather(const Block &block, const KeptStep &step, const Real *factor) const {
        const Real *weight = step.weights;
        int64_t first = step.first, count = step.count, line = step.line;
        int64_t head = block.b * problem.h + block.h, at = chunk_at(head, block.chunk);
        Real one[ROWS], counted[ROWS];
        for (int row = 0; row < block.rows; row++) {
            one[row] = factor ? factor[row] : (Real)1;
            counted[row] = block.first + row < statistics->first_counted ? (Real)0 : one[row];
        }
        if (statistics->received)
            add_columns(columns + at * panels * PANEL + first, weight, line, counted, block.rows, count);
        Real *beside = shared_rows + at * shared_row_size();
        for (int64_t n = 0; n < statistics->maps; n++) {
            const PooledMap &map = statistics->map[n];
            for (int64_t row = 0; row < block.rows;) {
                int64_t cell = cell_of(block.first + row, map.rows, problem.t);
                int64_t stop = smaller<int64_t>(edge_of(cell + 1, map.rows, problem.t) - block.first, block.rows);
                bool elsewhere = edge_of(cell, map.rows, problem.t) < block.chunk_start;
                Real *sum = (Real *)map.sum, *highest = (Real *)map.max;
                if (sum) sum = elsewhere ? beside : sum + (head * map.rows + cell) * map.cols;
                if (highest) highest = elsewhere ? beside + map.cols : highest + (head * map.rows + cell) * map.cols;
                Cells cells = {map.cols, problem.s, sum, highest};
                cells.add(weight + row * line, line, one + row, stop - row, first, count);
                row = stop;
            }
            beside += 2 * map.cols;
        }
    }

    // Merges the columns and pooled maps of a head's chunks, in a fixed order.
    void merge(int64_t head) const {
        for (int64_t j = 0; statistics->received && j < problem.s; j++) {
            WideReal sum = 0;
            for (int64_t n = 0; n < chunks; n++) sum += columns[chunk_at(head, n) * panels * PANEL + j];
            ((Real *)statistics->received)[head * problem.s + j] = (Real)sum;
        }
        for (int64_t n = 1; n < chunks; n++) {
            const Real *beside = shared_rows + chunk_at(head, n) * shared_row_size();
            for (int64_t m = 0; m < statistics->maps; m++) {
                const PooledMap &map = statistics->map[m];
                int64_t at = (head * map.rows + cell_of(n * blocks / chunks * rows, map.rows, problem.t)) * map.cols;
                for (int64_t c = 0; c < map.cols; c++) {
                    if (map.sum) ((Real *)map.sum)[at + c] += beside[c];
                    Real *highest = map.max ? (Real *)map.max + at + c : nullptr;
                    if (highest) *highest = larger(*highest, beside[map.cols + c]);
                }
                beside += 2 * map.cols;
            }
        }
    }

    // -- threads ------------------------------------------------------------------------------------

    // Packs panels together with the other threads, waits until all panels are packed, and computes chunks.
    void share_heads() {
        int64_t count = given_scores ? 0 : heads() * panels, queries = problem.h / problem.g;
        take_each(next, count, [&](int64_t n) {
            pack(first_head + n / panels, n % panels);
            __atomic_fetch_add(&packed, 1, __ATOMIC_RELEASE);
        });
        while (__atomic_load_n(&packed, __ATOMIC_ACQUIRE) < count) sched_yield();
        take_each(next_to_compute, heads() * queries * chunks,
                  [&](int64_t n) { compute(first_head * queries + n / chunks, n % chunks); });
    }

    // Packs and computes whole heads, each by one thread.
    void own_heads() {
        int64_t queries = problem.h / problem.g, items = queries * chunks;
        take_each(next, heads(), [&](int64_t n) {
            n += first_head;
            for (int64_t panel = 0; panel < panels; panel++) pack(n, panel);
            for (int64_t item = 0; item < items; item++) compute(n * queries + item / chunks, item % chunks);
        });
    }

    void run() {
        for (; first_head < problem.b * problem.g; first_head += batch) {
            next = packed = next_to_compute = 0;
            run_on<Op>(threads, [&] { threads_own_heads() ? own_heads() : share_heads(); });
            if (!statistics || !(statistics->received || statistics->maps)) continue;
            next = 0;
            int64_t queries = problem.h / problem.g;
            run_on<Op>(threads, [&] {
                take_each(next, heads() * queries, [&](int64_t n) { merge(first_head * queries + n); });
            });
        }
        if (!given_scores) release_storage();
    }
};

// Returns true if `Decode` is faster than `Call`, which packs keys and values: if few queries share a head of keys. With AVX2
// and AVX-512, in float32 products, it is (measured) for more queries than FEW_QUERIES: up to 16, or 32 if numbers aren't
// widened from bfloat16 and its splits are work for eight threads.
template <class T, class Op> bool decodes(const Problem &problem, const Statistics *statistics) {
    int64_t queries = queries_per_key(problem);
    if (BYTES < 32 || Op::PAIR == 2 || statistics) return queries <= FEW_QUERIES;
    constexpr int64_t SPLIT = Decode<T, Op>::SHORT;
    bool divides = problem.b * problem.g * round_up(problem.s, SPLIT) / SPLIT >= 8;
    return queries <= (divides && !std::is_same<T, BFloat16>::value ? 32 : 16);
}

// Computes attention: by `Decode` or by `Call`.
template <class T, class Op> void attend(const Problem &problem, const Statistics *statistics) {
    if (!decodes<T, Op>(problem, statistics)) return Call<T, Op>(problem, statistics).run();
    int64_t line = round_up(problem.s, PANEL), size = statistics ? problem.b * problem.h * problem.t * line : 0;
    std::unique_ptr<Real[]> scores(size ? new Real[size] : nullptr);
    Decode<T, Op>(problem, scores.get(), line, statistics && statistics->lse_known).run();
    release_storage();
    if (!statistics) return;
    Statistics after = *statistics;
    Problem bare = problem;
    after.lse_known = 1, bare.w = 0;
    Call<Real, Single>(bare, &after, scores.get()).run();
    release_storage();
}

// Computes the scores of all queries and keys, scale · q·k with softcap, [b, h, t, s], with the bits of other passes.
template <class T, class Op> struct Scores {
    typedef typename Op::Element Element;

    const Problem &problem;
    Real *to;
    int64_t next = 0;

    // Multiplies a panel of keys of one head with all queries that share it.
    void compute(int64_t head, int64_t first) const {
        int64_t b = head / problem.g, count = smaller<int64_t>(PANEL, problem.s - first),
                depth = round_up(problem.d, Op::DEPTH_MULTIPLE);
        Element *panel, *queries;
        Real *score;
        Vector *unused;
        allocate(scratch, array(panel, depth * PANEL), array(queries, ROWS * depth), array(score, ROWS * PANEL),
                 array(unused, ROWS));
        pack_columns<Op>(panel, ::row_at<T>(problem.k, problem.k_stride, b, head % problem.g, first),
                         problem.k_stride + 2, count, problem.d);
        for (int64_t h = head % problem.g * (problem.h / problem.g), last = h + problem.h / problem.g; h < last; h++)
            for (int64_t t = 0; t < problem.t; t += ROWS) {
                int rows = (int)smaller<int64_t>(ROWS, problem.t - t);
                const T *q = ::row_at<T>(problem.q, problem.q_stride, b, h, t);
                for (int row = 0; row < rows; row++)
                    pack_query<Op>(queries + row * depth, q + row * problem.q_stride[2], problem.q_stride[3], problem.d,
                                   Op::PAIR == 1 ? (Real)problem.scale : (Real)1);
                multiply<Op, false, false>(rows, count, queries, depth, panel, score, PANEL, depth, unused);
                for (int row = 0; row < rows; row++) {
                    scale_and_cap(problem, Op::PAIR == 1 ? (Real)1 : (Real)problem.scale, score + row * PANEL, nullptr,
                                  round_up(count, LANES));
                    memcpy(to + ((b * problem.h + h) * problem.t + t + row) * problem.s + first, score + row * PANEL,
                           sizeof(Real) * count);
                }
            }
    }

    void run() {
        int64_t panels = round_up(problem.s, PANEL) / PANEL;
        run_on<Op>(threads_for(problem, 2. * problem.b * problem.h * problem.t * problem.s * problem.d), [&] {
            take_each(next, problem.b * problem.g * panels,
                      [&](int64_t n) { compute(n / panels, n % panels * PANEL); });
        });
    }
};

}  // namespace

void OF_BUILD(scores)(const Problem *problem, void *to) {
    with_types(*problem,
               [&](auto number, auto op) { Scores<decltype(number), decltype(op)>{*problem, (Real *)to}.run(); });
}

// statistics may be null.
void OF_BUILD(attend)(const Problem *problem, const Statistics *statistics) {
    with_types(*problem, [&](auto number, auto op) { attend<decltype(number), decltype(op)>(*problem, statistics); });
}
