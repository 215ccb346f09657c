"use strict";
// What a run has learned: its tables, and the extra weights that they give on one picture.

const learned = { star: [0, 0], held: false, pointed: null, grid: null, picture: new Image() };

// Numbers of 16 bits, as Python wrote them.
function readHalves(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return Float32Array.from(new Uint16Array(bytes.buffer), (bits) => {
    const [sign, exponent, part] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + part / 1024) : 2 ** -14 * (part / 1024));
  });
}

function chooseBlock() {
  const block = run.blocks[$("block").value];
  const { grid, prefix, heads, spec } = block;
  const maps = bucketMaps(spec.method, spec.index, grid, prefix);
  const terms = block.terms.map((term) => ({ ...term, values: readHalves(term.data) }));
  const star = learned.grid ? learned.star : grid.map((size) => Math.floor(size / 2));
  Object.assign(learned, { grid, block, maps, terms });
  learned.star = star.map((place, axis) => Math.min(place, grid[axis] - 1));
  const names = [...Array(heads).keys()].map((head) => [String(head), `head ${head}`]);
  keepChoice($("head"), [["mean", "mean of heads"], ...names]);
  keepChoice($("table"), block.tables.map(({ name }, number) => [String(number), name]));
  drawLearned();
}

function keepChoice(select, options) {
  const before = select.value;
  fill(select, options);
  if (options.some(([value]) => value === before)) select.value = before;
}

// b_ij of the star and every patch, in one head: each term is a number of the query or the key (or
// of nobody, for a bias) for each row in use (Eq. 28).
function extraWeights(head) {
  const { grid, block, maps, terms, star } = learned;
  const { prefix } = block;
  const query = prefix + star[0] * grid[1] + star[1];
  return [...Array(grid[0] * grid[1]).keys()].map((patch) => {
    let sum = 0;
    for (const { owner, map, owners, values } of terms) {
      const { place, used } = maps[map];
      const row = place.get(bucketOf(maps[map], grid, prefix, query, prefix + patch));
      const token = { query, key: prefix + patch, nobody: 0 }[owner];
      sum += values[(head * owners + token) * used.length + row];
    }
    return sum;
  });
}

function chosenWeights() {
  const { heads } = learned.block;
  if ($("head").value !== "mean") return extraWeights(Number($("head").value));
  const all = [...Array(heads).keys()].map(extraWeights);
  return all[0].map((_, patch) => all.reduce((sum, weights) => sum + weights[patch] / heads, 0));
}

// They as shares of the attention scores, less what all patches have in common.
function scoreShares() {
  const weights = chosenWeights();
  const mean = weights.reduce((sum, value) => sum + value, 0) / weights.length;
  return weights.map((value) => (value - mean) / learned.block.unit);
}

const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);

function drawLearned() {
  const { grid, star, pointed, block, picture } = learned;
  const shares = scoreShares();
  const bound = Math.max(1, largest(shares)); // an encoding that does little is pale
  learned.layout = drawWeights($("weights"), picture, shares, learned, bound);
  const at = pointed || star;
  const perCent = (value) => `${Number((100 * value).toPrecision(2))} %`;
  $("weights-status").textContent =
    `In this block it is ${perCent(block.share)} of the scores (before softmax: not the effect, which ` +
    "is on the output). Orange adds, purple takes away, up to " +
    `${perCent(bound)}; row ${at[0]}, column ${at[1]}: ${perCent(shares[at[0] * grid[1] + at[1]])}.`;
  const table = block.tables[Number($("table").value)];
  const values = readHalves(table.data);
  drawMatrix($("table-image"), values, table.columns, largest(values) || 1);
  $("table-status").textContent =
    `${values.length} buckets without the prefix, up to ${largest(values).toPrecision(3)}.`;
}

function startRun() {
  $("learned").hidden = false;
  $("run-name").textContent = run.name;
  fill($("block"), run.blocks.map(({ name, spec }, number) => [number, `${name}, ${specText(spec)}`]));
  learned.picture.addEventListener("load", () => {
    chooseBlock();
    $("block").addEventListener("input", chooseBlock);
    for (const id of ["head", "table"]) $(id).addEventListener("input", drawLearned);
    window.addEventListener("resize", drawLearned);
    listen($("weights"), learned, drawLearned, () => learned.layout);
  });
  learned.picture.src = run.image;
}

start();
