// One plot over time: lines from zero, labelled axes, a legend that is its headline. Knows numbers and pixels, nothing else.

import { el, show } from "./api.js";

const HEIGHT = 132, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20, GAP_S = 2.5, MOST_CODES = 5;

function svg(tag, given = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// The least of 1, 2, 2.5 and 5 times a power of ten that three steps of reach `most`.
export function step(most) {
  const rough = Math.max(most, 1e-9) / 3, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
}

export class Plot {
  constructor(chart) {
    this.chart = chart;
    this.values = el("p", { class: "values" });
    this.also = el("p", { class: "hint" });
    this.picture = svg("svg", { role: "img", height: HEIGHT });
    this.root = el("section", { class: "card plot" }, el("h2", {}, chart.title), this.values, this.picture, this.also);
    this.begin = this.end = 0;
  }

  // The time under the pointer.
  moment(event) {
    const box = this.picture.getBoundingClientRect();
    const part = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    return this.begin + Math.max(0, Math.min(1, part)) * (this.end - this.begin);
  }

  lines(rows) {
    if (!this.chart.errors) return this.chart.lines;
    const seen = new Map();
    for (const row of rows) for (const [code, rate] of Object.entries(row.errors_per_s)) seen.set(code, (seen.get(code) || 0) + rate);
    const codes = [...seen].sort((a, b) => b[1] - a[1]).map(([code]) => code);
    return codes.slice(0, MOST_CODES).map((code) => [code, (row) => row.errors_per_s[code] || 0]);
  }

  said(row) {
    const told = this.lines([row]).map(([name, of]) => [name, of(row)]).filter(([, value]) => value !== null && value !== undefined);
    return told.length ? `${this.chart.title}: ${told.map(([name, value]) => `${name} ${show(value)}`).join(", ")}` : "";
  }

  // row: the one whose values are told. marked: a line stands where it is. gone: why there is nothing to draw.
  draw({ rows, row, begin, end, marked, gone }) {
    Object.assign(this, { begin, end });
    const lines = gone ? [] : this.lines(rows);
    const tops = lines.map(([, of]) => Math.max(0, ...rows.map((r) => of(r) ?? 0)));
    const most = Math.max(0, ...tops);
    this.values.replaceChildren(...lines.map(([name, of], i) => {
      const value = row ? of(row) : null;
      return el("span", { class: `line${i}` }, el("b", {}, value == null ? "–" : show(value)), ` ${name}`);
    }));
    const nothing = !lines.length || (rows.length && lines.every(([, of]) => rows.every((r) => of(r) == null)));
    const empty = nothing ? this.chart.none || "" : "";
    this.also.textContent = gone || (row && this.chart.also?.(row)) || "";
    this.picture.toggleAttribute("hidden", !!gone);
    if (gone) return;
    const width = this.picture.clientWidth || 320;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.setAttribute("aria-label", empty || `${this.chart.title}, the last ${Math.round(end - begin)} seconds. ${lines.map(([name], i) => `${name}: at most ${show(tops[i])}`).join(". ")}`);
    const by = step(most || 1), top = Math.max(by, Math.ceil((most || 1) / by - 1e-9) * by);
    const x = (time) => LEFT + ((time - begin) / (end - begin)) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    const drawn = [];
    for (let value = 0; value <= top * 1.001; value += by) {
      drawn.push(svg("line", { class: value ? "grid" : "axis", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      drawn.push(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, brief(value)));
    }
    const span = Math.round(end - begin), minutes = span > 120;
    for (let ago = 0; ago <= span; ago += minutes ? (width < 300 ? 120 : 60) : span / 3) {
      drawn.push(svg("text", { x: x(end - ago), y: HEIGHT - 4, "text-anchor": ago ? "middle" : "end" },
        ago ? (minutes ? `−${ago / 60} min` : `−${ago} s`) : "now"));
    }
    if (marked) drawn.push(svg("line", { class: "mark", x1: x(row.at), x2: x(row.at), y1: TOP, y2: HEIGHT - BOTTOM }));
    lines.forEach(([, of], i) => drawn.push(svg("path", { class: `line${i}`, d: path(rows, of, x, y) })));
    if (empty) drawn.push(svg("text", { class: "empty", x: LEFT + 10, y: TOP + 20 }, empty));
    this.picture.replaceChildren(...drawn);
  }
}

// A line through the values, broken where there are none or nobody looked. A value alone is a dot.
function path(rows, of, x, y) {
  let d = "", before = -Infinity;
  for (const row of rows) {
    const value = of(row);
    if (value == null) {
      before = -Infinity;
      continue;
    }
    const place = `${x(row.at).toFixed(1)} ${y(value).toFixed(1)}`;
    d += row.at - before > GAP_S ? `M${place}h0` : `L${place}`;
    before = row.at;
  }
  return d;
}

const units = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
function brief(value) {
  const [size, unit] = units.find(([least]) => value >= least) || [1, ""];
  return String(Number((value / size).toPrecision(3))) + unit;
}
