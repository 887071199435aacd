// Figures as a reader wants them: three digits, and the unit that fits.

const SCALES = [0, 1, 2].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));

export const NONE = "–";
export const number = (value) => (value == null ? NONE : SCALES[value >= 100 ? 0 : value >= 10 ? 1 : 2].format(value));
export const percent = (value) => (value == null ? NONE : `${number(100 * value)} %`);
/** A model's name as a reader wants it: of a path to a file or folder the last part. */
export const modelName = (id) => (/^[./~]|\.gguf$/.test(id ?? "") ? id.replace(/\/+$/, "").split("/").pop() : id);
export function seconds(value) {
  if (value == null) return NONE;
  if (value >= 1) return `${number(value)} s`;
  return value >= 0.001 || value === 0 ? `${number(1e3 * value)} ms` : `${number(1e6 * value)} µs`;
}
