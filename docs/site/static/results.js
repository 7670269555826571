// Results of a page's .results: choices, a plot of one case, a plot of all cases, a table. Figures come from kfResults.
"use strict";

(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const place = document.querySelector(".results");
  const all = window.kfResults ?? [];

  function element(name, attributes = {}, ...children) {
    const plain = ["svg", "g", "rect", "circle", "line", "polyline", "text"].includes(name);
    const made = plain ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  const time = (ms) => (ms >= 1 ? `${ms < 1000 ? ms.toPrecision(3) : Math.round(ms)} ms` : `${(1000 * ms).toPrecision(3)} µs`);
  const dtype = (one) => one.case.split(", ").at(-1);
  const figure = (value) => (value == null ? "–" : `${+value.toPrecision(3)}`);
  const described = (row) =>
    `${row.impl}: ${row.correct ? time(row.ms) : "wrong result"}, ${figure(row.gb_s)} GB/s, ` +
    `${figure(row.tflop_s)} TFLOP/s, ${figure(row.percent_of_ceiling)} % of the ceiling`;

  const said = element("p", { class: "said", "aria-live": "polite" });
  function saying(mark, text) {
    mark.setAttribute("tabindex", "0");
    mark.setAttribute("role", "img");
    mark.setAttribute("aria-label", text);
    for (const event of ["pointerenter", "focus"]) mark.addEventListener(event, () => (said.textContent = text));
    return mark;
  }

  const scrolled = (inside) => element("div", { class: "scroll" }, inside);

  // A bar for each rung and peer of a case.
  function bars(one) {
    const height = 24 * one.rows.length + 8;
    const svg = element("svg", { class: "plot", viewBox: `0 0 760 ${height}`, role: "group", "aria-label": `Times of ${one.op}, ${one.case}` });
    const longest = Math.max(...one.rows.map((row) => row.ms));
    for (const [number, row] of one.rows.entries()) {
      const y = 24 * number + 4;
      const wide = Math.max(2, (row.ms / longest) * 470);
      const kind = row.ours ? "ours" : "peer";
      svg.append(element("text", { x: 172, y: y + 14, "text-anchor": "end" }, row.impl));
      svg.append(saying(element("rect", { class: kind, x: 180, y, width: wide, height: 18 }), described(row)));
      svg.append(element("text", { x: 186 + wide, y: y + 14 }, row.correct ? time(row.ms) : "wrong result"));
    }
    return svg;
  }

  // A line for each rung and peer through all cases with the same bound and dtype, by the bytes that they move.
  function lines(cases, bound) {
    const rate = bound === "memory" ? "gb_s" : "tflop_s";
    const unit = bound === "memory" ? "GB/s" : "TFLOP/s";
    const size = { wide: 760, high: 320, left: 60, bottom: 36, top: 10, right: 10 };
    const low = Math.min(...cases.map((one) => one.bytes));
    const high = Math.max(...cases.map((one) => one.bytes), low * 2);
    const best = Math.max(...cases.flatMap((one) => one.rows.map((row) => row[rate] ?? 0)));
    const x = (bytes) => size.left + (Math.log(bytes / low) / Math.log(high / low)) * (size.wide - size.left - size.right);
    const y = (value) => size.high - size.bottom - (value / best) * (size.high - size.bottom - size.top);
    const svg = element("svg", { class: "plot", viewBox: `0 0 ${size.wide} ${size.high}`, role: "group", "aria-label": `${unit} by bytes that have to move` });
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      svg.append(element("line", { class: "axis", x1: size.left, x2: size.wide - size.right, y1: y(part * best), y2: y(part * best) }));
      svg.append(element("text", { x: size.left - 6, y: y(part * best) + 4, "text-anchor": "end" }, figure(part * best)));
    }
    const bySize = [...cases].sort((a, b) => a.bytes - b.bytes);
    for (const [one, anchor] of [[bySize[0], "start"], [bySize.at(-1), "end"]]) {
      svg.append(element("text", { x: x(one.bytes), y: size.high - 18, "text-anchor": anchor }, one.moved));
    }
    svg.append(element("text", { x: size.wide / 2, y: size.high - 4, "text-anchor": "middle" }, `${unit} by the bytes that have to move, logarithmic`));
    for (const impl of new Set(bySize.flatMap((one) => one.rows.map((row) => row.impl)))) {
      const found = bySize.flatMap((one) => one.rows.filter((row) => row.impl === impl).map((row) => [one, row]));
      const kind = found[0][1].ours ? "ours" : "peer";
      const points = found.map(([one, row]) => `${x(one.bytes)},${y(row[rate] ?? 0)}`).join(" ");
      const group = element("g", {}, element("polyline", { class: kind, points }));
      for (const [one, row] of found) {
        const mark = element("circle", { class: kind, cx: x(one.bytes), cy: y(row[rate] ?? 0), r: 4 });
        group.append(saying(mark, `${one.case}: ${described(row)}`));
      }
      const others = (faded) => () => {
        for (const other of svg.querySelectorAll("g")) other.classList.toggle("faded", faded && other !== group);
      };
      for (const event of ["pointerover", "focusin"]) group.addEventListener(event, others(true));
      for (const event of ["pointerout", "focusout"]) group.addEventListener(event, others(false));
      svg.append(group);
    }
    return svg;
  }

  function table(one) {
    const head = ["rung or peer", "time", "GB/s", "TFLOP/s", "% of ceiling"].map((name) => element("th", { scope: "col" }, name));
    const rows = one.rows.map((row) => {
      const name = row.page ? element("a", { href: place.dataset.root + row.page }, row.impl) : row.impl;
      const cells = [row.correct ? time(row.ms) : "wrong result", figure(row.gb_s), figure(row.tflop_s), figure(row.percent_of_ceiling)];
      return element("tr", {}, element("td", {}, name), ...cells.map((text) => element("td", {}, text)));
    });
    const made = element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
    makeSortable(made);
    return scrolled(made);
  }

  const shown = element("div");
  const choices = {};
  function choice(name, values, chosen) {
    choices[name] = chosen && values.includes(chosen) ? chosen : values[0];
    const select = element("select", {}, ...values.map((value) => element("option", { value }, value)));
    select.value = choices[name];
    select.addEventListener("change", () => {
      choices[name] = select.value;
      draw();
    });
    return element("label", {}, `${name} `, select);
  }
  function draw() {
    const unique = (values) => [...new Set(values)];
    const inputs = [];
    if (!place.dataset.op) inputs.push(choice("op", unique(all.map((one) => one.op)), choices.op));
    const ofOp = all.filter((one) => one.op === (place.dataset.op ?? choices.op));
    inputs.push(choice("GPU", unique(ofOp.map((one) => one.gpu)), choices.GPU ?? ofOp.at(-1).gpu));
    const cases = ofOp.filter((one) => one.gpu === choices.GPU);
    const largest = cases.reduce((a, b) => (b.bytes > a.bytes ? b : a));
    inputs.push(choice("case", cases.map((one) => one.case), choices.case ?? largest.case));
    const one = cases.find((other) => other.case === choices.case);
    const alike = cases.filter((other) => other.bound === one.bound && dtype(other) === dtype(one));
    said.textContent = `${one.moved} have to move. Blue: our rungs, grey: peers.`;
    const more = alike.length > 1 ? [scrolled(lines(alike, one.bound))] : [];
    shown.replaceChildren(...inputs, scrolled(bars(one)), said, table(one), ...more);
  }
  document.addEventListener("DOMContentLoaded", () => {
    place.replaceChildren(shown);
    draw();
  });
})();
