"use strict";
// The colours of buckets, as irpe.viz.offset_colours has them: the hue is the direction from the
// star, darker is farther, in all maps alike. tests/viz/test_buckets_js.py compares them.

const DIRECTED = ["cross", "product"];

// A colour of OKLCH in sRGB, bands of 0 to 255.
function oklch(lightness, chroma, hue) {
  const [a, b] = [chroma * Math.cos(hue), chroma * Math.sin(hue)];
  const [l, m, s] = [
    lightness + 0.3963377774 * a + 0.2158037573 * b,
    lightness - 0.1055613458 * a - 0.0638541728 * b,
    lightness - 0.0894841775 * a - 1.291485548 * b,
  ].map((value) => value ** 3);
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((value) => {
    const linear = Math.max(0, Math.min(1, value));
    return 255 * (linear <= 0.0031308 ? 12.92 * linear : 1.055 * linear ** (1 / 2.4) - 0.055);
  });
}

const lightnessAt = (far) => 0.95 - 0.55 * far ** 0.65;
const grey = (far) => oklch(lightnessAt(far), 0, 0);

function directedColour(row, column) {
  const far = Math.min(Math.hypot(row, column), 1);
  const hue = (255 * Math.PI) / 180 - Math.atan2(column, -row);
  return oklch(lightnessAt(far), 0.12 * Math.min(1, 2.5 * Math.sqrt(far)), hue);
}

// The colour of each bucket of a map: that of the mean position of its keys, seen from the query.
function bucketColours(map, method, [rows, columns]) {
  const farthest = Math.max(Math.hypot(rows - 1, columns - 1), 1);
  const wide = 2 * columns - 1;
  const sums = new Map();
  map.ids.forEach((id, place) => {
    const [row, column] = [rows - 1 - Math.floor(place / wide), columns - 1 - (place % wide)];
    const sum = sums.get(id) || [0, 0, 0, 0];
    [row, column, Math.hypot(row, column), 1].forEach((value, at) => (sum[at] += value));
    sums.set(id, sum);
  });
  const colourOf = ([row, column, far, count]) =>
    DIRECTED.includes(method)
      ? directedColour(row / count / farthest, column / count / farthest)
      : grey(far / count / farthest);
  return new Map([...sums].map(([id, sum]) => [id, colourOf(sum).map(Math.round)]));
}

if (typeof module !== "undefined") module.exports = { bucketColours };
