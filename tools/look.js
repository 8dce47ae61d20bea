// What the programs of tools/reader.html and tools/page.html share. A page defines ACTIONS, what
// each key does, and `check`, which tests it: opened as PAGE#check it tells what that found.

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

// PAGE#check: what a test wants to know, into an element `report`

function holds(condition, words) { if (!condition) problems.push(words); }

function press(key) {
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
}

const fetched = () => performance.getEntriesByType("resource").map(entry => entry.name);

function reported() {
  let report;
  try { report = check(); } catch (error) { report = {problems: [...problems, error.stack]}; }
  const pre = document.createElement("pre");
  pre.id = "report";
  pre.hidden = true;
  pre.textContent = JSON.stringify(report);
  document.body.append(pre);
  if (parent !== window) parent.postMessage(pre.textContent, "*");
}

// Afterwards: what was blocked while loading is told as an event of its own
if (location.hash === "#check") addEventListener("load", () => setTimeout(reported, 100));
