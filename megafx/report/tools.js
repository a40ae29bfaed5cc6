// -- search

const collectivesOf = (n) => [n.move, n.inner].flatMap((m) => m ? sent(m).map((s) => `${s[0]} ${s[1]}`) : []);
const numberless = (text) => text.replace(/\[[\d, -]+\]/g, "*").replace(/(^|\.)\d+(?=\.|$)/g, "$1*"); // layers.3 is one of layers.[0-31]
let index = null, results = [], chosen = -1;

function indexed() { // what can be found: parts of the model, modules, ops and collectives
  const found = [], seen = new Set();
  regions.forEach((r, region) => {
    found.push({ text: r.name, more: r.times > 1 ? `${r.times} layers that are alike` : "part of the model", run: () => go({ region, module: null }) });
    for (const box of grouped(region, null)) if (box.module && !seen.has(region + box.module)) {
      seen.add(region + box.module);
      found.push({ text: fullName(region, box.module), more: plural(box.nodes.length, "op"), run: () => go({ region, module: box.module }) });
    }
    for (const i of r.nodes) if (!isView(nodes[i])) {
      const n = nodes[i], more = [n.style, n.placements, n.weight, ...collectivesOf(n)].filter(Boolean).join("; ");
      found.push({ text: `${fullName(region, n.module)}: ${n.label}`, more, also: n.name, run: () => reveal(i) });
    }
  });
  return found.map((f) => ({ ...f, hay: [f.text, f.more, f.also || ""].join(" ").toLowerCase() }));
}

function find(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean), all = (hay, wanted) => wanted.every((w) => hay.includes(w));
  index ||= indexed();
  let found = words.length ? index.filter((f) => all(f.hay, words)) : [];
  if (!found.length && words.length) found = index.filter((f) => all(numberless(f.hay), words.map(numberless)));
  const rank = (f) => f.text.toLowerCase().includes(words[0]) ? 0 : 1;
  return found.sort((a, b) => rank(a) - rank(b)).slice(0, 30);
}

function showResults() {
  const list = $("results"), box = $("search");
  list.textContent = "";
  results.forEach((f, k) => {
    const item = make("li", { role: "option", id: "found" + k, "aria-selected": k === chosen }, list, f.text);
    make("small", {}, item, cut(f.more, 110));
    item.addEventListener("mousedown", (event) => { event.preventDefault(); take(k); });
    if (k === chosen) item.scrollIntoView({ block: "nearest" });
  });
  if (box.value.trim() && !results.length) make("li", { role: "option", "aria-disabled": "true" }, list, "nothing is called that");
  list.hidden = !box.value.trim();
  box.setAttribute("aria-expanded", String(!list.hidden));
  if (chosen >= 0) box.setAttribute("aria-activedescendant", "found" + chosen); else box.removeAttribute("aria-activedescendant");
}

function search(query) { results = find(query); chosen = results.length ? 0 : -1; showResults(); }

function take(k) {
  const box = $("search");
  box.value = "";
  box.blur();
  $("results").hidden = true;
  if (results[k]) { results[k].run(); $("graph").scrollIntoView({ block: "nearest" }); }
}

function searchKeys(event) {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (by && results.length) chosen = (chosen + by + results.length) % results.length, showResults(), event.preventDefault();
  else if (event.key === "Enter") take(chosen);
  else if (event.key === "Escape") take(-1);
}

// -- keys

const KEYS = [
  ["/", "search modules and ops"], ["j  k", "next box, box before"], ["arrows", "the box in that direction"], ["Enter", "look into the box"],
  ["Esc", "one level up; closes search"], ["[  ]", "part of the step before, next part"], ["r", "show or hide reshapes"],
  ["+  -  0", "larger, smaller, as large as the panel"], ["c", "copy a link to what is shown"], ["d", "dark or light"], ["?", "this list"],
];

function step(by) { // to the next box of the level, or the one before
  const at = shownBoxes.indexOf(selected), k = at < 0 ? (by > 0 ? 0 : shownBoxes.length - 1) : at + by;
  if (shownBoxes[k]) focusOn(shownBoxes[k]);
}

function focusOn(b) { select(b); b.element.focus({ preventScroll: true }); b.element.scrollIntoView({ block: "nearest", inline: "nearest" }); }

function toward(dx, dy) { // the nearest box in a direction; sideways counts double
  if (!selected) return step(1);
  const y = (b) => b.y + b.h / 2, far = (b) => { const along = dx * (b.x - selected.x) + dy * (y(b) - y(selected)), across = Math.abs(dy * (b.x - selected.x)) + Math.abs(dx * (y(b) - y(selected))); return along > 4 ? along + 2 * across : Infinity; };
  const best = shownBoxes.reduce((found, b) => far(b) < far(found) ? b : found, selected);
  if (far(best) < Infinity) focusOn(best);
}

function up() {
  if (selected) select(null);
  else if (level.module !== null) go({ region: level.region, module: null });
  else if (level.region >= 0) go({ region: -1, module: null });
}

function press(event) {
  const { key, target } = event, inGraph = $("drawing").contains(target) || (selected && target === document.body);
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || target.tagName === "INPUT") return;
  const click = (k) => document.querySelectorAll("#path .zoom button")[k].click();
  const keys = {
    "/": () => { $("search").focus(); $("search").select(); }, j: () => step(1), k: () => step(-1), Escape: up, r: () => click(0), "-": () => click(1),
    "+": () => click(2), 0: () => click(3), "[": () => turn(shownPart - 1), "]": () => turn(shownPart + 1), c: copyLink, d: () => setTheme(!isDark()), "?": () => $("help").showModal(),
  };
  const ofGraph = { ArrowDown: () => toward(0, 1), ArrowUp: () => toward(0, -1), ArrowRight: () => toward(1, 0), ArrowLeft: () => toward(-1, 0) };
  let run = keys[key] || (inGraph ? ofGraph[key] : undefined);
  if (key === "Enter" || key === " ") run = target.getAttribute("role") === "button" && target.tagName === "rect" ? () => target.dispatchEvent(new MouseEvent("click")) : undefined;
  if (run && (nodes.length || "d?".includes(key))) { event.preventDefault(); run(); }
}

function drawHelp() {
  const box = $("help");
  make("h2", {}, box, "Keys");
  const list = make("dl", {}, box);
  for (const [key, text] of KEYS) {
    const term = make("dt", {}, list);
    for (const one of key.split("  ")) make("kbd", {}, term, one), term.appendChild(document.createTextNode(" "));
    make("dd", {}, list, text);
  }
  make("p", { class: "note" }, box, "The address of the page follows what is shown, so it can be kept or sent.");
  make("button", { type: "button" }, box, "close").addEventListener("click", () => box.close());
  $("ask").addEventListener("click", () => box.showModal());
}

// -- links: the level, the selected box and the part of the step are in the address

let waiting = 0;

function linkOf() {
  const values = new URLSearchParams();
  if (level.region >= 0) values.set("in", regions[level.region].name);
  if (level.module !== null) values.set("module", level.module);
  if (selected) values.set("node", nodes[selected.nodes[0]].name);
  if (turned) values.set("part", shownPart);
  return "#" + values;
}

function keepLink() { // soon: browsers refuse many changes of an address in a short time
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    try { if (location.hash !== linkOf() && (location.hash || linkOf() !== "#")) history.pushState(null, "", linkOf()); } catch { /* a page within another has no address of its own */ }
  }, 200);
}

function follow() { // go to what the address says
  const values = new URLSearchParams(location.hash.slice(1)), region = regions.findIndex((r) => r.name === values.get("in"));
  const at = nodes.findIndex((n) => n.name === values.get("node")), module = region < 0 ? null : values.get("module");
  const part = Number(values.get("part"));
  if (part >= 0 && values.has("part")) shownPart = part, turned = true, drawStep();
  if (at >= 0 && isView(nodes[at])) views = true;
  if (region >= 0 && grouped(region, module).length) go({ region, module });
  else if (region < 0 && (at < 0 || !grouped(nodes[at].region, null).length)) go({ region: -1, module: null });
  const box = at < 0 ? undefined : shownBoxes.find((b) => b.nodes.includes(at));
  if (box && (region >= 0 || !values.get("in"))) select(box);
  else if (at >= 0) reveal(at);
}

function copyLink() {
  clearTimeout(waiting);
  const text = location.href.split("#")[0] + linkOf(), said = (what) => { $("said").textContent = what; setTimeout(() => { $("said").textContent = ""; }, 2000); };
  const byHand = () => { // where the clipboard is not given to pages of files
    const box = make("textarea", {}, document.body, text);
    box.select();
    said(document.execCommand("copy") ? "link copied" : text);
    box.remove();
  };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => said("link copied"), byHand); else byHand();
}

// -- dark and light

const THEME = "megafx theme";
const stored = (...set) => { try { return set.length ? localStorage.setItem(THEME, set[0]) : localStorage.getItem(THEME); } catch { return null; } };
const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  stored(dark ? "dark" : "light");
  nameTheme();
}

function nameTheme() {
  $("theme").textContent = isDark() ? "light" : "dark";
  $("theme").setAttribute("aria-label", isDark() ? "switch to light colours" : "switch to dark colours");
}

// -- begin

if (!document.documentElement.dataset.theme && stored()) document.documentElement.dataset.theme = stored();
nameTheme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
$("theme").addEventListener("click", () => setTheme(!isDark()));
drawTexts();
drawHelp();
document.addEventListener("keydown", press);
if (nodes.length) {
  drawGraph(), help(), drawStep(), drawMemory(), drawMeasured();
  if (location.hash) follow();
  $("search").addEventListener("input", () => search($("search").value));
  $("search").addEventListener("keydown", searchKeys);
  $("search").addEventListener("blur", () => { $("results").hidden = true; });
  $("drawing").addEventListener("mouseleave", () => { if (selected) showSelected(); });
  addEventListener("popstate", follow);
  addEventListener("resize", () => { redraw(); drawStep(); drawMemory(); });
} else for (const part of document.querySelectorAll(".drawn, #finder")) part.style.display = "none";
