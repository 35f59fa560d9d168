// Below a cell: in a tree of its own (a shadow root), where the notebook's style sheets don't reach and ids are ours alone.
function below(model, el, style, high) {
  const host = make("div"), root = make("div"), sheet = new CSSStyleSheet(), channel = new Channel(model);
  const tree = host.attachShadow({ mode: "open" });
  sheet.replaceSync(style);
  tree.adoptedStyleSheets = [sheet];
  tree.append(root);
  Object.assign(host.style, {
    height: `${high}px`, boxSizing: "border-box", border: "1px solid #8888", overflow: "hidden", resize: "vertical",
  });
  el.append(host);
  const app = show(root, channel, false), follow = () => app.follow(getComputedStyle(host).color);
  const marks = new MutationObserver(follow), sight = new IntersectionObserver(follow); // see widget.py, of frames
  for (const one of [document.documentElement, document.body]) marks.observe(one, { attributes: true });
  sight.observe(host);
  // JupyterLab may hear keys before anybody else does: those without ctrl or the like are the viewer's, as `x` would cut the cell.
  const mine = ({ ctrlKey, metaKey, altKey }) => host.toggleAttribute("data-lm-suppress-shortcuts", !(ctrlKey || metaKey || altKey));
  window.addEventListener("keydown", mine, true);
  return () => {
    marks.disconnect(), sight.disconnect(), window.removeEventListener("keydown", mine, true), app.remove(), channel.close(), host.remove();
  };
}
