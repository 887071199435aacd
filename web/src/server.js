// What the page asks of its server. Addresses are relative, so that the server may sit behind a path.
import { observable } from "./state.js";

/** Raised for every failure, with a message that a reader understands and that says what to do. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const AGAIN = 2000; // milliseconds until a server that is away is asked again
const UNREACHABLE = `The server at ${location.host} cannot be reached. Is kvern serve running there? The page tries again by itself.`;
const KEPT = "What has come is kept.";

/** What can be done about a failure, where the server's own message does not say it. */
function advice(status, code, retry) {
  if (code === "context_length_exceeded") return "Or edit an earlier question, take a file away, or begin a new conversation.";
  if (status === 401) return "Load the page again: the browser then asks for the key.";
  if (status === 429) return retry ? `Try again in ${retry} s.` : "Try again in a moment.";
  if (status === 502 || status === 504) return "This is the answer of a proxy: the server behind it may be starting or gone.";
  return "";
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    watch();
    throw new ServerError(UNREACHABLE);
  }
  if (response.ok) return response;
  const body = await response.text();
  let [message, code] = [body.length < 300 && !/^\s*</.test(body) ? body : response.statusText, null];
  try {
    ({ message, code } = JSON.parse(body).error);
  } catch {
    // not one of the server's own errors: a proxy's, perhaps
  }
  const words = [`${message} (HTTP ${response.status})`, advice(response.status, code, response.headers.get("retry-after"))];
  throw new ServerError(words.filter(Boolean).join(". "), response.status);
}

const post = (path, body, signal) =>
  request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

export const metrics = async (signal) => (await request("metrics", { signal })).text();

/** Each engine as `data`, with the verdict on its last seconds, and the prefill servers, if there are any. */
export const engines = async (signal) => (await request("v1/engines", { signal })).json();

/** The number of tokens that a request's prompt has. */
export const countTokens = async ({ model, messages, tools }, signal) =>
  (await (await post("tokenize", { model, messages, ...(tools && { tools }) }, signal)).json()).count;

/** `models` of the server, each with its `id` (an adapter has its model as `parent`), `facts` by id, and what fails. */
export const server = observable({ models: [], facts: {}, version: null, failure: null });

export async function readModels() {
  try {
    const { data } = await (await request("v1/models")).json();
    server.change({ models: data, failure: null });
    for (const { id } of data.filter(({ parent }) => !parent)) await readFacts(id);
    server.change(await (await request("version")).json());
  } catch (error) {
    server.change({ failure: error.message });
    if (error.status >= 500) setTimeout(readModels, AGAIN); // it is starting
  }
}

/** Reads the states of several models anew; if that fails, the next request tells. */
export async function readStates() {
  if (!server.value.models.some(({ state }) => state)) return;
  const listed = await request("v1/models").catch(() => null);
  if (listed) server.change({ models: (await listed.json()).data });
}

/** What ollama's API tells of a model. A proxy may keep it away: then the page does without. */
async function readFacts(id) {
  const found = await post("api/show", { model: id }).catch(() => null);
  if (found) server.change({ facts: { ...server.value.facts, [id]: await found.json() } });
}

let watching = null;

/** Says that the server is away until it is back. */
function watch() {
  if (watching) return;
  server.change({ failure: UNREACHABLE });
  watching = setInterval(async () => {
    const back = await fetch("health").catch(() => null);
    if (!back?.ok) return;
    clearInterval(watching);
    watching = null;
    readModels();
  }, AGAIN);
}

/** What the template of the model in use cannot do, in words, or "". */
const lacking = (names) => {
  const words = { enable_thinking: "switch thinking", reasoning_effort: "set an effort", tools: "take tools" };
  const lacks = (names ?? "").split(/,\s*/).filter((name) => name in words);
  return lacks.length ? `This model's chat template cannot ${lacks.map((name) => words[name]).join(" or ")}.` : "";
};

/** The chunks of a streamed chat completion, after one `{ lacks }`. Raises ServerError, also for one that breaks off. */
export async function* chat(body, signal) {
  const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const response = await post("v1/chat/completions", { ...body, ...options }, signal);
  yield { lacks: lacking(response.headers.get("x-kvern-template-lacks")) };
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message);
    yield chunk;
  }
  watch();
  throw new ServerError(`The answer broke off: the server closed the connection. ${KEPT}`);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      watch();
      throw new ServerError(`The answer broke off: the connection to the server was lost. ${KEPT}`);
    }
    if (part.done) return;
    const lines = (rest + part.value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
