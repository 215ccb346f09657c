"use strict";
// The arithmetic of irpe.core in JavaScript: Eq. 18-25 of the paper, in float64, offsets query
// minus key. tests/viz/test_buckets_js.py compares it with the Python core.

// Rounds halves to even, as torch.round does; Math.round takes them upwards.
function roundHalfToEven(x) {
  return Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x);
}

function maxIndex(index) {
  return Math.floor(index.beta);
}

// Eq. 18 for {kind: "piecewise", alpha, beta, gamma}, Eq. 9 for {kind: "clip", beta}.
function indexOf(index, x) {
  const far = Math.abs(x);
  let bucket = roundHalfToEven(x);
  if (index.kind === "piecewise" && far > index.alpha) {
    const slope = (index.beta - index.alpha) / Math.log(index.gamma / index.alpha);
    bucket = Math.sign(x) * roundHalfToEven(index.alpha + Math.log(far / index.alpha) * slope);
  }
  const m = maxIndex(index);
  return Math.max(-m, Math.min(m, bucket)) + 0; // no negative zero
}

// The rank of each integer among the sums of two squares, up to a largest.
function ranksOfSumsOfSquares(largest) {
  const isSum = new Uint8Array(largest + 1);
  for (let a = 0; a * a <= largest; a++)
    for (let b = a; a * a + b * b <= largest; b++) isSum[a * a + b * b] = 1;
  const ranks = new Int32Array(largest + 1);
  let rank = -1;
  for (let n = 0; n <= largest; n++) ranks[n] = isSum[n] ? ++rank : rank;
  return ranks;
}

// From an offset to one bucket a table, by method (Eq. 19-25).
const METHODS = {
  euclidean: (row, column, index) => [indexOf(index, Math.sqrt(row * row + column * column))],
  quantization: (row, column, index, ranks) => [indexOf(index, ranks[row * row + column * column])],
  cross: (row, column, index) => [row, column].map((x) => indexOf(index, x) + maxIndex(index)),
  product: (row, column, index) => {
    const m = maxIndex(index);
    return [(indexOf(index, row) + m) * (2 * m + 1) + indexOf(index, column) + m];
  },
};

function tableRows(method, index) {
  const m = maxIndex(index);
  return {
    euclidean: [m + 1],
    quantization: [m + 1],
    cross: [2 * m + 1, 2 * m + 1],
    product: [(2 * m + 1) ** 2],
  }[method];
}

// One map a table. Ids are kept by offset: -(rows - 1) to rows - 1, -(columns - 1) to columns - 1.
function bucketMaps(method, index, [rows, columns], prefix) {
  const [tall, wide] = [2 * rows - 1, 2 * columns - 1];
  const ranks = ranksOfSumsOfSquares((rows - 1) ** 2 + (columns - 1) ** 2);
  const maps = tableRows(method, index).map((count) => ({
    rows: count + (prefix > 0 ? 1 : 0),
    ids: new Int32Array(tall * wide),
  }));
  for (let y = 0; y < tall; y++)
    for (let x = 0; x < wide; x++) {
      const ids = METHODS[method](y - rows + 1, x - columns + 1, index, ranks);
      ids.forEach((id, number) => (maps[number].ids[y * wide + x] = id));
    }
  for (const map of maps) {
    const used = new Set(map.ids);
    if (prefix > 0) used.add(map.rows - 1);
    map.used = [...used].sort((a, b) => a - b);
    map.place = new Map(map.used.map((id, place) => [id, place]));
  }
  return maps;
}

// The bucket of a query and a key, both numbers of tokens, prefix tokens first.
function bucketOf(map, [rows, columns], prefix, query, key) {
  if (query < prefix || key < prefix) return map.rows - 1;
  const [q, k] = [query - prefix, key - prefix];
  const row = Math.floor(q / columns) - Math.floor(k / columns);
  const column = (q % columns) - (k % columns);
  return map.ids[(row + rows - 1) * (2 * columns - 1) + column + columns - 1];
}

// Parameters and multiply-accumulates of a DeiT with patches of 16 x 16 pixels, and what the
// encoding adds: k rows in use cost n k d for each table (Eq. 27), never more than n n d.
function cost(model, spec, maps, [rows, columns], prefix) {
  const { dim, heads, depth } = model;
  const [patches, tokens] = [rows * columns, prefix + rows * columns];
  const block = 12 * dim * dim + 13 * dim;
  const ends = 769 * dim + prefix * dim + tokens * dim + 2 * dim + 1000 * dim + 1000;
  const matmuls = depth * (12 * tokens * dim * dim + 2 * tokens * tokens * dim);
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const tableHeads = spec.shared ? 1 : heads;
  const isBias = spec.mode === "bias";
  const numbersPerRow = isBias ? tableHeads : (tableHeads * spec.targets.length * dim) / heads;
  const used = sum(maps.map((map) => Math.min(map.used.length, tokens)));
  return {
    parameters: depth * block + ends,
    extraParameters: depth * sum(maps.map((map) => map.rows)) * numbersPerRow,
    macs: matmuls + 768 * patches * dim + 1000 * dim,
    extraMacs: isBias ? 0 : depth * tokens * used * dim * spec.targets.length,
  };
}

function specText({ method, mode, targets, index, shared }) {
  const { kind, alpha, beta, gamma } = index;
  const isRatio = beta === 2 * alpha && gamma === 8 * alpha;
  const text = kind === "clip" ? `clip${beta}` : isRatio ? `${alpha}` : `${alpha}:${beta}:${gamma}`;
  return `${method}-${mode}-${targets}@${text}${shared ? "" : "+unshared"}`;
}

if (typeof module !== "undefined") module.exports = { bucketMaps, bucketOf, cost, indexOf, specText };
