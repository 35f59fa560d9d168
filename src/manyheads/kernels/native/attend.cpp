// Attention forward, compiled once for each vector width (LEVEL names the build).
//
// The softmax is online (Milakov & Gimelshein 2018, arXiv:1805.02867), over blocks of queries and keys (Dao et
// al. 2022, arXiv:2205.14135). Keys and values are packed once per head into panels of a few vectors; a product
// of 6 rows by a panel keeps its sums in registers.
#include "products.h"

#include <cmath>
#include <sched.h>

namespace {

constexpr int ROWS = 48;  // queries in a block
constexpr int FEW = 3;    // queries for which packing isn't paid back

// -- one call --------------------------------------------------------------------------------------

struct Range {  // of the ids in a panel of keys
    int64_t least, most;
};

template <class T, class Op> struct Call {
    typedef typename Op::E E;
    static constexpr int KEYS = Op::KEYS;

    const Problem &p;
    int64_t panels, depth, across;  // panels of keys, d rounded up to pairs, panels of a value
    E *keys, *values;               // [b * g, panels, depth, PANEL], [b * g, across, panels * PANEL, PANEL]
    uint8_t *odd;                   // [b * g, panels]: holds a value that isn't finite
    Range *ranges;                  // [b, panels]
    int64_t threads;
    int64_t rows = ROWS, blocks;    // queries in a block; blocks in a head
    int64_t next = 0, packed = 0;   // what is to be packed, and what is, counted up by all threads
    int64_t following = 0;          // what is to be computed
    bool few;                       // so few queries that nothing is packed
    R unit;                         // what a product of packed numbers is multiplied by to be a score

    Call(const Problem &problem, bool few = false) : p(problem), few(few) {
        panels = up(p.s, PANEL) / PANEL;
        depth = up(p.d, Op::PAIR);
        across = up(p.w, PANEL) / PANEL;
        // Waking threads takes longer than it saves where there is little to do. What makes few blocks is cut finer,
        // so that threads have alike to do; whatever their number, as blocks have a say in the last bits.
        double work = 2. * p.b * p.h * p.t * p.s * (p.d + p.w);
        threads = work < 4e6 ? 1 : p.threads;
        if (p.b * p.h * up(p.t, rows) / rows < 16) rows = 3 * STRIP;
        blocks = up(p.t, rows) / rows;
        int64_t heads = p.b * p.g, k = heads * panels * depth * PANEL, v = heads * across * panels * PANEL * PANEL;
        int64_t sizes[] = {k * (int64_t)sizeof(E), v * (int64_t)sizeof(E), heads * panels,
                           p.key_ids ? p.b * panels * (int64_t)sizeof(Range) : 0};
        // In float32 the queries carry the scale; in bfloat16 they stay exact, but for the sign.
        unit = Op::PAIR == 1 ? (R)1 : (R)std::fabs(p.scale);
        if (few) return;
        char *at[4];
        carve(store_of, sizes, at);
        keys = (E *)at[0], values = (E *)at[1], odd = (uint8_t *)at[2], ranges = (Range *)at[3];
    }

    // Is each thread to have heads of its own, as many as the others? Where they are small, so that what it packed
    // is still in its caches.
    bool own_heads() const {
        double head = 2. * (p.h / p.g) * p.t * p.s * (p.d + p.w);
        return !few && !p.key_ids && head < 4e7 && p.b * p.g % threads == 0;
    }

    // Where a key or a value of one head lies.
    const T *key_at(int64_t head, int64_t j) const { return at<T>(p.k, p.k_stride, head / p.g, head % p.g, j); }
    const T *value_at(int64_t head, int64_t j) const { return at<T>(p.v, p.v_stride, head / p.g, head % p.g, j); }

    // Packs a panel of keys, and of values, of one head; what isn't finite in a value is 0 in its panel.
    void pack(int64_t head, int64_t panel) {
        int64_t first = panel * PANEL, count = smaller<int64_t>(PANEL, p.s - first);
        const T *k = key_at(head, first), *v = value_at(head, first);
        pack_columns<Op>(keys + (head * panels + panel) * depth * PANEL, k, p.k_stride + 2, count, p.d);
        E *to = values + (head * across * panels + panel) * PANEL * PANEL;
        odd[head * panels + panel] = !pack_rows<Op>(to, panels * PANEL * PANEL, v, p.v_stride + 2, count, p.w);
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
        R *score;                   // [ROWS, KEYS]
        E *weight;                  // the same place in float32
        R *out;                     // [ROWS, across * PANEL]
        V *top, *total;             // [ROWS]: of the columns at hand; of all so far
        R *highest;                 // [ROWS]: the running maximum, in Op's unit
    };

    Interval seen(const Block &k, int row) const {  // the keys that a row may see, but for ids, keep and bias
        int64_t i = k.position + row;
        int64_t begin = larger<int64_t>(0, i + p.low), end = smaller<int64_t>(p.s, i + p.high + 1);
        if (p.first) begin = larger(begin, p.first[k.b]), end = smaller(end, p.last[k.b]);
        return {begin, end};
    }

    // What the products at hand become: scores with softcap, bias and mask, and their top.
    void finish(const Block &k, int row, int64_t first, int64_t count) const {
        R *score = k.score + row * KEYS;
        if (p.softcap) {
            V cap = all((R)p.softcap), inner = all(unit / (R)p.softcap);
            for (int64_t j = 0; j < count; j += W) store(score + j, cap * tanh(inner * load(score + j)));
        } else if (unit != (R)1) {
            for (int64_t j = 0; j < count; j += W) store(score + j, unit * load(score + j));
        }
        constrain<3>(p, score, k.b, k.h, k.first + row, first, smaller(count, p.s - first), count, seen(k, row));
        V top = all(-INF);
        for (int64_t j = 0; j < count; j += W) top = max(load(score + j), top);
        k.top[row] = top;
    }

    // Products, which times the factor are scores in the unit of the running maximum, become weights; what was
    // summed so far shrinks where there is a new maximum.
    void weigh(const Block &k, int row, int64_t count, R factor) const {
        const R *score = k.score + row * KEYS;
        E *weight = k.weight + row * KEYS;
        R before = k.highest[row], now = larger(before, factor * highest(k.top[row]));
        V ground = all(now == -INF ? (R)0 : now), by = all(factor), sum = {}, more = {};
        for (int64_t j = 0; j < count; j += 2 * W) {
            V p = Op::weight(load(score + j), ground, by), r = Op::weight(load(score + j + W), ground, by);
            sum += p, more += r;
            Op::weights(weight + j, p, r);
        }
        sum += more;
        if (now != before) {
            R shrink = before == -INF ? (R)0 : (R)std::exp2((before - now) * (LOG2E / Op::UNIT));
            R *out = k.out + row * across * PANEL;
            for (int64_t x = 0; x < across * PANEL; x += W) store(out + x, shrink * load(out + x));
            sum += shrink * k.total[row];
        } else {
            sum += k.total[row];
        }
        k.total[row] = sum;
        k.highest[row] = now;
    }

    // Adds what the panels left out: values that aren't finite, for the rows that may see them.
    void add_odd(const Block &k, int row, int64_t first, int64_t j) const {
        R weight = Op::unpack(k.weight[row * KEYS + j]);
        const T *v = value_at(k.head, first + j);
        for (int64_t x = 0; x < p.w; x++) {
            R y = wide(v[x * p.v_stride[3]]);
            if (!finite(y)) k.out[row * across * PANEL + x] += weight * y;
        }
    }

    // Columns first … first + count of a block: scores, weights, and what they add to the output.
    void step(const Block &k, int64_t first, int64_t count, bool plain) const {
        if constexpr (Op::PAIR == 1)
            if (few) return step_few(k, first, count, plain);
        R factor = (R)(Op::UNIT * (plain ? unit : 1));
        for (int row = 0; row < k.rows; row++) k.top[row] = all(-INF);
        for (int64_t c = 0; c < count; c += PANEL)
            columns_of<Op, false, true>(k.rows, smaller<int64_t>(PANEL, count - c), k.q, depth,
                                        keys + (k.head * panels * PANEL + first + c) * depth, k.score + c, KEYS, depth,
                                        k.top);
        int64_t used = up(count, Op::PAIR);
        count = up(count, 2 * W);
        bool strange = false;
        for (int64_t c = 0; c < count; c += PANEL) strange |= odd[k.head * panels + (first + c) / PANEL];
        if (!plain)
            for (int row = 0; row < k.rows; row++) finish(k, row, first, count);
        if (!strange) {
            for (int row = 0; row < k.rows; row++) weigh(k, row, count, factor);
        } else {
            weigh_odd(k, first, count, factor);
        }
        for (int64_t a = 0; a < across; a++)
            columns_of<Op, true, false>(k.rows, smaller<int64_t>(PANEL, p.w - a * PANEL), k.weight, KEYS,
                                        values + ((k.head * across + a) * panels * PANEL + first) * PANEL,
                                        k.out + a * PANEL, across * PANEL, used, k.top);
    }

    // The same for a few queries, for which keys and values are read as they lie.
    void step_few(const Block &k, int64_t first, int64_t count, bool plain) const {
        int64_t real = count;
        count = up(count, 2 * W);
        const T *keys = key_at(k.head, first), *values = value_at(k.head, first);
        for (int64_t j = 0; j < count; j += W)
            for (int row = 0; row < k.rows; row++) {
                const R *q = k.q + row * depth;
                V rows[W] = {};
                for (int64_t n = 0; n < smaller<int64_t>(W, real - j); n++) {
                    const T *key = keys + (j + n) * p.k_stride[2];
                    for (int64_t x = 0; x < p.d; x += W)
                        rows[n] += Single::units(q, 1, x, p.d) * Single::units(key, p.k_stride[3], x, p.d);
                }
                V score = sums(rows);
                store(k.score + row * KEYS + j, score);
                k.top[row] = max(score, j ? k.top[row] : all(-INF));
            }
        for (int row = 0; row < k.rows; row++) {
            if (!plain || real < count) finish(k, row, first, count);
            uint8_t visible[KEYS];
            for (int64_t j = 0; j < count; j++) visible[j] = !(k.score[row * KEYS + j] == -INF);
            weigh(k, row, count, (R)Op::UNIT);
            const R *weight = k.score + row * KEYS;
            for (int64_t x = 0; x < p.w; x += PANEL) {
                R *out = k.out + row * across * PANEL + x;
                V sum[VECTORS];
                for (int n = 0; n < VECTORS; n++) sum[n] = load(out + n * W);
                for (int64_t j = 0; j < real; j++) {
                    if (!visible[j]) continue;  // whatever it holds
                    V by = all(weight[j]);
                    for (int n = 0; n < VECTORS; n++)
                        if (x + n * W < p.w)
                            sum[n] += by * Single::units(values + j * p.v_stride[2], p.v_stride[3], x + n * W, p.w);
                }
                for (int n = 0; n < VECTORS; n++) store(out + n * W, sum[n]);
            }
        }
    }

    // The same where some value isn't finite: a row that sees it takes it in, however little it weighs.
    void weigh_odd(const Block &k, int64_t first, int64_t count, R factor) const {
        for (int row = 0; row < k.rows; row++) {
            uint8_t visible[KEYS];
            for (int64_t j = 0; j < count; j++) visible[j] = !(k.score[row * KEYS + j] == -INF);
            weigh(k, row, count, factor);
            for (int64_t j = 0; j < smaller(count, p.s - first); j++)
                if (visible[j]) add_odd(k, row, first, j);
        }
    }

    void attend(int64_t item) {
        Block k = {};
        int64_t block = blocks - 1 - item % blocks;  // the last first: where causal, they are the longest
        k.h = item / blocks % p.h, k.b = item / blocks / p.h;
        k.head = k.b * p.g + k.h / (p.h / p.g);
        k.first = block * rows;
        k.rows = (int)smaller(rows, p.t - k.first);
        k.position = offset_of(p, k.b) + k.first;
        int64_t wide_out = across * PANEL;
        int64_t sizes[] = {(int64_t)sizeof(E) * ROWS * depth, (int64_t)sizeof(R) * ROWS * KEYS,
                           Op::PAIR == 1 ? 0 : (int64_t)sizeof(E) * ROWS * KEYS, (int64_t)sizeof(R) * ROWS * wide_out,
                           ROWS * BYTES, ROWS * BYTES, ROWS * (int64_t)sizeof(R)};
        char *at[7];
        carve(scratch, sizes, at);
        k.q = (E *)at[0], k.score = (R *)at[1], k.weight = (E *)(Op::PAIR == 1 ? at[1] : at[2]);
        k.out = (R *)at[3], k.top = (V *)at[4], k.total = (V *)at[5], k.highest = (R *)at[6];

        R by = Op::PAIR == 1 ? (R)p.scale : p.scale < 0 ? -(R)1 : (R)1;
        const T *q = ::at<T>(p.q, p.q_stride, k.b, k.h, k.first);
        R sink = p.sink ? ((const R *)p.sink)[k.h] : -INF;
        for (int row = 0; row < k.rows; row++) {
            E *to = k.q + row * depth;
            const T *from = q + row * p.q_stride[2];
            each(p.d, p.q_stride[3], [&](int64_t x, int64_t at) { to[x] = Op::pack(by * wide(from[at])); });
            if (depth > p.d) to[p.d] = E{};
            k.highest[row] = (R)(sink * Op::UNIT);
            k.total[row] = V{};
            if (sink != -INF) k.total[row][0] = (R)std::exp2((sink * Op::UNIT - k.highest[row]) * (LOG2E / Op::UNIT));
        }
        memset(k.out, 0, sizeof(R) * k.rows * wide_out);
        if (p.query_ids) {
            const int64_t *ids = p.query_ids + k.b * p.query_ids_stride + k.first;
            k.ids = {ids[0], ids[0]};
            for (int row = 1; row < k.rows; row++)
                k.ids = {smaller(k.ids.least, ids[row]), larger(k.ids.most, ids[row])};
        }
        walk(k);
        write(k);
    }

    // The columns that some row may see, in steps; those that all rows see whole are plain.
    void walk(const Block &k) const {
        Interval top = seen(k, 0), bottom = seen(k, k.rows - 1);
        int64_t begin = smaller(top.begin, bottom.begin), end = larger(top.end, bottom.end);
        int64_t full_begin = larger(top.begin, bottom.begin), full_end = smaller(top.end, bottom.end);
        bool never = p.softcap || p.slopes || p.bias || p.keep || (p.key_ids && k.ids.least != k.ids.most);
        auto plain = [&](int64_t panel) {
            if (never || panel * PANEL < full_begin || (panel + 1) * PANEL > full_end) return false;
            return !p.key_ids || ranges[k.b * panels + panel].least == ranges[k.b * panels + panel].most;
        };
        for (int64_t panel = begin / PANEL, count; panel * PANEL < end; panel += count) {
            count = 1;  // panels that are taken together
            if (skips(k, panel)) continue;
            bool whole = plain(panel);
            while ((count + 1) * PANEL <= KEYS && (panel + count) * PANEL < end && !skips(k, panel + count) &&
                   plain(panel + count) == whole)
                count++;
            step(k, panel * PANEL, smaller(count * PANEL, end - panel * PANEL), whole);
        }
    }

    bool skips(const Block &k, int64_t panel) const {  // has no id of these queries
        if (!p.key_ids) return false;
        const Range &range = ranges[k.b * panels + panel];
        return range.most < k.ids.least || k.ids.most < range.least;
    }

    void write(const Block &k) const {
        for (int row = 0; row < k.rows; row++) {
            R total = sum(k.total[row]), by = total == (R)0 ? (R)0 : (R)1 / total;
            int64_t t = k.first + row;
            T *out = (T *)p.out + k.b * p.out_stride[0] + k.h * p.out_stride[1] + t * p.out_stride[2];
            const R *from = k.out + row * across * PANEL;
            each(p.w, p.out_stride[3], [&](int64_t x, int64_t at) { narrow(by * from[x], out[at]); });
            ((R *)p.lse)[(k.b * p.h + k.h) * p.t + t] =
                total == 0 ? -INF : (R)(k.highest[row] / Op::UNIT + std::log((Wide)total));
        }
    }

    // Every thread packs what nobody packs yet, and computes when all is packed.
    static void sharing(void *data) {
        Call &call = *(Call *)data;
        int64_t count = call.few ? 0 : call.p.b * call.p.g * call.panels, items = call.p.b * call.p.h * call.blocks;
        share(call.next, count, [&](int64_t n) {
            call.pack(n / call.panels, n % call.panels);
            __atomic_fetch_add(&call.packed, 1, __ATOMIC_RELEASE);
        });
        while (__atomic_load_n(&call.packed, __ATOMIC_ACQUIRE) < count) sched_yield();
        share(call.following, items, [&](int64_t n) { call.attend(n); });
    }

    // Every thread packs a head and computes it.
    static void owning(void *data) {
        Call &call = *(Call *)data;
        int64_t heads = call.p.b * call.p.g, items = call.p.h / call.p.g * call.blocks;
        share(call.next, heads, [&](int64_t n) {
            for (int64_t panel = 0; panel < call.panels; panel++) call.pack(n, panel);
            for (int64_t item = 0; item < items; item++) call.attend(n * items + item);
        });
    }

    void run() {
        parallel(threads, own_heads() ? owning : sharing, this);
        if (!few) forget();
    }
};

}  // namespace

#define NAME2(level) attend_##level
#define NAME(level) NAME2(level)

void NAME(LEVEL)(const Problem *p) {
    bool few = p->t <= FEW && !p->key_ids;
#if defined(REAL)
    Call<double, Single>(*p, few).run();
#else
    switch (p->dtype) {
        case FLOAT32: return Call<float, Single>(*p, few).run();
        case FLOAT16: return Call<Half, Single>(*p, few).run();
#if defined(__AVX512BF16__)
        case BFLOAT16: return few ? Call<Brain, Single>(*p, few).run() : Call<Brain, Pairs>(*p).run();
#else
        case BFLOAT16: return Call<Brain, Single>(*p, few).run();
#endif
    }
#endif
}

// -- what the machine can do ------------------------------------------------------------------------

#if !defined(REAL)

#if defined(__x86_64__)
#define OPAQUE(v) __asm__ volatile("" : "+v"(v))
#else
#define OPAQUE(v) __asm__ volatile("" : "+w"(v))
#endif

namespace {

// Multiply-adds on registers alone, as many at a time as the kernel's product has; how many operations that were.
template <class Op> double spin(int64_t rounds, float *kept) {
    V sum[STRIP][VECTORS] = {}, a = all(1e-3f), b[VECTORS];
    for (int n = 0; n < VECTORS; n++) b[n] = all(1e-3f);
    for (int i = 0; i < STRIP; i++)
        for (int n = 0; n < VECTORS; n++) OPAQUE(sum[i][n]);  // else equal sums are counted once
    for (int64_t x = 0; x < rounds; x++) {
        OPAQUE(a);
        for (int n = 0; n < VECTORS; n++) OPAQUE(b[n]);
#pragma GCC unroll 6
        for (int i = 0; i < STRIP; i++)
#pragma GCC unroll 4
            for (int n = 0; n < VECTORS; n++) sum[i][n] = Op::add(sum[i][n], a, b[n]);
    }
    for (int i = 0; i < STRIP; i++)
        for (int n = 0; n < VECTORS; n++) *kept += ::sum(sum[i][n]);
    return 2. * Op::PAIR * STRIP * VECTORS * W * rounds;
}

}  // namespace

#define SPIN2(level) spin_##level
#define SPIN(level) SPIN2(level)
#define READ2(level) read_##level
#define READ(level) READ2(level)

double SPIN(LEVEL)(int64_t rounds, int pairs, float *kept) {
#if defined(__AVX512BF16__)
    if (pairs) return spin<Pairs>(rounds, kept);
#endif
    return pairs ? 0 : spin<Single>(rounds, kept);
}

float READ(LEVEL)(const float *x, int64_t count) {  // a multiple of 8 vectors
    V sum[8] = {};
    for (int64_t j = 0; j < count; j += 8 * W)
        for (int n = 0; n < 8; n++) sum[n] += load(x + j + n * W);
    for (int n = 1; n < 8; n++) sum[0] += sum[n];
    return ::sum(sum[0]);
}

#endif
