// The search for words in the text that the keys of a layer are tokens of.

// The text of some tokens, and where each of them starts.
class SearchedText {
  constructor({ keys, pieces, special }) {
    const parts = pieces ? pieces.map((piece, n) => (special.has(n) ? "" : piece)) : (keys ?? []).map((label) => `${label} `);
    this.text = parts.join("");
    this.starts = new Uint32Array(parts.length + 1);
    for (const [n, part] of parts.entries()) this.starts[n + 1] = this.starts[n] + part.length;
  }

  // The token that a character belongs to: the last one that starts at it or before, and isn't empty.
  tokenAt(character) {
    let low = 0, high = this.starts.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] <= character) low = middle;
      else high = middle;
    }
    return low;
  }

  // Return the first and last token of every place of a text, whatever the case of its letters and the length of its blanks.
  find(wanted) {
    const words = wanted.trim().split(/\s+/u).map((word) => word.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&"));
    if (!words[0]) return [];
    const matches = this.text.matchAll(new RegExp(words.join("\\s+"), "giu"));
    return Array.from(matches, ({ index, 0: { length } }) => [this.tokenAt(index), this.tokenAt(index + length - 1)]);
  }
}

class Search {
  constructor(app) {
    this.app = app, this.places = [], this.marked = new Set();
    this.input = make("input", {
      id: "search", type: "search", placeholder: "find a word", title: "find a word in the text (/)", "aria-label": "find a word in the text",
      oninput: () => this.typed(), onkeydown: (event) => this.pressKey(event),
    });
    this.count = make("output", { class: "count muted", for: "search" });
    this.buttons = [["previous match", "‹", -1], ["next match", "›", 1]].map(([label, text, by]) => make("button", { type: "button", "aria-label": label, title: label, hidden: true, onclick: () => this.go(by) }, text));
    this.element = make("search", { class: "search", role: "search" }, this.input, this.count, ...this.buttons);
  }

  typed() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.find(), 120);
  }

  pressKey(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      if (this.app.state.page === "overview") this.openText();
      else this.go(event.shiftKey ? -1 : 1);
    }
    if (event.key !== "Escape") return;
    event.stopPropagation();
    this.input.blur();
    this.close();
  }

  // Remove the text that was searched for; return false if there is none.
  close() {
    if (!this.input.value) return false;
    this.input.value = "";
    this.find();
    return true;
  }

  // Find the places of the text, and select the first one at the selected token or after.
  async find() {
    await this.refresh();
    const { token } = this.app.state, from = this.places.findIndex(([start]) => start >= (token ?? 0));
    if (this.places.length) this.select(from < 0 ? 0 : from);
    else this.app.show();
  }

  // Show the selected place on the page Text, because the overview has no tokens.
  async openText() {
    await this.find();
    if (this.places.length) this.app.change({ page: "text" });
  }

  // The layer and the sequence that are shown.
  place() {
    const { state } = this.app;
    return { run: state.run, layer: state.layer, batch: this.app.batchOf(state) };
  }

  // Find the places in the text of the layer that is shown.
  async refresh() {
    clearTimeout(this.waiting);
    const { app } = this, place = this.place(), key = JSON.stringify(place);
    if (key !== this.key) {
      const tokens = await app.tokens(place);
      if (key !== JSON.stringify(this.place())) return this.refresh(); // another layer was opened meanwhile
      Object.assign(this, { key, tokens, text: new SearchedText(tokens) });
    }
    this.places = this.text.find(this.input.value);
    this.marked = new Set(this.places.flatMap(([start, stop]) => Array.from({ length: stop - start + 1 }, (_, n) => start + n)));
    this.writeCount();
  }

  // The number of the selected place, or -1.
  current() {
    return this.places.findIndex(([start]) => start === this.app.state.token);
  }

  writeCount() {
    const { length } = this.places, current = this.current(), isEmpty = !this.input.value.trim();
    this.count.textContent = isEmpty ? "" : !length ? "not found" : current < 0 ? count(length) : `${count(current + 1)} of ${count(length)}`;
    for (const button of this.buttons) button.hidden = !length;
  }

  // Select the next or the previous place.
  async go(by) {
    await this.refresh();
    const { places } = this, { token } = this.app.state, current = this.current();
    if (!places.length) return;
    if (current >= 0 || token === null) return this.select((current + (current < 0 && by < 0 ? 0 : by) + places.length) % places.length);
    const after = places.findIndex(([start]) => start > token), next = after < 0 ? 0 : after;
    this.select(by > 0 ? next : (next - 1 + places.length) % places.length);
  }

  select(n) {
    this.app.change(selecting(this.places[n][0], this.tokens.first === null ? "key" : "query"));
    this.writeCount();
  }
}
