// What is read off a block of weights [rows, columns] while it is near: sums of columns, pictures, the largest.
//
// A weight may have been computed under another maximum than that of its row in the end: factor [rows] makes it
// what it is.
#pragma once
#include "products.h"

namespace {

// Sums of many numbers are kept wider, as a key may be seen by all queries.
#if defined(REAL)
typedef REAL Sum;
#else
typedef double Sum;
#endif

// Columns of `count` are summed over the rows and added.
static void add_columns(Sum *to, const R *weights, int64_t line, const R *factor, int rows, int64_t count) {
    for (int64_t c = 0; c < count; c += PANEL) {
        V sum[VECTORS] = {};
        for (int row = 0; row < rows; row++)
            for (int n = 0; n < VECTORS; n++) sum[n] += factor[row] * load(weights + row * line + c + n * W);
        R sums[PANEL];
        for (int n = 0; n < VECTORS; n++) store(sums + n * W, sum[n]);
        for (int64_t x = 0; x < smaller<int64_t>(PANEL, count - c); x++) to[c + x] += sums[x];
    }
}

INLINE int64_t edge_of(int64_t cell, int64_t cells, int64_t size) { return cell * size / cells; }
INLINE int64_t cell_of(int64_t at, int64_t cells, int64_t size) { return ((at + 1) * cells - 1) / size; }

// Neighbours of so many vectors are put together, `halvings` times: pairs stand where their first stood, in order.
template <int HALVINGS, int N> INLINE void pair_up(V *totals, V *tops) {
    if constexpr (HALVINGS > 0) {
        I even, odd;
        for (int n = 0; n < W; n++) even[n] = 2 * n, odd[n] = 2 * n + 1;
        constexpr int LEFT = N > 1 ? N / 2 : 1;
        for (int n = 0; n < LEFT; n++) {
            V a = totals[N > 1 ? 2 * n : 0], b = totals[N > 1 ? 2 * n + 1 : 0];
            totals[n] = shuffle(a, b, even) + shuffle(a, b, odd);
            a = tops[N > 1 ? 2 * n : 0], b = tops[N > 1 ? 2 * n + 1 : 0];
            tops[n] = max(shuffle(a, b, even), shuffle(a, b, odd));
        }
        pair_up<HALVINGS - 1, LEFT>(totals, tops);
    }
}

// The part of one row of cells that so many rows and columns make, from column `first` on.
struct Cells {
    int64_t cols, s;
    R *sum, *most;  // [cols] each, or null

    void add(const R *weights, int64_t line, const R *factor, int64_t rows, int64_t first, int64_t count) const {
        switch (s % cols ? 0 : s / cols) {  // columns of a cell
            case 2: return add<1>(weights, line, factor, rows, first, count);
            case 4: return add<2>(weights, line, factor, rows, first, count);
            case 8: return add<3>(weights, line, factor, rows, first, count);
            case 16: return add<4>(weights, line, factor, rows, first, count);
            default: return add<0>(weights, line, factor, rows, first, count);
        }
    }

    template <int HALVINGS>
    void add(const R *weights, int64_t line, const R *factor, int64_t rows, int64_t first, int64_t count) const {
        int64_t cell = cell_of(first, cols, s), edge = edge_of(cell + 1, cols, s) - first;
        for (int64_t c = 0; c < count; c += PANEL) {
            V total[VECTORS] = {}, top[VECTORS] = {};
            for (int64_t row = 0; row < rows; row++)
                for (int n = 0; n < VECTORS; n++) {
                    V w = factor[row] * load(weights + row * line + c + n * W);
                    total[n] += w, top[n] = max(w, top[n]);
                }
            constexpr int GROUP = 1 << HALVINGS, KEPT = PANEL >> HALVINGS;
            R totals[PANEL], tops[PANEL];
            if (GROUP > 1 && KEPT > 0 && c + PANEL <= count) {  // a panel begins with a cell
                pair_up<HALVINGS, VECTORS>(total, top);
                constexpr int LEFT = KEPT < W ? 1 : KEPT / W;
                for (int n = 0; n < LEFT; n++) store(totals + n * W, total[n]), store(tops + n * W, top[n]);
                R *to = sum + cell, *high = most + cell;
                if (sum)
                    for (int n = 0; n < KEPT; n++) to[n] += totals[n];
                if (most)
                    for (int n = 0; n < KEPT; n++) high[n] = larger(high[n], tops[n]);
                cell += KEPT, edge += PANEL;
                continue;
            }
            for (int n = 0; n < VECTORS; n++) store(totals + n * W, total[n]), store(tops + n * W, top[n]);
            for (int64_t x = c, stop = smaller(c + PANEL, count); x < stop;) {
                int64_t until = smaller(edge, stop);
                R part = 0, high = 0;
                for (; x < until; x++) part += totals[x - c], high = larger(high, tops[x - c]);
                if (sum) sum[cell] += part;
                if (most) most[cell] = larger(most[cell], high);
                if (x == edge) cell++, edge = edge_of(cell + 1, cols, s) - first;
            }
        }
    }
};

// The largest of a row so far, in falling order, and whose they are: among equals the first.
struct Largest {
    int64_t size;
    V *scores;  // [vectors of size]
    I *keys;

    int64_t vectors() const { return (size + W - 1) / W; }
    void clear() const {
        for (int64_t n = 0; n < vectors(); n++) scores[n] = all(-INF), keys[n] = I{} - 1;
    }
    R score(int64_t n) const { return ((const R *)scores)[n]; }
    Whole key(int64_t n) const { return ((const Whole *)keys)[n]; }
    R least() const { return score(size - 1); }

    // tops: the largest of each place in a vector, of which so many are enough to hide what is less.
    void take(const R *score, R factor, int64_t first, int64_t count, V tops) const {
        R bar = least();
        if (bar == -INF && size <= W) {
            bar = INF;
            for (int n = 0; n < W; n++)
                if (__builtin_popcount(lanes(tops > tops[n])) < size) bar = smaller(bar, tops[n]);
        }
        for (int64_t j = 0; j < count; j += 2 * W) {
            V a = factor * load(score + j), b = factor * load(score + j + W);
            if (!reaching(max(a, b), bar)) continue;
            for (uint64_t some = reaching(a, bar) | (uint64_t)reaching(b, bar) << W; some; some &= some - 1) {
                int64_t at = j + __builtin_ctzll(some);
                R one = factor * score[at];
                if (one > least()) put(one, first + at), bar = larger(bar, least());
            }
        }
    }

    // What is less moves on by one place.
    void put(R score, int64_t key) const {
        I before;
        for (int n = 0; n < W; n++) before[n] = W - 1 + n;
        V one = all(score);
        I its = I{} + (Whole)key;
        for (int64_t n = vectors() - 1; n >= 0; n--) {
            V old = scores[n], prior = shuffle(n ? scores[n - 1] : all(INF), old, before);
            I whose = keys[n], theirs = (I)shuffle(n ? (V)keys[n - 1] : V{}, (V)whose, before);
            I stays = old >= one, here = prior >= one;
            scores[n] = stays ? old : here ? one : prior;
            keys[n] = stays ? whose : here ? its : theirs;
        }
    }
};

}  // namespace
