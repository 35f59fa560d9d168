// Colours that scripts draw with. Those of elements are in base.css.

const THEMES = {
  light: {
    background: "#ffffff", loading: "#f1f3f6", text: "#1c2128", muted: "#59636e", line: "#d5dae1", outline: "#00000088",
    accent: "#b3261e", bars: "#4457b8", hatch: ["#eef0f3", "#d9dde3"],
  },
  dark: {
    background: "#14171b", loading: "#1c2025", text: "#e6e9ed", muted: "#9aa4af", line: "#363d46", outline: "#ffffff88",
    accent: "#ff9e80", bars: "#93a5f5", hatch: ["#23282e", "#323942"],
  },
};

// Return the pattern that fills masked cells.
function makeHatch(context, [background, line]) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pattern = tile.getContext("2d");
  pattern.fillStyle = background;
  pattern.fillRect(0, 0, 8, 8);
  pattern.strokeStyle = line;
  pattern.lineWidth = 1.5;
  pattern.beginPath();
  for (const shift of [-8, 0, 8]) {
    pattern.moveTo(shift, 8);
    pattern.lineTo(shift + 8, 0);
  }
  pattern.stroke();
  return context.createPattern(tile, "repeat");
}
