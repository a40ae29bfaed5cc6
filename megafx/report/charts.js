// -- a step: all of it to scale, and below it one part in detail

const partName = (p) => p.region < 0 ? "optimizer" : `${p.direction}, ${regions[p.region].name}` + (p.times > 1 ? " \u00d7 " + p.times : "");
let shownPart = -1, turned = false; // which part is in detail, and whether a reader chose it

function drawStep() {
  const place = $("step"), parts = data.step.parts.filter((p) => p.us > 0), total = sum(parts, (p) => p.us * p.times) || 1;
  const focused = place.contains(document.activeElement), W = Math.max(280, place.clientWidth);
  place.textContent = "";
  if (shownPart < 0 || shownPart >= parts.length) shownPart = Math.max(0, parts.findIndex((p) => p.times > 1));
  const strip = make("svg", { width: W, height: 92, role: "group", "aria-label": `the whole step, ${time(total)}` }, place);
  let x = 0;
  parts.forEach((p, k) => {
    const width = W * p.us * p.times / total, wait = sum(p.segments.filter((s) => s[0] === "wait"), (s) => s[3]) / p.us;
    make("rect", { x, y: 20, width: Math.max(0.5, width - 1), height: 34 * (1 - wait), fill: "var(--busy)", "pointer-events": "none" }, strip);
    make("rect", { x, y: 20 + 34 * (1 - wait), width: Math.max(0.5, width - 1), height: 34 * wait, fill: "var(--wait)", "pointer-events": "none" }, strip);
    const rect = make("rect", { x, y: 20, width: Math.max(1, width - 1), height: 34, fill: "transparent", class: "whole" + (k === shownPart ? " on" : "") }, strip);
    const all = time(p.us * p.times), label = `${p.region < 0 ? "gradients of parameters that ranks hold whole, and the optimizer" : partName(p)}: ${all}, of which ${time(wait * p.us * p.times)} waiting`;
    button(rect, label, () => turn(k));
    tip(rect, label + ". Click for detail.");
    make("text", { x: x + 3, y: 14, class: "small" }, strip, [`${all}: ${partName(p)}`, `${all}: ${p.direction}`, all].find((text) => widthOf(text, "11px") < width - 4) || "");
    x += width;
  });
  const p = parts[shownPart], scale = W / p.us, before = sum(parts.slice(0, shownPart), (q) => q.us * q.times), from = before / total * W;
  make("polygon", { points: `${from},56 ${from + W * p.us * p.times / total},56 ${W},92 0,92`, fill: "var(--beam)" }, strip);
  const waits = sum(p.segments.filter((s) => s[0] === "wait"), (s) => s[3]), bar = make("div", { class: "turn" }, place);
  const launches = p.us - waits - sum(p.segments.filter((s) => s[0] === "compute"), (s) => s[3]);
  make("h3", {}, bar, (p.times > 1 ? `One of ${p.times}: ` : "") + `${partName({ ...p, times: 1 })}, ${time(p.us)}, of which ${time(waits)} waiting` + (launches > 0.01 * p.us ? `, ${time(launches)} for launches of kernels (gaps)` : ""));
  for (const [text, name, by] of [["\u2039 before", "the part before", -1], ["next \u203a", "the next part", 1]])
    make("button", { type: "button", "aria-label": name }, bar, text).addEventListener("click", () => turn(shownPart + by));
  const svg = make("svg", { width: W, height: 168, role: "img", "aria-label": `one part of the step in detail: ${partName(p)}` }, place);
  for (const [text, y] of [["device: computes, waits", 14], ["link: collectives", 78]]) {
    make("rect", { x: 0, y: y + 6, width: W, height: 42, fill: "var(--frame)" }, svg);
    make("text", { x: 0, y, class: "small" }, svg, text);
  }
  for (const [lane, node, start, us, collective, size] of p.segments) {
    const n = nodes[node], left = Math.max(0, start - p.start) * scale, wide = Math.max(0.4, us * scale), y = lane === "send" ? 84 : 20;
    const fill = lane === "compute" ? `var(--${n ? n.out : "I"})` : `var(--${lane})`, inside = Math.max(0, start - p.start);
    const where = n ? n.module : node === -2 ? "" : "gradients of parameters that ranks hold whole";
    const name = collective ? (where ? where + ": " : "") + collective : n ? nameOf(n) : node === -2 ? "optimizer" : where;
    const label = lane === "compute" ? (n && n.has_weight ? n.module.split(".").pop() : n ? n.label : name) : lane === "wait" ? "waits" : collective;
    const rect = make("rect", { x: left, y, width: wide, height: 42, fill, stroke: "var(--paper)", "stroke-width": wide > 2 ? 0.8 : 0, class: n ? "runs" : "" }, svg);
    tip(rect, [(lane === "wait" ? "waits for " : "") + name,
      `start: ${time(before + inside)} into the step` + (p.times > 1 ? `, in the first of ${p.times}` : "") + ` (${time(inside)} into this part)`,
      `duration: ${time(us)}`,
      size ? `bytes: ${bytes(size)} sent by a rank` : n && n.value ? `result: ${n.value}` : "",
      `stream: ${lane === "send" ? "the link, beside what is computed" : "the device"}`].filter(Boolean).join("\n"));
    if (n) rect.addEventListener("click", () => { reveal(node); $("graph").scrollIntoView({ block: "nearest" }); });
    for (const [text, at] of [[label, y + 18], [time(us), y + 33]]) make("text", { x: left + 4, y: at, class: "in" + (lane === "wait" ? " white" : "") }, svg, fit(text, wide - 8));
  }
  const ticks = W < 600 ? 3 : 5;
  for (let k = 0; k <= ticks; k++) {
    const at = W * k / ticks;
    make("line", { x1: at, x2: at, y1: 134, y2: 140, class: "tick" }, svg);
    make("text", { x: at, y: 154, class: "small", "text-anchor": k === 0 ? "start" : k === ticks ? "end" : "middle" }, svg, k ? time(p.us * k / ticks) : "0");
  }
  if (focused) strip.querySelector(".on").focus({ preventScroll: true });
}

function turn(k) { // to another part of the step
  const count = data.step.parts.filter((p) => p.us > 0).length;
  shownPart = Math.min(Math.max(k, 0), count - 1), turned = true;
  drawStep();
  keepLink();
}

// -- memory over the step

const COLOURS = { "kept for backward": "--k0", "kept for backward, at most": "--k0", gradients: "--k1", "working memory": "--k2" };
const peakOf = (curve) => sum(Object.values(curve.held), (v) => v) + Math.max(...curve.points.map((p) => sum(p.slice(1), (v) => v)));

function drawMemory() {
  const place = $("memory"), curve = data.curve, W = Math.max(280, place.clientWidth), H = 250, L = 66, held = Object.entries(curve.held);
  $("memory_of").textContent = curve.predicted
    ? "What the compiled graphs hold, node by node, at the times of the cost model; parameters and optimizer state are there throughout."
    : "By the plan: parameters and gradients follow from it, and moments are those of AdamW in the parameters' dtype. What is kept for backward is at most this, since fused ops compute some of it again; what ops take while they run is not in it. With --predict-memory, or of a parallelized model, it is what the compiled graphs hold.";
  place.textContent = "";
  const points = curve.points, end = points[points.length - 1][0] || 1, top = peakOf(curve) || 1, legend = make("div", { class: "legend" }, place);
  const svg = make("svg", { width: W, height: H + 28, role: "img", "aria-label": `memory over the step; the peak is ${bytes(top)}` }, place);
  const X = (t) => L + (W - L) * t / end, Y = (v) => H - (H - 22) * v / top;
  for (let k = 0; k <= 4; k++) {
    make("line", { x1: L, x2: W, y1: Y(top * k / 4), y2: Y(top * k / 4), class: "grid" }, svg);
    make("text", { x: L - 8, y: Y(top * k / 4) + 4, "text-anchor": "end", class: "small" }, svg, k ? bytes(top * k / 4) : "0");
  }
  const low = points.map(() => 0), band = (name, size, colour, text) => {
    let d = "", back = "";
    points.forEach((p, i) => { // from this time until the next one
      const x = X(p[0]), next = X(i + 1 < points.length ? points[i + 1][0] : end), value = low[i] + size(p);
      d += `${d ? "L" : "M"}${x.toFixed(1)} ${Y(value).toFixed(1)}H${next.toFixed(1)}`;
      back = `L${next.toFixed(1)} ${Y(low[i]).toFixed(1)}H${x.toFixed(1)}` + back;
      low[i] = value;
    });
    make("path", { d: d + back + "Z", fill: `var(${colour})`, class: "band" }, svg);
    const span = make("span", {}, legend);
    make("i", { style: `background: var(${colour})` }, span);
    span.appendChild(document.createTextNode(`${name} ${text}`));
  };
  held.forEach(([name, size], k) => band(name, () => size, `--h${k % 4}`, bytes(size)));
  curve.kinds.forEach((name, k) => {
    const most = Math.max(...points.map((p) => p[k + 1]));
    if (most) band(name, (p) => p[k + 1], COLOURS[name], (name.endsWith("most") ? "" : "up to ") + bytes(most));
  });
  const peak = points[low.indexOf(Math.max(...low))];
  make("line", { x1: L, x2: W, y1: Y(top), y2: Y(top), class: "mark" }, svg);
  const at = X(peak[0]), left = at > (L + W) / 2;
  make("text", { x: left ? at - 6 : at + 6, y: Y(top) - 6, "text-anchor": left ? "end" : "start", class: "name" }, svg, `peak ${bytes(top)}`);
  const ends = [];
  for (const [, direction, start] of data.runs) if (!ends.length || ends[ends.length - 1][0] !== direction) ends.push([direction, start]);
  ends.forEach(([name, start], k) => {
    const to = k + 1 < ends.length ? ends[k + 1][1] : end, wide = X(to) - X(start) - 4;
    if (k) make("line", { x1: X(start), x2: X(start), y1: 10, y2: H, class: "tick", "stroke-dasharray": "2 4" }, svg);
    make("text", { x: (X(start) + X(to)) / 2, y: H + 18, "text-anchor": "middle", class: "small" }, svg, fit(`${name}, ${time(to - start)}`, wide) || fit(name, wide));
  });
  const mark = make("line", { y1: 10, y2: H, class: "tick", visibility: "hidden" }, svg);
  const all = make("rect", { x: L, y: 0, width: W - L, height: H, fill: "transparent" }, svg);
  tip(all, (event) => {
    const t = Math.min(end, Math.max(0, (event.clientX - svg.getBoundingClientRect().left - L) / (W - L) * end));
    const last = (list, of) => list.reduce((found, item, i) => of(item) <= t ? i : found, 0), i = last(points, (p) => p[0]), run = data.runs[last(data.runs, (r) => r[2])];
    for (const name of ["x1", "x2"]) mark.setAttribute(name, X(t));
    mark.setAttribute("visibility", "visible");
    const kinds = [...held, ...curve.kinds.map((name, k) => [name, points[i][k + 1]])].reverse();
    return [`${time(t)} into the step: ${run[1] === "optimizer" ? "" : run[1] + ", "}${run[0]}`, `in all ${bytes(sum(kinds, (k) => k[1]))}`, ...kinds.filter((k) => k[1]).map(([name, size]) => `${name} ${bytes(size)}`)].join("\n");
  });
  all.addEventListener("mouseleave", () => mark.setAttribute("visibility", "hidden"));
}

// -- measured times beside modelled ones, by megafx.profile

function fullName(region, module) {
  return [regions[region].layer ? regions[region].name : "", module || ""].filter(Boolean).join(".") || "<root>";
}

function measuredOf(b) { // [what, times] of a box, for its details
  const n = nodes[b.nodes[0]], whole = b.module === undefined && !b.op && !b.move && !regions[n.region].layer;
  const name = b.op || b.move ? fullName(n.region, n.module) : fullName(n.region, b.module ?? level.module), alone = b.op || b.move, found = [];
  if (whole) return found;
  for (const direction of ["forward", "backward"]) {
    const own = data.measured.filter((m) => m.direction === direction && (m.module === name || (!alone && m.module.startsWith(name + "."))));
    const times = regions[n.region].times, of = times > 1 ? ` of all ${times}` : "";
    if (own.length) found.push([`measured ${direction}, ${alone ? "its module" : "it"}${of}`, `${time(sum(own, (m) => m.us))} (modelled ${time(sum(own, (m) => m.modelled_us))})`]);
  }
  return found;
}

function drawMeasured() {
  if (!data.measured.length) return;
  const place = $("measured"), table = make("table", {}, place), head = make("tr", {}, table), most = Math.max(...data.measured.map((m) => Math.max(m.us, m.modelled_us))) || 1;
  place.hidden = false;
  const columns = ["direction", "module", "measured", "modelled", "its collectives, modelled", "measured : modelled", "blue measured, yellow modelled"];
  for (const column of columns) make("th", {}, head, column);
  for (const m of data.measured) {
    const row = make("tr", {}, table), cells = [m.direction, m.module, time(m.us), time(m.modelled_us), m.collectives_us ? time(m.collectives_us) : "", m.modelled_us ? (m.us / m.modelled_us).toFixed(2) : ""];
    cells.forEach((text, k) => make("td", { "data-label": columns[k], ...(k > 1 ? { class: "number" } : {}) }, row, text));
    const bars = make("td", { class: "bars", "aria-hidden": "true" }, row);
    for (const us of [m.us, m.modelled_us]) make("i", { style: `width: ${Math.max(0.3, 100 * us / most)}%` }, bars);
  }
}
