// Names, reasons and errors are untrusted: they are inserted as text nodes and attribute values, never as markup.
const POLL = 2000; // milliseconds between two reads
const STALE = 10; // seconds after which the page says that its numbers are old
const HEIGHT = 220;
const SERIES = 8; // number of colours; further sites are drawn as one series
const MARKED = 30; // largest number of rounds for which each round has a mark

const SITE_TONES = { connected: "good", "not connected": "bad", revoked: "idle", "no key yet": "warn", unknown: "idle" };
const JOB_TONES = { running: "busy", finished: "good", failed: "bad", stopped: "warn", interrupted: "warn", submitted: "idle" };

const byId = (id) => document.getElementById(id);
const jobs = new Map(); // by name, the job's part of the page
let numbered = 0;

// ---- small tools ----

function node(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function show(element, text) {
  setText(element, text);
  element.hidden = !text;
}

function tone(element, word, tones) {
  setText(element, word);
  element.className = "state";
  element.dataset.tone = tones[word] ?? "idle";
}

function short(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

function percent(share, digits) {
  if (share === null || share === undefined) return "–";
  return `${(100 * share).toFixed(digits ?? (share !== 0 && Math.abs(share) < 0.0995 ? 1 : 0))}\u00a0%`;
}

function significant(value) {
  return value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toString();
}

function scored(run, value) {
  return run.score === "accuracy" ? percent(value, 1) : significant(value);
}

function ago(seconds) {
  if (seconds < 100) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString([], { hour12: false });
}

/** The smallest of 1, 2, 5, 10, 20, ... times a power of ten that is at least this. */
function step(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].find((factor) => factor * power >= 0.999 * least) * power;
}

/** The multiples of a step within a range. */
function multiples(size, low, high) {
  const first = Math.ceil(low / size - 1e-6);
  const count = Math.floor(high / size + 1e-6) - first + 1;
  return Array.from({ length: Math.max(0, count) }, (_, k) => Number(((first + k) * size).toPrecision(12)));
}

// ---- charts ----

class Chart {
  constructor(kind, onPoint) {
    this.title = drawn("title", { id: `t${++numbered}` });
    this.about = drawn("desc", { id: `d${numbered}` });
    this.marks = drawn("g");
    this.cursor = drawn("line", { class: "cursor", visibility: "hidden" });
    this.svg = drawn("svg", { role: "img", "data-chart": kind, "aria-labelledby": this.title.id, "aria-describedby": this.about.id });
    this.svg.append(this.title, this.about, this.marks, this.cursor);
    this.svg.addEventListener("pointermove", (event) => onPoint(this.indexAt(event)));
    this.svg.addEventListener("pointerleave", () => onPoint(null));
    this.heading = node("h3");
    this.readout = node("p", { class: "readout" });
    this.figure = node("figure", {}, node("figcaption", {}, this.heading), this.svg, this.readout);
    this.size = 0;
  }

  /** Make room for `rounds`, with margins for labels; return the SVG group to draw in. */
  frame(rounds, width, left, right) {
    this.rounds = rounds;
    this.left = left;
    this.top = 8;
    this.bottom = HEIGHT - 40;
    this.right = Math.max(left + 60, width - right);
    this.size = rounds.length;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.dataset.points = this.size;
    this.marks.replaceChildren();
    const stride = this.size > 1 ? rounds[1] - rounds[0] : 1;
    const room = (14 + 8 * String(rounds.at(-1)).length) / (this.x(1) - this.x(0)); // width of a label, in bars
    for (const round of multiples(step(Math.max(1, room * stride)), rounds[0], rounds.at(-1))) {
      const x = this.x((round - rounds[0]) / stride);
      this.marks.append(drawn("line", { class: "axis", x1: x, x2: x, y1: this.bottom, y2: this.bottom + 4 }));
      this.text(x, this.bottom + 18, String(round), "middle");
    }
    this.text(this.right, this.bottom + 35, "round", "end");
    return this.marks;
  }

  x(index) {
    return this.left + ((index + 0.5) * (this.right - this.left)) / this.size;
  }

  scale(low, high, steps, write) {
    this.y = (value) => this.bottom - ((value - low) / (high - low)) * (this.bottom - this.top);
    for (const value of steps) {
      const y = this.y(value);
      this.marks.append(drawn("line", { class: value === low ? "axis" : "grid", x1: this.left, x2: this.right, y1: y, y2: y }));
      this.text(this.left - 8, y + 4, write(value), "end");
    }
  }

  text(x, y, text, anchor, kind = "") {
    return this.marks.appendChild(drawn("text", { x, y, "text-anchor": anchor, class: kind }, text));
  }

  /** The width of the longest label, in pixels. */
  widest(labels) {
    const texts = labels.map((label) => this.text(0, 0, label, "start", "label strong"));
    return Math.max(...texts.map((text) => text.getComputedTextLength()));
  }

  indexAt(event) {
    const place = this.svg.getBoundingClientRect();
    const index = Math.floor(((event.clientX - place.left - this.left) / (this.right - this.left)) * this.size);
    return this.size && index >= 0 && index < this.size ? index : null;
  }

  /** Mark one round, or none. */
  point(index) {
    this.cursor.setAttribute("visibility", index === null ? "hidden" : "visible");
    if (index === null) return;
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.x(index));
    this.cursor.setAttribute("y1", this.top);
    this.cursor.setAttribute("y2", this.bottom);
  }
}

/** A line of accuracy or error. */
function drawScores(chart, run, width) {
  const known = run.scores.filter((value) => value !== null);
  const share = run.score === "accuracy";
  let [low, high] = [Math.min(...known), Math.max(...known)];
  const size = step(Math.max((high - low) / 3, share ? 0.01 : 0.02 * Math.abs(high), 1e-9));
  low = Math.max(0, size * Math.floor(low / size - 0.1));
  high = size * Math.ceil(high / size + 0.1);
  if (share) high = Math.min(1, high);
  const place = chart.frame(run.rounds, width, share ? 50 : 56, 64);
  chart.scale(low, high, multiples(size, low, high), (value) => (share ? percent(value, 0) : significant(value)));
  let path = "";
  let pen = "M";
  run.scores.forEach((value, i) => {
    if (value !== null) path += `${pen}${chart.x(i).toFixed(1)},${chart.y(value).toFixed(1)}`;
    pen = value === null ? "M" : "L";
  });
  place.append(drawn("path", { class: "curve", d: path }));
  const last = run.scores.findLastIndex((value) => value !== null);
  run.scores.forEach((value, i) => {
    if (value === null || (i !== last && run.scores.length > MARKED)) return;
    place.append(drawn("circle", { class: i === last ? "point last" : "point", cx: chart.x(i), cy: chart.y(value), r: 3.5 }));
  });
  chart.text(chart.x(last) + 10, chart.y(run.scores[last]) + 4.5, scored(run, run.scores[last]), "start", "label strong");
}

/** Stacked bars of the weights: Alice at the bottom, then the sites in their order. */
function drawWeights(chart, run, series, width) {
  const names = series.map(({ name, weights }) => `${short(name, 16)} ${percent(weights.at(-1))}`);
  const place = chart.frame(run.rounds, width, 50, Math.min(24 + chart.widest(names), width - 110));
  const sums = run.rounds.map((_, i) => series.reduce((sum, { weights }) => sum + Math.max(0, weights[i] ?? 0), 0));
  const most = Math.max(...sums);
  if (most > 1.005) chart.scale(0, most, multiples(step(most / 4), 0, most), (value) => percent(value, 0));
  else chart.scale(0, 1, [0, 0.25, 0.5, 0.75, 1], (value) => percent(value, 0));
  const slot = (chart.right - chart.left) / run.rounds.length;
  const bar = slot > 8 ? Math.min(slot - 2, 0.86 * slot) : slot + 0.3;
  const base = run.rounds.map(() => 0);
  const labels = [];
  series.forEach(({ kind, weights, name }, k) => {
    let path = "";
    weights.forEach((weight, i) => {
      const from = chart.y(base[i]);
      base[i] += Math.max(0, weight ?? 0);
      const x = chart.x(i) - bar / 2;
      path += `M${x.toFixed(2)},${from.toFixed(2)}V${chart.y(base[i]).toFixed(2)}h${bar.toFixed(2)}V${from.toFixed(2)}z`;
    });
    place.append(drawn("path", { class: `bars ${kind}`, d: path, "data-site": name }));
    labels.push({ text: names[k], kind, at: chart.y(base.at(-1) - Math.max(0, weights.at(-1) ?? 0) / 2) });
  });
  spread(labels, chart.top + 4, chart.bottom - 2, 16);
  for (const { text, kind, at, y } of labels) {
    const x = chart.right;
    place.append(drawn("path", { class: `leader ${kind}`, d: `M${x + 2},${at.toFixed(1)}L${x + 10},${y.toFixed(1)}H${x + 15}` }));
    chart.text(x + 20, y + 4.5, text, "start", kind === "alice" ? "label strong" : "label");
  }
}

/** Positions of labels without overlap, from the bottom up, close to their values. */
function spread(labels, top, bottom, gap) {
  let limit = bottom;
  for (const label of labels) limit = (label.y = Math.min(label.at, limit)) - gap;
  limit = top;
  for (const label of labels.toReversed()) limit = (label.y = Math.max(label.y, limit)) + gap;
}

/** Series of the weights chart: Alice, then the other sites; the smallest of many sites are merged into one. */
function seriesOf(run) {
  const rows = run.sites.map((name, i) => ({ name, weights: run.weights[i], kind: `s${i % SERIES}`, i }));
  const total = ({ weights }) => weights.reduce((sum, weight) => sum + (weight ?? 0), 0);
  const own = rows.filter(({ name }) => name === run.alice).map((row) => ({ ...row, kind: "alice" }));
  const others = rows.filter(({ name }) => name !== run.alice);
  if (others.length <= SERIES) return [...own, ...others];
  const ranked = others.toSorted((one, two) => total(two) - total(one));
  const kept = ranked.slice(0, SERIES - 1).toSorted((one, two) => one.i - two.i).map((row, k) => ({ ...row, kind: `s${k}` }));
  const rest = ranked.slice(SERIES - 1);
  const weights = run.rounds.map((_, r) => rest.reduce((sum, row) => sum + (row.weights[r] ?? 0), 0));
  return [...own, ...kept, { name: `${rest.length} others`, weights, kind: "others" }];
}

// ---- one job ----

class JobView {
  constructor(first) {
    this.heading = node("h2");
    this.status = node("span", { class: "state" });
    this.facts = node("span", { class: "soft facts" });
    this.rounds = node("span", { class: "soft rounds" });
    this.bar = node("progress");
    this.error = node("p", { class: "error" });
    this.waiting = node("p");
    this.tabs = node("div", { role: "tablist", "aria-label": "Alice" });
    this.nothing = node("p", { class: "soft" });
    this.scores = new Chart("scores", (index) => this.point(index));
    this.weights = new Chart("weights", (index) => this.point(index));
    this.screened = node("ul");
    this.screenedPart = node("div", { class: "screened" }, node("h3", {}, "Screened sites"), this.screened);
    this.table = node("table");
    const scroll = node("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "All numbers" }, this.table);
    this.numbers = node("details", { class: "numbers" }, node("summary", {}, "All numbers"), scroll);
    this.panel = node("div", { class: "panel", id: `p${++numbered}` });
    this.panel.append(
      node("div", { class: "charts" }, this.scores.figure, this.weights.figure),
      this.screenedPart,
      this.numbers,
    );
    const inside = node("div", { class: "inside" }, this.error, this.waiting, this.nothing, this.tabs, this.panel);
    const summary = node("summary", {}, this.heading, this.status, this.facts, this.rounds, this.bar);
    this.root = node("details", { class: "job card" }, summary, inside);
    this.root.open = first;
    this.root.addEventListener("toggle", () => this.draw());
    this.numbers.addEventListener("toggle", () => this.draw());
    this.tabs.addEventListener("keydown", (event) => this.move(event));
    this.index = null;
  }

  update(job, now) {
    if (job.status === "running" && this.job && this.job.status !== "running") this.root.open = true;
    this.job = job;
    const runs = job.runs.filter((run) => run.rounds.length);
    this.run = runs.find((run) => run.alice === this.chosen) ?? runs[0];
    const alice = job.alice === "all" ? "Alice: every site" : `Alice: ${job.runs.length === 1 ? job.runs[0].alice : job.alice}`;
    const latest = job.updated ? `last round ${ago(now - job.updated)}` : "no round yet";
    const score = runs.length === 1 && runs[0].scores.at(-1) !== null ? `${runs[0].score} ${scored(runs[0], runs[0].scores.at(-1))}` : "";
    setText(this.heading, job.name);
    tone(this.status, job.status, JOB_TONES);
    setText(this.facts, [job.method, alice, score, latest].filter(Boolean).join(" · "));
    setText(this.rounds, `round ${job.round} of ${job.rounds}`);
    this.bar.dataset.tone = JOB_TONES[job.status] ?? "idle";
    this.bar.max = Math.max(1, job.rounds);
    this.bar.value = job.round;
    this.bar.setAttribute("aria-label", `${job.name}: round ${job.round} of ${job.rounds}`);
    show(this.error, job.status === "running" ? "" : job.error);
    const waiting = job.waiting.length ? `Waiting for ${job.waiting.join(", ")}.` : "All replies have arrived.";
    show(this.waiting, job.status === "running" ? waiting : "");
    show(this.nothing, runs.length ? "" : "No round is recorded yet.");
    this.panel.hidden = !this.run;
    this.updateTabs(runs);
    this.draw();
  }

  updateTabs(runs) {
    this.tabs.hidden = runs.length < 2;
    if (this.tabs.hidden) {
      this.tabs.replaceChildren();
      for (const name of ["role", "aria-labelledby"]) this.panel.removeAttribute(name);
      return;
    }
    while (this.tabs.children.length > runs.length) this.tabs.lastChild.remove();
    runs.forEach((run, i) => {
      const tab = this.tabs.children[i] ?? this.tabs.appendChild(this.newTab());
      tab.dataset.alice = run.alice;
      setText(tab.firstChild, run.alice);
      setText(tab.lastChild, scored(run, run.scores.at(-1)));
      const selected = run === this.run;
      tab.setAttribute("aria-selected", selected);
      tab.tabIndex = selected ? 0 : -1;
      if (selected) this.panel.setAttribute("aria-labelledby", tab.id);
    });
    this.panel.setAttribute("role", "tabpanel");
  }

  newTab() {
    const tab = node("button", { type: "button", role: "tab", id: `a${++numbered}`, "aria-controls": this.panel.id });
    tab.append(node("span", { class: "name" }), node("span", { class: "value" }));
    tab.addEventListener("click", () => this.choose(tab));
    return tab;
  }

  choose(tab) {
    this.chosen = tab.dataset.alice;
    this.index = null;
    const runs = this.job.runs.filter((run) => run.rounds.length);
    this.run = runs.find((run) => run.alice === this.chosen) ?? runs[0];
    this.updateTabs(runs);
    this.draw();
  }

  move(event) {
    const all = [...this.tabs.children];
    const now = all.indexOf(event.target);
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: all.length - 1 }[event.key];
    if (next === undefined || now < 0) return;
    event.preventDefault();
    const tab = all[(next + all.length) % all.length];
    tab.focus();
    this.choose(tab);
  }

  /** Redraw the charts if the run or the width has changed. */
  draw() {
    const run = this.run;
    if (!run || !this.root.open) return;
    const measured = run.scores.some((value) => value !== null);
    const weighed = run.weights.some((row) => row.some((weight) => weight !== null));
    this.scores.figure.hidden = !measured;
    this.weights.figure.hidden = !weighed;
    const size = ({ svg }) => Math.round(svg.getBoundingClientRect().width);
    const key = JSON.stringify([run, size(this.scores), size(this.weights)]);
    if (key !== this.key) {
      this.key = key;
      this.index = null;
      this.series = seriesOf(run);
      if (measured) this.drawScores(run, size(this.scores));
      if (weighed) this.drawWeights(run, size(this.weights));
      this.point(null);
      this.list(run);
      this.tabled = null;
    }
    if (this.numbers.open && this.tabled !== key) this.tabulate(run, key);
  }

  drawScores(run, width) {
    const word = run.score === "accuracy" ? "Accuracy" : "Root mean squared error";
    const last = run.rounds.length - 1;
    setText(this.scores.heading, `${word} of ${run.alice}'s model`);
    setText(this.scores.title, `${word} per round`);
    setText(this.scores.about, `${run.rounds[last]} rounds. Last: ${scored(run, run.scores[last])}; ${this.best(run)}.`);
    drawScores(this.scores, run, width);
  }

  drawWeights(run, width) {
    setText(this.weights.heading, `Weights for ${run.alice}`);
    setText(this.weights.title, "Weight of each site per round");
    setText(this.weights.about, this.shares(run.rounds.length - 1));
    drawWeights(this.weights, run, this.series, width);
  }

  best(run) {
    const known = run.scores.filter((value) => value !== null);
    const best = run.score === "accuracy" ? Math.max(...known) : Math.min(...known);
    return `best ${scored(run, best)} in round ${run.rounds[run.scores.indexOf(best)]}`;
  }

  shares(index) {
    const parts = this.series.map(({ name, weights }) => `${short(name, 40)} ${percent(weights[index])}`);
    return `Round ${this.run.rounds[index]}: ${parts.join(", ")}`;
  }

  /** Show the numbers of one round, or of the last one. */
  point(index) {
    const run = this.run;
    const shown = index ?? run.rounds.length - 1;
    const loss = run.losses[shown] === null ? "" : `, loss ${significant(run.losses[shown])}`;
    const best = run.scores.some((value) => value !== null) ? `; ${this.best(run)}` : "";
    setText(this.scores.readout, `Round ${run.rounds[shown]}: ${scored(run, run.scores[shown])}${loss}${best}`);
    setText(this.weights.readout, this.shares(shown));
    for (const chart of [this.scores, this.weights]) if (chart.size) chart.point(index);
  }

  list(run) {
    const last = run.rounds.at(-1);
    const recent = run.screened.toSorted((one, two) => two.round - one.round);
    const lines = recent.map(({ site, reason, round, times }) => {
      const when = round === last ? `in round ${round}, the last one` : `last in round ${round}`;
      return node("li", {}, node("strong", {}, site), `: ${reason}, ${when}; ${times} of ${last} rounds in total`);
    });
    this.screened.replaceChildren(...lines);
    this.screenedPart.hidden = !lines.length;
  }

  tabulate(run, key) {
    this.tabled = key;
    const heads = ["round", run.score, "loss", ...run.sites];
    const head = node("tr", {}, ...heads.map((text) => node("th", { scope: "col" }, short(text, 24))));
    const rows = run.rounds.map((round, r) => {
      const cells = [scored(run, run.scores[r]), significant(run.losses[r]), ...run.weights.map((row) => percent(row[r], 1))];
      return node("tr", {}, node("th", { scope: "row" }, String(round)), ...cells.map((text) => node("td", {}, text)));
    });
    this.table.replaceChildren(node("thead", {}, head), node("tbody", {}, ...rows.reverse()));
  }
}

// ---- the page ----

function update(state) {
  const connected = state.sites.filter((site) => site.state === "connected").length;
  const known = state.sites.length > 0;
  setText(byId("federation"), state.federation || "Federation");
  const server = state.server === "running" ? `Server running · ${connected} of ${state.sites.length} sites connected` : `Server ${state.server}`;
  setText(byId("summary"), state.time ? `${server} · read at ${clock(state.time)}` : server);
  show(byId("banner"), trouble(state));
  updateSites(state.sites);
  updateJobs(state);
  byId("no-jobs").hidden = state.jobs.length > 0 || !known;
  show(byId("older"), state.older ? `${state.older} older jobs are not shown.` : "");
  const running = state.jobs.find((job) => job.status === "running");
  document.title = running ? `${running.round}/${running.rounds} ${running.name} – waffle` : `${state.federation || "waffle"} – waffle`;
}

function trouble(state) {
  if (state.problem) return `The state cannot be read: ${state.problem}.`;
  if (state.age > STALE) return `The server is slow to answer. These numbers are ${Math.round(state.age)} seconds old.`;
  if (state.server === "running") return "";
  return "The server does not answer, so the state of the sites is unknown. Start it with: waffle deploy server FOLDER";
}

function updateSites(sites) {
  const body = byId("sites").tBodies[0];
  while (body.rows.length > sites.length) body.lastChild.remove();
  sites.forEach((site, i) => {
    const row = body.rows[i] ?? body.appendChild(newSite());
    setText(row.querySelector(".name"), site.name);
    show(row.querySelector(".key"), site.key);
    row.querySelector(".key").title = site.key;
    tone(row.querySelector(".state"), site.state, SITE_TONES);
  });
}

function newSite() {
  const head = node("th", { scope: "row" }, node("span", { class: "name" }), node("span", { class: "key" }));
  return node("tr", {}, head, node("td", {}, node("span", { class: "state" })));
}

function updateJobs(state) {
  const place = byId("jobs");
  const names = new Set(state.jobs.map((job) => job.name));
  for (const [name, view] of jobs) {
    if (names.has(name)) continue;
    view.root.remove();
    jobs.delete(name);
  }
  state.jobs.forEach((job, i) => {
    if (!jobs.has(job.name)) jobs.set(job.name, new JobView(i === 0 || job.status === "running"));
    const view = jobs.get(job.name);
    if (place.children[i] !== view.root) place.insertBefore(view.root, place.children[i] ?? null);
    view.update(job, state.time);
  });
}

async function read() {
  const answer = await fetch("/state.json", { cache: "no-store", signal: AbortSignal.timeout(10000) });
  if (!answer.ok) throw new Error(`the status was ${answer.status}`);
  return answer.json();
}

let lastReply = "";

async function poll() {
  let state = null;
  try {
    state = await read();
  } catch {
    show(byId("banner"), `This page is out of date: waffle deploy watch does not answer. Start it again.${lastReply}`);
  }
  if (state) {
    update(state);
    lastReply = ` The last reply arrived at ${clock(Date.now() / 1000)}.`;
    document.querySelector("main").removeAttribute("aria-busy");
    document.body.dataset.ready = "yes";
  }
  setTimeout(poll, POLL);
}

new ResizeObserver(() => jobs.forEach((view) => view.draw())).observe(document.body);
poll();
