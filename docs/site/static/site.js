// What scrolls can be reached by keys, and the tables of results can be sorted.
"use strict";

// A cell's number with its unit, in one unit; -Infinity where it has none.
const UNITS = { ns: 1e-9, µs: 1e-6, ms: 1e-3, s: 1, KB: 1e3, MB: 1e6, GB: 1e9 };
function valueOf(text) {
  const found = text.trim().match(/^(-?[\d.,]+)\s*(\S*)/);
  return found ? parseFloat(found[1].replaceAll(",", "")) * (UNITS[found[2]] ?? 1) : -Infinity;
}

function sortBy(table, column, heading) {
  const up = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows].map((row) => [row, row.cells[column].textContent.trim()]);
  const numbers = rows.some(([, text]) => /^-?[\d.,]+/.test(text));
  const compared = (a, b) => (numbers ? valueOf(a) - valueOf(b) || 0 : a.localeCompare(b, "en", { numeric: true }));
  rows.sort((a, b) => compared(a[1], b[1]) * (up ? 1 : -1));
  table.tBodies[0].append(...rows.map(([row]) => row));
}

function makeSortable(table) {
  for (const [column, heading] of [...(table.tHead?.rows[0].cells ?? [])].entries()) {
    if (!heading.textContent.trim()) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sortBy(table, column, heading));
    heading.append(button);
  }
}

document.addEventListener("DOMContentLoaded", () => {
  // What the theme leaves without a name.
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = "2";
  for (const [drawer, name] of [[".sidebar-drawer", "All pages"], [".toc-drawer", "On this page"]]) {
    document.querySelector(drawer)?.setAttribute("aria-label", name);
  }
  for (const heading of document.querySelectorAll("article th")) {
    if (!heading.textContent.trim()) heading.replaceWith(document.createElement("td"));
  }
  if (/\/results\/index\.html$/.test(location.pathname)) document.querySelectorAll("article table").forEach(makeSortable);
  for (const one of document.querySelectorAll("article pre, article .table-wrapper, article .scroll")) {
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
  }
});
