// The conversations: the list with its search, and what is done with one or with all.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { stopAll } from "./asking.js";
import { Edit, Export, Import, New, Remove } from "./icons.jsx";
import { address, exportAll, go, importFrom, library, remove, removeAll, rename, search } from "./library.js";
import { IconButton } from "./parts.jsx";
import { memo } from "./state.js";

const DAY = 24 * 60 * 60 * 1000;
const PAUSE = 150; // milliseconds without a key before a search begins

export function Sidebar({ field, begin, opened }) {
  const { list, open, ready } = library.use();
  const [words, setWords] = useState("");
  const found = useSearch(words, list);
  const shown = found ? list.filter(({ id }) => found.has(id)) : list;
  const choose = (id) => {
    go(id);
    opened();
  };
  return (
    <nav class="sidebar" id="conversations" aria-label="Conversations">
      <button type="button" class="new" onClick={begin} title="New conversation (Ctrl+Shift+O)">
        <New />
        New conversation
      </button>
      <input
        ref={field}
        type="search"
        aria-label="Search in conversations"
        placeholder="Search"
        title="Search (Ctrl+K)"
        value={words}
        onInput={(event) => setWords(event.currentTarget.value)}
        onKeyDown={(event) => event.key === "Escape" && words && (event.stopPropagation(), setWords(""))}
      />
      <div class="list">
        {groups(shown).map(([name, some]) => (
          <section key={name}>
            <h2>{name}</h2>
            <ul>
              {some.map(({ id, title }) => (
                <Entry key={id} id={id} title={title} isOpen={id === open} choose={choose} extract={found?.get(id) ?? ""} />
              ))}
            </ul>
          </section>
        ))}
        {ready && shown.length === 0 && <p class="hint">{found ? "No conversation has these words." : "Conversations that you begin are listed here."}</p>}
      </div>
      <Whole empty={list.length === 0} />
    </nav>
  );
}

/** What a search has found, or null without one. */
function useSearch(words, list) {
  const [found, setFound] = useState(null);
  const newest = useRef("");
  newest.current = words.trim();
  useEffect(() => {
    if (!newest.current) {
      setFound(null);
      return undefined;
    }
    const timer = setTimeout(async () => {
      const asked = newest.current;
      const result = await search(asked);
      if (asked === newest.current) setFound(result);
    }, PAUSE);
    return () => clearTimeout(timer);
  }, [words, list]);
  return newest.current ? found : null;
}

/** Conversations by their age, as pairs of a name and those of it. */
function groups(list) {
  const today = new Date().setHours(0, 0, 0, 0);
  const name = ({ changed }) => {
    if (changed >= today) return "Today";
    if (changed >= today - DAY) return "Yesterday";
    if (changed >= today - 7 * DAY) return "The last seven days";
    return new Date(changed).toLocaleDateString("en", { month: "long", year: "numeric" });
  };
  const found = new Map();
  for (const one of list) found.set(name(one), [...(found.get(name(one)) ?? []), one]);
  return [...found];
}

const Entry = memo(function Entry({ id, title, isOpen, choose, extract }) {
  const [renaming, setRenaming] = useState(false);
  const link = useRef(null);
  const end = (text) => {
    setRenaming(false);
    if (text !== null && text !== title) rename(id, text);
    setTimeout(() => link.current?.focus());
  };
  if (renaming) return <Renaming title={title} end={end} />;
  return (
    <li class={isOpen ? "open" : ""}>
      <a
        ref={link}
        href={address(id)}
        aria-current={isOpen ? "page" : undefined}
        title={title}
        onClick={(event) => {
          if (event.ctrlKey || event.metaKey || event.shiftKey) return; // into a tab of its own
          event.preventDefault();
          choose(id);
        }}
      >
        <span dir="auto">{title}</span>
        {extract && <small dir="auto">{extract}</small>}
      </a>
      <IconButton label={`Rename ${title}`} icon={<Edit />} onClick={() => setRenaming(true)} />
      <IconButton
        label={`Delete ${title}`}
        icon={<Remove />}
        onClick={({ currentTarget }) => {
          const entry = currentTarget.closest("li");
          (entry.nextElementSibling ?? entry.previousElementSibling)?.querySelector("a")?.focus();
          remove(id);
          stopAll(id);
        }}
      />
    </li>
  );
});

function Renaming({ title, end }) {
  const field = useRef(null);
  const ended = useRef(false);
  const once = (text) => {
    if (ended.current) return;
    ended.current = true;
    end(text);
  };
  useLayoutEffect(() => field.current.select(), []);
  return (
    <li>
      <input
        ref={field}
        aria-label="Title"
        maxLength={200}
        value={title}
        onBlur={(event) => once(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter") once(event.currentTarget.value);
          if (event.key !== "Escape") return;
          event.stopPropagation();
          once(null);
        }}
      />
    </li>
  );
}

/** What is done with all conversations. */
function Whole({ empty }) {
  const input = useRef(null);
  return (
    <div class="whole">
      <button type="button" class="quiet" disabled={empty} onClick={exportAll}>
        <Export />
        Export
      </button>
      <button type="button" class="quiet" onClick={() => input.current.click()}>
        <Import />
        Import
      </button>
      <IconButton
        label="Delete all conversations"
        icon={<Remove />}
        disabled={empty}
        onClick={() => {
          removeAll();
          stopAll();
        }}
      />
      <input
        ref={input}
        type="file"
        accept=".json,application/json"
        hidden
        aria-label="File of conversations"
        onChange={({ currentTarget }) => {
          if (currentTarget.files[0]) importFrom(currentTarget.files[0]);
          currentTarget.value = "";
        }}
      />
    </div>
  );
}
