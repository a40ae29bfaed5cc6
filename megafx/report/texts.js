// -- texts

function drawTexts() {
  const step = data.step, card = (big, ...small) => {
    const box = make("div", {}, $("headline"));
    make("b", {}, box, big);
    for (const text of small) make("span", {}, box, text);
    return box;
  };
  if (nodes.length) {
    const share = 100 * step.compute_us / step.total_us, launched = 100 - 100 * step.exposed_us / step.total_us;
    const launches = step.host_us > 0.005 * step.total_us ? `, ${time(step.host_us)} for launches of kernels` : "";
    const box = card(time(step.total_us) + " a step", `${time(step.compute_us)} computing, ${time(step.exposed_us)} waiting for collectives${launches}`);
    make("i", { style: `background: linear-gradient(to right, var(--busy) ${share}%, var(--rule) ${share}% ${launched}%, var(--wait) ${launched}%)` }, box);
    card(bytes(peakOf(data.curve)) + " a rank", data.curve.predicted ? "predicted peak of memory" : "of memory, at most: parameters, gradients, AdamW, and what is kept for backward");
    const [count, size] = data.sent;
    card(bytes(size) + " sent", count ? `by a rank in ${plural(count, "collective")} a step, which take ${time(step.send_us)}` : "by a rank: no collectives");
    card((step.flops / step.total_us / 1e6).toFixed(0) + " TFLOP/s a rank", "in products and attention, over the whole step");
  }
  for (const [name, value] of Object.entries(data.header)) if (name !== "axis" && name !== "modelled step") { // both are shown above
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
    for (const row of rows) { const tr = make("tr", {}, table); row.forEach((value, k) => make("td", { "data-label": columns[k] || "" }, tr, line(String(value)))); }
  }
}
