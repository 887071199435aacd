// Markdown of a model, which nobody has checked, to HTML that may be shown: its HTML is shown as text, images are links,
// nothing is loaded, and a link says where it leads.
import DOMPurify from "dompurify";
import { Marked } from "marked";
import { highlighted } from "./highlight.js";
import { extensions } from "./math.js";

const TAGS =
  "a blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul";
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escape = (text) => text.replace(/[&<>"]/g, (character) => ENTITIES[character]);

const BELOW = 2; // levels of the page's own headings, under which those of an answer stand
let top = 1; // the depth of the highest heading of the answer that is drawn

/** A link, with the host that it leads to unless its text is the address itself. */
function link(href, content, plain) {
  const address = URL.canParse(href) ? new URL(href) : null;
  if (!["http:", "https:", "mailto:"].includes(address?.protocol)) return content; // it leads nowhere
  const host = address.host || address.pathname;
  const said = [href, href.replace(/^(https?:\/\/|mailto:)/, ""), host].includes(plain) ? "" : `<span class="host">${escape(host)}</span>`;
  return `<a href="${escape(href)}" title="${escape(href)}">${content}</a>${said}`;
}

const marked = new Marked({
  breaks: true,
  renderer: {
    html: ({ text }) => (/^<br\s*\/?>$/i.test(text.trim()) ? "<br>" : escape(text)),
    link({ href, tokens, text }) {
      return link(href, this.parser.parseInline(tokens), text);
    },
    image: ({ href, text }) => link(href, `Image: ${escape(text || href)}`, null),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) {
      const level = Math.min(6, BELOW + 1 + Math.max(0, depth - top));
      return `<h${level} class="heading-${depth}">${this.parser.parseInline(tokens)}</h${level}>`;
    },
    code({ text, lang }) {
      const language = lang?.split(/[\s{:]/)[0].toLowerCase() ?? "";
      return (
        `<div class="code"><div class="bar"><span>${escape(language)}</span>` +
        `<button type="button" class="quiet">Copy</button></div>` +
        `<pre tabindex="0"><code>${highlighted(text, language) ?? escape(text)}\n</code></pre></div>`
      );
    },
  },
});
marked.use({ extensions: extensions(escape) });

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

const clean = (content) =>
  DOMPurify.sanitize(content, {
    ALLOWED_TAGS: TAGS.split(" "),
    ALLOWED_ATTR: ["align", "class", "href", "start", "tabindex", "title", "type"],
    ADD_URI_SAFE_ATTR: ["align", "start", "tabindex", "type"], // their values are no addresses
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  });

/** Tables scroll inside a box of their own; the text of an answer cannot hold these tags, as it is escaped. */
const boxed = (content) =>
  content.replaceAll("<table>", '<div class="table" tabindex="0"><table>').replaceAll("</table>", "</table></div>");

/** The HTML of a block of `blocksOf`. */
export function html({ raw, definitions, highest }) {
  top = highest;
  return clean(boxed(marked.parser(marked.lexer(`${definitions}${raw}`))));
}

const followed = (block, space) => ({ ...block, raw: block.raw + space });
const NAMES_LINK = /\[[^\]]+\]/;

/**
 * The top-level blocks of a text: their `raw` text, the `definitions` of links that they may name, and the `highest` depth of
 * all headings. Of a text that only grew since `before` (what was returned for it then) finished blocks are taken as they
 * are: the last two may still change.
 */
export function blocksOf(whole, before) {
  const text = whole.replace(/\r\n?/g, "\n");
  const grown = before && text.startsWith(before.text);
  const blocks = grown ? before.blocks.slice(0, -2) : [];
  const from = blocks.reduce((length, block) => length + block.raw.length, 0);
  for (const { type, raw, depth } of marked.lexer(text.slice(from))) {
    if (type === "space" && blocks.length) blocks.push(followed(blocks.pop(), raw));
    else blocks.push({ raw, defines: type === "def", depth: type === "heading" ? depth : null });
  }
  const definitions = blocks.filter(({ defines }) => defines).map(({ raw }) => `${raw.trim()}\n`);
  const highest = Math.min(6, ...blocks.map(({ depth }) => depth ?? 6));
  return {
    text,
    blocks: blocks.map((block) => ({
      ...block,
      definitions: NAMES_LINK.test(block.raw) ? definitions.join("") : "",
      highest: block.depth ? highest : 1,
    })),
  };
}
