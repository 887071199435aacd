// The chat: turns of a question and its answer, and the box that asks the next one.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { NUMBERS, body, stream } from "./answer.js";
import { copy, load, store, useStored } from "./browser.js";
import { number, seconds } from "./format.js";
import { Again, Copy, Done, Edit, New, Send, Settings, Stone, Stop } from "./icons.jsx";
import { html } from "./markdown.js";
import { models } from "./server.js";

const EXAMPLES = ["What is paged attention?", "Tell me a story about a fox.", "What is 17 + 25?"];
const NEAR_THE_END = 60; // pixels

const settled = (turn) => (turn.state === "running" ? { ...turn, state: "stopped" } : turn);

export function Chat({ shown }) {
  const [turns, setTurns] = useState(() => load("turns", []).map(settled));
  const [former, setFormer] = useStored("former", []);
  const [settings, setSettings] = useStored("settings", {});
  const [draft, setDraft] = useState("");
  const [editing, setEditing] = useState(false);
  const [offered, failure] = useModels();
  const request = useRef(null);
  const field = useRef(null);
  const last = turns.at(-1);
  const running = last?.state === "running";
  const model = offered.includes(settings.model) ? settings.model : offered[0];
  useKept(turns, running);

  const focus = () => matchMedia("(pointer: fine)").matches && field.current.focus(); // no keyboard over a phone's page
  const ask = async (question, earlier) => {
    const turn = { id: Date.now(), question, answer: "", state: "running", model };
    const change = (fields) => setTurns((all) => all.map((one) => (one.id === turn.id ? { ...one, ...fields } : one)));
    request.current = new AbortController();
    setTurns([...earlier, turn]);
    focus();
    change(await stream(body(earlier, question, settings, model), request.current.signal, (answer) => change({ answer })));
  };
  const stop = () => request.current?.abort();
  const send = () => {
    if (running || !draft.trim()) return;
    ask(draft.trim(), editing ? turns.slice(0, -1) : turns);
    setDraft("");
    setEditing(false);
  };
  const edit = () => {
    setDraft(last.question);
    setEditing(true);
    field.current.focus();
  };
  const begin = (next) => {
    stop();
    if (turns.length) setFormer(turns.map(settled));
    setTurns(next);
    setEditing(false);
    focus();
  };

  useEffect(() => {
    if (!shown) return undefined;
    const onKeyDown = (event) => {
      if (event.key !== "Escape") return;
      if (running) stop();
      else if (editing) {
        setEditing(false);
        setDraft("");
      }
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, [shown, running, editing]);
  useEffect(() => {
    if (shown) focus();
  }, []);

  return (
    <>
      <Scroller follow={last?.id}>
        {turns.length === 0 && <Welcome model={model} former={former} restore={() => begin(former)} ask={(text) => ask(text, [])} />}
        {turns.map((turn, index) => (
          <Turn
            key={turn.id}
            turn={turn}
            again={index === turns.length - 1 ? () => ask(turn.question, turns.slice(0, -1)) : null}
            edit={index === turns.length - 1 ? edit : null}
          />
        ))}
      </Scroller>
      <Announcement turn={last} />
      <form
        class="composer"
        onSubmit={(event) => {
          event.preventDefault();
          send();
        }}
      >
        {failure && <p class="failure">{failure}</p>}
        {editing && <p class="hint">The last question is being edited. Escape leaves it as it was.</p>}
        <div class="box">
          <Options settings={settings} setSettings={setSettings} />
          <Question field={field} draft={draft} setDraft={setDraft} send={send} />
          <div class="row">
            <select
              aria-label="Model"
              value={model}
              onChange={(event) => setSettings({ ...settings, model: event.currentTarget.value })}
            >
              {offered.map((name) => (
                <option key={name}>{name}</option>
              ))}
            </select>
            <OptionsButton settings={settings} setSettings={setSettings} />
            <button type="button" class="quiet" disabled={turns.length === 0} onClick={() => begin([])}>
              <New />
              <span>New conversation</span>
            </button>
            {running ? (
              <button type="button" class="main" aria-label="Stop" title="Stop (Escape)" onClick={stop}>
                <Stop />
              </button>
            ) : (
              <button type="submit" class="main" aria-label="Send" title="Send (Enter)" disabled={!draft.trim()}>
                <Send />
              </button>
            )}
          </div>
        </div>
        <p class="hint keys">Enter sends, Shift+Enter begins a line, Escape stops.</p>
      </form>
    </>
  );
}

/** The names of the server's models, and why there are none. */
function useModels() {
  const [state, setState] = useState([[], null]);
  useEffect(() => {
    models().then(
      (names) => setState([names, null]),
      (error) => setState([[], error.message]),
    );
  }, []);
  return state;
}

/** Stores the turns when an answer has ended, and when the page goes. */
function useKept(turns, running) {
  const newest = useRef(turns);
  newest.current = turns;
  useEffect(() => {
    if (!running) store("turns", turns);
  }, [turns, running]);
  useEffect(() => {
    const keep = () => store("turns", newest.current);
    addEventListener("pagehide", keep);
    return () => removeEventListener("pagehide", keep);
  }, []);
}

/** Stays at the end while text comes, unless the reader has scrolled up. A new turn goes to the end. */
function Scroller({ follow, children }) {
  const box = useRef(null);
  const atEnd = useRef(true);
  useLayoutEffect(() => {
    atEnd.current = true;
  }, [follow]);
  useLayoutEffect(() => {
    if (atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  });
  const onScroll = ({ currentTarget: { scrollHeight, scrollTop, clientHeight } }) => {
    atEnd.current = scrollHeight - scrollTop - clientHeight < NEAR_THE_END;
  };
  return (
    <div class="scroller" ref={box} onScroll={onScroll} tabIndex={0} role="region" aria-label="Conversation">
      <div class="turns">{children}</div>
    </div>
  );
}

function Welcome({ model, former, restore, ask }) {
  return (
    <div class="welcome">
      <Stone />
      <h2>{model ?? "kvern"}</h2>
      <p>Ask it something. The conversation stays in this browser.</p>
      <div class="examples">
        {EXAMPLES.map((text) => (
          <button key={text} type="button" onClick={() => ask(text)}>
            {text}
          </button>
        ))}
      </div>
      {former.length > 0 && (
        <button type="button" class="quiet" onClick={restore}>
          Back to the last conversation
        </button>
      )}
    </div>
  );
}

function Turn({ turn, again, edit }) {
  const running = turn.state === "running";
  return (
    <article class="turn">
      <h3 class="unseen">You</h3>
      <div class="question">{turn.question}</div>
      <h3 class="unseen">{turn.model ?? "Answer"}</h3>
      <div class="answer" aria-busy={running}>
        {running && !turn.answer && <span class="waiting">…</span>}
        <Markdown text={turn.answer} />
        {turn.error && (
          <p class="failure" role="alert">
            {turn.error}
          </p>
        )}
      </div>
      {!running && (
        <footer>
          <Figures turn={turn} />
          <span class="actions">
            {turn.answer && <CopyButton text={turn.answer} />}
            {edit && <IconButton label="Edit the question" icon={<Edit />} onClick={edit} />}
            {again && <IconButton label="Answer again" icon={<Again />} onClick={again} />}
          </span>
        </footer>
      )}
    </article>
  );
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

/** What a screen reader says: that an answer is on its way, and the whole of it at its end. */
function Announcement({ turn }) {
  const [text, setText] = useState("");
  const before = useRef(turn?.state);
  useEffect(() => {
    if (turn?.state === "running") setText("The answer is coming.");
    else if (before.current === "running") setText(turn?.answer ?? "");
    before.current = turn?.state;
  }, [turn?.state]);
  return (
    <div class="unseen" role="status" aria-live="polite">
      {text}
    </div>
  );
}

function Question({ field, draft, setDraft, send }) {
  useLayoutEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${field.current.scrollHeight}px`;
  }, [draft]);
  return (
    <textarea
      ref={field}
      rows={1}
      aria-label="Question"
      placeholder="Ask something"
      value={draft}
      onInput={(event) => setDraft(event.currentTarget.value)}
      onKeyDown={(event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        send();
      }}
    />
  );
}

function OptionsButton({ settings, setSettings }) {
  const count = ["system", ...NUMBERS.map(({ name }) => name)].filter((name) => settings[name]).length;
  return (
    <button
      type="button"
      class="quiet"
      aria-expanded={Boolean(settings.open)}
      aria-controls="options"
      onClick={() => setSettings({ ...settings, open: !settings.open })}
    >
      <Settings />
      <span>Settings{count > 0 && ` (${count})`}</span>
    </button>
  );
}

function Options({ settings, setSettings }) {
  const change = (name) => (event) => setSettings({ ...settings, [name]: event.currentTarget.value });
  return (
    <div id="options" class="options" hidden={!settings.open}>
      <label class="system">
        System prompt
        <textarea rows={2} placeholder="none" value={settings.system ?? ""} onInput={change("system")} />
      </label>
      {NUMBERS.map(({ name, label, ...limits }) => (
        <label key={name}>
          {label}
          <input type="number" placeholder="default" value={settings[name] ?? ""} onInput={change(name)} {...limits} />
        </label>
      ))}
    </div>
  );
}
