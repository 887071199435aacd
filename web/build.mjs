// Bundles src/ into the files that the server serves, with the licences of what is inside: into src/kvern/server/page, or
// into the folder that is named.
import { copyFile, readFile, writeFile } from "node:fs/promises";
import { fileURLToPath, pathToFileURL } from "node:url";
import { build } from "esbuild";

const from = (name) => new URL(name, import.meta.url);
const target = process.argv[2] ? pathToFileURL(`${process.argv[2]}/`) : from("../src/kvern/server/page/");

await build({
  entryPoints: { page: fileURLToPath(from("src/main.jsx")) },
  outdir: fileURLToPath(target),
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsxFactory: "h",
  jsxFragment: "Fragment",
  inject: [fileURLToPath(from("src/jsx.js"))],
  charset: "utf8",
  drop: ["console"],
  legalComments: "none",
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) await copyFile(from(`src/${name}`), new URL(name, target));

const licences = [];
for (const name of Object.keys(JSON.parse(await readFile(from("package.json"), "utf8")).dependencies)) {
  const file = (path) => readFile(from(`node_modules/${name}/${path}`), "utf8");
  const { version } = JSON.parse(await file("package.json"));
  const text = name === "dompurify" ? "Under the Apache License 2.0, as kvern is.\n" : await file("LICENSE");
  licences.push(`page.js contains ${name} ${version}.\n\n${text}`);
}
await writeFile(new URL("licences.txt", target), licences.join("\n"));
