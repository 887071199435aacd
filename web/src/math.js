// LaTeX as MathML, which browsers set themselves: no fonts are loaded.
import temml from "temml";

const OPTIONS = { throwOnError: true, trust: false, maxSize: [40, 20], maxExpand: 500 };

const found = (text, display) => `<span class="math ${display ? "display" : "inline"}">${text}</span>`;

/** What Marked reads as formulas: $$...$$ and \[...\], $...$ and \(...\). A price is none: "$5 and $6". */
export const extensions = (escape) => [
  {
    name: "formula",
    level: "block",
    start: (source) => source.match(/\$\$|\\\[/)?.index,
    tokenizer(source) {
      const match = /^ {0,3}(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\])[^\S\n]*(?:\n|$)/.exec(source);
      return match && !/\n\s*\n/.test(match[0].trim()) ? { type: "formula", raw: match[0], text: match[1] ?? match[2] } : undefined;
    },
    renderer: ({ text }) => `<p>${found(escape(text), true)}</p>`,
  },
  {
    name: "term",
    level: "inline",
    start: (source) => source.match(/\$|\\[([]/)?.index,
    tokenizer(source) {
      const match =
        /^\$\$([^$\n][^]*?)\$\$/.exec(source) ??
        /^\\\[([^]+?)\\\]/.exec(source) ??
        /^\\\(([^]+?)\\\)/.exec(source) ??
        /^\$(?![\s$])((?:\\[^\n]|[^\\$\n])*?[^\\$\s]|[^\\$\s])\$(?![\d$])/.exec(source);
      return match ? { type: "term", raw: match[0], text: match[1], display: /^(\$\$|\\\[)/.test(match[0]) } : undefined;
    },
    renderer: ({ text, display }) => found(escape(text), display),
  },
];

/** Sets the formulas below an element. One that is not understood stays as it was written. */
export function setFormulas(element) {
  for (const place of element.querySelectorAll(".math")) {
    const source = place.textContent;
    try {
      temml.render(source, place, { ...OPTIONS, displayMode: place.classList.contains("display") });
    } catch {
      place.textContent = source;
      place.classList.add("source");
    }
  }
}
