"use strict";
// Canvases, and the colours of numbers.

const ORANGE_PURPLE = [
  [45, 0, 75], [84, 39, 136], [128, 115, 172], [178, 171, 210], [216, 218, 235], [247, 247, 247],
  [254, 224, 182], [253, 184, 99], [224, 130, 20], [179, 88, 6], [127, 59, 8],
];
const STAR = "#e8000b";
const PREFIX = [0, 0, 0]; // not a colour of any bucket of patches

// A colour of a scale, at a place from 0 to 1.
function colourAt(scale, place) {
  const at = Math.max(0, Math.min(1, place)) * (scale.length - 1);
  const low = Math.min(Math.floor(at), scale.length - 2);
  return scale[low].map((value, band) => Math.round(value + (scale[low + 1][band] - value) * (at - low)));
}

const css = (colour) => `rgb(${colour.join(" ")})`;
const isDark = ([red, green, blue]) => 0.3 * red + 0.59 * green + 0.11 * blue < 128;

// Gives a canvas a size in CSS pixels, sharp on any screen, and returns its pen.
function sized(canvas, width, height) {
  const fine = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * fine);
  canvas.height = Math.round(height * fine);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(fine, 0, 0, fine, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

// The width of a picture of a grid: two of them, one above the other, fit on a screen.
function sideOf(canvas, [rows, columns]) {
  const height = Math.min(340, 0.28 * window.innerHeight);
  return Math.min(canvas.parentElement.clientWidth, height * Math.max(1, columns / rows));
}

function drawStar(pen, x, y, radius) {
  pen.beginPath();
  for (let point = 0; point < 10; point++) {
    const [angle, far] = [(point * Math.PI) / 5 - Math.PI / 2, point % 2 ? 0.42 * radius : radius];
    pen.lineTo(x + far * Math.cos(angle), y + far * Math.sin(angle));
  }
  pen.closePath();
  Object.assign(pen, { fillStyle: STAR, strokeStyle: "white", lineWidth: 1 });
  pen.fill();
  pen.stroke();
}

// Where tokens are on a canvas: prefix tokens above the patches, half a cell between them.
function layout(width, [rows, columns], prefix) {
  const exact = Math.max(3, width / columns);
  const cell = exact < 8 ? exact : Math.floor(exact); // whole pixels leave no seams
  const lines = Math.ceil(prefix / columns);
  const top = prefix ? (lines + 0.5) * cell : 0;
  const corner = (token) => {
    const place = token < prefix ? token : token - prefix;
    const [row, column] = [Math.floor(place / columns), place % columns];
    return [column * cell, (token < prefix ? 0 : top) + row * cell];
  };
  const patchAt = (x, y) => {
    const [row, column] = [Math.floor((y - top) / cell), Math.floor(x / cell)];
    return row >= 0 && row < rows && column >= 0 && column < columns ? [row, column] : null;
  };
  return { cell, corner, patchAt, width: cell * columns, height: top + cell * rows };
}

// Draws the buckets of all tokens as the star sees them; `marked` is a bucket to point out.
function drawBuckets(canvas, map, { grid, prefix, star, marked }, ids) {
  const [rows, columns] = grid;
  const place = layout(Math.min(canvas.parentElement.clientWidth, 40 * columns), grid, prefix);
  const pen = sized(canvas, place.width, place.height);
  const { cell } = place;
  Object.assign(pen, { textAlign: "center", textBaseline: "middle", strokeStyle: "#808890" });
  pen.font = `${Math.min(12, cell * 0.4)}px system-ui, sans-serif`;
  ids.forEach((id, token) => {
    const [x, y] = place.corner(token);
    const colour = token < prefix ? PREFIX : map.colours.get(id);
    pen.fillStyle = css(colour);
    pen.fillRect(x, y, cell + 0.5, cell + 0.5);
    if (token < prefix) pen.strokeRect(x + 0.5, y + 0.5, cell - 1, cell - 1);
    if (cell >= 16) {
      pen.fillStyle = isDark(colour) ? "rgb(255 255 255 / 85%)" : "rgb(0 0 0 / 80%)";
      pen.fillText(id, x + cell / 2, y + cell / 2);
    }
  });
  if (prefix && prefix * cell + 60 < place.width) {
    Object.assign(pen, { fillStyle: "#808890", textAlign: "left", font: "12px system-ui, sans-serif" });
    pen.fillText(prefix > 1 ? "prefix tokens" : "prefix token", prefix * cell + 8, cell / 2);
  }
  const differs = (token, other) => ids[token] !== ids[other];
  pen.fillStyle = "white";
  for (let token = prefix; token < ids.length; token++) {
    const [x, y] = place.corner(token);
    if ((token - prefix) % columns && differs(token, token - 1)) pen.fillRect(x - 0.5, y, 1, cell);
    if (token - prefix >= columns && differs(token, token - columns)) pen.fillRect(x, y - 0.5, cell, 1);
  }
  ids.forEach((id, token) => {
    if (id !== marked) return;
    const [x, y] = place.corner(token);
    Object.assign(pen, { strokeStyle: STAR, lineWidth: 2 });
    pen.strokeRect(x + 1, y + 1, cell - 2, cell - 2);
  });
  const [x, y] = place.corner(prefix + star[0] * columns + star[1]);
  drawStar(pen, x + cell / 2, y + cell / 2, Math.max(4, cell * 0.46));
  return place;
}

// Draws the index function over the distances.
function drawCurve(canvas, index, ink, line) {
  const [width, height] = [canvas.parentElement.clientWidth - 26, 84];
  const pen = sized(canvas, width, height);
  const far = 1.25 * (index.kind === "clip" ? 4 * index.beta : index.gamma);
  const m = Math.max(maxIndex(index), 1);
  const x = (distance) => (width * (distance + far)) / (2 * far);
  const y = (bucket) => height / 2 - (bucket / m) * (height / 2 - 5);
  pen.fillStyle = line;
  pen.fillRect(0, height / 2, width, 1);
  pen.fillRect(width / 2, 0, 1, height);
  pen.beginPath();
  for (let step = 0; step <= 800; step++) {
    const distance = (step / 400 - 1) * far;
    pen.lineTo(x(distance), y(indexOf(index, distance)));
  }
  Object.assign(pen, { strokeStyle: ink, lineWidth: 1.5 });
  pen.stroke();
}

// Draws numbers from -bound to bound as a matrix, a strip if it has one row.
function drawMatrix(canvas, values, columns, bound) {
  const rows = values.length / columns;
  const width = sideOf(canvas, [rows > 1 ? rows : columns, columns]);
  const height = rows > 1 ? (width * rows) / columns : 36;
  const pen = sized(canvas, width, height);
  for (let place = 0; place < values.length; place++) {
    const [row, column] = [Math.floor(place / columns), place % columns];
    pen.fillStyle = css(colourAt(ORANGE_PURPLE, 0.5 + values[place] / (2 * bound)));
    const [x, y] = [(column * width) / columns, (row * height) / rows];
    pen.fillRect(x, y, width / columns + 0.5, height / rows + 0.5);
  }
  if (rows > 1) drawStar(pen, width / 2, height / 2, Math.max(5, (0.4 * width) / columns));
}

// Draws the extra weights of the star over the picture that the model was given.
function drawWeights(canvas, picture, weights, { grid, star }, bound) {
  const place = layout(sideOf(canvas, grid), grid, 0);
  const pen = sized(canvas, place.width, place.height);
  pen.drawImage(picture, 0, 0, place.width, place.height);
  pen.globalAlpha = 0.72;
  weights.forEach((value, patch) => {
    const [x, y] = place.corner(patch);
    pen.fillStyle = css(colourAt(ORANGE_PURPLE, 0.5 + value / (2 * bound)));
    pen.fillRect(x, y, place.cell, place.cell);
  });
  pen.globalAlpha = 1;
  const [x, y] = place.corner(star[0] * grid[1] + star[1]);
  drawStar(pen, x + place.cell / 2, y + place.cell / 2, Math.max(5, place.cell * 0.4));
  return place;
}
