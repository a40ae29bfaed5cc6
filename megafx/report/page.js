"use strict";
// The report whose data is in the page. Plain JavaScript; nothing is loaded. Here: helpers, and the model as a graph. Then come
// charts.js (the step, memory, measured times), texts.js (headline and tables) and tools.js (search, keys, links, dark mode).
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent), nodes = data.nodes, regions = data.regions, edges = data.edges;
for (const n of nodes) {
  n.source = data.texts[n.source];
  for (const key of ["why", "alternatives"]) n[key] = n[key].map((i) => data.texts[i]);
}
const PLACEMENTS = {
  S: "S, shard: each rank holds a slice", R: "R, replicate: each rank holds all of it; its gradient is a sum over ranks",
  I: "I, invariant: each rank holds all of it, and all of its gradient", P: "P, partial: ranks hold summands of it",
};
const STYLES = {
  "column-parallel": "each rank has a slice of the output features",
  "row-parallel": "each rank has a slice of the input features, so results are summands",
  "vocab-parallel": "each rank has a slice of the vocabulary, so results are summands",
  "hidden-parallel": "each rank has a slice of the features of each row, and of the result",
  "expert-parallel": "each rank has some of the experts",
  "on a shard of the sequence": "each rank has the whole weight, and some of the tokens",
  replicated: "each rank has the whole weight, and computes all of it",
};

function make(tag, attributes, parent, text) {
  const svg = ["svg", "g", "path", "rect", "text", "line", "polygon", "defs", "marker"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}
const sum = (list, of) => list.reduce((total, item) => total + of(item), 0);
const short = (number, unit) => (number >= 100 ? number.toFixed(0) : number.toFixed(1)) + " " + unit;
const bytes = (n) => n >= 2 ** 30 ? short(n / 2 ** 30, "GiB") : n >= 2 ** 20 ? short(n / 2 ** 20, "MiB") : n >= 1024 ? short(n / 1024, "KiB") : n + " B";
const time = (us) => us >= 1e6 ? (us / 1e6).toFixed(2) + " s" : us >= 1000 ? (us / 1000).toFixed(2) + " ms" : us >= 0.1 || !us ? short(us, "us") : "< 0.1 us";
const cut = (text, n) => text.length > n ? text.slice(0, n - 1) + "\u2026" : text;
const line = (source) => source.replace(/^\S*site-packages\//, "");
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const sent = (m) => [["forward", m.forward, m.forward_bytes, m.forward_us],
  ["backward", m.backward, m.backward_bytes, m.cost_us - m.forward_us]].filter((x) => x[2] > 0);
const ruler = document.createElement("canvas").getContext("2d");
function widthOf(text, font) { ruler.font = font + ' system-ui, "DejaVu Sans", sans-serif'; return ruler.measureText(text).width; }
const fit = (text, width) => { while (text.length > 1 && widthOf(text, "11px") > width) text = text.slice(0, -2) + "\u2026"; return widthOf(text, "11px") <= width && (text.length > 8 || !text.endsWith("\u2026")) ? text : ""; };
const nameOf = (n) => (n.module ? n.module + ": " : "") + n.label;

function tip(element, text) { // text: what is said, or a function that says it for the place of the mouse
  element.addEventListener("mousemove", (event) => {
    const box = $("tip");
    box.textContent = typeof text === "string" ? text : text(event);
    box.style.display = "block";
    box.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)) + "px";
    box.style.top = (event.clientY + 20 + box.offsetHeight < innerHeight ? event.clientY + 16 : event.clientY - box.offsetHeight - 12) + "px";
  });
  element.addEventListener("mouseleave", () => { $("tip").style.display = "none"; });
}

// -- the graph: boxes of one level, each with the nodes that it represents

let level = { region: -1, module: null }, views = false, zoom = 0; // zoom 0: as large as the panel
const isView = (n) => !n.move && !n.us && !n.has_weight;

function grouped(region, module) { // boxes in graph order: a collective, an op, or a run of ops of one module
  const found = [], depth = module ? module.split(".").length : 0;
  for (const i of regions[region].nodes) {
    const n = nodes[i], steps = n.module.split("."), last = found[found.length - 1];
    if (module !== null && n.module !== module && !n.module.startsWith(module + ".")) continue;
    let end = 1; // a child of a layer; of a list in it, the item of the list: layer.0.SelfAttention
    while (/^\d+$/.test(steps[end])) end += 2;
    const child = regions[region].layer ? steps.slice(0, end).join(".") : n.module;
    if (n.move) found.push({ label: n.label, nodes: [i], move: n.move, region });
    else if (module !== null || child === "")
      found.push({ label: (steps.length > depth && n.module ? steps.slice(depth).join(".") + ": " : "") + n.label, nodes: [i], op: true, region });
    else if (last && last.module === child) last.nodes.push(i);
    else found.push({ label: child, nodes: [i], module: child, region });
  }
  return found;
}

function linked(boxes) { // [a, b] where b reads a; nodes that are not shown are looked through. Where they lead from or to outside
  const of = new Map(), back = new Map(), ahead = new Map(), found = new Set(), inside = [], outside = [];
  boxes.forEach((b, k) => b.nodes.forEach((i) => of.set(i, k)));
  for (const [a, b] of edges) {
    back.set(b, [...(back.get(b) || []), a]);
    ahead.set(a, [...(ahead.get(a) || []), b]);
  }
  const through = (i, next) => (next.get(i) || []).flatMap((a) => of.has(a) ? [[of.get(a)]] : hidden.has(a) ? through(a, next) : [[-1, a]]);
  boxes.forEach((b, k) => b.nodes.forEach((i) => {
    for (const [a, node] of through(i, back)) if (a < 0) inside.push([node, k]); else if (a < k) found.add(a + "," + k);
    for (const [a, node] of through(i, ahead)) if (a < 0) outside.push([k, node]);
  }));
  return [[...found].map((text) => text.split(",").map(Number)), inside, outside];
}
let hidden = new Set();

function ghosts(boxes, links, inside, outside) { // what a level reads from outside, and who reads its values
  const made = new Map(), all = [...boxes], more = [];
  const ghost = (node, way) => {
    const n = nodes[node], label = way + (n.region !== level.region ? regions[n.region].name : n.move ? n.label : (n.module.split(".")[0] || n.label));
    if (!made.has(label)) { made.set(label, all.length); all.push({ label, nodes: [], ghost: true }); }
    return made.get(label);
  };
  for (const [node, k] of inside) more.push([ghost(node, "from "), k]);
  for (const [k, node] of outside) more.push([k, ghost(node, "to ")]);
  return [all, [...links, ...new Map(more.map((l) => [l.join(), l])).values()]];
}

function lines(b) { // the text of a box below its name
  if (b.ghost) return [];
  const n = nodes[b.nodes[0]];
  if (b.move) return sent(b.move).slice(1).map((s) => `backward: ${s[1]} ${bytes(s[2])}, ${time(s[3])}`);
  if (b.op) return [n.style, `${n.placements.split("-> ")[1]} of ${n.value.replace("float", "f")}`, n.us ? time(n.us) : ""].filter(Boolean);
  const own = b.nodes.filter((i) => !nodes[i].move && (nodes[i].us || nodes[i].has_weight)), styles = {};
  for (const i of own) if (nodes[i].style) {
    const leaf = nodes[i].module === b.module ? "" : nodes[i].module.split(".").pop();
    (styles[nodes[i].style] ||= []).push(leaf);
  }
  const lines = Object.entries(styles).map(([style, names]) => style + (names[0] ? ": " + [...new Set(names)].join(", ") : ""));
  return [...lines.map((text) => cut(text, 48)), `${plural(own.length, "op")}, ${time(sum(own, (i) => nodes[i].us))}`];
}
const title = (b) => { const s = b.move && sent(b.move)[0]; return s ? `${b.label} ${bytes(s[2])}, ${time(s[3])}` : cut(b.label, 48); };

function lay(boxes, links) { // positions from (0, 0): rows by the longest way from the start; returns [width, height]
  const rank = boxes.map(() => 0), rows = [], GAP = 26;
  for (let changed = true; changed;) {
    changed = false;
    for (const [a, b] of links) if (rank[b] <= rank[a]) { rank[b] = rank[a] + 1; changed = true; }
  }
  boxes.forEach((b, k) => { // what comes in is right above those that read it
    const readers = links.filter((l) => l[0] === k);
    if (b.ghost && readers.length && !links.some((l) => l[1] === k)) rank[k] = Math.min(...readers.map((l) => rank[l[1]])) - 1;
  });
  const first = Math.min(0, ...rank);
  boxes.forEach((b, k) => {
    rank[k] -= first;
    b.text = lines(b);
    b.w = Math.ceil(24 + Math.max(76, widthOf(title(b), b.ghost ? "11px" : "600 12px"), ...b.text.map((t) => widthOf(t, "11px"))));
    b.h = (b.ghost ? 24 : 28) + 14 * b.text.length;
    (rows[rank[k]] ||= []).push(k);
  });
  const inner = Math.max(...rows.map((row) => sum(row, (k) => boxes[k].w + 22) - 22));
  let y = 0, right = inner;
  rows.forEach((row) => {
    const parents = (k) => links.filter((l) => l[1] === k && boxes[l[0]].x !== undefined).map((l) => boxes[l[0]].x);
    const at = new Map(row.map((k) => { const p = parents(k); return [k, p.length ? sum(p, (v) => v) / p.length : inner / 2]; }));
    row.sort((a, b) => at.get(a) - at.get(b) || a - b);
    let x = (inner - sum(row, (k) => boxes[k].w + 22) + 22) / 2;
    for (const k of row) { boxes[k].x = x + boxes[k].w / 2; boxes[k].y = y; x += boxes[k].w + 22; }
    y += Math.max(...row.map((k) => boxes[k].h)) + GAP;
  });
  const lanes = []; // long edges run beside the rows between, each in a lane of its own
  for (const link of links) if (rank[link[1]] - rank[link[0]] > 1) {
    const beside = rows.slice(rank[link[0]], rank[link[1]] + 1).flat().map((k) => boxes[k].x + boxes[k].w / 2);
    let lane = 0;
    while (lanes.some((l) => l.lane === lane && l.from < rank[link[1]] && rank[link[0]] < l.to)) lane++;
    lanes.push({ lane, from: rank[link[0]], to: rank[link[1]] });
    link.lane = Math.max(...beside) + 16 + 10 * lane;
    right = Math.max(right, link.lane + 6);
  }
  return [right, y - GAP];
}

let shownBoxes = [], selected = null; // boxes of this level, from top to bottom; the one that is clicked on

function drawGraph() {
  const panel = $("drawing"), columns = [];
  panel.textContent = "";
  hidden = new Set();
  let boxes = [], w = 0, h = 0;
  const shown = level.region < 0 ? regions.map((_, r) => r) : [level.region];
  for (const r of shown) for (const b of grouped(r, level.module))
    if (!views && b.op && isView(nodes[b.nodes[0]])) hidden.add(b.nodes[0]); else boxes.push(b);
  let [links, inside, outside] = linked(boxes);
  if (level.region >= 0) [boxes, links] = ghosts(boxes, links, inside, outside);
  for (const r of shown) { // one column a region; on a narrow page one below another
    const own = boxes.filter((b) => b.region === r || level.region >= 0), index = new Map(own.map((b, k) => [boxes.indexOf(b), k]));
    const its = links.filter((l) => index.has(l[0]) && index.has(l[1])), local = its.map((l) => [index.get(l[0]), index.get(l[1])]);
    const [width, height] = own.length ? lay(own, local) : [0, 0], name = regions[r].name + (regions[r].times > 1 ? " \u00d7 " + regions[r].times : "");
    const frame = level.region < 0 ? 16 : 0, w = Math.max(width + 2 * frame, frame ? widthOf(name, "600 12px") + 2 * frame : 0);
    columns.push({ region: r, name, own, its, local, width, w, h: height + (frame ? 62 : 20), nodes: regions[r].nodes });
  }
  const room = panel.clientWidth - 2, stacked = level.region < 0 && room < 640, widest = Math.max(...columns.map((c) => c.w));
  for (const c of columns) {
    c.x = stacked ? (widest - c.w) / 2 : w;
    c.y = stacked ? h : 0;
    const left = c.x + (c.w - c.width) / 2, above = c.y + (level.region < 0 ? 46 : 10);
    c.local.forEach((l, k) => { c.its[k].lane = l.lane && l.lane + left; });
    for (const b of c.own) { b.x += left; b.y += above; }
    w = stacked ? widest : w + c.w + (level.region < 0 ? 44 : 0);
    h = stacked ? h + c.h + 30 : Math.max(h, c.h + 2);
  }
  w -= level.region < 0 && !stacked ? 44 : 0;
  const margin = stacked ? 40 : 12, full = w + margin + 12, scale = zoom || Math.max(0.62, Math.min(1, room / full));
  const svg = make("svg", { viewBox: `${-margin} -6 ${full} ${h + 12}`, width: Math.floor(full * scale), height: (h + 12) * scale }, panel);
  if (full * scale < room) svg.style.margin = "0 auto";
  const marker = make("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, make("defs", {}, svg));
  make("path", { d: "M0 0L8 4L0 8z", class: "head" }, marker);
  if (level.region < 0) for (const c of columns) {
    const rect = make("rect", { x: c.x, y: c.y, width: c.w, height: c.h, rx: 8, class: "frame whole" }, svg);
    make("text", { x: c.x + c.w / 2, y: c.y + 21, "text-anchor": "middle", class: "name" }, svg, c.name);
    rect.addEventListener("mouseenter", () => about({ label: c.name, nodes: c.nodes, region: c.region }));
    button(rect, `look into ${c.name}`, () => go({ region: c.region, module: null }));
  }
  let crossing = 0;
  for (const link of links) {
    const p = boxes[link[0]], q = boxes[link[1]], y1 = p.y + p.h, middle = p.y + 0.7 * p.h, end = q.y + 0.3 * q.h;
    let d = `M${p.x} ${y1}C${p.x} ${y1 + 13} ${q.x} ${q.y - 13} ${q.x} ${q.y}`;
    if (p.region !== q.region && !p.ghost && !q.ghost && stacked) d = `M${p.x - p.w / 2} ${middle}H${-8 - 5 * (crossing % 5)}V${end}H${q.x - q.w / 2}`, crossing++;
    else if (p.region !== q.region && !p.ghost && !q.ghost) { // in the gaps between columns, and above those that it passes
      const from = columns[p.region], to = columns[q.region], side = 10 + 5 * (crossing++ % 5), a = from.x + from.w + side, b = to.x - 44 + side;
      d = `M${p.x + p.w / 2} ${middle}H${a}` + (q.region > p.region + 1 ? `V-${2 + side / 5}H${b}` : "") + `V${end}H${q.x - q.w / 2}`;
    } else if (link.lane) d = `M${p.x + p.w / 2} ${middle}H${link.lane - 8}Q${link.lane} ${middle} ${link.lane} ${middle + 8}V${end - 8}Q${link.lane} ${end} ${link.lane - 8} ${end}H${q.x + q.w / 2}`;
    make("path", { d, class: "edge" }, svg);
  }
  shownBoxes = boxes.filter((b) => !b.ghost).sort((a, b) => a.region - b.region || a.y - b.y || a.x - b.x);
  for (const b of boxes) drawBox(svg, b);
  if (shownBoxes.length) shownBoxes[0].element.setAttribute("tabindex", 0);
  drawPath(scale);
}

function button(element, name, run) { // a shape that can be clicked on, and reached by the Tab key
  for (const [key, value] of Object.entries({ role: "button", tabindex: 0, "aria-label": name })) element.setAttribute(key, value);
  element.addEventListener("click", run);
}

function drawBox(svg, b) {
  const out = b.nodes.filter((i) => !nodes[i].move).pop(), x = b.x - b.w / 2;
  const rect = make("rect", { x, y: b.y, width: b.w, height: b.h, rx: b.move ? b.h / 2 : 6, class: b.ghost ? "ghost" : "box" + (b.move ? " pill" : "") + (b.move && !b.move.forward_bytes ? " back" : "") }, svg);
  if (!b.move && !b.ghost) rect.setAttribute("fill", `var(--${nodes[out].out})`);
  make("text", { x: b.x, y: b.y + (b.ghost ? 16 : 18), "text-anchor": "middle", class: b.ghost ? "small" : "name" }, svg, title(b));
  b.text.forEach((text, k) => make("text", { x: b.x, y: b.y + 33 + 14 * k, "text-anchor": "middle", class: "in" }, svg, text));
  if (b.ghost) return;
  b.element = rect;
  rect.addEventListener("mouseenter", () => about(b));
  button(rect, [b.op || b.move ? nameOf(nodes[b.nodes[0]]) : b.label, ...b.text].join(", "), () => { if (b.module === undefined) select(b); else enter(b); });
  rect.setAttribute("tabindex", -1); // one box of a level is reached by Tab, the others by keys (tools.js)
}

const enter = (b) => go({ region: b.region, module: b.module });

function go(to) { level = to; zoom = 0; selected = null; drawGraph(); showSelected(); keepLink(); }

function select(b) { // or null
  for (const other of shownBoxes) {
    other.element.classList.toggle("on", other === b);
    other.element.setAttribute("tabindex", other === b || (!b && other === shownBoxes[0]) ? 0 : -1);
  }
  selected = b;
  showSelected();
  keepLink();
}

function showSelected() {
  if (selected) about(selected);
  else if (level.region < 0) help();
  else about({ label: level.module ?? regions[level.region].name, region: level.region, nodes: regions[level.region].nodes.filter((i) => level.module === null || (nodes[i].module + ".").startsWith(level.module + ".")) });
}

function reveal(i) { // go to where a node is drawn, and select it
  if (isView(nodes[i])) views = true;
  const region = nodes[i].region, box = grouped(region, null).find((b) => b.nodes.includes(i));
  go({ region, module: box.module ?? null });
  select(shownBoxes.find((b) => b.nodes.includes(i)));
  selected.element.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function drawPath(scale) {
  const place = $("path"), region = level.region;
  place.textContent = "";
  const step = (text, to) => { const b = make("button", {}, place, text); b.addEventListener("click", () => go(to)); };
  step("whole model", { region: -1, module: null });
  if (region >= 0) {
    make("span", {}, place, "\u203a");
    step(regions[region].name + (regions[region].times > 1 ? " \u00d7 " + regions[region].times : ""), { region, module: null });
  }
  if (level.module !== null) make("span", {}, place, "\u203a " + level.module);
  const bar = make("span", { class: "zoom" }, place);
  const again = (text, name, run, on) => make("button", { "aria-label": name, ...(on ? { class: "on" } : {}) }, bar, text).addEventListener("click", () => { run(); redraw(); });
  again(views ? "hide reshapes" : "show reshapes", views ? "hide reshapes" : "show reshapes", () => { views = !views; }, views);
  again("\u2212", "smaller", () => { zoom = scale / 1.25; });
  again("+", "larger", () => { zoom = scale * 1.25; });
  again("fit", "as large as the panel", () => { zoom = 0; });
}

function redraw() { // the same level, and the same box selected
  const kept = selected && selected.nodes[0];
  drawGraph();
  select(shownBoxes.find((b) => b.nodes.includes(kept)) || null);
}

function about(b) {
  const place = $("about"), n = nodes[b.nodes[0]];
  place.textContent = "";
  if (b === selected) make("button", { class: "copy", type: "button" }, place, "copy link").addEventListener("click", copyLink);
  make("h3", {}, place, b.op || b.move ? nameOf(n) : b.label);
  const list = make("dl", {}, place), say = (name, value) => { if (value) { make("dt", {}, list, name); make("dd", {}, list, value); } };
  if (!b.op && !b.move) {
    say("forward pass of " + (b.module === undefined ? "one" : "it") + ", on a rank", time(sum(b.nodes, (i) => nodes[i].us)));
    const total = {};
    for (const i of b.nodes) for (const m of [nodes[i].move, nodes[i].inner]) for (const s of m ? sent(m) : []) {
      const key = s[0] + " " + s[1], old = total[key] || [0, 0, 0];
      total[key] = [old[0] + 1, old[1] + s[2], old[2] + s[3]];
    }
    for (const [key, [count, size, us]] of Object.entries(total)) say(key, `${count} \u00d7, ${bytes(size)} sent by a rank, ${time(us)}`);
    const kept = sum(b.nodes, (i) => nodes[i].kept);
    say("kept for backward, at most", kept && bytes(kept));
    for (const m of measuredOf(b)) say(...m);
    for (const i of b.nodes) if (nodes[i].weight) say(nodes[i].style, nodes[i].weight);
    if (b.module !== undefined || level.region < 0) make("p", { class: "note" }, place, "Click to look inside.");
    return;
  }
  say("style", n.style && n.style + (STYLES[n.style] ? ": " + STYLES[n.style] : ""));
  say(b.move ? "transition" : "placements of what it reads -> of its result", n.placements);
  say("result, of all ranks together", n.value);
  say("weight", n.weight);
  for (const m of [n.move, n.inner]) for (const s of m ? sent(m) : []) say(s[0] + " " + s[1], `${bytes(s[2])} sent by a rank, ${time(s[3])}`);
  if (!b.move) say("forward pass, on a rank", time(n.us) + (n.flops ? `, ${(n.flops / 1e9).toFixed(1)} GFLOP` : ""));
  if (n.kept) say("kept for backward, at most", bytes(n.kept));
  for (const m of measuredOf(b)) say(...m);
  if (n.source) { make("dt", {}, list, "source"); make("dd", { class: "code" }, list, line(n.source)); }
  for (const [name, texts] of [["why so", n.why], ["what else it could be", n.alternatives]]) if (texts.length) {
    make("dt", {}, place, name);
    const items = make("ul", {}, place);
    for (const text of texts) make("li", {}, items, text);
  }
}

function help() {
  const place = $("about");
  place.textContent = "";
  make("h3", {}, place, "How to read this");
  const items = make("ul", {}, place);
  for (const text of [
    "Every rank runs every box, from top to bottom and from left to right. Layers that are alike are drawn once, with their number.",
    "Colour says how the ranks hold a box's result: a slice each, or all of it, or summands.",
    "Yellow pills are collectives of forward: the bytes that a rank sends, and the time by the cost model. Most have one in backward too.",
    "Dashed pills without colour are collectives of backward alone: forward passes them without a step.",
    "Hover over a box: its weights, cost, line of code, why it is so, and what else it could be.",
    "Click on a box or on a frame to look inside; on an op to keep it here, with a link to it.",
    "Press / to search, and ? for all keys.",
  ]) make("li", {}, items, text);
}
