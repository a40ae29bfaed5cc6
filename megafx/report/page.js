"use strict";
// Draws the report whose data stands in the page. Plain JavaScript; nothing is loaded.
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

function tip(element, text) {
  element.addEventListener("mousemove", (event) => {
    const box = $("tip");
    box.textContent = text;
    box.style.display = "block";
    box.style.left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8) + "px";
    box.style.top = event.clientY + 16 + "px";
  });
  element.addEventListener("mouseleave", () => { $("tip").style.display = "none"; });
}

// -- the graph: boxes of one level, each with the nodes that it stands for

let level = { region: -1, module: null }, views = false, zoom = 0; // zoom 0: as large as the panel
const isView = (n) => !n.move && !n.us && !n.has_weight;

function grouped(region, module) { // boxes in graph order: a collective, an op, or a run of ops of one module
  const found = [], depth = module ? module.split(".").length : 0;
  for (const i of regions[region].nodes) {
    const n = nodes[i], steps = n.module.split("."), last = found[found.length - 1];
    if (module !== null && n.module !== module && !n.module.startsWith(module + ".")) continue;
    let end = 1; // a child of a layer; of a list in it, what stands in the list: layer.0.SelfAttention
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
  const told = Object.entries(styles).map(([style, names]) => style + (names[0] ? ": " + [...new Set(names)].join(", ") : ""));
  return [...told.map((text) => cut(text, 48)), `${plural(own.length, "op")}, ${time(sum(own, (i) => nodes[i].us))}`];
}
const title = (b) => { const s = b.move && sent(b.move)[0]; return s ? `${b.label} ${bytes(s[2])}, ${time(s[3])}` : cut(b.label, 48); };

function lay(boxes, links) { // positions from (0, 0): rows by the longest way from the start; returns [width, height]
  const rank = boxes.map(() => 0), rows = [], GAP = 26;
  for (let changed = true; changed;) {
    changed = false;
    for (const [a, b] of links) if (rank[b] <= rank[a]) { rank[b] = rank[a] + 1; changed = true; }
  }
  boxes.forEach((b, k) => { // what comes in stands right above those that read it
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
  for (const r of shown) { // one column a region
    const own = boxes.filter((b) => b.region === r || level.region >= 0), index = new Map(own.map((b, k) => [boxes.indexOf(b), k]));
    const its = links.filter((l) => index.has(l[0]) && index.has(l[1])), local = its.map((l) => [index.get(l[0]), index.get(l[1])]);
    const [width, height] = own.length ? lay(own, local) : [0, 0], name = regions[r].name + (regions[r].times > 1 ? " \u00d7 " + regions[r].times : "");
    const frame = level.region < 0 ? 16 : 0, least = frame ? widthOf(name, "600 12px") + 2 * frame : 0, left = w + Math.max(frame, (least - width) / 2);
    local.forEach((l, k) => { its[k].lane = l.lane && l.lane + left; });
    for (const b of own) { b.x += left; b.y += frame ? 46 : 10; }
    columns.push({ region: r, name, x: w, w: Math.max(width + 2 * frame, least), h: height + 62, nodes: regions[r].nodes });
    w += columns[columns.length - 1].w + (frame ? 44 : 0);
    h = Math.max(h, height + (frame ? 64 : 20));
  }
  w -= level.region < 0 ? 44 : 0;
  const room = panel.clientWidth - 26, scale = zoom || Math.max(0.62, Math.min(1, room / w));
  const svg = make("svg", { viewBox: `-12 -6 ${w + 24} ${h + 12}`, width: (w + 24) * scale, height: (h + 12) * scale }, panel);
  if ((w + 24) * scale < room) svg.style.margin = "0 auto";
  const marker = make("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, make("defs", {}, svg));
  make("path", { d: "M0 0L8 4L0 8z", fill: "#7f8b96" }, marker);
  if (level.region < 0) for (const c of columns) {
    const rect = make("rect", { x: c.x, y: 0, width: c.w, height: c.h, rx: 8, class: "frame whole" }, svg);
    make("text", { x: c.x + c.w / 2, y: 21, "text-anchor": "middle", class: "name" }, svg, c.name);
    rect.addEventListener("mouseenter", () => about({ label: c.name, nodes: c.nodes }));
    rect.addEventListener("click", () => go({ region: c.region, module: null }));
  }
  let crossing = 0;
  for (const link of links) {
    const p = boxes[link[0]], q = boxes[link[1]], y1 = p.y + p.h, middle = p.y + 0.7 * p.h, end = q.y + 0.3 * q.h;
    let d = `M${p.x} ${y1}C${p.x} ${y1 + 13} ${q.x} ${q.y - 13} ${q.x} ${q.y}`;
    if (p.region !== q.region && !p.ghost && !q.ghost) { // in the gaps between columns, and above those that it passes
      const from = columns[p.region], to = columns[q.region], side = 10 + 5 * (crossing++ % 5), a = from.x + from.w + side, b = to.x - 44 + side;
      d = `M${p.x + p.w / 2} ${middle}H${a}` + (q.region > p.region + 1 ? `V-${2 + side / 5}H${b}` : "") + `V${end}H${q.x - q.w / 2}`;
    } else if (link.lane) d = `M${p.x + p.w / 2} ${middle}H${link.lane - 8}Q${link.lane} ${middle} ${link.lane} ${middle + 8}V${end - 8}Q${link.lane} ${end} ${link.lane - 8} ${end}H${q.x + q.w / 2}`;
    make("path", { d, class: "edge" }, svg);
  }
  for (const b of boxes) drawBox(svg, b);
  drawPath(scale);
}

function drawBox(svg, b) {
  const out = b.nodes.filter((i) => !nodes[i].move).pop(), x = b.x - b.w / 2;
  const rect = make("rect", { x, y: b.y, width: b.w, height: b.h, rx: b.move ? b.h / 2 : 6, class: b.ghost ? "ghost" : "box" + (b.move ? " pill" : "") + (b.move && !b.move.forward_bytes ? " back" : "") }, svg);
  if (!b.move && !b.ghost) rect.setAttribute("fill", `var(--${nodes[out].out})`);
  make("text", { x: b.x, y: b.y + (b.ghost ? 16 : 18), "text-anchor": "middle", class: b.ghost ? "small" : "name" }, svg, title(b));
  b.text.forEach((text, k) => make("text", { x: b.x, y: b.y + 33 + 14 * k, "text-anchor": "middle", class: "in" }, svg, text));
  if (b.ghost) return;
  rect.addEventListener("mouseenter", () => about(b));
  rect.addEventListener("click", () => { if (b.module !== undefined) go({ region: b.region, module: b.module }); else about(b); });
}

function go(to) { level = to; zoom = 0; drawGraph(); }

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
  const button = (text, run, on) => make("button", on ? { class: "on" } : {}, bar, text).addEventListener("click", () => { run(); drawGraph(); });
  button(views ? "hide reshapes" : "show reshapes", () => { views = !views; }, views);
  button("\u2212", () => { zoom = scale / 1.25; });
  button("+", () => { zoom = scale * 1.25; });
  button("fit", () => { zoom = 0; });
}

function about(b) {
  const place = $("about"), n = nodes[b.nodes[0]];
  place.textContent = "";
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
    for (const i of b.nodes) if (nodes[i].weight) say(nodes[i].style, nodes[i].weight);
    make("p", { class: "told" }, place, "Click to look inside.");
    return;
  }
  say("style", n.style && n.style + (STYLES[n.style] ? ": " + STYLES[n.style] : ""));
  say(b.move ? "transition" : "placements of what it reads -> of its result", n.placements);
  say("result, of all ranks together", n.value);
  say("weight", n.weight);
  for (const m of [n.move, n.inner]) for (const s of m ? sent(m) : []) say(s[0] + " " + s[1], `${bytes(s[2])} sent by a rank, ${time(s[3])}`);
  if (!b.move) say("forward pass, on a rank", time(n.us) + (n.flops ? `, ${(n.flops / 1e9).toFixed(1)} GFLOP` : ""));
  if (n.kept) say("kept for backward, at most", bytes(n.kept));
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
    "Click on a box or on a frame to look inside.",
  ]) make("li", {}, items, text);
}

// -- a step: all of it to scale, and below it one part in detail

const partName = (p) => p.region < 0 ? "optimizer" : `${p.direction}, ${regions[p.region].name}` + (p.times > 1 ? " \u00d7 " + p.times : "");
const W = 1400, WHITE = { style: "fill: #fff" };
let shownPart = -1;

function drawStep() {
  const place = $("step"), parts = data.step.parts.filter((p) => p.us > 0), total = sum(parts, (p) => p.us * p.times) || 1;
  place.textContent = "";
  if (shownPart < 0) shownPart = Math.max(0, parts.findIndex((p) => p.times > 1));
  const svg = make("svg", { width: "100%", viewBox: `0 0 ${W} 248` }, place);
  let x = 0, begun = 0;
  parts.forEach((p, k) => {
    const width = W * p.us * p.times / total, wait = sum(p.segments.filter((s) => s[0] === "wait"), (s) => s[3]) / p.us;
    make("rect", { x, y: 20, width: Math.max(0.5, width - 1), height: 34 * (1 - wait), fill: "#b9c9d6", "pointer-events": "none" }, svg);
    make("rect", { x, y: 20 + 34 * (1 - wait), width: Math.max(0.5, width - 1), height: 34 * wait, fill: "var(--wait)", "pointer-events": "none" }, svg);
    const rect = make("rect", { x, y: 20, width: Math.max(1, width - 1), height: 34, fill: "transparent", class: "whole" + (k === shownPart ? " on" : "") }, svg);
    rect.addEventListener("click", () => { shownPart = k; drawStep(); });
    tip(rect, `${p.region < 0 ? "gradients of parameters that ranks hold whole, and the optimizer" : partName(p)}: ${time(p.us * p.times)}, of which ${time(wait * p.us * p.times)} waiting. Click for detail.`);
    const all = time(p.us * p.times), told = `${all}: ${partName(p)}`;
    make("text", { x: x + 3, y: 14, class: "small" }, svg, fit(told, width - 6) || fit(all, width - 6));
    x += width;
  });
  const p = parts[shownPart], L = 70, scale = (W - L) / p.us, from = sum(parts.slice(0, shownPart), (q) => q.us * q.times) / total * W;
  const width = W * p.us * p.times / total;
  make("polygon", { points: `${from},56 ${from + width},56 ${W},92 ${L},92`, fill: "#eef2f5" }, svg);
  const waits = sum(p.segments.filter((s) => s[0] === "wait"), (s) => s[3]);
  make("text", { x: L, y: 112, class: "name" }, svg, (p.times > 1 ? `One of ${p.times}: ` : "") + `${partName({ ...p, times: 1 })}, ${time(p.us)}, of which ${time(waits)} waiting`);
  for (const [text, y] of [["computes", 146], ["sends", 196]]) make("text", { x: 0, y, class: "small" }, svg, text);
  make("rect", { x: L, y: 122, width: W - L, height: 100, fill: "#f6f8fa" }, svg);
  for (const [lane, node, start, us] of p.segments) {
    const n = nodes[node], left = L + Math.max(0, start - p.start) * scale, wide = Math.max(0.4, us * scale), y = lane === "send" ? 174 : 126;
    const fill = lane === "compute" ? `var(--${n ? n.out : "I"})` : `var(--${lane})`;
    const name = n ? nameOf(n) : node === -2 ? "optimizer" : "gradients of parameters that ranks hold whole";
    const move = n && (n.move || n.inner), which = move ? (p.direction === "forward" ? move.forward : move.backward) : "all_reduce";
    const told = lane === "compute" ? (n && n.has_weight ? n.module.split(".").pop() : n ? n.label : name) : lane === "wait" ? "waits" : which;
    const rect = make("rect", { x: left, y, width: wide, height: 42, fill, stroke: "#fff", "stroke-width": wide > 2 ? 0.8 : 0 }, svg);
    tip(rect, (lane === "wait" ? "waits for " : "") + (lane === "compute" || !n ? name : (n.module ? n.module + ": " : "") + which) + ", " + time(us));
    make("text", { x: left + 4, y: y + 18, class: "in", ...(lane === "wait" ? WHITE : {}) }, svg, fit(told, wide - 8));
    make("text", { x: left + 4, y: y + 33, class: "in", ...(lane === "wait" ? WHITE : {}) }, svg, fit(time(us), wide - 8));
  }
  for (let k = 0; k <= 5; k++) {
    const at = L + (W - L) * k / 5;
    make("line", { x1: at, x2: at, y1: 222, y2: 228, stroke: "#7f8b96" }, svg);
    make("text", { x: at, y: 242, class: "small", "text-anchor": k === 0 ? "start" : k === 5 ? "end" : "middle" }, svg, k ? time(p.us * k / 5) : "0");
  }
}

// -- memory over the step: what is held throughout, and what backward will read

function drawMemory() {
  const H = 250, L = 70, R = 330, svg = make("svg", { width: "100%", viewBox: `0 0 ${W} ${H + 46}` }, $("memory"));
  const held = Object.entries(data.memory), base = sum(held, (m) => m[1]), points = [[0, 0]], ends = [];
  const keeps = regions.map((r) => sum(r.nodes, (i) => nodes[i].kept));
  let t = 0, kept = 0, way = "forward";
  for (const p of data.step.parts) {
    const now = p.region < 0 ? "optimizer" : p.direction;
    if (now !== way) { ends.push([way, t]); way = now; }
    for (let i = 0, n = Math.max(1, Math.floor(p.times / 200)); i < p.times; i += n) {
      const some = Math.min(n, p.times - i);
      t += p.us * some;
      if (p.region >= 0) kept += (p.direction === "forward" ? 1 : -1) * keeps[p.region] * some;
      points.push([t, kept]);
    }
  }
  ends.push([way, t]);
  const most = Math.max(...points.map((p) => p[1])), top = Math.max(base + most, data.peak_bytes || 0) || 1;
  const X = (v) => L + (W - L - R) * v / (t || 1), Y = (v) => H - (H - 22) * v / top, labels = [];
  for (let k = 0; k <= 4; k++) {
    make("line", { x1: X(0), x2: X(t), y1: Y(top * k / 4), y2: Y(top * k / 4), stroke: "#e5eaee" }, svg);
    make("text", { x: L - 8, y: Y(top * k / 4) + 4, "text-anchor": "end", class: "small" }, svg, k ? bytes(top * k / 4) : "0");
  }
  let low = 0;
  const colours = ["#6f8fb3", "#94b0cc", "#bccfe0"];
  held.forEach(([name, size], k) => {
    tip(make("rect", { x: X(0), y: Y(low + size), width: X(t) - X(0), height: Math.max(0, Y(low) - Y(low + size)), fill: colours[k % 3] }, svg), name + ", " + bytes(size));
    labels.push([Y(low + size / 2), `${name} ${bytes(size)}`]);
    low += size;
  });
  if (most > 0) {
    const upper = points.map((p) => X(p[0]) + "," + Y(base + p[1])).join(" ");
    tip(make("polygon", { points: `${X(0)},${Y(base)} ${upper} ${X(t)},${Y(base)}`, fill: "#e9bd77" }, svg), "kept for backward, at most " + bytes(most));
    labels.push([Y(base + most / 2), "kept for backward, at most " + bytes(most)]);
  }
  if (data.peak_bytes) {
    make("line", { x1: X(0), x2: X(t), y1: Y(data.peak_bytes), y2: Y(data.peak_bytes), stroke: "#d6453d", "stroke-dasharray": "6 4" }, svg);
    labels.push([Y(data.peak_bytes), "predicted peak " + bytes(data.peak_bytes)]);
  }
  let below = H + 18; // labels from bottom to top, none over another
  for (const [y, text] of labels.sort((a, b) => b[0] - a[0])) {
    below = Math.min(y + 4, below - 16);
    make("text", { x: X(t) + 12, y: below, class: "small" }, svg, text);
  }
  let begun = 0;
  for (const [name, end] of ends) {
    if (begun) make("line", { x1: X(begun), x2: X(begun), y1: 10, y2: H, stroke: "#7f8b96", "stroke-dasharray": "2 4" }, svg);
    make("text", { x: (X(begun) + X(end)) / 2, y: H + 18, "text-anchor": "middle", class: "small" }, svg, fit(`${name}, ${time(end - begun)}`, X(end) - X(begun)) || fit(name, X(end) - X(begun)));
    begun = end;
  }
}

// -- texts

function drawTexts() {
  const step = data.step, card = (big, ...small) => {
    const box = make("div", {}, $("headline"));
    make("b", {}, box, big);
    for (const text of small) make("span", {}, box, text);
    return box;
  };
  if (nodes.length) {
    const share = 100 * step.compute_us / step.total_us, kept = sum(regions, (r) => r.times * sum(r.nodes, (i) => nodes[i].kept));
    const box = card(time(step.total_us) + " a step", `${time(step.compute_us)} computing, ${time(step.exposed_us)} waiting for collectives`);
    make("i", { style: `background: linear-gradient(to right, #b9c9d6 ${share}%, var(--wait) ${share}%)` }, box);
    card((data.peak_bytes ? bytes(data.peak_bytes) : bytes(sum(Object.values(data.memory), (v) => v) + kept)) + " a rank",
      data.peak_bytes ? "predicted peak of memory" : "of memory, at most: parameters, gradients, AdamW, and what is kept for backward");
    const [count, size] = data.sent;
    card(bytes(size) + " sent", count ? `by a rank in ${plural(count, "collective")} a step, which take ${time(step.send_us)}` : "by a rank: no collectives");
    card((step.flops / step.total_us / 1e6).toFixed(0) + " TFLOP/s a rank", "in products and attention, over the whole step");
  }
  for (const [name, value] of Object.entries(data.header)) if (name !== "axis" && name !== "modelled step") { // both are told above
    const d = make("div", {}, $("facts"));
    make("dt", {}, d, name), make("dd", {}, d, { true: "on", false: "off" }[value] || String(value));
  }
  for (const [kind, text] of Object.entries(PLACEMENTS)) {
    const span = make("span", {}, $("legend"));
    make("i", { style: `background: var(--${kind})` }, span);
    span.appendChild(document.createTextNode(text));
  }
  for (const [kind, text] of [["round", "a collective of forward: ranks exchange values"], ["round back", "a collective of backward alone"]]) {
    const span = make("span", {}, $("legend"));
    make("i", { class: kind }, span);
    span.appendChild(document.createTextNode(text));
  }
  for (const [name, columns, rows] of data.tables) if (rows.length) {
    make("h2", {}, $("texts"), name);
    const table = make("table", {}, $("texts")), head = make("tr", {}, table);
    if (columns.some((c) => c)) for (const column of columns) make("th", {}, head, column);
    for (const row of rows) { const tr = make("tr", {}, table); for (const value of row) make("td", {}, tr, line(String(value))); }
  }
}

drawTexts();
if (nodes.length) {
  drawGraph(), help(), drawStep(), drawMemory();
  addEventListener("resize", drawGraph);
} else for (const part of document.querySelectorAll(".drawn")) part.style.display = "none";
