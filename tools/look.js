// What the programs of tools/page.html and explorer.html share. A page defines
// ACTIONS: what each key does.

const $ = id => document.getElementById(id);
const phone = matchMedia("(max-width: 760px)");  // one column instead of two

function counted(n, one, many = one + "s") { return `${n} ${n === 1 ? one : many}`; }

/** An element: nothing is ever read as HTML. */
function made(tag, given = {}, ...inside) {
  const svg = ["svg", "path", "line", "circle", "text", "rect"].includes(tag);
  const one = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [key, value] of Object.entries(given)) {
    if (value !== undefined) one.setAttribute(key, value);
  }
  one.append(...inside.filter(part => part !== ""));
  return one;
}

function setTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches && "dark");
  root.dataset.theme = dark === "dark" ? "light" : "dark";
}

addEventListener("keydown", event => {
  if (event.key === "Escape") document.activeElement.blur();
  if ($("help")?.open || event.ctrlKey || event.metaKey || event.altKey || !(event.key in ACTIONS)) return;
  event.preventDefault();
  ACTIONS[event.key]();
});
