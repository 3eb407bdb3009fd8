// Putting it together: views, keys, theme.

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  heatColours = null;
  styles.clear();
  drawScale($("heat-scale"));
  redraw();
}
function toggleTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("overlord-theme", theme);
  setTheme(theme);
}

function setRange(range) {
  for (const button of document.querySelectorAll("[data-range]")) button.setAttribute("aria-pressed", String(button.dataset.range === range));
  if (state.range === range) return;
  state.range = range;
  restartStream();
}

function setEvents(which) {
  whichEvents = which;
  for (const button of document.querySelectorAll("[data-events]")) button.setAttribute("aria-pressed", String(button.dataset.events === which));
  if (state.run) showEvents();
}

function openView() {
  const step = /^#step(?:=(\d+))?$/.exec(location.hash);
  $("view-run").hidden = Boolean(step);
  $("view-step").hidden = !step;
  for (const [id, isHere] of [["tab-run", !step], ["tab-step", step]]) {
    if (isHere) $(id).setAttribute("aria-current", "page");
    else $(id).removeAttribute("aria-current");
  }
  if (step && step[1] !== undefined && Number(step[1]) !== shownStep.number) loadStep(Number(step[1]));
  else if (step && step[1] === undefined && shownStep.number !== null) history.replaceState(null, "", "#step=" + shownStep.number);
  else if (step && shownStep.number === null && state.run) openNow();
  redraw();
}

// A frame draws as many parts as fit into it, and leaves the others to the next: nothing that a person does waits for long.
const FRAME_MS = 8;
let due = [];
function redraw() {
  const isWaiting = due.length > 0;
  due = [showVerdict, ...($("view-run").hidden ? [showSlider, drawStep, drawMicro] : RUN_PARTS)];
  if (!isWaiting) requestAnimationFrame(drawSome);
}
function drawSome() {
  const began = performance.now();
  while (due.length && performance.now() - began < FRAME_MS) {
    const draw = due.shift();
    if (state.run) draw();
  }
  if (due.length) requestAnimationFrame(drawSome);
}

const KEYS = {
  1: () => { location.hash = "run"; },
  2: () => { location.hash = "step"; },
  "[": () => openStep((shownStep.number || 0) - 1),
  "]": () => openStep((shownStep.number ?? -1) + 1),
  "{": () => openStep(Math.max((shownStep.number || 0) - 100, state.run ? state.run.start || 0 : 0)),
  "}": () => openStep(Math.min((shownStep.number ?? -1) + 100, state.run && state.run.reached ? state.run.reached - 1 : Infinity)),
  n: openNow,
  g: () => { location.hash = "step"; setTimeout(() => $("step-number").select(), 50); },
  r: () => setRange(state.range === "recent" ? "long" : "recent"),
  t: toggleTheme,
  "?": () => $("help").showModal(),
};
async function openNow() {
  try {
    const answer = await request("api/step/now");
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    openStep(found.step);
  } catch (error) {
    showProblem(error.message);
  }
}
function openStep(number) {
  if (number < 0) return;
  location.hash = "step=" + number;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input") || document.querySelector("dialog[open]")) return;
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
$("theme").addEventListener("click", toggleTheme);
$("help-open").addEventListener("click", () => $("help").showModal());
for (const button of document.querySelectorAll("[data-range]")) button.addEventListener("click", () => setRange(button.dataset.range));
for (const button of document.querySelectorAll("[data-events]")) button.addEventListener("click", () => setEvents(button.dataset.events));
$("sources-filter").addEventListener("input", () => state.sources && showSources());
$("heat").addEventListener("mousemove", heatTip);
$("heat").addEventListener("mouseleave", () => showTip(""));
$("step-chart").addEventListener("mousemove", stepTip);
$("step-chart").addEventListener("mouseleave", () => showTip(""));
$("step-chart").addEventListener("click", (event) => { const found = microAt(event); if (found) chooseMicro(...found); });
$("step-chart").addEventListener("keydown", stepKeys);
$("step-back").addEventListener("click", KEYS["["]);
$("step-next").addEventListener("click", KEYS["]"]);
$("step-now").addEventListener("click", KEYS.n);
let sliding = 0;
$("step-slider").addEventListener("input", (event) => {
  // The steps that a person slides over are not asked for.
  clearTimeout(sliding);
  const wanted = Number(event.target.value); // now: drawing the page anew sets the slider to the step that is shown
  $("step-number").value = String(wanted);
  sliding = setTimeout(() => openStep(wanted), 120);
});
$("step-number").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  const text = event.target.value.replaceAll(/[,\s]/g, "");
  if (/^\d+$/.test(text)) openStep(Number(text));
  else showProblem("A step is a whole number, 0 or more.");
});
window.addEventListener("hashchange", openView);
window.addEventListener("resize", redraw);

takeToken();
const system = window.matchMedia("(prefers-color-scheme: dark)");
setTheme(localStorage.getItem("overlord-theme") || (system.matches ? "dark" : "light"));
system.addEventListener("change", () => { if (!localStorage.getItem("overlord-theme")) setTheme(system.matches ? "dark" : "light"); });
setRange("recent");
setEvents("all");
listeners.push(redraw, (name) => { if (name === "snapshot" && location.hash === "#step" && shownStep.number === null) openNow(); });
openView();
keepStreaming();
