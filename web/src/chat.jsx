// The chat: the list of conversations, the branch of the open one that is shown, and the box that asks.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { ask, isRunning, stop, useGrowing } from "./asking.js";
import { Composer } from "./composer.jsx";
import { modelName } from "./format.js";
import { Close, Down, Stone } from "./icons.jsx";
import { layout, leaveList, showList } from "./layout.js";
import { go, library, notify } from "./library.js";
import { IconButton } from "./parts.jsx";
import { modelInUse, settings } from "./settings.js";
import { server } from "./server.js";
import { Sidebar } from "./sidebar.jsx";
import { branch, places, versions } from "./tree.js";
import { Turn } from "./turn.jsx";

const EXAMPLES = ["What is paged attention?", "Tell me a story about a fox.", "What is 17 + 25?"];
const NEAR_THE_END = 60; // pixels

export function Chat({ shown, setShortcuts }) {
  const { open, turns, leaf, list, notice, shown: times, switched } = library.use();
  const { narrow, list: isListed } = layout.use();
  const covered = narrow && isListed;
  const [field, search] = [useRef(null), useRef(null)];
  const shownTurns = useMemo(() => branch(turns, leaf), [turns, leaf]);
  const all = useMemo(() => places(turns), [turns]);
  const last = shownTurns.at(-1);
  const focus = () => matchMedia("(pointer: fine)").matches && field.current.focus(); // no keyboard over a phone's page
  const begin = () => {
    go(null);
    leaveList();
    focus();
  };
  useTitle(list.find(({ id }) => id === open)?.title);
  useEffect(() => {
    if (shown && !covered) focus();
  }, [open]);
  useKeys(shown, {
    begin,
    stop: () => (covered ? leaveList() : isRunning(last) && stop(last)),
    search: () => {
      showList(true);
      setTimeout(() => search.current.focus());
    },
    focus: () => field.current.focus(),
    setShortcuts,
  });
  return (
    <div class={`views ${isListed ? "with-list" : ""}`}>
      {isListed && <Sidebar field={search} begin={begin} opened={leaveList} />}
      {isListed && <div class="shade" onClick={leaveList} />}
      <div class="talk" inert={covered}>
        <Scroller follow={times} stay={switched}>
          {shownTurns.length === 0 && <Welcome />}
          {shownTurns.map((turn, index) => (
            <Turn key={`${open} ${index}`} turn={turn} {...versions(all, turn)} isLast={turn === last} />
          ))}
        </Scroller>
        {last && <Announcement key={open} turn={last} />}
        <div class="notices" role="status">
          {notice && <Notice {...notice} />}
        </div>
        <Composer turns={shownTurns} field={field} />
      </div>
    </div>
  );
}

function useTitle(title) {
  useEffect(() => {
    document.title = title ? `${title} – kvern` : "kvern";
  }, [title]);
}

function useKeys(shown, keys) {
  const newest = useRef(keys);
  newest.current = keys;
  useEffect(() => {
    if (!shown) return undefined;
    const onKeyDown = (event) => {
      const control = event.ctrlKey || event.metaKey;
      const key = event.key.toLowerCase();
      const { begin, stop: end, search, focus, setShortcuts } = newest.current;
      const run =
        (event.key === "Escape" && !document.querySelector("dialog[open]") && (event.shiftKey ? focus : end)) ||
        (control && event.shiftKey && key === "o" && begin) ||
        (control && !event.shiftKey && key === "k" && search) ||
        (control && key === "/" && (() => setShortcuts(true)));
      if (!run) return;
      event.preventDefault();
      run();
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, [shown]);
}

/**
 * Stays at the end while text comes, unless the reader has scrolled up. Goes to the end whenever `follow` changes, and is left
 * where it is when `stay` does.
 */
function Scroller({ follow, stay, children }) {
  const [box, inside] = [useRef(null), useRef(null)];
  const atEnd = useRef(true);
  const [away, setAway] = useState(false);
  const toEnd = () => (box.current.scrollTop = box.current.scrollHeight);
  useLayoutEffect(() => {
    atEnd.current = false;
  }, [stay]);
  useLayoutEffect(() => {
    atEnd.current = true;
    toEnd();
  }, [follow]);
  useEffect(() => {
    const sizes = new ResizeObserver(() => atEnd.current && toEnd());
    sizes.observe(inside.current);
    sizes.observe(box.current);
    return () => sizes.disconnect();
  }, []);
  const onScroll = ({ currentTarget: { scrollHeight, scrollTop, clientHeight } }) => {
    atEnd.current = scrollHeight - scrollTop - clientHeight < NEAR_THE_END;
    setAway(scrollHeight - scrollTop - clientHeight > clientHeight);
  };
  return (
    <div class="scrolling">
      <div class="scroller" ref={box} onScroll={onScroll} tabIndex={0} role="region" aria-label="Conversation">
        <div class="turns" ref={inside}>
          {children}
        </div>
      </div>
      {away && (
        <button type="button" class="to-end" aria-label="To the end" title="To the end" onClick={toEnd}>
          <Down />
        </button>
      )}
    </div>
  );
}

function Welcome() {
  server.use();
  settings.use();
  return (
    <div class="welcome">
      <Stone />
      <h2>{modelName(modelInUse()?.id) ?? "kvern"}</h2>
      <p>Ask it something. Conversations stay in this browser.</p>
      <div class="examples">
        {EXAMPLES.map((text) => (
          <button key={text} type="button" onClick={() => ask(text)}>
            {text}
          </button>
        ))}
      </div>
    </div>
  );
}

const SHOWN = 20_000; // milliseconds that a notice stays

function Notice({ text, action, id }) {
  useEffect(() => {
    const timer = setTimeout(() => notify(null), SHOWN);
    return () => clearTimeout(timer);
  }, [id]);
  return (
    <div class="notice">
      <span>{text}</span>
      {action && (
        <button type="button" class="plain" onClick={action.run}>
          {action.label}
        </button>
      )}
      <IconButton label="Close the notice" icon={<Close />} onClick={() => notify(null)} />
    </div>
  );
}

/** What a screen reader says: that an answer is on its way, and the whole of it at its end. */
function Announcement({ turn: stored }) {
  const turn = useGrowing(stored);
  const [text, setText] = useState("");
  const before = useRef(turn.state);
  useEffect(() => {
    if (turn.state === "running") setText("The answer is coming.");
    else if (before.current === "running") setText(turn.answer);
    before.current = turn.state;
  }, [turn.state]);
  return (
    <div class="unseen" role="status" aria-live="polite">
      {text}
    </div>
  );
}
