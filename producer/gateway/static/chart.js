// Charts of the last minutes, as paths of an SVG whose colours the style sheet has.

import { count, seconds } from "./parts.js";

const WIDTH = 600;
const HEIGHT = 130;
// The shortest time that fills the width; the longest is what the gateway keeps.
const SHORTEST_S = 60;
// A pause between two samples, in intervals, that is shown as a gap.
const GAP = 4;

/** One chart in `svg`; `label` takes the numbers under the pointer, as `say(values)` puts them. */
export class Chart {
  constructor(svg, { label, since }, { series, isStacked, say }) {
    this.svg = svg;
    this.label = label;
    this.since = since;
    this.series = series;
    this.isStacked = isStacked;
    this.say = say;
    this.at = null;
    this.paths = series.map((name) => this.#add("path", isStacked ? `${name} area` : name));
    this.cursor = this.#add("line", "cursor");
    this.cursor.setAttribute("y2", HEIGHT);
    svg.addEventListener("pointermove", (event) => this.#point(event));
    svg.addEventListener("pointerleave", () => this.#point(null));
  }

  /** Show `history`: lists of one length by name, `time` in seconds. */
  show(history, intervalS) {
    this.history = history;
    this.end = history.time.at(-1) ?? 0;
    this.span = Math.max(SHORTEST_S, this.end - (history.time[0] ?? 0));
    this.since.textContent = `${seconds(this.span)} ago`;
    const columns = this.series.map((name) => history[name]);
    const tops = this.isStacked ? stacked(columns) : columns;
    this.most = Math.max(0, ...tops.flat());
    const stretches = unbroken(history.time, GAP * intervalS);
    for (const [i, path] of this.paths.entries()) {
      const below = this.isStacked && i > 0 ? tops[i - 1] : null;
      path.setAttribute("d", stretches.map((s) => this.#line(tops[i], s, below)).join(""));
    }
    this.#tell();
  }

  #add(kind, name) {
    const element = document.createElementNS(this.svg.namespaceURI, kind);
    element.setAttribute("class", name);
    this.svg.append(element);
    return element;
  }

  #x(i) {
    return (WIDTH * (1 - (this.end - this.history.time[i]) / this.span)).toFixed(1);
  }

  #line(values, [first, last], below) {
    const y = (value) => (HEIGHT * (1 - value / (this.most || 1))).toFixed(1);
    const points = [];
    for (let i = first; i <= last; i++) points.push(`${this.#x(i)} ${y(values[i])}`);
    if (!this.isStacked) return `M${points.join("L")}`;
    for (let i = last; i >= first; i--) points.push(`${this.#x(i)} ${y(below?.[i] ?? 0)}`);
    return `M${points.join("L")}Z`;
  }

  #point(event) {
    this.at = null;
    const { time } = this.history ?? { time: [] };
    if (event && time.length > 0) {
      const box = this.svg.getBoundingClientRect();
      const wanted = this.end - this.span * (1 - (event.clientX - box.left) / box.width);
      const near = time.map((t) => Math.abs(t - wanted));
      this.at = time[near.indexOf(Math.min(...near))];
    }
    this.#tell();
  }

  #tell() {
    if (!this.history) return;
    const { time } = this.history;
    const found = time.indexOf(this.at);
    const i = found < 0 ? time.length - 1 : found;
    this.cursor.setAttribute("visibility", found < 0 ? "hidden" : "visible");
    if (i < 0) return;
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.#x(i));
    const said = this.say(Object.fromEntries(this.series.map((name) => [name, this.history[name][i]])));
    this.label.textContent =
      found < 0 ? `${said}; at most ${count(this.most)}` : `${new Date(time[i] * 1000).toLocaleTimeString()}: ${said}`;
    this.svg.setAttribute("aria-label", this.label.textContent);
  }
}

function stacked(columns) {
  const sums = columns[0].map(() => 0);
  return columns.map((column) => column.map((value, i) => (sums[i] += value)));
}

// The stretches [first, last] of samples without a gap between them.
function unbroken(times, longest) {
  const stretches = [];
  times.forEach((time, i) => {
    if (i > 0 && time - times[i - 1] <= longest) stretches.at(-1)[1] = i;
    else stretches.push([i, i]);
  });
  return stretches;
}
