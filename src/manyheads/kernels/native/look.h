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

// The part of one row of cells that so many rows and columns make, from column `first` on.
struct Cells {
    int64_t cols, s;
    R *sum, *most;  // [cols] each, or null
    int64_t width;  // of every cell, if that is a power of two, else 0

    // In the first place of each group of a vector, its sum and its largest.
    template <int STEP = 1> INLINE void gather(V &total, V &top, int group) {
        if constexpr (STEP < W) {
            if (STEP >= group) return;
            I other;
            for (int n = 0; n < W; n++) other[n] = n ^ STEP;
            total += shuffle(total, total, other), top = max(shuffle(top, top, other), top);
            gather<2 * STEP>(total, top, group);
        }
    }

    void add(const R *weights, int64_t line, const R *factor, int64_t rows, int64_t first, int64_t count) const {
        int64_t cell = cell_of(first, cols, s), edge = edge_of(cell + 1, cols, s) - first;
        for (int64_t c = 0; c < count; c += PANEL) {
            V total[VECTORS] = {}, top[VECTORS] = {};
            for (int64_t row = 0; row < rows; row++)
                for (int n = 0; n < VECTORS; n++) {
                    V w = factor[row] * load(weights + row * line + c + n * W);
                    total[n] += w, top[n] = max(w, top[n]);
                }
            int group = width && c + PANEL <= count ? (int)smaller<int64_t>(width, W) : 1;
            if (group > 1)
                for (int n = 0; n < VECTORS; n++) gather(total[n], top[n], group);
            R totals[PANEL], tops[PANEL];
            for (int n = 0; n < VECTORS; n++) store(totals + n * W, total[n]), store(tops + n * W, top[n]);
            for (int64_t x = c, stop = smaller(c + PANEL, count); x < stop;) {
                int64_t until = smaller(edge, stop);
                R part = 0, high = 0;
                for (; x < until; x += group) part += totals[x - c], high = larger(high, tops[x - c]);
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
    R *scores;
    int64_t *keys;

    void clear() const {
        for (int64_t n = 0; n < size; n++) scores[n] = -INF, keys[n] = -1;
    }

    // tops: the largest of each place in a vector, of which so many are enough to hide what is less.
    void take(const R *score, R factor, int64_t first, int64_t count, V tops) const {
        R least = scores[size - 1];
        if (least == -INF && size <= W) {
            least = INF;
            for (int n = 0; n < W; n++)
                if (__builtin_popcount(lanes(tops > tops[n])) < size) least = smaller(least, tops[n]);
        }
        for (int64_t j = 0; j < count; j += W)
            for (uint32_t some = lanes(factor * load(score + j) >= least); some; some &= some - 1) {
                int64_t at = j + __builtin_ctz(some);
                R one = factor * score[at];
                if (one > scores[size - 1]) put(one, first + at), least = larger(least, scores[size - 1]);
            }
    }

    void put(R score, int64_t key) const {
        int64_t n = size - 1;
        for (; n > 0 && scores[n - 1] < score; n--) scores[n] = scores[n - 1], keys[n] = keys[n - 1];
        scores[n] = score, keys[n] = key;
    }
};

}  // namespace
