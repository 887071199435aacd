// One answer: what is sent for it, what comes, and how fast.
import { chat } from "./server.js";

export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, step: "any" },
  { name: "top_p", label: "Top p", min: 0, step: "any" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
];

/** The body of a request. Settings left empty are not sent: the server's defaults hold. */
export function body(turns, question, settings, model) {
  const messages = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns.filter((turn) => turn.answer)) {
    messages.push({ role: "user", content: turn.question }, { role: "assistant", content: turn.answer });
  }
  messages.push({ role: "user", content: question });
  const given = NUMBERS.filter(({ name }) => settings[name]).map(({ name }) => [name, Number(settings[name])]);
  return { ...(model && { model }), messages, ...Object.fromEntries(given) };
}

/** Streams an answer to `show`, once a frame, and returns what is to be kept of it. Never raises. */
export async function stream(content, signal, show) {
  const begun = performance.now();
  let [text, finish, usage, first, last, frame] = ["", null, null, null, null, null];
  const draw = () => {
    frame = null;
    show(text);
  };
  const kept = (fields) => {
    cancelAnimationFrame(frame);
    return { answer: text, finish, figures: figures(usage, begun, first, last), ...fields };
  };
  try {
    for await (const chunk of chat(content, signal)) {
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      if (!choice) continue;
      last = performance.now();
      first ??= last;
      text += choice.delta.content ?? "";
      finish = choice.finish_reason ?? finish;
      frame ??= requestAnimationFrame(draw);
    }
    return kept({ state: "done" });
  } catch (error) {
    return signal.aborted ? kept({ state: "stopped" }) : kept({ state: "failed", error: error.message });
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
