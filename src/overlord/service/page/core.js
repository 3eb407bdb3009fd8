// What the page knows, and how it gets there: one stream of server-sent events, read with fetch because an EventSource
// cannot carry a token. All text goes into the page as text, never as HTML.

const $ = (id) => document.getElementById(id);
const state = { columns: [], events: [], isOpen: false, range: "recent", lastAt: 0, isLive: false };
const listeners = [];
const SILENT_MS = 15000; // the service sends something every 5 s

function make(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Numbers for people.
function compact(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return (value / (limit === 1e4 ? 1e3 : limit)).toFixed(size >= 100 * limit ? 0 : 1) + " " + unit;
  }
  return size >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(size >= 10 ? 1 : 2);
}
function bytes(value) {
  for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]]) {
    if (value >= 1024 ** power) return (value / 1024 ** power).toFixed(value >= 100 * 1024 ** power ? 0 : 1) + " " + unit;
  }
  return Math.round(value) + " B";
}
function percent(share, digits = 1) {
  return (100 * share).toFixed(digits) + " %";
}
function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 0.001) return (value * 1e6).toFixed(0) + " µs";
  if (value < 1) return (value * 1e3).toFixed(value < 0.01 ? 1 : 0) + " ms";
  if (value < 120) return value.toFixed(value < 10 ? 1 : 0) + " s";
  if (value < 7200) return Math.round(value / 60) + " min";
  return value < 172800 ? (value / 3600).toFixed(1) + " h" : (value / 86400).toFixed(1) + " days";
}
const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

// The token: from the fragment of the address, which is never sent, or typed in.
function takeToken() {
  const given = /^#token=(.+)$/.exec(location.hash);
  if (given) {
    sessionStorage.setItem("token", decodeURIComponent(given[1]));
    history.replaceState(null, "", location.pathname);
  }
}

async function request(path, signal) {
  const token = sessionStorage.getItem("token");
  return fetch(path, { signal, cache: "no-store", headers: token ? { Authorization: "Bearer " + token } : {} });
}

function askToken(problem) {
  setText($("login-problem"), problem);
  return new Promise((resolve) => {
    const dialog = $("login");
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("token", $("token").value.trim());
      $("token").value = "";
      resolve();
    }, { once: true });
    if (!dialog.open) dialog.showModal();
  });
}

function decodeColumn(column) {
  const text = atob(column.w);
  column.waits = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  delete column.w;
  return column;
}

function take(name, data) {
  const { columns, events, open, ...sections } = data;
  if (name === "snapshot") {
    state.columns = [];
    state.events = [];
    state.isOpen = false;
  }
  Object.assign(state, sections);
  if (state.isOpen && columns.length) state.columns.pop();
  for (const column of columns) state.columns.push(decodeColumn(column));
  if (columns.length) state.isOpen = open;
  const kept = state.range === "recent" ? 300 : 14400;
  const last = state.columns.at(-1);
  while (last && last.t - state.columns[0].t > kept) state.columns.shift();
  state.events = state.events.concat(events).slice(-512);
  state.lastAt = Date.now();
  setLive(true);
  if (state.run) for (const listener of listeners) listener(name);
}

let lostSince = 0;
function setLive(isLive, reason = "") {
  if (isLive) lostSince = 0;
  else lostSince = lostSince || Date.now();
  state.isLive = isLive;
  document.body.classList.toggle("stale", !isLive && Boolean(state.run));
  $("link").className = isLive ? "live" : "lost";
  setText($("link").lastChild, isLive ? "live" : "not connected");
  $("lost").hidden = isLive || !state.run;
  if (!isLive && state.run) {
    const ago = Math.round((Date.now() - lostSince) / 1000);
    setText($("lost"), `Lost the service ${ago} s ago${reason ? ": " + reason : ""}. Figures are those of ${clock(state.run.at_s)}. Trying again by itself.`);
  }
}

let streaming = null;
function restartStream() {
  if (streaming) streaming.abort();
}

async function readStream() {
  const abort = new AbortController();
  streaming = abort;
  let heardAt = Date.now();
  const watchdog = setInterval(() => { if (Date.now() - heardAt > SILENT_MS) abort.abort(); }, 1000);
  try {
    const answer = await request("api/stream?range=" + state.range, abort.signal);
    if (answer.status === 401) {
      await askToken(sessionStorage.getItem("token") ? "This token is not the one of the service." : "");
      return "again";
    }
    if (!answer.ok) throw new Error((await answer.text()).trim().slice(0, 200));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const parts = [];
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return "the service ended the stream";
      heardAt = Date.now();
      // A message may come in many pieces: joined once, when its end is there.
      parts.push(value);
      if (!value.includes("\n") ) continue;
      const messages = parts.splice(0).join("").split("\n\n");
      parts.push(messages.pop());
      for (const message of messages) {
        const found = /^event: (\w+)\ndata: (.*)$/s.exec(message);
        if (found) take(found[1], JSON.parse(found[2]));
      }
    }
  } finally {
    clearInterval(watchdog);
    abort.abort();
  }
}

async function keepStreaming() {
  let pause = 250;
  let reason = "";
  const telling = () => { if (lostSince) setLive(false, reason); };
  setInterval(telling, 1000);
  for (;;) {
    const range = state.range;
    const before = state.lastAt;
    try {
      reason = await readStream();
      if (reason === "again") continue;
    } catch (error) {
      reason = error.name === "AbortError" || error.name === "TypeError" ? "it does not answer" : error.message;
    }
    if (state.range !== range) continue; // asked for another range
    setLive(false, reason);
    pause = state.lastAt > before ? 250 : Math.min(pause * 2, 4000);
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}
