// What the programs of tools/reader.html and tools/page.html share. A page defines ACTIONS: what
// each key does.

const $ = id => document.getElementById(id);
const escaped = text => text.replace(/[&<>"]/g, c => `&#${c.charCodeAt()};`);
const phone = matchMedia("(max-width: 760px)");  // one column instead of two

function counted(n, one, many = one + "s") { return `${n} ${n === 1 ? one : many}`; }

function setTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches && "dark");
  root.dataset.theme = dark === "dark" ? "light" : "dark";
}

addEventListener("keydown", event => {
  if (event.key === "Escape") document.activeElement.blur();
  const typing = event.target.matches?.("select") || $("help").open;
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in ACTIONS)) return;
  event.preventDefault();
  ACTIONS[event.key]();
});
