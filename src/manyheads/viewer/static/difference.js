// The difference of two heads: its numbers and its colours, blue below 0, red above, on a scale that is symmetric about 0.

// Subtract a weight from another: a masked one, NaN, counts as 0, and two masked ones have no difference. undefined: not loaded.
function subtract(weight, other) {
  if (weight === undefined || other === undefined) return undefined;
  if (Number.isNaN(weight) && Number.isNaN(other)) return NaN;
  return (weight || 0) - (other || 0);
}

class DifferenceColors extends ColorScale {
  // From 0 to 1, and 0.5 for equal weights. There is no logarithmic scale of signed numbers; the square root is used instead.
  place(difference, top, scale) {
    const share = Math.min(1, Math.abs(difference) / top);
    return 0.5 + 0.5 * Math.sign(difference) * (scale === "linear" ? share : Math.sqrt(share));
  }

  // The differences to label on a colour bar, as {place, label}.
  ticks(top, scale) {
    return [-1, -0.25, 0, 0.25, 1].map((share) => {
      const sign = share > 0 ? "+" : share < 0 ? "−" : "";
      return { place: this.place(share * top, top, scale), label: `${sign}${format(Math.abs(share * top), 3)}` };
    });
  }
}
