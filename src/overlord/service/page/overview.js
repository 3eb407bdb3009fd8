// The view of the whole run: is it well, since when not, and what is it waiting for.

const FAULTS = new Set(["restart", "retry", "rank_lost", "log"]);
const CHANGES = new Set(["scaling", "shadow", "resize", "moved", "weights", "draining"]);
const MOST_ROWS = 60;

// A table whose cells are changed in place, so that scrolling and selecting survive an update. Of a long one only the rows
// that can be seen are changed; the others when they are scrolled to.
class Grid {
  constructor(table, heads, onSort) {
    this.box = table.closest(".scroll");
    this.lines = [];
    if (this.box) this.box.addEventListener("scroll", () => requestAnimationFrame(() => this.fill()), { passive: true });
    this.body = make("tbody");
    this.rows = [];
    const row = make("tr");
    heads.forEach(([text, isLeft], i) => {
      const inside = onSort ? make("button", { type: "button" }, text) : text;
      const head = make("th", { class: isLeft ? "left" : "", scope: "col" }, inside);
      if (onSort) inside.addEventListener("click", () => onSort(i));
      row.append(head);
    });
    this.heads = [...row.children];
    this.lefts = heads.map(([, isLeft]) => isLeft);
    table.replaceChildren(make("thead", {}, row), this.body);
  }
  // Each cell is text, or {fill, text} for a bar, or {dot, text} for a colour.
  show(lines) {
    while (this.rows.length > lines.length) this.rows.pop().remove();
    this.lines = lines;
    while (this.rows.length < lines.length) {
      const row = make("tr", {}, ...this.lefts.map((isLeft) => make("td", { class: isLeft ? "left name" : "" })));
      this.rows.push(row);
      this.body.append(row);
      row.addEventListener("click", () => row.pick && row.pick());
      row.addEventListener("keydown", (event) => { if (event.key === "Enter" && row.pick) row.pick(); });
      this.fillRow(row, lines[this.rows.length - 1]);
    }
    this.fill();
  }
  fill() {
    const height = this.rows.length ? this.rows[0].offsetHeight || 24 : 24;
    const isLong = this.box && this.rows.length > 40;
    const first = isLong ? Math.max(Math.floor(this.box.scrollTop / height) - 5, 0) : 0;
    const end = isLong ? first + Math.ceil(this.box.clientHeight / height) + 10 : this.rows.length;
    for (let i = first; i < Math.min(end, this.lines.length); i++) this.fillRow(this.rows[i], this.lines[i]);
  }
  fillRow(row, line) {
    if (row.line === line) return;
    row.line = line;
    const { cells, kind = "", pick = null, selected = false } = line;
    row.pick = pick;
    row.className = kind + (pick ? " pick" : "");
    if (pick) { row.tabIndex = 0; row.setAttribute("aria-selected", String(selected)); }
    cells.forEach((cell, at) => fillCell(row.children[at], cell));
  }
}

function fillCell(node, cell) {
  if (typeof cell === "string") {
    setText(node, cell);
    if (node.classList.contains("name")) node.title = cell;
    return;
  }
  const text = cell.text || "";
  if (node.shown === text + "|" + cell.fill + "|" + cell.dot) return;
  node.shown = text + "|" + cell.fill + "|" + cell.dot;
  if (cell.dot !== undefined) {
    const dot = make("i", { class: "dot" });
    dot.style.background = cell.dot;
    node.replaceChildren(dot, text);
    node.title = text;
  } else {
    const inner = make("b");
    inner.style.width = Math.min(100 * cell.fill, 100) + "%";
    node.replaceChildren(make("span", { class: "fill", title: text }, inner), " " + text);
  }
}

// The sources with a colour of their own: the largest by asked share.
let chosenOf = { sources: null, chosen: [] };
function chosenSources() {
  if (chosenOf.sources !== state.sources) {
    const weights = state.sources.weight;
    chosenOf = { sources: state.sources, chosen: weights.map((_, i) => i).sort((a, b) => weights[b] - weights[a]).slice(0, 7) };
  }
  return chosenOf.chosen;
}
function colourOf(source) {
  const place = chosenSources().indexOf(source);
  return PALETTE[place < 0 ? 7 : place];
}

// Figures

const TILES = [
  ["Steps a second", "s", compact],
  ["Tokens a second", "k", compact],
  ["Waiting for data", "wait", (value) => percent(value)],
  ["Planned ahead", null, null],
  ["Memory", "r", bytes],
  ["Faults", null, null],
];
const tiles = TILES.map(([name]) => {
  const parts = { value: make("div", { class: "value" }), more: make("div", { class: "more" }), spark: make("canvas") };
  $("tiles").append(make("div", { class: "tile" }, make("h3", {}, name), parts.value, parts.more, parts.spark));
  return parts;
});

function meanWait(column) {
  if (column.meanWait === undefined) {
    let [sum, count] = [0, 0];
    for (const wait of column.waits) if (wait !== 255) { sum += wait; count += 1; }
    column.meanWait = count ? sum / count / 250 : NaN;
  }
  return column.meanWait;
}

function lately(columns, read) {
  const last = columns.at(-1);
  let [sum, span] = [0, 0];
  for (const column of columns) {
    const value = read(column);
    if (last.t - column.t < 10 && !Number.isNaN(value)) { sum += value * column.d; span += column.d; }
  }
  return span ? sum / span : NaN;
}

function showTiles() {
  const { run, columns } = state;
  const readers = { s: (column) => column.s, k: (column) => column.k, r: (column) => column.r, wait: meanWait };
  const more = [
    `step ${run.step.toLocaleString("en")}${run.end === null ? "" : " of " + run.end.toLocaleString("en")}`,
    `${run.reading.toLocaleString("en")} of ${state.ranks.group.length.toLocaleString("en")} ranks read`,
    run.straggler === null ? "" : `straggler ${run.straggler.toFixed(3)}× the mean`,
    run.plan_s === null ? "" : `${seconds(run.plan_s)} to plan a step`,
    `${Object.keys(state.processes).length} processes`,
    run.log === null ? "no log" : `log ${run.log}`,
  ];
  TILES.forEach(([, key, format], i) => {
    const tile = tiles[i];
    if (key) {
      const values = columns.map(readers[key]);
      const now = columns.length ? (key === "r" ? columns.at(-1).r : lately(columns, readers[key])) : NaN;
      setText(tile.value, Number.isNaN(now) ? "–" : format(now));
      drawSpark(tile.spark, values.map((value) => (Number.isNaN(value) ? 0 : value)), key === "wait" ? style("--bad") : style("--accent"));
    } else {
      setText(tile.value, i === 3 ? (run.reached === null ? "–" : Math.max(run.reached - run.step, 0) + " steps") : compact(run.faults));
      tile.spark.hidden = true;
    }
    setText(tile.more, more[i]);
  });
}

function showVerdict() {
  const { run } = state;
  $("verdict").className = run.level;
  setText($("verdict").firstChild, run.verdict);
  const list = $("verdict").lastChild;
  if (list.shown !== run.causes.join("\n")) {
    list.shown = run.causes.join("\n");
    list.replaceChildren(...run.causes.map((cause) => make("li", {}, cause)));
  }
  const sizes = Object.entries(run.mesh).filter(([, size]) => size > 1).map(([axis, size]) => `${axis} ${size}`).join(" · ");
  setText($("mesh"), `${sizes || "one rank"} · up ${seconds(run.up_s)}`);
  const sign = { ok: "", idle: "", warn: "! ", bad: "✖ " }[run.level];
  document.title = `${sign}step ${run.step.toLocaleString("en")} · Overlord`;
}

// Waits

function showHeat() {
  drawHeat($("heat"));
  const ranks = state.ranks.group.length;
  const waiting = state.ranks.waiting_s.map((wait, rank) => [wait, rank]).filter(([wait]) => wait > 1).sort((a, b) => b[0] - a[0]);
  const now = waiting.slice(0, 3).map(([wait, rank]) => `rank ${rank} ${seconds(wait)}`).join(", ");
  setText($("heat-note"), waiting.length ? `waiting now: ${now}${waiting.length > 3 ? ` and ${waiting.length - 3} more` : ""}` : `${ranks.toLocaleString("en")} rank${ranks === 1 ? "" : "s"}`);
}

function heatTip(event) {
  const box = $("heat").getBoundingClientRect();
  const ranks = state.ranks ? state.ranks.group.length : 0;
  const plot = box.height - heatPlace.top - heatPlace.bottom;
  const rank = Math.floor(((event.clientY - box.top - heatPlace.top) / plot) * ranks);
  const [begin, end] = timeSpan();
  const at = begin + ((event.clientX - box.left - heatPlace.left) / (box.width - heatPlace.left - 2)) * (end - begin);
  const column = state.columns.find((each) => at > each.t - each.d && at <= each.t);
  if (!column || rank < 0 || rank >= column.waits.length) return showTip("");
  const wait = column.waits[rank];
  const said = wait === 255 ? "does not read" : `waited ${percent(wait / 250, 0)} of ${column.d.toFixed(1)} s`;
  return showTip(`rank ${rank}, group ${state.ranks.group[rank]}\n${clock(column.t)}: ${said}`, event);
}

// The mix

function showMix() {
  const chosen = chosenSources();
  drawMix($("mix"), chosen);
  const isPart = mixScale(state.columns.at(-1), chosen) < 1;
  setText($("mix-note"), `shares of ${state.run.unit}${isPart ? `, the ${chosen.length} largest of ${state.sources.name.length}` : ""}; dashed: as asked`);
  const names = state.sources.name;
  const others = names.length - chosen.length;
  const lines = chosen.map((source, i) => [PALETTE[i], names[source]]);
  if (others > 0) lines.push([PALETTE[7], `${others} others`]);
  const said = JSON.stringify(lines);
  if ($("mix-key").shown === said) return;
  $("mix-key").shown = said;
  $("mix-key").replaceChildren(...lines.map(([colour, name]) => {
    const dot = make("i");
    dot.style.background = colour;
    return make("span", {}, dot, name);
  }));
}

const SOURCE_HEADS = [["Source", true], ["Asked"], ["Drawn so far"], ["Off by"], ["Tokens"], ["Epochs"], ["Lasts"], ["Buffer"], ["Waited for"], ["Loaders"], ["Bad rows"]];
const sorting = { column: 1, falls: true };
const sourceGrid = new Grid($("sources"), SOURCE_HEADS, (column) => {
  sorting.falls = sorting.column === column ? !sorting.falls : column !== 0;
  sorting.column = column;
  showSources();
});

function showSources() {
  const found = state.sources;
  const wanted = $("sources-filter").value.trim().toLowerCase();
  const values = [
    (i) => found.name[i], (i) => found.weight[i], (i) => found.share[i], (i) => Math.abs(found.share[i] - found.weight[i]),
    (i) => found.tokens[i], (i) => found.epochs[i], (i) => found.left_s[i] ?? Infinity, (i) => found.buffer[i] / (found.limit[i] || 1),
    (i) => found.waited_s[i], (i) => found.loaders[i], (i) => found.bad_rows[i],
  ][sorting.column];
  const order = found.name.map((_, i) => i).filter((i) => found.name[i].toLowerCase().includes(wanted));
  order.sort((a, b) => (values(a) < values(b) ? -1 : values(a) > values(b) ? 1 : 0) * (sorting.falls ? -1 : 1));
  sourceGrid.heads.forEach((head, i) => {
    if (i === sorting.column) head.setAttribute("aria-sort", sorting.falls ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
  const colours = new Map(chosenSources().map((source, i) => [source, PALETTE[i]]));
  sourceGrid.show(order.map((i) => ({
    cells: [
      { dot: colours.get(i) || PALETTE[7], text: found.name[i] }, percent(found.weight[i], 2), percent(found.share[i], 2),
      (found.share[i] < found.weight[i] ? "−" : "+") + percent(Math.abs(found.share[i] - found.weight[i]), 2),
      compact(found.tokens[i]), found.epochs[i].toFixed(2) + (found.epoch_limit[i] ? ` of ${found.epoch_limit[i]}` : ""),
      found.left_s[i] === null ? "" : seconds(found.left_s[i]),
      { fill: found.limit[i] ? found.buffer[i] / found.limit[i] : 0, text: bytes(found.buffer[i]) },
      seconds(found.waited_s[i]), String(found.loaders[i]), compact(found.bad_rows[i]),
    ],
  })));
  setText($("sources-note"), order.length === found.name.length ? `${found.name.length}` : `${order.length} of ${found.name.length}`);
}

// Events, roles, memory

let whichEvents = "all";
function showEvents() {
  const shown = state.events.filter(([, kind]) => whichEvents === "all" || FAULTS.has(kind)).slice(-200).reverse();
  const said = shown.length + whichEvents + (shown.length ? shown[0].join() : "");
  if ($("events").shown === said) return;
  $("events").shown = said;
  const lines = shown.map(([at, kind, text, process]) => make("li", { title: `${state.kinds[kind] || kind}; process ${process}` },
    make("time", {}, clock(at)), make("span", { class: "tag " + (FAULTS.has(kind) ? "fault" : CHANGES.has(kind) ? "change" : "") }, kind.replace("_", " ")), text));
  $("events").replaceChildren(...(lines.length ? lines : [make("li", { class: "empty" }, whichEvents === "all" ? "Nothing happened yet." : "No faults.")]));
}

const roleGrid = new Grid($("roles"), [["Role", true], ["Process"], ["Node", true], ["Busy threads"], ["Queue"], ["Restarts"]]);
function showRoles() {
  const rows = [...state.roles].sort((a, b) => (a[1] === null ? -1 : 0) - (b[1] === null ? -1 : 0) || b[3] - a[3]);
  const shadowed = new Set(Object.values(state.shadows));
  roleGrid.show(rows.slice(0, MOST_ROWS).map(([name, process, node, restarts, queue, busy]) => ({
    kind: process === null ? "bad" : "",
    cells: [
      name + (shadowed.has(name) ? " (shadow)" : ""), process === null ? "no answer" : String(process), node,
      busy === null ? "–" : busy.toFixed(2), String(queue), restarts ? `${restarts}` : "–",
    ],
  })));
  setText($("roles-note"), rows.length > MOST_ROWS ? `${MOST_ROWS} of ${rows.length}: silent and restarted ones first` : `${rows.length}`);
}

const memoryGrid = new Grid($("memory"), [["Process of", true], ["Node", true], ["Resident"]]);
function showLoaders() {
  const lines = [...state.decisions].reverse();
  if ($("decisions").shown !== lines.join("\n") || !$("decisions").children.length) {
    $("decisions").shown = lines.join("\n");
    $("decisions").replaceChildren(...(lines.length ? lines.map((line) => make("li", {}, line)) : [make("li", { class: "empty" }, "The autoscaler has decided nothing; no shadow came or left.")]));
  }
  const hosts = state.roles.filter(([name]) => name.startsWith("loaders/")).length;
  const shadows = Object.keys(state.shadows).length;
  setText($("loaders-note"), `${hosts} loader host${hosts === 1 ? "" : "s"}, ${shadows} with a shadow`);
  const rows = Object.entries(state.processes).sort((a, b) => b[1][2] - a[1][2]);
  const most = rows.length ? rows[0][1][2] : 1;
  memoryGrid.show(rows.slice(0, MOST_ROWS).map(([name, [, node, rss]]) => ({ cells: [name, node, { fill: rss / most, text: bytes(rss) }] })));
  const { store } = state.run;
  setText($("memory-note"), store === null ? "" : `batches in shared memory: ${bytes(store[0])}${store[1] ? " of " + bytes(store[1]) : ""}`);
}

const RUN_PARTS = [showTiles, showHeat, showMix, showSources, showEvents, showRoles, showLoaders];
