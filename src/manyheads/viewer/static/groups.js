// The groups of layers that the overview shows as matrices, and their arrangement on the page.

const MOST_GROUPS = 4; // of one run; more would be hard to read
const SMALLEST = 14, LARGEST = 340; // pixels of a cell
const STRIP_HEIGHT = 17; // pixels of the number below a thumbnail
const STRIPPED = 44; // smaller cells show their score in place of the thumbnail
const ROW_HEAD = 36, COLUMN_HEAD = 20, TITLE = 28, GROUP_GAP = 24; // pixels

// Return the name of a layer without its numbers: layers with the same one are alike.
const pattern = (name) => name.replaceAll(/\d+/g, "#");

// Return the groups of a run's layers, each {run, title, layers}, in which the encoder, the decoder and cross-attention are
// apart; one group if the names have more patterns than that. `title` is "" if there is one group.
function groupLayers(run, layers) {
  const byPattern = new Map();
  layers.forEach(({ name }, n) => byPattern.set(pattern(name), [...(byPattern.get(pattern(name)) ?? []), n]));
  if (byPattern.size === 1 || byPattern.size > MOST_GROUPS) return [{ run, title: "", layers: [...layers.keys()] }];
  return Array.from(byPattern.values(), (members) => ({ run, title: nameLayers(members.map((n) => layers[n].name)), layers: members }));
}

// Return the common name of layers, with the first and last of the numbers that differ: "decoder.0–5.attention".
function nameLayers(names) {
  const parts = names.map((name) => name.split(/(\d+)/));
  return parts[0].map((part, n) => {
    const last = parts.at(-1)[n];
    return part === last ? part : `${part}–${last}`;
  }).join("");
}

// Return the size of cells in pixels, and in how many columns to arrange matrices so that all fit into an area with the largest
// cells. matrices: [{rows, columns}]. extra: pixels below each thumbnail. titles: whether matrices have a title.
function fitMatrices(matrices, width, height, extra, titles) {
  let best = { cell: SMALLEST, across: 1 };
  for (let across = 1; across <= matrices.length; across++) {
    for (let cell = LARGEST; cell > best.cell; cell--) {
      if (fits(matrices, across, cell, width, height, cell >= STRIPPED ? extra : 0, titles)) best = { cell, across };
    }
  }
  return best;
}

function fits(matrices, across, cell, width, height, extra, titles) {
  const gap = gapOf(cell);
  let left = height + GROUP_GAP;
  for (let n = 0; n < matrices.length; n += across) {
    const row = matrices.slice(n, n + across);
    const wide = row.reduce((sum, { columns }) => sum + ROW_HEAD + columns * (cell + gap), 0) + GROUP_GAP * (row.length - 1);
    const rows = Math.max(...row.map(({ rows }) => rows));
    left -= rows * (cell + extra + gap) + COLUMN_HEAD + (titles ? TITLE : 0) + GROUP_GAP;
    if (wide > width || left < 0) return false;
  }
  return true;
}

// Return the size of cells and the number of columns with which a list of cells fills an area best.
function fitList(count, width, height, extra) {
  for (let cell = LARGEST; cell > SMALLEST; cell--) {
    const gap = gapOf(cell), columns = Math.floor((width + gap) / (cell + gap)), high = cell + (cell >= STRIPPED ? extra : 0) + gap;
    if (columns > 0 && Math.ceil(count / columns) * high <= height) return { cell, columns };
  }
  return { cell: SMALLEST, columns: Math.max(1, Math.floor(width / (SMALLEST + gapOf(SMALLEST)))) };
}

// The pixels between cells.
const gapOf = (cell) => (cell >= 80 ? 6 : cell >= 40 ? 4 : 2);
