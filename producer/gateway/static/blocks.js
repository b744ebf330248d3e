// The block map: every KV block a cell of a canvas, and who holds it under the pointer or cursor.

// Sizes of a cell in CSS pixels, the largest that keeps the map below MOST_HEIGHT is taken.
const SIZES = [16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1];
const MOST_HEIGHT = 380;
const GRID_FROM = 4;
// Rows between the blocks of the device and those of host memory.
const GAP_ROWS = 1;

export class BlockMap {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.cells = null;
    this.at = null;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("pointermove", (event) => this.#point(this.#under(event)));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    canvas.addEventListener("focus", () => this.#point(this.at ?? 0));
    canvas.addEventListener("blur", () => this.#point(null));
    canvas.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Show a snapshot as /status/blocks has it. */
  show(snapshot) {
    this.cells = unpacked(snapshot);
    this.draw();
    if (this.at !== null) this.#point(this.at < this.cells.total ? this.at : null);
  }

  draw() {
    if (this.cells === null) return;
    const { blocks, total } = this.cells;
    const width = this.canvas.parentElement.clientWidth;
    if (width === 0) return;
    this.size = SIZES.find((size) => rowsOf(this.cells, width, size) * size <= MOST_HEIGHT) ?? sizeOfMany(total);
    this.columns = Math.max(1, Math.floor(width / this.size));
    this.rows = rowsOf(this.cells, width, this.size);
    const deviceRows = Math.ceil(blocks / this.columns);
    this.hostStart = (deviceRows + GAP_ROWS) * this.columns;
    const scale = devicePixelRatio;
    const { canvas } = this;
    canvas.width = Math.round(this.columns * this.size * scale);
    canvas.height = Math.round(this.rows * this.size * scale);
    canvas.style.width = `${this.columns * this.size}px`;
    canvas.style.height = `${this.rows * this.size}px`;
    Object.assign(canvas.dataset, { columns: this.columns, size: this.size });
    this.#paint(canvas.getContext("2d"), scale);
  }

  #paint(context, scale) {
    const style = getComputedStyle(this.canvas);
    const small = new OffscreenCanvas(this.columns, this.rows);
    const inSmall = small.getContext("2d");
    const image = inSmall.createImageData(this.columns, this.rows);
    const pixels = new Uint32Array(image.data.buffer);
    const colours = this.cells.names.map((name) => pixelOf(style.getPropertyValue(`--${name}`)));
    const { states, total } = this.cells;
    for (let cell = 0; cell < total; cell++) pixels[this.#place(cell)] = colours[states[cell]];
    inSmall.putImageData(image, 0, 0);
    const { width, height } = this.canvas;
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, width, height);
    const side = this.size * scale;
    if (this.at !== null) this.#mark(context, side, style.getPropertyValue("--text"));
    if (this.size < GRID_FROM) return;
    context.globalCompositeOperation = "destination-out";
    const line = Math.max(1, Math.round(scale));
    for (let i = 1; i <= this.columns; i++) context.fillRect(Math.round(i * side) - line, 0, line, height);
    for (let i = 1; i <= this.rows; i++) context.fillRect(0, Math.round(i * side) - line, width, line);
    context.globalCompositeOperation = "source-over";
  }

  // Marks the block under the cursor, and more lightly those of the same sequence.
  #mark(context, side, colour) {
    const { holders, owners, total } = this.cells;
    context.fillStyle = colour;
    const fill = (cell) => {
      const place = this.#place(cell);
      const [column, row] = [place % this.columns, Math.floor(place / this.columns)];
      context.fillRect(Math.round(column * side), Math.round(row * side), Math.ceil(side), Math.ceil(side));
    };
    context.globalAlpha = 0.3;
    if (holders[this.at] > 0) {
      for (let cell = 0; cell < total; cell++) {
        if (holders[cell] > 0 && owners[cell] === owners[this.at]) fill(cell);
      }
    }
    context.globalAlpha = 0.6;
    fill(this.at);
    context.globalAlpha = 1;
  }

  // Where a cell stands, counted row by row.
  #place(cell) {
    return cell < this.cells.blocks ? cell : this.hostStart + cell - this.cells.blocks;
  }

  #under(event) {
    if (this.cells === null) return null;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const row = Math.floor((event.clientY - box.top) / this.size);
    if (column < 0 || column >= this.columns || row < 0) return null;
    const place = row * this.columns + column;
    if (place < this.cells.blocks) return place;
    const cell = place - this.hostStart + this.cells.blocks;
    return place >= this.hostStart && cell < this.cells.total ? cell : null;
  }

  #move(event) {
    if (this.cells === null) return;
    const last = this.cells.total - 1;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const ends = { Home: 0, End: last };
    if (!(event.key in steps || event.key in ends)) return;
    event.preventDefault();
    const wanted = ends[event.key] ?? (this.at ?? 0) + steps[event.key];
    this.#point(Math.max(0, Math.min(last, wanted)));
  }

  #point(cell) {
    const isNew = cell !== this.at;
    this.at = this.cells === null ? null : cell;
    if (isNew) this.draw();
    this.tip.hidden = this.at === null;
    if (this.at === null) return;
    const said = told(this.cells, this.at);
    if (this.tip.textContent !== said) this.tip.textContent = said;
    const place = this.#place(this.at);
    const left = (place % this.columns) * this.size;
    const room = this.canvas.parentElement.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(left, room))}px`;
    this.tip.style.top = `${(Math.floor(place / this.columns) + 1) * this.size + 6}px`;
  }
}

/** What a block is and who holds it, in a few words. */
function told({ names, states, holders, owners, sequences, blocks }, cell) {
  const name = names[states[cell]];
  const block = cell < blocks ? `Block ${cell}` : `Host block ${cell - blocks}`;
  if (name === "cached") return `${block}: cached, free with a prefix that can be used again`;
  if (holders[cell] === 0) return `${block}: ${name}`;
  const { job, index, tokens } = sequences[owners[cell]];
  const sequence = `job …${job}, output ${index}, ${tokens} tokens`;
  const several = name === "swapped" ? ", held" : "";
  if (holders[cell] > 1) return `${block}: ${name}${several} by ${holders[cell]} sequences; the first: ${sequence}`;
  return `${block}: ${name}; ${sequence}`;
}

function rowsOf({ blocks, total }, width, size) {
  const columns = Math.max(1, Math.floor(width / size));
  const hostRows = Math.ceil((total - blocks) / columns);
  return Math.ceil(blocks / columns) + (hostRows > 0 ? GAP_ROWS + hostRows : 0);
}

// More cells than fit: up to a few hundred thousand can still be pointed at.
function sizeOfMany(total) {
  return total <= 300_000 ? 2 : 1;
}

function unpacked({ states: names, runs, sequences, blocks, host_blocks }) {
  const total = blocks + host_blocks;
  const states = new Uint8Array(total);
  const holders = new Uint32Array(total);
  const owners = new Uint32Array(total);
  let first = 0;
  for (let i = 0; i < runs.length; i += 4) {
    const end = first + runs[i];
    states.fill(runs[i + 1], first, end);
    holders.fill(runs[i + 2], first, end);
    owners.fill(runs[i + 3], first, end);
    first = end;
  }
  return { names, states, holders, owners, sequences, blocks, total };
}

// A colour of the style sheet, #rrggbb, as a pixel's 32 bits.
function pixelOf(colour) {
  const value = parseInt(colour.trim().slice(1), 16);
  const bytes = new Uint8Array([value >> 16, (value >> 8) & 255, value & 255, 255]);
  return new Uint32Array(bytes.buffer)[0];
}
