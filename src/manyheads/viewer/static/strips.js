// The strips at the edges of a matrix: the weight that each key receives, at the top, and each query's entropy, at the left.

// marginals: the numbers of all keys and queries, null until they are known. largest: the numbers at the ends of the scales, which
// compared heads share. hasScale: whether to write the one of the keys, beside the colour bar.
function drawStrips(context, geometry, marginals, largest, theme, hasScale) {
  const { left, above, right } = geometry;
  context.save();
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = theme.muted;
  if (!marginals) {
    context.textAlign = "right";
    context.fillText("entropy: …", left - 4, above - 13);
    context.restore();
    return;
  }
  const received = barsOf(marginals.received, geometry.keys, geometry.x, geometry.k, largest.received);
  const entropy = barsOf(marginals.entropy, geometry.queries, geometry.y, geometry.v, largest.entropy);
  context.fillStyle = theme.bars;
  for (const { at, thick, share } of received) {
    const [from, to] = [Math.max(at, left), Math.min(at + thick, right)], high = share * (STRIP - 6);
    context.fillRect(from, above - 2 - high, Math.max(0, to - from), high);
  }
  for (const { at, thick, share } of entropy) {
    const [from, to] = [Math.max(at, above), Math.min(at + thick, geometry.bottom)], wide = share * (STRIP - 6);
    context.fillRect(left - 2 - wide, from, wide, Math.max(0, to - from));
  }
  context.fillStyle = theme.muted;
  if (hasScale) {
    context.textAlign = "left";
    context.fillText("received,", right + 5, above - STRIP + 8, BAR - 6);
    context.fillText(`up to ${format(largest.received)}`, right + 5, above - STRIP + 22, BAR - 6);
  }
  context.textAlign = "right";
  context.fillText(`entropy, up to ${format(largest.entropy)} nats`, left - 4, above - 13, left - 8);
  context.restore();
}

// The largest of the numbers in view, apart from NaN.
function largestOf(numbers, [first, last]) {
  let largest = 0;
  for (let n = first; n < last; n++) if (numbers[n] > largest) largest = numbers[n];
  return largest;
}

// The bars of numbers in view, as shares of the largest. Where several tokens share a pixel, the largest is drawn.
function barsOf(numbers, [first, last], shift, size, largest) {
  const pixels = new Map();
  for (let n = first; n < last; n++) {
    const at = Math.floor(shift + size * n + 0.01);
    if (!(pixels.get(at) >= numbers[n])) pixels.set(at, numbers[n]);
  }
  const thick = Math.max(1, Math.ceil(size) - (size > 5 ? 1 : 0));
  return Array.from(pixels, ([at, number]) => ({ at, thick, share: largest ? number / largest : 0 }));
}
