// The first view: texts in, what the model makes of them out. Each card is one request: a form, its result, where its time
// went, and the lines that do the same elsewhere.

import { $, ask, el, key, show } from "./api.js";

const MOST_TEXTS = 30, MOST_TOKENS = 3000;
const TEXTS = ["A cat sits on the mat.", "A kitten is resting on a rug.", "It will rain all afternoon.",
  "The forecast says showers until evening.", "Tulips flower in spring."];
const QUERY = "What will the weather be like?";
const TEXT = "Unbelievably, the gardener's café sells tulip-flavoured ice cream!";
const KINDS = {
  embed: ["similarity", "rank", "tokens"],
  sparse: ["similarity", "tokens"],
  classify: ["classify", "tokens"],
  tokens: ["rank", "tokens"],
};
let info = null, begun = false, cards = [];

export function set(told) {
  info = told;
  begun = false;
  const kind = info.model.kind;
  let names = KINDS[kind] || ["tokens"];
  if (kind === "classify" && info.model.labels.length < 2 && info.model.width === 1) names = ["rank", "tokens"];
  $("try-lead").textContent = {
    embed: `${info.model.name} turns a text into ${info.model.width} numbers. Texts that mean similar things get similar numbers.`,
    sparse: `${info.model.name} weighs the words of its vocabulary by how much a text is about them.`,
    classify: names[0] === "rank" ? `${info.model.name} reads a query and a document together and says how well they fit.`
      : `${info.model.name} tells which of its ${info.model.width} labels fits a text.`,
    tokens: `${info.model.name} gives a vector for every token of a text.`,
  }[kind] || "";
  cards = names.map((name, i) => new Card(CARDS[name], i === 0));
  $("tries").replaceChildren(...cards.map((card) => card.root));
}

// The examples, once, so that there is something to see.
export async function begin() {
  if (begun) return;
  begun = true;
  for (const card of cards) await card.run();  // one by one: none waits for another, which its times would show
}

const fixed = (value, places) => value.toFixed(places).replace("-", "−");
const lines = (text) => text.split("\n").filter((line) => line.trim() !== "");

class Card {
  constructor(plan, first) {
    this.plan = plan;
    this.turn = 0;
    this.fields = {};
    const form = el("form", { onsubmit: (event) => { event.preventDefault(); this.run(); } });
    for (const [name, label, given, rows] of plan.fields) {
      const id = `${plan.name}-${name}`;
      const field = el("textarea", { id, rows, spellcheck: "false", dir: "auto" });
      field.value = given;
      field.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey || rows === 1)) return;
        event.preventDefault();
        this.run();
      });
      this.fields[name] = field;
      form.append(el("label", { for: id }, label), field);
    }
    const options = el("div", { class: "options" });
    if (plan.cut) {
      this.cut = el("input", { type: "checkbox", id: `${plan.name}-cut` });
      this.cut.checked = info.limits.auto_truncate;
      options.append(el("label", {}, this.cut, " Cut what is too long"));
    }
    const prompts = Object.keys(info.prompts);
    if (plan.prompts && prompts.length) {
      this.prompt = el("select", {}, el("option", { value: "" }, "default"), ...prompts.map((n) => el("option", {}, n)));
      options.append(el("label", {}, "Prompt ", this.prompt));
    }
    this.button = el("button", { title: "Ctrl+Enter" }, plan.verb);
    form.append(el("div", { class: "row" }, this.button, options));
    this.status = el("p", { class: "status", role: "status" });
    this.result = el("div", { class: "result" });
    this.times = el("div", { class: "times" });
    this.code = new Code(plan.name, first);
    this.root = el("section", { class: "card try", id: plan.name, "aria-labelledby": `${plan.name}-title` },
      el("h2", { id: `${plan.name}-title` }, plan.title),
      el("div", { class: "halves" }, form, el("div", {}, this.status, this.result, this.times)), this.code.root);
  }

  // Of two requests on their way the later one counts.
  async run() {
    const turn = ++this.turn, values = Object.fromEntries(Object.entries(this.fields).map(([n, f]) => [n, f.value]));
    const asked = this.plan.request(values, { truncate: this.cut?.checked, prompt: this.prompt?.value });
    if (typeof asked === "string") return this.fail(asked);
    this.code.set(asked);
    this.root.setAttribute("aria-busy", "true");
    try {
      const { told, times } = await ask(asked.path, asked.body);
      if (turn !== this.turn) return;
      this.root.dataset.done = turn;
      this.status.classList.remove("error");
      this.status.textContent = asked.note || "";
      this.result.replaceChildren(...this.plan.show(told, asked));
      this.times.replaceChildren(...bar(times));
    } catch (failure) {
      if (turn === this.turn) this.fail(failure.message);
    } finally {
      if (turn === this.turn) this.root.removeAttribute("aria-busy");
    }
  }

  fail(message) {
    this.status.classList.add("error");
    this.status.textContent = message;
    this.result.replaceChildren();
    this.times.replaceChildren();
  }
}

// Where the time went. What the server does not name went into reading the request and writing the answer.
function bar(times) {
  const trip = `${show(times.trip)} ms until this page had it`;
  if (times.total === undefined) return [el("p", { class: "hint" }, trip)];
  const { tokenize, queue, device, total } = times;
  const parts = [["tokenise", tokenize], ["queue", queue], ["device", device], ["encode", Math.max(0, total - tokenize - queue - device)]];
  const strip = el("div", { class: "strip", role: "img", "aria-label": `Time in the server: ${parts.map(([n, ms]) => `${n} ${show(ms)} ms`).join(", ")}` });
  const legend = el("ul", { class: "legend" });
  for (const [name, ms] of parts) {
    const part = el("span", { class: name });
    part.style.flexGrow = Math.max(ms, total / 250);
    strip.append(part);
    legend.append(el("li", { class: name }, `${name} `, el("b", {}, `${show(ms)} ms`)));
  }
  return [strip, legend, el("p", { class: "hint" }, `${show(total)} ms in the server, ${trip}`)];
}

function few(values, field) {
  const texts = lines(values[field]);
  if (!texts.length) return ["Type a text first: one a line."];
  return [null, texts.slice(0, MOST_TEXTS), texts.length > MOST_TEXTS ? `The first ${MOST_TEXTS} of ${texts.length} texts: the API takes more at once.` : ""];
}

const CARDS = {
  similarity: {
    name: "similarity", title: "How similar are these texts?", verb: "Compare", cut: true, prompts: true,
    fields: [["texts", "Texts, one a line", TEXTS.join("\n"), 6]],
    request(values, { truncate, prompt }) {
      const [wrong, input, note] = few(values, "texts");
      if (wrong) return wrong;
      if (info.model.kind === "sparse") return { path: "embed_sparse", body: { inputs: input, ...(truncate && { truncate }) }, texts: input, note };
      const body = { model: info.model.name, input, encoding_format: "float" };
      return { path: "v1/embeddings", body: { ...body, ...(truncate && { truncate }), ...(prompt && { prompt_name: prompt }) }, texts: input, note };
    },
    show(told, { texts }) {
      const rows = Array.isArray(told) ? told.map((row) => new Map(row.map((e) => [e.index, e.value])))
        : told.data.map((e) => new Map(e.embedding.entries()));
      return heatMap(texts, rows);
    },
  },
  rank: {
    name: "rank", title: "Which documents answer a query?", verb: "Rank", cut: true,
    fields: [["query", "Query", QUERY, 1], ["documents", "Documents, one a line", TEXTS.join("\n"), 5]],
    request(values, { truncate }) {
      const [wrong, documents, note] = few(values, "documents");
      if (wrong || !values.query.trim()) return wrong || "Type a query first.";
      const body = { model: info.model.name, query: values.query.trim(), documents, ...(truncate && { truncate }) };
      return { path: "v1/rerank", body, documents, note };
    },
    show: (told, { documents }) => [bars(told.results.map((r) => [r.relevance_score, documents[r.index]])),
      el("p", { class: "hint" }, { embed: "Cosine of each document with the query; 1 is the same direction.",
        tokens: "MaxSim: for each of the query's tokens the nearest of the document's, summed." }[info.model.kind]
        || "The reranker's score: the higher, the better the document fits.")],
  },
  classify: {
    name: "classify", title: "Which label fits?", verb: "Classify", cut: true,
    fields: [["text", "Text", TEXTS[0], 3]],
    request: (values, { truncate }) => values.text.trim() ? { path: "classify",
      body: { model: info.model.name, input: [values.text], ...(truncate && { truncate }) } } : "Type a text first.",
    show: (told) => [bars(told.data[0].probs.map((p, i) => [p, info.model_type.classifier?.id2label[i] ?? `label ${i}`])
      .sort((a, b) => b[0] - a[0]).slice(0, MOST_TEXTS))],
  },
  tokens: {
    name: "tokens", title: "What does the model read?", verb: "Tokenise",
    fields: [["text", "Text", TEXT, 3]],
    request: (values) => values.text ? { path: "tokenize", body: { inputs: values.text } } : "Type a text first.",
    show([found]) {
      const chips = el("p", { class: "tokens", dir: "auto" });
      for (const token of found.slice(0, MOST_TOKENS)) {
        chips.append(el("span", { class: token.special ? "token special" : "token", title: `id ${token.id}` },
          el("bdi", {}, token.text.replaceAll(" ", "·").replaceAll("\n", "↵")), el("small", {}, String(token.id))));
      }
      const count = found.length, most = info.limits.max_tokens;
      return [el("p", {}, el("b", {}, show(count)), count === 1 ? " token; " : " tokens; ", `the model takes at most ${show(most)} an input`,
        count > most ? ", so this text would be refused, or cut where it is asked to be." : ".",
        count > MOST_TOKENS ? ` The first ${show(MOST_TOKENS)} are shown.` : ""), chips];
    },
  },
};

function cosines(rows) {
  const norms = rows.map((row) => Math.sqrt([...row.values()].reduce((sum, x) => sum + x * x, 0)));
  return rows.map((a, i) => rows.map((b, j) => {
    let dot = 0;
    for (const [at, x] of a) dot += x * (b.get(at) || 0);
    return dot / (norms[i] * norms[j] || 1);
  }));
}

function heatMap(texts, rows) {
  const head = el("tr", {}, el("td", {}), ...texts.map((text, i) => el("th", { scope: "col", title: text, "aria-label": `Text ${i + 1}` }, String(i + 1))));
  const body = cosines(rows).map((values, i) => el("tr", {},
    el("th", { scope: "row", title: texts[i] }, el("span", { class: "number" }, String(i + 1)), el("bdi", {}, texts[i])),
    ...values.map((value, j) => el("td", { class: `heat h${Math.max(0, Math.min(10, Math.round(value * 10)))}`,
      title: `${i + 1} and ${j + 1}: ${fixed(value, 4)}` }, fixed(value, 2)))));
  const scale = el("span", { class: "scale", "aria-hidden": "true" }, ...Array.from({ length: 11 }, (_, i) => el("i", { class: `h${i}` })));
  return [el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Similarities" },
    el("table", { class: "heatmap" }, el("caption", { class: "unseen" }, "Cosine similarity of each text with each other"),
      el("thead", {}, head), el("tbody", {}, ...body))),
  el("p", { class: "hint" }, "Cosine similarity, from 0 (unrelated) ", scale, " to 1 (the same)")];
}

function bars(pairs) {
  const most = Math.max(1, ...pairs.map(([score]) => score));
  return el("ol", { class: "bars" }, ...pairs.map(([score, text]) => {
    const length = el("i", {});
    length.style.width = `${(Math.max(0, score) / most) * 100}%`;
    return el("li", {}, el("span", { class: "score" }, fixed(score, 3)), el("span", { class: "length", "aria-hidden": "true" }, length),
      el("bdi", { title: text }, text));
  }));
}

// The same request in three languages.
const LANGUAGES = { curl, Python: python, JavaScript: javascript };
const pretty = (body) => JSON.stringify(body, null, 2);
const url = (path) => new URL(path, document.baseURI).href;
// In single quotes a shell reads everything as it is.
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const indented = (text) => text.replaceAll("\n", "\n    ");
// JSON is Python but for three words.
const literal = (value) => indented(pretty(value).replace(/^(\s*"[^"]*": )(true|false|null)/gm,
  (_, before, word) => before + { true: "True", false: "False", null: "None" }[word]));

function curl({ path, body }) {
  return `curl ${url(path)} \\\n${key() ? '  -H "authorization: Bearer $HORTUS_API_KEY" \\\n' : ""}`
    + `  -H 'content-type: application/json' \\\n  -d ${quoted(pretty(body))}`;
}

function python({ path, body }) {
  const v1 = path.startsWith("v1/"), secret = key() ? 'os.environ["HORTUS_API_KEY"]' : '"none"';
  let call;
  if (path === "v1/embeddings") {
    const { model, input, encoding_format, ...extra } = body;
    call = `answer = client.embeddings.create(\n    model=${literal(model)},\n    input=${literal(input)},\n`
      + (Object.keys(extra).length ? `    extra_body=${literal(extra)},\n` : "") + ")\n"
      + "for one in answer.data:\n    print(one.index, one.embedding[:4])";
  } else {
    call = `answer = client.post(\n    "/${v1 ? path.slice(3) : path}", cast_to=object, body=${literal(body)},\n)\nprint(answer)`;
  }
  return `${key() ? "import os\n\n" : ""}from openai import OpenAI\n\n`
    + `client = OpenAI(base_url=${JSON.stringify(url(v1 ? "v1" : "."))}, api_key=${secret})\n${call}`;
}

function javascript({ path, body }) {
  return `const answer = await fetch(${JSON.stringify(url(path))}, {\n  method: "POST",\n  headers: {\n    "content-type": "application/json",\n`
    + (key() ? "    authorization: `Bearer ${process.env.HORTUS_API_KEY}`,\n" : "")
    + `  },\n  body: JSON.stringify(${pretty(body).replaceAll("\n", "\n  ")}),\n});\nconsole.log(await answer.json());`;
}

class Code {
  constructor(name, open) {
    this.asked = null;
    this.text = el("pre", { tabindex: "0", "aria-label": "Code" });
    this.copy = el("button", { type: "button", class: "quiet copy", onclick: () => this.take() }, "Copy");
    this.choices = Object.keys(LANGUAGES).map((language, i) => {
      const choice = el("input", { type: "radio", name: `${name}-language`, value: language, onchange: () => this.write() });
      choice.checked = i === 0;
      return choice;
    });
    this.root = el("details", { class: "code", open }, el("summary", {}, "The same from a terminal or a program"),
      el("fieldset", { class: "row" }, el("legend", { class: "unseen" }, "Language"),
        ...this.choices.map((choice) => el("label", {}, choice, el("span", {}, choice.value))), this.copy), this.text);
  }

  set(asked) {
    this.asked = asked;
    this.write();
  }

  write() {
    const language = this.choices.find((choice) => choice.checked).value;
    if (this.asked) this.text.textContent = LANGUAGES[language](this.asked);
  }

  async take() {
    try {
      await navigator.clipboard.writeText(this.text.textContent);
    } catch {  // only pages over HTTPS or from this machine have a clipboard
      getSelection().selectAllChildren(this.text);
      document.execCommand("copy");
    }
    this.copy.textContent = "Copied";
    clearTimeout(this.timer);
    this.timer = setTimeout(() => (this.copy.textContent = "Copy"), 1500);
  }
}
