// Markdown to HTML that may be shown. HTML inside the text is shown as text, and images as links: nothing is loaded.
import DOMPurify from "dompurify";
import { Marked } from "marked";

const TAGS =
  "a blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul";
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escape = (text) => text.replace(/[&<>"]/g, (character) => ENTITIES[character]);

const marked = new Marked({
  breaks: true,
  renderer: {
    html: ({ text }) => (/^<br\s*\/?>$/i.test(text) ? "<br>" : escape(text)),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code: ({ text, lang }) =>
      `<div class="code"><div class="bar"><span>${escape(lang?.split(/\s/)[0] ?? "")}</span>` +
      `<button type="button" class="quiet">Copy</button></div><pre><code>${escape(text)}\n</code></pre></div>`,
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

export const html = (text) =>
  DOMPurify.sanitize(marked.parse(text), {
    ALLOWED_TAGS: TAGS.split(" "),
    ALLOWED_ATTR: ["align", "class", "href", "start", "title", "type"],
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  });
