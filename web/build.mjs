// Bundles src/ into the three files that the server serves, with the licences of what is inside.
import { copyFile, readFile, writeFile } from "node:fs/promises";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const from = (name) => new URL(name, import.meta.url);
const target = from("../src/kvern/server/page/");
const LIMIT = 44 * 1024; // bytes

await build({
  entryPoints: { page: from("src/main.jsx").pathname },
  outdir: target.pathname,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsxFactory: "h",
  jsxFragment: "Fragment",
  inject: [from("src/jsx.js").pathname],
  charset: "utf8",
  drop: ["console"],
  legalComments: "none",
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) await copyFile(from(`src/${name}`), new URL(name, target));

const licences = [];
for (const name of ["preact", "marked", "dompurify"]) {
  const file = (path) => readFile(from(`node_modules/${name}/${path}`), "utf8");
  const { version } = JSON.parse(await file("package.json"));
  const text = name === "dompurify" ? "Under the Apache License 2.0, as kvern is.\n" : await file("LICENSE");
  licences.push(`page.js contains ${name} ${version}.\n\n${text}`);
}
await writeFile(new URL("licences.txt", target), licences.join("\n"));

const size = gzipSync(await readFile(new URL("page.js", target)), { level: 9 }).length;
if (size > LIMIT) throw new Error(`page.js has ${size} bytes when compressed: ${LIMIT} are allowed`);
console.log(`page.js: ${size} bytes compressed`);
