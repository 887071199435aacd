// One turn: what was asked, what the model thought, said and called, and the results that its calls wait for.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { answerAgain, askInstead, canGoOn, goOn, tellResults, useGrowing } from "./asking.js";
import { Markdown } from "./content.jsx";
import { modelName, number, seconds } from "./format.js";
import { Again, Close, Edit, File, Former, GoOn, Later } from "./icons.jsx";
import { showBranch } from "./library.js";
import { CopyButton, IconButton, fit, onEnter } from "./parts.jsx";
import { dataOf, pixels } from "./pictures.js";
import { memo } from "./state.js";

/** `questions` and `answers` are the versions of the turn, itself among them; `isLast` of the branch. */
export const Turn = memo(function Turn({ turn: stored, questions, answers, isLast }) {
  const turn = useGrowing(stored);
  return (
    <article class="turn">
      {turn.results?.map((result) => <Result key={result.id} {...result} />)}
      {turn.question != null && <Question turn={turn} questions={questions} />}
      <h2 class="unseen">{modelName(turn.model) || "Answer"}</h2>
      <Answer turn={turn} />
      {isLast && turn.state !== "running" && turn.calls?.length > 0 && !turn.error && <Results turn={turn} />}
      {turn.state !== "running" && (
        <footer>
          <Figures turn={turn} />
          <span class="actions">
            <Versions turn={turn} versions={answers} what="answer" />
            {turn.answer && <CopyButton text={turn.answer} label="Copy the answer" />}
            {isLast && canGoOn(turn) && <IconButton label="Go on" icon={<GoOn />} onClick={() => goOn(turn)} />}
            <IconButton label="Answer again" icon={<Again />} onClick={() => answerAgain(turn)} />
          </span>
        </footer>
      )}
    </article>
  );
});

const LONG = 1000; // characters of a question, which may then have to be scrolled

function Question({ turn, questions }) {
  const [editing, setEditing] = useState(false);
  const button = useRef(null);
  const was = useRef(false);
  useEffect(() => {
    if (was.current && !editing) button.current?.focus();
    was.current = editing;
  }, [editing]);
  return (
    <>
      <h2 class="unseen">You</h2>
      {editing ? (
        <QuestionForm turn={turn} close={() => setEditing(false)} />
      ) : (
        <>
          <Files files={turn.files} />
          {turn.question && (
            <div class="question" dir="auto" tabIndex={turn.question.length > LONG ? 0 : undefined}>
              {turn.question}
            </div>
          )}
          <div class="actions of-question">
            <IconButton ref={button} label="Edit the question" icon={<Edit />} onClick={() => setEditing(true)} />
            {turn.question && <CopyButton text={turn.question} label="Copy the question" />}
            <Versions turn={turn} versions={questions} what="question" />
          </div>
        </>
      )}
    </>
  );
}

/** The files that were sent with a question. Each opens to show its text, or its picture in full. */
export function Files({ files, remove = null }) {
  if (!files?.length) return null;
  return (
    <ul class="files" aria-label="Files">
      {files.map((file, index) => (
        <li key={file.picture ?? index}>
          {file.picture ? <Picture file={file} /> : <Text file={file} />}
          {remove && <IconButton label={`Take ${file.name} away`} icon={<Close />} onClick={() => remove(index)} />}
        </li>
      ))}
    </ul>
  );
}

function Text({ file }) {
  return (
    <details>
      <summary title={`Show ${file.name}`}>
        <File />
        <span class="name">{file.name}</span>
        <span class="size">{size(file.text.length)}</span>
      </summary>
      <pre tabIndex={0}>{file.text}</pre>
    </details>
  );
}

/** A thumbnail that opens to the picture, as the model sees it. */
function Picture({ file }) {
  const [data, setData] = useState(null);
  useEffect(() => {
    dataOf(file).then(setData, () => setData(""));
  }, [file.picture]);
  const said = file.from ? `${file.from}, sent as a JPEG of ${pixels(file)}` : pixels(file);
  return (
    <details class="picture">
      <summary title={`Show ${file.name} larger or smaller`}>
        {data === "" ? (
          <span class="failure">{file.name} is not in this browser any more.</span>
        ) : (
          <img src={data ?? undefined} alt={`${file.name}, ${said} pixels`} width={file.width} height={file.height} />
        )}
        {(file.from || null) && <span class="size">{said}</span>}
      </summary>
    </details>
  );
}

const size = (characters) => `${characters.toLocaleString("en")} characters`;

/** The question, edited: what it becomes stands beside what it was. */
function QuestionForm({ turn, close }) {
  const [text, setText] = useState(turn.question);
  const [files, setFiles] = useState(turn.files ?? []);
  const field = useRef(null);
  useLayoutEffect(() => fit(field.current), [text]);
  useLayoutEffect(() => {
    field.current.focus();
    field.current.setSelectionRange(text.length, text.length);
  }, []);
  const send = () => {
    const question = field.current.value.trim(); // Enter may come before the last letter is drawn
    if (!question && !files.length) return;
    close();
    askInstead(turn, question, files);
  };
  const onKeyDown = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close();
  };
  return (
    <form
      class="edited"
      onKeyDown={onKeyDown}
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      <Files files={files} remove={(index) => setFiles(files.toSpliced(index, 1))} />
      <textarea
        ref={field}
        rows={1}
        aria-label="The question, edited"
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={onEnter(send)}
      />
      <div>
        <span class="hint">The answers to the former question stay.</span>
        <button type="button" class="plain" onClick={close}>
          Cancel
        </button>
        <button type="submit" class="filled">
          Send
        </button>
      </div>
    </form>
  );
}

/** Which of several versions is shown, and the way to the others. */
function Versions({ turn, versions, what }) {
  if (versions.length < 2) return null;
  const here = versions.findIndex(({ id }) => id === turn.id);
  const button = (label, icon, at) => (
    <IconButton
      label={`${label} ${what}`}
      icon={icon}
      aria-disabled={!versions[at]} // it keeps the focus
      onClick={() => versions[at] && showBranch(versions[at])}
    />
  );
  return (
    <span class="versions" role="group" aria-label={`Versions of the ${what}`}>
      {button("Former", <Former />, here - 1)}
      <span>
        {here + 1}/{versions.length}
      </span>
      {button("Later", <Later />, here + 1)}
    </span>
  );
}

function Answer({ turn }) {
  const running = turn.state === "running";
  const calls = turn.calls ?? [];
  const nothing = !turn.answer && !turn.thinking && calls.length === 0;
  return (
    <div class="answer" aria-busy={running}>
      {turn.thinking && <Thinking text={turn.thinking} going={running && !turn.answer && calls.length === 0} />}
      {running && nothing && <span class="waiting">…</span>}
      {turn.structured ? <Structured text={turn.answer} /> : <Markdown text={turn.answer} />}
      {calls.map((call) => (
        <Call key={call.id} call={call} />
      ))}
      {running && turn.elsewhere && <p class="hint">This answer comes in another tab.</p>}
      {turn.lacks && <p class="hint">{turn.lacks}</p>}
      {turn.error && (
        <p class="failure" role="alert">
          {turn.error} {canGoOn(turn) && "“Go on”, below, goes on with it."}
        </p>
      )}
    </div>
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
      <pre tabIndex={0}>
        <code>{pretty(call.arguments)}</code>
      </pre>
    </div>
  );
}

function Result({ name, result }) {
  return (
    <div class="call">
      <div class="bar">
        result of <b>{name}</b>
      </div>
      <pre tabIndex={0}>
        <code>{result}</code>
      </pre>
    </div>
  );
}

/** The page runs no tools: whoever reads it says what they return. */
function Results({ turn }) {
  const [results, setResults] = useState({});
  const send = (event) => {
    event.preventDefault();
    tellResults(
      turn,
      turn.calls.map(({ id, name }) => ({ id, name, result: results[id] ?? "" })),
    );
  };
  return (
    <form class="results" onSubmit={send}>
      {turn.calls.map((call) => (
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
      <button type="submit" class="plain">
        Send the results
      </button>
    </form>
  );
}

function Structured({ text }) {
  return text ? (
    <div class="call">
      <pre tabIndex={0}>
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

const ENDS = { stopped: "stopped", failed: "failed" };

function Figures({ turn }) {
  const { first, rate, tokens, thought, prompt, cached } = turn.figures ?? {};
  const parts = [
    ENDS[turn.state] ?? (turn.finish === "length" && "ended at the limit of tokens"),
    first != null && `first token ${seconds(first)}`,
    rate != null && `${number(rate)} tokens/s`,
    tokens != null && `${tokens} tokens${thought ? `, ${thought} thought` : ""}`,
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
