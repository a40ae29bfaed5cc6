// Runs the script of a page without a browser: a document that keeps elements and listeners, and a few actions.
//   node page_dom.js page.html   -> JSON: what was drawn at each level
const fs = require("fs"), vm = require("vm");
const page = fs.readFileSync(process.argv[2], "utf8");
const [, json] = page.match(/<script type="application\/json" id="data">([\s\S]*?)<\/script>/);
const [, script] = page.match(/<script>([\s\S]*?)<\/script>/);
class Element {
  constructor(tag) { this.tag = tag; this.attributes = {}; this.children = []; this.listeners = {}; this.own = ""; }
  setAttribute(name, value) { if (/NaN|undefined/.test(String(value))) throw new Error(`${this.tag} ${name}=${value}`); this.attributes[name] = String(value); }
  appendChild(child) { this.children.push(child); return child; }
  addEventListener(name, run) { this.listeners[name] = run; }
  set textContent(text) { this.children = []; this.own = String(text); }
  get textContent() { return this.own + this.children.map((c) => c.textContent).join(" "); }
  all(tag, kind) { return this.children.flatMap((c) => [...(c.tag === tag && (!kind || (c.attributes.class || "").split(" ").includes(kind)) ? [c] : []), ...c.all(tag, kind)]); }
}
const ids = {};
const document = {
  getElementById: (id) => ids[id] ||= new Element("div"), createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag), createTextNode: (text) => { const t = new Element("#text"); t.own = text; return t; },
};
document.getElementById("data").textContent = json;
vm.runInNewContext(script, { document, console });
const rect = (r) => ["x", "y", "width", "height"].map((k) => Number(r.attributes[k]));
const drawn = () => ({ path: ids.path.textContent, boxes: ids.drawing.all("rect", "box").map(rect), edges: ids.drawing.all("path", "edge").length,
  pills: ids.drawing.all("rect", "pill").length, texts: ids.drawing.all("text").map((t) => t.textContent) });
const click = (found) => found.listeners.click();
const found = { levels: [drawn()], details: [], step: ids.step.all("rect").length, memory: ids.memory.textContent, texts: ids.texts.textContent, facts: ids.facts.textContent };
const regions = ids.drawing.all("rect", "box").length;
for (let r = 0; r < regions; r++) {
  click(ids.drawing.all("rect", "box")[r]);
  found.levels.push(drawn());
  for (const b of ids.drawing.all("rect", "box")) { b.listeners.mouseenter(); found.details.push(ids.about.textContent); }
  const boxes = ids.drawing.all("rect", "box").length;
  for (let b = 0; b < boxes; b++) {
    const before = ids.path.textContent;
    click(ids.drawing.all("rect", "box")[b]);
    if (ids.path.textContent === before) continue; // an op: nothing inside
    found.levels.push(drawn());
    for (const x of ids.drawing.all("rect", "box")) { x.listeners.mouseenter(); found.details.push(ids.about.textContent); }
    click(ids.path.all("button")[0]); // with views
    found.levels.push(drawn());
    click(ids.path.all("button")[0]);
    click(ids.path.all("a")[1]);
  }
  click(ids.path.all("a")[0]);
}
for (const button of ids.step.all("button")) click(button);
console.log(JSON.stringify(found));
