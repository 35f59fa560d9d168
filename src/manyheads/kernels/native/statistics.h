// Statistics of a block of weights [rows, columns]: sums of columns, pooled maps, and the largest scores of each row.
//
// Weights may have been computed with an earlier maximum of their row; multiplied by factor [rows] they are final.
#pragma once
#include "products.h"

namespace {

// Sums over queries are in float64, because a key may be visible to every query, so that they have many terms.
#if defined(REAL)
typedef REAL WideReal;
#else
typedef double WideReal;
#endif

// Adds the sums of `count` columns over the rows.
static void add_columns(WideReal *to, const Real *weights, int64_t line, const Real *factor, int rows, int64_t count) {
    for (int64_t c = 0; c < count; c += PANEL) {
        Vector sum[VECTORS] = {};
        for (int row = 0; row < rows; row++)
            for (int n = 0; n < VECTORS; n++) sum[n] += factor[row] * load(weights + row * line + c + n * LANES);
        Real sums[PANEL];
        for (int n = 0; n < VECTORS; n++) store(sums + n * LANES, sum[n]);
        for (int64_t x = 0; x < smaller<int64_t>(PANEL, count - c); x++) to[c + x] += sums[x];
    }
}

// The first column of a cell, and the cell of a column, if `size` columns are divided into `cells`.
INLINE int64_t edge_of(int64_t cell, int64_t cells, int64_t size) { return cell * size / cells; }
INLINE int64_t cell_of(int64_t at, int64_t cells, int64_t size) { return ((at + 1) * cells - 1) / size; }

// Reduces adjacent numbers of N vectors to their sums and maxima, `HALVINGS` times; the results stay in order.
template <int HALVINGS, int N> INLINE void pair_up(Vector *totals, Vector *tops) {
    if constexpr (HALVINGS > 0) {
        Integers even, odd;
        for (int n = 0; n < LANES; n++) even[n] = 2 * n, odd[n] = 2 * n + 1;
        constexpr int REMAINING = N > 1 ? N / 2 : 1;
        for (int n = 0; n < REMAINING; n++) {
            Vector a = totals[N > 1 ? 2 * n : 0], b = totals[N > 1 ? 2 * n + 1 : 0];
            totals[n] = shuffle(a, b, even) + shuffle(a, b, odd);
            a = tops[N > 1 ? 2 * n : 0], b = tops[N > 1 ? 2 * n + 1 : 0];
            tops[n] = max(shuffle(a, b, even), shuffle(a, b, odd));
        }
        pair_up<HALVINGS - 1, REMAINING>(totals, tops);
    }
}

// A row of a pooled map's cells, to which weights are added from column `first` on.
struct Cells {
    int64_t cols, s;
    Real *sum, *highest;  // [cols] each, or null

    void add(const Real *weights, int64_t line, const Real *factor, int64_t rows, int64_t first, int64_t count) const {
        switch (s % cols ? 0 : s / cols) {  // columns in a cell
            case 2: return add<1>(weights, line, factor, rows, first, count);
            case 4: return add<2>(weights, line, factor, rows, first, count);
            case 8: return add<3>(weights, line, factor, rows, first, count);
            case 16: return add<4>(weights, line, factor, rows, first, count);
            default: return add<0>(weights, line, factor, rows, first, count);
        }
    }

    template <int HALVINGS>
    void add(const Real *weights, int64_t line, const Real *factor, int64_t rows, int64_t first, int64_t count) const {
        int64_t cell = cell_of(first, cols, s), edge = edge_of(cell + 1, cols, s) - first;
        for (int64_t c = 0; c < count; c += PANEL) {
            Vector total[VECTORS] = {}, top[VECTORS] = {};
            for (int64_t row = 0; row < rows; row++)
                for (int n = 0; n < VECTORS; n++) {
                    Vector w = factor[row] * load(weights + row * line + c + n * LANES);
                    total[n] += w, top[n] = max(w, top[n]);
                }
            constexpr int GROUP = 1 << HALVINGS, KEPT = PANEL >> HALVINGS;
            Real totals[PANEL], tops[PANEL];
            if (GROUP > 1 && KEPT > 0 && c + PANEL <= count) {  // a panel begins with a cell
                pair_up<HALVINGS, VECTORS>(total, top);
                constexpr int REMAINING = KEPT < LANES ? 1 : KEPT / LANES;
                for (int n = 0; n < REMAINING; n++)
                    store(totals + n * LANES, total[n]), store(tops + n * LANES, top[n]);
                Real *to = sum + cell, *high = highest + cell;
                if (sum)
                    for (int n = 0; n < KEPT; n++) to[n] += totals[n];
                if (highest)
                    for (int n = 0; n < KEPT; n++) high[n] = larger(high[n], tops[n]);
                cell += KEPT, edge += PANEL;
                continue;
            }
            for (int n = 0; n < VECTORS; n++) store(totals + n * LANES, total[n]), store(tops + n * LANES, top[n]);
            for (int64_t x = c, stop = smaller(c + PANEL, count); x < stop;) {
                int64_t until = smaller(edge, stop);
                Real part = 0, high = 0;
                for (; x < until; x++) part += totals[x - c], high = larger(high, tops[x - c]);
                if (sum) sum[cell] += part;
                if (highest) highest[cell] = larger(highest[cell], high);
                if (x == edge) cell++, edge = edge_of(cell + 1, cols, s) - first;
            }
        }
    }
};

// The largest scores of a row so far, descending, and their keys; of equal scores the first keys.
struct Largest {
    int64_t size;
    Vector *scores;  // [vectors of size]
    Integers *keys;

    int64_t vectors() const { return (size + LANES - 1) / LANES; }
    void clear() const {
        for (int64_t n = 0; n < vectors(); n++) scores[n] = broadcast(-INF), keys[n] = Integers{} - 1;
    }
    Real score(int64_t n) const { return ((const Real *)scores)[n]; }
    Integer key(int64_t n) const { return ((const Integer *)keys)[n]; }
    Real least() const { return score(size - 1); }

    // Adds scores. tops: the maxima of the lanes. The smallest of the `size` largest of them is a lower bound of the
    // row's `size`-th largest score, so that smaller scores can be skipped.
    void take(const Real *score, Real factor, int64_t first, int64_t count, Vector tops) const {
        Real bar = least();
        if (bar == -INF && size <= LANES) {
            bar = INF;
            for (int n = 0; n < LANES; n++)
                if (__builtin_popcount(bit_mask(tops > tops[n])) < size) bar = smaller(bar, tops[n]);
        }
        for (int64_t j = 0; j < count; j += 2 * LANES) {
            Vector a = factor * load(score + j), b = factor * load(score + j + LANES);
            if (!at_least(max(a, b), bar)) continue;
            for (uint64_t some = at_least(a, bar) | (uint64_t)at_least(b, bar) << LANES; some; some &= some - 1) {
                int64_t at = j + __builtin_ctzll(some);
                Real candidate = factor * score[at];
                if (candidate > least()) put(candidate, first + at), bar = larger(bar, least());
            }
        }
    }

    // Inserts a score; smaller scores move one place toward the end.
    void put(Real score, int64_t key) const {
        Integers before;
        for (int n = 0; n < LANES; n++) before[n] = LANES - 1 + n;
        Vector candidate = broadcast(score);
        Integers new_key = Integers{} + (Integer)key;
        for (int64_t n = vectors() - 1; n >= 0; n--) {
            Vector old = scores[n], prior = shuffle(n ? scores[n - 1] : broadcast(INF), old, before);
            Integers old_key = keys[n],
                     prior_key = (Integers)shuffle(n ? (Vector)keys[n - 1] : Vector{}, (Vector)old_key, before);
            Integers stays = old >= candidate, moves = prior >= candidate;
            scores[n] = stays ? old : moves ? candidate : prior;
            keys[n] = stays ? old_key : moves ? new_key : prior_key;
        }
    }
};

}  // namespace
