// The rulers of a matrix, which name its queries and keys.

const LINE_HEIGHT = 13; // pixels
const LEAST_NAME = 5; // characters of a name that is cut; if fewer fit, its position is alone

function drawRulers(context, geometry, tokens, chosen, theme) {
  context.save();
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  drawQueries(context, geometry, tokens, chosen?.[0], theme);
  drawKeys(context, geometry, tokens, chosen?.[1], theme);
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.fillStyle = theme.muted;
  const edge = geometry.left - (geometry.strip ? 4 : LINE_HEIGHT); // without a strip, the label of the first key is beside it
  context.fillText("queries ↓   keys →", edge, geometry.above - 27, edge - 4);
  context.restore();
}

function drawQueries(context, geometry, tokens, chosen, theme) {
  const { y, v, above, high, left } = geometry, [from, to] = geometry.queries, edge = left - geometry.strip - 8;
  const names = tokens.queries, step = v >= LINE_HEIGHT ? 1 : roundUp(30 / v);
  const { ofQueries, queryOffset } = tokens, units = unitsOf(ofQueries, names, names && queryOffset, from, to, step);
  const labels = units.map((unit) => ({ unit, at: Math.max(above + 4, middleOf(unit, y, v, above, high)), size: LINE_HEIGHT, isChosen: includes(unit, chosen) }));
  context.textAlign = "right";
  for (const { unit, at, isChosen } of withoutOverlaps(labels)) {
    context.fillStyle = isChosen ? theme.accent : theme.text;
    context.fillText(labelOf(context, ofQueries, names, unit.n, queryOffset, step === 1, edge - 6), edge, at);
  }
  drawTicks(units, y, v, theme, context, [0, above, left, high], (along, across, size, thick) => context.fillRect(left - geometry.strip - 4 + across, along, thick, size));
}

function drawKeys(context, geometry, tokens, chosen, theme) {
  const { x, k, left, wide, above } = geometry, [from, to] = geometry.keys, edge = above - geometry.strip - 6;
  const names = tokens.keys, step = k >= 14 ? 1 : roundUp((names ? 24 : 56) / k);
  const isUpright = names !== null || (step === 1 && k < 40);
  const units = unitsOf(tokens, names, names && 0, from, to, step);
  const most = isUpright ? above - geometry.strip - 14 : 98;
  const labels = units.map((unit) => {
    const text = labelOf(context, tokens, names, unit.n, 0, step === 1, isUpright ? most : Math.min(most, Math.max(k, step * k) * unit.tokens - 6));
    const size = isUpright ? LINE_HEIGHT : context.measureText(text).width + 8, at = middleOf(unit, x, k, left, wide);
    return { text, size, at: isUpright ? at : Math.max(at, left + size / 2 - 4), isChosen: includes(unit, chosen) };
  });
  for (const { text, at, isChosen } of withoutOverlaps(labels)) {
    context.save();
    context.fillStyle = isChosen ? theme.accent : theme.text;
    context.translate(at, isUpright ? edge : edge - 6);
    if (isUpright) context.rotate(-Math.PI / 2);
    context.textAlign = isUpright ? "left" : "center";
    context.fillText(text, 0, 0);
    context.restore();
  }
  drawTicks(units, x, k, theme, context, [left, 0, wide, above], (along, across, size, thick) => context.fillRect(along, above - geometry.strip - 4 + across, size, thick));
}

// The labelled units in a range: every step-th token, or the characters that tokens share. names: the labels, or null.
function unitsOf(tokens, names, offset, from, to, step) {
  const units = [];
  if (step > 1 || !names) {
    for (let n = Math.ceil(from / step) * step; n < to; n += step) units.push({ n, tokens: 1, isJoined: false });
    return units;
  }
  for (let n = from; n < to; n = units.at(-1).n + units.at(-1).tokens) {
    const [start, stop] = tokens.unit(n + offset), first = Math.max(0, start - offset);
    units.push({ n: first, tokens: Math.min(stop - offset, names.length) - first, isJoined: first > 0 && tokens.joined.has(start) });
  }
  return units;
}

const includes = ({ n, tokens }, chosen) => chosen !== undefined && chosen >= n && chosen < n + tokens;

// The pixel of the middle of a unit's tokens, or of those in view.
function middleOf({ n, tokens }, shift, size, from, length) {
  const start = Math.max(shift + size * n, from), stop = Math.min(shift + size * (n + tokens), from + length);
  return (start + stop) / 2;
}

// The label of a token with its position. isAll: all tokens have labels, so that pieces of words are named as they are.
function labelOf(context, tokens, names, n, offset, isAll, width) {
  if (!names) return count(n);
  const number = ` ${count(n)}`, name = (isAll ? null : tokens.whole(n + offset)) ?? names[n];
  const shown = fitting(context, name, width - context.measureText(number).width);
  return name !== shown && shown.length < LEAST_NAME ? count(n) : isolated(shown) + number;
}

// Leave out labels that would overlap the one before, or the chosen one. Each has a middle `at` and a `size`, in pixels.
function withoutOverlaps(labels) {
  const overlap = (a, b) => Math.abs(a.at - b.at) < (a.size + b.size) / 2 - 1;
  const chosen = labels.find(({ isChosen }) => isChosen), kept = [];
  for (const label of labels) {
    if (label !== chosen && chosen && overlap(label, chosen)) continue;
    if (kept.length && overlap(label, kept.at(-1))) continue;
    kept.push(label);
  }
  return kept;
}

// Draw a tick at each token, and hairlines that join the pieces of a word. fill(along, across, size, thick): a rectangle in the
// direction of the ruler. area: the ruler, beside the matrix that is in view.
function drawTicks(units, shift, size, theme, context, area, fill) {
  context.save();
  context.beginPath();
  context.rect(...area);
  context.clip();
  for (const { n, tokens, isJoined } of units) {
    context.fillStyle = theme.text;
    for (let m = n; m < n + tokens; m++) fill(shift + size * (m + 0.5), 0, 1, 3);
    const before = isJoined ? size : 0;
    context.fillStyle = theme.muted;
    if (before || tokens > 1) fill(shift + size * (n + 0.5) - before, 0, before + size * (tokens - 1) + 1, 1);
  }
  context.restore();
}
