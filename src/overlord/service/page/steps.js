// The step explorer: the groups of a step and their microbatches, as wide as their cost, down to file and row.

const shownStep = { number: null, plan: null, group: 0, micro: null, document: null, documents: [] };
const chartPlace = { left: 78, top: 18 };
const CHART_MOST = 30000; // pixels; a canvas cannot be higher everywhere

async function loadStep(number) {
  if (!Number.isSafeInteger(number) || number < 0) return showProblem("A step is a whole number, 0 or more.");
  shownStep.number = number;
  $("step-number").value = String(number);
  if (location.hash !== "#step=" + number) history.replaceState(null, "", "#step=" + number);
  let found;
  try {
    const answer = await request("api/step/" + number);
    found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
  } catch (error) {
    if (shownStep.number === number) showProblem(error.message);
    return undefined;
  }
  if (shownStep.number !== number) return undefined; // another was asked for meanwhile
  $("step-problem").hidden = true;
  const first = Math.max(...costsOf(found).groups) > 0 ? costliest(found) : 0;
  Object.assign(shownStep, { plan: found, group: first, micro: null, document: null, documents: [] });
  showStep();
  return chooseMicro(first, 0);
}

function showProblem(text) {
  $("step-problem").hidden = false;
  setText($("step-problem"), text);
}

function starts(plan) {
  const found = [0];
  for (const count of plan.counts) found.push(found.at(-1) + count);
  return found;
}

// By cost, or by tokens where the strategy knows no cost.
function costsOf(plan) {
  const values = plan.costs && plan.costs.length === plan.tokens.length ? plan.costs : plan.tokens;
  const begins = starts(plan);
  const groups = plan.counts.map((count, group) => values.slice(begins[group], begins[group] + count).reduce((a, b) => a + b, 0));
  return { values, groups, begins, isCost: values === plan.costs };
}

function costliest(plan) {
  const { groups } = costsOf(plan);
  return groups.indexOf(Math.max(...groups));
}

function ranksText(plan, group) {
  const ranks = plan.ranks[group];
  if (ranks.length === 1) return "rank " + ranks[0];
  const isRun = ranks.every((rank, i) => i === 0 || rank === ranks[i - 1] + 1);
  return "ranks " + (isRun ? `${ranks[0]}–${ranks.at(-1)}` : ranks.join(", "));
}

function rowHeight(plan) {
  return Math.min(Math.max(360 / plan.counts.length, 5), 30, CHART_MOST / plan.counts.length);
}

function drawStep() {
  const { plan } = shownStep;
  if (!plan) return;
  const { values, groups, begins } = costsOf(plan);
  const row = rowHeight(plan);
  const canvas = $("step-chart");
  const width = $("step-scroll").clientWidth - 4;
  canvas.style.width = width + "px";
  const context = prepare(canvas, chartPlace.top + row * groups.length + 4, width);
  const most = Math.max(...groups, 1e-9);
  const mean = groups.reduce((a, b) => a + b, 0) / groups.length;
  const scale = (width - chartPlace.left - 8) / most;
  const gap = row >= 12 ? 2 : row >= 7 ? 1 : 0.5;
  const [ink, quiet, accent, hot] = ["--ink", "--quiet", "--accent", "--warn"].map(style);
  context.textBaseline = "middle";
  groups.forEach((total, group) => {
    const y = chartPlace.top + group * row;
    const every = Math.ceil(13 / row);
    if (group % every === 0) {
      context.fillStyle = group === shownStep.group ? ink : quiet;
      context.textAlign = "right";
      context.fillText(ranksText(plan, group), chartPlace.left - 6, y + row / 2, chartPlace.left - 10);
    }
    let x = chartPlace.left;
    for (let micro = begins[group]; micro < begins[group + 1]; micro++) {
      const wide = values[micro] * scale;
      const isChosen = group === shownStep.group && micro - begins[group] === shownStep.micro;
      context.fillStyle = total > mean * 1.05 ? hot : accent;
      context.globalAlpha = isChosen ? 1 : (micro - begins[group]) % 2 ? 0.42 : 0.58;
      context.fillRect(x, y, Math.max(wide - Math.min(1, wide / 4), 0.5), row - gap);
      if (isChosen && row >= 4) {
        context.globalAlpha = 1;
        context.strokeStyle = ink;
        context.lineWidth = 2;
        context.strokeRect(x + 1, y + 1, Math.max(wide - 3, 1), row - gap - 2);
      }
      x += wide;
    }
    context.globalAlpha = 1;
  });
  const at = chartPlace.left + mean * scale;
  context.strokeStyle = ink;
  context.setLineDash([4, 3]);
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(at, chartPlace.top - 3);
  context.lineTo(at, chartPlace.top + row * groups.length);
  context.stroke();
  context.setLineDash([]);
  context.fillStyle = quiet;
  context.textAlign = at > width - 40 ? "right" : "center";
  context.fillText("mean", Math.min(at, width - 4), 8);
}

const documentGrid = new Grid($("documents"), [["Source", true], ["File", true], ["Row"], ["Tokens"]]);
const stepSourceGrid = new Grid($("step-sources"), [["Source", true], ["Documents"], ["Tokens"]]);

// A run with a log tells any of its steps; then a slider goes through them.
function showSlider() {
  const { plan, number } = shownStep;
  const { run } = state;
  $("step-slider").hidden = !(plan && plan.any && run && run.reached);
  if ($("step-slider").hidden) return;
  $("step-slider").min = run.start || 0;
  $("step-slider").max = run.reached - 1;
  if (document.activeElement !== $("step-slider")) $("step-slider").value = number;
}

function showStep() {
  const { plan } = shownStep;
  if (!plan || $("view-step").hidden) return;
  showSlider();
  $("step-from").hidden = !plan.recorded;
  setText($("step-from"), "from the log");
  const { groups, isCost } = costsOf(plan);
  const mean = groups.reduce((a, b) => a + b, 0) / groups.length;
  setText($("step-title"), isCost ? "Groups by cost" : "Groups by tokens");
  setText($("step-costs"), `${counted(groups.length, "group")} along ${plan.axis}, ${counted(plan.tokens.length, "microbatch", "microbatches")}; the costliest ${(Math.max(...groups) / (mean || 1)).toFixed(3)}× the mean`);
  setText($("step-note"), `${counted(plan.samples.reduce((a, b) => a + b, 0), "document")}, ${compact(plan.tokens.reduce((a, b) => a + b, 0))} tokens, ${compact(plan.loss_tokens)} of loss`);
  $("stages").replaceChildren(...plan.stages.map(([name, detail]) => make("li", {}, make("span", { class: "tag" }, name), detail)));
  const sources = Object.entries(plan.sources).sort((a, b) => b[1][1] - a[1][1]);
  stepSourceGrid.show(sources.map(([name, [samples, tokens]]) => ({ cells: [{ dot: sourceColour(name), text: name }, compact(samples), compact(tokens)] })));
  drawStep();
}

function sourceColour(name) {
  const source = state.sources ? state.sources.name.indexOf(name) : -1;
  return source < 0 ? PALETTE[7] : colourOf(source);
}

async function chooseMicro(group, micro) {
  const { plan, number } = shownStep;
  if (!plan || !plan.counts[group]) return;
  Object.assign(shownStep, { group, micro: Math.min(Math.max(micro, 0), plan.counts[group] - 1), document: null });
  drawStep();
  const index = costsOf(plan).begins[group] + shownStep.micro;
  setText($("micro-title"), `Microbatch ${shownStep.micro} of ${ranksText(plan, group)}`);
  setText($("micro-note"), `${compact(plan.tokens[index])} tokens, ${counted(plan.samples[index], "document")}${plan.costs ? `, cost ${compact(plan.costs[index])}` : ""}`);
  let found = [];
  try {
    const answer = await request(`api/step/${number}/microbatch/${index}`);
    found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
  } catch (error) {
    found = [];
    if (shownStep.plan === plan) showProblem(error.message);
  }
  if (shownStep.plan !== plan || shownStep.group !== group || shownStep.number !== number) return;
  shownStep.documents = found;
  showDocuments();
}

function showDocuments() {
  const { documents, document: chosen } = shownStep;
  documentGrid.show(documents.slice(0, 500).map(([source, file, row, tokens], i) => ({
    cells: [{ dot: sourceColour(source), text: source }, shortPath(file), row < 0 ? "?" : row.toLocaleString("en"), compact(tokens)],
    pick: () => chooseDocument(i),
    selected: i === chosen,
  })));
  drawMicro();
}

function counted(number, one, many = one + "s") {
  return `${compact(number)} ${number === 1 ? one : many}`;
}

function shortPath(path) {
  const parts = path.split("/");
  return parts.length > 2 ? "…/" + parts.slice(-2).join("/") : path;
}

function drawMicro() {
  const { documents } = shownStep;
  const canvas = $("micro-chart");
  const context = prepare(canvas, documents.length ? 34 : 0);
  const total = documents.reduce((sum, each) => sum + each[3], 0) || 1;
  let x = 0;
  documents.forEach(([source, , , tokens], i) => {
    const wide = (tokens / total) * canvas.clientWidth;
    context.fillStyle = sourceColour(source);
    context.globalAlpha = shownStep.document === null || shownStep.document === i ? 1 : 0.45;
    context.fillRect(x, 0, Math.max(wide - Math.min(1, wide / 4), 0.5), 28);
    x += wide;
  });
}

function chooseDocument(i) {
  const [source, file, row, tokens] = shownStep.documents[i];
  shownStep.document = i;
  const { plan, group, micro, number } = shownStep;
  const lines = [["Source", source], ["File", file, "path"], ["Row", row < 0 ? "not known: a transform dropped the column __origin__" : String(row)],
    ["Tokens", tokens.toLocaleString("en")], ["Step", String(number)], ["Microbatch", String(micro)], ["Trained on", ranksText(plan, group)]];
  $("document").replaceChildren(...lines.flatMap(([name, text, kind]) => [make("dt", {}, name), make("dd", { class: kind || "" }, text)]));
  showDocuments();
}

function microAt(event) {
  const { plan } = shownStep;
  if (!plan) return null;
  const box = $("step-chart").getBoundingClientRect();
  const group = Math.floor((event.clientY - box.top - chartPlace.top) / rowHeight(plan));
  if (group < 0 || group >= plan.counts.length) return null;
  const { values, groups, begins } = costsOf(plan);
  const scale = (box.width - chartPlace.left - 8) / Math.max(...groups, 1e-9);
  let x = chartPlace.left;
  for (let micro = begins[group]; micro < begins[group + 1]; micro++) {
    x += values[micro] * scale;
    if (event.clientX - box.left < x) return [group, micro - begins[group]];
  }
  return [group, plan.counts[group] - 1];
}

function stepTip(event) {
  const found = microAt(event);
  if (!found) return showTip("");
  const { plan } = shownStep;
  const [group, micro] = found;
  const { values, groups, begins, isCost } = costsOf(plan);
  const at = begins[group] + micro;
  const cost = isCost ? `, cost ${compact(values[at])} of ${compact(groups[group])}` : "";
  return showTip(`${ranksText(plan, group)}, microbatch ${micro}\n${compact(plan.tokens[at])} tokens in ${counted(plan.samples[at], "document")}${cost}`, event);
}

function stepKeys(event) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const move = moves[event.key];
  const { plan, group, micro } = shownStep;
  if (!move || !plan) return;
  event.preventDefault();
  const next = Math.min(Math.max(group + move[0], 0), plan.counts.length - 1);
  chooseMicro(next, (micro || 0) + move[1]);
}
