// One turn: what was asked, what the model thought, said and called, and the results that its calls wait for.
import { useMemo, useState } from "preact/hooks";
import { copy } from "./browser.js";
import { number, seconds } from "./format.js";
import { Again, Copy, Done, Edit } from "./icons.jsx";
import { html } from "./markdown.js";

/** `again`, `edit` and `answerCalls` are there for the last turn. */
export function Turn({ turn, again, edit, answerCalls }) {
  const running = turn.state === "running";
  const calls = turn.calls ?? [];
  return (
    <article class="turn">
      {turn.question != null && (
        <>
          <h3 class="unseen">You</h3>
          <div class="question">{turn.question}</div>
        </>
      )}
      <h3 class="unseen">{turn.model ?? "Answer"}</h3>
      <div class="answer" aria-busy={running}>
        {turn.thinking && <Thinking text={turn.thinking} going={running && !turn.answer && calls.length === 0} />}
        {running && !turn.answer && !turn.thinking && calls.length === 0 && <span class="waiting">…</span>}
        {turn.structured ? <Structured text={turn.answer} /> : <Markdown text={turn.answer} />}
        {calls.map((call) => (
          <Call key={call.id} call={call} />
        ))}
        {turn.error && (
          <p class="failure" role="alert">
            {turn.error}
          </p>
        )}
      </div>
      {answerCalls && !running && calls.length > 0 && !turn.error && <Results calls={calls} send={answerCalls} />}
      {!running && (
        <footer>
          <Figures turn={turn} />
          <span class="actions">
            {turn.answer && <CopyButton text={turn.answer} />}
            {edit && turn.question != null && <IconButton label="Edit the question" icon={<Edit />} onClick={edit} />}
            {again && <IconButton label="Answer again" icon={<Again />} onClick={again} />}
          </span>
        </footer>
      )}
    </article>
  );
}

/** Open while the model thinks, closed afterwards, unless the reader has decided otherwise. */
function Thinking({ text, going }) {
  const [chosen, choose] = useState(null);
  const open = chosen ?? going;
  return (
    <div class="thinking">
      <button type="button" class="quiet" aria-expanded={open} onClick={() => choose(!open)}>
        {going ? "Thinking…" : "Thoughts"}
      </button>
      {open && <Markdown text={text} />}
    </div>
  );
}

function Call({ call }) {
  return (
    <div class="call">
      <div class="bar">
        calls <b>{call.name}</b>
      </div>
      <pre>
        <code>{pretty(call.arguments)}</code>
      </pre>
      {call.result != null && (
        <>
          <div class="bar">result</div>
          <pre>
            <code>{call.result}</code>
          </pre>
        </>
      )}
    </div>
  );
}

/** The page runs no tools: whoever reads it says what they return. */
function Results({ calls, send }) {
  const [results, setResults] = useState({});
  return (
    <form
      class="results"
      onSubmit={(event) => {
        event.preventDefault();
        send(calls.map((call) => ({ ...call, result: results[call.id] ?? "" })));
      }}
    >
      {calls.map((call) => (
        <label key={call.id}>
          Result of {call.name}
          <textarea
            rows={1}
            spellcheck={false}
            value={results[call.id] ?? ""}
            onInput={(event) => setResults({ ...results, [call.id]: event.currentTarget.value })}
          />
        </label>
      ))}
      <button type="submit">Go on</button>
    </form>
  );
}

function Structured({ text }) {
  return text ? (
    <div class="call">
      <pre>
        <code>{pretty(text)}</code>
      </pre>
    </div>
  ) : null;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it still grows, or was cut off
  }
}

function Markdown({ text }) {
  const content = useMemo(() => ({ __html: html(text) }), [text]);
  const onClick = async ({ target }) => {
    if (target.tagName !== "BUTTON") return;
    const done = await copy(target.closest(".code").querySelector("code").textContent);
    target.textContent = done ? "Copied" : "Select it and copy: the browser refuses";
    setTimeout(() => (target.textContent = "Copy"), 1500);
  };
  return <div class="markdown" onClick={onClick} dangerouslySetInnerHTML={content} />;
}

const ENDS = { stopped: "stopped", failed: "failed" };

function Figures({ turn }) {
  const { first, rate, tokens, prompt, cached } = turn.figures ?? {};
  const parts = [
    ENDS[turn.state] ?? (turn.finish === "length" && "ended at the limit of tokens"),
    first != null && `first token ${seconds(first)}`,
    rate != null && `${number(rate)} tokens/s`,
    tokens != null && `${tokens} tokens`,
    prompt != null && `prompt ${prompt}${cached ? `, ${cached} cached` : ""}`,
  ];
  return (
    <span class="figures">
      {parts.filter(Boolean).map((part) => (
        <span key={part}>{part}</span>
      ))}
    </span>
  );
}

function IconButton({ label, icon, onClick }) {
  return (
    <button type="button" class="quiet" aria-label={label} title={label} onClick={onClick}>
      {icon}
    </button>
  );
}

function CopyButton({ text }) {
  const [done, setDone] = useState(false);
  const onClick = async () => {
    setDone(await copy(text));
    setTimeout(() => setDone(false), 1500);
  };
  return <IconButton label="Copy the answer" icon={done ? <Done /> : <Copy />} onClick={onClick} />;
}

