// The colour bar of weights: the colours of a scale with the weights at some of them.

// Weights to label on a square-root scale, by the first digit of its end (see `roundUp`), in units of the end's power of ten.
const SQRT_TICKS = { 1: [0.01, 0.1, 0.25, 0.5, 1], 2: [0.02, 0.2, 0.5, 1, 2], 5: [0.05, 0.5, 1, 2, 5] };

// Return the ticks of a scale that ends at `top`, as {place, label}, with places from 0 to 1. isSaturated: larger weights exist.
function colorTicks(top, scale, isSaturated = false) {
  const tick = (weight, label = format(weight, 2)) => ({ place: ColorScale.place(weight, top, scale), label });
  const end = tick(top, `${isSaturated ? "≥ " : ""}${format(top, 2)}`);
  if (scale === "log") {
    const decades = Array.from({ length: DECADES - 1 }, (_, n) => tick(top / 10 ** (n + 1), format(top / 10 ** (n + 1), 1)));
    const least = top / 10 ** DECADES;
    return [{ place: 0, label: `≤ ${format(least, 1)}` }, ...decades.reverse(), end];
  }
  if (scale === "linear") return [...[0, 0.25, 0.5, 0.75].map((share) => tick(share * top, format(share * top, 3))), end];
  const ten = 10 ** Math.floor(Math.log10(top) + 1e-9), digit = Math.round(top / ten);
  const inner = SQRT_TICKS[digit] ?? [0.01, 0.1, 0.25, 0.5, 1].map((share) => share * digit);
  return [tick(0), ...inner.slice(0, -1).map((weight) => tick(weight * ten)), end];
}

// Draw a colour bar, upright with labels to its right, or `lying` with labels below it.
// colors: a ColorScale. ticks: see `colorTicks`, which is the default. length, thickness: of the bar, in pixels. text: the colour of labels.
function drawColorBar(context, { colors, top, scale, isSaturated, ticks = colorTicks(top, scale, isSaturated), x, y, length, thickness, text, lying = false }) {
  context.save();
  for (let n = 0; n < length; n++) {
    context.fillStyle = colors.css((n + 0.5) / length);
    if (lying) context.fillRect(x + n, y, 1, thickness);
    else context.fillRect(x, y + length - 1 - n, thickness, 1);
  }
  context.fillStyle = text;
  context.font = "11px system-ui, sans-serif";
  if (lying) drawLyingTicks(context, ticks, x, y + thickness, length);
  else drawUprightTicks(context, ticks, x + thickness, y, length);
  context.restore();
}

function drawUprightTicks(context, ticks, x, y, length) {
  context.textAlign = "left";
  context.textBaseline = "middle";
  let free = Infinity; // labels are drawn from the bottom; one that would overlap the one below is left out
  for (const { place, label } of ticks) {
    const at = y + length * (1 - place), middle = Math.min(y + length - 5, Math.max(y + 5, at));
    context.fillRect(x, Math.min(y + length - 1, Math.round(at)), 3, 1);
    if (middle > free - 12) continue;
    context.fillText(label, x + 6, middle);
    free = middle;
  }
}

function drawLyingTicks(context, ticks, x, y, length) {
  context.textBaseline = "top";
  const end = ticks.at(-1), endWidth = context.measureText(end.label).width;
  let free = x; // the first pixel after the labels so far
  for (const tick of ticks) {
    const at = x + length * tick.place, width = context.measureText(tick.label).width;
    context.fillRect(Math.min(x + length - 1, Math.round(at)), y, 1, 3);
    const left = Math.min(x + length - width, Math.max(x, at - width / 2));
    if (tick !== end && (left < free || left + width + 6 > x + length - endWidth)) continue;
    context.textAlign = "left";
    context.fillText(tick.label, left, y + 5);
    free = left + width + 6;
  }
}
