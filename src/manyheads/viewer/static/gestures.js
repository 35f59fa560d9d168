// Mouse, touch and wheel on a matrix: move, zoom, point and choose.

const CLICK = 5; // pixels that a pointer may move in a click
const DOUBLE = 350; // milliseconds between two taps of a double tap
const NOTCH = 0.002; // the binary logarithm of the zoom for a pixel of the wheel

class Gestures {
  // handlers: move(dx, dy), zoom(at, factor), point(at or null), choose(at), zoomIn(at), end().
  constructor(element, handlers) {
    Object.assign(this, { element, handlers, pointers: new Map(), moved: 0, lastTap: 0 });
    const on = (name, handle) => element.addEventListener(name, handle, { passive: false });
    on("pointerdown", (event) => this.press(event));
    on("pointermove", (event) => this.drag(event));
    on("pointerup", (event) => this.release(event));
    on("pointercancel", (event) => this.pointers.delete(event.pointerId));
    on("pointerleave", (event) => event.pointerType === "mouse" && !this.pointers.size && handlers.point(null));
    on("wheel", (event) => this.turn(event));
  }

  at({ clientX, clientY }) {
    const box = this.element.getBoundingClientRect();
    return [clientX - box.left, clientY - box.top];
  }

  press(event) {
    if (event.button !== 0) return;
    if (!this.pointers.size) this.moved = 0;
    else this.moved = Infinity; // a second finger: not a tap
    this.pointers.set(event.pointerId, this.at(event));
    this.element.setPointerCapture(event.pointerId);
  }

  drag(event) {
    const at = this.at(event), before = this.pointers.get(event.pointerId);
    if (!before) {
      if (event.pointerType === "mouse") this.handlers.point(at);
      return;
    }
    const [dx, dy] = [at[0] - before[0], at[1] - before[1]];
    this.moved += Math.hypot(dx, dy);
    if (this.pointers.size > 1) this.pinch(event.pointerId, before, at);
    else if (this.moved > CLICK) this.handlers.move(dx, dy);
    else return; // keep the start of what may become a drag
    this.pointers.set(event.pointerId, at);
  }

  // One of two fingers moved: zoom by the change of their distance, and move by that of their middle.
  pinch(id, before, after) {
    const other = [...this.pointers].find(([pointer]) => pointer !== id)[1];
    const middle = (at) => [(at[0] + other[0]) / 2, (at[1] + other[1]) / 2];
    const distance = (at) => Math.max(1, Math.hypot(at[0] - other[0], at[1] - other[1]));
    this.handlers.move(middle(after)[0] - middle(before)[0], middle(after)[1] - middle(before)[1]);
    this.handlers.zoom(middle(after), distance(after) / distance(before));
  }

  release(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    if (this.moved > CLICK) {
      if (!this.pointers.size) this.handlers.end();
      return;
    }
    const isDouble = event.timeStamp - this.lastTap < DOUBLE;
    this.lastTap = isDouble ? 0 : event.timeStamp;
    if (isDouble) this.handlers.zoomIn(this.at(event));
    else this.handlers.choose(this.at(event));
  }

  turn(event) {
    event.preventDefault();
    const pixels = event.deltaY * (event.deltaMode === 1 ? 16 : event.deltaMode ? 400 : 1); // lines or pages elsewhere
    this.handlers.zoom(this.at(event), 2 ** (-pixels * NOTCH * (event.ctrlKey ? 10 : 1))); // a touchpad's pinch has ctrlKey
    this.handlers.end();
  }
}
