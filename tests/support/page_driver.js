// Put at the end of a report's page in a browser: walks through all that it draws, as a reader would, and writes what it found
// into the page as JSON. What is wrong with the layout is told: texts outside of their boxes, boxes over boxes.
"use strict";
const opened = performance.now(); // since the page began to load: its script has run
const found = { opened, wrong: [], levels: [], details: [], tips: [], width: innerWidth };
const whole = document.querySelector("#drawing svg");
found.scale = whole.width.baseVal.value / whole.viewBox.baseVal.width;
const all = (id, selector) => [...document.querySelectorAll(`#${id} ${selector}`)];
const texts = (id) => document.getElementById(id).textContent;
const send = (element, name, at = {}) => element.dispatchEvent(new MouseEvent(name, { clientX: 200, clientY: 200, ...at }));
const over = (a, b) => a.left < b.right - 0.5 && b.left < a.right - 0.5 && a.top < b.bottom - 0.5 && b.top < a.bottom - 0.5;
const inside = (a, b) => a.left > b.left - 1 && a.right < b.right + 1 && a.top > b.top - 1 && a.bottom < b.bottom + 1;

function look() {
  const path = texts("path"), boxes = all("drawing", ".box, .ghost").map((b) => b.getBoundingClientRect());
  boxes.forEach((a, k) => boxes.slice(k + 1).forEach((b) => { if (over(a, b)) found.wrong.push(`${path}: boxes overlap`); }));
  const frames = all("drawing", ".frame").map((f) => f.getBoundingClientRect());
  for (const text of all("drawing", "text")) {
    const at = text.getBoundingClientRect();
    if (![...boxes, ...frames].some((b) => inside(at, b))) found.wrong.push(`${path}: '${text.textContent}' is in no box`);
  }
  if (document.documentElement.scrollWidth > innerWidth) found.wrong.push(`${path}: the page is wider than its window`);
  for (const b of all("drawing", ".box")) {
    send(b, "mouseenter");
    found.details.push(texts("about"));
  }
  found.levels.push({ path, boxes: boxes.length, edges: all("drawing", ".edge").length, pills: all("drawing", ".pill").length, back: all("drawing", ".pill.back").length });
}

function noOverlap(id, name) { // of texts of a chart
  const at = all(id, "text").filter((t) => t.textContent).map((t) => [t.textContent, t.getBoundingClientRect()]);
  at.forEach(([a, x], k) => at.slice(k + 1).forEach(([b, y]) => { if (over(x, y)) found.wrong.push(`${name}: '${a}' over '${b}'`); }));
}

look();
const frames = all("drawing", ".frame").length;
for (let r = 0; r < frames; r++) {
  send(all("drawing", ".frame")[r], "click");
  look();
  const boxes = all("drawing", ".box").length;
  for (let b = 0; b < boxes; b++) {
    const before = texts("path");
    send(all("drawing", ".box")[b], "click");
    if (texts("path") === before) continue; // an op: nothing inside
    look();
    all("path", ".zoom button")[0].click(); // with views
    look();
    all("path", ".zoom button")[0].click();
    all("path", "button")[1].click();
  }
  all("path", "button")[0].click();
}
const wide = () => Number(document.querySelector("#drawing svg").getAttribute("width")), first = wide(), zooms = all("path", ".zoom button");
zooms[2].click(); // +
found.zoomed = [first, wide()];
all("path", ".zoom button")[3].click(); // fit
found.zoomed.push(wide());
const parts = all("step", ".whole").length;
found.steps = [];
for (let k = 0; k < parts; k++) {
  send(all("step", ".whole")[k], "click");
  noOverlap("step", `step ${k}`);
  found.steps.push(all("step", "rect").length);
  for (const rect of all("step", "rect")) {
    send(rect, "mousemove");
    found.tips.push(texts("tip"));
    send(rect, "mouseleave");
  }
}
noOverlap("memory", "memory");
const memory = all("memory", "rect").pop(), box = memory.getBoundingClientRect();
found.held = [0.01, 0.4, 0.99].map((part) => { send(memory, "mousemove", { clientX: box.left + part * box.width }); return texts("tip"); });
send(memory, "mouseleave");

// as one with a keyboard does
const key = (name, at = document.activeElement || document.body) => at.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
const type = (text) => { const field = document.getElementById("search"); field.value = text; field.dispatchEvent(new Event("input")); return all("results", "li").map((item) => item.textContent); };
const on = () => all("drawing", ".box.on").map((b) => b.getAttribute("aria-label"));
const walked = [];
const boxes = all("drawing", ".box").length;
for (let k = 0; k < boxes; k++) { key("j"); walked.push(shownBoxes.indexOf(selected)); }
found.keys = { boxes, walked: new Set(walked).size };
key("k"), key("k"), found.keys.back = shownBoxes.indexOf(selected) === walked[boxes - 3] && on().length === 1;
key("ArrowDown"), found.keys.down = on().length;
key("Escape"), found.keys.none = on().length;
key("/"), found.keys.field = document.activeElement.id;
found.results = type("att").length;
key("Enter"), found.keys.searched = texts("path");
key("Escape"), key("Escape"), found.keys.up = texts("path");
key("/");
found.nothing = type("no such thing");
found.layer = type(".2.mlp");
key("Escape");
key("]"), key("["), key("r"), key("r"), key("+"), key("0");
key("?"), found.keys.help = document.getElementById("help").open, document.getElementById("help").close();
const dark = getComputedStyle(document.body).backgroundColor;
key("d"), found.dark = [dark, getComputedStyle(document.body).backgroundColor, localStorage.getItem("megafx theme")];
key("d"), localStorage.clear();

// every link leads to what it is a link to
found.links = nodes.map((n, i) => i).filter((i) => i % 5 === 0).map((i) => {
  reveal(i);
  const link = linkOf(), before = [texts("path"), texts("about"), on().join()];
  go({ region: -1, module: null });
  history.replaceState(null, "", link);
  follow();
  const after = [texts("path"), texts("about"), on().join()];
  if (before.join() !== after.join() || !on().length) found.wrong.push(`${link}: ${before[0]} ${before[2]}, then ${after[0]} ${after[2]}`);
  history.replaceState(null, "", "#node=" + nodes[i].name);
  follow();
  if (on().join() !== before[2]) found.wrong.push(`${nodes[i].name} alone leads elsewhere`);
  return link;
});
for (const link of ["#in=nowhere", "#node=nothing", "#part=99&in=%", "#module=x"]) { history.replaceState(null, "", link); follow(); }
const unnamed = [...document.querySelectorAll("button, [role=button], input, [role=img]")].filter((e) => !(e.getAttribute("aria-label") || e.textContent).trim());
if (unnamed.length) found.wrong.push(`${unnamed.length} controls without a name`);
found.measured = texts("measured");
if (document.getElementById("tip").style.display !== "none") found.wrong.push("the tip stays");
for (const id of ["memory", "facts", "headline", "texts"]) found[id] = texts(id);
found.bands = all("memory", ".band").length;
found.errors = window.errors;
const result = document.createElement("pre");
result.id = "found";
result.textContent = JSON.stringify(found);
document.body.appendChild(result);
