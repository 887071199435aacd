// The box that asks: question, files, model and settings.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { body } from "./answer.js";
import { ask, isRunning, stop } from "./asking.js";
import { load, store } from "./browser.js";
import { readFiles } from "./files.js";
import { Attach, Picture, Send, Settings, Stop } from "./icons.jsx";
import { library } from "./library.js";
import { ModelChoice, Options } from "./options.jsx";
import { IconButton, fit, onEnter } from "./parts.jsx";
import { FORMATS } from "./pictures.js";
import { countTokens, server } from "./server.js";
import { countSet, modelInUse, sees, settings } from "./settings.js";
import { Files } from "./turn.jsx";

const LONG = 2000; // characters of a draft, from which its tokens are counted before it is sent
const MOST_SENT = 4 * 1024 * 1024; // characters of pictures, beyond which the request itself tells whether it fits
const PAUSE = 400; // milliseconds without a change before they are

export function Composer({ turns, field }) {
  const { failure } = server.use();
  const [draft, setDraft] = useState(() => load("draft", "sessionStorage") ?? "");
  const [files, setFiles] = useState([]);
  const [refused, setRefused] = useState("");
  const last = turns.at(-1);
  const running = isRunning(last);
  const [counted, count] = useCount(turns, draft, files);
  const most = modelInUse()?.max_model_len;
  const overflow = counted != null && counted >= most;
  useLayoutEffect(() => fit(field.current), [draft]);
  useLayoutEffect(() => store("draft", draft, "sessionStorage"), [draft]);

  const [reading, sending] = [useRef(Promise.resolve()), useRef(false)];
  const newest = useRef(files);
  newest.current = files;
  const attach = (chosen) => {
    const read = async () => {
      const found = await readFiles(chosen, newest.current, turns.flatMap((turn) => turn.files ?? []));
      newest.current = found.files;
      setFiles(found.files);
      setRefused(found.refused);
    };
    reading.current = reading.current.then(read);
  };
  const send = async () => {
    if (sending.current) return;
    sending.current = true;
    await reading.current.then(sendRead).finally(() => (sending.current = false));
  };
  const sendRead = async () => {
    const question = field.current.value.trim(); // Enter may come before the last letter is drawn
    if (running || overflow || !(question || newest.current.length)) return;
    if (counted == null && (await count()) >= most) return;
    ask(question, newest.current);
    setDraft("");
    setFiles([]);
    setRefused("");
  };
  const onPaste = (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach([...event.clipboardData.files]);
  };
  const dropped = useDropping(attach);

  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      {failure && (
        <p class="failure" role="alert">
          {failure}
        </p>
      )}
      {refused && (
        <p class="failure" role="alert">
          {refused}
        </p>
      )}
      {overflow && (
        <p class="failure" role="alert">
          With this question the conversation has {counted.toLocaleString("en")} tokens, and the model's context holds{" "}
          {most.toLocaleString("en")}: take a file away, shorten the question, or begin a new conversation.
        </p>
      )}
      <div class={`box ${dropped ? "dropped" : ""}`}>
        <Options />
        <Files files={files} remove={(index) => setFiles(files.toSpliced(index, 1))} />
        <textarea
          ref={field}
          rows={1}
          dir="auto"
          aria-label="Question"
          placeholder="Ask something"
          value={draft}
          onInput={(event) => setDraft(event.currentTarget.value)}
          onKeyDown={onEnter(send)}
          onPaste={onPaste}
        />
        <div class="row">
          <ModelChoice />
          <OptionsButton />
          <AttachButton attach={attach} label="Attach text files" name="Text files" icon={<Attach />} />
          {sees() && <AttachButton attach={attach} label="Attach pictures" name="Pictures" icon={<Picture />} accept={FORMATS.join()} />}
          {running ? (
            <button type="button" class="main" aria-label="Stop" title="Stop (Escape)" onClick={() => stop(last)}>
              <Stop />
            </button>
          ) : (
            <button type="submit" class="main" aria-label="Send" title="Send (Enter)" disabled={overflow || !(draft.trim() || files.length)}>
              <Send />
            </button>
          )}
        </div>
      </div>
      <div class="below">
        <Context turns={turns} counted={counted} />
        <p class="hint keys">
          <kbd>Enter</kbd> sends, <kbd>Shift</kbd>+<kbd>Enter</kbd> begins a line, <kbd>Escape</kbd> stops
        </p>
      </div>
    </form>
  );
}

/**
 * The tokens that the next request would have, counted by the server where files or a long draft make that worth it, and a
 * function that counts them at once. Both give null where nothing is counted.
 */
function useCount(turns, draft, files) {
  const [counted, setCounted] = useState(null);
  const count = async (signal) => {
    const sent = [...turns, { files }].flatMap((turn) => turn.files ?? []).reduce((sum, { characters = 0 }) => sum + characters, 0);
    if ((files.length === 0 && draft.length <= LONG) || sent > MOST_SENT) return null;
    try {
      const asked = { question: draft.trim(), files, model: modelInUse()?.id };
      const found = await countTokens(await body(turns, asked), signal);
      setCounted(found);
      return found;
    } catch {
      return null; // the request itself tells what is wrong
    }
  };
  useEffect(() => {
    setCounted(null);
    const leaving = new AbortController();
    const timer = setTimeout(() => count(leaving.signal), PAUSE);
    return () => {
      clearTimeout(timer);
      leaving.abort();
    };
  }, [draft, files, turns.at(-1)?.id]);
  return [counted, () => count()];
}

/** Whether something is dragged over the page, where it may be dropped. */
function useDropping(attach) {
  const [over, setOver] = useState(false);
  const newest = useRef(attach);
  newest.current = attach;
  useEffect(() => {
    const leaving = new AbortController();
    const on = (name, run) => addEventListener(name, run, { signal: leaving.signal });
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    on("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setOver(true);
    });
    on("dragleave", (event) => event.relatedTarget === null && setOver(false));
    on("drop", (event) => {
      setOver(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      newest.current([...event.dataTransfer.files]);
    });
    return () => leaving.abort();
  }, []);
  return over;
}

function AttachButton({ attach, label, name, icon, accept }) {
  const input = useRef(null);
  return (
    <>
      <IconButton label={label} icon={icon} onClick={() => input.current.click()} />
      <input
        ref={input}
        type="file"
        multiple
        hidden
        accept={accept}
        aria-label={name}
        onChange={({ currentTarget }) => {
          attach([...currentTarget.files]);
          currentTarget.value = "";
        }}
      />
    </>
  );
}

function OptionsButton() {
  const values = settings.use();
  const count = countSet(values);
  return (
    <button
      type="button"
      class="quiet"
      aria-label={count ? `Settings, ${count} set` : "Settings"}
      aria-expanded={Boolean(values.open)}
      aria-controls="options"
      onClick={() => settings.change({ open: !values.open })}
    >
      <Settings />
      <span>Settings</span>
      {count > 0 && <b>{count}</b>}
    </button>
  );
}

/** How much of the model's context the conversation takes, as the last answer's usage says, or with what is to be sent. */
function Context({ turns, counted }) {
  const figures = turns.findLast((turn) => turn.figures?.prompt != null)?.figures;
  const most = modelInUse()?.max_model_len;
  const used = counted ?? (figures && figures.prompt + (figures.tokens ?? 0));
  if (!most || used == null) return <span />;
  const share = used / most;
  const words = `${used.toLocaleString("en")} of ${most.toLocaleString("en")} tokens of context`;
  return (
    <p class={`hint context ${share > 0.9 ? "near" : ""}`} title={`${words} (${Math.round(100 * share)} %)`}>
      <meter min={0} max={most} value={Math.min(used, most)} high={0.9 * most} aria-label={words} />
      {words}
    </p>
  );
}
