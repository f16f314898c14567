// The second view: what the stream of samples tells, drawn. One stream while the view is open, none while it is not.

import { $, el, exchange, Failure, failureOf, heard, show } from "./api.js";
import { Plot } from "./plots.js";

const SPANS_S = [60, 120, 300], AGAIN_MS = 2000, GIB = 2 ** 30;
let info = null, stop = null, columns = [], rows = [], latest = null, paused = false, at = null, plots = [], tell = () => {};

const stepTokens = (row) => (latest?.step_limit_tokens && row.step_tokens !== null ? (100 * row.step_tokens) / latest.step_limit_tokens : null);
const CHARTS = [
  { title: "Tokens a second", lines: [["tokens", (r) => r.tokens_per_s]] },
  { title: "Requests a second", lines: [["answered", (r) => r.requests_per_s]], also: (r) => `${show(r.in_flight)} being worked on` },
  { title: "Latency, ms", lines: [["p50", (r) => r.p50_ms], ["p99", (r) => r.p99_ms]], none: "no requests",
    also: () => "body read to answer written" },
  { title: "Queue, tokens", engine: true, lines: [["short", (r) => r.queue_short_tokens], ["bulk", (r) => r.queue_bulk_tokens]] },
  { title: "Batch fill, %", engine: true, lines: [["of the limit", stepTokens]], none: "no steps",
    also: (r) => (r.step_sequences === null ? "" : `${show(r.steps_per_s)} steps/s of ${show(r.step_sequences)} texts, ${show(r.step_tokens)} tokens`) },
  { title: "CUDA graphs, steps a second", engine: true, gpu: true,
    lines: [["replayed", (r) => r.replays_per_s], ["captured", (r) => r.captures_per_s], ["eager", (r) => r.eager_per_s]],
    also: (r) => {
      const steps = r.replays_per_s + r.captures_per_s + r.eager_per_s;
      return `${show(r.graphs)} graphs held${steps ? `; ${show((100 * r.replays_per_s) / steps)} % of steps hit one` : ""}`;
    } },
  { title: "Memory, GiB", engine: true, lines: [["held", (r) => (r.memory_bytes ? r.memory_bytes / GIB : null)]],
    none: "not known here",
    also: () => (info?.model.device.startsWith("cuda") ? "weights, workspaces and graphs" : "by this process")
      + (latest.memory_limit_bytes ? `, of ${show(latest.memory_limit_bytes / GIB)} GiB` : "") },
  { title: "Errors a second, by code", errors: true, none: "none in these minutes" },
];

export function set(told) {
  info = told;
}

// Watch or stop. `state` is told how the server is.
export function look(on, state) {
  tell = state;
  if (on === (stop !== null)) return;
  if (!on) {
    stop.abort();
    stop = null;
    return;
  }
  if (!plots.length) build();
  stop = new AbortController();
  follow(stop.signal);
}

async function follow(signal) {
  while (!signal.aborted) {
    try {
      const answer = await exchange("watch", { signal });
      if (!answer.ok) throw await failureOf(answer);
      for await (const told of events(answer.body)) if (!signal.aborted) take(told);
      if (signal.aborted) return;
      if (latest?.state !== "draining") throw new Failure("unreachable", "");
    } catch (failure) {
      if (signal.aborted) return;
      heard.failure(failure.code ? failure : new Failure("unreachable", ""));
      if (failure.status === 429) $("watch-lead").textContent = failure.message;
      if (failure.code === "unauthorized") return;
    }
    await new Promise((done) => setTimeout(done, AGAIN_MS));
  }
}

async function* events(body) {
  const decoder = new TextDecoder(), reader = body.getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + decoder.decode(value, { stream: true })).split("\n\n");
    text = parts.pop();
    for (const part of parts) yield JSON.parse(part.slice("data: ".length));
  }
}

function take(told) {
  if (told.columns) {
    columns = told.columns;
    rows = [];
  }
  for (const row of told.rows) rows.push(Object.fromEntries(columns.map((name, i) => [name, row[i]])));
  latest = told;
  const end = rows.at(-1)?.at ?? 0;
  rows = rows.filter((row) => row.at > end - SPANS_S.at(-1));
  tell(told.state === "ready" && rows.at(-1)?.errors_per_s.overloaded ? "overloaded" : told.state, told.reason);
  if (!paused) draw();
}

function build() {
  plots = CHARTS.map((chart) => new Plot(chart));
  $("plots").replaceChildren(...plots.map((plot) => plot.root));
  $("pause").onclick = () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", String(paused));
    $("pause").textContent = paused ? "Go on" : "Pause";
    if (!paused) point(null);
  };
  for (const plot of plots) {
    plot.root.addEventListener("pointermove", (event) => point(plot.moment(event)));
    plot.root.addEventListener("pointerleave", () => point(null));
  }
  $("plots").addEventListener("keydown", (event) => {
    if (!rows.length || !["ArrowLeft", "ArrowRight", "Escape"].includes(event.key)) return;
    event.preventDefault();
    if (event.key === "Escape") return point(null);
    const now = nearest(at ?? rows.at(-1).at);
    const next = rows[Math.max(0, Math.min(rows.length - 1, now + (event.key === "ArrowLeft" ? -1 : 1)))];
    point(next.at);
    $("spoken").textContent = `${clock(next.at)}: ${plots.map((plot) => plot.said(next)).filter(Boolean).join("; ")}`;
  });
  addEventListener("resize", draw);
  draw();
}

// Read the moment `time` (Unix seconds) off every plot; null: now.
function point(time) {
  at = time;
  draw();
}

function nearest(time) {
  let best = 0;
  rows.forEach((row, i) => {
    if (Math.abs(row.at - time) < Math.abs(rows[best].at - time)) best = i;
  });
  return best;
}

const clock = (time) => new Date(time * 1000).toLocaleTimeString();

function draw() {
  const end = rows.at(-1)?.at ?? Date.now() / 1000;
  const row = rows.length ? rows[at === null ? rows.length - 1 : nearest(at)] : null;
  const age = rows.length ? end - rows[0].at : 0, span = SPANS_S.find((s) => age < s) ?? SPANS_S.at(-1);
  const here = latest === null || latest.step_limit_tokens !== null || latest.state === "starting";
  for (const plot of plots) {
    const gone = plot.chart.engine && !here ? "In the engines' processes: see their own metrics (--metrics-port)."
      : plot.chart.gpu && info && !info.model.device.startsWith("cuda") ? "The engine runs without a GPU: no graphs." : "";
    plot.draw({ rows, row, begin: end - span, end, marked: at !== null && row !== null, gone });
  }
  $("moment").textContent = !row ? "" : at === null ? (paused ? `paused at ${clock(row.at)}` : "")
    : `${clock(row.at)}, ${Math.round(end - row.at)} s before the last`;
  if (latest === null) return;
  $("watch-lead").textContent = latest.shared_port
    ? `Several gateways may share this port. What is shown is process ${latest.process} alone, the one that this page reached.`
    : latest.replicas ? `The gateway, process ${latest.process}: its requests and its replicas.`
      : "One sample a second while somebody looks, the last five minutes of them.";
  replicas();
}

function replicas() {
  const told = latest.replicas;
  if (!told) {
    const state = el("span", { class: "state", "data-state": latest.state }, { ready: "up", failing: "does not answer" }[latest.state] || latest.state);
    $("replicas").replaceChildren(el("p", {}, "One engine, in this process: ", state));
    return;
  }
  const ages = (s) => (s == null ? "" : s < 120 ? `${s} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${show(s / 3600)} h`);
  $("replicas").replaceChildren(told.length ? el("table", { class: "list" },
    el("thead", {}, el("tr", {}, ...["Replica", "State", "Up for", "Tokens sent to it, not answered", "Lost", "Why"].map((n) => el("th", { scope: "col" }, n)))),
    el("tbody", {}, ...told.map((r) => el("tr", {}, el("th", { scope: "row" }, r.address),
      el("td", {}, el("span", { class: "state", "data-state": { up: "ready", down: "failing", resting: "failing" }[r.state] || r.state }, r.state)),
      el("td", {}, ages(r.up_s)), el("td", {}, r.outstanding_tokens == null ? "" : show(r.outstanding_tokens)),
      el("td", {}, r.losses ? `${r.losses === 1 ? "once" : `${r.losses} times, last`} ${ages(r.lost_s)} ago` : "never"), el("td", {}, r.why || "")))))
    : el("p", {}, "No address stands for a replica just now."));
}
