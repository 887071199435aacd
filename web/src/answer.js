// One answer: what is sent for it, what comes, and how fast.
import { dataOf } from "./pictures.js";
import { chat } from "./server.js";
import { parameters, settings } from "./settings.js";

const FENCE = /`{3,}/g;

/** A file as the model reads it: its name, and its text between more backticks than it has in a row. */
function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(FENCE) ?? []).map((marks) => marks.length));
  const marks = "`".repeat(longest + 1);
  return `${name}\n${marks}\n${text}\n${marks}`;
}

/** A text, or where there are pictures these as parts before it. Raises an Error for one that is gone. */
async function content({ files, question }) {
  const [texts, parts] = [[], []];
  for (const file of files ?? [])
    if (file.picture) parts.push({ type: "image_url", image_url: { url: await dataOf(file) } });
    else texts.push(fenced(file));
  const text = [...texts, question].filter(Boolean).join("\n\n");
  if (!parts.length) return text;
  return text ? [...parts, { type: "text", text }] : parts;
}

/** The messages that a turn asks with: results of calls, and a question. */
async function asked({ question, files, results }) {
  const told = (results ?? []).map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }));
  return question == null ? told : [...told, { role: "user", content: await content({ files, question }) }];
}

function said({ answer, thinking, calls }) {
  const message = { role: "assistant", content: answer };
  if (thinking) message.reasoning_content = thinking;
  if (calls?.length) message.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return message;
}

const isAnswered = (turn) => Boolean(turn.answer || turn.calls?.length);

/**
 * The body of a request for `turn`, the turns before it being `earlier`. Settings left empty are not sent: the server's
 * defaults hold. With `goOn` the answer goes on with what the turn has. Rejects with an Error that says what cannot be sent.
 */
export async function body(earlier, turn, goOn = false) {
  const { system, ...others } = settings.value;
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const one of earlier.filter(isAnswered)) messages.push(...(await asked(one)), said(one));
  messages.push(...(await asked(turn)));
  const how = goOn ? { continue_final_message: true, add_generation_prompt: false } : {};
  if (goOn) messages.push(said(turn));
  return { ...(turn.model && { model: turn.model }), messages, ...parameters(others), ...how };
}

const HIDDEN = 250; // milliseconds: a page that is not seen gets no frames, and its answers grow all the same

/** Runs something in the next frame, or soon where there are none. Returns what cancels it. */
function soon(run, wait) {
  let frame = null;
  const begin = setTimeout(() => (frame = requestAnimationFrame(go)), wait);
  const late = setTimeout(go, wait + HIDDEN);
  const cancel = () => {
    clearTimeout(begin);
    clearTimeout(late);
    cancelAnimationFrame(frame);
  };
  function go() {
    cancel();
    run();
  }
  return cancel;
}

const SHARE = 4; // at most one part in so many of the time goes into drawing, so that the page stays quick

/** Streams an answer to `show`, at most once a frame, and returns what is to be kept of it. Never raises. */
export async function stream(content, signal, turn, show) {
  const begun = performance.now();
  const told = { answer: turn.answer, thinking: turn.thinking, calls: [], lacks: "" };
  let [finish, usage, first, last, cancel, ready] = [null, null, null, null, null, 0];
  const fields = () => ({ ...told, calls: [...told.calls], finish, figures: figures(usage, begun, first, last) });
  const draw = () => {
    cancel = null;
    const from = performance.now();
    show(fields());
    queueMicrotask(() => (ready = from + SHARE * (performance.now() - from))); // the drawing is a microtask, too
  };
  const kept = (more) => {
    cancel?.();
    return { ...fields(), ...more };
  };
  try {
    for await (const chunk of chat(content, signal)) {
      told.lacks = chunk.lacks ?? told.lacks;
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      last = performance.now();
      first ??= last;
      add(told, choice.delta);
      finish = choice.finish_reason ?? finish;
      cancel ??= soon(draw, Math.max(0, ready - performance.now()));
    }
    return kept({ state: "done" });
  } catch (error) {
    return signal.aborted ? kept({ state: "stopped" }) : kept({ state: "failed", error: error.message });
  }
}

function add(told, delta) {
  told.answer += delta.content ?? "";
  told.thinking += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const { index, id, function: piece } of delta.tool_calls ?? []) {
    const before = told.calls[index] ?? { id, name: piece.name, arguments: "" };
    told.calls[index] = { ...before, arguments: before.arguments + (piece.arguments ?? "") };
  }
}

const LEAST = 10; // milliseconds that chunks must be spread over, so that their rate says something

function figures(usage, begun, first, last) {
  const tokens = usage?.completion_tokens;
  const [count, time] = last - first > LEAST ? [tokens - 1, last - first] : [tokens, last - begun];
  return {
    first: first && (first - begun) / 1000,
    rate: tokens > 1 && last ? (count * 1000) / time : null,
    tokens,
    thought: usage?.completion_tokens_details?.reasoning_tokens,
    prompt: usage?.prompt_tokens,
    cached: usage?.prompt_tokens_details?.cached_tokens,
  };
}
