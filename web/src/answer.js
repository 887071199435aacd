// One answer: what is sent for it, what comes, and how fast.
import { chat } from "./server.js";
import { parameters } from "./settings.jsx";

/** The messages of a turn: the question, if there was one, the answer with its calls, and their results. */
function messages({ question, answer, thinking, calls }) {
  const found = question == null ? [] : [{ role: "user", content: question }];
  if (!answer && !calls?.length) return found;
  const said = { role: "assistant", content: answer };
  if (thinking) said.reasoning_content = thinking;
  if (calls?.length) said.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  const results = (calls ?? []).map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result ?? "" }));
  return [...found, said, ...results];
}

/** The body of a request. Settings left empty are not sent: the server's defaults hold. */
export function body(turns, question, settings, model) {
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  const earlier = turns.filter((turn) => turn.answer || turn.calls?.length).flatMap(messages);
  const asked = question == null ? [] : [{ role: "user", content: question }];
  return { ...(model && { model }), messages: [...system, ...earlier, ...asked], ...parameters(settings) };
}

/** Streams an answer to `show`, once a frame, and returns what is to be kept of it. Never raises. */
export async function stream(content, signal, show) {
  const begun = performance.now();
  const said = { answer: "", thinking: "", calls: [] };
  let [finish, usage, first, last, frame] = [null, null, null, null, null];
  const draw = () => {
    frame = null;
    show({ ...said, calls: [...said.calls] });
  };
  const kept = (fields) => {
    cancelAnimationFrame(frame);
    return { ...said, finish, figures: figures(usage, begun, first, last), ...fields };
  };
  try {
    for await (const chunk of chat(content, signal)) {
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      if (!choice) continue;
      last = performance.now();
      first ??= last;
      add(said, choice.delta);
      finish = choice.finish_reason ?? finish;
      frame ??= requestAnimationFrame(draw);
    }
    return kept({ state: "done" });
  } catch (error) {
    return signal.aborted ? kept({ state: "stopped" }) : kept({ state: "failed", error: error.message });
  }
}

function add(said, delta) {
  said.answer += delta.content ?? "";
  said.thinking += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const { index, id, function: piece } of delta.tool_calls ?? []) {
    const before = said.calls[index] ?? { id, name: piece.name, arguments: "" };
    said.calls[index] = { ...before, arguments: before.arguments + (piece.arguments ?? "") };
  }
}

function figures(usage, begun, first, last) {
  const tokens = usage?.completion_tokens;
  return {
    first: first && (first - begun) / 1000,
    rate: tokens > 1 && last > first ? ((tokens - 1) * 1000) / (last - first) : null,
    tokens,
    prompt: usage?.prompt_tokens,
    cached: usage?.prompt_tokens_details?.cached_tokens,
  };
}
