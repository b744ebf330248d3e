// Copies of the page's templates, and numbers as people read them.

/** Copy a template; `part(name)` finds what has `data-is="name"` in it. */
export function copyOf(template) {
  const root = document.getElementById(template).content.firstElementChild.cloneNode(true);
  const parts = new Map(Array.from(root.querySelectorAll("[data-is]"), (part) => [part.dataset.is, part]));
  return { root, part: (name) => parts.get(name) };
}

/** A count, with few digits. */
export function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(value < 1e7 ? 1 : 0)} M`;
  if (value >= 1e5) return `${Math.round(value / 1e3)} k`;
  return value < 10 ? String(Math.round(value * 10) / 10) : Math.round(value).toLocaleString("en");
}

/** A time span in the largest unit that tells it well. */
export function seconds(value) {
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172_800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86_400)} days`;
}
