// The chat: turns of a question and its answer, and the box that asks the next one.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { body, stream } from "./answer.js";
import { load, store, useStored } from "./browser.js";
import { New, Send, Stone, Stop } from "./icons.jsx";
import { models } from "./server.js";
import { ModelChoice, Options, OptionsButton } from "./settings.jsx";
import { Turn } from "./turn.jsx";

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
  const model = (offered.find(({ id }) => id === settings.model) ?? offered[0])?.id;
  useKept(turns, running);

  const focus = () => matchMedia("(pointer: fine)").matches && field.current.focus(); // no keyboard over a phone's page
  const ask = async (question, earlier) => {
    const turn = { id: Date.now(), question, answer: "", state: "running", model, structured: Boolean(settings.schema?.trim()) };
    const change = (fields) => setTurns((all) => all.map((one) => (one.id === turn.id ? { ...one, ...fields } : one)));
    request.current = new AbortController();
    setTurns([...earlier, turn]);
    focus();
    try {
      change(await stream(body(earlier, question, settings, model), request.current.signal, change));
    } catch (error) {
      change({ state: "failed", error: error.message }); // the settings cannot be sent
    }
  };
  /** The answer goes on after the results of its calls. */
  const answerCalls = (calls) => ask(null, [...turns.slice(0, -1), { ...last, calls }]);
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
            answerCalls={index === turns.length - 1 ? answerCalls : null}
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
            <ModelChoice offered={offered} model={model} choose={(name) => setSettings({ ...settings, model: name })} />
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

/** The server's models and adapters, and why there are none. */
function useModels() {
  const [state, setState] = useState([[], null]);
  useEffect(() => {
    models().then(
      (found) => setState([found, null]),
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
