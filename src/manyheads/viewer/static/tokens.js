// Tokens as people read them: labels, the words that they are pieces of, and names that fit.

const letters = new Intl.Segmenter(undefined, { granularity: "grapheme" }); // what people see as one character
const words = new Intl.Segmenter(undefined, { granularity: "word" });

// Enclose a token in Unicode isolates: otherwise a right-to-left token would reorder the text around it.
const isolated = (name) => `\u2068${name}\u2069`;

// Shorten a name to a number of characters.
function short(name, length) {
  if (name.length <= length) return name;
  const all = Array.from(letters.segment(name), ({ segment }) => segment);
  return all.length > length ? `${all.slice(0, length - 1).join("")}…` : name;
}

// The last whole words of a text, in at most a number of characters, or its last word if that is longer.
function lastWords(text, most) {
  if (text.length <= most) return text.trimStart();
  const starts = Array.from(words.segment(text), ({ index }) => index), first = starts.find((index) => text.length - index <= most);
  return text.slice(first ?? starts.at(-1)).replace(/^[\s\p{P}\p{Sk}]+/u, "");
}

// Shorten a name to a number of pixels.
function fitting(context, name, width) {
  if (context.measureText(name).width <= width) return name;
  let length = 24;
  while (length > 1 && context.measureText(short(name, length)).width > width) length--;
  const shortened = short(name, length);
  return context.measureText(shortened).width <= width ? shortened : "…"; // a character may be wider
}

const GLYPH = 24, ALPHABET = 4000; // pixels of a glyph that is compared; the number of different characters that are
const NO_GLYPH = "\u{10fffd}"; // a character for private use, for which no font has a glyph

// Return the first character of a text that is drawn as the box for a missing glyph, as "U+0BA4", or null.
function findAbsentCharacter(text) {
  const characters = [...new Set(text.match(/[\u0250-\u{10ffff}]/gu) ?? [])].filter((character) => /[\p{L}\p{N}\p{S}]/u.test(character));
  if (!characters.length) return null;
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d", { willReadFrequently: true });
  canvas.width = canvas.height = GLYPH;
  context.font = `${GLYPH / 2}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  const paint = (character) => {
    context.clearRect(0, 0, GLYPH, GLYPH);
    context.fillText(character, 2, GLYPH / 2);
    return context.getImageData(0, 0, GLYPH, GLYPH).data.join();
  };
  const { width } = context.measureText(NO_GLYPH), box = paint(NO_GLYPH);
  const isAbsent = (character) => context.measureText(character).width === width && paint(character) === box;
  const absent = /[1-9]/.test(box) ? characters.slice(0, ALPHABET).find(isAbsent) : undefined;
  return absent === undefined ? null : `U+${absent.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

// The tokens of the keys and queries of a layer, from the API's response. Positions are those of keys; the query at a position
// has the index `position - first`.
class Tokens {
  constructor({ queries, keys, first, text, query_text: queryText }) {
    Object.assign(this, { queries, keys, first, pieces: text?.pieces ?? null });
    for (const name of ["special", "shared", "joined"]) this[name] = new Set(text?.[name]);
    // The text of the queries, whose index in it is `index + queryOffset`: another one in cross-attention.
    this.ofQueries = first === null && queries ? new Tokens({ queries: null, keys: queries, first: null, text: queryText }) : this;
    this.queryOffset = first ?? 0;
  }

  // The name of a query, as the children of an element.
  titledQuery(index, length) {
    return this.queries ? [this.ofQueries.nameElement(index + this.queryOffset, length), ` ${count(index + this.queryOffset)}`] : [`query ${count(index)}`];
  }

  // The first token of those that share a token's characters, and the one after the last.
  unit(n) {
    return this.run(n, (m) => this.shared.has(m));
  }

  // The first token of a token's word, and the one after the last.
  word(n) {
    return this.run(n, (m) => this.shared.has(m) || this.joined.has(m));
  }

  run(n, continues) {
    let start = n, stop = n + 1;
    while (start > 0 && continues(start)) start--;
    while (continues(stop)) stop++;
    return [start, stop];
  }

  // The last token before `end` that isn't blank or special, which attends to the text before it, or to all of it.
  lastOfText(end) {
    const isText = (n) => !this.special.has(n) && /\S/.test(this.pieces?.[n] ?? this.keys?.[n] ?? "unknown");
    for (let n = end - 1; n > 0; n--) if (isText(n)) return Math.min(end, this.unit(n)[1]) - 1; // the last token of a character
    return Math.max(0, end - 1);
  }

  // The last of `t` queries that isn't blank or special.
  lastQuery(t) {
    return this.ofQueries.lastOfText(this.queryOffset + t) - this.queryOffset;
  }

  // The text of some tokens.
  text(start, stop) {
    return this.pieces.slice(start, stop).join("");
  }

  // The word that a token is a piece of, null if it isn't a piece of one.
  whole(n) {
    const [start, stop] = this.word(n), [first, last] = this.unit(n);
    return this.pieces === null || stop - start === last - first ? null : this.text(start, stop).trim();
  }

  // A token in quotation marks, with its word if it is a piece of one.
  quoted(n) {
    const word = this.whole(n), name = `“${isolated(this.keys[n] ?? "")}”`; // quotation marks are those of the sentence around them
    return word === null ? name : `${name} of “${isolated(word)}”`;
  }

  // The name of a token and its position, as the children of an element.
  titled(n, length) {
    return this.keys ? [this.nameElement(n, length), ` ${count(n)}`] : [`token ${count(n)}`];
  }

  // The name of a token as an element, with the rest of its word if it is a piece of one. length: the longest part, in characters.
  nameElement(n, length) {
    const [start, stop] = this.unit(n), [from, to] = this.word(n), name = short(this.keys?.[n] ?? count(n), length);
    if (!this.pieces || to - from === stop - start) return make("bdi", {}, name);
    const rest = (text) => make("span", { class: "rest" }, short(text.trim(), length));
    return make("bdi", {}, rest(this.text(from, start)), name, rest(this.text(stop, to)));
  }
}
