"use strict";
let data, end = 1, runs = [], cursor = 0, isPlaced = false, hovered = null;
const view = { start: 0, end: 1 };
const STYLE = getComputedStyle(document.body), ROW = +STYLE.getPropertyValue("--row"), HELD = +STYLE.getPropertyValue("--held");
const LEFT = 70, RIGHT = 150, GAP = 6, AXIS = 22, TOP = 4;
const PITCH = ROW + 2 + HELD + GAP;
document.body.classList.toggle("framed", window !== window.top);
const FONT = STYLE.fontFamily;
const number = value => String(+value.toPrecision(6));
const memory = (value, run) => !run.bytes ? number(+value.toPrecision(4))
  : value >= 2 ** 30 ? `${+(value / 2 ** 30).toPrecision(3)} GiB` : `${+(value / 2 ** 20).toPrecision(3)} MiB`;
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// ------------------------------------------------------------------------------------------------------------- the runs

function load(loaded) {
  data = loaded;
  end = Math.max(0, ...data.runs.map(run => run.makespan)) || 1;
  // A run much longer than the others goes on beyond the view at first.
  Object.assign(view, { start: 0, end: data.shared || end });
  document.getElementById("units").textContent = data.units;
  while (panels.length < data.runs.length) panels.push(panel(panels.length));
  if (runs.length !== data.runs.length)
    document.getElementById("runs").replaceChildren(...data.runs.map((_, i) => panels[i].section));
  runs = data.runs.map((run, i) => filled(panels[i], run));
  hovered = null;
  tell(null);
  setCursor(isPlaced ? cursor : fullestTime(runs[0]), false);
}

// The time at which a device of the run holds most: there the page opens. 0 if a wrong choice leaves no run.
function fullestTime(run) {
  let most = -1, time = 0;
  for (const row of run?.rows ?? []) {
    for (let i = 0; i < row.start.length; i++) {
      if (heldDuring(row, i) > most) [most, time] = [heldDuring(row, i), (row.start[i] + row.end[i]) / 2];
    }
  }
  return time;
}

// The elements of a run. The explorer fills them with run after run, because new ones take the browser longer.
const panels = [];
function panel(index) {
  const [section, heading, canvas, key, legend, facts, base] =
    ["section", "h2", "canvas", "p", "span", "small", "canvas"].map(tag => document.createElement(tag));
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  key.className = "key";
  legend.className = "legend";
  key.append(legend, facts);
  section.append(heading, canvas, key);
  listen(canvas, index);
  return { section, heading, canvas, legend, facts, base, shown: "" };
}

function filled(panel, run) {
  const { canvas, base } = panel, shown = JSON.stringify(run.legend);
  panel.heading.textContent = run.title;
  panel.facts.textContent = run.facts;
  canvas.setAttribute("aria-label", run.title);
  if (panel.shown !== shown) panel.legend.replaceChildren(...run.legend.map(([name, shade, ink, edge]) => {
    const entry = document.createElement("span");
    entry.textContent = name;
    entry.style.background = shade;
    entry.style.color = ink;
    return entry;
  }));
  panel.shown = shown;
  let boxes = 0;
  const firsts = [], rows = run.rows.map(row => {
    firsts.push(boxes);
    boxes += row.mb.length;
    return { ...row, ...unpacked(row.numbers, row.mb.length) };
  });
  const height = TOP + rows.length * PITCH + AXIS;
  canvas.style.height = height + "px";
  return { ...run, rows, firsts, canvas, base, height, width: 0, drawn: "", copied: false, dense: false };
}

// Start, end and memory of every box, from the base64 text of 64-bit floats.
function unpacked(text, count) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const [start, end, held] = [0, 1, 2].map(column => new Float64Array(bytes.buffer, 8 * column * count, count));
  return { start, end, held };
}

const nameOf = (run, row, i) => run.passes[row.pass[i]][0] + row.mb[i];

// Device and index of the action with this name; null if there is none.
function find(run, name) {
  const [, letters, microbatch] = name.match(/^(.*\D)(\d+)$/) || [];
  const pass = run.passes.findIndex(([each]) => each === letters);
  for (const [device, row] of run.rows.entries()) {
    const i = row.pass.findIndex((each, i) => each === pass && row.mb[i] === +microbatch);
    if (i >= 0) return [device, i];
  }
  return null;
}

// Index of the first action of a row that ends after `time`.
function first(row, time) {
  let low = 0, high = row.end.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.end[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}

// What a device does at `time`: an action, or the idle time before action `i` (i = length: after the last).
function at(run, device, time) {
  const row = run.rows[device], i = first(row, time);
  const busy = i < row.start.length && row.start[i] <= time;
  return { run, device, i, busy };
}

function spot({ run, device, i, busy }) {
  const row = run.rows[device];
  if (busy) return [row.start[i], row.end[i]];
  return [i ? row.end[i - 1] : 0, i < row.start.length ? row.start[i] : run.makespan];
}

const heldBefore = (row, i) => i ? row.held[i - 1] : 0;
// What a device holds while action `i` runs: what it takes counts from its start.
const heldDuring = (row, i) => Math.max(heldBefore(row, i), row.held[i]);

function heldAt(run, device, time) {
  const { i, busy } = at(run, device, time), row = run.rows[device];
  return busy ? heldDuring(row, i) : heldBefore(row, i);
}

// The action on another device that action `i` needs, and that ends last.
function awaited(run, row, i) {
  const flat = row.from[i];
  if (flat < 0) return null;
  let device = run.rows.length - 1;
  while (run.firsts[device] > flat) device--;
  const j = flat - run.firsts[device], other = run.rows[device];
  return { device, j, name: nameOf(run, other, j), end: other.end[j] };
}

// -------------------------------------------------------------------------------------------------------------- drawing

// The browser lays the page out when it is asked for a width, so every drawing asks once.
const scale = run => ((run.width ||= run.canvas.clientWidth) - LEFT - RIGHT) / (view.end - view.start);
const toX = (run, time) => LEFT + (time - view.start) * scale(run);
const toTime = (run, x) => view.start + (x - LEFT) / scale(run);

// The rows change only with the view; the line, the frame and the words at the right are drawn over them. The copy of the
// rows for that is made when a view is drawn again, because it takes longer than the rows themselves.
function draw(run) {
  const ratio = window.devicePixelRatio || 1, width = run.width = run.canvas.clientWidth, right = width - RIGHT;
  const drawn = [view.start, view.end, width, ratio].join();
  const pen = sized(run.canvas, width, run.height, ratio);
  if (run.drawn !== drawn) {
    run.dense = drawRows(pen, run, right);
    run.drawn = drawn;
    run.copied = false;
  } else {
    if (!run.copied) drawRows(sized(run.base, width, run.height, ratio), run, right);
    run.copied = true;
    pen.drawImage(run.base, 0, 0, width, run.height);
  }
  pen.save();
  clip(pen, right, run.height);
  drawArrow(pen, run);
  pen.restore();
  drawMargins(pen, run, right);
}

function sized(canvas, width, height, ratio) {
  const [wide, tall] = [Math.round(width * ratio), Math.round(height * ratio)], pen = canvas.getContext("2d");
  // Another size also clears a canvas, but takes new memory.
  if (canvas.width !== wide || canvas.height !== tall) Object.assign(canvas, { width: wide, height: tall });
  else pen.reset();
  pen.scale(ratio, ratio);
  pen.textBaseline = "middle";
  return pen;
}

function clip(pen, right, height) {
  pen.beginPath();
  pen.rect(LEFT, 0, right - LEFT, height);
  pen.clip();
}

// All devices; whether some row has more actions than pixels.
function drawRows(pen, run, right) {
  let dense = false;
  pen.save();
  clip(pen, right, run.height);
  run.rows.forEach((row, device) => {
    const top = TOP + device * PITCH;
    pen.fillStyle = data.idle;
    pen.fillRect(LEFT, top, right - LEFT, ROW);
    const from = first(row, view.start);
    let to = first(row, view.end);
    if (to < row.start.length && row.start[to] < view.end) to += 1;
    if ((to - from) > .6 * (right - LEFT)) {
      drawShares(pen, run, row, top, from, to, right);
      dense = true;
    } else drawBoxes(pen, run, row, top, from, to);
    drawPairs(pen, run, row, top);
    drawCopies(pen, run, row, top + ROW - 3);
    drawHeld(pen, run, device, top + ROW + 2, right);
    pen.fillStyle = "#202124";  // between two steps
    for (const start of row.steps) pen.fillRect(toX(run, start) - 1, top - 1, 2, ROW + 3 + HELD);
  });
  pen.restore();
  return dense;
}

function drawBoxes(pen, run, row, top, from, to) {
  const unit = scale(run);
  pen.font = `11px ${FONT}`;
  pen.textAlign = "center";
  for (let i = from; i < to; i++) {
    const x = toX(run, row.start[i]), wide = (row.end[i] - row.start[i]) * unit;
    const [name, , colours] = run.passes[row.pass[i]], [shade, ink, edge] = run.shades[colours];
    pen.fillStyle = shade;
    pen.fillRect(x, top, wide > 3 ? wide - .7 : wide, ROW);
    if (edge && wide > 4) {  // a later chunk is paler, and its edge says its kind to the colour-blind
      pen.strokeStyle = edge;
      pen.lineWidth = 1;
      pen.strokeRect(x + .5, top + .5, wide - 1.7, ROW - 1);
    }
    if (wide > 11) {
      const short = String(row.mb[i]), full = name + short;
      const text = widthOf(pen, full) < wide - 6 ? full : widthOf(pen, short) < wide - 2 ? short : "";
      pen.fillStyle = ink;
      if (text) pen.fillText(text, x + wide / 2, top + ROW / 2 + .5);
    }
  }
  for (let i = from; i < to + 1 && i < row.start.length; i++) wait(pen, run, row, i, top);
}

// Widths of the texts in boxes. To measure one takes longer than to draw it.
const widths = new Map();
function widthOf(pen, text) {
  if (!widths.has(text)) widths.set(text, pen.measureText(text).width);
  return widths.get(text);
}

// A border around a forward and a backward that run together.
function drawPairs(pen, run, row, top) {
  pen.strokeStyle = "#202124";
  pen.lineWidth = 1.5;
  for (const i of row.pairs) {
    if (row.end[i + 1] < view.start || row.start[i] > view.end) continue;
    pen.strokeRect(toX(run, row.start[i]) + .75, top + .75, (row.end[i + 1] - row.start[i]) * scale(run) - 2.2, ROW - 1.5);
  }
}

// Copies to the host and back run at the same time as the actions: a strip along their lower edge.
function drawCopies(pen, run, row, top) {
  for (const [start, stop, shade] of row.copies) {
    if (stop < view.start || start > view.end) continue;
    pen.fillStyle = shade;
    pen.fillRect(toX(run, start), top, Math.max(1, (stop - start) * scale(run) - .7), 4);
  }
}

// In the idle time before action `i`, what it is spent waiting for, in as many words as fit.
function wait(pen, run, row, i, top) {
  const low = Math.max(i ? row.end[i - 1] : 0, view.start), high = Math.min(row.start[i], view.end);
  const room = (high - low) * scale(run) - 6, needed = room < 16 ? null : awaited(run, row, i);
  if (!needed) return;
  pen.font = `italic 11px ${FONT}`;
  const forms = [`waits for ${needed.name} of device ${needed.device}`, `waits for ${needed.name}`, needed.name];
  const text = forms.find(form => pen.measureText(form).width < room);
  if (!text) return;
  pen.fillStyle = "#5f6368";
  pen.textAlign = "center";
  pen.fillText(text, toX(run, (low + high) / 2), top + ROW / 2 + .5);
}

// More actions than pixels: every column is filled with the colours in their shares of the time around it. "Around" holds
// a dozen actions, or else columns and actions would make patterns that mean nothing.
function drawShares(pen, run, row, top, from, to, right) {
  const columns = Math.max(1, Math.round(right - LEFT)), shades = run.shades.length;
  const shares = new Float64Array(columns * shades), unit = scale(run);
  for (let i = from; i < to; i++) {
    const low = Math.max(0, (row.start[i] - view.start) * unit), high = Math.min(columns, (row.end[i] - view.start) * unit);
    for (let column = Math.floor(low); column < high; column++)
      shares[column * shades + run.passes[row.pass[i]][2]] += Math.min(high, column + 1) - Math.max(low, column);
  }
  const reach = Math.ceil(6 * columns / Math.max(1, to - from));
  const around = new Float64Array(columns * shades);
  for (let shade = 0; shade < shades; shade++) {
    const sums = new Float64Array(columns + 1);
    for (let column = 0; column < columns; column++) sums[column + 1] = sums[column] + shares[column * shades + shade];
    for (let column = 0; column < columns; column++) {
      const low = Math.max(0, column - reach), high = Math.min(columns, column + reach + 1);
      around[column * shades + shade] = (sums[high] - sums[low]) / (high - low);
    }
  }
  const strip = document.createElement("canvas"), colours = run.shades.map(([shade]) => parseInt(shade.slice(1), 16));
  strip.width = columns;
  strip.height = ROW;
  const ink = strip.getContext("2d"), pixels = ink.createImageData(columns, ROW);
  for (let column = 0; column < columns; column++) {
    let level = ROW, filled = 0;
    for (let shade = 0; shade < shades; shade++) {
      filled += around[column * shades + shade];
      for (const upper = Math.round(ROW * (1 - filled)); level > upper && level > 0; level--) {
        const pixel = 4 * ((level - 1) * columns + column);
        for (let part = 0; part < 3; part++) pixels.data[pixel + part] = colours[shade] >> (16 - 8 * part) & 255;
        pixels.data[pixel + 3] = 255;
      }
    }
  }
  ink.putImageData(pixels, 0, 0);
  pen.drawImage(strip, LEFT, top, right - LEFT, ROW);
}

function drawHeld(pen, run, device, top, right) {
  const row = run.rows[device], floor = top + HELD, high = held => floor - held / run.top * HELD;
  let level = heldAt(run, device, view.start);
  pen.beginPath();
  pen.moveTo(LEFT, floor);
  pen.lineTo(LEFT, high(level));
  for (let i = first(row, view.start); i < row.start.length && row.start[i] < view.end; i++) {
    const during = heldDuring(row, i), start = toX(run, row.start[i]);
    if (during !== level) pen.lineTo(start, high(level)), pen.lineTo(start, high(during));
    const stop = toX(run, row.end[i]);
    // What the next action takes over at once makes no notch.
    level = i + 1 < row.start.length && row.start[i + 1] <= row.end[i] ? heldDuring(row, i + 1) : row.held[i];
    if (level !== during) pen.lineTo(stop, high(during)), pen.lineTo(stop, high(level));
  }
  const stop = Math.min(right, toX(run, run.makespan));
  pen.lineTo(stop, high(level));
  pen.lineTo(stop, floor);
  pen.closePath();
  pen.fillStyle = "#c9d3df";
  pen.fill();
  pen.strokeStyle = "#5b6f86";
  pen.lineWidth = .8;
  pen.stroke();
  if (run.limit) {
    pen.setLineDash([4, 3]);
    pen.strokeStyle = "#b3261e";
    pen.beginPath();
    pen.moveTo(LEFT, high(run.limit));
    pen.lineTo(right, high(run.limit));
    pen.stroke();
    pen.setLineDash([]);
  }
}

// From the awaited action to the one pointed at, and a frame around that.
function drawArrow(pen, run) {
  if (!hovered || hovered.run !== run) return;
  const { device, i, busy } = hovered, row = run.rows[device], [start, stop] = spot(hovered);
  const top = TOP + device * PITCH;
  pen.strokeStyle = "#000";
  pen.lineWidth = 2;
  pen.strokeRect(toX(run, start) + 1, top + 1, (stop - start) * scale(run) - 2, ROW - 2);
  const needed = i < row.start.length ? awaited(run, row, i) : null;
  if (!needed) return;
  const x1 = toX(run, needed.end), y1 = TOP + needed.device * PITCH + ROW / 2;
  const x2 = toX(run, row.start[i]), y2 = top + ROW / 2;
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.bezierCurveTo(x1 + 14, y1, x2 - 14, y2, x2, y2);
  pen.stroke();
  pen.beginPath();
  pen.arc(x1, y1, 3, 0, 7);
  pen.fillStyle = "#000";
  pen.fill();
}

function drawMargins(pen, run, right) {
  const width = run.canvas.clientWidth;
  run.rows.forEach((row, device) => {
    const middle = TOP + device * PITCH + ROW / 2;
    pen.font = `12px ${FONT}`;
    pen.fillStyle = "#202124";
    pen.textAlign = "right";
    pen.fillText(`device ${device}`, LEFT - 6, middle);
    const there = at(run, device, cursor), name = there.busy ? nameOf(run, row, there.i) : cursor < run.makespan ? "idle" : "done";
    pen.textAlign = "left";
    pen.font = `${there.busy ? "bold " : ""}12px ${FONT}`;
    pen.fillText(name, right + 8, middle);
    pen.font = `11px ${FONT}`;
    pen.fillStyle = "#5b6f86";
    const held = memory(heldAt(run, device, cursor), run), most = memory(run.peaks[device], run);
    pen.fillText(`${held} of ${most}`, right + 8, middle + ROW / 2 + 10);
  });
  const floor = run.height - AXIS + 2;
  pen.strokeStyle = "#9aa0a6";
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(LEFT, floor);
  pen.lineTo(right, floor);
  pen.font = `11px ${FONT}`;
  pen.fillStyle = "#3c4043";
  pen.textAlign = "center";
  const step = tick((view.end - view.start) / ((right - LEFT) / 90));
  for (let k = Math.ceil(view.start / step - 1e-9); k * step <= view.end * (1 + 1e-9); k++) {
    const x = toX(run, k * step);
    pen.moveTo(x, floor);
    pen.lineTo(x, floor + 4);
    pen.fillText(number(k * step), x, floor + 12);
  }
  pen.stroke();
  for (const [time, shade, dash] of [[cursor, "#b3261e", []], [run.makespan, "#202124", [4, 3]]]) {
    const x = toX(run, time);
    if (x < LEFT - .5 || x > right + .5 || (time === run.makespan && time === end)) continue;
    pen.strokeStyle = shade;
    pen.setLineDash(dash);
    pen.lineWidth = 1.2;
    pen.beginPath();
    pen.moveTo(x, 0);
    pen.lineTo(x, floor);
    pen.stroke();
    pen.setLineDash([]);
  }
}

function tick(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(k => k * power).find(step => step >= least);
}

let waiting = false;
function refresh() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    runs.forEach(draw);
    const parts = runs.map(run => {
      const busy = run.rows.filter((_, device) => at(run, device, cursor).busy).length;
      const held = run.rows.map((_, device) => heldAt(run, device, cursor));
      const who = runs.length > 1 ? `${run.name}: ` : "";
      return `${who}${busy} of ${run.rows.length} devices work, the fullest holds ${memory(Math.max(...held), run)}`;
    });
    document.getElementById("now").textContent = `t = ${number(cursor)}: ${parts.join("; ")}`;
    const longer = runs.filter(run => run.makespan > view.end * (1 + 1e-9)).map(run => `${run.name} to ${number(run.makespan)}`);
    document.getElementById("longer").textContent = longer.length ? `Goes on beyond the view: ${longer.join(", ")}; 0 shows all.` : "";
    document.getElementById("dense").hidden = !runs.some(run => run.dense);
  });
}

// ------------------------------------------------------------------------------------------------------------- the user

function look(start, stop) {
  const span = clamp(stop - start, end * 1e-4, end);
  view.start = clamp(start, 0, end - span);
  view.end = view.start + span;
  refresh();
}

function zoom(factor, around = (view.start + view.end) / 2) {
  look(around - (around - view.start) / factor, around + (view.end - around) / factor);
}

function setCursor(time, byUser = true) {
  isPlaced ||= byUser;
  cursor = clamp(time, 0, end);
  document.getElementById("time").value = 1000 * cursor / end;
  refresh();
}

function show(name, run = runs[0]) {
  const found = find(run, name.trim().toUpperCase());
  if (!found) return false;
  const [device, i] = found, row = run.rows[device];
  const span = Math.max((row.end[i] - row.start[i]) * 12, end * 1e-4);
  if (view.end - view.start > 4 * span) look(row.start[i] - span / 2, row.start[i] + span / 2);
  else look(row.start[i] - (view.end - view.start) / 2, row.start[i] + (view.end - view.start) / 2);
  hovered = { run, device, i, busy: true };
  setCursor((row.start[i] + row.end[i]) / 2);
  run.canvas.scrollIntoView({ block: "nearest" });
  return true;
}

function pointed(run, event) {
  const box = run.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top - TOP;
  const device = Math.floor(y / PITCH);
  if (x < LEFT || x > box.width - RIGHT || device < 0 || device >= run.rows.length) return null;
  const time = toTime(run, x);
  return time > run.makespan || time < 0 ? null : at(run, device, time);
}

const which = (run, microbatch) => run.slices === 1 ? `microbatch ${microbatch}`
  : `slice ${microbatch % run.slices} of microbatch ${Math.floor(microbatch / run.slices)}`;

function lines(place) {
  const { run, device, i, busy } = place, row = run.rows[device], [start, stop] = spot(place);
  const needed = i < row.start.length ? awaited(run, row, i) : null, before = i ? row.end[i - 1] : 0;
  const span = `${number(start)} to ${number(stop)} (${number(stop - start)})`;
  if (!busy) return [
    `device ${device} is idle`, span,
    needed ? `waits for ${needed.name} of device ${needed.device}, which ends at ${number(needed.end)}`
      : i < row.start.length ? "waits for no other device" : "nothing more to run",
    `holds ${memory(heldBefore(row, i), run)}`,
  ];
  const gap = row.start[i] - before, [name, chunk] = run.passes[row.pass[i]];
  const text = [
    `${nameOf(run, row, i)}: ${data.kinds[name.replace(/\d/g, "")]}`,
    `${which(run, row.mb[i])}, stage ${parseInt(name)}, device ${device}, chunk ${chunk}`, span,
  ];
  if (needed && gap > end * 1e-9) text.push(`waited ${number(gap)} for ${needed.name} of device ${needed.device}`);
  else if (needed) text.push(`needs ${needed.name} of device ${needed.device}, there since ${number(needed.end)}: no wait`);
  else text.push("needs no other device");
  text.push(`holds ${memory(heldDuring(row, i), run)} while it runs, ${memory(row.held[i], run)} after`);
  return text;
}

function tell(place, event) {
  const tip = document.getElementById("tip");
  tip.hidden = !place;
  if (!place) return;
  const [head, ...rest] = lines(place), title = document.createElement("b");
  title.textContent = head;
  tip.replaceChildren(title, ...rest.flatMap(line => [document.createElement("br"), line]));
  const wide = tip.offsetWidth, tall = tip.offsetHeight;
  tip.style.left = clamp(event.clientX + 14, 4, innerWidth - wide - 4) + "px";
  tip.style.top = (event.clientY + tall + 24 > innerHeight ? event.clientY - tall - 10 : event.clientY + 16) + "px";
}

function listen(canvas, index) {
  let grip = null;
  canvas.addEventListener("pointerdown", event => {
    grip = { x: event.clientX, start: view.start, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    const run = runs[index];
    if (grip && (grip.moved ||= Math.abs(event.clientX - grip.x) > 3)) {
      const start = grip.start - (event.clientX - grip.x) / scale(run);
      look(start, start + view.end - view.start);
    }
    hovered = pointed(run, event);
    tell(hovered, event);
    refresh();
  });
  canvas.addEventListener("pointerup", event => {
    if (grip && !grip.moved) setCursor(toTime(runs[index], event.clientX - canvas.getBoundingClientRect().left));
    grip = null;
  });
  canvas.addEventListener("pointerleave", () => { hovered = null; tell(null); refresh(); });
  canvas.addEventListener("dblclick", event =>
    zoom(2, toTime(runs[index], event.clientX - canvas.getBoundingClientRect().left)));
  canvas.addEventListener("wheel", event => {
    const run = runs[index], along = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey)
      zoom(1.002 ** -event.deltaY, toTime(run, event.clientX - canvas.getBoundingClientRect().left));
    else if (Math.abs(along) > 0) look(view.start + along / scale(run), view.end + along / scale(run));
    else return;
    event.preventDefault();
  }, { passive: false });
}
const press = (id, action) => document.getElementById(id).addEventListener("click", action);
press("in", () => zoom(2));
press("out", () => zoom(1 / 2));
press("fit", () => look(0, end));
document.getElementById("time").addEventListener("input", event => setCursor(event.target.value / 1000 * end));
document.getElementById("find").addEventListener("input", event => {
  const found = !event.target.value || runs.some(run => show(event.target.value, run));
  event.target.setCustomValidity(found ? "" : "no such action");
});
document.addEventListener("keydown", event => {
  if (event.target.matches("input, select")) return;
  const step = (view.end - view.start) / 10;
  const keys = {
    "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(1 / 2), "0": () => look(0, end),
    ArrowLeft: () => look(view.start - step, view.end - step), ArrowRight: () => look(view.start + step, view.end + step),
  };
  if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
  keys[event.key]();
  event.preventDefault();
});
new ResizeObserver(refresh).observe(document.getElementById("runs"));
load(JSON.parse(document.getElementById("data").textContent));

// For scripts: where an action is drawn, in pixels of the window, and what is in view.
window.pipemem = {
  view, show,
  locate(name, index = 0) {
    const run = runs[index], [device, i] = find(run, name), row = run.rows[device];
    const box = run.canvas.getBoundingClientRect();
    return {
      x: box.left + toX(run, (row.start[i] + row.end[i]) / 2), y: box.top + TOP + device * PITCH + ROW / 2,
      left: box.left + toX(run, row.start[i]), width: (row.end[i] - row.start[i]) * scale(run),
    };
  },
};
