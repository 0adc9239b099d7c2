// SPDX-License-Identifier: Apache-2.0
//
// The live page: asks /state once a second and shows it. Whatever comes from there gets
// into the page as text only.
"use strict";

const seconds = 300; // that the charts show
const series = 6;    // that have a colour

// make returns an element with attributes and children; text is text.
function make(name, attributes, ...children) {
  const svg = /^(svg|g|rect|line|path|text|title)$/.test(name);
  const e = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [k, v] of Object.entries(attributes || {})) {
    e.setAttribute(k, v);
  }
  e.append(...children);
  return e;
}

function byId(id) {
  return document.getElementById(id);
}

// setText leaves alone what is so already: a reader of the screen would say it again.
function setText(e, text) {
  if (e.textContent !== text) {
    e.textContent = text;
  }
}

// short shortens a name to about so many pixels.
function short(name, width) {
  const n = Math.max(3, Math.floor(width / 7.6));
  const all = Array.from(name);
  return all.length <= n ? name : all.slice(0, n - 1).join("") + "…";
}

// count writes a number with three digits.
function count(n) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (n >= size) {
      const d = n / (unit === "k" ? 1e3 : size);
      return (d >= 100 ? d.toFixed(0) : d >= 10 ? d.toFixed(1) : d.toFixed(2)) + " " + unit;
    }
  }
  return Number.isInteger(n) ? String(n) : n >= 100 ? n.toFixed(0) : n.toFixed(1);
}

function duration(ns) {
  if (ns <= 0) {
    return "–";
  }
  for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]) {
    if (ns >= size) {
      return (ns / size >= 100 ? (ns / size).toFixed(0) : (ns / size).toFixed(1)) + " " + unit;
    }
  }
  return ns.toFixed(0) + " ns";
}

function percent(n) {
  return n.toFixed(0) + " %";
}

function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}

function since(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  const d = Math.floor(s / 86400), h = Math.floor(s / 3600) % 24, m = Math.floor(s / 60) % 60;
  return d > 0 ? `${d} d ${h} h` : h > 0 ? `${h} h ${m} min` : m > 0 ? `${m} min ${s % 60} s` : `${s} s`;
}

// inKernel says if XDP runs a context's handlers, and not HPUs.
function inKernel(c) {
  return c.tier === "kernel";
}

function plural(n, word) {
  return `${n} ${word}${n === 1 ? "" : "s"}`;
}

// A Chart is a figure with a legend that tells the newest values, or those at the cursor,
// which arrow keys and the pointer move; and all of it as a table.
class Chart {
  constructor(title, format, drawing) {
    this.format = format;
    this.cursor = -1; // index of a time, -1: the newest
    this.times = [];
    this.series = [];
    this.drawing = drawing;
    this.legend = make("div", {class: "legend"});
    this.legend.setAttribute("aria-live", "off");
    this.table = make("tbody");
    this.head = make("tr");
    this.details = make("details", {}, make("summary", {}, "Table"),
      make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": title + ", table"}, make("table", {}, make("thead", {}, this.head), this.table)));
    this.figure = make("figure", {class: "chart"}, make("figcaption", {}, make("h3", {}, title)), this.legend, drawing, this.details);
    this.title = title;
    drawing.setAttribute("tabindex", "0");
    drawing.setAttribute("role", "img");
    drawing.addEventListener("keydown", (e) => this.key(e));
    drawing.addEventListener("blur", () => this.move(-1));
    drawing.addEventListener("pointermove", (e) => this.point(e));
    drawing.addEventListener("pointerleave", () => this.move(-1));
    this.details.addEventListener("toggle", () => this.tabulate());
  }

  key(e) {
    const last = this.times.length - 1;
    const at = this.cursor < 0 ? last : this.cursor;
    const to = {ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last, Escape: -1}[e.key];
    if (to !== undefined && last >= 0) {
      e.preventDefault();
      this.legend.setAttribute("aria-live", "polite");
      this.move(to);
    }
  }

  point(e) {
    const box = this.drawing.getBoundingClientRect();
    const t = this.end() - (1 - (e.clientX - box.left - this.left()) / (box.width - this.left())) * seconds * 1000;
    let best = -1;
    for (let i = 0; i < this.times.length; i++) {
      if (best < 0 || Math.abs(this.times[i] - t) < Math.abs(this.times[best] - t)) {
        best = i;
      }
    }
    this.legend.setAttribute("aria-live", "off");
    this.move(best);
  }

  move(to) {
    this.cursor = to;
    this.draw();
  }

  left() {
    return 0;
  }

  end() {
    return this.times.length ? this.times[this.times.length - 1] : 0;
  }

  // update has the chart show values, a list for each of series, at times.
  update(times, list) {
    if (this.cursor >= 0) {
      // It stays where it is in time.
      const t = this.times[this.cursor];
      this.cursor = times.findIndex((x) => x >= t);
    }
    this.times = times;
    this.series = list;
    this.draw();
    this.tabulate();
  }

  // told are the series of the legend.
  told() {
    return this.series;
  }

  draw() {
    const at = this.cursor < 0 ? this.times.length - 1 : this.cursor;
    const parts = this.told().map((s, i) => make("span", {}, this.key_(i), s.name + " ", make("b", {}, at < 0 ? "–" : this.format(s.values[at] || 0))));
    if (this.cursor >= 0 && at >= 0) {
      parts.unshift(make("span", {}, make("b", {}, clock(this.times[at]))));
    }
    this.legend.replaceChildren(...parts);
    this.drawing.setAttribute("aria-label", `${this.title}, last five minutes. ` +
      this.told().map((s) => `${s.name}: now ${at < 0 ? "nothing" : this.format(s.values[this.times.length - 1] || 0)}, at most ${this.format(s.values.reduce((a, b) => Math.max(a, b), 0))}`).join("; ") +
      ". Arrow keys move a cursor.");
  }

  key_(i) {
    return make("svg", {viewBox: "0 0 22 8", "aria-hidden": "true"}, make("line", {x1: 0, y1: 4, x2: 22, y2: 4, class: `line s${i % series}`}));
  }

  // tabulate writes means of ten seconds, newest first.
  tabulate() {
    if (!this.details.open) {
      return;
    }
    this.head.replaceChildren(make("th", {scope: "col"}, "10 s to"), ...this.series.map((s) => make("th", {scope: "col", class: "number"}, s.name)));
    const rows = [];
    for (let to = this.times.length; to > 0; to -= 10) {
      const from = Math.max(0, to - 10);
      rows.push(make("tr", {}, make("th", {scope: "row"}, clock(this.times[to - 1])),
        ...this.series.map((s) => make("td", {class: "number"}, this.format(s.values.slice(from, to).reduce((a, b) => a + b, 0) / (to - from))))));
    }
    this.table.replaceChildren(...rows);
  }
}

// A LineChart draws lines over time; log: on a scale of powers of ten, without zeros.
class LineChart extends Chart {
  constructor(title, format, log) {
    super(title, format, make("svg", {height: 150}));
    this.log = log;
  }

  // scale returns the values that the axis names.
  scale() {
    let most = 0, least = Infinity;
    for (const s of this.series) {
      for (const v of s.values) {
        most = Math.max(most, v);
        least = v > 0 ? Math.min(least, v) : least;
      }
    }
    if (this.log) {
      const from = most > 0 ? Math.floor(Math.log10(least)) : 3, to = most > 0 ? Math.max(from + 1, Math.ceil(Math.log10(most))) : 6;
      return Array.from({length: to - from + 1}, (_, i) => Math.pow(10, from + i));
    }
    const size = Math.max(1, Math.pow(10, Math.floor(Math.log10(Math.max(most, 1) / 3))));
    const step = [1, 2, 5, 10].map((f) => f * size).find((f) => f * 3 >= most);
    return [0, step, 2 * step, 3 * step];
  }

  left() {
    return 52;
  }

  draw() {
    super.draw();
    const svg = this.drawing, height = 150, bottom = height - 18, top = 8, left = this.left();
    const width = Math.max(120, svg.clientWidth || 360);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const ticks = this.scale();
    const limit = ticks[ticks.length - 1], floor = ticks[0];
    const x = (t) => width - 4 - (this.end() - t) / (seconds * 1000) * (width - left - 4);
    const y = (v) => bottom - (this.log ? Math.log(v / floor) / Math.log(limit / floor) : v / limit) * (bottom - top);
    const parts = [];
    for (const v of ticks) {
      parts.push(make("line", {x1: left, x2: width, y1: y(v), y2: y(v), class: v === floor ? "axis" : "grid"}));
      parts.push(make("text", {x: left - 6, y: y(v) + 4, "text-anchor": "end", class: "soft"}, v === 0 ? "0" : this.format(v).replace(".0 ", " ")));
    }
    for (const [s, word] of [[300, "5 min ago"], [180, "3 min"], [60, "1 min"], [0, "now"]]) {
      parts.push(make("text", {x: x(this.end() - s * 1000), y: height - 4, "text-anchor": s === 300 ? "start" : s === 0 ? "end" : "middle", class: "soft"}, word));
    }
    this.series.forEach((s, i) => {
      let d = "", fill = "", start = 0;
      const shut = (at) => (fill += `L${x(this.times[at]).toFixed(1)},${bottom}L${x(this.times[start]).toFixed(1)},${bottom}Z`);
      let before = -1;
      for (let k = 0; k < this.times.length; k++) {
        const v = s.values[k] || 0;
        if (this.log && v <= 0) {
          continue; // there was nothing to measure
        }
        // Where nothing was told for some seconds there is no line.
        const gap = before < 0 || this.times[k] - this.times[before] > 5000;
        if (gap && before >= 0) {
          shut(before);
        }
        const p = `${gap ? "M" : "L"}${x(this.times[k]).toFixed(1)},${y(v).toFixed(1)}`;
        d += gap ? p + "h1.5" : p; // also a single point is seen
        fill += p;
        start = gap ? k : start;
        before = k;
      }
      if (d) {
        shut(before);
        parts.push(...(this.log ? [] : [make("path", {d: fill, class: `area s${i % series}`})]), make("path", {d, class: `line s${i % series}`}));
      }
    });
    if (this.cursor >= 0) {
      const at = x(this.times[this.cursor]);
      parts.push(make("line", {x1: at, x2: at, y1: top, y2: bottom, class: "cursor"}));
    }
    svg.replaceChildren(...parts);
  }
}

// A HeatChart draws a strip for each series: the fuller, the busier.
class HeatChart extends Chart {
  constructor(title, format) {
    super(title, format, make("canvas"));
    this.drawing.after(make("div", {class: "labels", "aria-hidden": "true"}, make("span", {}, "5 min ago"), make("span", {}, "now")));
  }

  key_() {
    return "";
  }

  // Of many, the legend tells the mean and the busiest.
  told() {
    if (this.series.length <= 8) {
      return super.told();
    }
    const sum = this.times.map((_, k) => this.series.reduce((a, s) => a + (s.values[k] || 0), 0) / this.series.length);
    const most = this.times.map((_, k) => this.series.reduce((a, s) => Math.max(a, s.values[k] || 0), 0));
    return [{name: `mean of ${this.series.length}`, values: sum}, {name: "busiest", values: most}];
  }

  draw() {
    super.draw();
    const canvas = this.drawing, n = Math.max(1, this.series.length);
    const row = Math.max(3, Math.min(33, Math.floor(132 / n)));
    const scale = window.devicePixelRatio || 1;
    const width = Math.max(120, canvas.clientWidth || 360), height = row * n;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = height + "px";
    const style = getComputedStyle(canvas);
    const g = canvas.getContext("2d");
    g.scale(scale, scale);
    const x = (t) => width - (this.end() - t) / (seconds * 1000) * width;
    const one = width / seconds;
    g.fillStyle = style.getPropertyValue("--s0");
    this.series.forEach((s, i) => {
      for (let k = 0; k < this.times.length; k++) {
        const v = Math.min(100, s.values[k] || 0);
        if (v > 0) {
          // Colour and height say the same.
          const h = Math.max(1, (row - 2) * v / 100);
          g.globalAlpha = 0.45 + v / 182;
          g.fillRect(x(this.times[k]) - one, (i + 1) * row - 1 - h, one + 0.3, h);
        }
      }
    });
    g.globalAlpha = 1;
    g.font = "10px sans-serif";
    for (let i = 0; i < n; i++) {
      g.fillStyle = style.getPropertyValue("--rule");
      g.fillRect(0, i * row - 0.5, i > 0 && row > 5 ? width : 0, 1);
      if (row >= 12 && this.series[i]) {
        g.fillStyle = style.getPropertyValue("--soft");
        g.fillText(this.series[i].name, 4, i * row + row / 2 + 3.5);
      }
    }
    if (this.cursor >= 0) {
      g.fillStyle = style.getPropertyValue("--soft");
      g.fillRect(x(this.times[this.cursor]), 0, 1, height);
    }
  }
}

// A Picture shows a NIC: what its parts are, and what flows through them. It is drawn anew
// when the parts change, else only its figures do.
class Picture {
  constructor() {
    this.svg = make("svg", {role: "img"});
    this.figure = make("figure", {class: "picture"}, this.svg);
    this.signature = "";
    this.parts = {};
  }

  update(nic, contexts, rates) {
    const width = Math.max(280, this.svg.clientWidth || 900);
    const signature = JSON.stringify([width, nic.queues, nic.hpus.length, contexts.map((c) => [c.name, c.tier, c.handler, c.windows, c.queue, c.attached.map((a) => [a.pid, a.observer])])]);
    if (signature !== this.signature) {
      this.signature = signature;
      this.build(width, nic, contexts);
    }
    this.figures(nic, contexts, rates);
  }

  box(x, y, w, h, title, sub, key) {
    const g = make("g");
    const rect = make("rect", {x, y, width: w, height: h, rx: 6, class: "box"});
    const head = make("text", {x: x + 10, y: y + (sub === null ? h / 2 + 4 : 19), class: "strong"}, short(title, w - 20));
    g.append(make("title", {}, title), rect, head);
    const text = make("text", {x: x + 10, y: y + 36, class: "soft"}, sub || "");
    if (sub !== null) {
      g.append(text);
    }
    this.parts[key] = {rect, text, head, width: w};
    this.all.push(g);
  }

  wire(d, kind, key, labelX, labelY, anchor) {
    const path = make("path", {d, class: "wire"});
    const text = make("text", {x: labelX, y: labelY, class: "soft", "text-anchor": anchor || "middle"}, "");
    this.wires.push(path, text);
    this.parts[key] = {path, text, kind};
  }

  build(width, nic, contexts) {
    this.all = [];
    this.wires = [];
    this.parts = {};
    // Those in the kernel come last: their wire goes past the HPUs, on the far side.
    const some = contexts.slice(0, 12);
    this.shown = [...some.filter((c) => !inKernel(c)), ...some.filter(inKernel)];
    const more = contexts.length - this.shown.length;
    const height = width >= 760 ? this.wide(width, nic) : this.narrow(width, nic);
    if (more > 0) {
      this.all.push(make("text", {x: width - 10, y: height + 12, "text-anchor": "end", class: "soft"}, `and ${plural(more, "context")} more, in the table below`));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height + (more > 0 ? 20 : 0)}`);
    this.svg.replaceChildren(...this.wires, ...this.all);
  }

  // hpus draws a panel with a cell for each HPU, and returns its height.
  hpus(x, y, w, n) {
    const columns = Math.max(1, Math.min(n, Math.floor((w - 12) / 32)));
    const size = Math.min(44, (w - 12) / columns);
    const rows = Math.ceil(n / columns), h = 30 + rows * size + 6;
    const left = x + (w - columns * size) / 2;
    this.all.push(make("rect", {x, y, width: w, height: h, rx: 6, class: "panel"}));
    const head = make("text", {x: x + 10, y: y + 20, class: "strong"}, plural(n, "HPU"));
    const busy = make("text", {x: x + w - 10, y: y + 20, "text-anchor": "end", class: "soft"}, "");
    this.all.push(head, busy);
    this.parts.hpus = {busy, cells: []};
    for (let i = 0; i < n; i++) {
      const cx = left + (i % columns) * size + 2, cy = y + 30 + Math.floor(i / columns) * size + 2, s = size - 4;
      const fill = make("rect", {x: cx, y: cy + s, width: s, height: 0, class: "fill"});
      const title = make("title", {}, `HPU ${i}`);
      this.all.push(make("g", {}, title, make("rect", {x: cx, y: cy, width: s, height: s, rx: 3, class: "cell"}), fill,
        make("text", {x: cx + s / 2, y: cy + s / 2 + 4, "text-anchor": "middle", class: "small"}, String(i))));
      this.parts.hpus.cells.push({fill, title, top: cy, size: s});
    }
    return h;
  }

  context(c, x, y, w, h) {
    this.box(x, y, w, h, c.name, "", "context " + c.name);
    if (inKernel(c)) {
      return; // it has no credit
    }
    const m = {x: x + 10, y: y + h - 10, width: w - 20, height: 4, rx: 2};
    const meter = make("rect", {...m, width: 0, class: "meter"});
    this.all.push(make("rect", {...m, class: "track"}), meter);
    Object.assign(this.parts["context " + c.name], {meter, full: w - 20});
  }

  // wide goes from the left to the right.
  wide(width, nic) {
    const gap = Math.min(74, width * 0.066), inner = width - 4 * gap - 2;
    const w = [0.13, 0.19, 0.17, 0.22, 0.29].map((f) => f * inner);
    const x = [1];
    for (let i = 0; i < 4; i++) {
      x.push(x[i] + w[i] + gap);
    }
    const pitch = 66, list = this.shown, tall = Math.max(230, list.length * pitch - 12, 80 + Math.ceil(nic.hpus.length / Math.max(1, Math.floor((w[2] - 12) / 30))) * 44);
    const mid = tall / 2 + 4;
    const hpuHeight = this.hpus(x[2], 0, w[2], nic.hpus.length);
    // Now that its height is known, to the middle.
    const panel = this.all.splice(0);
    this.all.push(make("g", {transform: `translate(0 ${mid - hpuHeight / 2})`}, ...panel));
    this.box(x[0], mid - 24, w[0], 48, nic.name.split("/").pop(), "", "wire");
    this.box(x[1], mid - 24, w[1], 48, "XDP program", "match, credit, HPU", "program");
    this.box(x[1], 4, w[1], 48, "Linux stack", "", "linux");
    this.box(x[1], tall - 44, w[1], 48, "dropped", "", "dropped");
    const middle = x[1] + w[1] / 2;
    this.wire(`M${x[0] + w[0]},${mid}H${x[1]}`, "hpus", "in", x[0] + w[0] + gap / 2, mid - 8);
    this.wire(`M${middle},${mid - 24}V52`, "linux", "to linux", middle + 8, (mid + 28) / 2 + 4, "start");
    this.wire(`M${middle},${mid + 24}V${tall - 44}`, "dropped", "to dropped", middle + 8, (mid + tall - 20) / 2 + 4, "start");
    this.wire(`M${x[1] + w[1]},${mid}H${x[2]}`, "hpus", "to hpus", x[1] + w[1] + gap / 2, mid - 8);
    const below = mid + hpuHeight / 2 + 18; // the HPUs, which the frames of handlers in the kernel do not see
    if (list.some(inKernel)) {
      const from = x[1] + w[1];
      this.wire(`M${from},${mid + 10}C${from + gap * 0.5},${mid + 10} ${from + gap * 0.5},${below} ${x[2]},${below}H${x[2] + w[2]}`,
        "kernel", "to kernel", x[2] + w[2] / 2, below - 5);
    }
    const first = mid - (list.length * pitch - 12) / 2;
    list.forEach((c, i) => {
      const y = first + i * pitch, at = y + 27, from = x[2] + w[2], out = inKernel(c) ? below : mid, kind = inKernel(c) ? "kernel" : "hpus";
      this.context(c, x[3], y, w[3], 54);
      this.wire(`M${from},${out}C${from + gap * 0.6},${out} ${x[3] - gap * 0.6},${at} ${x[3]},${at}`, kind, "into " + c.name, 0, 0);
      const items = this.items(c), each = (w[4] - (items.length - 1) * 8) / Math.max(1, items.length);
      items.forEach((item, k) => {
        const ix = x[4] + k * (each + 8);
        this.item(item, ix, y + 3, each, 48);
      });
      if (items.length > 0) {
        this.wire(`M${x[3] + w[3]},${at}H${x[4]}`, "hpus", "on " + c.name, 0, 0);
      }
    });
    if (list.length === 0) {
      this.all.push(make("text", {x: x[3], y: mid + 4, class: "soft"}, "no context"));
    }
    return tall + 8;
  }

  // items are what stands beside a context: windows and applications.
  items(c) {
    const more = c.windows.length > 1 ? ` and ${c.windows.length - 1} more` : "";
    const all = c.windows.slice(0, 1).map((v) => ({title: v.name, sub: (v.size ? `window, ${v.size}` : "shared window") + more, cls: ""}));
    if (c.queue || c.windows.length > 0 || c.attached.length > 0) {
      const app = c.attached.find((a) => !a.observer);
      const observers = c.attached.length - (app ? 1 : 0);
      const watch = observers > 0 ? plural(observers, "observer") : "";
      all.push(app ? {title: `process ${app.pid}`, sub: watch || `user ${app.uid}`, cls: ""} : {title: "no process", sub: watch, cls: "none"});
    }
    return all;
  }

  item(item, x, y, w, h) {
    const key = "item " + this.all.length;
    this.box(x, y, w, h, item.title, short(item.sub, (w - 16) * 1.15), key);
    this.parts[key].rect.setAttribute("class", "box " + (item.cls || "quiet"));
  }

  // narrow goes from the top to the bottom.
  narrow(width, nic) {
    const third = (width - 24) / 3, half = width / 2;
    this.box(1, 1, width - 2, 48, nic.name.split("/").pop(), "", "wire");
    this.wire(`M${half},49V75`, "hpus", "in", half + 8, 66, "start");
    this.box(third + 12, 75, third, 48, "XDP", "", "program");
    this.box(1, 75, third - 12, 48, "Linux", "", "linux");
    this.box(width - third + 11, 75, third - 12, 48, "dropped", "", "dropped");
    this.wire(`M${third + 12},99H${third - 11}`, "linux", "to linux", 0, 0);
    this.wire(`M${2 * third + 12},99H${width - third + 11}`, "dropped", "to dropped", 0, 0);
    // On the right, past the HPUs, a lane to the contexts in the kernel.
    const lane = this.shown.some(inKernel) ? width - 6 : 0, inner = lane ? width - 18 : width - 2, top = lane ? 158 : 149;
    this.wire(`M${half},123V${top}`, "hpus", "to hpus", half + (lane ? -8 : 8), lane ? 145 : 140, lane ? "end" : "start");
    let y = top + this.shift(top, () => this.hpus(1, 0, inner, nic.hpus.length)), last = 0;
    for (const c of this.shown) {
      if (!inKernel(c)) {
        this.wire(`M${half},${y}V${y + 20}`, "hpus", "into " + c.name, 0, 0);
      } else if (last) {
        this.wire(`M${lane},${last}V${y + 47}H${1 + inner}`, "kernel", "into " + c.name, 0, 0);
      } else {
        this.wire(`M${2 * third + 6},123V136H${lane}V${y + 47}`, "kernel", "to kernel", lane - 8, 152, "end");
        this.wire(`M${lane},${y + 47}H${1 + inner}`, "kernel", "into " + c.name, 0, 0);
      }
      y += 20;
      last = inKernel(c) ? y + 27 : 0;
      this.context(c, 1, y, inner, 54);
      y += 54;
      const items = this.items(c);
      if (items.length > 0) {
        const each = (inner - (items.length - 1) * 6) / items.length;
        items.forEach((item, k) => this.item(item, 1 + k * (each + 6), y + 6, each, 44));
        y += 50;
      }
    }
    return y + 2;
  }

  // shift moves what draw draws down.
  shift(by, draw) {
    const before = this.all.length, height = draw();
    this.all.push(make("g", {transform: `translate(0 ${by})`}, ...this.all.splice(before)));
    return height;
  }

  flow(key, rate, label) {
    const p = this.parts[key];
    if (!p) {
      return;
    }
    const cls = "wire" + (rate > 0 ? ` flows ${p.kind}` : "") + (rate >= 1000 ? " fast" : "");
    if (p.path.getAttribute("class") !== cls) {
      p.path.setAttribute("class", cls);
    }
    p.path.style.strokeWidth = rate > 0 ? String(Math.min(7, 2 + Math.log10(1 + rate))) : "2";
    if (label) {
      setText(p.text, count(rate) + "/s");
    }
  }

  figures(nic, contexts, rates) {
    const parts = this.parts, r = rates.interfaces[nic.name] || {hpus: 0, kernel: 0, linux: 0, dropped: 0, busy: []};
    const up = nic.link === "up";
    parts.wire.rect.setAttribute("class", up ? "box" : "box bad");
    setText(parts.wire.text, short(up ? plural(nic.queues, "queue") : nic.link, (parts.wire.width - 16) * 1.15));
    setText(parts.linux.text, `${count(r.linux)}/s`);
    setText(parts.dropped.text, `${count(r.dropped)}/s`);
    const seen = r.hpus + r.kernel + r.linux + r.dropped;
    this.flow("in", seen, true);
    this.flow("to linux", r.linux);
    this.flow("to dropped", r.dropped);
    this.flow("to hpus", r.hpus, true);
    this.flow("to kernel", r.kernel, true);
    let sum = 0;
    parts.hpus.cells.forEach((cell, i) => {
      const b = r.busy[i] || 0;
      sum += b;
      cell.fill.setAttribute("y", cell.top + cell.size * (1 - b / 100));
      cell.fill.setAttribute("height", cell.size * b / 100);
      setText(cell.title, `HPU ${i}: busy ${percent(b)}, ${plural(nic.hpus[i].occupancy, "buffer")}`);
    });
    const mean = sum / Math.max(1, parts.hpus.cells.length);
    setText(parts.hpus.busy, percent(mean));
    const told = [];
    for (const c of this.shown) {
      const now = contexts.find((x) => x.name === c.name) || c;
      const rate = rates.contexts[c.name] || {handled: 0, open: 0};
      const p = parts["context " + c.name];
      const broken = ["failed", "stopped", "gone"].includes(now.state);
      p.rect.setAttribute("class", "box" + (broken ? " bad" : now.state === "active" ? "" : " quiet"));
      const what = now.state !== "active" ? now.state : `${count(rate.handled)}/s` + (now.open > 0 ? `, ${plural(now.open, "message")}` : "");
      setText(p.text, short(what, (p.width - 20) * 1.15));
      p.meter?.setAttribute("width", now.credits > 0 ? Math.min(1, now.in_flight / now.credits) * p.full : 0);
      this.flow("into " + c.name, rate.handled);
      this.flow("on " + c.name, rate.handled);
      told.push(`${c.name}: ${what}`);
    }
    this.svg.setAttribute("aria-label", `NIC ${nic.name}, link ${nic.link}. ${count(seen)} frames a second come: ${count(r.hpus)} go to HPUs, ${parts["to kernel"] ? count(r.kernel) + " to handlers in the kernel, " : ""}` +
      `${count(r.linux)} to Linux, ${count(r.dropped)} are dropped by the NIC. HPUs are busy ${percent(mean)}. ${told.join("; ")}`);
  }
}

// What is known.
let samples = [], daemon = "", last = null, drops = new Map();
const chosen = new Set(); // contexts
const cards = new Map();  // by interface
const rows = new Map();   // of contexts

const charts = {
  handled: new LineChart("Handlers a second", count),
  open: new LineChart("Messages in flight", count),
  messages: new LineChart("Messages complete a second", count),
  time: new LineChart("Handler time, 99 of 100 within", duration, true),
};
byId("context-charts").append(...Object.values(charts).map((c) => c.figure));

function showInterfaces(doc, rates, times) {
  for (const nic of doc.interfaces) {
    let card = cards.get(nic.name);
    if (!card) {
      card = {title: make("h2"), picture: new Picture(), frames: new LineChart("Frames a second", count), busy: new HeatChart("HPU occupancy", percent)};
      const names = make("span", {}, nic.name);
      card.sub = make("small");
      card.title.append(names, card.sub);
      card.section = make("section", {"aria-label": "NIC " + nic.name}, card.title, card.picture.figure,
        make("div", {class: "charts"}, card.frames.figure, card.busy.figure),
        make("p", {class: "hint"}, "Dropped by the NIC: for lack of credit, buffers or room in a ring. What handlers drop, and segments of messages, are in the table of drops."));
      byId("interfaces").append(card.section);
      cards.set(nic.name, card);
    }
    setText(card.sub, [nic.link === "up" ? "up" : "link " + nic.link, nic.mode + " XDP", nic.zero_copy ? "zero-copy" : "copying",
      plural(nic.queues, "receive queue"), nic.stuck ? plural(nic.stuck, "handler") + " stuck" : ""].filter(Boolean).join(", "));
    card.picture.update(nic, doc.contexts.filter((c) => c.interface === nic.name), rates);
    const of = (f) => samples.map((s) => (s.interfaces[nic.name] ? f(s.interfaces[nic.name]) : 0));
    const kernel = of((i) => i.kernel);
    card.frames.update(times, [
      {name: "to HPUs", values: of((i) => i.hpus)},
      {name: "to Linux", values: of((i) => i.linux)},
      {name: "dropped by the NIC", values: of((i) => i.dropped)},
      ...(kernel.some((v) => v > 0) || doc.contexts.some((c) => c.interface === nic.name && inKernel(c)) ? [{name: "to handlers in the kernel", values: kernel}] : []),
    ]);
    card.busy.update(times, nic.hpus.map((h, k) => ({name: "HPU " + h.hpu, values: of((i) => i.busy[k] || 0)})));
  }
  for (const [name, card] of cards) {
    if (!doc.interfaces.some((n) => n.name === name)) {
      card.section.remove();
      cards.delete(name);
    }
  }
}

function showContexts(doc, rates, times) {
  const body = byId("contexts").tBodies[0];
  for (const c of doc.contexts) {
    let row = rows.get(c.name);
    if (!row) {
      const button = make("button", {"aria-pressed": "false", title: c.name}, c.name);
      button.addEventListener("click", () => {
        if (!chosen.delete(c.name)) {
          chosen.add(c.name);
        }
        button.setAttribute("aria-pressed", String(chosen.has(c.name)));
        show(last);
      });
      row = {tr: make("tr", {}, make("th", {scope: "row"}, button)), cells: []};
      for (const cls of ["", "", "number", "number", "number", "number", "number", "number", "", ""]) {
        row.cells.push(row.tr.appendChild(make("td", {class: cls})));
      }
      rows.set(c.name, row);
    }
    if (row.tr.parentNode !== body) {
      body.append(row.tr);
    }
    const r = rates.contexts[c.name] || {handled: 0, messages: 0, p50: 0, p99: 0};
    const broken = c.error || ["failed", "stopped", "gone"].includes(c.state);
    [c.error ? `${c.state}: ${c.error}` : c.state, c.handler, count(r.handled), count(r.messages), String(c.open), c.credits ? `${c.in_flight} of ${c.credits}` : "–",
      duration(r.p50), duration(r.p99), c.windows.map((v) => `${v.name} ${v.size || "shared"}`).join(", ") || "–",
      c.attached.map((a) => `process ${a.pid}` + (a.observer ? " (observer)" : "")).join(", ") || "–"].forEach((text, i) => setText(row.cells[i], text));
    row.cells[0].className = broken ? "bad" : "";
  }
  for (const [name, row] of rows) {
    if (!doc.contexts.some((c) => c.name === name)) {
      row.tr.remove();
      rows.delete(name);
      chosen.delete(name);
    }
  }
  // The first ones, or those that are chosen, have lines of their own, the rest share one.
  const list = doc.contexts.map((c) => c.name).filter((n) => chosen.size === 0 || chosen.has(n));
  const named = list.length > series ? list.slice(0, series - 1) : list;
  const rest = list.slice(named.length);
  const draw = (chart, field, join) => {
    const of = (name) => samples.map((s) => (s.contexts[name] ? s.contexts[name][field] : 0));
    const all = named.map((name) => ({name, values: of(name)}));
    if (rest.length > 0) {
      const others = rest.map(of);
      all.push({name: plural(rest.length, "other"), values: times.map((_, i) => others.reduce((a, v) => join(a, v[i]), 0))});
    }
    chart.update(times, all);
  };
  const add = (a, b) => a + b;
  draw(charts.handled, "handled", add);
  draw(charts.open, "open", add);
  draw(charts.messages, "messages", add);
  draw(charts.time, "p99", Math.max);
}

function showDrops(doc) {
  const now = Date.parse(doc.time), seen = new Map();
  const list = doc.drops.map((d) => {
    const key = JSON.stringify([d.interface, d.context, d.reason]), old = drops.get(key);
    let rate = 0;
    if (old && now > old.time && d.count >= old.count) {
      rate = (d.count - old.count) * 1000 / (now - old.time);
    } else if (old && now === old.time) {
      rate = old.rate;
    }
    seen.set(key, {time: now, count: d.count, rate});
    return make("tr", {}, make("th", {scope: "row"}, d.context || d.interface), make("td", {}, d.reason),
      make("td", {class: rate > 0 ? "number now" : "number"}, count(rate)), make("td", {class: "number"}, count(d.count)), make("td", {class: "wide"}, d.meaning));
  });
  drops = seen;
  const table = byId("drops");
  table.tBodies[0].replaceChildren(...list);
  table.parentNode.hidden = list.length === 0;
  byId("no-drops").hidden = list.length > 0;
}

function showLog(doc) {
  const log = byId("log"), newest = doc.log.length ? JSON.stringify(doc.log[doc.log.length - 1]) : "";
  if (log.newest === newest && log.length === doc.log.length) {
    return;
  }
  log.newest = newest;
  log.length = doc.log.length;
  log.replaceChildren(...doc.log.toReversed().map((l) => {
    const level = ["INFO", "WARN", "ERROR"].includes(l.level) ? l.level : "INFO";
    return make("li", {class: level}, make("time", {datetime: l.time}, clock(Date.parse(l.time))), ...(level === "INFO" ? [] : [make("b", {}, level)]),
      l.message, make("span", {class: "more"}, l.more || ""));
  }));
}

function show(doc) {
  const rates = samples[samples.length - 1] || {interfaces: {}, contexts: {}};
  const times = samples.map((s) => s.time);
  showInterfaces(doc, rates, times);
  showContexts(doc, rates, times);
  showDrops(doc);
  showLog(doc);
  setText(byId("about"), `${doc.version || ""} process ${doc.pid}, up ${since(Date.parse(doc.time) - Date.parse(doc.started))}`.trim());
}

function take(doc) {
  const who = `${doc.pid} ${doc.started}`;
  if (who !== daemon) {
    daemon = who;
    samples = [];
    drops = new Map();
  }
  const seq = samples.length ? samples[samples.length - 1].seq : 0;
  samples.push(...doc.samples.filter((s) => s.seq > seq));
  const oldest = samples.length ? samples[samples.length - 1].time - seconds * 1000 : 0;
  samples = samples.filter((s) => s.time > oldest);
  last = doc;
  show(doc);
}

let paused = false, timer = 0, asking = false, gone = 0; // gone: since when, ms

function status(cls, text) {
  byId("live").className = cls;
  setText(byId("live"), text);
}

function alarm(text) {
  byId("alarm").hidden = text === "";
  setText(byId("alarm"), text);
}

// get asks for what is new after a sample; null: there is no answer.
async function get(seq) {
  try {
    const answer = await fetch(`state?since=${seq}`, {signal: AbortSignal.timeout(5000)});
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

async function ask() {
  clearTimeout(timer);
  if (paused || document.hidden || asking) {
    return;
  }
  asking = true;
  try {
    const seq = samples.length ? samples[samples.length - 1].seq : 0;
    let doc = await get(seq);
    if (doc && seq > 0 && `${doc.pid} ${doc.started}` !== daemon) {
      doc = await get(0); // another daemon, whose samples are others
    }
    gone = doc ? 0 : gone || Date.now();
    document.body.classList.toggle("stale", !doc);
    if (!doc) {
      status("off", "gone");
      alarm(`The daemon has not answered since ${clock(gone)}: it has ended, or cannot be reached. What is below is from before. This page goes on when the daemon is back.`);
    } else if (!paused) {
      status("on", "live");
      alarm(doc.error ? "There are no figures: " + doc.error : "");
      take(doc);
    }
  } catch (e) {
    status("off", "error");
    alarm("This page has failed: " + e.message);
    throw e;
  } finally {
    asking = false;
    timer = setTimeout(ask, 1000);
  }
}

function togglePause() {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  document.body.classList.toggle("paused", paused);
  if (paused) {
    status("", "paused");
  }
  ask();
}

byId("pause").addEventListener("click", togglePause);
document.addEventListener("visibilitychange", ask);
window.addEventListener("resize", () => last && show(last));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => last && show(last));
ask();
