// What a model wrote, in blocks: while an answer grows, only its last blocks are drawn again.
import { useLayoutEffect, useRef } from "preact/hooks";
import { copy } from "./browser.js";
import { blocksOf, html } from "./markdown.js";
import { setFormulas } from "./math.js";
import { memo } from "./state.js";

export function Markdown({ text }) {
  const before = useRef(null);
  before.current = blocksOf(text, before.current);
  return (
    <div class="markdown" onClick={onClick}>
      {before.current.blocks.map(({ raw, definitions, highest }, index) => (
        <Block key={index} raw={raw} definitions={definitions} highest={highest} />
      ))}
    </div>
  );
}

const Block = memo(function Block(block) {
  const element = useRef(null);
  const content = html(block);
  useLayoutEffect(() => setFormulas(element.current), [content]);
  return <div ref={element} dir="auto" dangerouslySetInnerHTML={{ __html: content }} />;
});

async function onClick({ target }) {
  if (target.tagName !== "BUTTON") return;
  const done = await copy(target.closest(".code").querySelector("code").textContent);
  target.textContent = done ? "Copied" : "Select it and copy: the browser refuses";
  setTimeout(() => (target.textContent = "Copy"), 1500);
}
