// Shows the trace that stands in the element around this script, and steps through it.
(() => {
  "use strict";
  const root = document.currentScript.parentElement;
  const trace = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
  const { events, arrays, grid, block } = trace;
  const perBlock = block[0] * block[1] * block[2];

  const add = (parent, tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const dimensions = (sizes) => sizes.filter((n, i) => n > 1 || i === 0).join(" × ");
  const place = (n, sizes) => {
    const all = [n % sizes[0], Math.floor(n / sizes[0]) % sizes[1], Math.floor(n / sizes[0] / sizes[1])];
    const used = sizes[2] > 1 ? 3 : sizes[1] > 1 ? 2 : 1;
    return used > 1 ? `(${all.slice(0, used).join(", ")})` : `${n}`;
  };
  const blocks = [...new Set(events.map((event) => event.block))].sort((a, b) => a - b);
  const nameOf = (of, thread) =>
    `thread ${place(thread, block)}${blocks.length > 1 ? ` of block ${place(of, grid)}` : ""}`;
  const hue = (thread) => Math.round((thread * 137.508) % 360);

  // ---- the state, and how each event changes it; what it was before is kept with the event ----
  const threads = new Map();  // "block.thread": state
  const cells = new Map();    // "array.index": {value, writer, reader}
  for (const of of blocks) for (let t = 0; t < perBlock; ++t) threads.set(`${of}.${t}`, "not begun");
  arrays.forEach((array, a) => array.cells.forEach(([index, value]) => {
    cells.set(`${a}.${index}`, { value: array.space === "shared" || value === null ? "?" : value, writer: -1, reader: -1 });
  }));
  const touched = (event) => event.values ? event.values.map((_, i) => `${event.array}.${event.index + i}`) : [];

  let at = -1;  // the last event that has happened
  const dirty = new Set();
  const put = (map, key, value, undo) => {
    if (undo) undo.push([map, key, map.get(key)]);
    map.set(key, value);
    dirty.add(`${map === threads ? "t" : "c"}${key}`);
  };
  const happen = (event) => {
    const undo = [];
    if (event.what === "go on") {
      for (const t of event.threads) {
        if (threads.get(`${event.block}.${t}`) !== "exited") put(threads, `${event.block}.${t}`, "running", undo);
      }
    } else {
      const state = event.what === "exit" ? "exited" : event.what === "wait" ? "waiting" : "running";
      put(threads, `${event.block}.${event.thread}`, state, undo);
    }
    touched(event).forEach((key, i) => {
      const old = cells.get(key) || { value: "?", writer: -1, reader: -1 };
      const now = { ...old };
      if (event.what !== "write") now.reader = event.thread;
      if (event.what !== "read") now.writer = event.thread;
      const unwritten = arrays[event.array].space === "shared" && now.writer < 0;
      now.value = unwritten ? "?" : event.values[i];
      put(cells, key, now, undo);
    });
    event.undo = undo;
  };
  const go = (to) => {
    to = Math.max(-1, Math.min(events.length - 1, to));
    while (at < to) happen(events[++at]);
    while (at > to) for (const [map, key, value] of events[at--].undo.reverse()) put(map, key, value);
    show();
  };

  // ---- words ----
  const element = (event) => {
    const array = arrays[event.array];
    const name = (index) => {
      const shape = array.shape || [];
      const parts = [];
      for (let d = shape.length - 1; d > 0; --d) { parts.unshift(index % shape[d]); index = Math.floor(index / shape[d]); }
      return `${array.name}[${[index, ...parts].join("][")}]`;
    };
    const n = event.values.length;
    return n > 1 ? `${name(event.index)} to ${name(event.index + n - 1)}` : name(event.index);
  };
  const words = (event) => {
    if (event.what === "go on") {
      const n = event.threads.length;
      const got = event.gets ? `; thread ${event.threads[0]} gets ${event.gets[0]}` : "";
      return n > 1 ? `${n} threads of block ${place(event.block, grid)} have met and go on${got}`
                   : `${nameOf(event.block, event.threads[0])} goes on${got}`;
    }
    const who = nameOf(event.block, event.thread);
    const values = (event.values || []).join(", ");
    if (event.what === "exit") return `${who} has come to its end`;
    if (event.what === "wait") {
      const gives = "gives" in event ? `, gives ${event.gives} and asks lane ${event.from}` : "";
      return `${who} waits at ${event.name}${gives}`;
    }
    if (event.what === "atomic") return `${who} makes ${event.before.join(", ")} in ${element(event)} ${values}, in one step`;
    return `${who} ${event.what === "read" ? "reads" : "writes"} ${values} ${event.what === "read" ? "from" : "to"} ${element(event)}`;
  };

  // ---- the page ----
  const head = add(root, "div", "kf-head", `${trace.kernel} `);
  add(head, "span", "", `grid ${dimensions(grid)}, block ${dimensions(block)}; blocks ${trace.blocks}, order ${trace.schedule}`);
  const bar = add(root, "div", "kf-bar");
  const control = (text, title, act) => {
    const made = add(bar, "button", "", text);
    made.type = "button";
    made.title = title;
    made.setAttribute("aria-label", title);
    made.onclick = act;
  };
  let chosen = "";  // "block.thread", whose events alone the arrows visit
  const takesPart = (event) => !chosen || (`${event.block}.${event.thread}` === chosen) ||
    (event.threads && chosen === `${event.block}.${event.threads.find((t) => `${event.block}.${t}` === chosen)}`);
  const next = (way, wanted) => {
    let to = at + way;
    while (to >= 0 && to < events.length && !wanted(events[to])) to += way;
    if (to < events.length) go(to);
  };
  const meeting = (event) => event.what === "go on";
  control("|◀", "to the beginning (Home)", () => go(-1));
  control("◀", "a step back (left arrow)", () => next(-1, takesPart));
  control("▶", "a step on (right arrow)", () => next(1, takesPart));
  control("▶▶", "to where threads have met (down arrow)", () => next(1, meeting));
  control("▶|", "to the end (End)", () => go(events.length - 1));
  const slider = add(bar, "input");
  slider.type = "range";
  slider.min = -1;
  slider.max = events.length - 1;
  slider.setAttribute("aria-label", "event");
  slider.oninput = () => go(Number(slider.value));
  const count = add(bar, "span", "kf-note");
  const picker = add(bar, "select");
  picker.setAttribute("aria-label", "threads whose events the arrows visit");
  picker.onchange = () => { chosen = picker.value; redraw(); };
  add(picker, "option", "", "all threads").value = "";
  const said = add(bar, "div", "kf-said");
  said.setAttribute("aria-live", "polite");
  if (trace.error) add(root, "p", "kf-error", trace.error);
  const sides = add(root, "div", "kf-sides");
  const source = add(sides, "pre");
  source.tabIndex = 0;
  source.setAttribute("aria-label", trace.source.name);
  const lines = trace.source.lines.map((text, i) => {
    const line = add(source, "div", "", text || " ");
    line.dataset.n = i + 1;
    return line;
  });
  const state = add(sides, "div");

  const scrolled = (name) => {
    const box = add(state, "div", "kf-scroll");
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", name);
    return box;
  };
  const drawn = new Map();  // "t…" and "c…": elements
  for (const of of blocks) {
    add(state, "h2", "", `Threads of block ${place(of, grid)}`);
    const box = add(scrolled(`threads of block ${place(of, grid)}`), "div", "kf-threads");
    box.style.gridTemplateColumns = `repeat(${Math.min(32, block[1] > 1 ? block[0] : 32, perBlock)}, 16px)`;
    for (let t = 0; t < perBlock; ++t) {
      const one = add(box, "button");
      one.type = "button";
      one.tabIndex = -1;
      one.style.setProperty("--hue", hue(t));
      add(picker, "option", "", nameOf(of, t)).value = `${of}.${t}`;
      one.onclick = () => { picker.value = chosen = chosen === `${of}.${t}` ? "" : `${of}.${t}`; root.focus(); redraw(); };
      drawn.set(`t${of}.${t}`, one);
    }
  }
  arrays.forEach((array, a) => {
    const where = array.space === "shared" ? `shared, of block ${place(array.block, grid)}` : "global";
    add(state, "h2", "", `${array.name}: ${array.type}, ${where}`);
    const shape = array.shape || [];
    const size = shape.reduce((product, n) => product * n, 1);
    const whole = shape.length && size <= 4096;
    const across = shape.length > 1 ? size / shape[0] : 16;
    const indices = whole ? [...Array(size).keys()] : array.cells.map(([index]) => index);
    const box = add(scrolled(`${array.name}, ${where}`), "div", "kf-cells");
    const columns = Math.max(1, Math.min(across, indices.length));
    box.style.gridTemplateColumns = `auto repeat(${columns}, auto)`;
    indices.forEach((index, i) => {
      if (i % columns === 0) add(box, "div", "kf-row", shape.length > 1 ? `[${index / across}]` : `[${index}]`);
      drawn.set(`c${a}.${index}`, add(box, "div", "kf-cell"));
    });
  });
  const key = add(state, "div", "kf-key");
  const legend = (name, text, style) => {
    const one = add(key, "span");
    add(one, "i", name).style.cssText = style || "";
    one.append(` ${text}`);
  };
  legend("", "not begun");
  legend("kf-running", "running");
  legend("kf-waiting", "waits");
  legend("kf-exited kf-running", "has ended");
  legend("kf-running", "cell: colour of the thread that wrote it");
  legend("", "below: that read it", "border-bottom: 3px solid hsl(210 70% 50%)");
  add(state, "p", "kf-note", "Arrows step, down and up go from meeting to meeting. Choose a thread, above or by a click: they then visit its events alone.");

  const draw = (name) => {
    const one = drawn.get(name);
    if (!one) return;
    if (name[0] === "t") {
      const now = threads.get(name.slice(1));
      const [of, t] = name.slice(1).split(".").map(Number);
      one.className = now === "running" ? "kf-running" : now === "waiting" ? "kf-waiting" : now === "exited" ? "kf-running kf-exited" : "";
      one.title = `${nameOf(of, t)}: ${now}`;
      one.setAttribute("aria-label", one.title);
      one.classList.toggle("kf-chosen", name.slice(1) === chosen);
      return;
    }
    const cell = cells.get(name.slice(1));
    if (!cell) return;
    one.textContent = typeof cell.value === "number" ? Number(cell.value.toPrecision(4)) : cell.value;
    one.style.setProperty("--hue", hue(cell.writer));
    one.style.background = cell.writer < 0 ? "" : "var(--mine)";
    one.style.borderBottomColor = cell.reader < 0 ? "" : `hsl(${hue(cell.reader)} 70% 50%)`;
    one.title = `${cell.value}` + (cell.writer < 0 ? "" : `, written by thread ${place(cell.writer, block)}`) +
      (cell.reader < 0 ? "" : `, read by thread ${place(cell.reader, block)}`);
  };
  const redraw = () => { for (const name of drawn.keys()) draw(name); };
  const into = (box, one) => {  // only this box scrolls, never the page
    const outer = box.getBoundingClientRect(), inner = one.getBoundingClientRect();
    if (inner.top < outer.top || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - outer.height / 3;
    if (box !== source && (inner.left < outer.left || inner.right > outer.right)) box.scrollLeft += inner.left - outer.left - outer.width / 3;
  };
  let marked = [];
  const mark = (one, name) => {
    if (!one) return;
    one.classList.add(name);
    marked.push([one, name]);
    into(one.closest("pre, .kf-scroll"), one);
  };
  const show = () => {
    dirty.forEach(draw);
    dirty.clear();
    for (const [one, name] of marked) one.classList.remove(name);
    marked = [];
    slider.value = at;
    count.textContent = `${at + 1} of ${events.length}`;
    said.textContent = "";
    if (at < 0) {
      said.textContent = "Nothing has happened yet.";
      const first = events.find((event) => event.line);
      if (first) into(source, lines[first.line - 1]);
      return;
    }
    const event = events[at];
    said.append(`${words(event)}. `);
    const unwritten = event.what === "read" && arrays[event.array].space === "shared" &&
      touched(event).some((name) => cells.get(name).writer < 0);
    if (unwritten) add(said, "b", "", "Nobody has written it yet. ");
    if ("unordered" in event) {
      const other = events[event.unordered];
      const verb = { read: "read", write: "wrote" }[other.what] || "changed";
      add(said, "b", "", `Nothing orders this after ${nameOf(other.block, other.thread)}, which ${verb} it in line ${other.line}.`);
    }
    if (event.line) mark(lines[event.line - 1], "kf-now");
    if (event.what !== "go on") mark(drawn.get(`t${event.block}.${event.thread}`), "kf-on");
    for (const name of touched(event)) mark(drawn.get(`c${name}`), "kf-on");
  };
  root.addEventListener("keydown", (pressed) => {
    if ([slider, picker].includes(pressed.target) || pressed.ctrlKey || pressed.altKey || pressed.metaKey) return;
    const acts = {
      ArrowRight: () => next(1, takesPart), ArrowLeft: () => next(-1, takesPart),
      ArrowDown: () => next(1, meeting), ArrowUp: () => next(-1, meeting),
      Home: () => go(-1), End: () => go(events.length - 1),
    };
    if (!(pressed.key in acts)) return;
    pressed.preventDefault();
    acts[pressed.key]();
  });
  redraw();
  const asked = /^#event=(\d+)$/.exec(location.hash);  // a link to an event, counted from 1
  go(asked ? Number(asked[1]) - 1 : -1);
})();
