"use strict";
// The page: reads the controls, draws the maps, and shows what a run has learned.

const $ = (id) => document.getElementById(id);
const facts = JSON.parse($("facts").textContent);
const run = JSON.parse($("run").textContent);
const state = { star: [7, 7], held: false, pointed: null, grid: null, maps: [] };

// Reads a number, or explains what is wrong with it.
function readNumber(id, isWhole) {
  const field = $(id);
  const [value, min, max] = [field.valueAsNumber, Number(field.min), Number(field.max)];
  const isValid = value >= min && value <= max && (!isWhole || Number.isInteger(value));
  field.setAttribute("aria-invalid", String(!isValid));
  const name = field.parentElement.textContent.trim();
  const kind = isWhole ? "a whole number" : "a number";
  if (!isValid) throw new RangeError(`${name} must be ${kind} of ${min} to ${max}.`);
  return value;
}

function readIndex() {
  const kind = $("kind").value;
  if (kind === "clip") return { kind, beta: readNumber("clip") };
  if (kind === "ratio") {
    const ratio = readNumber("ratio");
    return { kind: "piecewise", alpha: ratio, beta: 2 * ratio, gamma: 8 * ratio };
  }
  const [alpha, beta, gamma] = ["alpha", "beta", "gamma"].map((id) => readNumber(id));
  if (!(alpha < beta && beta < gamma)) throw new RangeError("α < β < γ must hold.");
  return { kind, alpha, beta, gamma };
}

function readControls() {
  const [method, mode] = [$("method").value, $("mode").value];
  const targets = mode === "bias" ? "k" : $("targets").value;
  const grid = [readNumber("rows", true), readNumber("columns", true)];
  const prefix = readNumber("prefix", true);
  return { spec: { method, mode, targets, index: readIndex(), shared: $("shared").checked }, grid, prefix };
}

function showOnlyWhatCounts() {
  for (const label of document.querySelectorAll("[data-kind]"))
    label.hidden = label.dataset.kind !== $("kind").value;
  $("targets").disabled = $("mode").value === "bias";
}

// Everything after a control has changed.
function update() {
  showOnlyWhatCounts();
  try {
    Object.assign(state, readControls());
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    $("error").textContent = error.message;
    $("error").hidden = false;
    $("shown").hidden = true;
    return;
  }
  $("error").hidden = true;
  $("shown").hidden = false;
  const { spec, grid, prefix } = state;
  state.maps = bucketMaps(spec.method, spec.index, grid, prefix);
  for (const map of state.maps) map.colours = bucketColours(map, spec.method, grid);
  state.star = state.star.map((place, axis) => Math.min(place, grid[axis] - 1));
  state.pointed = null;
  makeCanvases();
  showNumbers();
  draw();
}

function makeCanvases() {
  const names = state.maps.length > 1 ? ["rows", "columns"] : [state.spec.method];
  if ($("maps").children.length !== names.length)
    $("maps").replaceChildren(...names.map((_, number) => makeCanvas(number)));
  [...$("maps").children].forEach((figure, number) => {
    const { rows, used } = state.maps[number];
    figure.firstChild.setAttribute("aria-label", `buckets by ${names[number]}`);
    const all = used.length === rows ? "" : ` of ${rows}`;
    figure.lastChild.textContent = `${names[number]}: ${used.length}${all} buckets in use`;
  });
}

function makeCanvas(number) {
  const figure = document.createElement("figure");
  const canvas = document.createElement("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-describedby", "status");
  figure.append(canvas, document.createElement("figcaption"));
  listen(canvas, state, draw, () => state.layouts[number]);
  return figure;
}

// The pointer and the arrow keys move the star; a click holds it, and then the pointer points.
function listen(canvas, view, redraw, layoutOf) {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const patchOf = (event) => layoutOf().patchAt(event.offsetX, event.offsetY);
  canvas.addEventListener("pointermove", (event) => {
    const patch = patchOf(event);
    if (!patch || event.pointerType === "touch") return;
    view[view.held ? "pointed" : "star"] = patch;
    redraw();
  });
  canvas.addEventListener("pointerleave", () => {
    view.pointed = null;
    redraw();
  });
  canvas.addEventListener("click", (event) => {
    const patch = patchOf(event);
    if (!patch) return;
    Object.assign(view, { star: patch, held: event.pointerType !== "touch", pointed: null });
    redraw();
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape") Object.assign(view, { held: false, pointed: null });
    else if (!steps[event.key]) return;
    else {
      const moved = view.star.map((place, axis) => place + steps[event.key][axis]);
      view.star = moved.map((place, axis) => Math.max(0, Math.min(view.grid[axis] - 1, place)));
    }
    event.preventDefault();
    redraw();
  });
}

// The bucket of every token in each map, as the star sees them.
function bucketsOfStar() {
  const { grid, prefix, star, maps } = state;
  const query = prefix + star[0] * grid[1] + star[1];
  const tokens = [...Array(prefix + grid[0] * grid[1]).keys()];
  return maps.map((map) => tokens.map((key) => bucketOf(map, grid, prefix, query, key)));
}

function draw() {
  const { grid, prefix, pointed, maps } = state;
  const buckets = bucketsOfStar();
  const token = pointed && prefix + pointed[0] * grid[1] + pointed[1];
  state.layouts = maps.map((map, number) => {
    const marked = pointed ? buckets[number][token] : null;
    const canvas = $("maps").children[number].firstChild;
    return drawBuckets(canvas, map, { ...state, marked }, buckets[number]);
  });
  const style = getComputedStyle(document.documentElement);
  const [ink, line] = ["--accent", "--line"].map((name) => style.getPropertyValue(name));
  drawCurve($("curve"), state.spec.index, ink, line);
  $("status").textContent = describe(buckets, token);
}

function describe(buckets, token) {
  const { star, pointed, prefix, held } = state;
  const seen = buckets.map((ids) => new Set(ids.slice(prefix)).size).join(" and ");
  const where = `Star at row ${star[0]}, column ${star[1]}${held ? ", held" : ""}: `;
  if (!pointed) return `${where}it distinguishes ${seen} buckets of patches.`;
  const offset = star.map((place, axis) => place - pointed[axis]).join(", ");
  const parts = buckets.map((ids) => {
    const sharing = ids.filter((id) => id === ids[token]).length;
    return `bucket ${ids[token]}, shared by ${sharing}`;
  });
  return `${where}offset (${offset}) is ${parts.join("; ")}.`;
}

function showNumbers() {
  const { spec, grid, prefix, maps } = state;
  const { parameters, extraParameters, macs, extraMacs } = cost(
    facts.models[$("model").value], spec, maps, grid, prefix,
  );
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const million = (value) => (value / 1e6).toLocaleString("en", { maximumFractionDigits: 2 });
  const rows = {
    "buckets": [sum(maps.map((map) => map.rows)), ""],
    "in use": [sum(maps.map((map) => map.used.length)), `on ${grid.join(" × ")} + ${prefix}`],
    parameters: [`+${extraParameters.toLocaleString("en")}`, `on top of ${million(parameters)} M`],
    MACs: [`+${million(extraMacs)} M`, `on top of ${million(macs)} M`],
  };
  $("numbers").replaceChildren(...Object.entries(rows).map(([name, [value, note]]) => {
    const item = document.createElement("div");
    const [title, number, small] = ["dt", "dd", "small"].map((tag) => document.createElement(tag));
    title.textContent = name;
    number.textContent = `${value} `;
    small.textContent = note;
    number.append(small);
    item.append(title, number);
    return item;
  }));
  $("code").textContent = `irpe.equip(model, "${specText(spec)}")`;
}

function fill(select, options) {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
}

function takeDefaultRatio() {
  const ratio = facts.ratios[$("method").value];
  const values = { ratio, alpha: ratio, beta: 2 * ratio, gamma: 8 * ratio };
  for (const [id, value] of Object.entries(values)) $(id).value = value;
}

// Opens the page on the grid and the encoding of a block.
function openOn({ grid, prefix, spec }) {
  const { kind, alpha, beta, gamma } = spec.index;
  const isRatio = kind === "piecewise" && beta === 2 * alpha && gamma === 8 * alpha;
  const values = { rows: grid[0], columns: grid[1], prefix, method: spec.method, mode: spec.mode };
  Object.assign(values, { targets: spec.targets, kind: isRatio ? "ratio" : kind });
  if (kind === "clip") values.clip = beta;
  else Object.assign(values, { ratio: alpha, alpha, beta, gamma });
  for (const [id, value] of Object.entries(values)) $(id).value = value;
  $("shared").checked = spec.shared;
  state.star = grid.map((size) => Math.floor(size / 2));
}

function start() {
  fill($("method"), Object.keys(facts.ratios).map((name) => [name, name]));
  fill($("targets"), facts.targets.map((name) => [name, name]));
  fill($("model"), Object.keys(facts.models).map((name) => [name, name]));
  $("method").value = "product";
  $("targets").value = "k";
  $("model").value = "DeiT-S";
  takeDefaultRatio();
  if (run) openOn(run.blocks[0]);
  document.body.classList.toggle("has-run", Boolean(run));
  $("method").addEventListener("input", takeDefaultRatio);
  $("controls").addEventListener("input", update);
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  update();
  if (run) startRun();
}
