// The shell: which view is shown, how the server is, who it is. The views are in try.js and watch.js; About is here.

import { $, ask, el, exchange, failureOf, heard, key, newKey, show } from "./api.js";
import * as tries from "./try.js";
import * as watch from "./watch.js";

const VIEWS = ["try", "watch", "about"];
const AGAIN_MS = 2000;
const WORDS = { ready: "ready", starting: "starting", failing: "not ready", draining: "draining",
  overloaded: "overloaded", unreachable: "no answer", locked: "key needed", asking: "asking" };
const NOTICES = {
  starting: "The model is still loading. This page goes on by itself once it is there.",
  failing: "Not ready: requests get 503 until the engine answers again",
  draining: "This server is shutting down: it finishes what it has begun and takes nothing new.",
  overloaded: "Overloaded: more is asked for than the queue holds (--max-queue-tokens), and the rest is refused with 429. "
    + "Send it again in a moment.",
  unreachable: "The server does not answer. Trying again every two seconds.",
  locked: "This server asks for a key. The button above takes it.",
};
let state = "asking", info = null, booting = false, again = 0, calm = 0;

function view() {
  const asked = location.hash.slice(1);
  return VIEWS.includes(asked) ? asked : "try";
}

function route() {
  const now = view();
  for (const name of VIEWS) $(`view-${name}`).hidden = name !== now;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${now}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${info ? `${info.model.name} · ` : ""}${now[0].toUpperCase()}${now.slice(1)} · Hortus`;
  look();
  if (info && now === "try") tries.begin();
}

// The stream runs only while somebody looks.
function look() {
  watch.look(view() === "watch" && !document.hidden, setState);
}

function setState(now, reason) {
  state = now;
  $("state").textContent = WORDS[now];
  $("state").dataset.state = now;
  const text = NOTICES[now] + (now !== "failing" ? "" : reason ? `: ${reason}.` : ".");
  const notice = $("notice");
  notice.hidden = !(now in NOTICES);
  if (!notice.hidden && notice.textContent !== text) notice.textContent = text;
  notice.dataset.state = now;
  clearTimeout(again);
  if (["starting", "failing", "draining", "unreachable"].includes(now)) again = setTimeout(poll, AGAIN_MS);
  if (now === "ready" && !info) boot();
}

// Until it is ready, ask. /ready needs no key.
async function poll() {
  if (document.hidden) return void (again = setTimeout(poll, AGAIN_MS));
  try {
    const answer = await exchange("ready");
    if (answer.ok) setState("ready");
    else told(await failureOf(answer));
  } catch (failure) {
    told(failure);
  }
}

function told(failure) {
  const { code, message, status } = failure;
  if (code === "unreachable") setState("unreachable");
  else if (code === "draining") setState("draining");
  else if (code === "unauthorized") setState("locked");
  else if (code === "not_ready") setState(info ? "failing" : "starting", info ? message : "");
  else if (status === 429) {
    setState("overloaded");
    clearTimeout(calm);
    calm = setTimeout(() => state === "overloaded" && setState("ready"), 3000);
  } else if (status && state !== "overloaded") setState("ready");
}

async function boot() {
  if (booting) return;
  booting = true;
  try {
    info = (await ask("info")).told;
  } catch {
    return;  // told() has said why, and goes on asking
  } finally {
    booting = false;
  }
  $("served").textContent = info.model.name;
  $("key-button").hidden = !key();
  tries.set(info);
  watch.set(info);
  about();
  route();
}

function link(path, text) {
  // A key goes in a header, which a link cannot send.
  return key() ? el("code", {}, `curl -H "authorization: Bearer $HORTUS_API_KEY" ${new URL(path, document.baseURI)}`)
    : el("a", { href: path }, text);
}

function facts(title, rows) {
  const list = el("dl");
  for (const [name, value, hint] of rows) {
    if (value == null || value === "") continue;
    list.append(el("div", {}, el("dt", {}, name), el("dd", {}, value, hint ? el("small", {}, hint) : null)));
  }
  return el("section", { class: "card" }, el("h2", {}, title), list);
}

function about() {
  const { model, limits, prompts, versions } = info;
  const kinds = { embed: "embedding model", classify: model.labels.length > 1 ? "classifier" : "reranker",
    sparse: "sparse embedding model", tokens: "late-interaction model" };
  const mib = (bytes) => `${show(bytes / 2 ** 20)} MiB`;
  const prompt = Object.entries(prompts).map(([name, text]) => [name, text === "" ? "(none)" : text,
    name === info.default_prompt_name ? "where a request names none" : ""]);
  $("facts").replaceChildren(
    facts("Model", [
      ["Name", model.name, "what requests give as model"],
      ["Revision", model.revision],
      ["Kind", kinds[model.kind]],
      ["Family", model.family],
      ["Parameters", model.parameters ? `${show(model.parameters / 1e6)} million` : ""],
      [{ embed: "Vector", classify: "Answer" }[model.kind] || "Row", `${show(model.width)} ${{ embed: "values", classify: "labels", sparse: "weights" }[model.kind] || "values a token"}`,
        model.kind === "embed" ? `${model.pooling} pooling, ${model.normalize ? "normalised" : "not normalised"}` : ""],
      ["Vocabulary", `${show(model.vocab_size)} tokens`],
    ]),
    facts("Runs on", [
      ["Device", model.device],
      ["Numbers", model.dtype],
      ["Attention", model.attention, "the backend, and why it was chosen"],
      ["A step", `${show(model.batch_tokens)} tokens`, "at which this device runs at full throughput"],
    ]),
    facts("More", [
      ["API", link("docs", "Every route and field")],
      ["OpenAPI", link("openapi.json", "openapi.json")],
      ["Metrics", link("metrics", "Prometheus text")],
      ["This page", "asks only this server, sets no cookies, keeps nothing you type", "switched off by --no-page"],
    ]),
    facts("Limits", [
      ["Tokens an input", show(limits.max_tokens), limits.auto_truncate ? "longer ones are cut (--auto-truncate)"
        : "longer ones are refused (--max-length, --auto-truncate)"],
      ["Characters an input", show(limits.max_input_chars), "--max-input-chars"],
      ["Inputs a request", show(limits.max_inputs), "--max-inputs"],
      ["Body of a request", mib(limits.max_body_bytes), "--max-body-bytes"],
      ["Numbers in an answer", show(limits.max_answer_values), "--max-answer-values"],
      ["Time of a request", `${show(limits.timeout_s)} s`, "--timeout-s"],
    ]),
    facts("Versions", Object.entries(versions)),
    prompt.length ? facts("Prompts", prompt) : "",
  );
}

heard.answer = () => state !== "overloaded" && state !== "ready" && poll();
heard.failure = told;
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", look);
$("key-button").onclick = async () => {
  if (await newKey()) {
    info = null;
    setState("ready");
  }
};
route();
boot();
