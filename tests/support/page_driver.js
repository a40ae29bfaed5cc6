// Put at the end of a report's page in a browser: walks through all that it draws, as a reader would, and writes what it found
// into the page as JSON. What is wrong with the layout is told: texts outside of their boxes, boxes over boxes.
"use strict";
const opened = performance.now(); // since the page began to load: its script has run
const found = { opened, wrong: [], levels: [], details: [], tips: [] };
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
if (document.getElementById("tip").style.display !== "none") found.wrong.push("the tip stays");
for (const id of ["memory", "facts", "headline", "texts"]) found[id] = texts(id);
found.polygons = all("memory", "polygon").length;
found.errors = window.errors;
const result = document.createElement("pre");
result.id = "found";
result.textContent = JSON.stringify(found);
document.body.appendChild(result);
