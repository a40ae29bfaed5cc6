"use strict";
// Draws the report whose data stands in the page. Plain JavaScript; nothing is loaded.
const data = JSON.parse(document.getElementById("data").textContent);
const nodes = data.nodes, regions = data.regions, edges = data.edges, NS = "http://www.w3.org/2000/svg";
const KINDS = { S: "shard: each rank has a slice", R: "replicate: the same value, gradients are summands",
  I: "invariant: the same value and gradient", P: "partial: ranks hold summands" };

function make(tag, attributes, parent, text) {
  const svg = ["svg", "g", "path", "rect", "text", "line", "polygon", "defs", "marker", "title"].includes(tag);
  const element = svg ? document.createElementNS(NS, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}
const bytes = (n) => n >= 2 ** 30 ? (n / 2 ** 30).toFixed(1) + " GiB" : n >= 2 ** 20 ? (n / 2 ** 20).toFixed(1) + " MiB"
  : n >= 1024 ? (n / 1024).toFixed(1) + " KiB" : n + " B";
const time = (us) => us >= 1e6 ? (us / 1e6).toFixed(2) + " s" : us >= 1000 ? (us / 1000).toFixed(2) + " ms" : us.toFixed(1) + " us";
const cut = (text, n) => text.length > n ? text.slice(0, n - 1) + "\u2026" : text;
const sent = (m) => [["forward", m.forward, m.forward_bytes, m.forward_us],
  ["backward", m.backward, m.backward_bytes, m.cost_us - m.forward_us]].filter((x) => x[2] > 0);

// -- the graph: boxes of one level, each with the nodes that it stands for

let level = { region: -1, module: null }, views = false;

function contents() { // the nodes of this level
  if (level.region < 0) return nodes.map((_, i) => i);
  return regions[level.region].nodes.filter((i) => level.module === null || below(i));
}
const below = (i) => nodes[i].module === level.module || nodes[i].module.startsWith(level.module + ".");
const isView = (i) => !nodes[i].move && !nodes[i].us && !nodes[i].has_weight;

function grouped() { // [{label, nodes, kind}] in graph order: regions, then runs of one module, then ops
  if (level.region < 0) return regions.map((r, i) => ({ label: r.name + (r.times > 1 ? " \u00d7 " + r.times : ""), nodes: r.nodes, region: i }));
  const found = [], own = contents(), depth = level.module ? level.module.split(".").length : 0;
  const isOp = level.module !== null;
  for (const i of own) {
    const steps = nodes[i].module.split("."), last = found[found.length - 1];
    const child = regions[level.region].layer ? steps.slice(0, depth + 1).join(".") : nodes[i].module;
    if (nodes[i].move) found.push({ label: nodes[i].label, nodes: [i], move: nodes[i].move });
    else if (isOp || child === "") found.push({ label: (isOp && steps.length > depth ? steps.slice(depth).join(".") + ": " : "") + nodes[i].label, nodes: [i], op: true });
    else if (last && last.module === child) last.nodes.push(i);
    else found.push({ label: child, nodes: [i], module: child });
  }
  return found;
}

function linked(boxes) { // edges between boxes; views that are not shown are looked through
  const of = new Map();
  boxes.forEach((b, k) => b.nodes.forEach((i) => of.set(i, k)));
  const back = new Map();
  for (const [a, b] of edges) back.set(b, [...(back.get(b) || []), a]);
  const found = new Set(), sources = (i) => (back.get(i) || []).flatMap((a) => of.has(a) ? [of.get(a)] : hidden.has(a) ? sources(a) : []);
  boxes.forEach((b, k) => b.nodes.forEach((i) => sources(i).forEach((a) => { if (a < k) found.add(a + "," + k); })));
  return [...found].map((text) => text.split(",").map(Number));
}
let hidden = new Set();

function drawGraph() {
  const old = document.getElementById("drawing");
  old.textContent = "";
  hidden = new Set();
  let boxes = grouped();
  if (!views && level.region >= 0) {
    for (const b of boxes) if (b.op && isView(b.nodes[0])) hidden.add(b.nodes[0]);
    boxes = boxes.filter((b) => !hidden.has(b.nodes[0]) || !b.op);
  }
  const links = linked(boxes), rank = boxes.map(() => 0), rows = [];
  for (const [a, b] of links.sort((x, y) => x[1] - y[1] || x[0] - y[0])) rank[b] = Math.max(rank[b], rank[a] + 1);
  boxes.forEach((b, k) => { b.w = Math.max(130, 24 + 7.2 * Math.max(b.label.length, cut(under(b), 44).length)); (rows[rank[k]] ||= []).push(k); });
  const width = Math.max(...rows.map((row) => row.reduce((sum, k) => sum + boxes[k].w + 26, 0))) + 140, H = 46, GAP = 34;
  rows.forEach((row, r) => {
    const parents = (k) => links.filter((l) => l[1] === k).map((l) => boxes[l[0]].x);
    const at = new Map(row.map((k) => { const p = parents(k); return [k, p.length ? p.reduce((a, b) => a + b) / p.length : width / 2]; }));
    row.sort((a, b) => at.get(a) - at.get(b) || a - b);
    let x = (width - row.reduce((sum, k) => sum + boxes[k].w + 26, -26)) / 2;
    for (const k of row) { boxes[k].x = x + boxes[k].w / 2; boxes[k].y = 16 + r * (H + GAP); x += boxes[k].w + 26; }
  });
  const svg = make("svg", { width, height: rows.length * (H + GAP) + 20 }, old);
  const marker = make("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, make("defs", {}, svg));
  make("path", { d: "M0 0L8 4L0 8z", fill: "#9aa4ae" }, marker);
  for (const [a, b] of links) {
    const p = boxes[a], q = boxes[b], y1 = p.y + H, y2 = q.y;
    let d = `M${p.x} ${y1}C${p.x} ${y1 + GAP / 2} ${q.x} ${y2 - GAP / 2} ${q.x} ${y2}`;
    if (rank[b] - rank[a] > 1) { // beside the rows between
      const between = rows.slice(rank[a], rank[b] + 1).flat().map((k) => boxes[k].x + boxes[k].w / 2);
      const x = Math.max(...between) + 14 + 5 * Math.min(6, rank[b] - rank[a]);
      d = `M${p.x + p.w / 2} ${p.y + H / 2}C${x + 20} ${p.y + H / 2} ${x} ${p.y + H} ${x} ${p.y + 2 * H}L${x} ${q.y - H}C${x} ${q.y} ${x + 20} ${q.y + H / 2} ${q.x + q.w / 2} ${q.y + H / 2}`;
    }
    make("path", { d, class: "edge" }, svg);
  }
  for (const b of boxes) drawBox(svg, b, H);
  drawPath();
}

function under(b) { // the second line of a box
  if (b.move) return sent(b.move).map((s) => (s[0] === "forward" ? "" : "bwd ") + bytes(s[2]) + ", " + time(s[3])).join("; ");
  const us = b.nodes.reduce((sum, i) => sum + nodes[i].us, 0), n = nodes[b.nodes[0]];
  if (b.op) return n.style || n.placements;
  const moved = b.nodes.filter((i) => nodes[i].move);
  const count = b.nodes.length - moved.length, all = `${count} op${count > 1 ? "s" : ""}, ${time(us)}`;
  return moved.length ? all + ", sends " + bytes(moved.reduce((sum, i) => sum + nodes[i].move.forward_bytes, 0)) : all;
}

function drawBox(svg, b, H) {
  const group = make("g", {}, svg), x = b.x - b.w / 2, n = nodes[b.nodes[0]];
  const rect = make("rect", { x, y: b.y, width: b.w, height: H, rx: b.move ? 20 : 5, class: "box" + (b.move ? " pill" : "") }, group);
  if (!b.move) rect.setAttribute("fill", b.op ? `var(--${n.out})` : "#f2f5f8");
  if (!b.move && !b.op) { // which part of its time goes to values of which placement
    const shares = {}, total = b.nodes.reduce((s, i) => s + nodes[i].us, 0) || 1;
    for (const i of b.nodes) if (!nodes[i].move) shares[nodes[i].out] = (shares[nodes[i].out] || 0) + nodes[i].us / total;
    let left = x + 1;
    for (const [kind, share] of Object.entries(shares)) {
      make("rect", { x: left, y: b.y + H - 7, width: Math.max(0, share * (b.w - 2)), height: 6, fill: `var(--${kind})`, "pointer-events": "none" }, group);
      left += share * (b.w - 2);
    }
  }
  make("text", { x: b.x, y: b.y + 18, "text-anchor": "middle" }, group, cut(b.label, 60));
  make("text", { x: b.x, y: b.y + 34, "text-anchor": "middle", class: "small" }, group, cut(under(b), 44));
  rect.addEventListener("mouseenter", () => about(b));
  rect.addEventListener("click", () => {
    if (b.region !== undefined) go({ region: b.region, module: null });
    else if (b.module !== undefined) go({ region: level.region, module: b.module });
    else about(b);
  });
}

function go(to) { level = to; drawGraph(); }

function drawPath() {
  const place = document.getElementById("path");
  place.textContent = "";
  make("a", {}, place, "model").addEventListener("click", () => go({ region: -1, module: null }));
  if (level.region >= 0) {
    make("span", {}, place, " \u203a ");
    make("a", {}, place, regions[level.region].name).addEventListener("click", () => go({ region: level.region, module: null }));
  }
  if (level.module !== null) make("span", {}, place, " \u203a " + level.module);
  const button = make("button", { class: views ? "on" : "" }, place, views ? "hide views" : "show views");
  button.addEventListener("click", () => { views = !views; drawGraph(); });
}

function about(b) {
  const place = document.getElementById("about"), n = nodes[b.nodes[0]];
  place.textContent = "";
  make("h3", {}, place, b.op || b.move ? (n.module ? n.module + ": " : "") + n.label : b.label);
  const list = make("dl", {}, place), say = (name, value) => { if (value) { make("dt", {}, list, name); make("dd", {}, list, value); } };
  if (!b.op && !b.move) {
    say("one forward pass on a rank", time(b.nodes.reduce((sum, i) => sum + nodes[i].us, 0)));
    const total = {};
    for (const i of b.nodes) for (const s of nodes[i].move ? sent(nodes[i].move) : []) {
      const key = s[0] + " " + s[1], old = total[key] || [0, 0, 0];
      total[key] = [old[0] + 1, old[1] + s[2], old[2] + s[3]];
    }
    for (const [key, [count, size, us]] of Object.entries(total)) say(key, `${count} \u00d7, ${bytes(size)}, ${time(us)}`);
    say("kept for backward, at most", bytes(b.nodes.reduce((sum, i) => sum + nodes[i].kept, 0)));
    make("p", { class: "told" }, place, "Click to look inside.");
    return;
  }
  say("style", n.style);
  say(b.move ? "transition" : "placements", n.placements);
  say("value", n.value);
  say("weight", n.weight);
  for (const m of [n.move, n.inner]) for (const s of m ? sent(m) : []) say(s[0] + " " + s[1], `${bytes(s[2])} sent by a rank, ${time(s[3])}`);
  if (!b.move) say("one forward pass on a rank", time(n.us) + (n.flops ? `, ${(n.flops / 1e9).toFixed(1)} GFLOP` : ""));
  if (n.kept) say("kept for backward, at most", bytes(n.kept));
  if (n.source) { make("dt", {}, list, "source"); make("dd", { class: "code" }, list, n.source); }
  for (const [name, texts] of [["why", n.why], ["instead", n.alternatives]]) if (texts.length) {
    make("dt", {}, place, name);
    const items = make("ul", {}, place);
    for (const text of texts) make("li", {}, items, text);
  }
}

// -- a step

let shown = -1; // index of the part that is drawn alone

function drawStep() {
  const place = document.getElementById("step"), parts = data.step.parts.filter((p) => p.us > 0);
  place.textContent = "";
  const bar = make("div", {}, place);
  const choose = (text, k) => make("button", { class: shown === k ? "on" : "" }, bar, text).addEventListener("click", () => { shown = k; drawStep(); });
  choose("all", -1);
  parts.forEach((p, k) => choose(titleOf(p), k));
  const drawn = shown < 0 ? parts : [parts[shown]], W = 1340, total = drawn.reduce((sum, p) => sum + p.us, 0) || 1;
  const svg = make("svg", { width: "100%", viewBox: `0 0 ${W} 128` }, place), lanes = { compute: 30, wait: 30, send: 66 };
  make("text", { x: 0, y: 24 + 20, class: "small" }, svg, "computes");
  make("text", { x: 0, y: 60 + 20, class: "small" }, svg, "sends");
  let x = 70;
  for (const p of drawn) {
    const scale = (W - 80) * p.us / total / p.us;
    make("rect", { x, y: 22, width: Math.max(0.5, p.us * scale), height: 84, fill: "#f6f8fa", stroke: "#dde3e8" }, svg);
    for (const [lane, node, start, us] of p.segments) {
      const n = nodes[node], left = x + Math.max(0, start - p.start) * scale;
      const fill = lane === "compute" ? `var(--${n ? n.out : "I"})` : `var(--${lane})`;
      const rect = make("rect", { x: left, y: lanes[lane], width: Math.max(0.4, us * scale), height: 30, fill, stroke: "#fff", "stroke-width": 0.3 }, svg);
      const name = n ? (n.module ? n.module + ": " : "") + n.label : node === -2 ? "optimizer" : "gradients of parameters that ranks hold whole";
      make("title", {}, rect, (lane === "wait" ? "waits for " : "") + name + ", " + time(us));
    }
    if (p.us * scale > 60) make("text", { x: x + 3, y: 120, class: "small" }, svg, cut(titleOf(p), Math.floor(p.us * scale / 6.4)) );
    if (p.us * scale > 60) make("text", { x: x + 3, y: 16, class: "small" }, svg, time(p.us));
    x += p.us * scale;
  }
}
const titleOf = (p) => p.region < 0 ? "gradients and optimizer" : p.direction + " " + regions[p.region].name + (p.times > 1 ? " \u00d7 " + p.times : "");

// -- memory over the step: what is held throughout, and what backward will read

function drawMemory() {
  const W = 1340, H = 220, place = document.getElementById("memory"), svg = make("svg", { width: "100%", viewBox: `0 0 ${W} ${H + 26}` }, place);
  const held = Object.entries(data.memory), base = held.reduce((sum, m) => sum + m[1], 0);
  const keeps = regions.map((r) => r.nodes.reduce((sum, i) => sum + nodes[i].kept, 0));
  const points = [[0, 0]];
  let t = 0, kept = 0;
  for (const p of data.step.parts) {
    for (let i = 0; i < p.times; i += Math.max(1, Math.floor(p.times / 200))) {
      const n = Math.min(Math.max(1, Math.floor(p.times / 200)), p.times - i);
      t += p.us * n;
      if (p.region >= 0) kept += (p.direction === "forward" ? 1 : -1) * keeps[p.region] * n;
      points.push([t, kept]);
    }
  }
  const most = Math.max(...points.map((p) => p[1])), top = Math.max(base + most, data.peak_bytes || 0) || 1;
  const X = (v) => 70 + (W - 320) * v / (t || 1), Y = (v) => H - (H - 16) * v / top;
  let low = 0;
  const colours = ["#6f8fb3", "#94b0cc", "#bccfe0"];
  held.forEach(([name, size], k) => {
    const rect = make("rect", { x: X(0), y: Y(low + size), width: X(t) - X(0), height: Math.max(0, Y(low) - Y(low + size)), fill: colours[k % 3] }, svg);
    make("title", {}, rect, name + ", " + bytes(size));
    make("text", { x: X(t) + 10, y: Math.min(H, Y(low + size / 2) + 4), class: "small" }, svg, name + " " + bytes(size));
    low += size;
  });
  if (most > 0) {
    const line = points.map((p) => X(p[0]) + "," + Y(base + p[1])).join(" ");
    const area = make("polygon", { points: `${X(0)},${Y(base)} ${line} ${X(t)},${Y(base)}`, fill: "#e6b566" }, svg);
    make("title", {}, area, "values kept for backward, at most " + bytes(most));
    make("text", { x: X(t) + 10, y: Y(base + most / 2) + 4, class: "small" }, svg, "kept for backward, at most " + bytes(most));
  }
  if (data.peak_bytes) {
    make("line", { x1: X(0), x2: X(t), y1: Y(data.peak_bytes), y2: Y(data.peak_bytes), stroke: "#d6453d", "stroke-dasharray": "6 4" }, svg);
    make("text", { x: X(t) + 10, y: Y(data.peak_bytes) - 3, class: "small" }, svg, "predicted peak " + bytes(data.peak_bytes));
  }
  make("text", { x: 0, y: 22, class: "small" }, svg, bytes(top));
  make("text", { x: X(0), y: H + 18, class: "small" }, svg, "start of the step");
  make("text", { x: X(t), y: H + 18, class: "small", "text-anchor": "end" }, svg, time(t));
}

// -- texts

function drawTexts() {
  const facts = document.getElementById("facts"), step = data.step;
  const all = Object.entries(data.header).concat(data.nodes.length ? [["step as scheduled below", time(step.total_us)],
    ["waiting for collectives", time(step.exposed_us) + " of " + time(step.send_us)]] : []);
  for (const [name, value] of all) { const d = make("div", {}, facts); make("dt", {}, d, name); make("dd", {}, d, String(value)); }
  const legend = document.getElementById("legend");
  for (const [kind, text] of Object.entries(KINDS)) {
    const span = make("span", {}, legend);
    make("i", { style: `background: var(--${kind})` }, span);
    span.appendChild(document.createTextNode(kind + ", " + text));
  }
  const place = document.getElementById("texts");
  for (const [title, columns, rows] of data.tables) if (rows.length) {
    make("h2", {}, place, title);
    const table = make("table", {}, place), head = make("tr", {}, table);
    for (const column of columns) make("th", {}, head, column);
    for (const row of rows) { const line = make("tr", {}, table); for (const value of row) make("td", {}, line, String(value)); }
  }
}

drawTexts();
if (nodes.length) { drawGraph(); drawStep(); drawMemory(); about(grouped()[0]); }
