// Show the viewer below a notebook cell, in a shadow root: the notebook's style sheets don't apply to it, and its element ids
// can't conflict with others. Returns a function that removes it.
function showBelow(model, el, style, height) {
  const host = make("div"), root = make("div"), sheet = new CSSStyleSheet(), client = new WidgetClient(model);
  const tree = host.attachShadow({ mode: "open" });
  sheet.replaceSync(style);
  tree.adoptedStyleSheets = [sheet];
  tree.append(root);
  Object.assign(host.style, {
    height: `${height}px`, boxSizing: "border-box", border: "1px solid #8888", overflow: "hidden", resize: "vertical",
  });
  el.append(host);
  const app = show(root, client, false), adapt = () => app.adaptTo(getComputedStyle(host).color);
  const changes = new MutationObserver(adapt), visible = new IntersectionObserver(adapt); // see SEND_THEME in widget.py
  for (const element of [document.documentElement, document.body]) changes.observe(element, { attributes: true });
  visible.observe(host);
  // JupyterLab handles keys before the viewer gets them, so that `x` would cut the cell. This attribute prevents it.
  const suppress = ({ ctrlKey, metaKey, altKey }) => host.toggleAttribute("data-lm-suppress-shortcuts", !(ctrlKey || metaKey || altKey));
  window.addEventListener("keydown", suppress, true);
  return () => {
    changes.disconnect(), visible.disconnect(), window.removeEventListener("keydown", suppress, true), app.remove(), client.close(), host.remove();
  };
}
