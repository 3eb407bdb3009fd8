// Drawing on canvas: sharp on every screen, with the colours of the theme.

const PALETTE = ["#3b82c4", "#e08a3c", "#4aa564", "#c5547a", "#8a6fc9", "#b59a2c", "#3aa6a6", "#8c929a"];

const styles = new Map(); // of the theme: asking the browser makes it compute the whole page anew
function style(name) {
  if (!styles.has(name)) styles.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return styles.get(name);
}

function prepare(canvas, height, width = canvas.clientWidth) {
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return context;
}

function rgb(hex) {
  const full = hex.length === 4 ? [...hex.slice(1)].map((digit) => digit + digit).join("") : hex.slice(1);
  return [0, 2, 4].map((at) => parseInt(full.slice(at, at + 2), 16));
}

let heatColours = null;
function heatTable() {
  if (heatColours) return heatColours;
  const stops = ["--heat-0", "--heat-1", "--heat-2"].map((name) => rgb(style(name)));
  heatColours = Uint32Array.from({ length: 256 }, (_, level) => {
    if (level === 255) return 0; // does not read: nothing is drawn
    const place = Math.sqrt(Math.min(level / 250, 1)) * 2; // the root: short waits are seen too
    const [a, b] = place < 1 ? [stops[0], stops[1]] : [stops[1], stops[2]];
    const part = place < 1 ? place : place - 1;
    const [red, green, blue] = a.map((value, i) => Math.round(value + (b[i] - value) * part));
    return (255 << 24) | (blue << 16) | (green << 8) | red;
  });
  return heatColours;
}

function timeSpan() {
  const last = state.columns.at(-1);
  const end = last ? last.t : Date.now() / 1000;
  const most = state.range === "recent" ? 300 : 14400;
  const first = state.columns[0];
  // A young run fills the width, but a minute at least is shown.
  const begin = Math.max(end - most, Math.min(first ? first.t - first.d : end, end - 60));
  return [begin, end];
}

function timeAxis(context, left, right, y) {
  const [begin, end] = timeSpan();
  const wanted = (end - begin) / Math.max((right - left) / 110, 2);
  const step = [5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600].find((each) => each >= wanted) || 7200;
  context.fillStyle = style("--quiet");
  context.textAlign = "center";
  context.textBaseline = "top";
  const offset = new Date().getTimezoneOffset() * 60;
  for (let at = Math.ceil((begin - offset) / step) * step + offset; at <= end; at += step) {
    const x = left + ((at - begin) / (end - begin)) * (right - left);
    const text = step < 60 ? clock(at) : clock(at).slice(0, 5);
    const half = context.measureText(text).width / 2;
    if (x > left + half && x < right - half) context.fillText(text, x, y);
  }
}

const heatImage = document.createElement("canvas");
const heatPlace = { left: 60, top: 12, bottom: 18 };

// A row for each rank. With more ranks than pixels a row is of several, and shows the worst: one slow rank stays visible.
function drawHeat(canvas) {
  const ranks = state.ranks ? state.ranks.group.length : 0;
  const plot = Math.min(Math.max(ranks * 14, 56), window.innerWidth < 900 ? 200 : 280);
  const height = plot + heatPlace.top + heatPlace.bottom;
  const context = prepare(canvas, height);
  const width = canvas.clientWidth;
  const columns = state.columns;
  const { left, top } = heatPlace;
  const right = width - 2;
  timeAxis(context, left, right, top + plot + 4);
  context.fillStyle = style("--quiet");
  context.textAlign = "right";
  const rowHeight = plot / Math.max(ranks, 1);
  const every = [1, 2, 4, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000].find((each) => each * rowHeight >= 14) || 5000;
  context.textBaseline = "middle";
  for (let rank = 0; rank < ranks; rank += every) context.fillText("rank " + rank, left - 5, top + (rank + 0.5) * rowHeight);
  if (!columns.length || !ranks) return;
  const rows = Math.min(ranks, Math.max(Math.floor(plot * (window.devicePixelRatio || 1)), 1));
  heatImage.width = columns.length;
  heatImage.height = rows;
  const image = heatImage.getContext("2d");
  const pixels = image.createImageData(columns.length, rows);
  const view = new Uint32Array(pixels.data.buffer);
  const table = heatTable();
  columns.forEach((column, x) => {
    const waits = column.waits;
    if (rows === waits.length) {
      for (let row = 0; row < rows; row++) view[row * columns.length + x] = table[waits[row]];
      return;
    }
    const worst = new Int16Array(rows).fill(-1);
    for (let rank = 0; rank < waits.length && rank < ranks; rank++) {
      const row = Math.floor((rank * rows) / ranks);
      if (waits[rank] !== 255 && waits[rank] > worst[row]) worst[row] = waits[rank];
    }
    for (let row = 0; row < rows; row++) view[row * columns.length + x] = worst[row] < 0 ? 0 : table[worst[row]];
  });
  image.putImageData(pixels, 0, 0);
  context.imageSmoothingEnabled = false;
  const [begin, end] = timeSpan();
  const place = (at) => left + ((at - begin) / (end - begin)) * (right - left);
  columns.forEach((column, x) => {
    const from = Math.max(place(column.t - column.d), left);
    const to = place(column.t);
    if (to > left) context.drawImage(heatImage, x, 0, 1, rows, from, top, to - from + 0.4, plot);
  });
  drawFaults(context, place, left, top, plot);
}

function drawFaults(context, place, left, top, plot) {
  context.fillStyle = style("--bad");
  for (const [at, kind] of state.events) {
    const x = place(at);
    if (!FAULTS.has(kind) || x < left) continue;
    context.beginPath();
    context.moveTo(x - 4.5, 1);
    context.lineTo(x + 4.5, 1);
    context.lineTo(x, 9);
    context.fill();
    context.fillRect(x - 0.5, top - 3, 1, plot + 3);
  }
}

function drawScale(canvas) {
  const context = canvas.getContext("2d");
  const table = heatTable();
  for (let x = 0; x < canvas.width; x++) {
    const colour = table[Math.round((x / (canvas.width - 1)) * 250)];
    context.fillStyle = `rgb(${colour & 255},${(colour >> 8) & 255},${(colour >> 16) & 255})`;
    context.fillRect(x, 0, 1, canvas.height);
  }
}

// The share at the top of the chart: all, or less where the largest sources are a small part and could not be seen.
function mixScale(column, chosen) {
  const asked = column ? chosen.reduce((sum, source) => sum + column.a[source], 0) / 10000 : 1;
  return asked > 0.4 ? 1 : [0.01, 0.02, 0.05, 0.1, 0.2, 0.5].find((each) => each >= 1.25 * asked) || 1;
}

// The share of each source in what was drawn, stacked; dashed lines are the asked shares.
function drawMix(canvas, chosen) {
  const plot = 190;
  const context = prepare(canvas, plot + 20);
  const [left, right, top] = [40, canvas.clientWidth - 2, 2];
  timeAxis(context, left, right, top + plot + 4);
  const columns = state.columns.filter((column) => column.m);
  const highest = mixScale(columns.at(-1), chosen);
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const share of [0, 0.5, 1]) {
    const y = Math.min(Math.max(top + (1 - share) * plot, 7), plot - 3);
    context.fillText(+(100 * share * highest).toFixed(1) + " %", left - 5, y);
  }
  if (!columns.length) return;
  const [begin, end] = timeSpan();
  const place = (at) => Math.max(left, left + ((at - begin) / (end - begin)) * (right - left));
  const boundaries = (values) => {
    const found = [0];
    for (const value of values) found.push(found.at(-1) + value / 10000);
    found.push(1);
    return found;
  };
  // Steps are few in a column: a mean over some seconds is what the mixture promises, and what the eye wants.
  const realised = smoothed(columns, chosen, 10).map(boundaries);
  const asked = columns.map((column) => boundaries(chosen.map((source) => column.a[source])));
  context.save();
  context.beginPath();
  context.rect(left, top, right - left, plot);
  context.clip();
  for (let layer = 0; layer <= chosen.length; layer++) {
    context.fillStyle = layer < chosen.length ? PALETTE[layer] : PALETTE[7];
    context.beginPath();
    columns.forEach((column, i) => {
      const y = top + (1 - realised[i][layer + 1] / highest) * plot;
      context.lineTo(place(column.t - column.d), y);
      context.lineTo(place(column.t), y);
    });
    for (let i = columns.length - 1; i >= 0; i--) {
      const y = top + (1 - realised[i][layer] / highest) * plot;
      context.lineTo(place(columns[i].t), y);
      context.lineTo(place(columns[i].t - columns[i].d), y);
    }
    context.fill();
  }
  context.setLineDash([5, 4]);
  context.lineWidth = 1.5;
  context.strokeStyle = style("--ink");
  for (let layer = 1; layer <= chosen.length; layer++) {
    context.beginPath();
    columns.forEach((column, i) => {
      const y = top + (1 - asked[i][layer] / highest) * plot;
      context.lineTo(place(column.t - column.d), y);
      context.lineTo(place(column.t), y);
    });
    context.stroke();
  }
  context.restore();
}

// The shares of some sources in each column, as means over the seconds before it.
function smoothed(columns, chosen, span) {
  const sums = new Float64Array(chosen.length);
  let first = 0;
  return columns.map((column, i) => {
    chosen.forEach((source, at) => { sums[at] += column.m[source] || 0; });
    while (column.t - columns[first].t > span) {
      chosen.forEach((source, at) => { sums[at] -= columns[first].m[source] || 0; });
      first += 1;
    }
    return Array.from(sums, (sum) => sum / (i - first + 1));
  });
}

function drawSpark(canvas, values, colour) {
  const context = prepare(canvas, 26);
  const width = canvas.clientWidth;
  if (values.length < 2) return;
  const most = Math.max(...values.filter((value) => !Number.isNaN(value)), 1e-9);
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  values.forEach((value, i) => context.lineTo((i / (values.length - 1)) * width, 24 - (value / most) * 22));
  context.stroke();
  context.lineTo(width, 26);
  context.lineTo(0, 26);
  context.globalAlpha = 0.12;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
}

function showTip(text, event) {
  const tip = $("tip");
  tip.hidden = !text;
  if (!text) return;
  setText(tip, text);
  tip.style.left = Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
}
