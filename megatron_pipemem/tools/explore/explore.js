
// ---------------------------------------------------------------------------------------------------------- the explorer

const form = document.getElementById("explore"), engine = JSON.parse(form.dataset.engine), byKey = new Map();
const status_ = document.getElementById("status");

function element(tag, text = "", attributes = {}) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.textContent = text;
  return made;
}

for (const [place, keys] of [["size", "pmv"], ["seconds", "fiwc"], ["memory", ["cap"]]])
  for (const key of keys) {
    const { label, least, most, step, default: usual } = engine.controls.find(control => control.key === key);
    // The right end of a slider without a default means no limit.
    const far = usual === null ? +(most + step).toPrecision(6) : most;
    const slider = element("input", "", { type: "range", min: least, max: far, step, ariaLabel: `${label}, slider` });
    const field = element("input", "", { name: key, inputMode: "decimal", placeholder: usual ?? "none" });
    const row = element("label");
    row.append(element("span", label), slider, field);
    document.getElementById(place).append(row);
    const follow = () => { slider.value = field.value === "" ? usual ?? far : field.value; };
    slider.addEventListener("input", () => { field.value = usual === null && +slider.value === far ? "" : slider.value; });
    field.addEventListener("input", follow);
    byKey.set(key, { usual: usual === null ? "" : String(usual), field, follow });
  }
for (const [key, usual] of Object.entries(engine.defaults)) {
  const field = form.elements[key];
  for (const [heading, schedules] of Object.entries(engine.groups)) {
    const group = element("optgroup", "", { label: heading });
    group.append(...schedules.map(([name, summary]) => element("option", name, { value: name, title: summary })));
    field.append(group);
  }
  byKey.set(key, { usual, field, follow() {} });
}

// The values that differ from their defaults, as in the page's address.
function query() {
  const values = new URLSearchParams();
  for (const [key, { usual, field }] of byKey) if (field.value !== usual) values.set(key, field.value);
  return values;
}

function restore(text) {
  const values = new URLSearchParams(text);
  for (const [key, { usual, field, follow }] of byKey) {
    const value = values.get(key) ?? usual;
    // A name that the list lacks gets an error from the answer, not silence.
    if (field.options && ![...field.options].some(option => option.value === value)) field.append(element("option", value, { value }));
    field.value = value;
    follow();
  }
  form.elements.side.checked = values.has("side");
}

// -------------------------------------------------------------------------------------------------------------- answers

const worker = engine.pyodide && new Worker(URL.createObjectURL(new Blob([engine.worker], { type: "text/javascript" })), { type: "module" });
let ready = !worker, last = Promise.resolve();

// One question at a time.
const ask = text => last = last.catch(() => null).then(() => reply(text));

async function reply(text) {
  if (!worker) {
    const answer = await fetch(`data?${text}`).catch(() => null);
    if (!answer?.ok) throw new Error("No answer. Is pipemem explore still running? Its terminal may say more");
    return answer.json();
  }
  const pyodide = new URL(engine.pyodide, location.href).href;
  // Before the first answer, an error is one of loading Python.
  const failed = text => new Error(ready ? text
    : `Python did not load from ${new URL(pyodide).host || pyodide} (${text}). Run pipemem explore on your machine instead`);
  const answer = await new Promise((resolve, reject) => {
    worker.onmessage = event => event.data.error ? reject(failed(event.data.error)) : resolve(event.data.text);
    worker.onerror = event => reject(failed(event.message || "no reason given"));
    const archive = ready ? null : Uint8Array.from(atob(engine.package), letter => letter.charCodeAt(0));
    worker.postMessage({ pyodide, archive, query: text });
  });
  ready = true;
  return JSON.parse(answer);
}

// What is moved while a question is open is asked next, so sliders never queue up.
let pending = null, again = false, addressed = 0;
function update() {
  again = Boolean(pending);
  return pending ??= answered().finally(() => { pending = null; });
}

async function answered() {
  do {
    again = false;
    let failed = false;
    const text = query().toString(), begun = performance.now();
    const patience = setTimeout(() => {
      if (ready || text) document.body.classList.add("waiting");
      if (ready) status_.textContent = "computing ...";
    }, 300);
    try {
      const answer = await ask(text), told = performance.now();
      present(answer, text);
      await new Promise(requestAnimationFrame);
      status_.textContent = `answered in ${(told - begun).toFixed(0)} ms, drawn in ${(performance.now() - told).toFixed(0)} ms`;
    } catch (error) {
      status_.textContent = "no answer";
      document.getElementById("facts").replaceChildren(card({ schedule: "No answer", error: error.message }));
      runs.forEach((_, i) => panels[i].section.classList.add("stale"));
      failed = true;
    }
    status_.classList.toggle("wrong", failed);
    clearTimeout(patience);
    document.body.classList.remove("waiting");
  } while (again);
  clearTimeout(addressed); // browsers limit how often an address may change
  addressed = setTimeout(() => history.replaceState(null, "", `#${address()}`), 200);
}

// A schedule without an answer, for example above the cap, keeps its last picture, pale.
const remembered = [];
function present(answer, text) {
  const fresh = [...answer.runs];
  let slots = answer.facts.map((facts, i) => ({ old: !!facts.error, run: facts.error ? remembered[i]?.run : fresh.shift() }));
  if (answer.facts.every(facts => !facts.schedule)) slots = remembered.map(({ run }) => ({ old: true, run }));
  slots.forEach((slot, i) => { remembered[i] = slot; });
  remembered.length = slots.length;
  const shown = slots.filter(({ run }) => run), newest = shown.some(({ old }) => !old);
  load({ ...answer, runs: shown.map(({ run }) => run), ...(newest ? {} : { shared: end, units: data.units }) });
  shown.forEach(({ old }, i) => panels[i].section.classList.toggle("stale", old));
  const places = slots.map(slot => shown.indexOf(slot));
  document.getElementById("facts").replaceChildren(...answer.facts.map((facts, i) => card(facts, answer, places[i], i, text)));
  document.body.classList.toggle("empty", !runs.length);
}

const address = () => `${query()}${form.elements.side.checked ? "&side" : ""}`.replace(/^&/, "");

function card(facts, answer, place, index, asked) {
  const made = element("section", "", { className: facts.error ? "card wrong" : "card" });
  made.append(element("h2", facts.schedule || "These numbers do not work"), element("p", facts.error || facts.summary));
  if (facts.instead) made.append(element("button", `Take ${facts.instead}`, { type: "button", onclick() {
    form.elements["ab"[index]].value = facts.instead;
    update();
  } }));
  if (facts.error) return made;
  const first = answer.facts.find(each => !each.error), list = element("dl");
  const beside = (value, of) => facts === first || !of ? "" : ` ${(value / of).toFixed(2)} of ${first.schedule}'s`;
  for (const [name, text, note] of [
    ["bubble", `${(100 * facts.bubble).toFixed(1)} %`, ""],
    ["peak memory", number(+facts.peak.toPrecision(4)), beside(facts.peak, first.peak)],
    ["step", number(facts.makespan), beside(facts.makespan, first.makespan)],
    ["messages", String(facts.messages), ""],
    ["chunks", String(facts.chunks), ""],
  ]) {
    const pair = element("div"), value = element("dd", text);
    value.append(element("small", note));
    pair.append(element("dt", name), value);
    list.append(pair);
  }
  const buttons = element("div", "", { className: "buttons" });
  const run = runs[place];
  const button = (text, title, action) => buttons.append(element("button", text, { type: "button", title, onclick: action }));
  button("Copy command", "the command that prints these numbers", () => copy(facts.command));
  button("Schedule CSV", "the order of every device, as pipemem check, simulate and run read it",
    async () => save(`${facts.schedule}.csv`, new Blob([await ask(`${asked}&csv=${encodeURIComponent(facts.schedule)}`)], { type: "text/csv" })));
  button("Times CSV", "start, end and memory of every action", () => save(`${facts.schedule}-times.csv`, times(run)));
  made.append(list, element("code", facts.command), buttons);
  return made;
}

// --------------------------------------------------------------------------------------------------------------- saving

function times(run) {
  const lines = run.rows.flatMap((row, device) =>
    row.mb.map((microbatch, i) => {
      const numbers = [row.start[i], row.end[i], row.held[i]].map(each => +each.toPrecision(9));
      return [device, nameOf(run, row, i), run.passes[row.pass[i]][1], microbatch, ...numbers].join();
    }));
  return new Blob([["device,action,chunk,microbatch,start,end,held_after", ...lines, ""].join("\n")], { type: "text/csv" });
}

function save(name, blob) {
  const link = element("a", "", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function copy(text) {
  const told = () => { status_.textContent = "copied"; };
  navigator.clipboard?.writeText(text).then(told, () => prompt("Copy:", text)) ?? prompt("Copy:", text);
}

// The pictures below each other, with their titles and legends.
function png() {
  if (!runs.length) return;
  const width = Math.max(...runs.map(run => run.canvas.clientWidth)), sheet = document.createElement("canvas");
  const measuring = sized(sheet, 1, 1, 1);
  measuring.font = `12px ${FONT}`;
  let bottom = 0;
  const parts = runs.map(run => {
    const top = bottom, chips = [];
    let x = 6, y = top + run.height + 36;
    for (const [name, shade, ink] of run.legend) {
      const wide = measuring.measureText(name).width + 14;
      if (x + wide > width) [x, y] = [6, y + 26];
      chips.push({ name, shade, ink, x, y, wide });
      x += wide + 8;
    }
    bottom = y + 34;
    return { run, top, chips };
  });
  const pen = sized(sheet, width, bottom, window.devicePixelRatio || 1);
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, width, bottom);
  for (const { run, top, chips } of parts) {
    pen.font = `bold 14px ${FONT}`;
    pen.fillStyle = "#202124";
    pen.fillText(run.title, 6, top + 16);
    pen.drawImage(run.canvas, 0, top + 30, run.canvas.clientWidth, run.height);
    pen.font = `12px ${FONT}`;
    for (const { name, shade, ink, x, y, wide } of chips) {
      pen.fillStyle = shade;
      pen.fillRect(x, y, wide, 20);
      pen.fillStyle = ink;
      pen.fillText(name, x + 7, y + 11);
    }
  }
  sheet.toBlob(blob => save(`${runs.map(run => run.name).join("-")}.png`, blob));
}

function arrange() {
  document.getElementById("runs").classList.toggle("side", form.elements.side.checked);
  refresh();
}

form.addEventListener("input", () => { arrange(); update(); });
form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("reset", event => { event.preventDefault(); restore(""); arrange(); update(); });
press("link", () => { history.replaceState(null, "", `#${address()}`); copy(location.href); });
press("png", png);
addEventListener("hashchange", () => { restore(location.hash.slice(1)); arrange(); update(); });
restore(location.hash.slice(1));
arrange();
present(data, ""); // the answer to no query came with the page
if (worker) status_.textContent = "Python is starting in this browser, which takes some seconds";
if (`${query()}`) remembered.length = 0;
if (worker || `${query()}`) update();
Object.defineProperty(window.pipemem, "updated", { get: () => Promise.resolve(pending) }); // for scripts
