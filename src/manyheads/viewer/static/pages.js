// The pages of the viewer. To add one, write a class and add a row here:
//   constructor(body, app, tools): put the page into `body`, and its own controls into `tools`, a part of the toolbar;
//   open(): show the state (`app.state`), which has changed; it is also called once after the constructor;
//   remove(): stop requests and remove elements;
//   pressKey(event): optional; handle a key of the page and return true, or return false.
// controls: the shared controls that the page needs (see `App.buildToolbar`). keys: its shortcuts, for the list of keys.

const PAGES = {
  overview: {
    title: "Overview", key: "o", controls: ["sequence", "pooling", "scale"],
    open: (...parts) => new Overview(...parts),
    keys: [["arrows", "next head or layer"], ["home  end", "first, last head of the layer"], ["enter", "open the head"]],
  },
  head: {
    title: "Head", key: "h", controls: ["place", "head", "second", "sequence", "pooling", "scale"],
    open: (...parts) => new HeadPage(...parts),
    keys: [
      ["arrows", "move"], ["shift + arrows", "move the crosshair by one weight"], ["+  −", "zoom"], ["0", "fit the matrix"],
      ["1", "single weights"], ["n", "next largest weight in this head"], ["c", "compare with another head"], ["s", "show or hide the side panel beside compared heads"], ["p", "save as PNG"], ["esc", "unpin the crosshair"],
    ],
  },
  text: {
    title: "Text", key: "x", controls: ["place", "sequence"],
    open: (...parts) => new TextPage(...parts),
    keys: [["←  →", "previous, next token"], ["shift + click", "choose the key of the selected token"], ["esc", "unpin the token"]],
  },
  lines: {
    title: "Lines", key: "b", controls: ["place", "sequence"],
    open: (...parts) => new LinesPage(...parts),
    keys: [["arrows", "move among the tokens"], ["enter", "select the token"], ["shift + enter", "choose the other token of a pair"], ["esc", "unpin the token"]],
  },
};
