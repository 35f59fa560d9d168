// The whole matrix in the corner of its rulers, with a frame around the part in view that can be dragged.

class Minimap {
  // handlers: show(x, y): move the centre of the view to a key and a query.
  constructor(show) {
    Object.assign(this, { show });
    this.canvas = make("canvas", { class: "minimap", hidden: true, title: "the whole matrix; drag to move the view", "aria-hidden": "true" });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      this.drag(event);
    });
    this.canvas.addEventListener("pointermove", (event) => event.buttons && this.drag(event));
  }

  drag(event) {
    const box = this.canvas.getBoundingClientRect(), { t, s } = this.geometry;
    this.show(((event.clientX - box.left) / box.width) * s, ((event.clientY - box.top) / box.height) * t);
  }

  // Draw the matrix from an image of its coarsest tile. paint(context, width, height): draw the matrix.
  draw(geometry, theme, paint) {
    this.geometry = geometry;
    this.canvas.hidden = geometry.isWhole;
    if (geometry.isWhole) return;
    const { t, s } = geometry, most = [geometry.left - 16, geometry.above - 42];
    const scale = Math.min(most[0] / s, most[1] / t), ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.max(8, Math.round(s * scale)), Math.max(8, Math.round(t * scale))];
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.fillStyle = theme.loading;
    context.fillRect(0, 0, width, height);
    paint(context, width, height);
    const [[i0, i1], [j0, j1]] = [geometry.queries, geometry.keys];
    const frame = [(j0 / s) * width, (i0 / t) * height, Math.max(5, ((j1 - j0) / s) * width), Math.max(5, ((i1 - i0) / t) * height)];
    frame[0] = Math.min(frame[0], width - frame[2]);
    frame[1] = Math.min(frame[1], height - frame[3]);
    for (const [style, thick] of [["#000", 3], ["#fff", 1.5]]) {
      context.strokeStyle = style;
      context.lineWidth = thick;
      context.strokeRect(frame[0] + 0.5, frame[1] + 0.5, frame[2] - 1, frame[3] - 1);
    }
  }
}
