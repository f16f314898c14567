// The server as this page sees it: requests with the key, errors as they are told. And `el`, the only way in which elements
// are made here: text goes in as text, so nothing typed or answered can become markup.

export function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((c) => c != null));
  return made;
}

export const $ = (id) => document.getElementById(id);

const number = (most) => new Intl.NumberFormat("en", { maximumFractionDigits: most });
const whole = number(0), some = number(1), more = number(2);
export function show(value) {
  const size = Math.abs(value);
  return (size >= 100 ? whole : size >= 10 ? some : more).format(value);
}

export class Failure extends Error {
  constructor(code, message, status = 0) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

// What the shell wants to hear of: every answer and every failure.
export const heard = { answer: () => {}, failure: () => {} };

// The key lives in sessionStorage: this tab, until it is closed.
const PLACE = "hortus-key";
let asking = null, refused = false;
export const key = () => sessionStorage.getItem(PLACE) || "";
export const headers = (given = {}) => (key() ? { ...given, authorization: `Bearer ${key()}` } : given);

// Ask for the key, once however many requests wait for it. False when there is none to be had.
export function askKey(why) {
  if (asking) return asking;
  const dialog = $("key"), field = $("key-field");
  if (why) $("key-why").textContent = why;
  $("key-button").hidden = false;
  field.value = "";
  asking = new Promise((done) => {
    const end = (given) => {
      if (given) sessionStorage.setItem(PLACE, given);
      refused = !given;
      asking = null;
      dialog.close();
      $("key-form").onsubmit = $("key-cancel").onclick = dialog.oncancel = null;
      done(!!given);
    };
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      end(field.value.trim());
    };
    $("key-cancel").onclick = () => end("");
    dialog.oncancel = () => end("");
    dialog.showModal();
    field.focus();
  });
  return asking;
}

// One exchange. Its Response, whatever the status; a Failure when there is none, or no key.
export async function exchange(path, { body, signal } = {}) {
  for (;;) {
    const shown = key();
    const given = { signal, headers: headers(body ? { "content-type": "application/json" } : {}) };
    if (body) Object.assign(given, { method: "POST", body: JSON.stringify(body) });
    let answer;
    try {
      answer = await fetch(path, given);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("unreachable", "The server does not answer.");
    }
    if (answer.status !== 401) return answer;
    const told = await failureOf(answer);
    // Another request may have got a new key meanwhile; one that was declined is not asked for again.
    if (key() !== shown) continue;
    if (refused || !(await askKey(shown ? "That key is not one of this server's. Try another." : ""))) throw told;
  }
}

export async function failureOf(answer) {
  try {
    const { error } = await answer.json();
    return new Failure(error.code, error.message, answer.status);
  } catch {
    return new Failure("unreachable", `An answer that is not this server's: HTTP ${answer.status}`, answer.status);
  }
}

// {told, times}: an answer's JSON, and where its time went in milliseconds.
export async function ask(path, body) {
  const begin = performance.now();
  try {
    const answer = await exchange(path, { body });
    if (!answer.ok) throw await failureOf(answer);
    const told = await answer.json();
    const times = { trip: performance.now() - begin };
    for (const part of ["tokenize", "queue", "device", "total"]) {
      const value = answer.headers.get(`x-hortus-${part}-ms`);
      if (value !== null) times[part] = Number(value);
    }
    heard.answer();
    return { told, times };
  } catch (failure) {
    heard.failure(failure);
    throw failure;
  }
}

export function newKey() {
  refused = false;
  return askKey("The key to use from now on.");
}
