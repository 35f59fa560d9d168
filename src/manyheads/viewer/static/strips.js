// The strips at the edges of a matrix: the weight that each key receives, at the top, and each query's entropy, at the left.

function drawStrips(context, geometry, marginals, theme) {
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
  const received = barsOf(marginals.received, geometry.keys, geometry.x, geometry.k);
  const entropy = barsOf(marginals.entropy, geometry.queries, geometry.y, geometry.v);
  context.fillStyle = theme.bars;
  for (const { at, thick, share } of received.bars) {
    const [from, to] = [Math.max(at, left), Math.min(at + thick, right)], high = share * (STRIP - 6);
    context.fillRect(from, above - 2 - high, Math.max(0, to - from), high);
  }
  for (const { at, thick, share } of entropy.bars) {
    const [from, to] = [Math.max(at, above), Math.min(at + thick, geometry.bottom)], wide = share * (STRIP - 6);
    context.fillRect(left - 2 - wide, from, wide, Math.max(0, to - from));
  }
  context.fillStyle = theme.muted;
  context.textAlign = "left";
  context.fillText("received,", right + 5, above - STRIP + 8, BAR - 6);
  context.fillText(`up to ${format(received.largest)}`, right + 5, above - STRIP + 22, BAR - 6);
  context.textAlign = "right";
  context.fillText(`entropy, up to ${format(entropy.largest)} nats`, left - 4, above - 13, left - 8);
  context.restore();
}

// The bars of numbers in view, as shares of the largest. Where several tokens share a pixel, the largest is drawn.
function barsOf(numbers, [first, last], shift, size) {
  const pixels = new Map();
  let largest = 0;
  for (let n = first; n < last; n++) {
    const at = Math.floor(shift + size * n + 0.01);
    if (!(pixels.get(at) >= numbers[n])) pixels.set(at, numbers[n]);
    largest = Math.max(largest, numbers[n]);
  }
  const thick = Math.max(1, Math.ceil(size) - (size > 5 ? 1 : 0));
  return { largest, bars: Array.from(pixels, ([at, number]) => ({ at, thick, share: largest ? number / largest : 0 })) };
}
